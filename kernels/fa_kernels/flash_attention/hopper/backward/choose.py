"""Chooses the kernels of Hopper's backward pass.

At head_dim 64, 96 and 128, most calls use one fused kernel with five matmuls (fused.py). The fused kernel computes dK
and dV, and adds dQ to an fp32 sum in global memory. In deterministic calls, the additions to dQ have a fixed order
(dq_order.py). In calls that are not deterministic, the order of the additions to dQ varies from run to run.

At head_dim 256, and at head_dim 128 in fp16 with a soft cap, the fused kernel would need too many registers. Calls that
cannot use the fused kernel use two kernels, with seven matmuls in total. The kernel in keys.py or wide.py computes
dK and dV. The kernel in queries.py computes dQ. The two kernels are always deterministic, because exactly one program
computes each output.

NaN isolation: if a call may have several documents, the kernels mark the output rows that contain NaN (nan_marks.py).
The portable kernels then recompute the tiles that contain marked rows (portable/repair.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import fused, keys, queries, wide
from fa_kernels.flash_attention.hopper.backward.dq_sum import Needs, Prepared, finish, prepare
from fa_kernels.flash_attention.hopper.backward.fused_config import config_of
from fa_kernels.flash_attention.nan_isolation import new_marks
from fa_kernels.flash_attention.portable.repair import repair_backward
from fa_kernels.flash_attention.schedule import Schedule
from fa_kernels.launch.descriptors import loadable


def uses_fused_kernel(head_dim: int, dtype: torch.dtype, softcap: float) -> bool:
    """Returns whether the call uses the fused kernel (fused.py), which adds dQ to a sum in an fp32 tensor."""
    return config_of(head_dim, dtype, softcap) is not None


def attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, schedule: Schedule,
    features: Features, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns dq, dk, dv and delta. dq, dk and dv are contiguous. delta is None if the call has no sinks.

    supported.supports must have returned True for the call. If `deterministic`, dq has the same bits in every run.
    Shapes: q (total_q, n_heads, head_dim); k and v (total_k, n_kv_heads, head_dim); do and o like q; lse and dlse
    (n_heads, total_q) fp32.
    """
    prepared = prepare_backward(do, dlse, q, o, lse, schedule, features, deterministic)
    do = _readable(do, q.dtype)
    dk, dv, marks_k = _gradients_of_keys(do, q, k, v, prepared, schedule, features)
    dq, marks_q = _gradient_of_queries(do, q, k, v, lse, prepared, schedule, features)
    if marks_q is not None and marks_k is not None:
        assert prepared.delta is not None
        repair_backward(do, q, k, v, lse, prepared.delta, (dq, marks_q), (dk, dv, marks_k), schedule, features)
    return dq, dk, dv, None if features.sinks is None else prepared.delta


def prepare_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, o: Tensor, lse: Tensor, schedule: Schedule, features: Features,
    deterministic: bool,
) -> Prepared:  # fmt: skip
    """Launches the first kernel of `attention_backward`. The arguments are those of `attention_backward`."""
    return prepare(o, do, dlse, lse, _needs(q, schedule, features, deterministic))


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tensors: Sequence[Tensor], schedule: Schedule,
    features: Features, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes dk and dv like `attention_backward`, but not dq.

    tensors: the result of Prepared.tensors. `gradients_of_keys` changes the tensors dq_sum and semaphores in place, if
    `tensors` contains them.
    """
    prepared, do = Prepared.of(tensors, _needs(q, schedule, features, deterministic)), _readable(do, q.dtype)
    dk, dv, marks = _gradients_of_keys(do, q, k, v, prepared, schedule, features)
    if marks is not None:
        assert prepared.delta is not None
        repair_backward(do, q, k, v, lse, prepared.delta, None, (dk, dv, marks), schedule, features)
    return dk, dv


def gradient_of_queries(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, tensors: Sequence[Tensor], schedule: Schedule,
    features: Features, deterministic: bool,
) -> Tensor:  # fmt: skip
    """Computes dq like `attention_backward`, but not dk and dv.

    tensors: the result of Prepared.tensors. Call `gradients_of_keys` with the same `tensors` first.
    """
    prepared, do = Prepared.of(tensors, _needs(q, schedule, features, deterministic)), _readable(do, q.dtype)
    dq, marks = _gradient_of_queries(do, q, k, v, lse, prepared, schedule, features)
    if marks is not None:
        assert prepared.delta is not None
        repair_backward(do, q, k, v, lse, prepared.delta, (dq, marks), None, schedule, features)
    return dq


def _needs(q: Tensor, schedule: Schedule, features: Features, deterministic: bool) -> Needs:
    sums = uses_fused_kernel(q.shape[-1], q.dtype, features.softcap)
    # Only the gradient of sinks, the repair of NaN and the kernel in queries.py read delta as a separate tensor.
    delta = features.sinks is not None or schedule.crosses_documents or not sums
    return Needs(delta, dq_sum=sums, semaphores=sums and deterministic)


def _readable(do: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `do` in `dtype`. If TMA cannot load `do`, the result is a contiguous copy."""
    do = do.to(dtype)
    return do if loadable(do) else do.clone(memory_format=torch.contiguous_format)


def _gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, schedule: Schedule, features: Features
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns dk, dv and the NaN marks of dk and dv. The marks are None if the call has only one document."""
    marks = new_marks(k.shape[1], k.shape[0], k.device) if schedule.crosses_documents else None
    if prepared.dq_sum is not None:  # the call uses the fused kernel, which also adds dQ to dq_sum
        return *fused.gradients_of_keys(do, q, k, v, prepared, marks, schedule, features), marks
    of_keys = wide.gradients_of_keys if q.shape[-1] == wide.HEAD_DIM else keys.gradients_of_keys
    return *of_keys(do, q, k, v, prepared.lse_delta, marks, schedule, features), marks


def _gradient_of_queries(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, prepared: Prepared, schedule: Schedule,
    features: Features,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Returns dq and the NaN marks of dq. The marks are None if the call has only one document."""
    marks = new_marks(q.shape[1], q.shape[0], q.device) if schedule.crosses_documents else None
    if prepared.dq_sum is not None:  # the fused kernel has already computed dQ
        return finish(prepared.dq_sum, features.softmax_scale, marks, q), marks
    assert prepared.delta is not None
    return queries.gradient_of_queries(do, q, k, v, lse, prepared.delta, marks, schedule, features), marks
