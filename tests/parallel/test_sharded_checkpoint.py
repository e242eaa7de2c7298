"""Tests of the folder of a sharded checkpoint, in one process."""

import resource
from pathlib import PosixPath

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from fa_train.checkpoints.files import CheckpointError
from fa_train.parallel.sharded_checkpoint import FolderReader, load_into, write_folder
from tests.support.ranks import needs_ports


@needs_ports
@pytest.mark.parametrize("limit", [1000, 22_000, 29_000])  # bytes; torch raises a RuntimeError with 1000 and 22,000
def test_a_full_disk_is_one_line_wherever_the_write_stops(limit, one_rank, tmp_path):
    state = {"state_dict": {f"weight_{i}": torch.zeros(2000 + 100 * i) for i in range(8)}}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        with pytest.raises(CheckpointError, match=r"x.ckpt could not be written: File too large$"):
            write_folder(state, {"global_step": 1}, tmp_path / "x.ckpt.partial")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not list(tmp_path.iterdir())


@needs_ports
@pytest.mark.usefixtures("one_rank")
def test_ranks_plan_a_checkpoint_without_gpu_memory(tmp_path, monkeypatch):
    """NCCL's first gather allocates GPU memory, but at the end of a run all of it can be in use."""
    groups = []
    for name in ("save", "load"):
        original = getattr(dcp, name)

        def noted(*values, original=original, process_group, **options):
            groups.append((dist.get_backend(process_group), process_group in (None, dist.group.WORLD)))
            return original(*values, process_group=process_group, **options)

        monkeypatch.setattr(dcp, name, noted)
    values = {"state_dict": {"weight": torch.arange(4.0)}}
    write_folder(values, {"global_step": 1}, tmp_path / "x.ckpt")
    read = {"state_dict": {"weight": torch.zeros(4)}}
    load_into(read, tmp_path / "x.ckpt", alone=False)
    assert read["state_dict"]["weight"].tolist() == [0, 1, 2, 3] and groups == [("gloo", False)] * 2
    assert dist.distributed_c10d._world.pg_map.keys() == {dist.group.WORLD}, "the groups are destroyed"


@pytest.mark.parametrize(("kind", "name"), [(PosixPath, "parent"), (Metadata, "__init__")], ids=["adds", "replaces"])
def test_metadata_that_changes_a_class_is_refused(kind, name, tmp_path):
    """A changed PosixPath.parent would make the program write and delete files in a folder that the pickle chooses."""
    before = dict(vars(kind))
    change = f"c{kind.__module__}\n{kind.__name__}\n(N}}X".encode() + len(name).to_bytes(4, "little") + name.encode()
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + change + b"K\x01stb.")
    with pytest.raises(CheckpointError, match=rf"its .metadata changes {kind.__name__}.{name}, which no checkpoint"):
        FolderReader(tmp_path).read_metadata()
    assert dict(vars(kind)) == before
