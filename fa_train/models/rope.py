"""Positions in a packed stream, and rotary embeddings of them (RoPE, arXiv:2104.09864).

The layout is the half-split one of Hugging Face's Llama: channel i is rotated with channel i + head_dim / 2.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RotaryTable(NamedTuple):
    """cos and sin (total, head_dim / 2) fp32: built once a forward pass, shared by all layers."""

    cos: Tensor
    sin: Tensor


def document_positions(cu_seqlens: Tensor | None, total: int, device: torch.device) -> Tensor:
    """(total,) int64: each token's position in its document; cu_seqlens (n_docs + 1,) int32, None is one document.

    Tokens past the last document count on from its end as one more.
    """
    token = torch.arange(total, device=device)
    if cu_seqlens is None:
        return token
    # how many documents end at or before the token; zero-length ones are stepped over
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token.to(torch.int32), right=True)
    return token - cu_seqlens[document]


def rotary_table(position_ids: Tensor, head_dim: int, theta: float) -> RotaryTable:
    """position_ids (total,) in tokens -> the table; frequency i is theta ** (-2i / head_dim) radians a token.

    Angles are fp64: at position one million an fp32 angle is off by up to 0.03 radians.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position_ids.device) / head_dim
    angles = position_ids.double()[:, None] * theta**-exponents  # [total, head_dim / 2]
    return RotaryTable(angles.cos().float(), angles.sin().float())


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """x (total, heads, head_dim) of any dtype -> the same shape in fp32: in bf16 the rotation loses precision."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = table.cos[:, None], table.sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
