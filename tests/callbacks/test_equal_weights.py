"""Weights that must be equal on several ranks are compared by a hash of their bits."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from fa_train.callbacks import equal_weights
from fa_train.callbacks.equal_weights import Check, EqualWeights, bit_hash, copies, differences, weights
from fa_train.callbacks.timestamp import Timestamp
from fa_train.errors import DivergedError
from fa_train.optim.adamw import adamw_master
from fa_train.parallel.fsdp import FullyShardedStrategy

CPU = torch.device("cpu")


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
    changed[1][[3, 11]] = x[[11, 3]]  # elements 3 and 11 are hashed in different pieces
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
    """Nothing is hashed if the model has only one copy. The module is None, so hashing would raise an error."""
    trainer = SimpleNamespace(strategy=strategy, world_size=world_size, global_step=0)
    assert copies(trainer) == expected
    if expected == 1:
        EqualWeights(1).on_train_start(trainer, None)


def test_the_low_bits_of_master_weights_count():
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = adamw_master(model, lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
    trainer, before = SimpleNamespace(optimizers=[optimizer]), hash_of(*model.parameters())
    assert hash_of(*weights(trainer, model)) == before, "the optimizer has no state before its first step"
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    first = hash_of(*weights(trainer, model))
    optimizer.state[model.weight]["low_bits"][1, 2] ^= 1
    assert hash_of(*weights(trainer, model)) != first


def test_different_weights_are_not_saved():
    callback, trainer = EqualWeights(1), SimpleNamespace(strategy=DDPStrategy(), world_size=2)
    callback._check = Check(10, torch.tensor([5, 5]), Timestamp(CPU))
    callback.on_save_checkpoint(trainer, None, {})
    callback._check = Check(20, torch.tensor([5, 6]), Timestamp(CPU))
    with pytest.raises(DivergedError, match=r"^step 20: .* rank 1 from rank 0\. They were equal at step 10\."):
        callback.on_save_checkpoint(trainer, None, {})
