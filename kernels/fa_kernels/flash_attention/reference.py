"""Attention computed by its definition, one document at a time. Tests and scripts compare kernels with this file."""

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
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Computes attention over packed documents in `dtype`, with all scores in memory.

    The arguments are those of flash_attn_varlen_func. Returns o (total_q, n_heads, v_head_dim) and lse
    (n_heads, total_q); both are differentiable. If a query sees no key, its output is 0, and its lse is the sink of its
    head (-inf without sinks). Queries after the last document see no key.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    total_q, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size if not causal else (window_size[0], 0)
    sink = torch.full((n_heads,), float("-inf"), dtype=dtype, device=q.device) if sinks is None else sinks.to(dtype)
    outputs, lses = [], []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    documents = list(zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False))
    documents.append((starts_q[-1], total_q, 0, 0))  # rows after the last document see no key
    for index, (q0, q1, k0, k1) in enumerate(documents):
        queries = q[q0:q1].transpose(0, 1)  # [H, M, D]
        keys, values = (x[k0:k1].transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))  # [H, N, D]
        distance = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            visible &= distance <= left
        if right >= 0:
            visible &= -distance <= right
        scores = queries @ keys.mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None and k1 > k0:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[index]
            scores = scores - slopes.to(dtype)[:, None, None] * distance.abs().to(q.device)
        scores = scores.masked_fill(~visible.to(q.device), float("-inf"))
        # The sink is one more column of scores, without a row in v.
        scores = torch.cat([scores, sink[:, None, None].expand(-1, q1 - q0, 1)], dim=2)
        sees = torch.isfinite(scores.detach()).any(dim=2)
        # Rows without a finite score get scores of 0 here, which avoids NaN in gradients. Below, the output of rows
        # without a finite score is set to 0, and the lse of these rows is set to -inf.
        safe = scores.masked_fill(~sees[..., None], 0.0)
        outputs.append((safe.softmax(dim=-1)[..., :-1] @ values * sees[..., None]).transpose(0, 1))
        lses.append(safe.logsumexp(dim=-1).masked_fill(~sees, float("-inf")))
    return torch.cat(outputs), torch.cat(lses, dim=1)
