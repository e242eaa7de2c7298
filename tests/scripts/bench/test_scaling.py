"""Tests scripts/bench/scaling.py: its cases, the results of a run, the schedule of the runs, and the table.

In these tests, train.py runs on the CPU in this process, or a short script replaces train.py.
"""

import csv
import sys
from dataclasses import replace

import pytest

from fa_train import training
from fa_train.memory.planner.levers import with_blocks_gathered
from fa_train.memory.planner.predict import GIB, predict
from scripts.bench import scaling
from scripts.bench.scaling import (
    CASES,
    Process,
    Run,
    Workload,
    main,
    measured,
    parse_arguments,
    parse_case,
    predicted_gib,
    results,
    row_of,
    runs_of,
    timed_logs,
    visible,
)
from scripts.bench.scaling_report import Row, cells, page, plan_error, share_of_ideal, write
from scripts.composed import composed as composed_for_gpu
from scripts.memory_table import memory_of_gpu, plan_of_run
from tests.support.training import composed

TINY = (
    "model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64",
    "data.vocab_size=259",
)  # fmt: skip
WORKLOAD = Workload("nano", 64)
RUN = Run(WORKLOAD, ("ddp",), gpus=2, rows=1, steps=6, cpu=True)
ALONE = Row("nano", 64, "", "auto", 1, gpu=0, tokens_per_s=1000.0, tokens_per_s_min=900.0, tokens_per_s_max=1100.0)
DDP = replace(ALONE, strategy="ddp", gpus=2, gpu=None, tokens_per_s=1900.0, peaks=(10.0, 8.0), predicted_gib=9.6)
FAILED = Row("nano", 128, "", "fsdp", 2, "failed: a | b")
# replaces train.py; depending on its settings, this script succeeds, fails or hangs
SCRIPT = """
import json, os, sys, time
from pathlib import Path
settings = dict(x.split("=", 1) for x in sys.argv[1:])
folder = Path(settings["hydra.run.dir"])
if settings["strategy"] == "fsdp":
    sys.exit("starting\\nerror: no luck\\nmore")
if settings["seq_len"] == "128":
    time.sleep(100)
Path(folder, "visible").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
lines = ["step,perf/step_ms,perf/tokens_per_s,train/skipped_steps,train/loss"]
lines += [f"{step},2.0,{1000 + step},0.0,5.5" for step in range(1, int(settings["max_steps"]) + 1)]
Path(folder, "metrics.csv").write_text("\\n".join(lines) + "\\n")
for rank in range(int(settings["trainer.devices"])):
    Path(folder, f"rank_memory_{rank}.json").write_text(json.dumps({"peak_gib": 2.0 + rank}))
"""


def arguments(*words):
    return parse_arguments(["--timeout", "60", "--steps", "6", *words])


def test_a_case_has_a_workload_and_a_strategy():
    case = parse_case("llama_1b:8192:fsdp,strategy.reduce_once=true,memory=selective")
    assert case.workload == Workload("llama_1b", 8192, ("memory=selective",))
    assert case.strategy == ("fsdp", "strategy.reduce_once=true")


def test_cases_share_the_run_on_one_gpu():
    cases = [parse_case(f"nano:64:{name}") for name in ("ddp", "fsdp", "fsdp,strategy.reduce_once=true")]
    runs = runs_of(cases, arguments("--", "strategy.x=1", "optimizer.lr=1"), 2)
    assert sorted(run.gpus for run in runs) == [1, 2, 2, 2]
    for run in runs:
        assert f"batch_size={run.gpus}" in run.arguments() and "optimizer.lr=1" in run.arguments()
        assert ("strategy.x=1" in run.arguments()) == (run.gpus == 2)
    every = runs_of(cases, arguments("--every-gpu"), 2)
    assert {run.gpu for run in every if run.gpus == 1} == {0, 1}


def test_gpus_that_share_rows_train_on_fewer_rows():
    cases = [parse_case("nano:64:fsdp,strategy.context=4"), parse_case("nano:64:fsdp")]
    sizes = {run.strategy: run.batch_size for run in runs_of(cases, arguments("--rows", "3"), 8)}
    assert sizes == {("auto",): 3, ("fsdp", "strategy.context=4"): 6, ("fsdp",): 24}
    common = runs_of(cases[1:], arguments("--", "strategy.context=8"), 8)
    assert {run.gpus: run.batch_size for run in common} == {1: 1, 8: 1}


@pytest.mark.slow
def test_each_run_is_planned_as_its_own_config():
    cases = [parse_case(case) for case in CASES]
    gib = {run.strategy[0]: predicted_gib(run) for run in runs_of(cases[:2], arguments(), 2)}
    gradients = predict(plan_of_run(composed_for_gpu(["model=llama_1b", "batch_size=1"]))).weights / GIB
    assert gib["fsdp"] < gib["ddp"]
    assert gib["ddp"] - gib["auto"] == pytest.approx(gradients), "one GPU has no buckets"
    [fsdp] = [run for run in runs_of(cases[-1:], arguments(), 2) if run.gpus == 2]
    plan = plan_of_run(composed_for_gpu(fsdp.arguments()))
    assert predicted_gib(fsdp) == predict(with_blocks_gathered(plan, memory_of_gpu())).allocated / GIB
    assert (plan.run.ranks, plan.run.precision, plan.levers.checkpointing) == (2, "bf16-true", "selective")
    assert not plan.run.accumulates and plan.run.compiled
    assert predicted_gib(RUN) is None, "the allocator's peak is not measured on the CPU"


def test_the_results_of_train_py(tmp_path):
    run = Run(Workload("nano", 64, TINY), ("auto",), 1, rows=1, steps=6, cpu=True)
    with composed(tmp_path, *run.arguments()) as cfg:
        training.train(cfg)
    row = measured(row_of(run, [0], 1.0, None), run.warm_up, tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        logs = list(csv.DictReader(file))
    assert row.outcome == "ok" and not (tmp_path / "checkpoints").exists()
    assert row.loss == float(logs[-1]["train/loss"]) and row.skipped_steps == 0
    assert row.tokens_per_s == pytest.approx(64e3 / row.step_ms, rel=0.5), "medians of times and of rates"
    assert row.peaks[0] > 0 and row.host_gib > 0
    assert row.communication_ms is None, "one rank does not communicate"


def test_logs_that_cover_a_step_of_the_warm_up_do_not_count():
    logs = [{"step": str(step), "perf/step_ms": "1"} for step in (4, 8, 12)] + [{"step": "12", "val/loss": "1"}]
    assert [log["step"] for log in timed_logs(logs, 4)] == ["8", "12"]
    assert [log["step"] for log in timed_logs(logs, 5)] == ["12"]


def test_a_run_without_results_has_failed(tmp_path):
    row = measured(row_of(RUN, [0, 1], 1.0, None), 2, tmp_path)
    assert row.outcome.startswith("failed: ") and "metrics.csv" in row.outcome and row.gpu is None


def test_runs_are_started_on_free_gpus(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(scaling, "REPOSITORY", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    args = arguments("--parallel", "--every-gpu", "--out", str(tmp_path / "out"))
    alone = [Run(WORKLOAD, ("auto",), 1, 1, 6, gpu=gpu) for gpu in (1, 0)]
    runs = [*alone, replace(RUN, cpu=False), replace(RUN, strategy=("fsdp",))]
    rows = list(results(runs, dict.fromkeys(runs, 1.5), args))
    assert {row.gpu for row in rows[:2]} == {0, 1} and [row.gpus for row in rows[2:]] == [2, 2]
    assert rows[2].peaks == (2.0, 3.0) and rows[2].tokens_per_s == 1004.5 and rows[2].predicted_gib == 1.5
    assert rows[3].outcome == "failed: no luck"
    folders = sorted((tmp_path / "out_runs").iterdir())
    assert [(folder / "visible").read_text() for folder in folders[:3]] == ["3", "5", "5,3"]


def test_a_run_that_does_not_end_is_killed(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(scaling, "REPOSITORY", tmp_path)
    process = Process(replace(RUN, workload=Workload("nano", 128)), [0, 1], 0.0, tmp_path / "run")
    row = process.result(None)
    assert row.outcome == "failed: timed out after 0 s" and process._process.poll() is not None


def test_runs_after_the_budget_are_left_out(tmp_path, capsys):
    args = arguments("--budget", "1e-9", "--out", str(tmp_path / "out"))
    assert not list(results([RUN], {RUN: None}, args))
    assert "left out: nano_64_ddp_2" in capsys.readouterr().err


def test_shares_and_errors():
    second = replace(ALONE, gpu=1, tokens_per_s=900.0)
    assert share_of_ideal(DDP, [ALONE, DDP]) == 0.95
    assert share_of_ideal(DDP, [ALONE, second, DDP]) == 1.0
    assert share_of_ideal(replace(DDP, overrides="memory=full"), [ALONE]) is None
    assert share_of_ideal(ALONE, [ALONE]) is None and share_of_ideal(FAILED, [ALONE]) is None
    assert plan_error(DDP) == pytest.approx(0.2), "the error of the second rank is larger than -4% of the first"
    assert plan_error(ALONE) is None


def test_the_page(tmp_path):
    rows = [FAILED, DDP, ALONE]
    write(rows, {"GPUs": "2"}, tmp_path / "out")
    text = (tmp_path / "out.md").read_text()
    assert text == page(rows, {"GPUs": "2"})
    assert "1 of 1 runs reach 95% of ideal, the lowest 95.0%." in text
    assert "0 of 1 plans are within 5% of every rank's peak, the worst 20.0%." in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 5
    assert lines[2].startswith("| nano 64 | 1 (GPU 0) | 1,000 (900 to 1,100) | – |")
    assert "| 95.0% |" in lines[3] and "| 10.00, 8.00 | 9.60 | +20.0% |" in lines[3]
    assert cells(FAILED, rows)[-1] == "failed: a / b"
    with (tmp_path / "out.csv").open() as file:
        assert [(row["peaks"], row["share_of_ideal"]) for row in csv.DictReader(file)][1] == ("10.0 8.0", "0.95")


def test_visible_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible([0, 1]) == "0,1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cases", "llama_1b:8k:ddp"], "got llama_1b:8k:ddp"),
        (["--cases", "llama_1b:8192:zero"], "got llama_1b:8192:zero"),
        (["--cases", "llama_1b:8192:ddp:1"], "got llama_1b:8192:ddp:1"),
        (["--cases", "llama_1b:8192:ddp,memory"], "got llama_1b:8192:ddp,memory"),
        (["--cases", "no_model:8192:ddp"], "got no_model:8192:ddp"),
        (["--rows", "0"], "--rows must be positive"),
        (["--", "model.n_layers"], "must be name=value"),
    ],
)
def test_bad_arguments_end_with_a_message(words, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu-ranks", "1"], "at least 2 GPUs, or .*; got 1"),
        (["--cpu-ranks", "2", "--cases", "nano:64:ddp", "--", "model.layers=2"], "unknown key model.layers"),
    ],
)
def test_runs_that_cannot_start(words, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_scaling", *words])
    with pytest.raises(SystemExit, match=message):
        main()
