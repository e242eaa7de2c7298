"""The truth that tests and scripts compare with: attention by its definition, one document at a time."""

import torch
from torch import Tensor


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention over packed documents with every score held in memory, computed and returned in `dtype`.

    Shapes: q (total_q, n_heads, head_dim); k, v (total_k, n_kv_heads, head_dim); cu_seqlens (n_docs + 1,) ->
    o (total_q, n_heads, head_dim), lse (n_heads, total_q) in nats.
    A query that sees no key, or that no document holds, gives 0 and lse -inf. Differentiable in both outputs.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size if not causal else (window_size[0], 0)
    outputs, lses = [], []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        queries = q[q0:q1].transpose(0, 1)  # [H, M, D]
        keys, values = (x[k0:k1].transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))  # [H, N, D]
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= -distance <= right
        scores = (queries @ keys.mT * scale).masked_fill(~visible.to(q.device), float("-inf"))
        sees = visible.any(dim=1).to(q.device)
        # rows that see nothing are softmaxed over zeros and dropped, so that no gradient is NaN
        safe = scores.masked_fill(~sees[:, None], 0.0)
        outputs.append((safe.softmax(dim=-1) @ values * sees[:, None]).transpose(0, 1))
        lses.append(safe.logsumexp(dim=-1).masked_fill(~sees, float("-inf")))
    outside = q.shape[0] - starts_q[-1]
    outputs.append(q.new_zeros(outside, q.shape[1], v.shape[-1]))
    lses.append(q.new_full((q.shape[1], outside), float("-inf")))
    return torch.cat(outputs), torch.cat(lses, dim=1)
