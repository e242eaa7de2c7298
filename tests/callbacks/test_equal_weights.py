"""Ranks that must have equal weights are compared by a hash of the bits. A run ends if the hashes differ."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from fa_train.callbacks import equal_weights
from fa_train.callbacks.equal_weights import EqualWeights, bit_hash, copies, differences
from fa_train.parallel.fsdp import FullyShardedStrategy, local
from tests.support import processes
from tests.support.training import quiet_environment, tiny
from tests.test_train import FORKED, processes_can_talk

CPU = torch.device("cpu")


class FlipsBit(Callback):
    """Flips one bit of a weight of one rank, at the start of the step after `step`."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.done = rank, step, False

    @torch.no_grad()
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step) and not self.done:
            local(pl_module.model.blocks[1].ffn_norm.weight.detach()).view(torch.int32)[-1] ^= 1 << 12
            self.done = True


def hash_of(*tensors: torch.Tensor) -> int:
    return int(bit_hash(tensors, CPU))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(equal_weights, "PIECE", 8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_each_bit_of_each_element_counts(dtype, small_pieces):
    tensors = [torch.randn(3, 7).to(dtype), torch.zeros(0, dtype=dtype), torch.randn(2).to(dtype)]
    original = hash_of(*tensors)
    for tensor in tensors:
        bits = tensor.view(equal_weights.INTEGERS[dtype.itemsize]).view(-1)
        for i in range(bits.numel()):
            before = bits[i].clone()
            for bit in range(8 * dtype.itemsize):
                bits[i] = before ^ (torch.ones_like(before) << bit)
                assert hash_of(*tensors) != original, (i, bit)
            bits[i] = before
    assert hash_of(*tensors) == original


def test_the_order_of_elements_counts(small_pieces):
    x = torch.randn(20)
    changed = [x.clone() for _ in range(4)]
    changed[0][[3, 4]] = x[[4, 3]]
    changed[1][[3, 11]] = x[[11, 3]]  # in another piece
    changed[2][[0, 5]] *= -1
    changed[3][[2, 19]] *= -1
    assert len({hash_of(x), hash_of(x.flip(0)), *map(hash_of, changed)}) == 6
    assert hash_of(x.view(4, 5).T) == hash_of(x.view(4, 5).T.contiguous()) != hash_of(x)


def test_nan_equals_itself_and_zeros_have_a_sign():
    assert hash_of(torch.tensor([float("nan")])) == hash_of(torch.tensor([float("nan")]))
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


@pytest.mark.parametrize(
    ("hashes", "copies", "expected"),
    [
        pytest.param([5, 5, 5], 3, [], id="ddp"),
        pytest.param([5, 5, 6], 3, [(2, 0)], id="ddp-rank-2"),
        pytest.param([5, 6, 5, 6], 2, [], id="hsdp"),
        pytest.param([5, 6, 5, 7], 2, [(3, 1)], id="hsdp-rank-3"),
        pytest.param([5, 6, 6, 5], 2, [(2, 0), (3, 1)], id="hsdp-exchanged"),
        pytest.param([5, 6, 7, 8], 1, [], id="fsdp"),
    ],
)
def test_ranks_are_compared_with_the_first_copy(hashes, copies, expected):
    assert differences(hashes, copies) == expected


@pytest.mark.parametrize(
    ("strategy", "world_size", "expected"),
    [
        pytest.param(DDPStrategy(), 4, 4, id="ddp"),
        pytest.param(FullyShardedStrategy(2, True, False, "float32"), 4, 2, id="hsdp"),
        pytest.param(FullyShardedStrategy(1, True, False, "float32"), 4, 1, id="fsdp"),
    ],
)
def test_only_copies_are_compared(strategy, world_size, expected):
    """A run without copies does not even hash its weights: this trainer has no module and no process group."""
    trainer = SimpleNamespace(strategy=strategy, world_size=world_size, global_step=0)
    assert copies(trainer) == expected
    if expected == 1:
        EqualWeights(1).on_train_start(trainer, None)


@pytest.mark.slow
@pytest.mark.skipif(not processes_can_talk(), reason="needs a port of 127.0.0.1 and gloo")
@pytest.mark.parametrize(
    ("settings", "ranks", "rank", "reference"),
    [
        pytest.param(["strategy=ddp"], 2, 1, 0, id="ddp"),
        pytest.param(["strategy=fsdp", "strategy.replicas=2"], 4, 3, 1, id="hsdp"),
    ],
)
def test_a_run_ends_after_one_bit_of_one_rank_has_changed(settings, ranks, rank, reference, tmp_path):
    """The bit changes in step 4. The checks after steps 0 and 2 find equal weights.

    The check after step 4 ends the run before a checkpoint is saved.
    """
    overrides = tiny(
        tmp_path, *settings, f"trainer.devices={ranks}", "max_steps=8", "callbacks.equal_weights.every_n_steps=2",
        "callbacks.checkpoint.every_n_train_steps=2",
    )  # fmt: skip
    flips = ["+callbacks.flips._target_=tests.callbacks.test_equal_weights.FlipsBit"]
    flips += [f"+callbacks.flips.rank={rank}", "+callbacks.flips.step=3"]
    done = processes.finish(FORKED, ["train.py", *overrides, *flips], tmp_path, quiet_environment())
    assert done.returncode == 1, done.stderr
    assert "Warning" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and errors[0] == done.stderr.splitlines()[-1], done.stderr
    assert errors[0].startswith(
        "error: step 4: weights that must be equal on all copies of the model differ: "
        f"rank {rank} from rank {reference}. They were equal at step 2. "
    )
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == ["step_0000002.ckpt"]
