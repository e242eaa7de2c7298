"""The tile sizes of the portable kernels by architecture, head_dim and pass, and the shared memory that tiles need."""

import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from fa_kernels.columns_of_head import split_columns
from fa_kernels.device import Arch, arch_of, shared_memory
from fa_kernels.flash_attention import tuned_tiles
from fa_kernels.flash_attention.tuned_tiles import HEAD_DIMS, Pass


@dataclass(frozen=True)
class TileConfig:
    """A tile of block_m queries by block_n keys. num_warps and num_stages are Triton's launch options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Tiles for 1- and 2-byte dtypes, by (arch, largest head_dim, pass). Only tiles of sm90 are measured. sm_86, sm_89 and
# some others also use the tiles of sm80 (device.py). Where dk and dv entries exist, only repair.py uses the dkdv entry.
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

# Tiles for 4-byte dtypes. Only sm90 at head_dim 64 and 128 is measured (scripts/results/fp32_tiles_h200_202611.md).
# sm100 uses the tiles of sm80, because the tiles of sm90 would overflow the tensor memory of sm100.
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

# Shared memory per program in bytes. Each value is the limit of the GPU with the least shared memory in the
# architecture.
SHARED_LIMIT: dict[Arch, int] = {"sm80": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024}


def tile_config(arch: Arch, head_dim: int, pass_: Pass, itemsize: int) -> TileConfig:
    """Returns tiles from the table. head_dim is the larger head_dim of q and v, at most 256. itemsize is in bytes."""
    if arch == "interpreter":
        # The interpreter uses small tiles, so that short inputs have several tiles.
        return TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)
    listed = _listed(head_dim)
    known: Arch = "sm80" if arch == "unknown" else arch  # the tiles of sm80 need the least shared memory
    if itemsize > 2:
        return _TILES_OF_4_BYTES["sm80" if known == "sm100" else known, listed, pass_]
    return _TILES[known, listed, pass_]


def key_passes(arch: Arch, head_dim: int, itemsize: int) -> tuple[Pass, ...]:
    """Returns the passes that compute dK and dV: ("dk", "dv") if the table lists both, else ("dkdv",).

    The pass for dK and the pass for dV both compute the scores, so the two passes together need five matmuls. One pass
    for dK and dV (dkdv) needs only four matmuls. The pass for dK and the pass for dV each have half as many
    accumulators as one pass for dK and dV. With fewer accumulators, tiles can be twice as long, and two warpgroups can
    divide the rows of the scores.
    """
    if itemsize > 2 and arch != "interpreter":
        return ("dkdv",)
    # The interpreter uses the table of sm90, so that tests run the dkdv pass at some values of head_dim, and the passes
    # dk and dv at other values of head_dim.
    table: dict[Arch, Arch] = {"interpreter": "sm90", "unknown": "sm80"}
    known = table.get(arch, arch)
    return ("dk", "dv") if (known, _listed(head_dim), "dk") in _TILES else ("dkdv",)


@cache  # called at every launch
def launch_tiles(device: torch.device, head_dim: int, v_head_dim: int, pass_: Pass, itemsize: int) -> TileConfig:
    """Returns the tiles for one launch: the table's tiles, or smaller tiles if `device` has too little shared memory.

    Tiles that the user measured on the device replace the tiles of the table (tuned_tiles.py). Warns once per device if
    the table does not list the device, or if the tiles of the table do not fit.
    """
    arch, widest = arch_of(device), max(head_dim, v_head_dim)
    if arch == "interpreter":
        return tile_config(arch, widest, pass_, itemsize)
    limit = shared_memory(device)
    tuned = _tuned(device, widest, pass_, itemsize)
    entry = tuned or tile_config(arch, widest, pass_, itemsize)
    tiles = fit(arch, entry, head_dim, v_head_dim, pass_, itemsize, limit)
    if tuned is None and (arch == "unknown" or tiles != entry):
        _warn_of_guesses(device, limit)
    return tiles


def _tuned(device: torch.device, head_dim: int, pass_: Pass, itemsize: int) -> TileConfig | None:
    """Returns the tile sizes that the user measured (tuned_tiles.py), or None."""
    gpu = torch.cuda.get_device_name(device)
    path = tuned_tiles.file_to_read(gpu)
    sizes = tuned_tiles.read_tiles(path, gpu).get((_listed(head_dim), pass_, itemsize)) if path else None
    return TileConfig(*sizes) if sizes else None


def _listed(head_dim: int) -> int:
    """Returns the head_dim of the table whose tiles a head_dim uses."""
    return next(d for d in HEAD_DIMS if head_dim <= d)


@cache  # once per device
def _warn_of_guesses(device: torch.device, limit: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    warnings.warn(
        f"kernels/fa_kernels/flash_attention/tiles.py has no measured tiles for {torch.cuda.get_device_name(device)} "
        f"(sm_{major}{minor}, {limit} bytes of shared memory per program). The tiles used instead fit, but may be "
        "slow. python -m scripts.bench.tune_tiles --near --install finds faster tiles.",
        stacklevel=2,
    )


def fit(
    arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, pass_: Pass, itemsize: int, limit: int
) -> TileConfig:
    """Returns `tiles`, with fewer stages and smaller blocks if `tiles` need more than `limit` bytes of shared memory.

    Tiles that are halved to 64 rows get at most four warps, because a warpgroup of four warps computes 64 rows on
    Hopper. With eight warps and two column blocks per head, ptxas 12.8 would generate wrong code for tiles of 64 rows.
    Raises: ValueError if tiles of 16 by 16 do not fit.
    """
    of_keys = pass_ in ("dkdv", "dk", "dv")
    while True:
        for num_stages in range(tiles.num_stages, 0, -1):
            staged = replace(tiles, num_stages=num_stages)
            needed = shared_bytes(arch, staged, head_dim, v_head_dim, pass_, itemsize)
            if needed <= limit:
                return staged
        if tiles.block_m == tiles.block_n == 16:
            raise ValueError(
                f"attention with head_dim {head_dim} (q, k) and {v_head_dim} (v) needs at least {needed} bytes of "
                f"shared memory per program; the device has {limit}"
            )
        if tiles.block_m > tiles.block_n:
            tiles = replace(tiles, block_m=tiles.block_m // 2)
        else:
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        rows = tiles.block_n if of_keys else tiles.block_m
        if rows == 64:
            tiles = replace(tiles, num_warps=min(tiles.num_warps, 4))


def shared_bytes(arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, pass_: Pass, itemsize: int) -> int:
    """Returns an upper bound of the bytes of shared memory that a program needs.

    tests/kernels/aot/test_portable.py checks that the bound is close to what Triton reports.
    """
    if arch == "unknown":  # returns an upper bound of shared memory for all known architectures
        return max(shared_bytes(known, tiles, head_dim, v_head_dim, pass_, itemsize) for known in SHARED_LIMIT)
    one_product = _shared_of_one_product(arch, tiles, head_dim, v_head_dim, pass_, itemsize)
    if itemsize == 4:
        return max(one_product, _shared_of_three_products(arch, tiles, head_dim, v_head_dim, pass_))
    return one_product


def _shared_of_one_product(
    arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, pass_: Pass, itemsize: int
) -> int:
    """Returns the bytes of shared memory that a program needs if each matmul is one product, not three TF32 products.

    The returned bytes include the tiles that a program keeps, the blocks that the program loads, and the memory in
    which the program converts tensors to another layout.

    A program keeps Q in the forward pass, Q and dO for dQ, K and V for dK, and K for dV.
    """
    qk_width, v_width = (sum(split_columns(width, itemsize)) for width in (head_dim, v_head_dim))
    of_keys = pass_ in ("dkdv", "dk", "dv")
    kept_rows, read_rows = (tiles.block_n, tiles.block_m) if of_keys else (tiles.block_m, tiles.block_n)
    kept = kept_rows * (qk_width + (0 if pass_ in ("fwd", "dv") else v_width)) * itemsize
    block = read_rows * (qk_width + v_width) * itemsize
    row_values = 8 * read_rows if of_keys else 0  # lse and delta are prefetched with Q and dO
    scores = tiles.block_m * tiles.block_n * itemsize
    if arch == "sm80" or kept_rows < 64:  # mma.sync: registers hold one block, and shared memory holds the next block
        in_flight = max(1, tiles.num_stages - 1)
        rewritten = scores if max(head_dim, v_head_dim) >= 128 else 0
    else:  # wgmma and tcgen05 read a block from shared memory while the next blocks arrive
        in_flight = tiles.num_stages
        rewritten = 0
        if arch == "sm100":
            rewritten = _rewritten_for_tcgen05(scores, block, read_rows, head_dim, pass_, itemsize)
    if itemsize == 1:
        rewritten += read_rows * v_width * 2  # V in fp16
    if tiles.num_stages == 1:  # without prefetching, V overwrites K in shared memory
        widest = read_rows * max(qk_width, v_width) * itemsize
        if pass_ == "fwd":
            return kept + widest + scores + 2048
        isolated = block if of_keys and kept_rows >= 64 else widest  # copies of blocks, with 0 in place of inf and NaN
        rewritten = max(rewritten, scores, isolated)
    return kept + in_flight * (block + row_values) + rewritten + 2048


def _rewritten_for_tcgen05(scores: int, block: int, rows: int, head_dim: int, pass_: Pass, itemsize: int) -> int:
    """Returns the bytes of shared memory that the program itself fills with operands of tcgen05.

    The operands that the program writes to shared memory are P, dS, and copies of loaded blocks with 0 in place of inf
    and NaN.
    """
    first, second = split_columns(head_dim)
    if pass_ in ("fwd", "dv"):  # P stays in tensor memory
        return 0
    if pass_ == "dq":
        return scores + rows * (first + second) * itemsize + 3072
    return block + 2 * max(scores, rows * first * itemsize) if second else max(2 * scores, block) + 512


def _shared_of_three_products(arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, pass_: Pass) -> int:
    """Returns the bytes of shared memory for fp32 inputs, if each matmul is computed as three TF32 products.

    Each fp32 value is split into two TF32 values, which are called the upper part and the lower part. Blocks are
    prefetched in fp32, and split in registers, one column block at a time. The current block is the block that the
    program multiplies. Shared memory holds two TF32 values (8 bytes) for each element of the current block, and for
    each element of the tiles that a program keeps. With mma.sync, registers hold the TF32 values of the current block,
    and shared memory holds one fp32 value (4 bytes) for each element of the current block. Kernels for dK and dV need 8
    bytes per element of the current block even with mma.sync, because they store the block a second time, transposed.
    The decode kernel uses the tiles of the forward pass. The decode kernel can hold K, V and two copies of the scores
    at the same time.
    """
    (d_1, d_2), (dv_1, dv_2) = split_columns(head_dim), split_columns(v_head_dim)
    of_keys = pass_ in ("dkdv", "dk", "dv")
    kept_rows, read_rows = (tiles.block_n, tiles.block_m) if of_keys else (tiles.block_m, tiles.block_n)
    kept = kept_rows * (d_1 + d_2 + (0 if pass_ in ("fwd", "dv") else dv_1 + dv_2)) * 8
    block = read_rows * (d_1 + d_2 + dv_1 + dv_2) * 4
    ahead = (tiles.num_stages - 1) * (block + (8 * read_rows if of_keys else 0))
    worked_on = read_rows * max(d_1, dv_1) * 8
    if arch == "sm80" or kept_rows < 64:
        if pass_ == "fwd":
            worked_on = block + 8 * tiles.block_m * tiles.block_n
        elif pass_ == "dq":
            worked_on //= 2
    return kept + ahead + worked_on + 2048


def precision_of(x: Tensor) -> str:
    """Returns tl.dot's input_precision for x's dtype. The precision has no effect for 2-byte dtypes.

    For fp32, the default is "tf32x3": the sum of three TF32 products of the upper and lower parts of the inputs.
    Torch's own attention also uses three TF32 products. The precision "tf32x3" is as accurate as FMA instructions
    ("ieee"), and three times as fast. If the user allowed TF32 in torch's matmuls, the precision is "tf32": one TF32
    product instead of three. With "tf32x3", infinities and NaN give the same results as with FMA instructions. Values
    in the top 1/4096 of the fp32 range round to infinity in TF32, and count as infinite.
    """
    if x.dtype != torch.float32 or (x.is_cuda and not _has_tf32(x.device)):
        return "ieee"
    # Torch has two settings for TF32, and fp32_precision reflects both settings. Reading allow_tf32 fails if
    # fp32_precision was set.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


@cache  # called at every launch
def _has_tf32(device: torch.device) -> bool:
    """Returns whether a CUDA device's tensor cores support TF32, as on Ampere and newer GPUs."""
    return torch.cuda.get_device_capability(device) >= (8, 0)
