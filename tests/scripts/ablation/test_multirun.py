"""Tests the attention ablation, a multirun of train.py."""

import csv
import json
import os
import re
import signal
import time
from unittest.mock import Mock

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from fa_train.parallel.failures import signals_to_handle
from fa_train.training import train
from scripts.ablation import multirun
from scripts.ablation.multirun import Report, measured_apart, require_one_document, run_job
from scripts.ablation.process import ProcessError
from scripts.ablation.results import Job, Result, load, save
from tests.scripts.support.wandb_runs import environment, inspect
from tests.support import processes
from tests.support.marks import slow
from tests.support.training import REPOSITORY, command_line, composed, tiny

GIB = 2**30


def ablation(tmp_path, *overrides):
    """Returns overrides for a multirun of the tiny model in tests.support.training, with one document in each row."""
    own = ["data=synthetic", "data.vocab_size=300", "max_steps=3", "batch_size=1", "data.val_rows=1"]
    return ["experiment=ablate_attention", f"hydra.sweep.dir={tmp_path}/sweep", *tiny(tmp_path, *own, *overrides)]


@pytest.mark.slow
def test_a_multirun_with_jobs_that_run_out_of_memory(tmp_path):
    """The scores for 131072 tokens need 274 GB, so jobs of that length run out of memory."""
    sweep = ["attention=naive", "seq_len=32,131072,262144", "logger=wandb"]
    arguments = ["-m", *ablation(tmp_path, *sweep)]
    environment = {"WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    done = command_line(tmp_path, *arguments, limit_memory=True, **environment)
    assert done.returncode == 0, done.stderr
    assert "a training step of nano" in done.stdout and "must fail from N = " in done.stdout
    folder = tmp_path / "sweep"
    with (folder / "ablation.csv").open() as file:
        first, second, third = csv.DictReader(file)
    assert [first["outcome"], second["outcome"]] == ["ok", "oom"] and second["oom"] == "1"
    assert (
        third["outcome"] == "skipped: 131072 ran out of memory" and not (folder / "jobs" / "naive_262144.log").exists()
    )
    assert first["timed_steps"] == "3" and float(second["peak_gib"]) > 0
    assert float(first["tokens_per_s"]) == pytest.approx(32 / float(first["step_ms"]) * 1e3)
    # The FLOPs of T tokens are `6 * N * T + 6 * layers * n_heads * head_dim * T**2`. N is the number of elements in all
    # matrices, including the output matrix of 300 x 32.
    matrices = 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32) + 300 * 32
    flops = 6 * matrices * 32 + 6 * 2 * 32 * 32**2
    assert float(first["tflops"]) * 1e12 * float(first["step_ms"]) / 1e3 == pytest.approx(flops)
    assert "step 3/3" in (folder / "jobs" / "naive_32.log").read_text() and "step 3/3" not in done.stdout, (
        "the output of a job goes to its log only"
    )
    assert (folder / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert "must fail" in (folder / "ablation_formula.csv").read_text()
    assert "| naive | 131072 | oom |" in (folder / "ablation.md").read_text()

    runs = [inspect(path) for path in sorted(folder.rglob("*.wandb"))]
    assert len(runs) == 3
    assert {group for text in runs for group in re.findall(r'"run_group":"(.*?)"', text)} == {str(folder)}
    [summary] = [text for text in runs if '"job_type":"summary"' in text]
    for name in ("table/ablation", "chart/peak_gib", "chart/tokens_per_s", "picture/ablation"):
        assert name in summary, name
    trained = [text for text in runs if '"job_type":"train"' in text]
    assert ["seq_len=32" in text and "perf/tokens_per_s" in text for text in trained].count(True) == 1
    assert ["seq_len=131072" in text and '"oom"' in text for text in trained].count(True) == 1
    [table] = (json.loads(path.read_text()) for path in folder.glob("wandb/offline-*/**/table/ablation_[0-9]*.json"))
    assert table["columns"] == list(first) and [row[2] for row in table["data"]] == [
        "ok", "oom", "skipped: 131072 ran out of memory"
    ]  # fmt: skip


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Returns a function that runs a job with an invented outcome.

    The function returns the job's metrics, and how many times the job ran (0 if it was skipped).
    """

    def run(number, attention, seq_len, outcome, *overrides):
        ran = []

        def call_apart(function, arguments, timeout, log):
            if function is multirun.gpu_and_memory:
                return "no GPU", 80 * GIB
            ran.append(arguments)
            return Result(outcome, peak_gib=1.0)

        monkeypatch.setattr(multirun, "call_apart", call_apart)
        monkeypatch.setattr(signal, "signal", Mock())  # run_job's handlers would stay for other tests
        names = [f"attention={attention}", f"seq_len={seq_len}", *overrides]
        with composed(tmp_path, *ablation(tmp_path, *names)) as cfg:
            hydra = HydraConfig.instance().cfg.hydra
            OmegaConf.set_readonly(hydra, False)
            hydra.job.num = number
            return run_job(train, cfg, timeout=1), len(ran)

    return run


@pytest.mark.slow
def test_jobs_are_skipped_continued_and_tried_again(job):
    assert job(0, "naive", 64, "ok") == ({"peak_gib": 1.0}, 1)
    assert job(1, "naive", 128, "oom") == ({"peak_gib": 1.0, "oom": 1.0}, 1)
    assert job(2, "naive", 256, "ok") == ({}, 0), "a shorter job ran out of memory"
    assert job(3, "naive", 32, "ok")[1] == 1
    assert job(4, "sdpa", 256, "failed: crash")[1] == 1, "only naive attention ran out of memory"
    assert [job(0, "naive", 64, "ok")[1], job(1, "naive", 128, "ok")[1], job(4, "sdpa", 256, "ok")[1]] == [0, 0, 1]
    assert [job(0, "naive", 16, "ok")[1], job(1, "naive", 32, "ok")[1]] == [1, 0], "other lengths"
    assert job(2, "sdpa", 128, "oom")[1] == 1
    assert job(3, "sdpa", 256, "ok") == ({"peak_gib": 1.0}, 0), "a measured result stays"
    assert job(4, "sdpa", 64, "oom")[1] == 1
    assert job(5, "sdpa", 96, "ok") == ({}, 0), "shorter and longer jobs ran out of memory"


@pytest.mark.parametrize(
    "other", ["memory=full", *slow("model.n_layers=3", "max_steps=4", "lit_gpt.compile_model=true")]
)
def test_jobs_differ_in_attention_and_length_alone(job, other):
    job(0, "naive", 64, "ok")
    with pytest.raises(SystemExit, match="may differ in attention and seq_len only"):
        job(1, "naive", 64, "ok", other)


def test_a_continued_ablation_has_the_same_settings(job):
    job(0, "naive", 64, "ok")
    assert job(0, "naive", 64, "ok", "sweep_job.timeout=9", "logger=csv", "++trainer.logger=false")[1] == 0
    with pytest.raises(SystemExit, match="got batch_size=2, but batch_size=1 in the earlier jobs in"):
        job(0, "naive", 64, "ok", "batch_size=2")


def test_a_continued_ablation_has_the_same_gpu(job, tmp_path):
    job(0, "naive", 64, "ok")
    path = tmp_path / "sweep" / "jobs" / "settings.json"
    path.write_text(path.read_text().replace("no GPU", "NVIDIA H200"))
    with pytest.raises(SystemExit, match=r"^error: hydra.sweep.dir must .* of no GPU; got .* are of NVIDIA H200$"):
        job(0, "naive", 64, "ok")


@pytest.mark.slow
def test_an_ablation_without_a_result_may_continue_with_other_settings(job, tmp_path):
    job(0, "naive", 64, "failed: a wrong setting")
    assert job(0, "naive", 32, "ok", "batch_size=2")[1] == 1
    assert load(tmp_path / "sweep" / "jobs").keys() == {Job("naive", 32)}, "the failed job had other settings"


@pytest.mark.slow
def test_a_model_that_cannot_be_ends_the_program_at_once(tmp_path):
    done = command_line(tmp_path, "-m", *ablation(tmp_path, "model.n_kv_heads=3", "attention=naive,sdpa"))
    assert done.returncode == 1 and "n_heads must be a multiple of" in done.stderr.splitlines()[-1], done.stderr
    assert not list(tmp_path.rglob("*.json"))


def test_an_option_of_attention_may_be_in_a_folder(tmp_path):
    save(Job("mine/fast", 64), Result("ok", peak_gib=1.0), tmp_path)
    assert load(tmp_path) == {Job("mine/fast", 64): Result("ok", peak_gib=1.0)}


def with_hydra(cfg):
    """Returns the config in the form that Hydra passes to its callbacks."""
    return OmegaConf.merge(HydraConfig.instance().cfg, cfg)


@pytest.mark.slow
def test_a_failed_job_is_in_the_table_and_ends_the_program_with_1(job, tmp_path):
    with composed(tmp_path, *ablation(tmp_path)) as cfg, pytest.raises(SystemExit, match="no job has a result in"):
        Report().on_multirun_end(with_hydra(cfg))
    job(0, "naive", 64, "ok")
    job(1, "sdpa", 64, "failed: exit status 7")
    with composed(tmp_path, *ablation(tmp_path)) as cfg, pytest.raises(SystemExit, match=r"1 of 2 .*sdpa 64"):
        Report().on_multirun_end(with_hydra(cfg))
    assert "failed: exit status 7" in (tmp_path / "sweep" / "ablation.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(["+logger.entity=team", "logger.project=p"], [["offline", "team", "p"]], id="entity"),
        pytest.param(["logger.mode=online"], [["online", None, "fa_train"]], id="mode"),
        pytest.param(["logger.mode=online", "+logger.offline=true"], [["offline", None, "fa_train"]], id="offline"),
        pytest.param(["trainer.logger=false"], [], id="no-logger"),
    ],
)
def test_the_summary_goes_where_the_jobs_go(overrides, expected, job, tmp_path, monkeypatch):
    started = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")  # an agent of a W&B sweep also sets WANDB_RUN_ID
    monkeypatch.setenv("WANDB_RUN_ID", "job")
    monkeypatch.setattr("wandb.init", lambda **given: started.append(given) or Mock())
    job(0, "naive", 64, "ok")
    with composed(tmp_path, *ablation(tmp_path, "logger=wandb", *overrides)) as cfg:
        Report().on_multirun_end(with_hydra(cfg))
    assert [[given["mode"], given["entity"], given["project"]] for given in started] == expected
    assert all(given["id"] not in (None, "job") for given in started), "the summary must not continue a job's run"


@pytest.mark.slow
def test_an_error_in_the_report_ends_the_program_with_1(job, tmp_path, monkeypatch, capsys):
    job(0, "naive", 64, "ok")
    monkeypatch.setattr(multirun, "write_files", Mock(side_effect=OSError("no space")))
    with composed(tmp_path, *ablation(tmp_path)) as cfg, pytest.raises(SystemExit, match="1"):
        Report().on_multirun_end(with_hydra(cfg))
    assert "OSError: no space" in capsys.readouterr().err


def test_each_signal_that_ends_a_run_ends_an_ablation(job):
    expected = set(signals_to_handle())
    job(0, "naive", 64, "ok")
    assert {call.args[0] for call in signal.signal.call_args_list} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("send", "signum"),
    [pytest.param(os.killpg, signal.SIGINT, id="terminal"), pytest.param(os.kill, signal.SIGTERM, id="kill")],
)
def test_a_signal_keeps_what_is_finished_and_the_same_command_continues(tmp_path, send, signum):
    arguments = ["-m", *ablation(tmp_path, "attention=naive,chunked,sdpa", "seq_len=32", "max_steps=300")]
    folder, out, errors = (tmp_path / name for name in ("sweep/jobs", "out", "errors"))
    out.touch()
    errors.touch()
    multirun_of_long_jobs = processes.start(REPOSITORY / "train.py", arguments, tmp_path, environment(), out, errors)
    try:
        deadline = time.monotonic() + 120
        while not (folder / "naive_32.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # the second job should run now; the third may already run
        send(multirun_of_long_jobs.pid, signum)
        multirun_of_long_jobs.join(30)
    finally:
        multirun_of_long_jobs.kill()
    stderr = errors.read_text()
    assert multirun_of_long_jobs.exitcode == 128 + signum, stderr
    assert stderr.strip().splitlines()[-1].startswith("stopped; ")
    kept = load(folder)
    assert len(kept) in (1, 2) and kept[Job("naive", 32)].outcome == "ok"
    done = command_line(tmp_path, *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert load(folder).keys() == {Job("naive", 32), Job("chunked", 32), Job("sdpa", 32)}
    assert kept.items() <= load(folder).items(), "finished jobs are not measured again"


def test_time_and_flops_are_of_all_rows_of_a_step(tmp_path):
    """With twice as many rows per step, and the same tokens per second, a step takes twice as long."""

    def measured(rows):
        with composed(tmp_path, *ablation(tmp_path, f"batch_size={rows}")) as cfg:
            return multirun.measure(lambda _: {"perf/tokens_per_s": 64e3}, cfg, HydraConfig.instance().cfg, "cpu")

    one, two = measured(1), measured(2)
    assert (two.step_ms, two.tflops) == pytest.approx((2 * one.step_ms, one.tflops))


@pytest.mark.parametrize(
    ("exitcode", "result"),
    [(-signal.SIGKILL, Result("oom")), (7, Result("failed: exit status")), (None, Result("failed: exit status"))],
)
def test_a_process_killed_by_linux_ran_out_of_memory(exitcode, result, tmp_path, monkeypatch):
    monkeypatch.setattr(multirun, "call_apart", Mock(side_effect=ProcessError("exit status", exitcode)))
    with composed(tmp_path, *ablation(tmp_path)) as cfg:
        assert measured_apart(train, cfg, 1.0, tmp_path / "log") == result


@pytest.mark.parametrize(
    "override",
    [
        "data.micro_batch_size=2",
        "data.document_len=32",
        "data.length_sigma=0.5",
        "trainer.devices=2",
        "trainer.precision=bf16-true",
        "adapter=lora",
    ],
)
def test_a_job_is_a_step_on_one_document(override, tmp_path):
    with (
        composed(tmp_path, *ablation(tmp_path, override)) as cfg,
        pytest.raises(ValueError, match=f"{override.split('=')[0]}.* got {override.split('=')[1]}"),
    ):
        require_one_document(cfg)
