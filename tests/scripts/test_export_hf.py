"""Exports runs of train.py, trained from scratch or fine-tuned, to folders that transformers can load."""

import json
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from fa_train.data.tokens.tokenizer import ByteTokenizer
from fa_train.models.hf.export import byte_tokenizer, export_run, model_card
from fa_train.models.hf.import_ import load_pretrained
from fa_train.models.lora import LoRA, save_adapter
from scripts import export_hf, trained_model
from tests.support import processes
from tests.support.pickles import Evil
from tests.support.training import column, command_line, quiet_environment, tiny

pytestmark = pytest.mark.slow
TOKENS = torch.arange(40) % 11 + 97


def write_base(folder: Path, **fields: int | None) -> Path:
    """Saves a tiny Llama in bf16 with a tokenizer of bytes."""
    own: dict[str, Any] = {
        "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": 257,
    }  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**own | fields)).bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(str(folder))
    return folder


def train(folder: Path, *overrides: str) -> Path:
    """Runs train.py on the command line for three steps, because other runs do not write the folder .hydra."""
    done = command_line(folder, *overrides, "max_steps=3", "trainer.val_check_interval=3")
    assert done.returncode == 0, done.stderr
    [checkpoint] = folder.rglob("*.ckpt")
    return checkpoint


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    return train(folder, *tiny(folder))


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finetuned")
    base = write_base(folder / "base")
    return train(folder, *settings(folder, base), f"data.tokenizer={base}", "optimizer.lr=0.01")


def settings(folder: Path, base: Path) -> list[str]:
    """Returns overrides for a tiny run that starts from a Hugging Face checkpoint."""
    return tiny(folder, "model=pretrained", f"model.pretrained={base}")


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS[None]).logits[0]


@torch.no_grad()
def trained(checkpoint: Path) -> torch.Tensor:
    """Returns the logits of the model in the checkpoint."""
    cfg = OmegaConf.load(trained_model._run_folder(checkpoint) / ".hydra" / "config.yaml")
    assert isinstance(cfg, DictConfig)
    return trained_model.load(checkpoint, cfg)[0](TOKENS)


def test_a_run_from_scratch_is_exported(scratch, tmp_path):
    trained_model.export(scratch, tmp_path / "out", [], None)
    torch.testing.assert_close(logits(tmp_path / "out"), trained(scratch), rtol=1e-4, atol=1e-4)
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path / "out"), "naïve\t text  \n"
    ids = tokenizer(text).input_ids
    assert ids == [ByteTokenizer.bos_id, *text.encode()] and tokenizer.decode(ids, skip_special_tokens=True) == text
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (ByteTokenizer.bos_id, ByteTokenizer.eos_id, ByteTokenizer.pad_id)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == ByteTokenizer.eos_id
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 64


def test_a_run_of_an_earlier_version_is_exported(scratch, tmp_path):
    """In the config of the earlier run, some `_target_` values are old import paths."""
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    recorded = Path(__file__).parent / "support" / "config_6f94392.yaml"
    assert "fa_train.memory.stack.Memory" in recorded.read_text()
    shutil.copy(recorded, run / ".hydra" / "config.yaml")
    for checkpoint, out in ((scratch, tmp_path / "now"), (run / "checkpoints" / scratch.name, tmp_path / "earlier")):
        trained_model.export(checkpoint, out, [], None)
    assert (tmp_path / "earlier/config.json").read_text() == (tmp_path / "now/config.json").read_text()
    weights, expected = (load_file(tmp_path / out / "model.safetensors") for out in ("earlier", "now"))
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


def test_a_fine_tuned_checkpoint_is_exported(finetuned, tmp_path):
    base = finetuned.parents[4] / "base"
    trained_model.export(finetuned, tmp_path / "out", [], "float32")
    expected = trained(finetuned)
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(base), expected, atol=1e-2), "training must change the base model"
    trained_model.export(finetuned, tmp_path / "as-base", [], None)
    weights = load_pretrained(tmp_path / "as-base").token_embedding.weight
    assert weights.dtype == torch.bfloat16, "as the base model is stored"
    config, own = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "as-base", base))
    assert config == own


def test_a_fine_tuned_float64_checkpoint_is_exported_as_it_was_trained(tmp_path):
    base = write_base(tmp_path / "base", vocab_size=259)
    LlamaForCausalLM.from_pretrained(base, dtype=torch.float64).save_pretrained(base)
    checkpoint = train(tmp_path, *settings(tmp_path, base), "export=true")
    exported = checkpoint.parents[1] / "exported"
    assert json.loads((exported / "config.json").read_text())["dtype"] == "float32"
    torch.testing.assert_close(logits(exported), trained(checkpoint), rtol=1e-4, atol=1e-4)


def test_a_run_that_goes_on_in_its_folder_replaces_its_exports(tmp_path):
    base = write_base(tmp_path / "base", vocab_size=259)
    own = [*settings(tmp_path, base), "adapter=lora", "export=true", "hydra.run.dir=run"]
    for steps, start in ((1, []), (2, ["ckpt_path=run/checkpoints/step_0000001.ckpt"])):
        done = command_line(tmp_path, *own, *start, f"max_steps={steps}")
        assert done.returncode == 0, done.stderr
        for folder in ("exported", "exported_adapter"):
            assert f"| Optimizer steps | {steps} |" in (tmp_path / "run" / folder / "README.md").read_text()
        (tmp_path / "run/exported.partial").mkdir()
        (tmp_path / "run/exported.partial/config.json").write_text("{}")  # from a killed run
    assert {path.name for path in (tmp_path / "run").glob("exported*")} == {
        "exported", "exported_adapter", "exported.partial",
    }  # fmt: skip


def test_an_export_does_not_replace_the_base_model(finetuned, tmp_path):
    run = tmp_path / "run"
    base = Path(shutil.copytree(finetuned.parents[4] / "base", run / "exported"))
    with pytest.raises(ValueError, match="exported must not be the base model of the run"):
        export_run(finetuned, run, lambda vocab_size: load_pretrained(base, vocab_size=vocab_size), {}, {})
    assert (base / "model.safetensors").is_file()


def test_settings_that_changed_after_the_training_are_refused(finetuned, tmp_path):
    """Exporting a full fine-tuning reads only the base model's config.json, so it compares no hash of that model."""
    base = shutil.copytree(finetuned.parents[4] / "base", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (base / "config.json").write_text(json.dumps(config))
    moved = f"model.pretrained={base}"
    message = (
        r"step_0000003.ckpt must be exported with the settings of its training: the checkpoint was written with "
        r"model.rope_theta=10000.0; the export has 500.0. Restore the files in model.pretrained"
    )
    with pytest.raises(ValueError, match=message):
        trained_model.export(finetuned, tmp_path / "out", [moved], None)
    assert not (tmp_path / "out").exists()
    trained_model.export(finetuned, tmp_path / "restored", [moved, "model.rope_theta=10000"], "float32")
    torch.testing.assert_close(logits(tmp_path / "restored"), trained(finetuned), rtol=1e-4, atol=1e-4)
    trained_model.export(finetuned, tmp_path / "chosen", [moved, "model.rope_theta=700"], None)
    assert json.loads((tmp_path / "chosen/config.json").read_text())["rope_parameters"]["rope_theta"] == 700


def test_an_adapter_path_that_changed_after_the_training_is_refused(tmp_path):
    base, adapter = write_base(tmp_path / "base", vocab_size=259), tmp_path / "adapter"
    save_adapter(LoRA(4, 8.0, 0.0, "all-linear", False, None, None)(load_pretrained(base)), adapter, None)
    checkpoint = train(tmp_path, *settings(tmp_path, base), "adapter=lora", f"adapter.path={adapter}")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 3}))
    for run_script in SCRIPTS.values():
        done = run_script(checkpoint)
        assert done.returncode == 1 and not (checkpoint.parents[2] / "out").exists()
        [line] = done.stderr.strip().splitlines()
        message = r"^error: .* was written with adapter.lora_alpha=8.0; the export has 3. Restore the files in"
        assert re.search(message, line)


def test_the_card_says_what_was_trained(scratch, finetuned, tmp_path):
    for checkpoint in (scratch, finetuned):
        out = tmp_path / checkpoint.parents[4].name
        trained_model.export(checkpoint, out, [], None)
        card, result = (out / "README.md").read_text(), json.loads((checkpoint.parents[1] / "result.json").read_text())
        rows = [
            "| Optimizer steps | 3 |",
            "| Sequence length | 64 tokens |",
            f"| Tokens | {3 * 4 * 64} |",
            f"| Training loss, nats per token | {result['train/loss']:.4f} |",
            f"| Validation loss, nats per token | {result['val/loss']:.4f} |",
        ]
        for row in rows:
            assert row in card, card
        assert "| Data | text: corpus |" in card and str(checkpoint.parents[4]) not in card, "no path of this machine"
    assert "| Base model | base |" in card and "base_model:" not in card and "# base, fine-tuned\n" in card


def test_the_card_has_no_value_of_an_environment_variable(monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    hidden = "${oc.env:TOKEN}"
    shown = {"choices": {"data": hidden}, "data": {"path": "/x/${other}", "name": [hidden]}, "seed": hidden}
    cfg = OmegaConf.create(shown | {"other": hidden, "model": {"pretrained": hidden}, "seq_len": 8})
    trained_model.name_variables(cfg)
    assert cfg.other == "secret" and cfg.pop("other") and "secret" not in str(OmegaConf.to_container(cfg, resolve=True))
    assert cfg.data.path == "/x/${oc.env:TOKEN}" and cfg.data.name == "['${oc.env:TOKEN}']" and cfg.seq_len == 8


def test_the_card_has_the_losses_of_the_checkpoint(scratch, tmp_path):
    """A later run in the same folder replaces result.json."""
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    (run / "result.json").write_text(json.dumps({"tokens": 99999, "train/loss": 99.0, "val/loss": 99.0, "val/step": 3}))
    for checkpoint, out in ((scratch, tmp_path / "own"), (run / "checkpoints" / scratch.name, tmp_path / "later")):
        trained_model.export(checkpoint, out, [], None)
    own, later = ((tmp_path / out / "README.md").read_text() for out in ("own", "later"))
    assert later.partition("| | |")[2] == own.partition("| | |")[2] and "| Validation loss" in own


def test_the_card_links_to_a_base_on_the_hub_and_counts_parameters():
    config = {
        "model": {"pretrained": "HuggingFaceTB/SmolLM2-135M"}, "seq_len": 64, "batch_size": 4, "seed": 0,
        "choices": {"data": "sft"}, "data": {"path": "hf:/data/owner/chats:train"},
    }  # fmt: skip
    card = model_card("run", config, 3, {}, 10, adapter=False, has_tokenizer=True)
    assert "\nbase_model: HuggingFaceTB/SmolLM2-135M\n" in card and "| Data | sft: hf:chats:train |" in card
    without = model_card("run", config, 3, {}, 10, adapter=False, has_tokenizer=False)
    assert "AutoTokenizer.from_pretrained(" in card and "AutoTokenizer" not in without
    large = model_card("run", config, 3, {}, 134_515_008, adapter=False, has_tokenizer=True)
    assert "| Parameters | 10 |" in card and "| Parameters | 134.5M |" in large


def test_a_sharded_checkpoint_is_exported(scratch, tmp_path):
    """Lightning's ModelParallelStrategy writes weights in torch's distributed format, and everything else to
    meta.pt.
    """
    run = tmp_path / "run"
    shutil.copytree(scratch.parents[1] / ".hydra", run / ".hydra")
    content = torch.load(scratch, weights_only=True)
    sharded = run / "checkpoints" / "step_3.ckpt"
    dcp.save({"state_dict": content.pop("state_dict")}, checkpoint_id=sharded, no_dist=True)
    torch.save(content, sharded / "meta.pt")
    trained_model.export(sharded, tmp_path / "sharded", [], None)
    trained_model.export(scratch, tmp_path / "whole", [], None)
    ours, whole = (tmp_path / name / "model.safetensors" for name in ("sharded", "whole"))
    assert ours.read_bytes() == whole.read_bytes()


def test_an_empty_name_is_not_the_current_folder(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["export_hf", "step_0000300.ckpt", ""])
    with pytest.raises(SystemExit):
        export_hf.main()
    assert "argument folder: must be the name of a folder; got an empty text" in capsys.readouterr().err


def test_mistakes_are_named(scratch, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.ckpt does not exist"):
        trained_model.export(tmp_path / "nowhere.ckpt", tmp_path / "out", [], None)
    alone = tmp_path / "alone.ckpt"
    shutil.copy(scratch, alone)
    with pytest.raises(ValueError, match=r"alone.ckpt must be in its run's folder"):
        trained_model.export(alone, tmp_path / "out", [], None)
    other = Path(shutil.copytree(scratch.parents[1], tmp_path / "other"))  # a copy that serves as another run
    for folder in (other, other / "copied", other / "checkpoints" / "copied", other / "new" / "checkpoints"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "alone.ckpt").hardlink_to(alone)
        with pytest.raises(ValueError, match=rf"must be .* as RUN/checkpoints/alone.ckpt .*; got .* in {folder}\."):
            trained_model.export(folder / "alone.ckpt", tmp_path / "out", [], None)
    with pytest.raises(
        ValueError, match=r"step_0000003.ckpt does not fit the model: the checkpoint has no model.blocks.2"
    ):
        trained_model.export(scratch, tmp_path / "out", ["model.n_layers=3"], None)
    assert not (tmp_path / "out").exists()
    (tmp_path / "README.md").write_text("own text")
    with pytest.raises(ValueError, match=r"an export needs a new folder or one without README.md; got .*, which has a"):
        trained_model.export(scratch, tmp_path, [], None)
    assert (tmp_path / "README.md").read_text() == "own text" and not (tmp_path / "config.json").exists()


def test_the_dirpath_of_a_run_holds_its_checkpoints(scratch, tmp_path):
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    (run / "checkpoints").rename(run / "kept")
    with pytest.raises(ValueError, match=r"must be in its run's folder"):
        trained_model.export(run / "kept" / scratch.name, tmp_path / "out", [], None)
    config = run / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("output_dir}/checkpoints", "output_dir}/kept"))
    trained_model.export(run / "kept" / scratch.name, tmp_path / "out", [], None)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("override", ["foo", "modl.pretrained=moved"])
def test_an_override_of_no_key_is_named(scratch, tmp_path, override):
    with pytest.raises(ValueError, match=f"^unknown key {override.partition('=')[0].partition('.')[0]}"):
        trained_model.export(scratch, tmp_path / "out", [override], None)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_larger_than_the_vocabulary_is_named(tmp_path):
    base = write_base(tmp_path / "base", vocab_size=100, bos_token_id=None, eos_token_id=None)
    done = command_line(tmp_path, *settings(tmp_path, base))
    assert done.returncode == 1
    *warned, error = done.stderr.strip().splitlines()  # On a machine whose GPU is not used, Lightning prints a warning.
    assert "; got 259. Choose data.tokenizer=" in error and not any("Traceback" in line for line in warned)


@pytest.fixture(scope="module", params=["lora", "qlora"])
def adapter_run(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """Returns the kind of an adapter run ("lora" or "qlora"), its base model and its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    base = write_base(folder / "base", vocab_size=259)  # the size of the byte tokenizer
    own = (f"adapter={request.param}", "optimizer.lr=0.05", "adapter.r=4", "run_name=adapter")
    return request.param, base, train(folder, *settings(folder, base), *own)


def test_a_run_with_an_adapter_is_exported(adapter_run, tmp_path):
    kind, base, checkpoint = adapter_run
    expected = trained(checkpoint)
    assert not torch.allclose(logits(base), expected, atol=1e-2), "training must change the logits"
    trained_model.export(checkpoint, tmp_path / "merged", [], "float32")
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-4)

    out = tmp_path / "adapter"
    trained_model.export(checkpoint, out, [], None, adapter=True)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    tensors = load_file(out / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    card = (out / "README.md").read_text()
    assert "library_name: peft" in card and "| Base model | base |" in card
    with pytest.raises(ValueError, match="--adapter writes float32, so --dtype must not be given; got bfloat16"):
        trained_model.export(checkpoint, tmp_path / "half", [], "bfloat16", adapter=True)
    if kind == "lora":
        model = LoRA(1, 1.0, 0.0, "all-linear", False, None, str(out))(load_pretrained(base, "sdpa", dtype="float32"))
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_of_an_adapter_holds_no_base(adapter_run):
    _, base, checkpoint = adapter_run
    content = torch.load(checkpoint, weights_only=True)
    assert content["state_dict"] and all("lora_" in name for name in content["state_dict"])
    reference = content["base_model"]
    assert reference["name"] == str(base) and len(reference["sha256"]) == 64


def test_an_adapter_goes_on_from_its_base_and_from_no_other(adapter_run, tmp_path):
    kind, base, checkpoint = adapter_run
    own = [
        *settings(checkpoint.parents[4], base), f"adapter={kind}", "optimizer.lr=0.05", "adapter.r=4", "max_steps=5",
        "trainer.val_check_interval=5", "callbacks.checkpoint.every_n_train_steps=3",
    ]  # fmt: skip
    whole = command_line(tmp_path, *own, "hydra.run.dir=whole")
    assert whole.returncode == 0, whole.stderr
    start = "ckpt_path=whole/checkpoints/step_0000003.ckpt"
    rest = command_line(tmp_path, *own, start, "hydra.run.dir=rest")
    assert rest.returncode == 0, rest.stderr
    losses = column(tmp_path / "whole", "train/loss")
    assert column(tmp_path / "rest", "train/loss") == {step: losses[step] for step in (4, 5)}

    changed = shutil.copytree(base, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    own = [f"model.pretrained={changed}" if x.startswith("model.pretrained=") else x for x in own]
    refused = command_line(tmp_path, *own, start)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    message = rf"its adapter was trained on: {base} with SHA-256 \w+…; got {changed} with SHA-256 \w+…"
    assert re.search(message, refused.stderr.strip().splitlines()[-1])
    with pytest.raises(ValueError, match=message):
        trained_model.export(checkpoint, tmp_path / "out", [f"model.pretrained={changed}"], None)
    assert not (tmp_path / "out").exists()
    moved = shutil.copytree(base, tmp_path / "moved")
    trained_model.export(checkpoint, tmp_path / "out", [f"model.pretrained={moved}"], None)


def test_an_older_checkpoint_that_holds_its_base_is_exported(adapter_run, tmp_path):
    _, _, checkpoint = adapter_run
    run = Path(shutil.copytree(checkpoint.parents[1], tmp_path / "older"))
    content = torch.load(checkpoint, weights_only=True)
    del content["base_model"]
    model, _ = trained_model.load(checkpoint, trained_model.saved_config(run, []))
    content["state_dict"] = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    torch.save(content, run / "checkpoints" / checkpoint.name)
    trained_model.export(run / "checkpoints" / checkpoint.name, tmp_path / "from-older", [], None)
    trained_model.export(checkpoint, tmp_path / "from-newer", [], None)
    older, newer = (tmp_path / name / "model.safetensors" for name in ("from-older", "from-newer"))
    assert older.read_bytes() == newer.read_bytes()


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_an_export_reads_a_random_base_from_the_checkpoint(kind, tmp_path):
    own = (f"adapter={kind}", "optimizer.lr=0.05", "trainer.precision=bf16-true", "export=true")
    checkpoint = train(tmp_path, *tiny(tmp_path, *own))
    assert [path.name for path in checkpoint.parents[1].glob("exported*")] == ["exported"]
    with pytest.raises(ValueError, match=r"--adapter needs a run with model\.pretrained"):  # peft needs the base model
        trained_model.export(checkpoint, tmp_path / "adapter", [], None, adapter=True)
    for name, changes in (("same", []), ("other", ["seed=1"])):
        trained_model.export(checkpoint, tmp_path / name, changes, "float32")
    same, other = (tmp_path / name / "model.safetensors" for name in ("same", "other"))
    assert same.read_bytes() == other.read_bytes()


def test_only_a_run_with_an_adapter_has_one(scratch, tmp_path):
    with pytest.raises(ValueError, match="an adapter can only be exported from a run with adapter=lora"):
        trained_model.export(scratch, tmp_path / "out", [], None, adapter=True)


def test_weights_that_are_not_finite_are_not_exported(scratch, tmp_path):
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    content = torch.load(scratch, weights_only=True)
    content["state_dict"]["model.norm.weight"][0] = float("nan")
    torch.save(content, run / "checkpoints" / scratch.name)
    done = script("export_hf", run / "checkpoints" / scratch.name, tmp_path / "out")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    [line] = done.stderr.strip().splitlines()
    assert re.search(r"^error: \S*step_0000003.ckpt must have finite weights; got NaN or infinity", line)


def script(name: str, *arguments: object):
    return processes.finish(f"scripts.{name}", [*map(str, arguments)], processes.REPOSITORY, quiet_environment())


SCRIPTS = {
    "export_hf": lambda checkpoint: script("export_hf", checkpoint, checkpoint.parents[2] / "out"),
    "generate": lambda checkpoint: script("generate", checkpoint, "--prompt", "x"),
}


@pytest.mark.parametrize("run_script", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("damage", ["cut", "evil-file", "evil-folder"])
def test_a_checkpoint_that_is_none_is_one_line(run_script, damage, scratch, tmp_path):
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    checkpoint = run / "checkpoints" / "x.ckpt"
    if damage == "evil-folder":
        checkpoint.mkdir()
        torch.save({"global_step": 1}, checkpoint / "meta.pt")
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    elif damage == "evil-file":
        torch.save({"global_step": 1, "state_dict": Evil(tmp_path / "ran")}, checkpoint)
    else:
        checkpoint.write_bytes(scratch.read_bytes()[:1000])
    done = run_script(checkpoint)
    assert done.returncode == 1 and not (tmp_path / "ran").exists()
    [line] = done.stderr.strip().splitlines()
    assert line.startswith(f"error: {checkpoint} is damaged or is not a checkpoint of train.py: ")


TARGETS = {
    "torch.load": {"attention": {"_target_": "torch.load", "f": "t.pkl", "weights_only": False}},
    "os.system": {"family": {"windows": [{"deeper": {"_target_": "os.system", "command": "touch ran"}}]}},
    "through-a-module": {"loss": {"_target_": "fa_train.models.hf.export.shutil.rmtree", "path": "x"}},
    "interpolated": {"loss": {"_target_": "${evil}", "command": "touch ran"}},
    "an-import-of-ours": {"loss": {"_target_": "fa_train.models.hf.export.Path", "_args_": ["x"]}},
    "an-import-by-name": {
        "loss": {"_target_": "fa_train.private_names.private_module", "package": "torch", "name": "x"}
    },
    "the-model": {"_target_": "subprocess.run", "args": ["touch", "ran"]},
}


@pytest.mark.parametrize("model", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("part", ["model", "adapter"])
def test_a_saved_config_names_no_other_code(part, model, scratch, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_model, "instantiate", lambda *args, **kwargs: pytest.fail("something was built"))
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    path = run / ".hydra" / "config.yaml"
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), {"evil": "os.system", part: model}), path)
    with pytest.raises(
        ValueError,
        match=rf"^{part} in the run's .hydra/config.yaml must contain only the targets that "
        "fa_train/checkpoints/saved_config.py lists; got",
    ):
        trained_model.export(run / "checkpoints" / scratch.name, tmp_path / "out", [], None)


@pytest.mark.parametrize("run_script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_saved_config_runs_no_code(run_script, scratch, tmp_path):
    run = Path(shutil.copytree(scratch.parents[1], tmp_path / "run"))
    path = run / ".hydra" / "config.yaml"
    pickled = tmp_path / "t.pkl"
    pickled.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    evil = {"model": {"attention": {"_target_": "torch.load", "f": str(pickled), "weights_only": False}}}
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(path), evil), path)
    done = run_script(run / "checkpoints" / scratch.name)
    assert done.returncode == 1 and not (tmp_path / "ran").exists()
    [line] = done.stderr.strip().splitlines()
    assert line.endswith(
        "must contain only the targets that fa_train/checkpoints/saved_config.py lists; got _target_: torch.load"
    )
