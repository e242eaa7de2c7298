"""Tests experiment=finetune, from chats and a checkpoint to an exported folder, and experiment=extend_context."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from fa_train import training
from fa_train.evaluation import generation
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from fa_train.run_config import check
from scripts import trained_model
from scripts.answers import answers
from scripts.bench import compare_finetune
from tests.data.support.chats import PLAIN, chat_tokenizer, many_chats, write_jsonl
from tests.support.finetuning import write_base
from tests.support.training import column, command_line, composed, tiny, write_corpus

pytestmark = pytest.mark.slow
STEPS = 12


def settings(folder: Path) -> list[str]:
    """Returns overrides for a run that takes a second, on rows of 64 tokens."""
    chats = write_jsonl(folder / "chats.jsonl", many_chats())
    return [
        "experiment=finetune", "preset=cpu", f"data.path={chats}", f"model.pretrained={write_base(folder / 'base')}",
        f"data.cache_dir={folder / 'cache'}", "data.num_workers=0", "data.micro_batch_size=2", "seq_len=64",
        f"max_steps={STEPS}", "batch_size=4", "scheduler.warmup_steps=2", "sample.max_new_tokens=6", "logger=csv",
        "trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "trainer.val_check_interval=6",
    ]  # fmt: skip


@pytest.fixture(scope="module", params=["none", "lora"])
def run(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    done = command_line(folder, *settings(folder), f"adapter={request.param}", "optimizer.lr=0.02")
    assert done.returncode == 0, done.stderr
    fit = done.stdout.split("done:")[0]  # on_fit_end prints "done:" after Lightning has moved the model off the GPU
    assert "sample after 0 steps" in fit and f"sample after {STEPS} steps" in fit
    [finished] = (folder / "runs/finetune").iterdir()
    return finished


def test_the_loss_falls_and_both_samples_are_kept(run):
    losses = list(column(run, "train/loss").values())
    falls_to = 0.95 if "lora" in str(run) else 0.6  # adapters alone cannot improve random weights much
    assert len(losses) == STEPS and losses[-1] < falls_to * losses[0]
    first, last = (json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines())
    assert (first["step"], last["step"]) == (0, STEPS)
    assert first["messages"] == last["messages"] and first["messages"][-1]["role"] == "user"
    assert first["answer"] != last["answer"]


@pytest.mark.parametrize("content", ["2 + 2 is 4.", "a picture: <image>"])
def test_texts_may_not_contain_an_added_token_without_an_embedding(content, tmp_path):
    """Gemma 3 1B has 262,144 embeddings, but its tokenizer has one more token, <image_soft_token>."""
    changed = settings(tmp_path)
    tokenizer = chat_tokenizer()
    write_base(tmp_path / "base", vocab_size=len(tokenizer))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path / "base")
    write_jsonl(tmp_path / "chats.jsonl", [{"prompt": "hi", "completion": content}] * 40)
    n = len(tokenizer) - 1
    message = f"only tokens below {n}, for which the model has embeddings; got {n}, <image>"
    with (
        composed(tmp_path, *changed, "max_steps=1") as cfg,
        pytest.raises(ValueError, match=message) if "<image>" in content else nullcontext(),
    ):
        training.train(cfg)


@torch.no_grad()
def test_a_run_leaves_what_was_trained_in_its_folder(run, tmp_path):
    [checkpoint] = run.rglob("*.ckpt")
    stream = torch.arange(50) * 7 % 400
    theirs = AutoModelForCausalLM.from_pretrained(run / "exported", dtype=torch.float32).eval()
    trained, step = trained_model.load(checkpoint, OmegaConf.load(run / ".hydra" / "config.yaml"))
    exact = theirs(stream[None]).logits[0]
    assert step == STEPS
    for ours in (trained, load_pretrained(run / "exported", attention="sdpa")):
        torch.testing.assert_close(ours(stream), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
    base = AutoModelForCausalLM.from_pretrained(run.parents[2] / "base", dtype=torch.float32).eval()
    assert (base(stream[None]).logits[0] - exact).abs().max() > 0.1 * exact.abs().max()
    assert AutoTokenizer.from_pretrained(run / "exported").chat_template is not None
    assert "| Optimizer steps | 12 |" in (run / "exported" / "README.md").read_text()

    has_adapter = "lora" in str(run)
    trained_model.export(checkpoint, tmp_path / "exported", [], None)
    if has_adapter:
        trained_model.export(checkpoint, tmp_path / "exported_adapter", [], None, adapter=True)
    written = sorted(path.name for path in run.glob("exported*"))
    assert written == ["exported", "exported_adapter"][: 1 + has_adapter]
    for path in tmp_path.rglob("*.*"):
        assert path.read_bytes() == (run / path.relative_to(tmp_path)).read_bytes(), "the script writes the same"


@pytest.mark.parametrize("run", ["lora"], indirect=True)
def test_samples_of_a_resumed_run_name_the_step_of_the_weights(run, tmp_path, capsys):
    folder = run.parents[2]
    start = f"ckpt_path={run}/checkpoints/step_{STEPS:07d}.ckpt"
    with composed(tmp_path, *settings(folder), "adapter=lora", f"max_steps={STEPS + 1}", start, "export=false") as cfg:
        training.train(cfg)
    assert f"sample after {STEPS} steps" in capsys.readouterr().out
    samples = [json.loads(line) for path in (run, tmp_path) for line in (path / "samples.jsonl").open()]
    assert [sample["step"] for sample in samples] == [0, STEPS, STEPS, STEPS + 1]
    assert samples[1]["answer"] == samples[2]["answer"]


def test_the_exported_template_is_the_one_of_the_training(tmp_path):
    (tmp_path / "template.jinja").write_text(PLAIN, encoding="utf-8-sig")  # the byte order mark is not template text
    overrides = [f"data.chat_template={tmp_path / 'template.jinja'}", "max_steps=1", "trainer.val_check_interval=1"]
    with composed(tmp_path / "run", *settings(tmp_path), *overrides) as cfg:
        training.train(cfg)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "exported").chat_template == PLAIN


@pytest.fixture
def moved_run(run, tmp_path) -> tuple[Path, Path]:
    """Returns the checkpoint of a copy of the run, and the copied folder of its base model and tokenizer."""
    own, base = run.parents[2] / "base", tmp_path / "base"
    shutil.copytree(own, base)
    config = Path(shutil.copytree(run, tmp_path / "run")) / ".hydra/config.yaml"
    config.write_text(config.read_text().replace(str(own), str(base)))
    [checkpoint] = (tmp_path / "run").rglob("*.ckpt")
    return checkpoint, base


@pytest.mark.parametrize("run", ["none"], indirect=True)
@pytest.mark.parametrize("changed", ["vocabulary", "chat template"])
def test_a_tokenizer_that_changed_after_the_training_is_refused(changed, moved_run, tmp_path):
    checkpoint, base = moved_run
    trained_model.export(checkpoint, tmp_path / "unchanged", [], None)
    tokenizer = chat_tokenizer(PLAIN) if changed == "chat template" else chat_tokenizer()
    tokenizer.add_tokens(["lighthouse"] * (changed == "vocabulary"))
    tokenizer.save_pretrained(base)
    message = (
        rf"\.ckpt must be exported with the {changed} of its training; the one in {base} is different. .* add "
        rf"data.tokenizer={base} to the command of scripts.export_hf$"
    )
    with pytest.raises(ValueError, match=message):
        trained_model.export(checkpoint, tmp_path / "out", [], None)
    assert not (tmp_path / "out").exists()
    trained_model.export(checkpoint, tmp_path / "chosen", [f"data.tokenizer={base}"], None)
    content = torch.load(checkpoint, weights_only=True)
    del content["PackedDataModule"]["tokenizer"]
    torch.save(content, checkpoint)
    trained_model.export(checkpoint, tmp_path / "older", [], None)


def test_a_template_file_that_changes_during_the_training_is_not_exported(tmp_path, monkeypatch):
    template = tmp_path / "template.jinja"
    template.write_text(PLAIN)
    overrides = [f"data.chat_template={template}", "max_steps=1", "trainer.val_check_interval=1"]
    monkeypatch.setattr(generation.Sample, "__call__", lambda *args: template.write_text(PLAIN + "\n\n{{ 1 }}"))
    message = rf"must be exported with the chat template of its training; .* add data.chat_template={template} to the"
    with (
        composed(tmp_path / "run", *settings(tmp_path), *overrides) as cfg,
        pytest.raises(ValueError, match=message),
    ):
        training.train(cfg)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_end_of_an_answer_ends_samples_and_exported_models(adapter, tmp_path, monkeypatch):
    """The base model's eos is the id 3, and its tokenizer's eos is <pad>. The template ends answers with <|im_end|>."""
    own = settings(tmp_path)
    base, tokenizer = tmp_path / "base", chat_tokenizer()
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    stops: list[set[int]] = []
    monkeypatch.setattr(generation, "generate", lambda *args, stop, **options: stops.append(stop) or [1])
    monkeypatch.setattr("scripts.answers.generate", generation.generate)
    overrides = ["max_steps=1", "trainer.val_check_interval=1", f"adapter={adapter}"]
    with composed(tmp_path / "run", *own, *overrides) as cfg:
        training.train(cfg)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/exported")
    ends = [3, *tokenizer.convert_tokens_to_ids(["<pad>", "<|im_end|>"])]
    assert exported.generation_config.eos_token_id == ends
    if adapter == "lora":
        card = (tmp_path / "run/exported_adapter/README.md").read_text()
        assert f"\nmodel.generation_config.eos_token_id = {ends}\n" in card
    answers(str(base), chat=["2 + 2?"], max_new_tokens=1, device="cpu")
    answers(str(tmp_path / "run/exported"), prompt=["2 + 2?"], max_new_tokens=1, device="cpu")
    assert len(stops) == 4 and all(stop == {*ends} for stop in stops), "two samples and two answers"


def test_an_export_that_fails_leaves_the_checkpoint_and_nothing_half(tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    # write_json is called after the weights have been written
    monkeypatch.setattr("fa_train.models.hf.import_.write_json", full)
    overrides = ["max_steps=2", "trainer.val_check_interval=2", "adapter=lora"]
    with (
        composed(tmp_path / "run", *settings(tmp_path), *overrides) as cfg,
        pytest.raises(ValueError, match=r"the run is finished, but .*exported could not be .* No space left") as caught,
    ):
        training.train(cfg)
    [checkpoint] = (tmp_path / "run").rglob("*.ckpt")
    assert f"scripts.export_hf {checkpoint}" in str(caught.value)
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    assert [path.name for path in (tmp_path / "run").glob("exported*")] == ["exported_adapter"], (
        "the earlier export was complete"
    )
    assert json.loads((tmp_path / "run" / "result.json").read_text())["train/loss"] > 0


@pytest.mark.parametrize(
    "error", [SIGTERMException(), torch.OutOfMemoryError("CUDA out of memory")], ids=["sigterm", "oom"]
)
def test_a_run_that_does_not_finish_exports_nothing(error, tmp_path, monkeypatch):
    def fail_at_step_2(self, trainer, *args):
        if trainer.global_step == 2:
            raise error

    monkeypatch.setattr("fa_train.callbacks.progress.StepProgress.on_train_batch_end", fail_at_step_2)
    with composed(tmp_path / "run", *settings(tmp_path)) as cfg:
        if isinstance(error, SIGTERMException):
            with pytest.raises(SystemExit, match="143"):
                training.train(cfg)
        else:
            assert training.train(cfg)["oom"] == 1
    assert list((tmp_path / "run").rglob("*.ckpt")) and not list((tmp_path / "run").glob("exported*"))


def test_an_export_needs_checkpoints(tmp_path):
    with (
        composed(tmp_path, *settings(tmp_path), "callbacks.checkpoint=null") as cfg,
        pytest.raises(ValueError, match=r"export=true needs checkpoints, .* got callbacks.checkpoint=null"),
    ):
        training.train(cfg)


@pytest.mark.parametrize("run", ["none"], indirect=True)
def test_losses_are_those_of_transformers_own_loop(run):
    ours, theirs = compare_finetune.our_losses(run)[:5], compare_finetune.transformers_losses(run, 5)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert compare_finetune.table(ours, theirs).count("\n") == 6


@pytest.mark.parametrize("run", ["lora"], indirect=True)
def test_an_adapter_is_not_compared(run):
    with pytest.raises(ValueError, match=r"must have adapter=none; .* has adapter=lora"):
        compare_finetune.transformers_losses(run, 5)


@pytest.mark.parametrize(("adapter", "lr"), [("none", 2e-5), ("lora", 2e-4), ("qlora", 2e-4)])
def test_the_learning_rate_is_the_adapters(adapter, lr, tmp_path):
    with composed(tmp_path, *settings(tmp_path), f"adapter={adapter}") as cfg:
        assert cfg.optimizer.lr == lr
        assert cfg.data.tokenizer == cfg.model.pretrained == str(tmp_path / "base")
        assert cfg.data.packing == "best_fit" and cfg.model.dtype == "float32"
    with composed(tmp_path, *settings(tmp_path), "preset=gpu") as cfg:
        assert cfg.trainer.precision == "bf16-mixed"


def test_a_sample_is_a_chat_of_the_named_validation_files(tmp_path):
    for overrides, expected in (
        ([], "chats.jsonl"),
        ([f"data.val_path={tmp_path}/val.jsonl"], "val.jsonl"),
        ([f"data.val_path={tmp_path}/val.jsonl", f"sample.chats={tmp_path}/mine.jsonl"], "mine.jsonl"),
    ):
        with composed(tmp_path, *settings(tmp_path), *overrides) as cfg:
            assert instantiate(cfg.sample).chats == str(tmp_path / expected)


def test_a_mixture_has_samples_only_if_a_file_is_named(tmp_path):
    overrides = ["experiment=finetune", "data=mix", f"model.pretrained={write_base(tmp_path / 'base')}"]
    with composed(tmp_path, *overrides) as cfg:
        instantiate(cfg.sample)(SimpleNamespace(is_global_zero=True), None)
    with composed(tmp_path, *overrides, f"sample.chats={tmp_path}/missing.jsonl") as cfg:
        sample = instantiate(cfg.sample)
    with pytest.raises(ValueError, match=r"^sample\.chats=.*missing\.jsonl: .* does not exist$"):
        sample(SimpleNamespace(is_global_zero=True), None)


@pytest.mark.parametrize(
    "data", [["data=text", "data.path=texts", "data.val_path=more"], ["data=hf", "data.name=texts"]], ids=["text", "hf"]
)
def test_texts_are_sampled_only_if_chats_are_named(data, tmp_path):
    overrides = ["experiment=finetune", *data, f"model.pretrained={write_base(tmp_path / 'base')}"]
    for more, expected in (([], None), (["sample.chats=chats.jsonl"], "chats.jsonl")):
        with composed(tmp_path, *overrides, *more) as cfg:
            check(cfg)
            assert instantiate(cfg.sample).chats == expected


def test_documents_are_apart_in_the_loop_too():
    mask = compare_finetune.document_mask(torch.tensor([0, 2, 3, 3], dtype=torch.int32), 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1],
    ]  # fmt: skip


def test_bytes_are_refused_if_the_checkpoint_has_another_vocabulary(tmp_path):
    base, of_bytes = write_base(tmp_path / "base"), write_base(tmp_path / "bytes", vocab_size=259)

    def build(pretrained: Path, *overrides: str) -> None:
        own = [
            setting
            for setting in tiny(tmp_path, *overrides)
            if not setting.startswith(("model.d", "model.n", "model.f"))
        ]
        with composed(tmp_path, *own, "model=pretrained", f"model.pretrained={pretrained}") as cfg:
            training.build(cfg)

    build(of_bytes)
    build(base, f"data.tokenizer={base}")
    build(base, "model.vocab_size=400")  # an override is allowed if it equals the size in the checkpoint
    for data, got in (("text", "data.tokenizer=null"), ("stdlib", "data=stdlib")):
        message = (
            f"data.tokenizer must be the tokenizer of {base}, whose vocabulary has 400 tokens; got {got}, which uses"
        )
        with pytest.raises(ValueError, match=message):
            build(base, f"data={data}")


def test_a_missing_checkpoint_is_named_before_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with (
        composed(tmp_path, *settings(tmp_path), "model.pretrained=some/name") as cfg,
        pytest.raises(ValueError, match=r"model\.pretrained must be .*; got some/name"),
    ):
        training.build(cfg)


def extended(folder: Path, *overrides: str) -> list[str]:
    return [
        "experiment=extend_context", "preset=cpu", f"data.path={write_corpus(folder / 'corpus')}", "seq_len=256",
        f"model.pretrained={write_base(folder / 'base')}", f"data.cache_dir={folder / 'cache'}", "logger=csv",
        "data.num_workers=0", "trainer.accelerator=cpu", *overrides,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "got"),
    [
        pytest.param(["model.dtype=float16"], "float16", id="full"),
        pytest.param(
            ["model.dtype=null"], "null, which keeps the checkpoint's float16. Set model.dtype=float32", id="stored"
        ),
        pytest.param(["model.dtype=float16", "adapter=lora"], None, id="adapter"),
        pytest.param(["model.dtype=float16", "trainer.precision=bf16-true"], None, id="bf16"),
    ],
)
def test_weights_in_fp16_are_not_trained(overrides, got, tmp_path):
    own = settings(tmp_path)
    LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float16).save_pretrained(tmp_path / "base")
    message = f"^model.dtype must be float32 or bfloat16 for weights that are trained; got {got}$"
    expected = nullcontext() if got is None else pytest.raises(ValueError, match=message)
    with composed(tmp_path, *own, "data.max_doc_len=64", *overrides) as cfg, expected:
        training.build(cfg)


def test_rows_are_no_longer_than_the_checkpoint_reaches(tmp_path):
    with composed(tmp_path, *settings(tmp_path), "seq_len=256") as cfg:
        message = (
            "seq_len must be at most the 64 tokens that the checkpoint supports; got 256. Use experiment=extend_context"
        )
        with pytest.raises(ValueError, match=message):
            training.build(cfg)
    for apart in (["data.max_doc_len=64"], ["model.rope_scaling={rope_type: dynamic, factor: 4}"]):
        with composed(tmp_path, *settings(tmp_path), "seq_len=256", *apart) as cfg:
            training.build(cfg)
    with (
        composed(
            tmp_path, *settings(tmp_path), "seq_len=256", "data.max_doc_len=64", "data.reset_positions=false"
        ) as cfg,
        pytest.raises(ValueError, match=message),
    ):
        training.build(cfg)


@pytest.mark.parametrize(
    ("overrides", "parameters", "reach"),
    [
        pytest.param([], {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, id="yarn"),
        pytest.param(["model.rope_scaling.rope_type=linear"], {"rope_type": "linear", "factor": 4.0}, 256, id="linear"),
        pytest.param(["model.rope_scaling.rope_type=dynamic"], {"rope_type": "dynamic", "factor": 4}, 64, id="dynamic"),
        pytest.param(
            ["model.rope_scaling=null", "model.rope_theta=5e5"], {"rope_type": "default", "rope_theta": 5e5}, 256,
            id="theta",
        ),
        pytest.param(["seq_len=32"], {"rope_type": "default", "rope_theta": 10000.0}, 64, id="reached-already"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_extension_is_exported(overrides, parameters, reach, tmp_path):
    with composed(tmp_path, *extended(tmp_path, *overrides)) as cfg:
        _, lit_gpt, data = training.build(cfg)
        save_pretrained(lit_gpt.model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert parameters.items() <= config["rope_parameters"].items() and config["max_position_embeddings"] == reach
    assert data.packing == "best_fit"
    stream = torch.arange(200) * 7 % 400
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()(stream[None]).logits[0]
    torch.testing.assert_close(lit_gpt.model(stream), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
