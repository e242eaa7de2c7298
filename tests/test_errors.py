"""The message of an error is one line, without a traceback."""

import errno
import os
import shlex
from pathlib import Path

import pytest
from hydra.core.utils import _save_config
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from fa_train import run_config
from fa_train.data.tokens.cache import DiskFullError
from fa_train.errors import FULL, UNUSABLE, errors_in_one_line, explain
from tests.support.training import composed
from train import is_raised_by_hydra


class Broken(Dataset):
    """A dataset whose items raise an error that has another error as its cause."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def __getitem__(self, index):
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise self.error from cause


@pytest.mark.parametrize(
    ("override", "line"),
    [
        pytest.param(
            "logger=null",
            "logger must be one of csv, tensorboard, wandb; got null. trainer.logger=false switches logging off",
            id="null",
        ),
        pytest.param("strategy=7", "strategy must be one of auto, ddp, fsdp; got 7", id="number"),
        pytest.param(
            "~logger",
            "logger must be one of csv, tensorboard, wandb; got nothing. trainer.logger=false switches logging off",
            id="removed",
        ),
    ],
)
def test_a_group_without_an_option_is_answered_with_the_options(override, line, monkeypatch):
    overrides = ["preset=cpu", "data=synthetic", override]
    monkeypatch.setattr("sys.argv", ["train.py", *overrides])
    with pytest.raises(Exception) as raised, composed("folder", *overrides) as cfg:
        run_config.check(cfg)
    assert explain(raised.value) == line


@pytest.mark.parametrize("override", ["+experiment=finetune", "+logger=csv"])
def test_a_group_that_is_added_again_is_to_be_written_without_plus(override, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", override])
    with pytest.raises(Exception) as raised, composed("folder", override):
        pass
    group = override[1:].partition("=")[0]
    line = f"{group} is already a group of conf/train.yaml. Write {override[1:]} without +"
    assert explain(raised.value) == line
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert "use 'override" in explain(raised.value)


def test_a_group_that_the_command_line_does_not_remove_is_not_named(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "preset=cpu"])
    assert explain(ValueError("Interpolation key 'logger' not found")) == "Interpolation key 'logger' not found"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/home/José", id="not-ascii"),
        pytest.param("/data/lr=3", id="equals-sign"),
        pytest.param("/data/new (2)", id="parentheses"),
        pytest.param("/data/Bob's", id="apostrophe"),
        pytest.param('/data/3" "disks', id="quotes"),
        pytest.param('/data=\\a\\"b\\', id="backslashes"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_answered_with_the_same_value_in_quotes(path):
    with pytest.raises(Exception) as raised, composed("folder", "preset=cpu", "data=text", f"data.path={path}"):
        pass
    line, _, advice = explain(raised.value).partition(". If it is text, quote it for Hydra and for the shell: ")
    assert line == f"data.path must be a value that Hydra can read; got {path}"
    with composed("folder", "preset=cpu", "data=text", *shlex.split(advice)) as cfg:
        assert cfg.data.path == path


def test_hydra_explains_the_errors_of_its_own_functions():
    with pytest.raises(Exception) as raised, composed("folder", "preset=cpu", "seq_len=range(a)"):
        pass
    assert "mismatch type argument start" in explain(raised.value)


@pytest.mark.parametrize("kind", [ValueError, DiskFullError])
def test_an_error_of_a_data_worker_has_only_its_message(kind):
    error = kind("a.arrow is damaged: ValueError: bad.\nDelete it")
    with pytest.raises(kind) as raised:
        next(iter(DataLoader(Broken(error), num_workers=1, multiprocessing_context="fork")))
    assert "Traceback" in str(raised.value)
    assert explain(raised.value) == "a.arrow is damaged: ValueError: bad. Delete it"
    assert explain(error) == "a.arrow is damaged: ValueError: bad. Delete it"


@pytest.mark.parametrize("number", [*FULL, *UNUSABLE], ids=errno.errorcode.get)
@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "with-an-error-that-hides-it"])
def test_an_error_of_the_disk_is_one_line(number, wrapped):
    cause = OSError(number, os.strerror(number), "runs/train.log")
    with pytest.raises(SystemExit) as ended, errors_in_one_line((ValueError,)):
        if wrapped:  # as logging.config does
            raise ValueError("Unable to configure handler 'file'") from cause
        raise cause
    about = "Unable to configure handler 'file'" if wrapped else "a file cannot be read or written"
    assert ended.value.code == f"error: {about}: [Errno {number}] {os.strerror(number)}: 'runs/train.log'"


def test_other_errors_of_the_operating_system_keep_their_traceback():
    with pytest.raises(BrokenPipeError), errors_in_one_line((ValueError,)):
        raise BrokenPipeError(errno.EPIPE, "x")


def test_a_setting_that_lightning_refuses_is_said_in_lightnings_words():
    with pytest.raises(InstantiationException) as raised:
        instantiate({"_target_": "lightning.Trainer", "accelerator": "cpu", "limit_val_batches": 2.5})
    assert explain(raised.value).startswith("You have passed invalid value 2.5 for limit_val_batches")


def test_only_hydras_own_errors_are_about_the_runs_folder():
    with pytest.raises(NotADirectoryError) as hydras:
        _save_config(OmegaConf.create({}), "config.yaml", Path("/dev/null/run"))
    with pytest.raises(NotADirectoryError) as own:
        Path("/dev/null/run").mkdir()
    assert is_raised_by_hydra(hydras.value) and not is_raised_by_hydra(own.value)
