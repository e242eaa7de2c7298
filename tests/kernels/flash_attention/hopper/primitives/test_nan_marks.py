"""For every 64 rows of a head, the Hopper kernels write one NaN mark: 1 if the 64 rows contain NaN, and 0 otherwise."""

import pytest
import torch

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import choose as bwd
from fa_kernels.flash_attention.hopper.forward import kernel as fwd
from fa_kernels.flash_attention.hopper.forward.config import WIDE_O_STAGES
from fa_kernels.flash_attention.nan_isolation import new_marks
from fa_kernels.flash_attention.schedule import build_schedule
from tests.kernels.flash_attention.hopper.support.hopper import NEEDS_SM_90, tiles_of

pytestmark = NEEDS_SM_90
LENGTHS = [1000, 1, 30, 400, 139]  # the last tile is partial, because tiles have 128 or 192 rows
TOTAL, HEADS, KV_HEADS = sum(LENGTHS), 4, 2
NEVER_SET = 7


@pytest.fixture
def marks(monkeypatch):
    """Returns a list to which each attention call appends its tensor of NaN marks."""
    made = []

    def unset(*sizes):
        made.append(new_marks(*sizes).fill_(NEVER_SET))
        return made[-1]

    for module, repair in ((fwd, "repair_forward"), (bwd, "repair_backward")):
        monkeypatch.setattr(module, "new_marks", unset)
        monkeypatch.setattr(module, repair, lambda *_: None)
    return made


def problem(head_dim, nan_in, dtype=torch.bfloat16, causal=True):
    """One row of q or v contains NaN, unless `nan_in` is "nothing".

    The block of 64 rows that contains the row with NaN also contains the first rows of the fifth document.
    """
    cu_seqlens = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).to(torch.int32)
    schedule = build_schedule(cu_seqlens, cu_seqlens, TOTAL, TOTAL, causal=causal)
    tensors = [
        torch.randn(TOTAL, heads, head_dim, device="cuda", dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    if nan_in != "nothing":
        tensors[{"q": 0, "v": 2}[nan_in]][1420, 1, head_dim - 1] = torch.nan
    return tensors, schedule


def not_finite(*tensors):
    """Returns the marks that the kernels must write for outputs of shape (total, heads, columns)."""
    of_rows = torch.stack([(~x.isfinite()).any(2) for x in tensors]).any(0).T  # [heads, total]
    return torch.nn.functional.pad(of_rows, (0, -TOTAL % 64)).unflatten(1, (-1, 64)).any(2).int()


@pytest.mark.parametrize("nan_in", ["nothing", "q", "v"])
@pytest.mark.parametrize(
    ("head_dim", "out_dtype"),
    [(d, torch.bfloat16) for d in (64, 96, 128, 256)] + [(d, torch.float32) for d in (64, 96, 128)],
    ids=str,
)
def test_forward_marks_exactly_the_rows_with_nan(head_dim, out_dtype, nan_in, marks):
    (q, k, v, _), schedule = problem(head_dim, nan_in)
    for tiles in tiles_of(head_dim):
        if out_dtype == torch.float32 and tiles.stages > WIDE_O_STAGES:
            continue  # with more stages than WIDE_O_STAGES, an fp32 output does not fit in shared memory
        o, _ = fwd.run_forward(q, k, v, schedule, Features(head_dim**-0.5, 0.0, None, ()), out_dtype, tiles)
        assert torch.equal(marks.pop(), not_finite(o))
        assert o.isfinite().all() == (nan_in == "nothing")


@pytest.mark.parametrize("nan_in", ["nothing", "q", "v"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_backward_marks_exactly_the_rows_with_nan(head_dim, dtype, deterministic, causal, nan_in, marks):
    (q, k, v, do), schedule = problem(head_dim, nan_in, dtype, causal)
    features = Features(head_dim**-0.5, 0.0, None, ())
    o, lse = fwd.attention_forward(q, k, v, schedule, features, dtype)
    marks.clear()
    dq, dk, dv, _ = bwd.attention_backward(do, None, q, k, v, o, lse, schedule, features, deterministic)
    of_k, of_q = marks
    assert torch.equal(of_q, not_finite(dq)) and torch.equal(of_k, not_finite(dk, dv))
    assert dk.isfinite().all() == (nan_in == "nothing")
