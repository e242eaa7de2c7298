"""The backward pass: one kernel computes dK and dV for tiles of keys, then another computes dQ for tiles of queries.

The algorithm is that of arXiv:2307.08691 (algorithm 2), but a separate kernel computes dQ:

    S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)     both kernels
    dV = P^T dO,  dK = scale dS^T Q                                            _dkdv_kernel
    dQ = scale dS K                                                            _dq_kernel

lse comes from the forward pass, and delta from delta.py. Products without ^T between S, P, dP and dS are elementwise.
The two kernels need seven matmuls, while one fused kernel would need five. Exactly one program computes
each output, so the kernels need no atomics, and gradients are bitwise repeatable. If dK and dV of a tile do not fit in
the registers together, the first kernel runs twice, once for dK and once for dV. The backward pass then needs eight
matmuls.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.columns_of_head import columns_of
from fa_kernels.device import LOG2_E, arch_of
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.masks import is_visible, tile_range
from fa_kernels.flash_attention.portable.columns import (
    add_to_columns,
    by_block,
    by_tensor,
    dot_of_columns,
    isolate_nan_columns,
    load_block,
    load_both,
    load_columns,
    store_block,
    with_rest,
    zero_columns,
)
from fa_kernels.flash_attention.schedule import WORK_TILE, Schedule
from fa_kernels.flash_attention.scores import alibi_bias, cap, load_alibi
from fa_kernels.flash_attention.tile_order import grid_of_tiles, heads_per_section, tile_and_head
from fa_kernels.flash_attention.tiles import key_passes, launch_tiles, precision_of
from fa_kernels.launch.record import launch


@triton.jit
def _probabilities(
    scores, lse, bias, softmax_scale, softcap, dtype: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
):  # fmt: skip
    """Returns p = 2^(logits - lse), and the derivative of the soft cap (1 without a soft cap).

    `scores` is Q K^T. The logits are the scores after the softmax scale, the soft cap and ALiBi. The logits and lse are
    in log2 units.
    """
    d_cap = 1.0
    if HAS_SOFTCAP:
        scores, t = cap(scores, softmax_scale, softcap, dtype)
        d_cap = 1.0 - t * t
    else:
        scores = scores * (softmax_scale * LOG2_E)
    if HAS_ALIBI:
        scores += bias
    return tl.math.exp2(scores - lse), d_cap


@triton.jit
def _accumulate_dk_dv(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, start, end, query_start, query_end,
    total_q, stride_qt, stride_dot, softmax_scale, softcap, slopes_ptr, aligned_ptr, document_ptr, stride_slopes,
    head, keys,
    MASKED: tl.constexpr, ISOLATE_NAN: tl.constexpr, HAS_DK: tl.constexpr, HAS_DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, D: tl.constexpr, D_COLUMNS: tl.constexpr,
    DV: tl.constexpr, DV_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the queries from `start` to `end - 1` of one head to dK and dV of a tile of keys.

    Scores are [N, M].
    """
    for m in range(start, end, BLOCK_M):
        queries = m + tl.arange(0, BLOCK_M)
        inside = queries < total_q
        q, do = load_both(
            q_ptr, do_ptr, m, stride_qt, stride_dot, total_q, D_COLUMNS, D, DV_COLUMNS, DV, BLOCK_M, MASKED
        )
        if ISOLATE_NAN and HAS_DK:
            q = isolate_nan_columns(q)[0]  # a NaN in q still reaches dK of keys that the query sees, because lse is NaN
        if ISOLATE_NAN and HAS_DV:
            do, nan_rows = isolate_nan_columns(do)
        if MASKED:
            lse = tl.load(lse_ptr + queries, mask=inside, other=0.0)
            delta = tl.load(delta_ptr + queries, mask=inside, other=0.0)
        else:
            lse = tl.load(lse_ptr + queries)
            delta = tl.load(delta_ptr + queries)
        scores = dot_of_columns(k, q, PRECISION)  # [N, M]
        bias = scores
        if HAS_ALIBI:
            slope, aligned = load_alibi(
                slopes_ptr, aligned_ptr, document_ptr, stride_slopes, queries, head, inside, HAS_ALIBI
            )
            bias = alibi_bias(slope[None, :], aligned[None, :], keys[:, None])
        lse = (lse * LOG2_E)[None, :]
        p, d_cap = _probabilities(scores, lse, bias, softmax_scale, softcap, k[0].dtype, HAS_SOFTCAP, HAS_ALIBI)
        if MASKED:
            # The mask is applied to p, not to the scores. For a query that sees no key, lse is -inf, and scores of -inf
            # would make p = 2^(score - lse) NaN.
            visible = is_visible(queries, query_start, query_end)
            if ISOLATE_NAN and HAS_DV:
                p += nan_rows[None, :]
            p = tl.where(visible, p, 0.0)
        if HAS_DV:
            dv = add_to_columns(dv, p.to(do[0].dtype), do, PRECISION)
        if HAS_DK:
            dp = dot_of_columns(v, do, PRECISION)  # [N, M]
            ds = p * (dp - delta[None, :]) * d_cap
            if MASKED:
                ds = tl.where(visible, ds, 0.0)  # delta of a masked query may be NaN, and 0 * NaN is NaN
            dk = add_to_columns(dk, ds.to(q[0].dtype), q, PRECISION)
    return dk, dv


@triton.jit
def dkdv_tile(
    first, kv_head,
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_start_ptr, query_end_ptr,
    slopes_ptr, aligned_ptr, document_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
    total_q, total_k, n_kv_heads, softmax_scale, softcap,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """Computes dK (if HAS_DK) and dV (if HAS_DV) of BLOCK_N keys of one KV head, starting with key `first`.

    The program loops over the query heads of the KV head. With `PHASES=3`, three loops process the blocks of queries,
    and only the first and the last loop use a mask. With `PHASES=1`, a single loop processes all blocks of queries and
    masks every block, which makes the compiled code shorter. Without `ISOLATE_NAN`, NaN in one document can reach all
    keys of the tile.
    """
    keys = first + tl.arange(0, BLOCK_N)  # [N]
    inside = keys < total_k
    query_start = tl.load(query_start_ptr + keys, mask=inside, other=0)
    query_end = tl.load(query_end_ptr + keys, mask=inside, other=0)
    last = tl.minimum(first + BLOCK_N, total_k) - 1
    start, whole_start, whole_end, end = tile_range(query_start_ptr, query_end_ptr, first, last, BLOCK_M)
    if PHASES == 1:
        whole_start = end  # no block counts as whole, so phase 0 processes all blocks

    kv_head_64 = kv_head.to(tl.int64)
    k_ptr += kv_head_64 * stride_kh
    v_ptr += kv_head_64 * stride_vh
    if HAS_DK:
        k, v = load_both(
            k_ptr, v_ptr, first, stride_kt, stride_vt, total_k, D_COLUMNS, D, DV_COLUMNS, DV, BLOCK_N, True
        )
    else:
        k = load_columns(k_ptr, first, stride_kt, total_k, D_COLUMNS, D, BLOCK_N, True)
        v = ()
    gradients = by_block(
        zero_columns(D_COLUMNS, BLOCK_N) if HAS_DK else (), zero_columns(DV_COLUMNS, BLOCK_N) if HAS_DV else ()
    )
    # With disable_licm, the compiler does not hoist loop-invariant values out of this loop. Hoisted values would not
    # fit in registers.
    for member in tl.range(GROUP, disable_licm=True):
        head = kv_head * GROUP + member
        head_64 = head.to(tl.int64)
        dk, dv = by_tensor(gradients)
        for phase in tl.static_range(PHASES):
            dk, dv = _accumulate_dk_dv(
                dk, dv, k, v, q_ptr + head_64 * stride_qh, do_ptr + head_64 * stride_doh,
                lse_ptr + head_64 * total_q, delta_ptr + head_64 * total_q,
                start if phase == 0 else whole_start if phase == 1 else whole_end,
                whole_start if phase == 0 else whole_end if phase == 1 else end,
                query_start, query_end, total_q, stride_qt, stride_dot, softmax_scale, softcap,
                slopes_ptr, aligned_ptr, document_ptr, stride_slopes, head, keys,
                phase != 1, phase != 1 and ISOLATE_NAN, HAS_DK, HAS_DV, HAS_SOFTCAP, HAS_ALIBI,
                D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_M, PRECISION,
            )  # fmt: skip
        gradients = by_block(dk, dv)
    dk, dv = by_tensor(gradients)
    dk_ptr += kv_head_64 * D
    dv_ptr += kv_head_64 * DV
    for i in tl.static_range(2):
        if i < len(dk):
            store_block(dk_ptr, dk[i] * softmax_scale, first, n_kv_heads * D, total_k, i, D_COLUMNS, D, BLOCK_N)
        if i < len(dv):
            store_block(dv_ptr, dv[i], first, n_kv_heads * DV, total_k, i, DV_COLUMNS, DV, BLOCK_N)


@triton.jit(do_not_specialize=["total_q", "total_k", "n_kv_heads", "n_tiles", "section"])
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_start_ptr, query_end_ptr,
    slopes_ptr, aligned_ptr, document_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
    total_q, total_k, n_kv_heads, softmax_scale, softcap, tiles_ptr, n_tiles, section,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    TILES_PER_WORK_TILE: tl.constexpr,
):  # fmt: skip
    """One program computes dK, dV or both for BLOCK_N keys of one KV head. dk and dv are contiguous."""
    tile, kv_head = tile_and_head(tl.program_id(0), tiles_ptr, n_tiles, n_kv_heads, section, TILES_PER_WORK_TILE)
    first = tile * BLOCK_N
    if first >= total_k:
        return
    dkdv_tile(
        first, kv_head,
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, query_start_ptr, query_end_ptr,
        slopes_ptr, aligned_ptr, document_ptr,
        stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
        total_q, total_k, n_kv_heads, softmax_scale, softcap,
        HAS_DK, HAS_DV, HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_M, BLOCK_N, PRECISION,
        ISOLATE_NAN, 3,
    )  # fmt: skip


@triton.jit
def _accumulate_dq(
    dq, q, do, lse, delta, k_ptr, v_ptr, start, end, key_start, key_end, total_k, stride_kt,
    stride_vt, softmax_scale, softcap, slope, aligned,
    MASKED: tl.constexpr, ISOLATE_NAN: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the keys from `start` to `end - 1` to `dq`, the dQ of a tile of queries. Returns dq."""
    for n in range(start, end, BLOCK_N):
        k = load_block(k_ptr, n, stride_kt, total_k, 0, D_COLUMNS, D, BLOCK_N, MASKED)  # [N, D_COLUMNS[0]]
        v = load_block(v_ptr, n, stride_vt, total_k, 0, DV_COLUMNS, DV, BLOCK_N, MASKED)
        k = with_rest(k, k_ptr, n, stride_kt, total_k, D_COLUMNS, D, BLOCK_N, MASKED)
        if ISOLATE_NAN:
            k = isolate_nan_columns(k)[0]  # a NaN in k still reaches dQ of queries that see the key: their lse is NaN
        scores = dot_of_columns(q, k, PRECISION)  # [M, N]
        keys = n + tl.arange(0, BLOCK_N)
        bias = alibi_bias(slope[:, None], aligned[:, None], keys[None, :]) if HAS_ALIBI else scores
        p, d_cap = _probabilities(
            scores, lse[:, None], bias, softmax_scale, softcap, k[0].dtype, HAS_SOFTCAP, HAS_ALIBI
        )
        if MASKED:
            p = tl.where(is_visible(keys, key_start, key_end), p, 0.0)
        dp = tl.dot(do[0], tl.trans(v), input_precision=PRECISION)  # [M, N]
        for i in tl.static_range(1, len(DV_COLUMNS)):
            v = load_block(v_ptr, n, stride_vt, total_k, i, DV_COLUMNS, DV, BLOCK_N, MASKED)
            dp = tl.dot(do[i], tl.trans(v), dp, input_precision=PRECISION)
        ds = p * (dp - delta[:, None]) * d_cap
        if MASKED:
            ds = tl.where(is_visible(keys, key_start, key_end), ds, 0.0)
        dq = add_to_columns(dq, ds.to(k[0].dtype), k, PRECISION)
    return dq


@triton.jit
def dq_tile(
    first, head,
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, key_start_ptr, key_end_ptr,
    slopes_ptr, aligned_ptr, document_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    PHASES: tl.constexpr,
):  # fmt: skip
    """Computes dQ of BLOCK_M queries of one head, starting with query `first`.

    `dkdv_tile` explains `PHASES` and `ISOLATE_NAN`.
    """
    rows = first + tl.arange(0, BLOCK_M)  # [M]
    inside = rows < total_q
    key_start = tl.load(key_start_ptr + rows, mask=inside, other=0)
    key_end = tl.load(key_end_ptr + rows, mask=inside, other=0)
    last = tl.minimum(first + BLOCK_M, total_q) - 1
    start, whole_start, whole_end, end = tile_range(key_start_ptr, key_end_ptr, first, last, BLOCK_N)
    if PHASES == 1:
        whole_start = end  # no block counts as whole, so phase 0 processes all blocks

    head_64 = head.to(tl.int64)
    q_ptr += head_64 * stride_qh
    do_ptr += head_64 * stride_doh
    k_ptr += head_64 // GROUP * stride_kh
    v_ptr += head_64 // GROUP * stride_vh
    q, do = load_both(q_ptr, do_ptr, first, stride_qt, stride_dot, total_q, D_COLUMNS, D, DV_COLUMNS, DV, BLOCK_M, True)
    lse = tl.load(lse_ptr + head_64 * total_q + rows, mask=inside, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + head_64 * total_q + rows, mask=inside, other=0.0)
    slope, aligned = load_alibi(slopes_ptr, aligned_ptr, document_ptr, stride_slopes, rows, head, inside, HAS_ALIBI)
    dq = zero_columns(D_COLUMNS, BLOCK_M)
    for phase in tl.static_range(PHASES):
        dq = _accumulate_dq(
            dq, q, do, lse, delta, k_ptr, v_ptr,
            start if phase == 0 else whole_start if phase == 1 else whole_end,
            whole_start if phase == 0 else whole_end if phase == 1 else end,
            key_start, key_end, total_k, stride_kt, stride_vt, softmax_scale, softcap, slope, aligned,
            phase != 1, phase != 1 and ISOLATE_NAN, HAS_SOFTCAP, HAS_ALIBI, D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_N,
            PRECISION,
        )  # fmt: skip
    dq_ptr += head_64 * D
    for i in tl.static_range(len(D_COLUMNS)):
        store_block(dq_ptr, dq[i] * softmax_scale, first, n_heads * D, total_q, i, D_COLUMNS, D, BLOCK_M)


@triton.jit(do_not_specialize=["total_q", "total_k", "n_heads", "n_tiles", "section"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, key_start_ptr, key_end_ptr,
    slopes_ptr, aligned_ptr, document_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
    total_q, total_k, n_heads, softmax_scale, softcap, tiles_ptr, n_tiles, section,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, D_COLUMNS: tl.constexpr, DV: tl.constexpr, DV_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, ISOLATE_NAN: tl.constexpr,
    TILES_PER_WORK_TILE: tl.constexpr,
):  # fmt: skip
    """One program computes dQ of BLOCK_M queries of one head. dq is (total_q, n_heads, D), contiguous."""
    tile, head = tile_and_head(tl.program_id(0), tiles_ptr, n_tiles, n_heads, section, TILES_PER_WORK_TILE)
    first = tile * BLOCK_M
    if first >= total_q:
        return
    dq_tile(
        first, head,
        q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, key_start_ptr, key_end_ptr,
        slopes_ptr, aligned_ptr, document_ptr,
        stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dot, stride_doh, stride_slopes,
        total_q, total_k, n_heads, softmax_scale, softcap,
        HAS_SOFTCAP, HAS_ALIBI, GROUP, D, D_COLUMNS, DV, DV_COLUMNS, BLOCK_M, BLOCK_N, PRECISION, ISOLATE_NAN, 3,
    )  # fmt: skip


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, schedule: Schedule, features: Features
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes dq, dk and dv, which are contiguous and have the shapes and dtypes of q, k and v.

    Shapes: q (total_q, n_heads, head_dim); k (total_k, n_kv_heads, head_dim); v (total_k, n_kv_heads, v_head_dim);
    do (total_q, n_heads, v_head_dim); lse and delta (n_heads, total_q) fp32.
    """
    dk, dv = gradients_of_keys(do, q, k, v, lse, delta, schedule, features)
    return gradient_of_queries(do, q, k, v, lse, delta, schedule, features), dk, dv


def gradients_of_keys(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, schedule: Schedule, features: Features
) -> tuple[Tensor, Tensor]:
    """Computes dk and dv like `attention_backward`, but not dq."""
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    (n_heads, head_dim), (n_kv_heads, v_head_dim) = q.shape[1:], v.shape[1:]
    section = heads_per_section(k, v, n_heads)
    for pass_ in key_passes(arch_of(q.device), max(head_dim, v_head_dim), q.element_size()):
        tiles = launch_tiles(q.device, head_dim, v_head_dim, pass_, q.element_size())
        grid, n_tiles = grid_of_tiles(schedule.key_tiles, n_kv_heads, tiles.block_n)
        if grid:
            launch(
                _dkdv_kernel, (grid,),
                q, k, v, do, lse, delta, dk, dv, schedule.query_start, schedule.query_end,
                *backward_arguments(q, k, v, do, n_kv_heads, features),
                schedule.key_tiles, n_tiles, section // (n_heads // n_kv_heads),
                HAS_DK=pass_ != "dv", HAS_DV=pass_ != "dk",
                **backward_constants(q, v, features), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
                ISOLATE_NAN=schedule.crosses_documents, TILES_PER_WORK_TILE=WORK_TILE // tiles.block_n,
                num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            )  # fmt: skip
    return dk, dv


def gradient_of_queries(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, schedule: Schedule, features: Features
) -> Tensor:
    """Computes dq like `attention_backward`, but not dk and dv."""
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    n_heads, head_dim = q.shape[1:]
    tiles = launch_tiles(q.device, head_dim, v.shape[2], "dq", q.element_size())
    grid, n_tiles = grid_of_tiles(schedule.query_tiles, n_heads, tiles.block_m)
    if grid:
        launch(
            _dq_kernel, (grid,),
            q, k, v, do, lse, delta, dq, schedule.key_start, schedule.key_end,
            *backward_arguments(q, k, v, do, n_heads, features),
            schedule.query_tiles, n_tiles, heads_per_section(k, v, n_heads),
            **backward_constants(q, v, features), BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            ISOLATE_NAN=schedule.crosses_documents, TILES_PER_WORK_TILE=WORK_TILE // tiles.block_m,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return dq


def backward_arguments(q: Tensor, k: Tensor, v: Tensor, do: Tensor, heads: int, features: Features) -> tuple[Any, ...]:
    """Returns the arguments (ALiBi, strides, sizes, scales) that the kernels of this file and repair_backward share."""
    return (
        *features.pointers()[1:],
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2], features.stride_slopes(),
        q.shape[0], k.shape[0], heads, features.softmax_scale, features.softcap,
    )  # fmt: skip


def backward_constants(q: Tensor, v: Tensor, features: Features) -> dict[str, Any]:
    """Returns the constexpr arguments that the kernels of this file and repair_backward share.

    The returned dictionary does not contain tile sizes.
    """
    return dict(
        HAS_SOFTCAP=features.softcap != 0.0, HAS_ALIBI=bool(features.alibi), GROUP=q.shape[1] // v.shape[1],
        D=q.shape[2], D_COLUMNS=columns_of(q.shape[2]), DV=v.shape[2], DV_COLUMNS=columns_of(v.shape[2]),
        PRECISION=precision_of(q),
    )  # fmt: skip
