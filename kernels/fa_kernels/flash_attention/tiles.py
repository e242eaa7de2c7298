"""The sizes of the tiles: one frozen table by architecture, head dimension and pass, and what they take."""

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from fa_kernels.columns_of_head import split_columns
from fa_kernels.device import Arch, arch_of, interpreted

Pass = Literal["fwd", "dkdv", "dk", "dv", "dq"]  # dkdv is dk and dv by one kernel, from the same scores


@dataclass(frozen=True)
class TileConfig:
    """block_m query tokens by block_n key tokens, worked by num_warps warps with num_stages blocks in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (arch, head_dim of at most this, pass), for 2-byte dtypes. sm90: the best of those tried for each entry on an H200
# (scripts/bench/tune_tiles.py; scripts/results/portable_tiles_h200_202611.md), one document of 16k tokens, causal.
# There dk and dv take 3.250 + 2.022 ms at head_dim 256, dkdv at best 9.158; at 192 3.148 + 2.215, but dkdv 4.722. The
# others are chosen, not measured: sm100 begins from sm90, with less for dK and dV where accumulators of 192 and 256
# columns would overflow its tensor memory, and sm80 fits the 99 KiB of the smallest GPUs that use it. Where there are
# dk and dv, dkdv is for fp32 and for repairs of what Hopper's kernels left; (64, 64, 8, 2), its fastest in bf16 at 256,
# would make the kernel that repairs spill more. tests/kernels/aot/test_portable.py holds every entry to limits.
_TILES: dict[tuple[Arch, int, Pass], TileConfig] = {
    ("sm90", 64, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm90", 96, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm90", 128, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm90", 192, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm90", 256, "fwd"): TileConfig(128, 64, 8, 2),
    ("sm90", 64, "dkdv"): TileConfig(64, 64, 4, 3),
    ("sm90", 96, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm90", 128, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm90", 192, "dkdv"): TileConfig(32, 128, 8, 2),
    ("sm90", 256, "dkdv"): TileConfig(32, 64, 8, 2),
    ("sm90", 256, "dk"): TileConfig(32, 128, 8, 3),
    ("sm90", 256, "dv"): TileConfig(64, 128, 8, 2),
    ("sm90", 64, "dq"): TileConfig(64, 64, 4, 3),
    ("sm90", 96, "dq"): TileConfig(128, 64, 8, 3),
    ("sm90", 128, "dq"): TileConfig(128, 64, 8, 3),
    ("sm90", 192, "dq"): TileConfig(128, 64, 8, 2),
    ("sm90", 256, "dq"): TileConfig(128, 32, 8, 3),
    ("sm100", 64, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 96, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 128, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 192, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 256, "fwd"): TileConfig(128, 64, 8, 2),
    ("sm100", 64, "dkdv"): TileConfig(64, 64, 4, 3),
    ("sm100", 96, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm100", 128, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm100", 192, "dkdv"): TileConfig(32, 64, 8, 2),
    ("sm100", 256, "dkdv"): TileConfig(32, 32, 8, 2),
    ("sm100", 256, "dk"): TileConfig(32, 128, 8, 2),
    ("sm100", 256, "dv"): TileConfig(64, 128, 8, 2),
    ("sm100", 64, "dq"): TileConfig(64, 64, 4, 3),
    ("sm100", 96, "dq"): TileConfig(128, 64, 8, 3),
    ("sm100", 128, "dq"): TileConfig(128, 64, 8, 3),
    ("sm100", 192, "dq"): TileConfig(64, 32, 4, 2),
    ("sm100", 256, "dq"): TileConfig(128, 32, 8, 2),
    ("sm80", 64, "fwd"): TileConfig(128, 64, 4, 3),
    ("sm80", 96, "fwd"): TileConfig(128, 32, 4, 3),
    ("sm80", 128, "fwd"): TileConfig(128, 32, 8, 3),
    ("sm80", 192, "fwd"): TileConfig(64, 32, 4, 2),
    ("sm80", 256, "fwd"): TileConfig(64, 32, 4, 2),
    ("sm80", 64, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 96, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 128, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 192, "dkdv"): TileConfig(32, 32, 4, 2),
    ("sm80", 256, "dkdv"): TileConfig(32, 32, 8, 2),
    ("sm80", 64, "dq"): TileConfig(64, 64, 4, 2),
    ("sm80", 96, "dq"): TileConfig(64, 32, 4, 2),
    ("sm80", 128, "dq"): TileConfig(64, 32, 4, 2),
    ("sm80", 192, "dq"): TileConfig(64, 32, 4, 2),
    ("sm80", 256, "dq"): TileConfig(32, 32, 4, 2),
}

# The same for 4-byte dtypes. sm90's of 64 and 128 are the best of those tried on an H200 with three TF32 products, as
# precision_of has them (scripts/results/fp32_tiles_h200_202611.md). The others are chosen, not measured, of 150 that
# were compiled: upper and lower halves take twice the shared memory, and products with a lower half accumulate beside
# the others, so that tiles of few rows and eight warps, although by mma.sync, spill least where heads are wide. sm100
# takes sm80's: with sm90's, the forward passes of 96 and 128 would overflow its tensor memory.
_TILES_OF_4_BYTES: dict[tuple[Arch, int, Pass], TileConfig] = {
    ("sm90", 64, "fwd"): TileConfig(128, 64, 8, 2),
    ("sm90", 96, "fwd"): TileConfig(128, 64, 8, 1),
    ("sm90", 128, "fwd"): TileConfig(128, 64, 8, 1),
    ("sm90", 192, "fwd"): TileConfig(32, 64, 8, 1),
    ("sm90", 256, "fwd"): TileConfig(16, 64, 8, 1),
    ("sm90", 64, "dkdv"): TileConfig(32, 64, 4, 1),
    ("sm90", 96, "dkdv"): TileConfig(16, 64, 4, 1),
    ("sm90", 128, "dkdv"): TileConfig(32, 32, 4, 1),
    ("sm90", 192, "dkdv"): TileConfig(32, 32, 8, 1),
    ("sm90", 256, "dkdv"): TileConfig(16, 16, 8, 1),
    ("sm90", 64, "dq"): TileConfig(64, 32, 4, 1),
    ("sm90", 96, "dq"): TileConfig(64, 32, 4, 1),
    ("sm90", 128, "dq"): TileConfig(32, 64, 8, 1),
    ("sm90", 192, "dq"): TileConfig(32, 32, 8, 1),
    ("sm90", 256, "dq"): TileConfig(16, 32, 8, 1),
    ("sm80", 64, "fwd"): TileConfig(64, 32, 4, 2),
    ("sm80", 96, "fwd"): TileConfig(64, 32, 4, 1),
    ("sm80", 128, "fwd"): TileConfig(32, 32, 4, 1),
    ("sm80", 192, "fwd"): TileConfig(16, 32, 8, 1),
    ("sm80", 256, "fwd"): TileConfig(16, 16, 8, 1),
    ("sm80", 64, "dkdv"): TileConfig(32, 32, 4, 1),
    ("sm80", 96, "dkdv"): TileConfig(16, 16, 4, 1),
    ("sm80", 128, "dkdv"): TileConfig(16, 32, 8, 1),
    ("sm80", 192, "dkdv"): TileConfig(16, 16, 8, 1),
    ("sm80", 256, "dkdv"): TileConfig(16, 16, 8, 1),
    ("sm80", 64, "dq"): TileConfig(32, 32, 4, 1),
    ("sm80", 96, "dq"): TileConfig(32, 16, 4, 1),
    ("sm80", 128, "dq"): TileConfig(32, 32, 8, 1),
    ("sm80", 192, "dq"): TileConfig(16, 32, 8, 1),
    ("sm80", 256, "dq"): TileConfig(16, 16, 8, 1),
}

HEAD_DIMS = (64, 96, 128, 192, 256)
# bytes of shared memory that a program may take on the smallest GPU that uses these entries
SHARED_LIMIT: dict[Arch, int] = {"sm80": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024}


def tile_config(arch: Arch, head_dim: int, direction: Pass, itemsize: int) -> TileConfig:
    """The table's tiles; head_dim is the wider of q's and v's, at most 256, itemsize in bytes."""
    if arch == "interpreter":
        return TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)  # small, so that short inputs have edges
    listed = next(d for d in HEAD_DIMS if head_dim <= d)
    known: Arch = "sm80" if arch == "unknown" else arch  # the most modest
    if itemsize > 2:
        return _TILES_OF_4_BYTES["sm80" if known == "sm100" else known, listed, direction]
    return _TILES[known, listed, direction]


def key_passes(arch: Arch, head_dim: int, itemsize: int) -> tuple[Pass, ...]:
    """The passes that give dK and dV: both at once, or one after the other where the table has entries for that.

    Apart, each computes the scores: five products instead of four. But a tile's accumulators take half the registers,
    and tiles may be twice as long: two warpgroups then share the rows of the scores, which they would each compute.
    """
    if itemsize > 2 and arch != "interpreter":
        return ("dkdv",)
    table: dict[Arch, Arch] = {"interpreter": "sm90", "unknown": "sm80"}  # the interpreter runs both ways, for tests
    known = table.get(arch, arch)
    apart = (known, next(d for d in HEAD_DIMS if head_dim <= d), "dk") in _TILES
    return ("dk", "dv") if apart else ("dkdv",)


def launch_tiles(device: torch.device, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int) -> TileConfig:
    """The tiles for one launch on `device`: the table's, or smaller ones where its shared memory asks for them.

    On a GPU that the table does not know, or whose memory is short, one warning a device.
    """
    if interpreted():
        return tile_config("interpreter", max(head_dim, v_head_dim), direction, itemsize)
    return _launch_tiles(device, head_dim, v_head_dim, direction, itemsize)


@cache  # every launch asks
def _launch_tiles(device: torch.device, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int) -> TileConfig:
    arch = arch_of(device)
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    limit = properties.shared_memory_per_block_optin
    entry = tile_config(arch, max(head_dim, v_head_dim), direction, itemsize)
    tiles = fit(arch, entry, head_dim, v_head_dim, direction, itemsize, limit)
    if arch == "unknown" or tiles != entry:
        _warn_of_guesses(device, limit)
    return tiles


@cache  # once a device
def _warn_of_guesses(device: torch.device, limit: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    warnings.warn(
        f"kernels/fa_kernels/flash_attention/tiles.py has no measured tiles for {torch.cuda.get_device_name(device)} "
        f"(sm_{major}{minor}, {limit} bytes of shared memory a program); it uses some that fit and may be slow. "
        "scripts/bench/tune_tiles.py measures better ones.",
        stacklevel=2,
    )


def fit(
    arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int, limit: int
) -> TileConfig:
    """`tiles`, or the largest that come from halving them and from fewer stages, within `limit` bytes.

    On Hopper a warpgroup of four warps computes 64 rows, so tiles halved to 64 rows get at most four warps. With eight
    warps and heads in two parts, ptxas 12.8 computes matrix descriptors from the wrong uniform register.
    Raises: ValueError if not even 16 by 16 fits.
    """
    of_keys = direction in ("dkdv", "dk", "dv")
    while True:
        for num_stages in range(tiles.num_stages, 0, -1):
            staged = replace(tiles, num_stages=num_stages)
            needed = shared_bytes(arch, staged, head_dim, v_head_dim, direction, itemsize)
            if needed <= limit:
                return staged
        if tiles.block_m == tiles.block_n == 16:
            raise ValueError(
                f"attention with head_dim {head_dim} and {v_head_dim} wants {needed} bytes of shared memory a program "
                f"at least; the device has {limit}"
            )
        if tiles.block_m > tiles.block_n:
            tiles = replace(tiles, block_m=tiles.block_m // 2)
        else:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        rows = tiles.block_n if of_keys else tiles.block_m
        if rows == 64:
            tiles = replace(tiles, num_warps=min(tiles.num_warps, 4))


def shared_bytes(arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int) -> int:
    """Bytes of shared memory that a program takes: at least what Triton reports for its code, and not much more.

    tests/kernels/aot/test_portable.py compares.
    """
    if arch == "unknown":  # Triton may compile for it as for any of the known ones
        return max(shared_bytes(known, tiles, head_dim, v_head_dim, direction, itemsize) for known in SHARED_LIMIT)
    whole = _shared_of_one_product(arch, tiles, head_dim, v_head_dim, direction, itemsize)
    if itemsize == 4:
        return max(whole, _shared_of_three_products(arch, tiles, head_dim, v_head_dim, direction))
    return whole


def _shared_of_three_products(arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, direction: Pass) -> int:
    """Upper and lower TF32 halves of what the program keeps, and of one block of what it reads beside that.

    Blocks are fetched ahead as they are and cut in registers; a head's second part is, after its first. mma.sync reads
    halves from registers, so that a block comes once, for dK and dV twice, the second time transposed. The kernel of
    decoding, which takes the forward pass's tiles, may have K and V there at one time, and scores twice.
    """
    (d_1, d_2), (dv_1, dv_2) = split_columns(head_dim), split_columns(v_head_dim)
    of_keys = direction in ("dkdv", "dk", "dv")
    kept_rows, read_rows = (tiles.block_n, tiles.block_m) if of_keys else (tiles.block_m, tiles.block_n)
    kept = kept_rows * (d_1 + d_2 + (0 if direction in ("fwd", "dv") else dv_1 + dv_2)) * 8
    block = read_rows * (d_1 + d_2 + dv_1 + dv_2) * 4
    ahead = (tiles.num_stages - 1) * (block + (8 * read_rows if of_keys else 0))
    worked_on = read_rows * max(d_1, dv_1) * 8
    if arch == "sm80" or kept_rows < 64:
        if direction == "fwd":
            worked_on = block + 8 * tiles.block_m * tiles.block_n
        elif direction == "dq":
            worked_on //= 2
    return kept + ahead + worked_on + 2048


def _shared_of_one_product(
    arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int
) -> int:
    """What the program keeps (Q; Q and dO; K and V; K for dV), the blocks in flight of what it reads beside that, and
    room for what changes its layout on the way to the tensor cores.
    """
    qk_width, v_width = (sum(split_columns(width, itemsize)) for width in (head_dim, v_head_dim))
    of_keys = direction in ("dkdv", "dk", "dv")
    kept_rows, read_rows = (tiles.block_n, tiles.block_m) if of_keys else (tiles.block_m, tiles.block_n)
    kept = kept_rows * (qk_width + (0 if direction in ("fwd", "dv") else v_width)) * itemsize
    block = read_rows * (qk_width + v_width) * itemsize
    row_values = 8 * read_rows if of_keys else 0  # lse and delta are in flight beside Q and dO
    scores = tiles.block_m * tiles.block_n * itemsize
    if arch == "sm80" or kept_rows < 64:  # mma.sync, which copies a block to registers before the next one is awaited
        in_flight = max(1, tiles.num_stages - 1)
        rewritten = scores if max(head_dim, v_head_dim) >= 128 else 0
    else:  # wgmma and tcgen05 read a block from shared memory while the next ones come
        in_flight = tiles.num_stages
        rewritten = 0
        if arch == "sm100":
            rewritten = _rewritten_for_tcgen05(scores, block, read_rows, head_dim, direction, itemsize)
    if itemsize == 1:
        rewritten += read_rows * v_width * 2  # V in fp16
    if tiles.num_stages == 1:  # nothing is fetched ahead, and K is done with when V comes
        part = read_rows * max(qk_width, v_width) * itemsize
        if direction == "fwd":
            return kept + part + scores + 2048
        made_finite = block if of_keys and kept_rows >= 64 else part  # Q and dO, or K, of masked blocks
        rewritten = max(rewritten, scores, made_finite)
    return kept + in_flight * (block + row_values) + rewritten + 2048


def _rewritten_for_tcgen05(scores: int, block: int, rows: int, head_dim: int, direction: Pass, itemsize: int) -> int:
    """Its operands come from shared memory: P and dS, and the masked blocks' K, or Q and dO, made finite, once more."""
    first, second = split_columns(head_dim)
    if direction in ("fwd", "dv"):  # P stays in tensor memory
        return 0
    if direction == "dq":
        return scores + rows * (first + second) * itemsize + 3072
    return block + 2 * max(scores, rows * first * itemsize) if second else max(2 * scores, block) + 512


def precision_of(x: Tensor) -> str:
    """tl.dot's input_precision: how products of x's dtype are made; of 2-byte inputs it says nothing.

    In fp32 by three TF32 products of the inputs' upper and lower halves, as torch's own attention has them: three times
    as fast as FMA instructions, which "ieee" means, and as accurate (scripts/results/fp32_tiles_h200_202611.md). Where
    the user allowed tf32 for torch's own products, by one. Infinities and NaN pass as they do through FMA, for Triton
    takes 0 for the products with a lower half where their sum is NaN; but what rounds to infinity, a part in 4096 below
    the largest fp32 number, counts as infinite.
    """
    if x.dtype != torch.float32 or (x.is_cuda and not _has_tf32(x.device)):
        return "ieee"
    # allow_tf32, the older name, may not be read where fp32_precision was set; this one knows of both
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


@cache  # each launch asks
def _has_tf32(device: torch.device) -> bool:
    """Whether a CUDA device's tensor cores multiply TF32: from Ampere on."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
