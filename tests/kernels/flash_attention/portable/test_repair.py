"""The repair kernels recompute the tiles that are marked as containing NaN, and no other tiles."""

import pytest
import torch

from fa_kernels.flash_attention.delta import attention_delta
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward.dq_sum import finish
from fa_kernels.flash_attention.nan_isolation import new_marks
from fa_kernels.flash_attention.portable.backward import attention_backward
from fa_kernels.flash_attention.portable.forward import attention_forward
from fa_kernels.flash_attention.portable.repair import repair_backward, repair_forward, repair_grid
from fa_kernels.flash_attention.schedule import causal_schedule
from tests.support.marks import slow

LENGTHS = [50, 0, 100, 61]
TOTAL, HEADS, KV_HEADS = sum(LENGTHS), 2, 1
UNITS = 4  # number of units of 64 rows; each unit has one NaN mark
UNTOUCHED = 7.0

SOME = [pytest.param([(0, 0), (1, 3)], id="some")]
EVERY = [
    pytest.param([(head, unit) for head in range(HEADS) for unit in range(UNITS)], id="all", marks=pytest.mark.slow)
]
NONE = [pytest.param([], id="none")]


@pytest.fixture(scope="module", params=[*slow(False), True], ids=["numbers", "nan"])
def problem(device, request):
    """Returns the arguments of both passes, and o, lse, dq, dk and dv as computed without repair.

    The row with NaN shares its NaN mark with the first rows of the third document.
    """
    generator = torch.Generator(device).manual_seed(0)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    q, k, v, do = (
        torch.randn(TOTAL, heads, 48, device=device, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    if request.param:
        for x in (q, k, v, do):
            x[49, 0, 3] = torch.nan
    masks = causal_schedule(cu_seqlens, TOTAL, device), Features(0.25, 0.0, None, ())
    o, lse = attention_forward(q, k, v, *masks, torch.float32)
    tensors = do, q, k, v, lse, attention_delta(o, do, None)
    return tensors, masks, (o, lse, *attention_backward(*tensors, *masks))


def marks(heads, units, device):
    """Returns NaN marks that are set only for `units`, which are pairs (head, index of a unit of 64 rows)."""
    marked = new_marks(heads, TOTAL, device).zero_()
    assert marked.shape == (heads, UNITS)
    for head, unit in units:
        if head < heads:
            marked[head, unit] = 1
    return marked


def assert_repaired(ours, exact, marked):
    """Shapes: ours, exact (total, heads, columns)."""
    in_unit = marked.repeat_interleave(64, 1)[:, :TOTAL].T > 0
    torch.testing.assert_close(ours[in_unit], exact[in_unit], rtol=1e-5, atol=1e-5, equal_nan=True)
    # a tile has at most 128 rows
    in_tile = marked.unflatten(1, (-1, 2)).amax(2).repeat_interleave(128, 1)[:, :TOTAL].T > 0
    assert (ours[~in_tile] == UNTOUCHED).all()


@pytest.mark.slow
@pytest.mark.parametrize("units", SOME + EVERY + NONE)
def test_forward_repairs_marked_tiles_only(problem, device, units):
    (_, q, k, v, *_), masks, (o, lse, *_) = problem
    marked = marks(HEADS, units, device)
    some, some_lse = torch.full_like(o, UNTOUCHED), torch.full_like(lse, UNTOUCHED)
    repair_forward(q, k, v, some, some_lse, marked, *masks)
    assert_repaired(some, o, marked)
    assert_repaired(some_lse.T[..., None], lse.T[..., None], marked)


@pytest.mark.parametrize("units", SOME + EVERY + NONE)
@pytest.mark.parametrize("launches", [[(True, True)], [(False, True), (True, False)]], ids=["together", "one_by_one"])
def test_backward_repairs_marked_tiles_only(problem, device, units, launches):
    """launches: two booleans for each launch: whether the launch repairs dq, and whether it repairs dk and dv."""
    tensors, masks, (_, _, *exact) = problem
    dq, dk, dv = (torch.full_like(x, UNTOUCHED) for x in exact)
    marked_q, marked_k = marks(HEADS, units, device), marks(KV_HEADS, units, device)
    for of_queries, of_keys in launches:
        before = [x.clone() for x in (dq, dk, dv)]
        given = (dq, marked_q) if of_queries else None, (dk, dv, marked_k) if of_keys else None
        repair_backward(*tensors, *given, *masks)
        for x, old, repaired in zip((dq, dk, dv), before, (of_queries, of_keys, of_keys), strict=True):
            if not repaired:
                torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)
    for ours, all_of_it, marked in zip((dq, dk, dv), exact, (marked_q, marked_k, marked_k), strict=True):
        assert_repaired(ours, all_of_it, marked)


def in_order_of_threads(sums):
    """Returns the elements of `sums`, (tokens, heads, columns), in the order in which the kernel stores them.

    The kernel orders the elements by block of 64 tokens, then by head, then by block of 64 columns, then by thread.
    """
    blocks = sums.unflatten(0, (-1, 64)).transpose(1, 2).split(64, dim=-1)  # dimensions [block, head, token, column]
    parts = [part.reshape(*part.shape[:2], 4, 2, 8, -1, 4, 2).permute(0, 1, 5, 2, 4, 6, 3, 7) for part in blocks]
    return torch.cat([part.flatten(2) for part in parts], dim=-1).reshape(-1, 1, 32)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dq_is_marked_where_its_sum_is_not_finite(device, head_dim):
    total, n_heads = 150, 3
    sums = torch.randn(192, n_heads, head_dim, device=device)  # 150 tokens, padded to whole blocks of 64 tokens
    sums[total:] = torch.nan
    for token, head, column, value in ((0, 1, 0, torch.nan), (63, 2, head_dim - 1, torch.inf), (149, 0, 7, torch.nan)):
        sums[token, head, column] = value
    marked = new_marks(n_heads, total, device).fill_(7)
    dq = finish(in_order_of_threads(sums), 0.5, marked, torch.empty(total, n_heads, head_dim, device=device))
    torch.testing.assert_close(dq, 0.5 * sums[:total], equal_nan=True)
    assert marked.tolist() == [[0, 0, 1], [1, 0, 0], [1, 0, 0]]


def test_empty_inputs_launch_no_program(device):
    empty = torch.empty(0, HEADS, 48, device=device)
    schedule = causal_schedule(None, TOTAL, device)
    repair_forward(
        empty, empty, empty, empty, empty[..., 0].T, new_marks(HEADS, 0, device), schedule, Features(1.0, 0.0, None, ())
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled programs read more tiles at once than the tests have")
def test_interpreted_programs_have_more_tiles_than_one_step_reads():
    """In one step, each program reads the NaN marks of `look` tiles.

    The tests in this file use more tiles than all programs together can read in one step.
    """
    tiles = HEADS * -(-TOTAL // 32)
    programs, look = repair_grid(torch.device("cpu"), tiles)
    assert tiles > programs * look
