"""A multirun ends with a table of its jobs, which is also in sweep.csv."""

import csv
import json
import os
import re

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fa_train.sweep_table import SweepTable, print_tables
from tests.support.training import command_line, tiny


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


def test_the_table_shows_what_differs_and_the_file_shows_all(tmp_path, capsys):
    callback = SweepTable()
    result = {"train/loss": 1.5, "perf/tokens_per_s": 12345.6, "tokens": 640}
    finish(callback, tmp_path, 0, ["seq_len=64", "+data.path=x=y", "attention=flash"], result)
    finish(callback, tmp_path, 1, ["seq_len=128", "+data.path=x=y", "attention=flash"], {"oom": 1.0})
    finish(callback, tmp_path, 2, ["seq_len=-1", "attention=flash"], error=ValueError("seq_len is\n\nnegative"))
    assert capsys.readouterr().err == f"job 2 failed: ValueError: seq_len is negative. See {tmp_path}/sweep.csv\n"
    print_tables()
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


def test_a_multirun_of_one_process_has_a_table_although_the_cluster_has_set_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    finish(SweepTable(), tmp_path, 0, ["seed=0"], {"train/loss": 1.5})
    print_tables()
    assert (tmp_path / "sweep.csv").exists()


def test_a_second_multirun_in_a_folder_keeps_the_first_file_and_shows_no_old_result(tmp_path, capsys):
    finish(SweepTable(), tmp_path, 0, ["seed=0"], {"train/loss": 1.5})
    print_tables()
    os.utime(tmp_path / "0" / "result.json", (1e9, 1e9))  # older than the files of the second multirun
    callback = SweepTable()
    callback.on_job_start(job_config(tmp_path, 0))
    finish(callback, tmp_path, 0, ["seed=1"], error=ValueError("no rows"))
    print_tables()
    assert "1.5" not in capsys.readouterr().out.split("sweep: ")[1]
    outcomes = [next(csv.DictReader((tmp_path / name).open()))["outcome"] for name in ("sweep-1.csv", "sweep.csv")]
    assert outcomes == ["ok", "ValueError: no rows"]


def test_the_outcome_is_the_error_that_hydra_has_wrapped(tmp_path, capsys):
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "builtins.int", "_args_": ["x"]})
    finish(SweepTable(), tmp_path, 0, ["seed=0"], error=raised.value)
    print_tables()
    assert "  ValueError: invalid literal for int() with base 10: 'x'\n" in capsys.readouterr().out


def test_a_table_is_printed_once(tmp_path, capsys):
    finish(SweepTable(), tmp_path, 0, ["seq_len=64"], {"train/loss": 1.5})
    print_tables()
    assert capsys.readouterr().out
    print_tables()
    assert not capsys.readouterr().out


@pytest.mark.slow
def test_a_multirun_with_a_failed_job_ends_with_its_table_and_the_error(tmp_path):
    sweep = ["batch_size=4,5", "data.micro_batch_size=2", "max_steps=1"]
    done = command_line(tmp_path, "-m", *tiny(tmp_path, *sweep))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    *_, header, first, second, file = done.stdout.splitlines()
    assert header.split()[:2] == ["job", "batch_size"], "only the batch size differs"
    assert first.split()[:2] == ["0", "4"] and first.endswith(" ok")
    assert second.split()[:2] == ["1", "5"] and "ValueError: batch_size must be a multiple of" in second
    assert re.fullmatch(r"sweep: \S+/sweep\.csv", file)
    assert done.stderr.splitlines()[-1].startswith("error: batch_size must be a multiple of")


@pytest.mark.parametrize("case", ["single run", "other rank", "other rank of srun", "sweep with its own report"])
def test_other_runs_have_no_table(tmp_path, monkeypatch, capsys, case):
    config = job_config(tmp_path, 0, RunMode.RUN if case == "single run" else RunMode.MULTIRUN)
    if case.startswith("other rank"):
        monkeypatch.setenv("SLURM_NTASKS" if "srun" in case else "TORCHELASTIC_RUN_ID", "2")
        monkeypatch.setenv("SLURM_PROCID" if "srun" in case else "RANK", "1")
    if case == "sweep with its own report":
        config.sweep_job = {"_target_": "builtins.dict"}
    callback = SweepTable()
    callback.on_job_end(config, JobReturn(overrides=[], status=JobStatus.COMPLETED))
    print_tables()
    assert not (tmp_path / "sweep.csv").exists() and capsys.readouterr().out == ""
