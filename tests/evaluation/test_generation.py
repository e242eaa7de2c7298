"""Generation with a KV cache gives the same tokens as transformers, and as forward passes over the whole text."""

import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fa_kernels import flash_attn_with_kvcache
from fa_train.data.sources.chats import ChatCorpus
from fa_train.data.sources.corpus import is_held_out
from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.tokenizer import HFTokenizer
from fa_train.evaluation import generation
from fa_train.evaluation.generation import Sample, chat_prompt, generate, sampled_chat, stop_tokens
from fa_train.models.attention import chunked_attention, flash_attention, naive_attention, sdpa_attention
from fa_train.models.config import Family
from fa_train.models.gpt import GPT
from fa_train.models.origin import Origin
from fa_train.parallel.context.attention import ContextAttention
from scripts.answers import answers
from scripts.generate import main
from tests.data.support.chats import CHATML, chat_tokenizer, save_tokenizer, write_jsonl
from tests.models.support.gpt import build
from tests.support.runs import start_and_finish
from tests.support.training import command_line, tiny

VOCAB = 50
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def small(attention=naive_attention, **options) -> GPT:
    """Builds a model with random weights that are so large that each token depends on all earlier tokens."""
    sizes = {"vocab_size": VOCAB, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "max_seq_len": 16}
    model = build(**{"attention": attention, "init": "llama", "rope_theta": 100.0, "tied": False} | sizes | options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def continuation(model: GPT, n: int) -> list[int]:
    """Returns the `n` most likely next tokens, each computed from the logits of the whole text so far."""
    stream = list(PROMPT)
    for _ in range(n):
        stream.append(int(model(torch.tensor(stream, device=model.head.weight.device))[-1].argmax()))
    return stream[len(PROMPT) :]


MODELS = [
    pytest.param({}, id="plain"),
    pytest.param({"family": Family(windows=(5, None))}, id="window"),
    pytest.param({"family": Family(softcap=2.0, softmax_scale=0.5, logit_softcap=5.0)}, id="soft-caps"),
    pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, id="yarn"),
    pytest.param({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, id="dynamic"),
    pytest.param({"positions": "learned", "max_seq_len": 40, "norm": "layernorm"}, id="learned-positions"),
]


@pytest.mark.parametrize("options", MODELS)
def test_each_token_is_the_whole_streams_most_likely(options):
    expected = continuation(small(**options), 12)
    assert len(set(expected)) > 3, "the text must not repeat one token"
    assert generate(small(**options), PROMPT, max_new_tokens=12) == expected
    assert generate(small(**options), PROMPT, max_new_tokens=12, cached=False) == expected


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"windows": (5, None)}, {"softcap": 2.0, "softmax_scale": 0.5}], ids=str)
def test_flash_reads_the_cache(options, device, monkeypatch):
    read = []

    def counted(*arguments, **settings):
        read.append(settings["cache_seqlens"])
        return flash_attn_with_kvcache(*arguments, **settings)

    monkeypatch.setattr(generation, "flash_attn_with_kvcache", counted)
    model = small(flash_attention, family=Family(**options), n_layers=2).to(device)
    expected = continuation(small(family=Family(**options)).to(device), 3)
    assert generate(model, PROMPT, max_new_tokens=3) == expected
    assert read == [8, 8, 9, 9], "two layers read the cache for each of two tokens"


@pytest.mark.parametrize("attention", [sdpa_attention, chunked_attention], ids=["sdpa", "chunked"])
def test_every_attention_generates(attention):
    bound = {"chunk_size": 4} if attention is chunked_attention else {}
    assert generate(small(partial(attention, **bound)), PROMPT, max_new_tokens=6) == continuation(small(), 6)


@pytest.mark.parametrize("cached", [False, True], ids=["all-tokens", "cache"])
def test_a_model_that_shares_streams_in_training_generates_alone(cached):
    model = small()
    model.share_context("a group that does not exist")
    assert generate(model, PROMPT, max_new_tokens=6, cached=cached) == continuation(small(), 6)
    assert all(isinstance(block.attention.attend, ContextAttention) for block in model.blocks)


def test_the_model_and_torchs_random_numbers_stay_as_they_were():
    model = small().train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    before, state = model(torch.tensor(PROMPT)), torch.get_rng_state()
    generate(model, PROMPT, max_new_tokens=3, temperature=1.0)
    assert [module.training for module in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(model(torch.tensor(PROMPT)), before, rtol=0, atol=0)
    assert all(block.attention.attend is naive_attention for block in model.blocks)


@pytest.mark.parametrize("convert", [tuple, np.array, torch.tensor])
def test_a_prompt_may_be_an_array(convert):
    assert generate(small(), convert(PROMPT), max_new_tokens=3) == continuation(small(), 3)
    with pytest.raises(ValueError, match="at least 1 token"):
        generate(small(), convert(PROMPT)[:0], max_new_tokens=3)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        generate(small(), convert([1.5, 2.0]), max_new_tokens=3)


def test_a_compiled_model_is_not_compiled_for_each_length():
    def refuses(graph, inputs):
        raise AssertionError("compiled")

    model = small()
    for block in model.blocks:
        block.compile(backend=refuses)
    assert generate(model, PROMPT, max_new_tokens=3) == continuation(small(), 3)


def ask(question: str) -> dict[str, str]:
    return {"role": "user", "content": question}


def test_the_sampled_chat_is_held_out_and_has_a_question(tmp_path, capsys):
    answer = {"role": "assistant", "content": "yes"}
    without_question = [{"messages": [answer]}]
    chats = without_question + [{"messages": [ask(str(i)), answer, ask("more"), answer]} for i in range(200)]
    path = write_jsonl(tmp_path / "chats.jsonl", chats)
    encoder = ChatEncoder(HFTokenizer(save_tokenizer(tmp_path / "tokenizer")))
    sampled = sampled_chat(str(path), encoder)
    held_out = next(i for i, (key, _) in enumerate(ChatCorpus(str(path)).documents()) if i and is_held_out(key))
    assert sampled.messages == chats[held_out]["messages"][:1] and held_out > 1 and sampled.tools is None
    pairs = [{"prompt": prompt, "completion": "b"} for prompt in ("z", "a")]
    # none of the few rows of this file is held out for validation
    few = write_jsonl(tmp_path / "few.jsonl", [*pairs, *without_question, {"text": "no chat"}])
    assert sampled_chat(str(few), encoder).messages == [ask("a")]
    assert not capsys.readouterr().out, "only the packing report says that rows are skipped"
    assert sampled_chat(str(write_jsonl(tmp_path / "none.jsonl", without_question)), encoder) is None


def test_a_chat_that_the_template_rejects_is_not_sampled_unless_there_is_no_other(tmp_path):
    refusing = "{% for m in messages if m.content in ('a', 'c') %}{{ raise_exception('no') }}{% endfor %}" + CHATML
    chat_tokenizer(refusing).save_pretrained(tmp_path)
    encoder = ChatEncoder(HFTokenizer(str(tmp_path)))
    for prompts, sampled in [("abc", "b"), ("ac", "a")]:
        path = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": prompt, "completion": "yes"} for prompt in prompts])
        assert sampled_chat(str(path), encoder).messages == [ask(sampled)]


def test_the_prompt_of_a_chat_has_the_template_variables_of_its_row(tmp_path):
    chat_tokenizer("{{ mood }}" + CHATML).save_pretrained(tmp_path)
    encoder = ChatEncoder(HFTokenizer(str(tmp_path)))
    variables = {"mood": "sunny", "tools": [], "tokenize": True, "continue_final_message": True}
    row = {"prompt": "2?", "completion": "4", "chat_template_kwargs": variables}
    chat = sampled_chat(str(write_jsonl(tmp_path / "chats.jsonl", [row])), encoder)
    prompt = chat_prompt(encoder, chat.messages, chat.tools, chat.template_kwargs)
    wanted = "sunny<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n"
    assert encoder.tokenizer.hf.decode(prompt) == wanted


def test_a_seed_gives_one_text():
    model = small()
    draws = [generate(model, PROMPT, max_new_tokens=20, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    uncached = generate(model, PROMPT, max_new_tokens=20, temperature=2.0, seed=1, cached=False)
    assert uncached == draws[0]


@pytest.mark.parametrize("temperature", [1e-37, 1e-40, 1e-300, 5e-324])
def test_a_tiny_temperature_chooses_the_most_likely(temperature):
    model = small()
    assert generate(model, PROMPT, max_new_tokens=5, temperature=temperature) == continuation(model, 5)


@pytest.mark.slow
def test_top_p_leaves_the_most_likely():
    model = small()
    probabilities = (model(torch.tensor(PROMPT))[-1] / 1.5).softmax(-1)
    order = probabilities.argsort(descending=True)
    enough = int((probabilities[order].cumsum(0) < 0.5).sum()) + 1
    settings = {"max_new_tokens": 1, "temperature": 1.5}
    drawn = {generate(model, PROMPT, seed=seed, top_p=0.5, **settings)[0] for seed in range(200)}
    free = {generate(model, PROMPT, seed=seed, **settings)[0] for seed in range(200)}
    assert drawn <= set(order[:enough].tolist()) and len(drawn) > 1
    assert len(free) > enough
    assert generate(model, PROMPT, max_new_tokens=5, temperature=1.0, top_p=1e-6) == continuation(model, 5)


def test_top_k_leaves_the_most_likely():
    model = small()
    probabilities, order = (model(torch.tensor(PROMPT))[-1].detach() / 1.5).softmax(-1).sort(descending=True)

    def drawn(top_p: float) -> set[int]:
        draws = (
            generate(model, PROMPT, max_new_tokens=1, temperature=1.5, top_k=3, top_p=top_p, seed=seed)
            for seed in range(60)
        )
        return {draw[0] for draw in draws}

    assert drawn(1.0) == set(order[:3].tolist())
    first = float(probabilities[0] / probabilities[:3].sum())  # after top_k, the probabilities sum to 1
    assert drawn(first - 0.01) == {int(order[0])} and drawn(first + 0.01) == set(order[:2].tolist())


def test_stop_tokens_end_the_text_and_are_in_it():
    model = small()
    whole = continuation(model, 12)
    ended = generate(model, PROMPT, max_new_tokens=12, stop={whole[3]})
    assert ended == whole[: whole.index(whole[3]) + 1]
    assert stop_tokens(model, 7) == {7} and stop_tokens(model, None) == set()
    model.origin = Origin({}, {"eos_token_id": [8, 9]})
    assert stop_tokens(model, 7) == {7, 8, 9}
    for generation_config in (None, {"temperature": 0.6}):
        model.origin = Origin({"eos_token_id": [8, 9]}, generation_config)
        assert stop_tokens(model, 7) == {7, 8, 9}
    model.origin = Origin({"eos_token_id": 0}, {"eos_token_id": 9})
    assert stop_tokens(model, None) == {9}
    model.origin = Origin({"eos_token_id": 0}, None)
    assert stop_tokens(model, None) == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"prompt": []}, "at least 1 token", id="empty"),
        pytest.param({"prompt": [VOCAB]}, "vocab_size=50; got 50", id="vocabulary"),
        pytest.param({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0", id="tokens"),
        pytest.param({"temperature": -1.0}, "temperature must be finite and at least 0; got -1.0", id="temperature"),
        pytest.param({"top_k": 0}, "top_k must be at least 1; got 0", id="top-k"),
        pytest.param({"top_p": 0.0}, "top_p must be more than 0 and at most 1; got 0.0", id="top-p"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        generate(small(), **({"prompt": PROMPT, "max_new_tokens": 3} | options))


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = small()
    with pytest.raises(ValueError, match="the model must have weights; got a model on the meta device"):
        generate(model, PROMPT, max_new_tokens=1)


@pytest.mark.parametrize(
    ("n_prompt", "n_new", "advice"),
    [
        pytest.param(8, 9, "Set max_new_tokens to at most 8", id="one-token-over"),
        pytest.param(16, 128, "Shorten the prompt", id="no-room"),
    ],
)
def test_a_text_beyond_learned_positions_says_what_to_set(n_prompt, n_new, advice):
    message = f"plus max_new_tokens={n_new} must be at most model.max_seq_len=16 tokens; got {n_prompt + n_new}"
    with pytest.raises(ValueError, match=f"^the prompt's {n_prompt} tokens {message}. {advice}$"):
        generate(small(positions="learned"), [1] * n_prompt, max_new_tokens=n_new)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.5, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "question",
    [{"prompt": ["the weather"]}, {"chat": ["2 + 2?"]}, {"chat": ["2 + 2?"], "system": "be brief."}],
    ids=["prompt", "chat", "system"],
)
def test_the_text_is_transformers(folder, question):
    tokenizer, theirs = chat_tokenizer(), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if "chat" in question:
        messages = [{"role": "system", "content": question["system"]}] if "system" in question else []
        messages += [{"role": "user", "content": question["chat"][0]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt").input_ids
    else:
        ids = tokenizer(question["prompt"][0], return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    exact = theirs.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    expected = tokenizer.decode(exact, skip_special_tokens=True)
    [text] = answers(str(folder), max_new_tokens=16, device="cpu", **question)
    assert text == expected != ""


@pytest.mark.parametrize(
    ("added", "kept"),
    [
        pytest.param("<|im_start|> $A <|im_end|>", "<|im_start|>", id="before-and-after"),
        pytest.param("$A <|im_end|>", "", id="after"),
        pytest.param("<|im_end|> $A", "<|im_end|>", id="before"),
    ],
)
@pytest.mark.parametrize("text", ["the weather", "the weather<|im_end|>"])
def test_a_prompt_has_no_eos_that_the_tokenizer_adds(added, kept, text, folder, tmp_path, monkeypatch):
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = chat_tokenizer()
    special = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|im_start|>", "<|im_end|>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=added, special_tokens=special)
    tokenizer.save_pretrained(tmp_path / "model")
    prompts: list[list[int]] = []
    monkeypatch.setattr("scripts.answers.generate", lambda model, prompt, **options: prompts.append(prompt) or [5])
    answers(str(tmp_path / "model"), prompt=[text], max_new_tokens=1, device="cpu")
    assert prompts == [tokenizer(kept + text, add_special_tokens=False).input_ids]


def test_the_command_prints_the_answer_or_the_error(folder, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate", str(folder), "--device", "cpu", *arguments])
        main()

    run("--prompt", "2 + 2", "--max-new-tokens", "8", "--temperature", "0.9", "--seed", "5")
    given = {"max_new_tokens": 8, "temperature": 0.9, "seed": 5, "device": "cpu"}
    first, second = answers(str(folder), prompt=["2 + 2", "rain"], **given)
    assert capsys.readouterr().out == first + "\n"
    run("--prompt", "2 + 2", "--prompt", "rain", "--max-new-tokens", "8", "--temperature", "0.9", "--seed", "5")
    assert capsys.readouterr().out == f"--- 2 + 2\n{first}\n\n--- rain\n{second}\n\n"
    with pytest.raises(SystemExit, match=r"error: top_p must be more than 0 and at most 1; got 2.0"):
        run("--chat", "hi", "--temperature", "1", "--top-p", "2")
    with pytest.raises(SystemExit, match=r"error: top_k must be at least 1; got 0"):
        run("--chat", "hi", "--temperature", "1", "--top-k", "0")
    with pytest.raises(SystemExit, match=r"error: --top-k and --top-p need --temperature"):
        run("--chat", "hi", "--top-k", "5")
    with pytest.raises(SystemExit, match=r"error: --system needs --chat; got --system 'be brief' and --prompt"):
        run("--prompt", "hi", "--system", "be brief")
    for given in (("--prompt", "caf\udce9"), ("--chat", "caf\udce9"), ("--chat", "hi", "--system", "caf\udce9")):
        with pytest.raises(SystemExit, match=r"error: --prompt, --chat and --system must be UTF-8; got 'caf.udce9'"):
            run(*given)


def test_the_model_must_have_a_tokenizer(folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    for file in model.glob("tokenizer*"):
        file.unlink()
    message = f"the argument model must be a folder or hub name with a tokenizer; got {model}: "
    with pytest.raises(ValueError, match=message):
        answers(str(model), prompt=["hi"], max_new_tokens=1, device="cpu")


def test_chat_needs_a_chat_template(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    message = f"^--chat: the tokenizer of {tmp_path}/model must have a chat template; it has none. Use --prompt$"
    with pytest.raises(ValueError, match=message):
        answers(str(tmp_path / "model"), chat=["hi"], max_new_tokens=1, device="cpu")


def test_an_error_in_the_template_names_the_template(tmp_path):
    chat_tokenizer("{{ 1 // 0 }}" + CHATML).save_pretrained(tmp_path)
    encoder = ChatEncoder(HFTokenizer(str(tmp_path)))
    with pytest.raises(ValueError, match=rf"^{tmp_path}'s chat template rejects a prompt of .*: integer division"):
        chat_prompt(encoder, [{"role": "user", "content": "hi"}], None)


def test_a_prompt_that_the_template_rejects_is_an_error_of_one_line(folder, tmp_path, monkeypatch):
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    chat_tokenizer(refusal + CHATML).save_pretrained(model)
    message = f"{model}'s chat template rejects a prompt of messages with the roles system, user: no system prompts"
    monkeypatch.setattr(
        sys, "argv", ["generate", str(model), "--chat", "hi", "--system", "be brief", "--device", "cpu"]
    )
    with pytest.raises(SystemExit, match=f"^error: {message}$"):
        main()
    path = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": "2 + 2?", "completion": "4", "system": "be brief."}])
    trainer = SimpleNamespace(is_global_zero=True, print=print, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=f"^{message}$"):
        Sample(str(path), str(model), None, 4)(trainer, SimpleNamespace(model=small()))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        pytest.param("../nope", "a name on the hub; got ../nope, which does not exist$", id="missing"),
        pytest.param("run", "a folder without config.json. Its newest checkpoint is run/checkpoints/x.ckpt$", id="run"),
        pytest.param("adapter", "a whole model; got adapter, an adapter. Give the checkpoint", id="adapter"),
    ],
)
def test_a_wrong_model_is_named_as_an_argument(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints" / "x.ckpt").mkdir(parents=True)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"^the argument model must be .*{message}"):
        answers(model, prompt=["hi"], max_new_tokens=1, device="cpu")


@pytest.mark.parametrize(
    ("device", "n_gpus", "message"),
    [
        pytest.param("cuda", 0, "must be cpu on a machine without a CUDA GPU; got cuda", id="no-gpu"),
        pytest.param("cuda:2", 2, "must be cpu or one of cuda:0, cuda:1; got cuda:2", id="too-few-gpus"),
        pytest.param("foo", 0, "must be cpu or cuda; got foo", id="unknown"),
        pytest.param("mps", 0, "must be cpu or cuda; got mps", id="mps"),
        pytest.param("meta", 0, "must be cpu or cuda; got meta", id="meta"),
    ],
)
def test_a_device_that_is_not_there_is_named(device, n_gpus, message, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    with pytest.raises(ValueError, match=f"--device {message}"):
        answers(str(folder), prompt=["hi"], max_new_tokens=1, device=device)


def test_there_is_no_sample_if_its_prompt_exceeds_learned_positions(folder, tmp_path):
    path = write_jsonl(tmp_path / "chats.jsonl", [{"prompt": "2 + 2?", "completion": "4"}])
    printed: list[str] = []
    trainer = SimpleNamespace(is_global_zero=True, print=printed.append, default_root_dir=tmp_path)
    model = small(positions="learned", max_seq_len=16)
    Sample(str(path), str(folder), None, 32)(trainer, SimpleNamespace(model=model))
    [line] = printed
    assert line.startswith("no sample: its prompt has ") and "max_seq_len=16 tokens" in line
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.slow
def test_a_checkpoint_of_a_run_without_a_tokenizer_cannot_answer(tmp_path):
    folder = start_and_finish(tmp_path, *tiny(tmp_path, "max_steps=1", "model=llama_1b", "data=synthetic"))
    [checkpoint] = folder.rglob("*.ckpt")
    with pytest.raises(ValueError, match=f"got {checkpoint}, whose data have no tokenizer or"):
        answers(str(checkpoint), prompt=["hi"], max_new_tokens=1, device="cpu")


@pytest.mark.slow
def test_a_checkpoint_of_a_run_answers(tmp_path, monkeypatch):
    done = command_line(tmp_path, *tiny(tmp_path), "max_steps=2", "trainer.val_check_interval=2")
    assert done.returncode == 0, done.stderr
    [checkpoint] = tmp_path.rglob("*.ckpt")
    first = answers(str(checkpoint), prompt=["the cat"], max_new_tokens=8, device="cpu", temperature=1.0)
    assert first == answers(str(checkpoint), prompt=["the cat"], max_new_tokens=8, device="cpu", temperature=1.0)
    with pytest.raises(ValueError, match=f"^--chat: the tokenizer of {checkpoint} must have a chat template"):
        answers(str(checkpoint), chat=["hi"], max_new_tokens=8, device="cpu")
    prompts: list[list[int]] = []
    monkeypatch.setattr("scripts.answers.generate", lambda model, prompt, **options: prompts.append(prompt) or [5])
    answers(str(checkpoint), prompt=["the cat", ""], max_new_tokens=8, device="cpu")
    assert prompts == [[256, *b"the cat"], [256]], "bos comes first, as in training"
