"""Exports checkpoints in a form that transformers can load."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from omegaconf import OmegaConf
from safetensors import SafetensorError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from fa_train.config_options import CONF
from fa_train.data.tokens.encoding import TextEncoder
from fa_train.data.tokens.sft import ChatEncoder
from fa_train.data.tokens.tokenizer import HFTokenizer, load_tokenizer
from fa_train.evaluation.generation import chat_prompt
from fa_train.models.attention import naive_attention
from fa_train.models.config import Family
from fa_train.models.hf.export import tokenizer_of, write
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from fa_train.models.hf.weights import save_tensors
from fa_train.models.lora import LoRA, merge
from tests.data.support.chats import CHATML, chat_tokenizer
from tests.models.hf.support.checkpoints import (
    FAMILIES,
    assert_relatively_close,
    assert_same_weights,
    cu_seqlens,
    edit_config,
    theirs,
    tokens,
)
from tests.models.support.gpt import build


@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_is_bit_identical(name, checkpoint, tmp_path):
    folder, exported = checkpoint(name, dtype=torch.bfloat16), tmp_path / "exported"
    save_pretrained(load_pretrained(folder, attention="naive"), exported)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert json_or_bytes(exported / file) == json_or_bytes(folder / file), file
    stream = tokens()
    assert torch.equal(theirs(exported, stream), theirs(folder, stream))


def json_or_bytes(path: Path) -> object:
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_trained_weights_are_exported(name, checkpoint, tmp_path):
    model = load_pretrained(checkpoint(name), attention="naive")
    stream = tokens()
    model(stream, cu_seqlens(), labels=stream.roll(-1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)
        save_pretrained(model, tmp_path / "exported")
        assert_relatively_close(model(stream), theirs(tmp_path / "exported", stream))


def test_adapters_must_be_merged_before_an_export(tmp_path):
    settings = dict(r=2, lora_alpha=4, lora_dropout=0.0, use_rslora=False, quantization=None, path=None)
    model = LoRA(target_modules=["q_proj"], **settings)(build(n_layers=1))
    with pytest.raises(ValueError, match=r"adapters must be merged \(fa_train.models.lora.merge\); got blocks.0"):
        save_pretrained(model, tmp_path / "exported")
    save_pretrained(merge(model), tmp_path / "exported")


def test_an_export_does_not_mix_with_another(checkpoint):
    folder = checkpoint("llama")
    with pytest.raises(
        ValueError, match=r"needs a new folder or one without a model; .* is a file or contains a model"
    ):
        save_pretrained(load_pretrained(folder), folder)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        pytest.param(7e4, "float16", "in torch.float16; got values from .* to 70000. Choose another", id="large"),
        pytest.param(-7e4, "float16", "got values from -70000 to .*. Choose another", id="negative"),
        pytest.param(3.4e38, "bfloat16", "in torch.bfloat16; got values from", id="too-large-for-bfloat16"),
        pytest.param(float("nan"), None, "in torch.float32; got values from nan to nan$", id="nan"),
    ],
)
def test_weights_that_are_not_finite_in_the_written_dtype_are_refused(value, dtype, message, tmp_path):
    model = build()
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[3, 4] = value
    with pytest.raises(ValueError, match=rf"^blocks.1.ffn.down.weight must be finite .*{message}"):
        save_pretrained(model, tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_a_model_without_weights_is_refused_and_makes_no_folder(tmp_path):
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match="the model must have weights; got a model on the meta device"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_rounds_to_the_largest_float16_is_exported(tmp_path):
    model = build()
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[3, 4] = 65519.0
    save_pretrained(model, tmp_path, dtype="float16")
    assert load_pretrained(tmp_path).blocks[1].ffn.down.weight.max() == torch.finfo(torch.float16).max


NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased-tied": {"bias": True, "tied": True, "n_kv_heads": None},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "arcee": {"activation": "gelu"},
    "llama-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_seq_len": 32},
    "gpt2": {"norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True, "n_kv_heads": None},
    "qwen3-own-head-dim": {"qk_norm": True, "n_heads": 3, "head_dim": 8},  # the model's dim, 32, is no multiple of 3
}


@pytest.mark.parametrize("name", NATIVE)
@torch.no_grad()
def test_own_models_are_exported(name, tmp_path):
    model = build(**{"attention": naive_attention, "tied": False} | NATIVE[name])
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == name.partition("-")[0]
    stream = tokens() % 40
    assert_relatively_close(model(stream), theirs(tmp_path, stream))
    again = load_pretrained(tmp_path, attention="naive")
    assert_same_weights(again, model)
    assert torch.equal(again(stream, cu_seqlens()), model(stream, cu_seqlens()))


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        pytest.param({"norm": "layernorm"}, r"\. The model differs from llama in: norm", id="layernorm-and-rope"),
        pytest.param({"positions": "none"}, r"\. The model differs from gpt2 in: .*positions.*", id="no-positions"),
        pytest.param(
            {"qk_norm": True, "activation": "gelu"},
            r"\. The model differs from arcee in: qk_norm",
            id="qk-norm-and-gelu",
        ),
        pytest.param(
            {"family": Family(windows=(4, None))}, r"\. The model differs from llama in: family\.windows", id="windows"
        ),
        pytest.param(
            {"family": Family(softmax_scale=0.5)},
            r"\. The model differs from llama in: family\.softmax_scale",
            id="scale",
        ),
        *(
            pytest.param(
                NATIVE[name] | {"n_heads": 3, "head_dim": 8},
                r" dim=32 n_heads=3 head_dim=8\. In llama, arcee and gpt2, dim must be a multiple of n_heads",
                id=f"{name}-n_heads",
            )
            for name in ("llama", "gpt2")
        ),
        pytest.param(NATIVE["gpt2"] | {"head_dim": 8}, " dim=32 n_heads=2 head_dim=8", id="gpt2-head_dim"),
    ],
)
def test_a_model_of_no_family_is_not_exported(arguments, cause, tmp_path):
    with pytest.raises(ValueError, match=rf"^an export needs the architecture of llama .*; got norm=.*{cause}$"):
        save_pretrained(build(**arguments), tmp_path)
    assert not (tmp_path / "config.json").exists()


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "one": 3, "two": 4}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), bos_token="<s>", eos_token="</s>"
    )


def test_the_tokenizer_is_exported(tmp_path):
    save_pretrained(build(), tmp_path, word_tokenizer())
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("two").input_ids == [4]
    for file in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / file).read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (0, 1), file
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 1


@pytest.mark.parametrize(
    ("own", "exported"), [([1, 38], [1, 38]), ([38, 39], [38, 39, 1]), (1, 1), (38, [38, 1]), (None, 1)], ids=str
)
def test_every_token_that_ends_a_text_is_exported(own, exported, checkpoint, tmp_path):
    folder = edit_config(checkpoint("llama"), eos_token_id=own)
    (folder / "generation_config.json").unlink()
    save_pretrained(load_pretrained(folder), tmp_path / "exported", word_tokenizer())
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "exported").eos_token_id == exported


@pytest.mark.parametrize(
    ("own", "ends", "exported"),
    [
        pytest.param([38], [], [38, 1], id="eos-of-the-tokenizer"),
        pytest.param(38, [4], [38, 1, 4], id="another-end"),
        pytest.param([1], [1], [1], id="no-new-token"),
        pytest.param(None, [4], [1, 4], id="no-end-in-the-checkpoint"),
    ],
)
def test_new_ends_are_added_to_the_generation_config_of_the_base(own, ends, exported, checkpoint, tmp_path):
    folder = edit_config(checkpoint("llama"), eos_token_id=None)
    base = {"eos_token_id": own, "temperature": 0.5, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(base))
    save_pretrained(load_pretrained(folder), tmp_path / "exported", word_tokenizer(), ends=ends)
    assert json.loads((tmp_path / "exported/generation_config.json").read_text()) == base | {"eos_token_id": exported}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.generation_config.eos_token_id == exported


def test_settings_of_generation_in_config_json_are_exported(checkpoint, tmp_path):
    """transformers reads these settings from config.json if there is no generation_config.json."""
    settings = {"repetition_penalty": 1.8, "bad_words_ids": [[5]], "do_sample": True}
    folder = edit_config(checkpoint("llama"), **settings)
    (folder / "generation_config.json").unlink()
    save_pretrained(load_pretrained(folder), tmp_path / "exported")
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(path).generation_config.to_diff_dict()
        for path in (tmp_path / "exported", folder)
    )
    assert ours == {name: value for name, value in theirs.items() if name != "_from_model_config"}
    assert settings.items() <= ours.items()


@pytest.mark.parametrize("option", ["hf", "mix", "stdlib", "text"])
def test_bytes_are_the_tokens_of_the_projects_own_data(option):
    content = OmegaConf.load(CONF / f"data/{option}.yaml")
    tokenizer = tokenizer_of({"data": {"_target_": content._target_, "tokenizer": content.get("tokenizer")}})
    assert tokenizer is not None and tokenizer("A").input_ids == [256, 65]


def test_the_model_card_is_utf8_with_every_locale(tmp_path, monkeypatch):
    """Without an encoding, Path.write_text uses that of the locale, such as ASCII if LANG=C."""
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    config = {
        "model": {}, "data": data_of("text", None) | {"path": "Gespräche.txt"}, "choices": {"data": "text"},
        "seq_len": 8, "batch_size": 4, "seed": 0,
    }  # fmt: skip
    write(build(vocab_size=259), 3, tmp_path / "exported", "Lauf für λ", config, {})
    card = (tmp_path / "exported/README.md").read_bytes().decode()
    assert "# Lauf für λ\n" in card and "| Data | text: Gespräche.txt |" in card


def data_of(option: str, tokenizer: Path | None, *sources: str) -> dict[str, Any]:
    """Returns the config of an option of conf/data. sources: the options of conf/data/source that data=mix mixes."""
    of_sources = {name: {"_target_": OmegaConf.load(CONF / f"data/source/{name}.yaml")._target_} for name in sources}
    target = OmegaConf.load(CONF / f"data/{option}.yaml")._target_
    name = None if tokenizer is None else str(tokenizer)
    return {"_target_": target, "tokenizer": name} | ({"sources": of_sources} if sources else {})


def save_special(folder: Path, single: str | None, **names: str | None) -> Path:
    """Saves a tokenizer.

    single: the template with which the post-processor adds special tokens to a text $A, or None. names: special tokens.
    """
    tokenizer = chat_tokenizer("{{ bos_token or '' }}" + CHATML)
    for name, token in names.items():
        setattr(tokenizer, name, token)
    if single is not None:
        special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>", "<pad>")]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save_pretrained(folder)
    return folder


SPECIAL = [
    pytest.param(None, {"bos_token": "<|im_start|>"}, id="bos-not-added"),
    pytest.param("<|im_start|> $A", {"bos_token": "<|im_start|>"}, id="bos-added"),
    pytest.param("<|im_start|> $A <|im_end|>", {"bos_token": "<|im_start|>"}, id="bos-and-eos-added"),
    pytest.param("$A <|im_end|>", {"bos_token": "<|im_start|>"}, id="eos-added"),
    pytest.param(None, {"bos_token": "<|im_end|>"}, id="bos-is-eos"),
    pytest.param(None, {}, id="no-bos"),
    pytest.param("<pad> $A <pad>", {"eos_token": None}, id="other-tokens-added"),
]


@pytest.mark.parametrize(("option", "sources"), [("text", []), ("hf", []), ("mix", ["sft", "text"])], ids=str)
@pytest.mark.parametrize(("single", "names"), SPECIAL)
def test_an_exported_tokenizer_begins_a_text_as_in_training(single, names, option, sources, tmp_path):
    base = save_special(tmp_path / "base", single, **names)
    loaded = tokenizer_of({"data": data_of(option, base, *sources)})
    assert isinstance(loaded, HFTokenizer)
    loaded.hf.save_pretrained(tmp_path / "exported")
    [expected] = TextEncoder(load_tokenizer(str(base))).encode_batch(["the weather"])
    after = [] if loaded.eos_id is None else [loaded.eos_id]
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")("the weather").input_ids
    assert [*found, *after] == expected.tokens.tolist() or found == expected.tokens.tolist()


def test_an_exported_tokenizer_of_bytes_begins_a_text_as_in_training(tmp_path):
    loaded = tokenizer_of({"data": data_of("text", None)})
    assert loaded is not None
    loaded.save_pretrained(str(tmp_path))
    [expected] = TextEncoder(load_tokenizer(None)).encode_batch(["naïve\n"])
    assert [*transformers.AutoTokenizer.from_pretrained(tmp_path)("naïve\n").input_ids, 257] == [*expected.tokens]


@pytest.mark.parametrize("single", [None, "<|im_start|> $A"], ids=["bos-not-added", "bos-added"])
@pytest.mark.parametrize(("option", "sources"), [("sft", []), ("mix", ["sft"]), ("mix", ["sft", "hf"])], ids=str)
def test_a_chat_has_one_bos_in_training_and_after_an_export(single, option, sources, tmp_path):
    base = save_special(tmp_path / "base", single, bos_token="<|im_start|>")
    loaded = tokenizer_of({"data": data_of(option, base, *sources)})
    assert isinstance(loaded, HFTokenizer)
    loaded.hf.save_pretrained(tmp_path / "exported")
    question = [{"role": "user", "content": "2 + 2?"}]
    before, after = (
        chat_prompt(ChatEncoder(HFTokenizer(str(folder))), question, None) for folder in (base, tmp_path / "exported")
    )
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert before == after == exported.apply_chat_template(question, add_generation_prompt=True).input_ids
    text = "<|im_start|><|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert before == exported(text, add_special_tokens=False).input_ids, "the template writes bos once"


@pytest.mark.parametrize(
    ("option", "sources"), [pytest.param("sft", [], id="sft"), pytest.param("mix", ["sft"], id="mix-of-chats")]
)
def test_the_tokenizer_of_a_run_on_chats_stays_as_it_is(option, sources, tmp_path):
    base = save_special(tmp_path / "base", None, bos_token="<|im_start|>")
    loaded = tokenizer_of({"data": data_of(option, base, *sources)})
    assert isinstance(loaded, HFTokenizer) and loaded.identity == HFTokenizer(str(base)).identity


@pytest.mark.parametrize("single", ["<|im_start|> $A", "<|im_start|> $A <|im_end|>"], ids=["bos", "bos-and-eos"])
def test_a_tokenizer_that_already_adds_bos_stays_as_it_is(single, tmp_path):
    base = save_special(tmp_path / "base", single, bos_token="<|im_start|>")
    loaded = tokenizer_of({"data": data_of("text", base)})
    assert isinstance(loaded, HFTokenizer) and loaded.identity == HFTokenizer(str(base)).identity


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"_target_": "my_module.data"}, id="own-function"),
        pytest.param({"_target_": "my_module.data", "tokenizer": None}, id="own-function-with-null"),
        pytest.param({"_target_": "my_module.data", "tokenizer": {"_target_": "my_module.Tokenizer"}}, id="own-node"),
        pytest.param({"_target_": OmegaConf.load(CONF / "data/synthetic.yaml")._target_}, id="random-tokens"),
    ],
)
def test_data_without_a_known_tokenizer_are_exported_without_one(data):
    assert tokenizer_of({"choices": {"data": "mine"}, "data": data}) is None


def test_a_tokenizer_that_has_moved_is_named(tmp_path):
    config = {"choices": {"data": "text"}, "data": {"tokenizer": f"{tmp_path}/moved"}}
    with pytest.raises(ValueError, match=rf"data.tokenizer must .*; got {tmp_path}/moved: .*<folder>"):
        tokenizer_of(config)


def test_weights_that_cannot_be_written_are_named_and_removed(tmp_path, monkeypatch):
    def fail(tensors, filename, metadata):
        Path(filename).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("fa_train.models.hf.weights.save_file", fail)
    with pytest.raises(ValueError, match=r"a.safetensors could not be written: .* No space left on device"):
        save_tensors({}, tmp_path / "a.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"the tokenizer could not be written to .*: No space left on device"):
        save_pretrained(build(), tmp_path, word_tokenizer())
    assert not (tmp_path / "config.json").exists()
