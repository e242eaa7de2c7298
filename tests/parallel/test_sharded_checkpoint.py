"""Tests of the folder of a sharded checkpoint, in one process."""

import resource

import pytest
import torch
import torch.distributed as dist

from fa_train.checkpoints.files import CheckpointError
from fa_train.parallel.sharded_checkpoint import write_folder
from tests.support.ranks import processes_can_talk

talks = pytest.mark.skipif(not processes_can_talk(), reason="needs a port of 127.0.0.1 and gloo")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@talks
@pytest.mark.parametrize("limit", [1000, 22_000, 29_000])  # bytes; torch raises a RuntimeError for the first two
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
