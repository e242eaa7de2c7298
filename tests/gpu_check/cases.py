"""Lists all cases of the GPU check."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import Any, get_args

import torch

from fa_kernels.device import is_hopper
from fa_kernels.flash_attention.checks import FP8, name_of
from fa_kernels.flash_attention.hopper.forward.config import forward_config
from fa_kernels.flash_attention.hopper.supported import HEAD_DIMS as HOPPER_HEAD_DIMS
from fa_kernels.flash_attention.schedule import LengthClass
from fa_kernels.glu import UNITS
from tests.gpu_check.attention import HEADS, check_hopper, check_portable
from tests.gpu_check.decode import check_decode
from tests.gpu_check.fused import check_glu, check_nf4, check_rmsnorm, check_rotary, check_rows
from tests.gpu_check.schedule import check_schedule
from tests.gpu_check.variants import WIDTHS, Tiles, Width, other_decode_tiles, other_tiles, own_decode_tiles, own_tiles

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)
# Each tile size is tested with some entries of FEATURES. tests/kernels/flash_attention/test_matrix.py tests
# combinations of features with the tile sizes of the GPU on which the test runs.
FEATURES = (), ("softcap",), ("sinks", "strided"), ("alibi",), ("window", "sinks"), ("bidirectional",)
PAGE_SIZES = 16, 64, 256


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[], None]  # raises an error if a result of the case is wrong


def all_cases(device: torch.device) -> list[Case]:
    """Returns the cases that `make gpu-check` runs on `device`."""
    lists = [portable_cases(device), decode_cases(device), fused_cases(), schedule_cases()]
    if is_hopper(device):
        lists.insert(0, hopper_cases())
    return [case for cases in lists for case in cases]


def portable_cases(device: torch.device) -> Iterator[Case]:
    """Yields cases that use each tile size of each pass, for each dtype and width.

    The tile sizes that attention chooses on `device` are tested with one document, with several documents and, except
    in fp8, with unaligned rows. Unaligned rows need different load instructions.
    """
    features, heads, either = cycle(FEATURES), cycle(HEADS), cycle((False, True))
    dtypes = (*DTYPES, FP8) if torch.cuda.get_device_capability(device) >= (8, 9) else DTYPES
    for dtype, width in product(dtypes, WIDTHS):
        own = own_tiles(width, dtype.itemsize, device)
        others = other_tiles(width, dtype.itemsize, device)
        for tiles, several in [(own, False), (own, True), *zip(others, either, strict=False)]:
            names = () if dtype == FP8 else next(features)
            yield _portable_case(dtype, width, tiles, several, names, next(heads))
        if dtype != FP8:
            yield _portable_case(dtype, width, own, next(either), ("odd-strides",), next(heads))


def _portable_case(
    dtype: torch.dtype, width: Width, tiles: Tiles, several: bool, features: tuple[str, ...], heads: tuple[int, int]
) -> Case:
    sizes = " ".join(f"{p}:{t.block_m}x{t.block_n}x{t.num_warps}x{t.num_stages}" for p, t in tiles.items())
    name = f"portable {name_of(dtype)} {width} {'several' if several else 'one'} {'+'.join(features)} {sizes}"
    return Case(name, partial(check_portable, dtype, width, tiles, several, features, heads))


def hopper_cases() -> Iterator[Case]:
    """Yields a case for each variant of Hopper's kernels."""
    heads = cycle(HEADS)
    for dtype, head_dim in product(HALF, HOPPER_HEAD_DIMS):
        seen = set()
        for length_class, wide_o in product(get_args(LengthClass), (False, True)):
            tiles = forward_config(head_dim, length_class, wide_o)
            if tiles in seen or (wide_o and tiles.o_in_q):
                continue
            seen.add(tiles)
            for several, softcap, sinks in product((False, True), repeat=3):
                features = [name for name, on in (("softcap", softcap), ("sinks", sinks)) if on]
                options: dict[str, Any] = {"deterministic": sinks != wide_o}
                if wide_o:
                    options["out_dtype"] = torch.float32
                name = f"hopper {name_of(dtype)} {head_dim} {length_class} {'several' if several else 'one'}"
                name += f" {'+'.join(features)} {'o in fp32' if wide_o else ''} {options['deterministic']=}"
                run = partial(check_hopper, dtype, head_dim, length_class, several, features, next(heads), options)
                yield Case(name, run)


def decode_cases(device: torch.device) -> Iterator[Case]:
    """Yields cases of the decoding kernel."""
    page_sizes, options = cycle(PAGE_SIZES), cycle(range(4))
    for dtype, width, paged in product(DTYPES, WIDTHS, (False, True)):
        own = own_decode_tiles(width, dtype.itemsize, paged, device)
        others = other_decode_tiles(width, dtype.itemsize, paged, device)
        # Two sets of features are checked with each tile size that `device` uses, and one of these sets has left
        # padding.
        for rows, tiles in [case for case in own for _ in range(2)] + others:
            page_size, option = next(page_sizes) if paged else None, next(options)
            sizes = f"{tiles.block_m}x{tiles.block_n}x{tiles.num_warps}x{tiles.num_stages}"
            name = f"decode {name_of(dtype)} {width} {rows} rows, pages of {page_size}, options {option} {sizes}"
            yield Case(name, partial(check_decode, dtype, width, rows, tiles, page_size, option))


def fused_cases() -> Iterator[Case]:
    """Yields a case for each block size of each fused operation."""
    for dtype, dim in product(DTYPES, (16, 100, 128, 256, 512, 768, 1024, 1600, 2048, 4096, 5120, 8192, 16384)):
        yield Case(f"rmsnorm {name_of(dtype)} {dim}", partial(check_rmsnorm, dtype, dim))
    for dtype, head_dim in product(DTYPES, (2, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256)):
        yield Case(f"rotary {name_of(dtype)} {head_dim}", partial(check_rotary, dtype, head_dim))
    for dtype, ffn_dim, unit in product(DTYPES, (8, 384, 1000, 1024, 3072, 8192, 14336), UNITS):
        yield Case(f"{unit} {name_of(dtype)} {ffn_dim}", partial(check_glu, dtype, ffn_dim, unit))
    for dtype, (n_scales, scales_per_factor) in product(DTYPES, ((1, 1), (72, 8), (768, 256), (65536, 256))):
        name = f"nf4 {name_of(dtype)} {n_scales} scales, {scales_per_factor} per factor"
        yield Case(name, partial(check_nf4, dtype, n_scales, scales_per_factor))
    for dtype, (n_heads, head_dim) in product(DTYPES, ((1, 8), (3, 40), (1, 256), (8, 64), (8, 128), (12, 128))):
        yield Case(f"rows {name_of(dtype)} {n_heads}x{head_dim}", partial(check_rows, dtype, n_heads, head_dim))


def schedule_cases() -> Iterator[Case]:
    """Yields cases for the kernel that builds attention schedules, which has one compiled form."""
    for n_docs, window, keys_in_order in product((1, 40, 20000), ((-1, 0), (-1, -1), (100, 7)), (False, True)):
        name = f"schedule {n_docs} documents, window {window}{', keys in order' if keys_in_order else ''}"
        yield Case(name, partial(check_schedule, n_docs, window, keys_in_order))
