"""The cache of keys and values: its layout in pages, and the kernel that appends new tokens to it.

The kernel rotates keys before it writes them to the cache (arXiv:2104.09864).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.options import OPTIONS

APPEND_ROWS = 16  # the number of new tokens that one program appends


@dataclass(frozen=True)
class Cache:
    """The cached keys and values of a batch, in pages. A block table lists the pages of each sequence.

    Without a block table, a cache has one page per sequence. Positions are counted from the start of a sequence's first
    page, and include the padding on the left.
    """

    k: Tensor  # (n_pages, page_size, n_kv_heads, head_dim)
    v: Tensor  # (n_pages, page_size, n_kv_heads, v_head_dim)
    seqlens: Tensor  # (batch,) int32, the number of cached tokens before this call appends new tokens
    table: Tensor | None  # (batch, pages per sequence) int32, or None if page i holds sequence i
    leftpad: Tensor | None  # (batch,) int32, the first position after the padding, or None without padding

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of a sequence."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def paged(self) -> bool:
        """Whether a sequence may have more than one page."""
        return self.table is not None and self.table.shape[1] > 1


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding (arXiv:2104.09864). cos and sin are (positions, rotary_dim / 2); the last stride is 1.

    If `interleaved`, columns 0 and 1 are a pair, then 2 and 3, and so on. If not `interleaved`, column i and column i +
    rotary_dim / 2 are a pair. Only the first rotary_dim columns are rotated.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


@triton.jit
def load_rotated(
    row_ptrs, inside, positions, cos_ptr, sin_ptr, stride_cos, seqlen_rotary,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Loads the rows at row_ptrs [M] and rotates them by the angles of `positions` [M]. Returns [M, BLOCK_D].

    The first `ROTARY` columns are rotated. The result is 0 in rows where `inside` is false, and in columns after the
    first `D`. If the table of angles ends before a row's position, the row is not rotated.
    """
    cols = tl.arange(0, BLOCK_D)
    tile = tl.load(row_ptrs[:, None] + cols[None, :], mask=inside[:, None] & (cols[None, :] < D), other=0.0)
    if ROTARY:
        HALF: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            pair = cols // 2
            is_first = cols % 2 == 0
            partner_cols = tl.where(is_first, cols + 1, cols - 1)
        else:
            pair = cols % HALF
            is_first = cols < HALF
            partner_cols = tl.where(is_first, cols + HALF, cols - HALF)
        has_angle = (inside & (positions < seqlen_rotary))[:, None] & (cols < ROTARY)[None, :]
        partner = tl.load(row_ptrs[:, None] + partner_cols[None, :], mask=has_angle, other=0.0).to(tl.float32)
        angles = positions[:, None].to(tl.int64) * stride_cos + pair[None, :]
        cos = tl.load(cos_ptr + angles, mask=has_angle, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=has_angle, other=0.0).to(tl.float32)
        rotated = tile.to(tl.float32) * cos + partner * tl.where(is_first[None, :], -sin, sin)
        tile = rotated.to(tile.dtype)
    return tile


@triton.jit(do_not_specialize=["seqlen_new", "n_blocks", "n_pages", "page_size", "capacity", "seqlen_rotary"])
def _append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, seqlens_ptr, table_ptr, cos_ptr, sin_ptr,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_kcp, stride_kct, stride_kch, stride_vcp, stride_vct, stride_vch, stride_table, stride_cos,
    seqlen_new, n_blocks, n_pages, page_size, capacity, seqlen_rotary,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_T: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One program appends BLOCK_T new tokens of one sequence and head."""
    sequence = (tl.program_id(0) // n_blocks).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) % n_blocks * BLOCK_T + tl.arange(0, BLOCK_T)  # [T]
    rows_64 = rows.to(tl.int64)
    positions = tl.load(seqlens_ptr + sequence) + rows
    inside = (rows < seqlen_new) & (positions >= 0) & (positions < capacity)
    if table_ptr is None:
        pages = sequence + tl.zeros([BLOCK_T], tl.int64)
    else:
        pages = tl.load(table_ptr + sequence * stride_table + positions // page_size, mask=inside, other=0)
        pages = pages.to(tl.int64)
    # A wrong entry in the block table must not cause a write outside of the cache.
    writable = (inside & (pages >= 0) & (pages < n_pages))[:, None]
    within = (positions % page_size).to(tl.int64)

    k_ptrs = k_ptr + sequence * stride_kb + head * stride_kh + rows_64 * stride_kt  # [T]
    k = load_rotated(
        k_ptrs, inside, positions, cos_ptr, sin_ptr, stride_cos, seqlen_rotary, D, BLOCK_D, ROTARY, INTERLEAVED
    )
    cols = tl.arange(0, BLOCK_D)
    to = k_cache_ptr + head * stride_kch + pages * stride_kcp + within * stride_kct  # [T]
    tl.store(to[:, None] + cols[None, :], k, mask=writable & (cols[None, :] < D))

    cols = tl.arange(0, BLOCK_DV)
    in_v = cols[None, :] < DV
    v_ptrs = v_ptr + sequence * stride_vb + head * stride_vh + rows_64 * stride_vt
    v = tl.load(v_ptrs[:, None] + cols[None, :], mask=inside[:, None] & in_v, other=0.0)
    to = v_cache_ptr + head * stride_vch + pages * stride_vcp + within * stride_vct
    tl.store(to[:, None] + cols[None, :], v, mask=writable & in_v)


def append_to_cache(k: Tensor, v: Tensor, cache: Cache, rotary: Rotary | None) -> None:
    """Writes k and v after the cached tokens of each sequence.

    With `rotary`, each key is rotated by the angles of its position in the sequence.
    Tokens that do not fit in the cache are dropped.
    Shapes: k (batch, seqlen_new, n_kv_heads, head_dim); v (batch, seqlen_new, n_kv_heads, v_head_dim).
    """
    batch, seqlen_new, n_kv_heads, head_dim = k.shape
    v_head_dim = v.shape[-1]
    n_blocks = triton.cdiv(seqlen_new, APPEND_ROWS)
    if k.numel() == 0:
        return
    _append_kernel[(batch * n_blocks, n_kv_heads)](
        k, v, cache.k, cache.v, cache.seqlens, cache.table, *angles_of(rotary),
        *k.stride()[:3], *v.stride()[:3], *cache.k.stride()[:3], *cache.v.stride()[:3],
        stride_of(cache.table), stride_of(rotary.cos if rotary else None),
        seqlen_new, n_blocks, cache.k.shape[0], cache.k.shape[1], cache.capacity, positions_of(rotary),
        D=head_dim, DV=v_head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_DV=triton.next_power_of_2(v_head_dim), BLOCK_T=APPEND_ROWS, **rotary_switches(rotary), **OPTIONS,
    )  # fmt: skip


def angles_of(rotary: Rotary | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the tables of cos and sin, or (None, None) without rotary embedding."""
    return (rotary.cos, rotary.sin) if rotary else (None, None)


def positions_of(rotary: Rotary | None) -> int:
    """Returns the number of positions in the tables of cos and sin, or 0 without rotary embedding."""
    return rotary.cos.shape[0] if rotary else 0


def rotary_switches(rotary: Rotary | None) -> dict[str, int | bool]:
    """Returns the constexpr arguments of `load_rotated`. Without rotary embedding, `ROTARY` is 0."""
    return {
        "ROTARY": 2 * rotary.cos.shape[1] if rotary else 0,
        "INTERLEAVED": rotary.interleaved if rotary else True,
    }


def stride_of(rows: Tensor | None) -> int:
    """Returns the stride between rows, or 0 if `rows` is None."""
    return 0 if rows is None else rows.stride(0)
