"""A multirun ends with a table of its jobs, which is also in sweep.csv."""

import csv
import json

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf

from fa_train.sweep_table import SweepTable


def job_config(folder, number, mode=RunMode.MULTIRUN):
    output = folder / str(number)
    output.mkdir(exist_ok=True)
    hydra = {
        "mode": mode, "job": {"num": number}, "sweep": {"dir": str(folder)}, "runtime": {"output_dir": str(output)},
    }  # fmt: skip
    return OmegaConf.create({"hydra": hydra})


def finish(callback, folder, number, overrides, result=None, error=None):
    """Calls the callback as Hydra does after a job."""
    config = job_config(folder, number)
    if result is not None:
        (folder / str(number) / "result.json").write_text(json.dumps(result))
    status = JobStatus.FAILED if error else JobStatus.COMPLETED
    callback.on_job_end(config, JobReturn(overrides=overrides, status=status, _return_value=error))
    return config


def test_the_table_shows_what_differs_and_the_file_shows_all(tmp_path, capsys):
    callback = SweepTable()
    result = {"train/loss": 1.5, "perf/tokens_per_s": 12345.6, "tokens": 640}
    finish(callback, tmp_path, 0, ["seq_len=64", "+data.path=x=y", "attention=flash"], result)
    finish(callback, tmp_path, 1, ["seq_len=128", "+data.path=x=y", "attention=flash"], {"oom": 1.0})
    config = finish(callback, tmp_path, 2, ["seq_len=-1", "attention=flash"], error=ValueError("seq_len is negative"))
    assert capsys.readouterr().err == f"job 2 failed: ValueError: seq_len is negative. See {tmp_path}/sweep.csv\n"
    callback.on_multirun_end(config)
    assert capsys.readouterr().out.splitlines() == [
        "job  seq_len  data.path  loss    tokens/s  outcome",
        "0    64       x=y        1.5000  12,346    ok",
        "1    128      x=y                          oom",
        "2    -1                                    ValueError: seq_len is negative",
        f"sweep: {tmp_path}/sweep.csv",
    ]
    with (tmp_path / "sweep.csv").open() as file:
        first, second, third = csv.DictReader(file)
    assert first["tokens"] == "640" and first["attention"] == third["attention"] == "flash"
    assert [row["outcome"] for row in (first, second)] == ["ok", "oom"] and second["train/loss"] == ""


@pytest.mark.parametrize("case", ["single run", "other rank", "other rank of srun", "sweep with its own report"])
def test_other_runs_have_no_table(tmp_path, monkeypatch, capsys, case):
    config = job_config(tmp_path, 0, RunMode.RUN if case == "single run" else RunMode.MULTIRUN)
    if case.startswith("other rank"):
        monkeypatch.setenv("SLURM_PROCID" if "srun" in case else "RANK", "1")
    if case == "sweep with its own report":
        config.sweep_job = {"_target_": "builtins.dict"}
    callback = SweepTable()
    callback.on_job_end(config, JobReturn(overrides=[], status=JobStatus.COMPLETED))
    callback.on_multirun_end(config)
    assert not (tmp_path / "sweep.csv").exists() and capsys.readouterr().out == ""
