"""Checks one case of flash_attn_with_kvcache on a GPU."""

from typing import Any
from unittest.mock import patch

import torch

from fa_kernels.flash_attention.portable import decode
from fa_kernels.flash_attention.tiles import TileConfig
from tests.gpu_check.variants import Width
from tests.kernels.support.attention_check import DEVICE
from tests.kernels.support.cached_attention import check

CAPACITY = 768  # tokens per sequence in the cache; a multiple of the `block_n` of every tile size


def check_decode(
    dtype: torch.dtype, width: Width, rows: int, tiles: TileConfig, page_size: int | None, option: int
) -> None:
    """Checks the decoding kernel with the given tile sizes.

    rows: the number of queries per KV head, which is (query tokens) * (query heads per KV head).
    """
    group = 1 + option % 2 if rows > 1 else 1
    head_dim, v_head_dim = width
    rotary_dim = head_dim // 16 * 16
    sets: list[dict[str, Any]] = [
        {"causal": True, "num_splits": 3},
        {"leftpad": [0, 37, 300], "causal": True},
        {"seqlen_new": 5, "rotary_dim": rotary_dim, "interleaved": True, "causal": True, "num_splits": 2},
        {
            "leftpad": [20, 0, 130], "seqlen_new": 21, "rotary_dim": rotary_dim, "interleaved": False,
            "window": (250, 3), "softcap": 5.0, "slopes": 0.1 * torch.rand(group, device=DEVICE), "num_splits": 2,
        },
    ]  # fmt: skip
    with patch.object(decode, "decode_tiles", lambda *_: tiles):
        check(
            [70, 37, CAPACITY - 21],
            seqlen_q=rows // group,
            capacity=CAPACITY,
            n_heads=group,
            n_kv_heads=1,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            page_size=page_size,
            **sets[option],
        )
