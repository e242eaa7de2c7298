"""Compares copies and sums of rows with torch."""

import pytest
import torch

from fa_kernels import rows as module
from fa_kernels.rows import add_rows, copy_rows

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
# In the first case, each tensor fits in one tile. In the second case, a row has fewer columns than a tile. In the third
# case, a row has more columns than a tile.
HEADS = pytest.mark.parametrize("heads", [[(2, 8)], [(3, 24), (1, 24)], [(9, 128), (2, 128)]], ids=str)
ROWS = 37


@pytest.fixture(params=["torch", "kernel"], autouse=True)
def implementation(request, device, monkeypatch):
    """On the CPU, runs a test with torch's implementation and with the kernels.

    For a run with the kernels, the fixture replaces torch's implementation by the kernels.
    """
    if request.param == "kernel" and device.type == "cpu":
        monkeypatch.setattr(module, "_copy_plainly", module._copy_in_kernel)
        monkeypatch.setattr(module, "_add_plainly", module._add_in_kernel)
    elif request.param == "torch" and device.type == "cuda":
        pytest.skip("the GPU takes the kernels")


def draw(heads, dtype, device):
    return [torch.randn(ROWS, *shape, device=device).to(dtype) for shape in heads]


def drawn_indices(n, device):
    return torch.randperm(ROWS, device=device)[:n].int()


@DTYPES
@HEADS
@pytest.mark.parametrize("reads_by_index", [False, True])
@pytest.mark.parametrize("writes_by_index", [False, True])
def test_rows_are_copied(reads_by_index, writes_by_index, heads, dtype, device):
    n = 21 if reads_by_index else ROWS
    from_rows, to_rows = drawn_indices(n, device), drawn_indices(n, device)
    sources, targets = draw(heads, dtype, device), draw(heads, dtype, device)
    expected = [target.clone() for target in targets]
    for source, target in zip(sources, expected, strict=True):
        values = source[from_rows.long()] if reads_by_index else source
        target[to_rows.long() if writes_by_index else slice(n)] = values
    copy_rows(sources, targets, from_rows if reads_by_index else None, to_rows if writes_by_index else None)
    for target, wanted in zip(targets, expected, strict=True):
        assert torch.equal(target, wanted)


def test_rows_of_views_are_copied_in_place(device):
    heads = [(2, 8), (3, 8)]
    whole = torch.zeros(ROWS, 6, 8, device=device)
    parts = whole[:, :5].split([2, 3], dim=1)
    sources = [torch.cat([x, x], dim=1)[:, : x.shape[1]] for x in draw(heads, torch.float32, device)]
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sources]
    order = drawn_indices(ROWS, device)
    for given in (sources, turned):
        whole.zero_()
        copy_rows(given, parts, to_rows=order)
        assert torch.equal(whole[order.long(), :5], torch.cat(given, dim=1))
        assert not whole[:, 5].any()


@DTYPES
@HEADS
def test_rows_are_added_and_rounded_once(heads, dtype, device):
    counts = torch.tensor([1, 3, 0, 2, 1], device=device)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    rows, entries = drawn_indices(5, device), drawn_indices(7, device)
    totals, added = draw(heads, dtype, device), draw(heads, dtype, device)
    expected = []
    for total, x in zip(totals, added, strict=True):
        sums = total.double().index_add(0, rows.long().repeat_interleave(counts), x[entries.long()].double())
        expected.append(sums.to(dtype))
    before = [total.clone() for total in totals]
    add_rows(totals, added, rows, entries, offsets)
    others = torch.ones(ROWS, dtype=torch.bool, device=device).index_fill(0, rows.long(), False)
    for total, wanted, old in zip(totals, expected, before, strict=True):
        torch.testing.assert_close(total, wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(total[others], old[others])


def test_nothing_is_moved_without_rows(device):
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    (x,) = draw([(2, 8)], torch.float32, device)
    before = x.clone()
    copy_rows([x], [x], nothing, nothing)
    copy_rows([x[:0]], [x])
    add_rows([x], [x[:0]], nothing, nothing, torch.zeros(1, dtype=torch.int32, device=device))
    assert torch.equal(x, before)


def test_targets_with_gaps_between_heads_are_refused(device):
    (x,) = draw([(2, 8)], torch.float32, device)
    with pytest.raises(ValueError, match="contiguous"):
        copy_rows([x], [torch.empty(ROWS, 4, 8, device=device)[:, ::2]])


@pytest.mark.gpu
@HEADS
def test_bf16_rows_are_copied_and_added(heads, device):
    """The test needs a GPU, because Triton's interpreter computes bf16 incorrectly."""
    test_rows_are_copied(True, True, heads, torch.bfloat16, device)
    test_rows_are_added_and_rounded_once(heads, torch.bfloat16, device)


@pytest.mark.gpu
def test_offsets_may_exceed_31_bits(device):
    n = 2**20 + 1
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB")
    x = torch.zeros(n, 16, 128, dtype=torch.float16, device=device)
    row = torch.randn(1, 16, 128, device=device).half()
    last = torch.tensor([n - 1], dtype=torch.int32, device=device)
    copy_rows([row], [x], to_rows=last)
    assert torch.equal(x[-1:], row)
    target = torch.zeros_like(row)
    copy_rows([x], [target], from_rows=last)
    assert torch.equal(target, row)
    add_rows([x], [x], last, last, torch.tensor([0, 1], dtype=torch.int32, device=device))
    assert torch.equal(x[-1:], 2 * row) and not x[0].any()
