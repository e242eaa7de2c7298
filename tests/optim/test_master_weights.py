"""Tests AdamW with exact fp32 master weights: the bits of weights, the updates, and the saved state."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fa_train.optim import master_weights
from fa_train.optim.adamw import adamw_master
from fa_train.optim.master_weights import first_low_bits, join, split

SETTINGS: Any = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
STEPS = 20
EDGES = {
    "zeros": (0x00000000, 0x80000000),
    "subnormals": (0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x00008001, 0x007FFFFF, 0x807FFFFF),
    "ties": (0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000),
    "next-exponent": (0x3F7F8000, 0x3FFFFFFF, 0xBFFFFFFF, 0x007F8000),
    "rounded-to-infinity": (0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000),
    "infinities": (0x7F800000, 0xFF800000),
}


@pytest.fixture(autouse=True)
def _without_compiler() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def of_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def assert_exact(master: Tensor) -> None:
    """Asserts that `split` rounds to the nearest bf16 value, and that `join` restores every bit of the fp32 values."""
    high, low = split(master)
    assert torch.equal(join(high, low).view(torch.int32), master.view(torch.int32))
    weight = high.view(torch.bfloat16)
    away = ((master.view(torch.int32) & 0xFFFF) == 0x8000).int()  # torch rounds ties to even
    rounded = (master.view(torch.int32) + away).view(torch.float32).bfloat16()
    assert torch.equal(weight.view(torch.int16), rounded.view(torch.int16))


@pytest.mark.parametrize("edge", EDGES)
def test_master_weights_at_the_edges_are_exact(edge):
    assert_exact(of_bits(*EDGES[edge]))


def test_random_master_weights_are_exact():
    noise = torch.Generator().manual_seed(0)
    values = torch.randint(2**32, (2**18,), generator=noise).to(torch.int32).view(torch.float32)
    assert_exact(values[~values.isnan()])


def test_nan_stays_nan():
    nans = of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000)  # a GPU computes 0x7FFFFFFF
    high, low = split(nans)
    assert high.view(torch.bfloat16).isnan().all() and join(high, low).isnan().all()


def test_weights_that_other_code_sets_to_zero_are_zero():
    low = torch.tensor([-0x8000, -1, 0, 1], dtype=torch.int16)
    for zero in (0.0, -0.0):
        high = torch.full((4,), zero, dtype=torch.bfloat16).view(torch.int16)
        assert (join(high, low).abs() <= 2**-149).all()


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 5)).bfloat16()


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        noise = torch.Generator().manual_seed(step)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=noise).bfloat16().to(weight.dtype)
        optimizer.step()


def masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [join(w.detach().view(torch.int16), optimizer.state[w]["low_bits"]) for w in model.parameters()]


def test_master_weights_are_those_of_adamw_in_fp32():
    """Without the low 16 bits, the weights would have a relative error of about 2**-9 compared with fp32 weights."""
    model, exact = new_model(), new_model().float()
    with torch.no_grad():
        for weight, master in zip(model.parameters(), exact.parameters(), strict=True):
            master.copy_(join(weight.view(torch.int16), first_low_bits(weight)))
    optimizer = adamw_master(model, **SETTINGS)
    groups = [
        {"params": [p for p in exact.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    train_steps(model, optimizer, 0, STEPS)
    train_steps(exact, torch.optim.AdamW(groups, **SETTINGS), 0, STEPS)
    for weight, master, theirs in zip(model.parameters(), masters(model, optimizer), exact.parameters(), strict=True):
        # in each step, each optimizer rounds a weight twice: after the decay and after the update
        bound = STEPS * 4 * 2**-24 * theirs.abs().max().item()
        torch.testing.assert_close(master, theirs.detach(), rtol=0, atol=bound)
        assert torch.equal(weight.detach().view(torch.int16), split(master)[0])
        assert (weight.detach() - theirs.detach()).abs().max() > 4 * bound


def test_small_updates_change_the_weights_on_average():
    """Each step moves the master weights by a tenth of the distance between two adjacent bf16 numbers."""
    weight = nn.Parameter(
        torch.empty(100_000).uniform_(0.5, 0.99, generator=torch.Generator().manual_seed(0)).bfloat16()
    )
    old, rate = weight.detach().clone(), 2**-8 / 10
    optimizer = adamw_master(nn.ParameterList([weight]), **SETTINGS | {"lr": rate, "weight_decay": 0.0})
    for step in range(1, 4):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        moved = (old.double() - weight.detach().double()).mean().item()
        assert moved == pytest.approx(step * rate, rel=0.05)


def test_the_first_low_bits_depend_only_on_the_place(monkeypatch):
    weight = torch.randn(40, 24).bfloat16()
    bits = first_low_bits(weight)
    assert bits.unique().numel() > 900
    monkeypatch.setattr(master_weights, "DRAWN", 100)
    assert torch.equal(first_low_bits(weight), bits)
    for rows in (slice(0, 17), slice(17, 40), slice(40, 40)):
        monkeypatch.setattr(master_weights, "own_rows", lambda weight, rows=rows: (weight[rows], rows))
        assert torch.equal(first_low_bits(weight), bits[rows]), "each rank draws the bits of its rows"


def test_each_rank_draws_its_first_low_bits_without_communication():
    weight = torch.randn(5, 8).bfloat16()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        sharded = DTensor.from_local(weight[3:], init_device_mesh("cpu", (2,)), [Shard(0)], shape=(5, 8), stride=(8, 1))
        with CommDebugMode() as communication:
            bits = first_low_bits(sharded)
    finally:
        dist.destroy_process_group()
    assert communication.get_total_counts() == 0
    assert torch.equal(bits, first_low_bits(weight)[3:])


def test_a_loaded_state_has_every_bit():
    """torch's load_state_dict would round moments and low bits to bf16."""
    whole, resumed = new_model(), new_model()
    optimizer, other = adamw_master(whole, **SETTINGS), adamw_master(resumed, **SETTINGS)
    train_steps(whole, optimizer, 0, 3)
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    resumed.load_state_dict(whole.state_dict())
    other.load_state_dict(torch.load(saved, weights_only=True))
    for weight in resumed.parameters():
        dtypes = {name: value.dtype for name, value in other.state[weight].items()}
        assert dtypes == {
            "step": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32, "low_bits": torch.int16,
        }  # fmt: skip
    for model, of_model in ((whole, optimizer), (resumed, other)):
        train_steps(model, of_model, 3, 6)
    torch.testing.assert_close(masters(resumed, other), masters(whole, optimizer), rtol=0, atol=0)


def test_two_compiled_updates_serve_all_shapes(monkeypatch):
    """The update is compiled for one size first, and then a second time for all sizes that are multiples of 16."""
    torch._dynamo.reset()  # forget the shapes that earlier tests used
    counter = CompileCounter()
    compiled = torch.compile(master_weights._update_tensors, fullgraph=True, backend=counter)
    monkeypatch.setattr(master_weights, "_compiled_update", compiled)
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.Linear(48, 32), nn.LayerNorm(32)).bfloat16()
    with torch.compiler.set_stance("default"):
        train_steps(model, adamw_master(model, **SETTINGS), 0, 2)
    assert counter.frame_count == 2
