"""Tests scripts/bench/step.py: a run from the command line, the same losses as train.py, and cases that fail."""

import csv
import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hydra.utils import instantiate

from fa_train import training
from fa_train.models.gpt import GPT
from scripts.bench import step
from scripts.bench.case_process import Case
from scripts.bench.peers import time_steps
from scripts.bench.step import (
    Row,
    best_of_ours,
    best_peer,
    cells,
    comparison,
    configuration,
    measure,
    parse_arguments,
    run_apart,
    write,
)
from scripts.bench.training_case import FEWEST_STEPS, StepTimes, document_lens, step_flops
from scripts.bench.training_case import measure as measure_ours
from scripts.bench.variants import Variant, variant_of
from tests.support.processes import ForkedModule
from tests.support.training import REPOSITORY, column, composed

TINY = (
    "model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64",
    "model.vocab_size=259",
)  # fmt: skip
CASE = Case("nano", 64, "ours-none", "cpu", "sdpa", steps=2, slow_step=60, overrides=TINY)
ROWS = [
    Row(64, "ours-none", "ok", 300.0, 10.0, 9.0, 11.0, 5, 1.0, 2.0, 0.5, 5.5, True),
    Row(64, "hf", "ok", 200.0, 15.0, 14.0, 16.0, 5, 1.0, 2.0, 0.4, 5.5, True, "plain | transformers"),
    Row(64, "hf-checkpointing", "ok", 100.0, 30.0, 29.0, 31.0, 5, 1.0, 2.0, 0.2, math.nan, False),
    Row(128, "hf", "oom", peak_gib=79.0, reserved_gib=80.0),
    Row(64, "hf-fa_train", "ok", 250.0, 12.0, 11.0, 13.0, 5, 1.0, 2.0, 0.4, 5.5, True),  # not a peer
    Row(64, "hf-compiled", "ok", 240.0, 12.5, 11.0, 13.0, 5, 1.5, 2.0, 0.4, 5.5, True),
    Row(64, "ours-full", "ok", 220.0, 13.0, 12.0, 14.0, 5, 0.5, 1.0, 0.4, 5.5, True),
]


def peer_in_this_process(case, timeout):
    """Measures a case of the variant `hf` in this process, and calls run_apart for all other cases."""
    return measure(case) if case.name == "hf" else run_apart(case, timeout)


@pytest.mark.slow
def test_a_run_from_its_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides GPUs from the processes that measure the cases
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(step, "run_apart", peer_in_this_process)
    monkeypatch.setattr(subprocess, "Popen", ForkedModule)
    arguments = ["--cpu", "--model", "nano", "--seq-lens", "64", "--variants", "ours-none", "hf", "--steps", "2"]
    arguments += ["--commit", "abc", "--out", str(tmp_path / "step"), *TINY]
    monkeypatch.setattr(sys, "argv", ["bench_step", *arguments])
    step.main()
    with (tmp_path / "step.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["outcome"], row["steps"]) for row in rows] == [
        ("ours-none", "ok", "2"),
        ("hf", "ok", "2"),
    ]
    for row in rows:
        assert float(row["tokens_per_s"]) == pytest.approx(64 / float(row["step_ms"]) * 1e3)
        assert float(row["step_ms_min"]) <= float(row["step_ms"]) <= float(row["step_ms_max"])
        assert float(row["loss"]) == pytest.approx(math.log(259), rel=0.1) and row["finite"] == "True"
        assert float(row["peak_gib"]) > 0
    assert rows[1]["note"] == "plain transformers: Liger's kernels need a GPU"
    text = (tmp_path / "step.md").read_text()
    assert "- commit: `abc`" in text and f"torch {torch.__version__}" in text and "--seq-lens 64" in text


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ours-selective", "hf-checkpointing"])
def test_a_case_in_this_process(variant):
    row = measure(replace(CASE, name=variant))
    assert row.outcome == "ok" and row.finite and row.steps == 2


def test_a_row_of_parts_of_documents_is_refused():
    with pytest.raises(ValueError, match=r"data\.document_len must divide seq_len=64; got 24"):
        configuration(replace(CASE, overrides=(*TINY, "data.document_len=24")))
    assert document_lens(configuration(replace(CASE, overrides=(*TINY, "data.document_len=100")))) == [64]


def test_documents_of_varying_length_are_refused():
    with pytest.raises(ValueError, match=r"needs data\.length_sigma=0, .*; got 0\.5"):
        configuration(replace(CASE, overrides=(*TINY, "data.document_len=16", "data.length_sigma=0.5")))


def test_the_flops_of_documents_add_up():
    model = configuration(CASE).model
    one, other = (step_flops(model, [length]) for length in (16, 48))
    assert step_flops(model, [16, 48]) == one + other and 3 * one < other


def test_a_model_that_llama_is_not():
    row = measure(replace(CASE, name="hf", overrides=(*TINY, "model.activation=gelu", "model.bias=true")))
    assert row.outcome == "missing: Hugging Face's Llama has no activation=gelu, bias=True"


def test_running_out_of_memory_is_a_row(monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "measure_ours", fail)
    row = measure(CASE)
    assert row.outcome == "oom" and row.tokens_per_s is None and row.peak_gib is not None


def test_a_case_that_takes_too_long():
    assert run_apart(CASE, timeout=0.05).outcome == "failed: timed out after 0.05 s"


@pytest.mark.slow
def test_a_case_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", ForkedModule)
    row = run_apart(replace(CASE, overrides=(*TINY, "model.norm=batchnorm")), timeout=120)
    assert row.outcome.startswith("failed: model.norm must be one of") and row.outcome.endswith("got batchnorm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow_step", "timed", "steps"), [pytest.param(60, 4, 6, id="fast"), pytest.param(1e-9, FEWEST_STEPS, 3, id="slow")]
)
def test_a_slow_case_does_fewer_steps(slow_step, timed, steps):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    plain, ours = StepTimes(4, slow_step), StepTimes(4, slow_step)
    time_steps(lambda: weight.square().sum(), optimizer, torch.device("cpu"), plain)
    assert plain.losses == pytest.approx([3 * 0.64**n for n in range(steps)])  # gradients do not accumulate over steps
    measure_ours(configuration(replace(CASE, steps=4)), torch.device("cpu"), ours)
    for times in (plain, ours):
        assert len(times.milliseconds) == timed and len(times.losses) == steps


@pytest.mark.slow
def test_ours_takes_the_steps_of_a_run(tmp_path):
    own = ["memory=none", "lit_gpt.compile_model=false", "trainer.log_every_n_steps=1"]
    own += ["preset=cpu", "model=nano", "attention=sdpa", "seq_len=64", "max_steps=4", "data=synthetic", "batch_size=1"]
    own += ["data.vocab_size=259", "trainer.accelerator=cpu", "logger=csv", "callbacks.checkpoint=null", *TINY]
    with composed(tmp_path, *own) as cfg:
        training.train(cfg)
    times = StepTimes(2, slow_step=60)
    torch.manual_seed(0)
    measure_ours(configuration(CASE), torch.device("cpu"), times)
    assert times.losses == pytest.approx(list(column(tmp_path, "train/loss").values()), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["chunked", "sdpa"])
def test_a_compiled_case_compiles_once_and_for_its_length(attention, monkeypatch, updates):
    """A case runs two warm-up steps and two timed steps, all with 320 tokens."""
    lengths, compiled = [], []
    block, forward = GPT.compile_blocks, GPT.forward
    monkeypatch.setattr(GPT, "compile_blocks", lambda model: compiled.append(block(model, backend="eager")))
    monkeypatch.setattr(
        GPT, "forward", lambda model, x, *more, **named: lengths.append(len(x)) or forward(model, x, *more, **named)
    )
    torch._dynamo.reset()
    case = replace(CASE, attention=attention, seq_len=320, name="ours-none-compiled")
    row = measure(case)
    assert row.outcome == "ok" and row.steps == 2
    assert len(compiled) == 1 and lengths == [320] * 4 and len(updates) == 4
    measure(replace(case, name="ours-none"))
    assert len(compiled) == 1 and lengths == [320] * 8 and len(updates) == 8


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("ours-none", Variant(ours=True)),
        ("ours-full-compiled", Variant(True, "full", compiled=True)),
        ("ours-offload-compiled-portable", Variant(True, "offload", compiled=True, portable=True)),
        ("ours-none-compiled-float8", Variant(True, "none", compiled=True, float8=True)),
        ("hf", Variant(ours=False)),
        ("hf-checkpointing", Variant(ours=False, checkpointing=True)),
        ("hf-compiled", Variant(ours=False, compiled=True)),
        ("hf-compiled-checkpointing", Variant(ours=False, compiled=True, checkpointing=True)),
        ("hf-fa_train", Variant(ours=False, fa_train=True)),
        ("hf-fa_train-checkpointing", Variant(ours=False, checkpointing=True, fa_train=True)),
    ],
)
def test_variants(name, variant):
    assert variant_of(name) == variant
    assert variant.is_peer == (name.startswith("hf") and "fa_train" not in name)


@pytest.mark.parametrize(
    "name",
    [
        "ours",
        "ours-some",
        "ours-none-fast",
        "ours-none-float8",
        "hf-compiled-fa_train",
        "hf-compiled-float8",
        "hf-fast-fa_train",
        "peer",
    ],
)
def test_unknown_variants(name):
    with pytest.raises(ValueError, match=f"got {name}$"):
        variant_of(name)


@pytest.mark.slow
def test_a_variant_is_in_the_configuration():
    config = configuration(replace(CASE, name="ours-full-compiled"))
    assert config.model.memory.checkpointing == "full" and config.lit_gpt.compile_model and config.seq_len == 64
    assert not configuration(CASE).lit_gpt.compile_model and configuration(CASE).lit_gpt.float8 is None
    assert configuration(replace(CASE, name="ours-none-compiled-float8")).lit_gpt.float8 == "tensorwise"
    assert instantiate(config.memory).checkpointing == "full"


def test_float8_needs_a_gpu():
    with pytest.raises(ValueError, match=r"lit_gpt\.float8 needs a CUDA GPU; got trainer\.accelerator=cpu"):
        measure(replace(CASE, name="ours-none-compiled-float8"))


def test_float8_is_not_compared_with_a_peer_in_bf16():
    faster = replace(ROWS[0], variant="ours-none-compiled-float8", tokens_per_s=900.0)
    assert best_of_ours([*ROWS, faster], 64).variant == "ours-none"


def test_the_table(tmp_path):
    assert best_peer(ROWS, 64).variant == "hf-compiled" and best_peer(ROWS, 128) is None
    write(ROWS, {"GPU": "none"}, tmp_path / "step")
    lines = [line for line in (tmp_path / "step.md").read_text().splitlines() if line.startswith("|")]
    table, summary = lines[: 2 + len(ROWS)], lines[2 + len(ROWS) :]
    for part in (table, summary):
        assert len({line.count("|") for line in part}) == 1
    assert "| 1.25 |" in table[2] and "50.0%" in table[2] and "plain / transformers" in table[3]
    assert "not finite" in table[4]
    assert cells(ROWS[3], ROWS)[5:7] == ["79.00", "80.00"] and cells(ROWS[3], ROWS)[-1] == "oom"
    assert summary[2] == "| 64 | ours-none | 300 | 1.00 | hf-compiled | 240 | 1.50 | 1.25 |"
    assert len(summary) == 4 and comparison(ROWS, 128) == ["128", *["–"] * 7]


def test_the_commands_in_the_docs_are_parsed():
    commands = [line for line in step.__doc__.splitlines() if "python -m" in line]
    commands += re.findall(r"`(python -m scripts\.bench\.step .*?)`", (REPOSITORY / "docs/benchmarks.md").read_text())
    overrides = [parse_arguments(shlex.split(command, comments=True)[3:]).overrides for command in commands]
    assert len(commands) == 14 and sum(map(len, overrides)) == 13
    assert parse_arguments(["--cases", "8:hf", "a=1", "--steps", "3", "+b=2"]).cases == [(8, "hf")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "ours-fast"], "got ours-fast"),
        (["--cases", "8k:hf"], "got 8k:hf"),
        (["--cases", "0:hf"], "got 0:hf"),
        (["--steps", "0"], "--steps must be positive"),
        (["--seq-lens", "64", "-1"], "--seq-lens must be positive"),
        (["model.n_layers"], "must be name=value"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_cpu_is_only_measured_if_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_step"])
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU; .*--cpu measures on the CPU"):
        step.main()
    assert [parse_arguments(given).attention for given in ([], ["--cpu"])] == ["flash", "sdpa"]
