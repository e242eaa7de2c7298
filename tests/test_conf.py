"""Every config composes and can be instantiated."""

from itertools import zip_longest

import pytest
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Timer
from omegaconf import OmegaConf

from fa_train import run_config, training
from tests.data.support.chats import many_chats, save_tokenizer, write_jsonl
from tests.support import fast_configs
from tests.support.finetuning import write_base
from tests.support.marks import slow, slow_except, slow_if
from tests.support.training import CONF, command_line, composed, own_option, tiny

NEEDED = {
    "hf": ["data.name=some/name"],
    "mix": ["+data/source@data.sources.web=hf", "data.sources.web.name=some/name"],
    "fsdp": ["trainer.devices=2", "trainer.accelerator=cpu", "batch_size=8"],
    "adamw_bf16": ["trainer.precision=bf16-true"],
    "adamw_master": ["trainer.precision=bf16-true"],
}


TOGETHER = ("attention", "callbacks", "data", "logger", "memory", "scheduler", "trainer")
ALONE = ("adapter", "optimizer", "strategy")  # tested alone, because some of these options exclude others


def options():
    """Yields a list of config options for each tested run.

    Each option of a group in `TOGETHER` or `ALONE` is tested in exactly one run. A run can combine options of different
    groups in `TOGETHER`. An option of a group in `ALONE` is the only option in its run.
    """
    groups = {path.name: sorted(file.stem for file in path.glob("[!_]*.yaml")) for path in CONF.iterdir()}
    groups = {name: [f"{name}={option}" for option in found] for name, found in groups.items()}
    assert groups.keys() - {"train.yaml", "model", "experiment", "preset"} == {*TOGETHER, *ALONE}
    shared = zip_longest(*(groups[name] for name in TOGETHER))
    for row in [*shared, *((option,) for name in ALONE for option in groups[name])]:
        chosen = [option for option in row if option]
        yield pytest.param(chosen, id=",".join(chosen), marks=slow_if(len(chosen) < 3))


@pytest.mark.parametrize("chosen", list(options()))  # tests/models tests the options of conf/model
def test_every_option_builds_a_run(chosen, tmp_path, device, capsys):
    needed = [override for option in chosen for override in NEEDED.get(option.partition("=")[2], [])]
    if "data=sft" in chosen:
        chats = write_jsonl(tmp_path / "chats.jsonl", many_chats(4))
        needed += [f"data.path={chats}", f"data.tokenizer={save_tokenizer(tmp_path / 'tokenizer')}"]
    overrides = tiny(tmp_path, *chosen, f"trainer.accelerator={device.type}", *needed)
    with composed(tmp_path, *overrides) as cfg:
        trainer, lit_gpt, data = training.build(cfg)
    assert trainer.max_steps == 20 and trainer.accumulate_grad_batches == 4
    assert lit_gpt.model.config.vocab_size == data.vocab_size
    assert data.seq_len == 64
    adapters = {"adapter=lora", "adapter=qlora"} & set(chosen)
    assert ("freezes the model's weights, which are random" in capsys.readouterr().out) == bool(adapters)


def test_libyaml_reads_the_configs_as_python_does():
    files = sorted(CONF.rglob("*.yaml"))
    assert len(files) > 40 and yaml.SafeLoader.__name__ == "CSafeLoader"
    for file in files:
        assert yaml.safe_load(file.read_text()) == yaml.load(file.read_text(), fast_configs.PYTHON_LOADER), file


def test_a_config_of_the_tests_is_that_of_hydra(tmp_path, monkeypatch):
    """Composes each config with Hydra's own functions, and then twice with the replacements in fast_configs.py."""
    cases = [(), ("strategy=fsdp", "strategy.context=2"), ("adapter=lora", "model.dim=64"), ("model=llama_1b", "+x=3")]

    def configs() -> list[str]:
        found = []
        for case in cases:
            with composed(tmp_path, *tiny(tmp_path), *case) as cfg:
                found.append(OmegaConf.to_yaml(cfg) + OmegaConf.to_yaml(HydraConfig.instance().cfg))
        return found

    for cached in ("_lists", "_configs"):  # empty both caches, because keys of _configs are ids of objects in _lists
        monkeypatch.setattr(fast_configs, cached, {})
    for owner, name, original in fast_configs.ORIGINALS:
        if original is None:
            monkeypatch.delattr(owner, name)
        else:
            monkeypatch.setattr(owner, name, original)
    expected = configs()
    assert not fast_configs._lists and len({*expected}) == len(cases)
    monkeypatch.undo()
    for cached in ("_lists", "_configs"):
        monkeypatch.setattr(fast_configs, cached, {})
    assert configs() == expected
    assert len(fast_configs._lists) == len(cases)
    assert configs() == expected


@pytest.mark.parametrize("base", ["data/_base", "model/_decoder", "optimizer/_adamw"])
def test_no_option_repeats_what_its_base_says(base):
    path = CONF / f"{base}.yaml"
    shared = OmegaConf.to_container(OmegaConf.load(path))
    options = {file: OmegaConf.to_container(OmegaConf.load(file)) for file in path.parent.glob("[!_]*.yaml")}
    options = {file: keys for file, keys in options.items() if path.stem in keys.get("defaults", [])}
    assert len(options) > 1
    for file, keys in options.items():
        repeated = {key for key in keys.keys() & shared.keys() if keys[key] == shared[key] and keys[key] is not None}
        assert not repeated, file


def test_the_choices_name_the_option_of_each_group(tmp_path):
    with composed(tmp_path, "preset=cpu", "attention=naive", "optimizer=adamw_bf16", "logger=csv") as cfg:
        found = run_config.to_container(cfg)["choices"]
    assert found == {
        "preset": "cpu", "experiment": None, "model": "nano", "attention": "naive", "data": "stdlib",
        "memory": "default", "adapter": "none", "optimizer": "adamw_bf16", "scheduler": "warmup_cosine",
        "strategy": "auto", "logger": "csv",
    }  # fmt: skip


def test_a_base_is_no_option(tmp_path):
    with composed(tmp_path, "data=_base") as cfg, pytest.raises(ValueError, match=r"data\._target_ must be given"):
        run_config.check(cfg)


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("[!_]*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("preset", ["cpu", *slow("gpu")])
def test_every_experiment_composes_and_says_its_command(path, preset, tmp_path):
    package, command = path.read_text().splitlines()[:2]
    assert package == "# @package _global_"
    assert command.startswith("# python train.py ") and f"experiment={path.stem}" in command
    overrides = [f"experiment={path.stem}", f"preset={preset}", "trainer.accelerator=cpu"]
    if "data.path=" in command:
        overrides.append(f"data.path={write_jsonl(tmp_path / 'chats.jsonl', many_chats(4))}")
    if "model.pretrained=" in command:
        overrides.append(f"model.pretrained={write_base(tmp_path / 'base')}")
    with composed(tmp_path, *overrides) as cfg:
        cfg.trainer.precision = "32-true"
        instantiate(cfg.data)
        instantiate(cfg.trainer)
        with torch.device("meta"):
            instantiate(cfg.model, vocab_size=259)


def test_a_key_that_the_preset_adds_to_a_users_scheduler_can_be_removed(tmp_path):
    text = "_target_: torch.optim.lr_scheduler.ExponentialLR\n_partial_: true\ngamma: 0.9\n"
    own = own_option(tmp_path, "scheduler/mine", text)
    overrides = ["preset=cpu", "data=synthetic", own, "scheduler=mine"]
    line = "unknown key scheduler.warmup_steps; .* has set it; ~scheduler.warmup_steps removes it"
    with composed(tmp_path, *overrides) as cfg, pytest.raises(ValueError, match=line):
        run_config.check(cfg)
    with composed(tmp_path, *overrides, "~scheduler.warmup_steps") as cfg:
        run_config.check(cfg)


def test_presets_are_what_the_readme_says(tmp_path):
    with composed(tmp_path, "preset=gpu") as cfg:
        assert (cfg.model.n_layers, cfg.model.dim, cfg.model.n_heads, cfg.seq_len) == (12, 768, 12, 8192)
        assert cfg.attention._target_.endswith("flash_attention") and cfg.trainer.precision == "bf16-mixed"
    with composed(tmp_path, "preset=gpu", "seq_len=32768") as longer:
        own = ["max_steps", "batch_size", "model", "optimizer", "scheduler", "memory"]
        assert all(longer[key] == cfg[key] for key in own)
        assert longer.data.seq_len == longer.callbacks.monitor.seq_len == 32768
    with composed(tmp_path, "preset=cpu", "attention=naive") as cfg:
        assert cfg.attention._target_.endswith("naive_attention"), "an override wins over the preset"


@pytest.mark.parametrize(
    ("overrides", "message"),
    slow_except(
        ["batch", "memory", "choice", "no-peak"],
        [
            pytest.param(
                ["batch_size=3", "data.micro_batch_size=2"], "batch_size must be .* of 2 .*; got 3", id="batch"
            ),
            pytest.param(["model.n_kv_heads=3"], "n_heads must be a multiple of .*n_kv_heads; got 4 and 3", id="heads"),
            pytest.param(
                ["model.positions=learned", "model.max_seq_len=32"],
                "documents of at most model.max_seq_len=32 tokens; got 64",
                id="learned-positions",
            ),
            pytest.param(["model.dim=4000000"], "parameters need .* GiB .* Choose a smaller model", id="memory"),
            pytest.param(["trainer.precision=64-true"], "trainer.precision must be one of .*; got 64-true", id="fp64"),
            pytest.param(
                ["ckpt_path=nowhere.ckpt"], "ckpt_path must be a checkpoint or `last`; nowhere.ckpt", id="ckpt"
            ),
            pytest.param(
                ["ckpt_path="], "ckpt_path must be a checkpoint, `last` or null; got an empty text", id="empty"
            ),
            pytest.param(
                ["optimized_metric=val/loss", "max_steps=2"],
                "optimized_metric=val/loss needs a validation; no validation: max_steps=2 is below",
                id="no-validation",
            ),
            pytest.param(
                ["callbacks.checkpoint.dirpath=/dev/null/x"],
                "callbacks.checkpoint.dirpath must be a folder that can be written; got /dev/null/x: Not a directory",
                id="checkpoint-folder",
            ),
            pytest.param(
                ["callbacks.checkpoint.dirpath=/proc"],
                "callbacks.checkpoint.dirpath must be a folder that can be written; got /proc: ",
                id="checkpoint-file",
            ),
            pytest.param(
                ["logger.save_dir=/dev/null/x"],
                "logger.save_dir must be a folder that can be written; got /dev/null/x: Not a directory",
                id="logger-folder",
            ),
            pytest.param(
                ["logger=wandb", "logger.mode=offline", "logger.save_dir=/dev/null/x"],
                "logger.save_dir must be a folder that can be written; got /dev/null/x: Not a directory",
                id="wandb-folder",
            ),
            pytest.param(
                ["logger=tensorboard", "logger.save_dir=/proc"],
                "logger.save_dir must be a folder that can be written; got /proc: ",
                id="tensorboard-folder",
            ),
            pytest.param(
                ["optimized_metric=perf/mfu"],
                "optimized_metric=perf/mfu needs bf16 on a GPU whose peak .*; got float32 on the CPU",
                id="no-peak",
            ),
            pytest.param(
                ["optimized_metric=perf/reserved_gib"],
                "optimized_metric=perf/reserved_gib needs a GPU; got float32 on the CPU",
                id="no-gpu-memory",
            ),
            pytest.param(["ckpt_path=last", "run_name=never"], "ckpt_path=last found no checkpoint below", id="last"),
            pytest.param(["choices.model=gpt2"], "choose one with model=gpt2", id="choice"),
        ],
    ),
)
def test_impossible_values_are_named(overrides, message, tmp_path):
    with pytest.raises((ValueError, HydraException), match=message):  # noqa: SIM117
        with composed(tmp_path, *tiny(tmp_path, *overrides)) as cfg:
            run_config.check(cfg)
            training.train(cfg)


def test_only_rank_zero_checks_the_folder_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("fa_train.parallel.decisions.launcher_decisions", lambda: {"checkpoints": None})
    settings = ["callbacks.checkpoint.dirpath=/dev/null/x", "logger=csv", "logger.save_dir=/dev/null/x"]
    with composed(tmp_path, *tiny(tmp_path, *settings)) as cfg, pytest.raises(ValueError, match=r"^logger\.save_dir"):
        training.train(cfg)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_flash_needs_cuda_or_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with (
        composed(tmp_path, *tiny(tmp_path, "attention=flash")) as cfg,
        pytest.raises(ValueError, match="needs a CUDA GPU"),
    ):
        training.build(cfg)


def test_a_time_limit_may_be_a_mapping_of_units(tmp_path):
    with composed(tmp_path, *tiny(tmp_path, "+trainer.max_time={hours: 1}")) as cfg:
        trainer = training.build(cfg)[0]
    [timer] = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    assert timer.time_remaining() == 3600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param("seq_len=-1", "error: seq_len must be a positive integer; got -1", id="value"),
        pytest.param(
            "model.vocab_size=100",
            "error: model.vocab_size must be at least the tokenizer's vocabulary, 259",
            id="vocabulary",
        ),
        pytest.param("no_such_key=1", "error: unknown key no_such_key (to add a parameter", id="key"),
        pytest.param(
            "hydra.run.dir=/dev/null/run",
            "error: hydra.run.dir or hydra.sweep.dir must be a folder that can be written; got /dev/null/run: Not a",
            id="folder",
        ),
        pytest.param(
            "-m seq_len=32,64 hydra.sweep.dir=sw/${run_name}",
            "error: hydra.sweep.dir must not contain run_name or another setting of a run",
            id="sweep-folder",
        ),
    ],
)
def test_a_mistake_ends_the_command_with_one_line(overrides, message, tmp_path):
    done = command_line(tmp_path, *overrides.split())
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1 and message in done.stderr, done.stderr
    assert not list(tmp_path.rglob("*.ckpt"))
