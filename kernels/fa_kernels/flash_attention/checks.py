"""Checks the arguments of attention calls. Each error says what the argument must be and what was given."""

import math
from collections.abc import Iterable
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from fa_kernels.device import interpreted

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FP8 = torch.float8_e4m3fn
MAX_HEAD_DIM = 256
# In fp16 and fp32, kernels compute tanh(x) as 1 - 2 / (e^(2 * x) + 1), where x is score / softcap. This formula for
# tanh(x) has a large relative error for small x.
MAX_SOFTCAP = 1000.0
UNBOUNDED = 2**30  # windows of 2**30 or more count as unbounded, because a token index plus a window must fit in int32


def require_backend(device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError unless flash attention can run on `device`, and in `dtype` if one is given."""
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"flash attention needs tensors on a CUDA GPU; got {device}. "
            "TRITON_INTERPRET=1 runs the kernels in Triton's interpreter, slowly"
        )
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise ValueError(
            "with TRITON_INTERPRET=1, attention must be computed in float32 or float16, because Triton's interpreter "
            "computes bfloat16 incorrectly; got bfloat16"
        )


def require_consistent(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raises ValueError unless q, k, v and sinks have matching shapes, supported dtypes and a supported device.

    If a call repeats recorded launches (launch/record.py), require_consistent does not run. The key of a recording
    (backend._description) must contain everything that require_consistent checks.
    Shapes: q (total_q, n_heads, head_dim), k (total_k, n_kv_heads, head_dim), v (total_k, n_kv_heads, v_head_dim).
    Dense tensors have (batch, seqlen) in place of total_q or total_k.
    """
    device, dtype = q.device, q.dtype
    require_backend(device, dtype)
    *_, n_heads, head_dim = q.shape
    *k_tokens, n_kv_heads, k_head_dim = k.shape
    *v_tokens, n_v_heads, v_head_dim = v.shape
    if k_tokens != v_tokens or n_kv_heads != n_v_heads:
        raise ValueError(f"k and v must have the same tokens and heads; got {shapes_of(q, k, v)}")
    if n_kv_heads == 0 or n_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"n_heads must be a positive multiple of n_kv_heads; got {n_heads} and {n_kv_heads}")
    if head_dim != k_head_dim:
        raise ValueError(f"q and k must have the same head_dim; got {shapes_of(q, k, v)}")
    if not (1 <= head_dim <= MAX_HEAD_DIM and 1 <= v_head_dim <= MAX_HEAD_DIM):
        raise ValueError(
            f"head_dim must be from 1 to {MAX_HEAD_DIM}; got {head_dim} for q and k and {v_head_dim} for v"
        )
    if not (dtype == k.dtype == v.dtype) or (dtype not in DTYPES and dtype != FP8):
        raise ValueError(
            "q, k and v must have the same dtype, which is float16, bfloat16, float32 or float8_e4m3fn; "
            f"got {name_of(dtype)}, {name_of(k.dtype)} and {name_of(v.dtype)}"
        )
    if dtype == FP8 and q.is_cuda and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(
            f"float8_e4m3fn needs a GPU of compute capability 8.9 or higher; got {torch.cuda.get_device_name(device)}"
        )
    if not (device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device; got {device}, {k.device} and {v.device}")
    if sinks is not None:
        require_sinks(sinks, q)


def require_sinks(sinks: Tensor, q: Tensor) -> None:
    """Raises ValueError unless sinks are (n_heads,) float32 on q's device. Shapes: q (..., n_heads, head_dim)."""
    n_heads = q.shape[-2]
    fits = isinstance(sinks, Tensor) and sinks.shape == (n_heads,)
    if not fits or sinks.dtype != torch.float32 or sinks.device != q.device:
        raise ValueError(f"sinks must be ({n_heads},) float32 on {q.device}; got {described(sinks)}")


def require_schedule_of(q: Tensor, k: Tensor, key_start: Tensor, query_start: Tensor, *, gradients: bool) -> None:
    """Raises ValueError unless a schedule has as many queries as q and as many keys as k.

    key_start, query_start: tensors of the schedule. If `gradients` is False, query_start may be empty.
    Shapes: as in require_consistent.
    """
    n_queries, n_keys = q.shape[:-2].numel(), k.shape[:-2].numel()
    of_queries, of_keys = key_start.numel(), query_start.numel()
    if of_keys == 0 and n_keys and of_queries == n_queries:
        if gradients:
            raise ValueError("the schedule must be built with gradients=True for a backward pass; got gradients=False")
    elif (of_queries, of_keys) != (n_queries, n_keys):
        raise ValueError(
            f"the schedule must be for {n_queries} queries and {n_keys} keys, as in q and k; got a schedule for "
            f"{of_queries} queries and {of_keys} keys"
        )


def require_differentiable(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError if q, k or v requires a gradient but has dtype fp8, which has no backward pass."""
    if q.dtype == FP8 and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("float8_e4m3fn q, k and v must not require gradients; got some that do")


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """Returns the factor that multiplies the scores Q K^T: softmax_scale, or head_dim**-0.5 if softmax_scale is None.

    Raises: ValueError if the factor is zero, negative, infinite or NaN, or if it requires a gradient.
    """
    require_constant("softmax_scale", softmax_scale)
    # 0**-0.5 would raise ZeroDivisionError; a later check names a head_dim of 0
    scale = max(1, q.shape[-1]) ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite; got {scale}")
    return scale


def softcap_of(softcap: float) -> float:
    """Returns the soft cap, or 0 if there is none.

    Raises: ValueError if the soft cap is above MAX_SOFTCAP, infinite or NaN, or requires a gradient.
    """
    require_constant("softcap", softcap)
    # In compiled code, softcap can be symbolic. Torch can trace comparisons of a symbolic number, but not
    # math.isfinite.
    if not -math.inf < softcap <= MAX_SOFTCAP:
        raise ValueError(
            f"softcap must be finite and at most {MAX_SOFTCAP:g}, and 0 means no soft cap; got {float(softcap)}"
        )
    return max(float(softcap), 0.0)


def window_of(window_size: Iterable[SupportsIndex]) -> tuple[int, int]:
    """Returns the window (left, right) in tokens, where -1 means unbounded.

    `window_size` may be a tuple, a list, a tensor or a NumPy array. Raises: ValueError unless `window_size` holds
    exactly two integers.
    """
    try:
        left, right = window_size
        if type(left) is not int or type(right) is not int:
            left, right = index(left), index(right)
    except (TypeError, ValueError):
        raise ValueError(f"window_size must be two integers, -1 where unbounded; got {window_size}") from None
    return left if 0 <= left < UNBOUNDED else -1, right if 0 <= right < UNBOUNDED else -1


def require_slopes(slopes: Tensor, batch: int, q: Tensor) -> None:
    """Raises ValueError unless ALiBi's slopes are (n_heads,) or (batch, n_heads) float32 on q's device.

    batch: the number of sequences or documents. Shapes: q (..., n_heads, head_dim).
    """
    n_heads = q.shape[-2]
    shapes = (n_heads,), (batch, n_heads)
    fits = isinstance(slopes, Tensor) and slopes.shape in shapes
    if not fits or slopes.dtype != torch.float32 or slopes.device != q.device:
        raise ValueError(
            f"alibi_slopes must be ({n_heads},) or ({batch}, {n_heads}) float32 on {q.device}; got {described(slopes)}"
        )


def require_constant(name: str, x: object) -> None:
    """Raises ValueError if x is a tensor that requires a gradient, because attention computes no gradient for x."""
    if isinstance(x, Tensor) and x.requires_grad:
        raise ValueError(f"{name} must not require a gradient, because attention computes none for it")


def shapes_of(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"


def described(x: object) -> str:
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    return f"{tuple(x.shape)} {name_of(x.dtype)} on {x.device}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
