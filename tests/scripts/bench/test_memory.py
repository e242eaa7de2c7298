"""Tests scripts/bench/memory.py: names of combinations, comparisons, and a run on a CPU."""

import json
import math
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from fa_train.lit_gpt import LitGPT
from scripts.bench import memory
from scripts.bench.case_process import Case
from scripts.bench.memory import (
    cases_of,
    configuration,
    host_bytes,
    measure,
    parse_arguments,
    read_results,
    run_apart,
)
from scripts.bench.memory_cases import COMBINATIONS, OFF, Levers, Row, levers_of
from scripts.bench.memory_report import markdown, slowdown
from tests.support.processes import ForkedModule

TINY = ("model.n_layers=3", "model.dim=32", "model.ffn_dim=64", "model.vocab_size=259")
CASE = Case("nano", 64, "selective", "cpu", "sdpa", steps=2, slow_step=60, overrides=TINY)
ROWS = [
    Row(64, "selective", "ok", [100.0, 102.0, 98.0], [5.0, 6.0, 5.0], 10.0, 0.0, 5.5),
    Row(64, "selective+offload", "ok", [110.0, 105.0], [5.0, 5.0], 8.0, 2.0, 5.5),
    Row(64, "none", "ok", [80.0, 80.0], [5.0, 5.0], 30.0, 0.0, 5.5),
    Row(128, "selective", "ok", [200.0, 200.0], [5.0, 5.0], 20.0, 0.0, 5.5),
    Row(128, "selective+offload", "ok", [204.0, 204.0], [5.0, 5.0], 12.0, 4.0, 5.5),
    Row(128, "none", "out of memory", peak_gib=139.0),
]


def in_this_process(case, timeout):
    """Replaces run_apart, because the imports of a new process would take seconds."""
    return Row(**json.loads(json.dumps(asdict(measure(case)))))


def run_main(monkeypatch, folder, *arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["bench_memory", "--cpu", "--model", "nano", "--steps", "2", "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(folder), *arguments, "--overrides", *TINY])
    memory.main()
    return json.loads((folder / "memory.json").read_text()), (folder / "memory.md").read_text()


@pytest.mark.slow
def test_a_run_from_its_command_line(tmp_path, monkeypatch, updates):
    monkeypatch.setattr(memory, "run_apart", in_this_process)
    names = ["selective", "selective+offload+mlp_chunk=16+loss_chunk=all"]
    found, text = run_main(monkeypatch, tmp_path, "--seq-lens", "64", "--combinations", *names)
    assert [row["combination"] for row in found["rows"]] == names
    assert len(updates) == 2 * 4  # each measurement has two warm-up steps and two timed steps
    for row in found["rows"]:
        assert row["outcome"] == "ok" and len(row["step_ms"]) == len(row["optimizer_ms"]) == 2
        assert all(0 < part < whole for part, whole in zip(row["optimizer_ms"], row["step_ms"], strict=True))
        assert row["loss"] == pytest.approx(math.log(259), rel=0.1) and row["peak_gib"] > 0
        # Offload copies the inputs of the first and the second block to the host.
        kept = 2 * row["seq_len"] * 32 * 4 if "offload" in row["combination"] else 0
        assert row["host_gib"] * 2**30 == pytest.approx(kept)
    assert "- commit: `abc`" in text and f"torch {torch.__version__}" in text and "--seq-lens 64" in text
    assert "2 steps" in text


@pytest.mark.slow
def test_going_on_after_a_budget(tmp_path, monkeypatch):
    calls = []

    def slow(case, timeout):
        calls.append(case.name)
        if timeout < 1000:
            raise subprocess.TimeoutExpired("", timeout)
        return Row(case.seq_len, case.name, "ok", [10.0], [1.0], 1.0, 0.0, 5.5)

    monkeypatch.setattr(memory, "run_apart", slow)
    common_arguments = ["--seq-lens", "64", "--combinations", "none", "full", "--timeout", "2000"]
    found, text = run_main(monkeypatch, tmp_path, *common_arguments, "--budget", "500")
    assert found["rows"] == [] and "Not measured within the budget: none at 64, full at 64." in text
    found, text = run_main(monkeypatch, tmp_path, *common_arguments[:4], "--timeout", "2000")
    assert len(found["rows"]) == 1 and "Not measured" not in text
    found, text = run_main(monkeypatch, tmp_path, *common_arguments, "--resume")
    assert [row["combination"] for row in found["rows"]] == ["none", "full"]
    assert calls == ["none", "full", "none", "full"]  # with --resume, "none" is not measured again


def test_results_of_something_else_are_not_gone_on_with(tmp_path):
    head = {"commit": "abc", "GPU": "none", "versions": "torch", "settings": "nano"}
    file = tmp_path / "memory.json"
    assert read_results(file, head) == []
    file.write_text(json.dumps({"head": head, "rows": [asdict(row) for row in ROWS]}))
    assert read_results(file, head) == ROWS
    with pytest.raises(ValueError, match=r"needs the same commit as .*abc; got def"):
        read_results(file, head | {"commit": "def"})


@pytest.mark.slow
def test_running_out_of_memory_is_a_row(monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LitGPT, "training_step", fail)
    row = measure(CASE)
    assert row.outcome == "out of memory" and row.step_ms == [] and row.peak_gib is not None


@pytest.mark.slow
def test_a_case_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", ForkedModule)
    row = run_apart(replace(CASE, overrides=(*TINY, "model.norm=batchnorm")), timeout=120)
    assert row.outcome.startswith("failed: model.norm must be one of") and row.outcome.endswith("got batchnorm")


def test_a_case_that_takes_too_long():
    with pytest.raises(subprocess.TimeoutExpired):
        run_apart(CASE, timeout=0.05)


def test_the_optimizers_host_memory_counts():
    class Offloaded:
        """Stands in for fa_train.optim.low_memory.OffloadedAdamW, which needs a GPU."""

        def __init__(self):
            on_host = torch.nn.Parameter(torch.ones(10))
            on_host.grad = torch.ones(10)
            inner = torch.optim.AdamW([on_host])
            inner.step()
            self.param_d2h_map, self.optim_dict = {"weight": on_host}, {"weight": inner}

    # weights, gradients, two moments and the step counter, in bytes
    assert host_bytes(None, Offloaded()) == 4 * 10 * 4 + 4


@pytest.mark.parametrize(
    ("name", "levers"),
    [
        ("none", Levers()),
        ("full+offload", Levers("full", offload=True)),
        ("selective+offload+mlp_chunk", Levers("selective", offload=True, mlp_chunk=16384)),
        ("none+mlp_chunk=16", Levers(mlp_chunk=16)),
        ("none+loss_chunk=all", Levers(loss_chunk=None)),
        ("none+loss_chunk=512+bf16-true+adamw_bf16", Levers("none", False, None, 512, "adamw_bf16", "bf16-true")),
    ],
)
def test_names(name, levers):
    assert levers_of(name) == levers and levers.name == name


@pytest.mark.parametrize("name", ["offload", "none+offloading", "none+mlp_chunk=0", "full+loss_chunk", "none+adam", ""])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=f"got {name.replace('+', '.')}$"):
        levers_of(name)


@pytest.mark.slow
def test_levers_are_in_the_configuration():
    memory = configuration(replace(CASE, name="full+offload+mlp_chunk=16+loss_chunk=all")).model.memory
    assert (memory.checkpointing, memory.offload, memory.mlp_chunk, memory.loss.chunk_size) == ("full", True, 16, 64)
    plain = configuration(replace(CASE, name="none+adamw_8bit", overrides=(*TINY, "lit_gpt.compile_model=true")))
    memory = plain.model.memory
    assert (memory.checkpointing, memory.offload, memory.mlp_chunk, memory.loss.chunk_size) == (
        "none",
        False,
        None,
        4096,
    )
    assert plain.optimizer._target_.endswith("adamw_8bit") and plain.lit_gpt.compile_model
    assert not configuration(CASE).lit_gpt.compile_model


def test_every_lever_is_compared_with_something_that_is_measured():
    all_of_them = [levers_of(name) for name in COMBINATIONS]
    assert [levers.name for levers in all_of_them] == list(COMBINATIONS)
    for lever in OFF:
        assert any(levers.without(lever) in all_of_them for levers in all_of_them), lever


def test_optimizers_run_at_the_first_length_only():
    args = parse_arguments(["--seq-lens", "64", "128", "--combinations", "none+adamw_8bit", "none", "full+bf16-true"])
    assert [(case.seq_len, case.name) for case in cases_of(args)] == [
        (64, "none"),
        (128, "none"),
        (64, "none+adamw_8bit"),
        (64, "full+bf16-true"),
    ]


def test_slowdowns():
    assert slowdown(ROWS[1], "offload", ROWS) == pytest.approx(0.075)
    assert slowdown(ROWS[4], "offload", ROWS) == pytest.approx(0.02)
    assert slowdown(ROWS[0], "checkpointing", ROWS) == pytest.approx(0.25)
    assert slowdown(ROWS[3], "checkpointing", ROWS) is None  # the combination "none" ran out of memory
    assert slowdown(ROWS[0], "offload", ROWS) is None  # ROWS[0] was measured without offload


def test_the_tables():
    text = markdown(ROWS, ["full at 64"], {"GPU": "none"})
    lines = text.splitlines()
    assert "| offload | selective+offload | +7.5% | +2.0% |" in lines
    assert "| checkpointing | selective | +25.0% | – |" in lines
    assert "| 64 | selective | 100.0 (98.0 to 102.0, 3 steps) | 5.0 | 10.00 | 0.00 | 5.5000 |  |" in lines
    assert "| 128 | none | – | – | 139.00 | – | – | out of memory |" in lines
    assert "Not measured within the budget: full at 64." in text
    for table in text.split("\n\n"):
        assert len({line.count("|") for line in table.splitlines() if line.startswith("|")}) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--combinations", "some"], "got some"),
        (["--steps", "0"], "--steps must be positive"),
        (["--seq-lens", "64", "-1"], "--seq-lens must be positive"),
        (["--overrides", "model.n_layers"], "must be name=value"),
    ],
)
def test_bad_arguments_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_cpu_is_only_measured_if_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_memory"])
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU; .*--cpu measures on the CPU"):
        memory.main()
    assert [parse_arguments(given).attention for given in ([], ["--cpu"])] == ["flash", "sdpa"]
