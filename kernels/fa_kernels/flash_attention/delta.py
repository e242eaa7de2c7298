"""Computes delta = rowsum(do * o) - dlse, and the gradient of attention sinks.

delta is a term of the backward pass of softmax, dS = P (dP - delta) (arXiv:2307.08691, algorithm 2). dlse is the
gradient of lse. The derivative of lse with respect to the scores is P, so dlse adds P dlse to dS. Subtracting dlse from
delta has the same effect.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.device import ceil_div
from fa_kernels.launch.record import launch


@triton.jit
def delta_of_rows(
    o_ptr, do_ptr, dlse_ptr, stride_dot, stride_doh, rows, head, total, n_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Computes delta for the given rows (queries) of one head. For rows past the last query, delta is 0.

    o is contiguous. The last dimension of do has stride 1. head is int64.
    """
    cols = tl.arange(0, BLOCK_D)
    inside = rows < total
    mask = inside[:, None] & (cols[None, :] < HEAD_DIM)
    # offsets are int64, because 1M tokens x 32 heads x 128 elements exceed 2**31
    rows_64 = rows.to(tl.int64)
    o = tl.load(o_ptr + (rows_64[:, None] * n_heads + head) * HEAD_DIM + cols[None, :], mask=mask, other=0.0)
    do = tl.load(do_ptr + rows_64[:, None] * stride_dot + head * stride_doh + cols[None, :], mask=mask, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + head * total + rows, mask=inside, other=0.0)
    return delta


@triton.jit(do_not_specialize=["total", "n_heads"])
def _delta_kernel(
    o_ptr, do_ptr, dlse_ptr, delta_ptr, stride_dot, stride_doh, total, n_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program computes delta for BLOCK_M queries of one head."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    head = tl.program_id(1).to(tl.int64)
    delta = delta_of_rows(
        o_ptr, do_ptr, dlse_ptr, stride_dot, stride_doh, rows, head, total, n_heads, HEAD_DIM, BLOCK_D
    )
    tl.store(delta_ptr + head * total + rows, delta, mask=rows < total)


def attention_delta(o: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """Computes delta = rowsum(do * o) - dlse. If dlse is None, it counts as 0.

    Shapes: o and do (total, n_heads, head_dim), dlse (n_heads, total) fp32 -> delta (n_heads, total) fp32.
    """
    total, n_heads, head_dim = o.shape
    delta = torch.empty(n_heads, total, dtype=torch.float32, device=o.device)
    block_m = 64
    if total:
        launch(
            _delta_kernel, (ceil_div(total, block_m), n_heads),
            o, do, dlse, delta, do.stride(0), do.stride(1), total, n_heads,
            HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_M=block_m,
        )  # fmt: skip
    return delta


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Computes the gradient of sinks: for each head, the sum of -delta * (probability of the sink) over all queries.

    Shapes: sinks (n_heads,), lse and delta (n_heads, total) -> (n_heads,).
    """
    # If a query sees no key and the sink is -inf, lse is also -inf. The clamp makes the probability 0 instead of NaN.
    lse = lse.clamp(min=torch.finfo(lse.dtype).min)
    return -(torch.exp(sinks[:, None] - lse) * delta).sum(dim=1)
