"""The backward pass on Hopper, by one kernel or by two.

At head_dim 64, 96 and 128 one kernel of five matmuls gives dK and dV and adds dQ up in memory (fused.py), in
whatever order its programs run, or, where gradients must be repeatable, in one order (order.py). Two kernels of seven
matmuls give dK and dV (keys.py) and dQ (queries.py), which have one owner each, for fp16 at 128 with a soft
cap, for which the one lacks registers, and for head_dim 256, where wide.py takes the place of keys.py.
Where there are several documents, NaN of one that came into another through a tile of both is repaired (nan_marks.py).
"""

import torch
from torch import Tensor

from fa_kernels.device import is_hopper
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import fused, keys, wide
from fa_kernels.flash_attention.hopper.backward.dq_sum import finish, prepare
from fa_kernels.flash_attention.hopper.backward.queries import gradient_of_queries
from fa_kernels.flash_attention.nan_isolation import new_marks
from fa_kernels.flash_attention.portable.repair import repair_backward
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.launch.descriptors import loadable

HEAD_DIMS = (64, 96, 128, wide.HEAD_DIM)
DTYPES = (torch.float16, torch.bfloat16)


def supports(q: Tensor, k: Tensor, v: Tensor, features: Features) -> bool:
    """Whether attention_backward here can take a call: sm_90, 2-byte floats, head_dim 64, 96, 128 or 256, no ALiBi."""
    return (
        q.is_cuda
        and is_hopper(q.device)
        and q.dtype in DTYPES
        and q.shape[-1] in HEAD_DIMS
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and not features.alibi
        and loadable(q)
        and loadable(k)
        and loadable(v)
    )


def sums_dq(head_dim: int, dtype: torch.dtype, softcap: float) -> bool:
    """Whether the kernel of fused.py takes the call, which adds dQ up in an fp32 tensor."""
    return head_dim != wide.HEAD_DIM and fused.tiles_of(head_dim, dtype, softcap) is not None


def attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, schedule: Schedule,
    features: Features, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """do like o, lse and dlse (n_heads, total_q) fp32 -> dq, dk, dv, dense, in the dtype of q, k, v, and delta.

    For calls that `supports` takes. Unless deterministic, the addends of dq may come in any order. delta,
    which attention_delta would give, is None without sinks.
    """
    is_wide = q.shape[-1] == wide.HEAD_DIM
    sums = sums_dq(q.shape[-1], q.dtype, features.softcap)
    # for their gradient, for repairs, and for the kernel of dq alone, which needs no copy for TMA
    keeps_delta = features.sinks is not None or schedule.crosses_documents or not sums
    prepared = prepare(o, do, dlse, lse, sums=sums, ordered=deterministic, keeps_delta=keeps_delta)
    rows, delta, dq_sum, _ = prepared
    do = do.to(q.dtype)
    if not loadable(do):
        do = do.clone(memory_format=torch.contiguous_format)
    spoiled_q = spoiled_k = None
    if schedule.crosses_documents:
        spoiled_q, spoiled_k = (new_marks(x.shape[1], x.shape[0], x.device) for x in (q, k))
    if dq_sum is not None:
        dk, dv = fused.gradients_of_keys(do, q, k, v, prepared, spoiled_k, schedule, features)
        dq = finish(dq_sum, features.softmax_scale, spoiled_q, q)
    else:
        assert delta is not None
        of_keys = wide.gradients_of_keys if is_wide else keys.gradients_of_keys
        dk, dv = of_keys(do, q, k, v, rows, spoiled_k, schedule, features)
        dq = gradient_of_queries(do, q, k, v, lse, delta, spoiled_q, schedule, features)
    if spoiled_q is not None and spoiled_k is not None:
        assert delta is not None
        repair_backward(do, q, k, v, lse, delta, dq, dk, dv, spoiled_q, spoiled_k, schedule, features)
    return dq, dk, dv, None if features.sinks is None else delta
