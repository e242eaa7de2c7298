"""Four ways to compute one attention, for the model to be handed: an ablation changes nothing else.

The only mask is the schedule's: query i sees the keys j with key_start[i] <= j < key_end[i]. A query that sees none
gives 0. Scores are scaled, by head_dim**-0.5 unless told otherwise, and capped on demand; the softmax is taken in fp32
whatever the dtype of q, k and v.
"""

from functools import partial
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fa_kernels.flash_attention.checks import require_backend as require_flash_backend
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import Schedule
from fa_train.bounds import PositiveInt


@runtime_checkable  # fa_train.settings tells an attention from a text or number in a config
class Attention(Protocol):
    """q (total, n_heads, head_dim); k, v (total, n_kv_heads, head_dim), all of one dtype -> o like q.

    Units: softmax_scale multiplies the scores, None is head_dim**-0.5; softcap bounds a scaled score to
    softcap * tanh(score / softcap), 0 is none.
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


def require_backend(attention: Attention, device: torch.device) -> None:
    """ValueError when `attention` cannot run on `device`: said before training starts."""
    if _function(attention) is flash_attention:
        require_flash_backend(device)


def require_softcap(attention: Attention, softcap: float) -> None:
    """ValueError when `attention` cannot cap its scores: said when a model is built."""
    if softcap and _function(attention) is sdpa_attention:
        raise ValueError(
            f"attention=sdpa cannot cap scores, and this model caps them at {softcap}. "
            "Use attention=flash, or attention=chunked or naive where there is no CUDA GPU"
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
    """This repository's Triton kernels: memory linear in total, blocks outside the mask never visited."""
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
    """Attention as its formula reads, with all (n_heads, total, total) scores in memory: what flash is measured by."""
    n_heads, n_kv_heads = q.shape[1], k.shape[1]
    scores = _rows_by_kv_head(q, n_kv_heads) @ k.transpose(0, 1).mT * _scale(q, softmax_scale)  # [n_kv_heads, G * M, N]
    scores = soft_capped(scores, softcap)
    visible = _visible(schedule.key_start, schedule.key_end, k.shape[0])
    # the smallest number instead of -inf keeps a row without keys finite, so that it gives no NaN to dv
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
    """torch's scaled_dot_product_attention: its causal kernels for one document, a (total, total) mask for more.

    Raises: ValueError on a softcap: its kernels have none.
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
    # a row without keys may see all and is zeroed below: torch's kernels disagree on what an empty row gives
    visible = _visible(schedule.key_start, schedule.key_end, k.shape[0]) | sees_nothing[:, None]
    # torch's kernels that take a mask do not take grouped heads: enable_gqa would fall back to materialised scores
    k, v = (x.repeat_interleave(n_heads // n_kv_heads, dim=1) for x in (k, v))
    o = F.scaled_dot_product_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), attn_mask=visible, scale=softmax_scale
    )
    return o[0].transpose(0, 1).masked_fill(sees_nothing[:, None, None], 0.0)


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
    """Memory-efficient attention in plain torch: only chunk_size x chunk_size scores of each head exist at a time.

    Units: chunk_size in tokens, of queries and of keys; about sqrt(total) needs the least memory, more is faster.
    Both passes stay that small: each chunk of queries, and in it each chunk of keys, is recomputed in the backward.
    Raises: ValueError unless chunk_size is positive.
    Source: Rabe and Staats, Self-attention does not need O(n^2) memory, arXiv:2112.05682.
    """
    if chunk_size < 1:
        raise ValueError(f"attention.chunk_size must be at least 1 token; got {chunk_size}")
    # split once: a slice in the loop would have a gradient as long as all of k
    keys, values = k.split(chunk_size), v.split(chunk_size)
    scale = _scale(q, softmax_scale)
    outputs = [
        checkpoint(_attend_chunk, *queries, keys, values, scale, softcap, use_reentrant=False, preserve_rng_state=False)
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
    """One chunk of queries (M, n_heads, head_dim) against all chunks of keys, by a running maximum and sum."""
    n_kv_heads = keys[0].shape[1]
    rows = _rows_by_kv_head(q, n_kv_heads)
    total = rows.new_zeros(*rows.shape[:2], 1, dtype=torch.float32)
    # not -inf, so that the difference of two maxima is never NaN
    running = (torch.full_like(total, torch.finfo(torch.float32).min), total, torch.zeros_like(rows, dtype=total.dtype))
    first_key = 0
    for k, v in zip(keys, values, strict=True):
        running = checkpoint(
            _add_keys,
            *running,
            rows,
            k,
            v,
            key_start - first_key,
            key_end - first_key,
            scale,
            softcap,
            use_reentrant=False,
            preserve_rng_state=False,
        )
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
    """The running maximum and sum (n_kv_heads, G * M, 1) and weighted values with one more chunk of keys."""
    scores = soft_capped((rows @ k.transpose(0, 1).mT).float() * scale, softcap)  # [n_kv_heads, G * M, N]
    visible = _visible(start, end, k.shape[0])
    scores = scores.unflatten(1, (-1, start.shape[0])).masked_fill(~visible, float("-inf")).flatten(1, 2)
    # the result does not depend on the maximum, so its gradient is left out
    new_maximum = torch.maximum(maximum, scores.detach().amax(dim=-1, keepdim=True))
    decay, weights = torch.exp(maximum - new_maximum), torch.exp(scores - new_maximum)
    values = (weights.to(v.dtype) @ v.transpose(0, 1)).float()
    return new_maximum, total * decay + weights.sum(dim=-1, keepdim=True), weighted * decay + values


def soft_capped(scores: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(scores / softcap), so that none is beyond softcap; 0 is none (Gemma 2, arXiv:2408.00118)."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _function(attention: Attention) -> object:
    """What was handed in, without the arguments that were bound to it."""
    return attention.func if isinstance(attention, partial) else attention


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


def _visible(key_start: Tensor, key_end: Tensor, n_keys: int) -> Tensor:
    """(M,) twice -> (M, n_keys) bool."""
    key = torch.arange(n_keys, device=key_start.device)
    return (key >= key_start[:, None]) & (key < key_end[:, None])


def _sees_nothing(schedule: Schedule) -> Tensor:
    """(total,) bool: queries past the last document."""
    return schedule.key_start >= schedule.key_end


def _heads_first(x: Tensor) -> Tensor:
    """(total, heads, head_dim) -> (1, heads, total, head_dim), torch's layout."""
    return x.transpose(0, 1)[None]


def _rows_by_kv_head(q: Tensor, n_kv_heads: int) -> Tensor:
    """(M, n_heads, head_dim) -> (n_kv_heads, G * M, head_dim): a group's G heads are rows that share keys."""
    return q.unflatten(1, (n_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _heads_by_row(o: Tensor, n_rows: int) -> Tensor:
    """The inverse of _rows_by_kv_head."""
    return o.unflatten(1, (-1, n_rows)).permute(2, 0, 1, 3).flatten(1, 2)
