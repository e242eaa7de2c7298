"""Tests checkpoint files and folders: writing and reading them, refusing damaged ones, and finding the newest one."""

import errno
import os
import pickle
import re
import resource
import shlex
import shutil
import tempfile
import threading
import zipfile
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hydra.core.override_parser.overrides_parser import OverridesParser

from fa_train.checkpoints.files import (
    CheckpointError,
    all_finite,
    newest,
    read_file,
    remove_partial,
    require_same_shapes,
    write_file,
)
from fa_train.checkpoints.resume import checkpoint_path, override_for
from fa_train.parallel.sharded_checkpoint import load_into, load_sharded, require_whole, saved_optimizer, write_folder
from scripts import trained_model
from tests.support.peak_memory import peak_growth
from tests.support.pickles import Evil
from tests.support.ranks import needs_ports


def content() -> dict:
    return {"global_step": 3, "state_dict": {"model.weight": torch.randn(64, 64)}}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "step_0000003.ckpt"
    write_file(content(), path)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "folder.ckpt"
    own = content()
    optimizer = {"state": {}, "param_groups": [{"params": ["model.weight"], "lr": 0.1}]}
    dcp.save({"state_dict": own.pop("state_dict"), "optimizer_0": optimizer}, checkpoint_id=path, no_dist=True)
    write_file(own, path / "meta.pt")
    return path


def test_what_is_written_is_read(file):
    require_whole(file)
    assert torch.equal(read_file(file)["state_dict"]["model.weight"], torch.load(file)["state_dict"]["model.weight"])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "one-bit": flip_a_bit,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "text": lambda path: path.write_text("# A readme\n"),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"global_step": 3})),
    "another-zip": lambda path: zipfile.ZipFile(path, "w").writestr("a.txt", "text"),
    "other-content": lambda path: torch.save({"weights": torch.zeros(3)}, path),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_or_foreign_file_is_one_line(damage, file):
    damage(file)
    with pytest.raises(
        CheckpointError, match=r"step_0000003.ckpt (is damaged or is not a|must be a) checkpoint of train.py"
    ) as caught:
        require_whole(file)
    assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("__0_0.distcp", "meta.pt") for damage in ("one-bit", "cut", "empty", "text")),
        *((".metadata", damage) for damage in ("cut", "empty", "text")),  # one-bit damage is tested in the next test
    ],
)
def test_a_damaged_folder_is_one_line(name, damage, folder):
    require_whole(folder)
    DAMAGE[damage](folder / name)
    with pytest.raises(CheckpointError, match=r"folder.ckpt\S* is damaged or is not a checkpoint") as caught:
        require_whole(folder)
    assert "\n" not in str(caught.value)


@needs_ports
@pytest.mark.usefixtures("one_rank")
def test_each_changed_byte_of_the_metadata_is_found(tmp_path):
    folder = tmp_path / "folder.ckpt"
    write_folder({"state_dict": content()["state_dict"]}, {"global_step": 3}, folder)
    require_whole(folder)
    path = folder / ".metadata"
    whole = path.read_bytes()
    for place in range(0, len(whole), 50):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"is damaged .*: the CRC32 of its .metadata is wrong$"):
            require_whole(folder)


def test_a_folder_without_its_weights_is_one_line(folder):
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="is damaged or is not a checkpoint"):
        require_whole(folder)


def test_a_folder_of_something_else_is_no_checkpoint(tmp_path):
    wanted = "a checkpoint must be a .ckpt file, or the folder of a sharded checkpoint; got .* without meta.pt"
    with pytest.raises(CheckpointError, match=wanted + "$"):
        load_sharded(tmp_path)
    path = tmp_path / "time" / "checkpoints" / "step_1.ckpt"
    path.parent.mkdir(parents=True)
    path.touch()
    for read in (require_whole, trained_model._run_folder):
        with pytest.raises(CheckpointError, match=rf"{wanted}. Its newest checkpoint is {re.escape(str(path))}$"):
            read(tmp_path)


@pytest.mark.timeout(20)
def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"must be a file or a folder; got \S*x.ckpt, a pipe or another special"):
        require_whole(tmp_path / "x.ckpt")


@pytest.mark.parametrize("read", [require_whole, load_sharded, lambda path: load_into({}, path, alone=True)])
def test_metadata_runs_no_code(read, folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"its .metadata names posix.system, which no checkpoint needs"):
        read(folder)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_is_no_tensor_runs_no_code(folder, tmp_path):
    shutil.rmtree(folder)
    values = {
        "state_dict": content()["state_dict"],
        "optimizer_0": {"param_groups": {0: {"lr": Evil(tmp_path / "ran")}}},
    }
    dcp.save(values, checkpoint_id=folder, no_dist=True)
    write_file({"global_step": 3}, folder / "meta.pt")
    with pytest.raises(CheckpointError, match="is damaged or is not a checkpoint"):
        load_sharded(folder)
    assert not (tmp_path / "ran").exists()


def test_members_of_an_enum_may_be_pickled_with_getattr(folder, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle the members of an enum as calls of getattr."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    monkeypatch.setattr(Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert b"getattr" in (folder / ".metadata").read_bytes()
    require_whole(folder)


class Attribute:
    """An object that is pickled as the call getattr(torch.Size, "numel")."""

    def __reduce__(self):
        return getattr, (torch.Size, "numel")


def test_metadata_gets_no_other_attributes(folder):
    (folder / ".metadata").write_bytes(pickle.dumps(Attribute()))
    with pytest.raises(CheckpointError, match=r"calls getattr on <class 'torch.Size'>, which no checkpoint needs"):
        require_whole(folder)


def test_metadata_names_files_of_its_folder_only(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for stored in metadata.storage_data.values():
        stored.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names the file ../secret, outside of the folder"):
        require_whole(folder)


GROUP = {"params": ["model.weight"], "lr": 0.1}


@pytest.mark.parametrize(
    ("state", "error"),
    [
        pytest.param({"model": {"weight": 1}}, "must name weights and .* got model.weight", id="foreign"),
        pytest.param({"state_dict": {"model": {"weight": 1}}}, "got state_dict.model.weight", id="nested-weight"),
        pytest.param({"state_dict": 1}, "got state_dict", id="no-weights"),
        pytest.param({"optimizer_0": {"lr": 0.1}}, "got optimizer_0.lr", id="no-group"),
        pytest.param({"optimizer_0": {"param_groups": {"0": GROUP}}}, "got optimizer_0.param_groups", id="no-number"),
        pytest.param(
            {"optimizer_0": {"state": {"model.bias": {"step": 1}}, "param_groups": [GROUP]}},
            "has optimizer states of model.bias, but no group that names it", id="state-without-group",
        ),
        pytest.param(
            {"optimizer_0": {"state": {"model.bias": {"step": 1}}, "param_groups": [{"lr": 0.1}]}},
            "has optimizer states of model.bias, but no group that names it", id="group-without-parameters",
        ),
    ],
)  # fmt: skip
def test_a_folder_with_foreign_names_is_one_line(state, error, tmp_path):
    dcp.save(state, checkpoint_id=tmp_path / "x.ckpt", no_dist=True)
    write_file({"global_step": 3}, tmp_path / "x.ckpt" / "meta.pt")
    with pytest.raises(CheckpointError, match=rf"/x.ckpt/.metadata .*{error}"):
        load_sharded(tmp_path / "x.ckpt")


@pytest.mark.parametrize("keys", [None, {"lost": ("state_dict", "lost")}], ids=["none", "lost"])
@pytest.mark.parametrize("read", [load_sharded, saved_optimizer])
def test_a_folder_whose_names_were_lost_is_one_line(read, keys, folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = keys
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"its .metadata is not that of a sharded|optimizer states; got lost"):
        read(folder)


def test_a_folder_is_read_as_a_file_is(folder):
    read = load_sharded(folder)
    assert list(read["state_dict"]) == ["model.weight"] and read["global_step"] == 3
    assert read["optimizer_states"] == [{"state": {}, "param_groups": [{"params": [0], "lr": 0.1}]}]


@pytest.fixture
def full_disk():
    """Lets this process write at most 64 kB to each file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, full_disk):
    with pytest.raises(CheckpointError, match=r"^the checkpoint \S*big.ckpt could not be written: File too large$"):
        write_file({"global_step": 1, "weights": torch.zeros(2**16)}, tmp_path / "big.ckpt.partial")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^the checkpoint \S*/file/x.ckpt could not be written: File exists$"):
        write_file({"global_step": 1}, tmp_path / "file" / "x.ckpt.partial")


def test_an_error_of_the_program_is_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(Exception, match=r"pickle|local object") as caught:  # the message depends on Python's version
        write_file({"global_step": 1, "function": lambda: None}, tmp_path / "x.ckpt.partial")
    assert not isinstance(caught.value, CheckpointError)


def test_no_copy_is_made_in_memory_or_elsewhere(tmp_path, monkeypatch):
    """The checkpoint has 64 MB, and memory may grow by at most 32 MB."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    weights = torch.ones(2**24)
    with peak_growth() as peak:
        write_file({"global_step": 1, "weights": weights}, tmp_path / "x.ckpt.partial")
    assert peak.bytes < 2**25


def test_unfinished_checkpoints_are_removed(file, folder):
    file.rename(f"{file}.partial")
    shutil.copytree(folder, f"{folder}.partial")
    remove_partial(file.parent)
    assert list(file.parent.iterdir()) == [folder]


def test_an_unfinished_checkpoint_that_cannot_be_removed_is_kept(file, monkeypatch):
    def unlink(path: Path, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    partial = file.rename(f"{file}.partial")
    monkeypatch.setattr(Path, "unlink", unlink)
    remove_partial(file.parent)
    assert partial.exists()


@needs_ports
@pytest.mark.usefixtures("one_rank")
def test_a_failed_removal_does_not_hide_why_a_folder_was_not_written(tmp_path, monkeypatch):
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", fail)
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(CheckpointError, match=r"x.ckpt could not be written: Read-only file system$"):
        write_folder(content(), {"global_step": 3}, tmp_path / "x.ckpt.partial")


def test_the_newest_is_by_time_then_by_name(tmp_path):
    times = {"step_0000002.ckpt": 5, "step_0000009.ckpt": 4, "step_0000001.ckpt": 5}
    for name, seconds in times.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    (tmp_path / "gone.ckpt").symlink_to(tmp_path / "removed meanwhile")
    names = [path.name for path in newest(tmp_path.glob("*.ckpt"))]
    assert names == ["step_0000002.ckpt", "step_0000001.ckpt", "step_0000009.ckpt"]


def test_last_falls_back_to_the_newest_whole_checkpoint(file, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    whole = file.rename(folder / file.name)
    for step, damage in ((4, "cut"), (5, "text")):
        path = shutil.copy(whole, folder / f"step_000000{step}.ckpt")
        DAMAGE[damage](Path(path))
        os.utime(path, (2**31 + step, 2**31 + step))
    shutil.copy(whole, folder / "step_0000006.ckpt.partial")  # no error mentions an unfinished save
    assert checkpoint_path("last", tmp_path) == str(whole)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" is damaged")[0][-17:] for line in said] == ["step_0000005.ckpt", "step_0000004.ckpt"]
    whole.unlink()
    with pytest.raises(ValueError, match=r"found only damaged checkpoints below .* \(2 in all\)"):
        checkpoint_path("last", tmp_path)


@pytest.mark.parametrize(
    ("folder", "is_last"),
    [
        pytest.param("runs/mine/now", True, id="below-its-runs"),
        pytest.param("runs/mine", True, id="in-the-folder-of-its-runs"),
        pytest.param("runs/multirun/now/0", False, id="sweep"),
        pytest.param("runs/mine_too/now", False, id="similar-name"),
        pytest.param("runs/mine/nested/now", False, id="nested-name"),
    ],
)
def test_a_run_is_told_to_resume_from_last_only_if_last_finds_its_checkpoint(folder, is_last, file, tmp_path):
    """Runs of run_name=mine are in runs/mine/<time>. Runs of run_name=mine/nested are in runs/mine/nested/<time>."""
    path, runs = tmp_path / folder / "checkpoints" / file.name, tmp_path / "runs/mine"
    path.parent.mkdir(parents=True)
    file.rename(path)
    assert override_for(path, runs) == ("ckpt_path=last" if is_last else f"ckpt_path={path}")
    with nullcontext() if is_last else pytest.raises(ValueError, match="found no checkpoint below"):
        assert checkpoint_path("last", runs) == str(path)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("plain-1_a.b", id="plain"),
        pytest.param("a=1,b=2", id="overrides"),
        pytest.param("r ü (1)", id="space-and-umlaut"),
        pytest.param("it's", id="single-quote"),
        pytest.param('a"b', id="double-quote"),
        pytest.param('a\\"b', id="backslash-before-quote"),
        pytest.param("a\\b", id="backslash"),
        pytest.param("[1]{2}~a:b@c%d+e#f&g*h?i", id="other-characters"),
    ],
)
def test_the_override_that_resumes_can_be_pasted_into_a_shell(folder, tmp_path):
    path = tmp_path / folder / "checkpoints" / "step_0000001.ckpt"
    [argument] = shlex.split(override_for(path, tmp_path / "runs"))
    override = OverridesParser.create().parse_override(argument)
    assert (override.key_or_group, override.value()) == ("ckpt_path", str(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_element_that_is_not_finite_is_seen(dtype, value):
    weights = [torch.randn(5, dtype=dtype), torch.full((3,), 1e30, dtype=dtype), torch.zeros(0), torch.ones(2)]
    assert all_finite(weights)
    weights[1][2] = value
    assert not all_finite(weights)


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        ({"a": (2,)}, "the checkpoint has no b"),
        ({"a": (2,), "b": (3,), "c": (1,)}, "the model has no c"),
        ({"a": (2,), "b": (4,)}, r"b must have the shape \(3,\); got \(4,\)"),
    ],
)
def test_the_first_difference_of_two_models_is_named(theirs, difference):
    with pytest.raises(CheckpointError, match=rf"^x.ckpt does not fit the model: {difference}\. Use the model and"):
        require_same_shapes({"a": (2,), "b": (3,)}, theirs, "x.ckpt")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        pytest.param(np.float64(1.5), r"numpy\.\S+\.scalar", id="numpy"),
        pytest.param(lambda: 1.5, r"a value that pickle refuses \(Can't pickle .*\)", id="function"),
        pytest.param(threading.Lock(), r"a value that pickle refuses \(cannot pickle .*\)", id="lock"),
    ],
)
def test_a_callback_whose_state_cannot_be_read_does_not_spoil_the_checkpoint(value, named, tmp_path, capsys):
    states = {"Mine": {"best": value}, "Other": {"best": 1.5, "weights": torch.ones(2)}}
    write_file({"global_step": 1, "callbacks": states}, tmp_path / "x.ckpt")
    assert read_file(tmp_path / "x.ckpt")["callbacks"].keys() == {"Other"}
    [line] = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"warning: the checkpoint has no state of Mine; .*; got {named}", line)
    write_file({"global_step": 1, "of_module": np.float64(1.5)}, tmp_path / "x.ckpt")
    assert "no run can resume from a checkpoint with numpy" in capsys.readouterr().out
    with pytest.raises((AttributeError, pickle.PicklingError)):
        write_file({"global_step": 1, "of_module": lambda: 0}, tmp_path / "y.ckpt")
    assert not (tmp_path / "y.ckpt").exists()


def test_a_file_system_without_mmap_loses_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", Mock(side_effect=RuntimeError("unable to mmap 8 bytes from file")))
    write_file({"global_step": 1}, tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").exists()
