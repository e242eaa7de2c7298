"""The phases of the decoding kernel (decode.py), in the order in which a program runs them.

A program first locates its tile of rows and its split of the keys. The program then loads the queries, visits the keys
in a loop, and stores the outputs.
"""

import triton
import triton.language as tl

from fa_kernels.device import LN_2, LOG2_E
from fa_kernels.flash_attention.masks import is_visible
from fa_kernels.flash_attention.portable.cache import load_rotated
from fa_kernels.flash_attention.portable.columns import load_columns
from fa_kernels.flash_attention.scores import alibi_bias, cap
from fa_kernels.flash_attention.softmax import online_softmax_step
from fa_kernels.flash_attention.structure import structure


@structure
class Item:
    """A work item: one tile of rows, and one of the parts into which the keys are split."""

    sequence: tl.tensor
    sequence_64: tl.tensor  # `sequence` as int64, to compute offsets
    kv_head: tl.tensor
    kv_head_64: tl.tensor
    tile: tl.tensor
    split: tl.tensor


@structure
class Keys:
    """The keys of a sequence. Only the keys at positions `first` to `end - 1` can be visible."""

    cached: tl.tensor  # the number of cached tokens, without the new tokens
    first: tl.tensor
    end: tl.tensor


@structure
class Rows:
    """The rows of a tile. A row is a query of one head. Each field is [M]."""

    inside: tl.tensor  # whether the row exists
    token: tl.tensor
    head: tl.tensor
    aligned: tl.tensor  # the position of the key that is aligned with the query
    key_start: tl.tensor  # the query sees the keys from `key_start` to `key_end - 1`
    key_end: tl.tensor


@structure
class Span:
    """The keys of one split that a tile sees: start <= key < end. start and whole_start are multiples of BLOCK_N.

    Every row sees all keys with whole_start <= key < whole_end. Blocks of keys before whole_start or after whole_end
    need a mask.
    """

    start: tl.tensor
    whole_start: tl.tensor
    whole_end: tl.tensor
    end: tl.tensor


@structure
class Pages:
    """The location of K and V of one sequence and one KV head in the cache."""

    k: tl.tensor  # pointer to the KV head in page 0
    v: tl.tensor
    table: tl.tensor  # pointer to the row of the block table that lists the sequence's pages, or None
    only: tl.tensor  # the sequence's page, if the sequence has only one page
    n_pages: tl.tensor
    size: tl.tensor  # tokens per page
    stride_kp: tl.tensor
    stride_kt: tl.tensor
    stride_vp: tl.tensor
    stride_vt: tl.tensor


@structure
class Scoring:
    """The operations on scores before the softmax."""

    softmax_scale: tl.tensor
    softcap: tl.tensor  # the bound of the soft cap; it is read only if `HAS_SOFTCAP` is true
    slope: tl.tensor  # the ALiBi slope of each row [M], or None


@structure
class Running:
    """The running softmax of a tile."""

    acc: tl.tensor  # the sum of P V [M, BLOCK_DV]
    row_max: tl.tensor  # [M]
    row_sum: tl.tensor


@triton.jit
def locate_item(n_tiles, n_splits, n_kv_heads):
    """Returns the work item of this program."""
    program = tl.program_id(0)
    tile = program % n_tiles
    split = program // n_tiles % n_splits
    kv_head = program // (n_tiles * n_splits) % n_kv_heads
    sequence = program // (n_tiles * n_splits * n_kv_heads)
    return Item(sequence, sequence.to(tl.int64), kv_head, kv_head.to(tl.int64), tile, split)


@triton.jit
def keys_of_sequence(sequence, seqlens_ptr, leftpad_ptr, seqlen_new, capacity):
    """Returns the keys of a sequence. Keys before `leftpad` are padding."""
    cached = tl.load(seqlens_ptr + sequence)
    n_keys = tl.minimum(tl.maximum(cached, 0) + seqlen_new, capacity)
    first_key = 0
    if leftpad_ptr is not None:
        first_key = tl.maximum(tl.load(leftpad_ptr + sequence), 0)
    return Keys(cached, first_key, n_keys)


@triton.jit
def rows_of_tile(item, keys, seqlen_q, left, right, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the rows of the item.

    A query sees `left` keys to the left of its aligned key, and `right` keys to the right of it.
    """
    n_rows = seqlen_q * GROUP
    rows = item.tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < n_rows
    token, head = rows // GROUP, item.kv_head * GROUP + rows % GROUP
    aligned = keys.end - seqlen_q + token  # the last query is aligned with the last key
    key_start = tl.maximum(aligned - left, keys.first)
    key_end = tl.minimum(aligned + right + 1, keys.end)
    return Rows(inside, token, head, aligned, key_start, key_end)


@triton.jit
def span_of_split(
    item, keys, seqlen_q, left, right, n_splits, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Returns the keys that this program reads. The keys that the tile sees are divided into `n_splits` parts."""
    # The tile sees keys from the first visible key of its first token to the last visible key of its last token.
    first_aligned = keys.end - seqlen_q + item.tile * BLOCK_M // GROUP
    last_aligned = keys.end - seqlen_q + (tl.minimum((item.tile + 1) * BLOCK_M, seqlen_q * GROUP) - 1) // GROUP
    start = tl.maximum(first_aligned - left, keys.first) // BLOCK_N * BLOCK_N
    end = tl.minimum(last_aligned + right + 1, keys.end)
    split_size = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N * n_splits) * BLOCK_N
    start += item.split * split_size
    end = tl.minimum(start + split_size, end)
    whole_start = tl.cdiv(tl.maximum(last_aligned - left, keys.first), BLOCK_N) * BLOCK_N
    whole_start = tl.minimum(tl.maximum(whole_start, start), tl.maximum(start, end))
    whole_end = tl.minimum(first_aligned + right + 1, keys.end) // BLOCK_N * BLOCK_N
    whole_end = tl.maximum(tl.minimum(whole_end, end), whole_start)

    # With int32 loop bounds, the compiler would have to widen the loop counters, and ptxas would serialise wgmma
    # (warning C7515).
    start, whole_start = start.to(tl.int64), whole_start.to(tl.int64)
    whole_end, end = whole_end.to(tl.int64), end.to(tl.int64)
    return Span(start, whole_start, whole_end, end)


@triton.jit
def load_queries(
    item, keys, rows, q_ptr, stride_qb, stride_qt, stride_qh, cos_ptr, sin_ptr, stride_cos, seqlen_rotary,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROTARY_BY_TOKEN: tl.constexpr,
):  # fmt: skip
    """Loads the queries of the rows, and rotates them. Returns [M, BLOCK_D]."""
    q_ptrs = q_ptr + item.sequence_64 * stride_qb
    q_ptrs = q_ptrs + rows.token.to(tl.int64) * stride_qt + rows.head.to(tl.int64) * stride_qh  # [M]
    positions = keys.cached + rows.token if ROTARY_BY_TOKEN else keys.cached + rows.token * 0
    return load_rotated(
        q_ptrs, rows.inside, positions, cos_ptr, sin_ptr, stride_cos, seqlen_rotary, D, BLOCK_D, ROTARY, INTERLEAVED
    )


@triton.jit
def load_slopes(item, rows, slopes_ptr, stride_slopes):
    """Loads the ALiBi slope of each row. Returns None without ALiBi."""
    slope = None
    if slopes_ptr is not None:
        slope_ptrs = slopes_ptr + item.sequence_64 * stride_slopes + rows.head
        slope = tl.load(slope_ptrs, mask=rows.inside, other=0.0)
    return slope


@triton.jit
def pages_of_sequence(
    item, k_ptr, v_ptr, table_ptr, stride_table, n_pages, page_size,
    stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh, PAGED: tl.constexpr,
):  # fmt: skip
    """Returns the pages of the item's sequence."""
    page = item.sequence_64
    if table_ptr is not None:
        table_ptr += item.sequence_64 * stride_table
        if not PAGED:
            page = tl.minimum(tl.maximum(tl.load(table_ptr), 0), n_pages - 1).to(tl.int64)
    k_ptr += item.kv_head_64 * stride_kh
    v_ptr += item.kv_head_64 * stride_vh
    return Pages(k_ptr, v_ptr, table_ptr, page, n_pages, page_size, stride_kp, stride_kt, stride_vp, stride_vt)


@triton.jit
def _locate_block(n_64, n, pages, PAGED: tl.constexpr):
    """Returns pointers to K and V of the block of keys whose first position is `n`. n_64 is `n` in int64."""
    if PAGED:  # the page size is a multiple of `BLOCK_N`, so a block lies in one page
        # If an entry of the table is wrong, another page may be read, but never memory outside of the cache.
        page = tl.minimum(tl.maximum(tl.load(pages.table + n // pages.size), 0), pages.n_pages - 1).to(tl.int64)
        within = (n % pages.size).to(tl.int64)
    else:
        page = pages.only
        within = n_64
    k_block = pages.k + (page * pages.stride_kp + within * pages.stride_kt)
    v_block = pages.v + (page * pages.stride_vp + within * pages.stride_vt)
    return k_block, v_block


@triton.jit
def begin_softmax(BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Returns the running softmax of a tile that has seen no key."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    return Running(acc, row_max, row_sum)


@triton.jit
def attend(
    running, q, rows, keys, pages, scoring, start, end,
    MASKED: tl.constexpr, PAGED: tl.constexpr, HAS_LEFTPAD: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Updates the running softmax with the keys from `start` to `end - 1`. start is a multiple of BLOCK_N."""
    for n_64 in range(start, end, BLOCK_N):
        n = tl.cast(n_64, tl.int32)
        k_block, v_block = _locate_block(n_64, n, pages, PAGED)
        n_left = keys.end - n
        k = load_columns(k_block, 0, pages.stride_kt, n_left, (BLOCK_D,), D, BLOCK_N, MASKED)[0]  # [N, BLOCK_D]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [M, N]
        positions = n + tl.arange(0, BLOCK_N)
        to_log2 = scoring.softmax_scale * LOG2_E  # exp(softmax_scale * scores) is exp2(to_log2 * scores)
        if HAS_SOFTCAP:  # the soft cap and ALiBi return scores that are already scaled, in log2 units
            scores = cap(scores, scoring.softmax_scale, scoring.softcap, k.dtype)[0]
            to_log2 = 1.0
        if scoring.slope is not None:
            scores = scores * to_log2 + alibi_bias(scoring.slope[:, None], rows.aligned[:, None], positions[None, :])
            to_log2 = 1.0
        if MASKED:
            scores = tl.where(is_visible(positions, rows.key_start, rows.key_end), scores, float("-inf"))
        p, rescale, row_max, row_sum = online_softmax_step(scores, running.row_max, running.row_sum, to_log2, MASKED)
        v = load_columns(v_block, 0, pages.stride_vt, n_left, (BLOCK_DV,), DV, BLOCK_N, MASKED)[0]  # [N, BLOCK_DV]
        if MASKED and HAS_LEFTPAD:  # padding may contain NaN, and 0 * NaN is NaN
            v = tl.where((positions >= keys.first)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, running.acc * rescale[:, None], input_precision=PRECISION)
        running = Running(acc, row_max, row_sum)
    return running


@triton.jit
def store_outputs(
    running, item, rows, o_ptr, lse_ptr, batch, seqlen_q, n_kv_heads, GROUP: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Stores o and lse of the rows."""
    sees = running.row_sum > 0  # rows that see no key get o = 0 and lse = -inf
    divisor = tl.where(sees, running.row_sum, 1.0)[:, None]
    lse = tl.where(sees, (running.row_max + tl.log2(running.row_sum)) * LN_2, float("-inf"))
    n_heads = n_kv_heads * GROUP
    first_row = (item.split * batch + item.sequence).to(tl.int64) * seqlen_q * n_heads  # earlier splits come first
    o_ptrs = o_ptr + (first_row + rows.token.to(tl.int64) * n_heads + rows.head) * DV  # [M]
    cols = tl.arange(0, BLOCK_DV)
    mask = rows.inside[:, None] & (cols[None, :] < DV)
    tl.store(o_ptrs[:, None] + cols[None, :], (running.acc / divisor).to(o_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + first_row + rows.head.to(tl.int64) * seqlen_q + rows.token, lse, mask=rows.inside)
