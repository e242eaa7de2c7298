"""Compares outputs of flash_attn_with_kvcache with dense attention in fp64, and the cache with expected contents."""

import inspect

import pytest
import torch

from fa_kernels import flash_attn_with_kvcache
from fa_kernels.flash_attention.portable.decode import MAX_SPLITS, choose_splits, decode_tiles
from fa_kernels.flash_attention.tiles import SHARED_LIMIT, shared_bytes
from tests.kernels.support.attention_check import DEVICE, GPU
from tests.kernels.support.cached_attention import check, dense, draw, int32
from tests.support.marks import slow

DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]  # Triton's interpreter computes bf16 incorrectly
DTYPES += [torch.float32]
SPLITS = pytest.mark.parametrize("num_splits", [1, 3], ids=["whole", "split"])
PAGED = pytest.mark.parametrize("page_size", [None, 16, 32], ids=["dense", "pages-of-16", "pages-of-32"])


@SPLITS
@PAGED
def test_one_query_per_sequence_equals_the_reference(page_size, num_splits):
    check([1, 48, 61, 0], page_size=page_size, num_splits=num_splits)


@SPLITS
@PAGED
def test_new_tokens_are_appended_at_their_positions(page_size, num_splits):
    check([0, 15, 58], seqlen_q=3, seqlen_new=5, causal=True, page_size=page_size, num_splits=num_splits)


@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(3, 20), (7, 2)], ids=str)
def test_more_or_fewer_tokens_than_queries_may_be_appended(seqlen_q, seqlen_new):
    """The causal mask aligns the last query with the last key."""
    check([0, 33], n_heads=1, seqlen_q=seqlen_q, seqlen_new=seqlen_new, causal=True, num_splits=2, page_size=16)


@pytest.mark.parametrize("window", [(7, 0), *slow((20, 5), (0, 0), (-1, 3), (10**12, 1))], ids=str)
@pytest.mark.parametrize(("causal", "num_splits"), [(True, 1), (False, 1), (False, 2)], ids=["causal", "full", "split"])
def test_windows_hide_keys_of_the_cache(causal, num_splits, window):
    check([3, 61], seqlen_q=9, n_heads=1, causal=causal, window=window, num_splits=num_splits)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(2, 2), (6, 2), (20, 1)], ids=["mha", "gqa", "mqa"])
def test_query_heads_may_share_kv_heads(n_heads, n_kv_heads):
    """A tile can start or end between two heads of a token."""
    check([40], seqlen_q=4, n_heads=n_heads, n_kv_heads=n_kv_heads, causal=True, num_splits=2)


@pytest.mark.parametrize("head_dim", [64, 80, *slow(8, 40, 96, 128, 192, 256)])
def test_every_head_dim_equals_the_reference(head_dim):
    check([35], seqlen_q=2, seqlen_new=2, capacity=48, head_dim=head_dim, causal=True, num_splits=2)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (24, 80)], ids=str)
def test_values_may_have_another_width_than_keys(head_dim, v_head_dim):
    check([35], seqlen_new=1, capacity=48, head_dim=head_dim, v_head_dim=v_head_dim, page_size=16, num_splits=2)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "page_size"),
    [(16, 16, None), (96, 16, None), (48, 48, 16), (40, 32, None)],
    ids=["whole-head", "first-columns", "head-of-two-parts", "across-parts"],
)
@pytest.mark.parametrize("window", [(-1, -1), *slow((12, -1))], ids=["full", "window"])
def test_queries_and_new_keys_are_rotated_by_their_positions(window, head_dim, rotary_dim, page_size, interleaved):
    """With a window, each query is rotated by its own position.

    Without a window, all queries are rotated by the position of the first new token.
    """
    check(
        [0, 37],
        seqlen_q=4,
        seqlen_new=4,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        window=window,
        page_size=page_size,
    )


@SPLITS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_rounds_rotated_queries_and_keys(dtype, num_splits):
    """Rotated queries and keys are rounded to the dtype of the inputs before the kernel computes q @ k."""
    check([5, 37], seqlen_q=2, seqlen_new=3, rotary_dim=16, causal=True, dtype=dtype, num_splits=num_splits)


SLOPES = torch.tensor([0.02, 0.3, 0.0, 1.0], device=DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        pytest.param({"softcap": 2.0}, id="softcap"),
        pytest.param({"slopes": SLOPES}, id="alibi"),
        pytest.param(
            {"slopes": torch.stack([SLOPES, SLOPES.flip(0)])}, id="alibi-per-sequence"
        ),
        pytest.param({"softmax_scale": 0.7}, id="scale"),
        pytest.param(
            {"softcap": 2.0, "slopes": SLOPES, "window": (30, 0), "softmax_scale": 0.5, "seqlen_new": 6}
            | {"rotary_dim": 16},
            id="all",
        ),
    ],
)  # fmt: skip
def test_every_feature_equals_the_reference(features):
    check([21, 50], seqlen_q=6, n_heads=4, n_kv_heads=2, head_dim=24, num_splits=2, **features)


@SPLITS
def test_sequences_may_be_anywhere_in_the_cache(num_splits):
    check([21, 50, 3], seqlen_q=2, seqlen_new=2, batch_idx=[4, 0, 2], causal=True, num_splits=num_splits)


@SPLITS
@pytest.mark.parametrize("page_size", [None, 16], ids=["dense", "pages-of-16"])
def test_padding_on_the_left_is_not_seen(page_size, num_splits):
    """Padding can contain NaN, end inside a block, or fill the whole sequence."""
    check(
        [40, 61, 9, 30],
        leftpad=[0, 37, 9, 16],
        seqlen_q=3,
        causal=True,
        window=(20, 0),
        page_size=page_size,
        num_splits=num_splits,
    )


def test_padding_counts_in_positions():
    check([40, 20], leftpad=[7, 20], seqlen_q=3, seqlen_new=3, rotary_dim=16, slopes=SLOPES[:2], causal=True)


@pytest.mark.slow
def test_there_may_be_more_splits_than_blocks():
    check([0, 61], num_splits=20)


def test_defaults_take_the_whole_cache():
    q, k_cache, v_cache = draw(2, 3, 4, 16), draw(2, 50, 2, 16), draw(2, 50, 2, 16)
    o = flash_attn_with_kvcache(q, k_cache, v_cache)
    exact = torch.stack([dense(*x, 0.25, -1, -1, 0.0, None)[0] for x in zip(q, k_cache, v_cache, strict=True)])
    torch.testing.assert_close(o, exact)
    assert torch.equal(o, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=50))
    shorter = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=31)
    assert torch.equal(shorter, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=int32(31, 31)))
    assert not torch.allclose(shorter, o)


@pytest.mark.slow
def test_inputs_and_caches_may_be_strided():
    qkv = draw(2, 3, 8, 16)
    q, k, v = qkv.split((4, 2, 2), dim=2)
    caches = [draw(2, 2, 50, 16) for _ in range(2)]
    strided = [x.clone().transpose(1, 2) for x in caches]
    contiguous = [x.transpose(1, 2).contiguous() for x in caches]
    arguments = {"cache_seqlens": int32(5, 47), "causal": True, "num_splits": 2}
    o = flash_attn_with_kvcache(q, *strided, k, v, **arguments)
    assert torch.equal(o, flash_attn_with_kvcache(*(x.contiguous() for x in (q, *contiguous, k, v)), **arguments))
    assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))
    columns = draw(2, 3, 16, 4).transpose(2, 3)  # the rows are not contiguous, so the function must copy them
    assert torch.equal(
        flash_attn_with_kvcache(columns, *strided), flash_attn_with_kvcache(columns.contiguous(), *strided)
    )


def test_outputs_require_no_gradient():
    q, k_cache, v_cache = (draw(1, 8, 2, 16).requires_grad_() for _ in range(3))
    new = draw(1, 1, 2, 16).requires_grad_()
    o = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=3)
    assert not o.requires_grad and torch.equal(k_cache[:, 3], new[:, 0])


def test_a_batch_the_queries_or_the_cache_may_be_empty():
    cache = draw(2, 32, 2, 16)
    assert flash_attn_with_kvcache(draw(0, 1, 2, 16), cache, cache).shape == (0, 1, 2, 16)
    o, lse = flash_attn_with_kvcache(draw(2, 0, 2, 16), cache, cache, return_softmax_lse=True)
    assert o.shape == (2, 0, 2, 16) and lse.shape == (2, 2, 0)
    o, lse = flash_attn_with_kvcache(draw(2, 1, 2, 16), cache[:, :0], cache[:, :0], return_softmax_lse=True)
    assert torch.all(o == 0) and torch.all(torch.isneginf(lse))


def test_signature_is_flash_attns():
    wanted = {
        "q": ..., "k_cache": ..., "v_cache": ..., "k": None, "v": None, "rotary_cos": None, "rotary_sin": None,
        "cache_seqlens": None, "cache_batch_idx": None, "cache_leftpad": None, "block_table": None,
        "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True,
        "alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False,
    }  # fmt: skip
    found = inspect.signature(flash_attn_with_kvcache).parameters
    assert list(found) == list(wanted)
    assert {n: ... if p.default is p.empty else p.default for n, p in found.items()} == wanted


def test_splits_fill_the_gpu():
    assert choose_splits(8, 65536, 132) == 33  # two programs per multiprocessor
    assert choose_splits(1, 10**6, 132) == MAX_SPLITS
    assert choose_splits(8, 600, 132) == 2  # with more splits, the merge would cost more time than the splits save
    assert choose_splits(8, 10, 132) == choose_splits(1000, 65536, 132) == 1


@pytest.mark.parametrize(
    ("n_rows", "head_dim", "block_m"),
    [(1, 128, 16), (16, 256, 16), (24, 64, 32), (64, 128, 64), (64, 256, 128), (65, 64, 128), (4096, 128, 128)],
    ids=str,
)
def test_tiles_are_as_flat_as_the_queries(n_rows, head_dim, block_m):
    """With a paged cache, the pipeline has more stages, because looking up a page takes a stage."""
    limit = SHARED_LIMIT["sm90"]
    dense, paged = (decode_tiles("sm90", head_dim, head_dim, 2, n_rows, paged, limit) for paged in (False, True))
    assert dense.block_m == paged.block_m == block_m
    assert paged.num_stages == 2 * dense.num_stages - 1


def test_tiles_fit_where_shared_memory_is_short():
    plenty, short = (
        decode_tiles("sm90", 256, 256, 2, 4096, False, limit) for limit in (SHARED_LIMIT["sm90"], 99 * 1024)
    )
    assert short.block_m * short.block_n < plenty.block_m * plenty.block_n
    assert shared_bytes("sm90", short, 256, 256, "fwd", 2) <= 99 * 1024


@pytest.mark.slow
def test_compiles_without_a_graph_break():
    def step(q, k_cache, v_cache, k, v, lengths):
        o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return o * 2, lengths + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    q, k, v = draw(2, 1, 4, 16), draw(2, 1, 2, 16), draw(2, 1, 2, 16)
    caches = [[draw(2, 40, 2, 16) for _ in range(2)]] * 2
    caches[1] = [x.clone() for x in caches[0]]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (int32(0, 7), int32(30, 2)):
            ours, expected = (f(q, *cache, k, v, lengths) for f, cache in zip((compiled, step), caches, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


@pytest.mark.slow
def test_operators_pass_opcheck():
    q, k_cache, v_cache, new = draw(2, 3, 4, 16), draw(2, 40, 2, 16), draw(2, 40, 2, 16), draw(2, 3, 2, 16)
    angles, lengths = [draw(40, 8), draw(40, 8)], int32(5, 30)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        torch.ops.flash_attention.append, (new, new, k_cache, v_cache, lengths, None, angles, True), test_utils=tests
    )
    torch.library.opcheck(
        torch.ops.flash_attention.decode,
        (q, k_cache, v_cache, lengths, 3, None, None, angles, True, True, None, 0.25, 0.0, -1, 0, 2),
        test_utils=tests,
    )


@pytest.mark.gpu
def test_a_call_does_not_synchronise_with_the_host():
    q, cache, new = draw(2, 1, 4, 64), draw(2, 4096, 2, 64), draw(2, 1, 2, 64)
    table, lengths = int32([0, 1], [2, 3]), int32(5, 700)
    flash_attn_with_kvcache(
        q, cache.view(4, 2048, 2, 64), cache.view(4, 2048, 2, 64), cache_seqlens=lengths, block_table=table
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=lengths, causal=True)
        pages = cache.view(4, 2048, 2, 64)
        flash_attn_with_kvcache(q, pages, pages, new, new, cache_seqlens=7, block_table=table)
    finally:
        torch.cuda.set_sync_debug_mode("default")


Q = torch.empty(2, 1, 4, 16, device=DEVICE)
CACHE = torch.zeros(2, 32, 2, 16, device=DEVICE)
NEW = torch.empty(2, 1, 2, 16, device=DEVICE)
ANGLES = torch.empty(32, 8, device=DEVICE)
ONE = {"cache_seqlens": 3, "k": NEW, "v": NEW}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"q": Q[0]}, r"q must be \(batch, seqlen, heads, head_dim\); got \(1, 4, 16\)", id="rank"),
        pytest.param({"q": Q[:, :, :3]}, "multiple of n_kv_heads; got 3 and 2", id="heads"),
        pytest.param({"q": Q[..., :8]}, "the same head_dim; got 8 and 16", id="head-dim"),
        pytest.param({"q": Q.half()}, "same dtype.*q of float16 and k_cache of float32", id="dtype"),
        pytest.param({"v_cache": CACHE[:, :8]}, "same sequences, tokens and heads", id="caches"),
        pytest.param({"k_cache": CACHE.mT.contiguous().mT}, "k_cache must have a dense last dimension", id="strides"),
        pytest.param(
            ONE | {"v_cache": CACHE[:1].expand_as(CACHE)}, "v_cache must not be expanded", id="expanded"
        ),
        pytest.param({"k_cache": CACHE[:1], "v_cache": CACHE[:1]}, "at least 2 sequences; got 1", id="rows"),
        pytest.param({"k": NEW}, "given together; got only k", id="k-alone"),
        pytest.param({"k": NEW, "v": NEW}, "cache_seqlens must say where", id="k-without-length"),
        pytest.param(ONE | {"k": NEW[:, :, :1]}, r"k must be \(2, 1, 2, 16\).*got \(2, 1, 1, 16\)", id="k-heads"),
        pytest.param(ONE | {"cache_seqlens": 32}, "at most 32 tokens, .* got 32 to 32 cached", id="full"),
        pytest.param({"cache_seqlens": int32(1, 2).long()}, "cache_seqlens must be .*int32.*got .*int64", id="long"),
        pytest.param({"cache_seqlens": [1, 2]}, "cache_seqlens must be a tensor, .* int32.*; got a list", id="list"),
        pytest.param({"cache_seqlens": int32(1)}, r"cache_seqlens must be \(2,\)", id="lengths-of-one"),
        pytest.param({"cache_leftpad": int32(1)}, r"cache_leftpad must be \(2,\)", id="leftpad"),
        pytest.param({"cache_batch_idx": int32(1)}, r"cache_batch_idx must be \(2,\)", id="batch-idx"),
        pytest.param({"block_table": int32(0, 1)}, r"block_table must be \(batch, pages", id="table-rank"),
        pytest.param({"block_table": [[0], [1]]}, r"block_table must be \(batch, .*; got a list", id="list-of-pages"),
        pytest.param(
            {"block_table": int32([0], [1]), "cache_batch_idx": int32(0, 1)}, "must be None with", id="both"
        ),
        pytest.param(
            {"block_table": int32([0], [1]), "k_cache": CACHE[:, :20], "v_cache": CACHE[:, :20]},
            "multiple of 16 tokens .*; got 2 pages of 20 tokens", id="page-size",
        ),
        pytest.param({"rotary_cos": ANGLES, "rotary_sin": ANGLES}, "must be None without k", id="rotary-without-k"),
        pytest.param(ONE | {"rotary_cos": ANGLES}, "given together; got only cos", id="cos-alone"),
        pytest.param(
            ONE | {"rotary_cos": ANGLES.half(), "rotary_sin": ANGLES}, "rotary_cos must be float32 on", id="half-angles"
        ),
        pytest.param(
            ONE | {"rotary_cos": ANGLES[:31], "rotary_sin": ANGLES[:31]}, "at least 32 positions.*31", id="short-angles"
        ),
        pytest.param({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must be \(4,\) or \(2, 4\) float32", id="slopes"),
        pytest.param(
            {"alibi_slopes": torch.ones(4, dtype=torch.float64, device=DEVICE)}, "float32 on .*; got .* float64",
            id="slopes-in-fp64",
        ),
        pytest.param({"num_splits": 129}, "num_splits must be from 0 to 128; got 129", id="splits"),
        pytest.param({"softcap": float("nan")}, "softcap must be finite and at most 1000, .*; got nan", id="softcap"),
        pytest.param({"softmax_scale": -1.0}, "softmax_scale must be positive and finite; got -1.0", id="scale"),
    ],
)  # fmt: skip
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**{"q": Q, "k_cache": CACHE, "v_cache": CACHE} | arguments)


@pytest.mark.skipif(GPU, reason="values on a GPU are not checked")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"cache_seqlens": int32(33, 2)}, "at most 32 tokens, .* got 2 to 33 cached", id="too-long"),
        pytest.param({"cache_seqlens": int32(3, -1)}, "got -1 to 3", id="negative"),
        pytest.param({"cache_batch_idx": int32(0, 2)}, r"cache_batch_idx must .* 0 to 1; got \[2\]", id="row"),
        pytest.param({"block_table": int32([0], [-1])}, r"block_table must .* 0 to 1; got \[-1\]", id="page"),
    ],
)
def test_bad_values_are_named_on_the_cpu(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(Q, CACHE, CACHE, **arguments)
