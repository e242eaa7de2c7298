"""Compares one case of attention on a GPU, forward and backward, with dense attention."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fa_kernels import flash_attn_func, flash_attn_varlen_func
from fa_kernels.flash_attention import backend, schedule, schedule_cache
from fa_kernels.flash_attention.checks import FP8
from fa_kernels.flash_attention.portable import backward, forward
from fa_kernels.flash_attention.reference import attention_reference
from fa_kernels.flash_attention.schedule import LengthClass
from fa_kernels.launch import record
from tests.gpu_check.variants import Tiles, Width
from tests.kernels.support.attention_check import DEVICE, attend, compare, cumulative

HEADS = (4, 4), (4, 2), (4, 1)  # query heads, KV heads
# Some documents are shorter than a block, some fill whole blocks, and some fill their last block only in part.
SEVERAL, ONE = [300, 1, 0, 213, 64, 131], [417]
# Documents that are so long that a kernel uses each buffer of its shared-memory rings more than once.
LONGER_SEVERAL, LONGER_ONE = [1000, 1, 30, 400, 139], [1500]


def check_portable(
    dtype: torch.dtype, width: Width, tiles: Tiles, several: bool, features: Sequence[str], heads: tuple[int, int]
) -> None:
    """Checks the portable kernels with the given tile sizes."""
    with portable_kernels(tiles):
        if dtype == FP8:
            _check_fp8(width, SEVERAL if several else ONE, several, heads)
        else:
            _check(dtype, width, SEVERAL if several else ONE, several, features, heads, {})


def check_hopper(
    dtype: torch.dtype,
    head_dim: int,
    length_class: LengthClass,
    several: bool,
    features: Sequence[str],
    heads: tuple[int, int],
    options: dict[str, Any],
) -> None:
    """Checks the configuration of Hopper's kernels for short, medium, long or very long documents (`length_class`)."""
    lengths = LONGER_SEVERAL if several else LONGER_ONE
    with (
        _backend("hopper"),
        patch.object(schedule, "length_class_of", lambda _: length_class),
        patch.dict(schedule_cache._CACHED, clear=True),  # forgets earlier schedules: their length_class can differ
    ):
        _check(dtype, (head_dim, head_dim), lengths, several, features, heads, options)


@contextmanager
def portable_kernels(tiles: Tiles) -> Iterator[None]:
    """Inside this context manager, attention uses the portable kernels with the given tile sizes."""
    key_passes = tuple(direction for direction in tiles if direction in ("dkdv", "dk", "dv"))
    with ExitStack() as stack:
        stack.enter_context(_backend("portable"))
        for module in (forward, backward):
            stack.enter_context(patch.object(module, "launch_tiles", lambda *arguments: tiles[arguments[3]]))
        stack.enter_context(patch.object(backward, "key_passes", lambda *_: key_passes))
        yield


@contextmanager
def _backend(name: str) -> Iterator[None]:
    with (
        patch.dict(os.environ, {backend.VARIABLE: name}),
        patch.object(record, "_may_record", lambda: False),
    ):
        yield


def _check(
    dtype: torch.dtype,
    width: Width,
    lengths: list[int],
    several: bool,
    names: Sequence[str],
    heads: tuple[int, int],
    options: dict[str, Any],
) -> None:
    n_heads, total = heads[0], sum(lengths)
    q, k, v, do = (torch.randn(shape, device=DEVICE).to(dtype) for shape in _shapes(total, heads, width))
    if "strided" in names:  # the heads of q, k and v are slices of wider heads
        q, k, v = (torch.cat([x, x], dim=2)[..., : x.shape[2]] for x in (q, k, v))
    if "odd-strides" in names:  # rows that are not aligned to 16 bytes are loaded through registers
        q, k, v = (torch.cat([x, x[..., :1]], dim=2)[..., :-1] for x in (q, k, v))
    features: dict[str, Any] = dict(causal="bidirectional" not in names)
    features |= dict(cu_seqlens_q=cumulative(lengths), cu_seqlens_k=cumulative(lengths))
    if "window" in names:
        features["window_size"] = (100, 0)
    if "softcap" in names:
        features["softcap"] = 5.0
    if "alibi" in names:
        features["alibi_slopes"] = 0.3 * torch.rand(n_heads, device=DEVICE)
    sinks = torch.randn(n_heads, device=DEVICE) if "sinks" in names else None
    ours = _varlen(lengths, options) if several else _dense(options)
    dlse = torch.randn(n_heads, total, device=DEVICE)
    # Compute the reference of short documents on the CPU, so that many test processes can share the GPU.
    reference_device = "cpu" if total < 1000 else DEVICE
    compare(ours, (q, k, v), features, sinks, do, dlse, reference_device)
    if several:
        _require_isolation(ours, (q, k, v), features, sinks, do, dlse, lengths)


def _require_isolation(
    ours: Callable[..., Any],
    inputs: Sequence[Tensor],
    features: dict[str, Any],
    sinks: Tensor | None,
    do: Tensor,
    dlse: Tensor,
    lengths: list[int],
) -> None:
    """Requires that NaN in the fourth document changes the results of other documents by no more than rounding errors.

    Repair kernels also recompute the results of documents that share a tile with the fourth document. The recomputed
    results change by rounding errors, because repair kernels round differently from the forward and backward kernels.
    """
    first, past = sum(lengths[:3]), sum(lengths[:4])
    q, k, v = (x.clone() for x in inputs)
    q[past - 1, 0, -1] = v[first, -1, 0] = torch.nan
    with_nan, clean = (attend(ours, x, features, sinks, do, dlse) for x in ((q, k, v), inputs))
    for name in ("o", "dq", "dk", "dv"):
        others = [torch.cat([x[name][:first], x[name][past:]]).float() for x in (with_nan, clean)]
        allowed = 16 * torch.finfo(q.dtype).eps * others[1].abs().max()
        error = (others[0] - others[1]).abs().max()
        assert error <= allowed, f"{name} next to a document with NaN: error {error:.2e}, allowed {allowed:.2e}"


def _check_fp8(width: Width, lengths: list[int], several: bool, heads: tuple[int, int]) -> None:
    """Checks the forward pass in fp8 against a reference in fp64.

    The first term of the tolerance covers the rounding of P to 11 bits in the kernel. The second term of the tolerance
    covers errors of the scores. When Hopper's tensor cores add fp8 products, they keep only 13 bits below the largest
    exponent.
    """
    shapes = _shapes(sum(lengths), heads, width)[:3]
    q, k, v = (torch.randn(shape, device=DEVICE).to(FP8) for shape in shapes)
    cu_seqlens = cumulative(lengths)
    ours = _varlen(lengths, {"out_dtype": torch.float32}) if several else _dense({"out_dtype": torch.float32})
    o, lse = ours(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
    exact, exact_lse = attention_reference(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    norms = [x.float().norm(dim=-1).max().item() for x in (q, k)]
    score_error = 2**-13 * norms[0] * norms[1] * width[0] ** -0.5
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=score_error)
    largest = v.float().abs().max().item()
    torch.testing.assert_close(o.double(), exact, rtol=2**-10, atol=(2**-10 + score_error) * largest)


def _shapes(total: int, heads: tuple[int, int], width: Width) -> list[tuple[int, int, int]]:
    (n_heads, n_kv_heads), (head_dim, v_head_dim) = heads, width
    columns = (n_heads, head_dim), (n_kv_heads, head_dim), (n_kv_heads, v_head_dim), (n_heads, v_head_dim)
    return [(total, *shape) for shape in columns]


def _varlen(lengths: list[int], options: dict[str, Any]) -> Callable[..., Any]:
    longest = max(lengths)
    return partial(flash_attn_varlen_func, max_seqlen_q=longest, max_seqlen_k=longest, return_lse=True, **options)


def _dense(options: dict[str, Any]) -> Callable[..., Any]:
    """Returns a function that calls flash_attn_func on one document. The arguments and shapes of the returned function
    are those of flash_attn_varlen_func.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **features: Any
    ) -> tuple[Tensor, Tensor]:
        result: Any = flash_attn_func(q[None], k[None], v[None], return_lse=True, **options, **features)
        return result[0][0], result[1][0]

    return attention
