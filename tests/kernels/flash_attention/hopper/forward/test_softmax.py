"""Tests the softmax of the Hopper forward kernel on a GPU, with row maxima that rise by a little or by much."""

import math

import pytest
import torch

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.forward import kernel as fwd
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS, WIDE_O_STAGES
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import build_schedule
from tests.kernels.flash_attention.hopper.support.hopper import NEEDS_SM_90, tiles_of
from tests.kernels.support.attention_check import cumulative

pytestmark = NEEDS_SM_90

# The kernel visits blocks of 64 keys from the last to the first. In some rows, scores rise by one value of `RISES` (in
# log2 units) from one visited block to the next.
RISES = [-300.0, -15.0, 0.5, 7.5, 8.5, 14.5, 15.5, 40.0, 300.0]
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}  # largest relative error of rounding to each dtype
LENGTHS = {"whole": [700], "causal": [150, 3, 247, 300]}  # lengths of documents; several documents share a tile


def draw(total, head_dim, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(total, 2, head_dim, device="cuda", generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("sink", [None, -40.0, 40.0])
@pytest.mark.parametrize("mask", LENGTHS)
@pytest.mark.parametrize("rise", RISES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("head_dim", FORWARD_CONFIGS)
def test_a_maximum_that_rises_late_costs_no_accuracy(head_dim, dtype, rise, mask, sink):
    """Every seventh row has a rising maximum, so each warp has rows with and without a rising maximum."""
    lengths, causal = LENGTHS[mask], mask == "causal"
    total = sum(lengths)
    q, k, v = draw(total, head_dim)
    q *= 0.125
    q[:, :, 0] = 0.0
    q[::7, :, 0] = 1.0
    k[:, :, 0] = rise * torch.arange(total, device="cuda").flip(0).div(64, rounding_mode="floor").unsqueeze(1)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    sinks = None if sink is None else torch.full((2,), sink, device="cuda")
    features = Features(math.log(2.0), 0.0, sinks, ())  # with a scale of ln 2, exp(scale * (q @ k)) is 2^(q @ k)
    cu = cumulative(lengths)
    exact, exact_lse = attention_reference(
        q, k, v, cu, cu, causal=causal, softmax_scale=features.softmax_scale, sinks=sinks
    )
    schedule = build_schedule(cu, cu, total, total, causal=causal)
    # Tensor cores add 16 products at a time and truncate the sum to fp32.
    magnitude = torch.einsum("ihd,jhd->hij", q.double().abs(), k.double().abs()).amax(2) * features.softmax_scale
    of_score = (head_dim / 16 + 2) * 2.0**-23 * magnitude  # largest error of a score in each row, (n_heads, total)
    for tiles in tiles_of(head_dim):
        has_room = not tiles.o_in_q and tiles.stages <= WIDE_O_STAGES
        o, lse = fwd.run_forward(q, k, v, schedule, features, torch.float32 if has_room else dtype, tiles)
        roundings = 1.1 if has_room else 2.1  # p is rounded to the dtype of v, and o is rounded unless o is fp32
        of_row = roundings * ROUNDING[dtype] + 2 * of_score.T.unsqueeze(2)
        assert ((o - exact).abs() <= of_row * v.abs().max()).all(), tiles
        assert ((lse - exact_lse).abs() <= of_score + 2e-6 + 2.0**-22 * exact_lse.abs()).all(), tiles


@pytest.mark.parametrize("filler", [0.0, 30.0])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("head_dim", FORWARD_CONFIGS)
def test_no_row_depends_on_other_rows_of_its_tile(head_dim, dtype, filler):
    lengths = [333, 301, 404]
    cu, total = cumulative(lengths), sum(lengths)
    features = Features(head_dim**-0.5, 0.0, None, ())
    schedule = build_schedule(cu, cu, total, total, causal=True)
    one = draw(total, head_dim, dtype)
    other = [x.clone() for x in one]
    for x in other:
        x[333:634] *= filler
        x[1000:] *= filler
    kept = torch.ones(total, dtype=torch.bool, device="cuda")
    kept[333:634] = False
    kept[1000:] = False
    for tiles in tiles_of(head_dim):
        for before, after in zip(
            *(fwd.run_forward(*x, schedule, features, dtype, tiles) for x in (one, other)), strict=True
        ):
            rows = kept if before.shape[0] == total else (slice(None), kept)
            assert torch.equal(before[rows], after[rows]), tiles
