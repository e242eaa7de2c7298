"""The public functions: validation, shapes and docstrings; flash-attn's names and meanings."""

import torch
from torch import Tensor

from kernels.flash_attention.ops import flash_attention_forward
from kernels.flash_attention.schedule import Schedule, build_schedule
from kernels.flash_attention.tiles import interpreted

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a batch of sequences of one length.

    Shapes: q (batch, seqlen_q, n_heads, head_dim); k, v (batch, seqlen_k, n_kv_heads, head_dim), n_heads a multiple
    of n_kv_heads -> o like q; with return_lse also lse (batch, n_heads, seqlen_q).
    Units: softmax_scale multiplies the scores, head_dim**-0.5 by default; window_size in tokens (left, right) beside
    the query itself, -1 unbounded; lse in nats, fp32. causal aligns the last query with the last key.
    A query that sees no key gives 0 and lse -inf. Gradients are bitwise repeatable, deterministic or not.
    Raises: ValueError on a shape, dtype or head-count mismatch; NotImplementedError on dropout_p, softcap,
    alibi_slopes, sinks and return_attn_probs.
    Source: FlashAttention-2, arXiv:2307.08691, Alg. 1 and 2.
    """
    _require_supported(dropout_p, softcap, alibi_slopes, sinks, return_attn_probs)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            "q, k and v must be (batch, seqlen, n_heads, head_dim); "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must have one batch size; got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    documents = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    flat_q, flat_k, flat_v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    _require_consistent(flat_q, flat_k, flat_v)
    schedule = build_schedule(
        documents * seqlen_q,
        documents * seqlen_k,
        batch * seqlen_q,
        batch * seqlen_k,
        causal=causal,
        window_size=window_size,
    )
    o, lse = _attend(flat_q, flat_k, flat_v, schedule, softmax_scale, q.dtype)
    o = o.unflatten(0, (batch, seqlen_q))
    return (o, lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)) if return_lse else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over documents packed end to end.

    Shapes: q (total_q, n_heads, head_dim); k, v (total_k, n_kv_heads, head_dim); cu_seqlens_q and cu_seqlens_k
    (n_docs + 1,) int32, where document i is the rows cu_seqlens[i] to cu_seqlens[i + 1] -> o like q; with return_lse
    also lse (n_heads, total_q). Documents may be empty; rows past the last one give 0 and lse -inf.
    Units and errors as flash_attn_func. max_seqlen_q and max_seqlen_k are flash-attn's and not needed here.
    Source: FlashAttention-2, arXiv:2307.08691, Alg. 1 and 2.
    """
    _require_supported(dropout_p, softcap, alibi_slopes, sinks, return_attn_probs)
    if block_table is not None:
        raise NotImplementedError("block_table (paged keys) is not supported")
    _require_consistent(q, k, v)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype != torch.int32:
            raise ValueError(
                f"{name} must be (n_docs + 1,) int32; got {tuple(cu_seqlens.shape)} {_name(cu_seqlens.dtype)}"
            )
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must hold the same number of documents; "
            f"got {cu_seqlens_q.numel() - 1} and {cu_seqlens_k.numel() - 1}"
        )
    schedule = build_schedule(
        cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], causal=causal, window_size=window_size
    )
    o, lse = _attend(q, k, v, schedule, softmax_scale, q.dtype)
    return (o, lse) if return_lse else o


def flash_attn_packed(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, softmax_scale: float | None = None
) -> Tensor:
    """Attention under a schedule built once for the batch (`causal_schedule`), which all layers share.

    Shapes: q (total_q, n_heads, head_dim); k, v (total_k, n_kv_heads, head_dim) -> o like q.
    Raises: ValueError on a shape, dtype or head-count mismatch.
    """
    _require_consistent(q, k, v)
    return _attend(q, k, v, schedule, softmax_scale, q.dtype)[0]


def require_backend(device: torch.device) -> None:
    """ValueError unless flash attention can run on `device`."""
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"attention=flash needs a CUDA GPU; this run is on {device.type}. "
            "Use attention=sdpa, or set TRITON_INTERPRET=1 to run the kernels in Triton's (slow) CPU interpreter"
        )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, softmax_scale: float | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    require_backend(q.device)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if scale <= 0:
        raise ValueError(f"softmax_scale must be positive; got {scale}")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return flash_attention_forward(q, k, v, schedule.tensors(), scale, out_dtype)


def _require_consistent(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(f"q, k and v must be (total, n_heads, head_dim); got {shapes}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"k and v must have the same tokens and heads; got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"n_heads must be a multiple of n_kv_heads; got {q.shape[1]} and {k.shape[1]}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have one head_dim; got {shapes}")
    if not (16 <= q.shape[-1] <= 256 and 16 <= v.shape[-1] <= 256):
        raise ValueError(f"head_dim must be from 16 to 256; got {q.shape[-1]} and, of v, {v.shape[-1]}")
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        raise ValueError(
            "q, k and v must be of one dtype, float16, bfloat16 or float32; "
            f"got {_name(q.dtype)}, {_name(k.dtype)} and {_name(v.dtype)}"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}")


def _require_supported(
    dropout_p: float, softcap: float, alibi_slopes: Tensor | None, sinks: Tensor | None, return_attn_probs: bool
) -> None:
    asked = {
        "dropout_p": dropout_p != 0.0,
        "softcap": softcap != 0.0,
        "alibi_slopes": alibi_slopes is not None,
        "sinks": sinks is not None,
        "return_attn_probs": return_attn_probs,
    }
    unsupported = [name for name, is_asked in asked.items() if is_asked]
    if unsupported:
        raise NotImplementedError(f"not supported: {', '.join(unsupported)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
