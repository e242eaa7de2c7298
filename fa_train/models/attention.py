"""Four implementations of attention with the same signature, so that an ablation can change only the attention.

The schedule defines the mask: query i sees the keys j with key_start[i] <= j < key_end[i]. The output of a query that
sees no key is 0. The softmax is computed in fp32 for every dtype of q, k and v.
"""

from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.device import interpreted
from fa_kernels.flash_attention.checks import require_backend as require_flash_backend
from fa_kernels.flash_attention.checks import softcap_of
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import Schedule
from fa_train.bounds import PositiveInt
from fa_train.memory.recompute import recomputed


@runtime_checkable  # fa_train.settings calls isinstance(value, Attention)
class Attention(Protocol):
    """A function that computes attention over a packed stream.

    Shapes: q (total, n_heads, head_dim); k, v (total, n_kv_heads, head_dim). The output has the shape of q. Inputs
    and output have the same dtype.
    softmax_scale: the factor that the scores are multiplied by, or None for head_dim**-0.5.
    softcap: if it is not 0, each scaled score becomes softcap * tanh(score / softcap).
    flash_attention refuses a softcap above 1000.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        schedule: Schedule,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor: ...


def require_backend(attention: Attention, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Raises: ValueError if `attention` cannot run on `device` or cannot compute in `dtype`.

    A dtype of None is not checked. Call this function before training.
    """
    if function_of(attention) is not flash_attention:
        return
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"attention=flash needs a CUDA GPU; this run is on {device.type}. "
            "Use attention=sdpa, or set TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, slowly"
        )
    require_flash_backend(device, dtype)


def require_softcap(attention: Attention, softcap: float) -> None:
    """Raises: ValueError if `attention` does not support a soft cap of `softcap`. 0 means no soft cap."""
    if function_of(attention) is flash_attention:
        softcap_of(softcap)
    if softcap and function_of(attention) is sdpa_attention:
        raise ValueError(
            f"attention=sdpa cannot cap scores, and this model caps them at {softcap}. "
            "Use attention=flash, or attention=chunked or naive without a CUDA GPU"
        )


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Computes attention with this repository's Triton kernels, with memory proportional to the number of tokens.

    The kernels skip tiles that are completely masked.
    """
    return flash_attn_packed(q, k, v, schedule, softmax_scale=softmax_scale, softcap=softcap)


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Computes attention as softmax(q k^T) v, with all (n_heads, total, total) scores in memory."""
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    scores = _rows_by_kv_head(q, n_kv_heads) @ k.transpose(0, 1).mT * _scale(q, softmax_scale)  # [n_kv_heads, G * M, N]
    scores = soft_capped(scores, softcap)
    visible = _visible(schedule.key_start, schedule.key_end, k.shape[0])
    # masked scores are finite, because -inf would make dv NaN if a query sees no key
    scores = scores.unflatten(1, (n_heads // n_kv_heads, -1)).masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(dim=-1).to(v.dtype)
    o = _heads_by_row(weights.flatten(1, 2) @ v.transpose(0, 1), q.shape[0])
    return o.masked_fill(_sees_nothing(schedule)[:, None, None], 0.0)


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Computes attention with torch's scaled_dot_product_attention.

    A single document without a window uses torch's causal kernels. Several documents or a window need a (total, total)
    mask.
    Raises: ValueError if softcap is set, because torch's kernels do not support soft caps.
    """
    require_softcap(sdpa_attention, softcap)
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    if schedule.is_one_causal_document:
        o = F.scaled_dot_product_attention(
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            is_causal=True,
            scale=softmax_scale,
            enable_gqa=n_heads != n_kv_heads,
        )
        return o[0].transpose(0, 1)
    sees_nothing = _sees_nothing(schedule)
    # The output of a query that sees no key depends on the kernel that torch chooses. The mask `visible` therefore
    # shows all keys to such a query, and the last line sets the query's output to 0.
    visible = _visible(schedule.key_start, schedule.key_end, k.shape[0]) | sees_nothing[:, None]
    # with a mask and enable_gqa, torch would use a kernel that keeps all scores in memory
    k, v = (x.repeat_interleave(n_heads // n_kv_heads, dim=1) for x in (k, v))
    o = F.scaled_dot_product_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), attn_mask=visible, scale=softmax_scale
    )
    return o[0].transpose(0, 1).masked_fill(sees_nothing[:, None, None], 0.0)


@torch.compiler.disable  # torch.compile would unroll the loops and take hours
def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    *,
    chunk_size: PositiveInt,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Computes attention with torch's operators in chunks. Each head has chunk_size**2 scores in memory at a time.

    chunk_size: the number of tokens per chunk of queries, and per chunk of keys. chunk_size=sqrt(total) needs the least
    memory. Larger chunks are faster. The backward pass recomputes each chunk.
    Raises: ValueError if chunk_size is not positive.
    Source: arXiv:2112.05682 (Rabe and Staats, "Self-attention does not need O(n^2) memory").
    """
    if chunk_size < 1:
        raise ValueError(f"attention.chunk_size must be at least 1 token; got {chunk_size}")
    # k and v are split once, because autograd would allocate a gradient as large as k for each slice in the loop
    keys, values = k.split(chunk_size), v.split(chunk_size)
    scale = _scale(q, softmax_scale)
    outputs = [
        recomputed(_attend_chunk, *queries, keys, values, scale, softcap)
        for queries in zip(
            q.split(chunk_size),
            schedule.key_start.split(chunk_size),
            schedule.key_end.split(chunk_size),
            strict=True,
        )
    ]
    return torch.cat(outputs)


def _attend_chunk(
    q: Tensor,
    key_start: Tensor,
    key_end: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    scale: float,
    softcap: float,
) -> Tensor:
    """Computes the attention outputs of one chunk of queries, (M, n_heads, head_dim), from all keys.

    The softmax is computed with a running maximum and a running sum.
    """
    n_kv_heads = keys[0].shape[1]
    rows = _rows_by_kv_head(q, n_kv_heads)
    total = rows.new_zeros(*rows.shape[:2], 1, dtype=torch.float32)
    # the running maximum starts with a finite number: with -inf, the difference -inf - (-inf) would be NaN
    running = (torch.full_like(total, torch.finfo(torch.float32).min), total, torch.zeros_like(rows, dtype=total.dtype))
    first_key = 0
    for k, v in zip(keys, values, strict=True):
        starts_and_ends = key_start - first_key, key_end - first_key
        running = recomputed(_add_keys, *running, rows, k, v, *starts_and_ends, scale, softcap)
        first_key += k.shape[0]
    _, total, weighted = running
    return _heads_by_row(weighted / total.masked_fill(total == 0, 1.0), q.shape[0]).to(q.dtype)


def _add_keys(
    maximum: Tensor,
    total: Tensor,
    weighted: Tensor,
    rows: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    end: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Updates the running maximum, the running sum and the weighted sum of values with a chunk of keys."""
    scores = soft_capped((rows @ k.transpose(0, 1).mT).float() * scale, softcap)  # [n_kv_heads, G * M, N]
    visible = _visible(start, end, k.shape[0])
    scores = scores.unflatten(1, (-1, start.shape[0])).masked_fill(~visible, float("-inf")).flatten(1, 2)
    # the maximum needs no gradient, because it cancels out of the result
    new_maximum = torch.maximum(maximum, scores.detach().amax(dim=-1, keepdim=True))
    decay, weights = torch.exp(maximum - new_maximum), torch.exp(scores - new_maximum)
    values = (weights.to(v.dtype) @ v.transpose(0, 1)).float()
    return new_maximum, total * decay + weights.sum(dim=-1, keepdim=True), weighted * decay + values


def soft_capped(scores: Tensor, softcap: float) -> Tensor:
    """Returns softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118), or the scores unchanged if softcap is 0."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def function_of(attention: Attention) -> object:
    """Returns the function inside `attention` if it is a functools.partial, and otherwise `attention` itself."""
    return attention.func if isinstance(attention, partial) else attention


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


def _visible(key_start: Tensor, key_end: Tensor, n_keys: int) -> Tensor:
    """Returns True where a query sees a key. Shapes: key_start, key_end (M,) -> (M, n_keys) bool."""
    key = torch.arange(n_keys, device=key_start.device)
    return (key >= key_start[:, None]) & (key < key_end[:, None])


def _sees_nothing(schedule: Schedule) -> Tensor:
    """Returns a mask of the queries that see no key, (total,) bool. All queries after the last document see no key."""
    return schedule.key_start >= schedule.key_end


def _heads_first(x: Tensor) -> Tensor:
    """Converts (total, heads, head_dim) to torch's layout, (1, heads, total, head_dim)."""
    return x.transpose(0, 1)[None]


def _rows_by_kv_head(q: Tensor, n_kv_heads: int) -> Tensor:
    """Converts (M, n_heads, head_dim) to (n_kv_heads, G * M, head_dim). G is the number of query heads per KV head."""
    return q.unflatten(1, (n_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _heads_by_row(o: Tensor, n_rows: int) -> Tensor:
    """Converts (n_kv_heads, G * n_rows, head_dim) back to (n_rows, n_heads, head_dim)."""
    return o.unflatten(1, (-1, n_rows)).permute(2, 0, 1, 3).flatten(1, 2)
