"""The sizes of the tiles: one frozen table by architecture, head dimension and pass, and what they take."""

import os
import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from kernels.flash_attention.portable.load import split_width

Pass = Literal["fwd", "dkdv", "dq"]
Arch = Literal["interpreter", "sm80", "sm90", "sm100"]


@dataclass(frozen=True)
class TileConfig:
    """block_m query tokens by block_n key tokens, worked by num_warps warps with num_stages blocks in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (arch, head_dim of at most this, pass), for 2-byte dtypes. sm90: the best of those tried for each entry on an H200 by
# scripts/tune_tiles.py (scripts/results/portable_tiles_h200_202611.md). The others are not measured: sm100 begins from
# sm90, less where a GPU's tensor memory or the scores in shared memory ask for it, and sm80 fits the 99 KiB of the
# smallest GPUs that use it. tests/kernels/test_aot.py compiles every entry and holds it to limits.
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
    ("sm90", 64, "dq"): TileConfig(64, 64, 4, 3),
    ("sm90", 96, "dq"): TileConfig(128, 64, 8, 3),
    ("sm90", 128, "dq"): TileConfig(128, 64, 8, 3),
    ("sm90", 192, "dq"): TileConfig(64, 32, 4, 2),
    ("sm90", 256, "dq"): TileConfig(128, 32, 8, 2),
    ("sm100", 64, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 96, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 128, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 192, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm100", 256, "fwd"): TileConfig(128, 64, 8, 2),
    ("sm100", 64, "dkdv"): TileConfig(64, 64, 4, 3),
    ("sm100", 96, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm100", 128, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm100", 192, "dkdv"): TileConfig(32, 128, 8, 2),
    ("sm100", 256, "dkdv"): TileConfig(32, 64, 8, 2),
    ("sm100", 64, "dq"): TileConfig(64, 64, 4, 3),
    ("sm100", 96, "dq"): TileConfig(128, 64, 8, 3),
    ("sm100", 128, "dq"): TileConfig(128, 64, 8, 3),
    ("sm100", 192, "dq"): TileConfig(64, 32, 4, 2),
    ("sm100", 256, "dq"): TileConfig(128, 32, 8, 2),
    ("sm80", 64, "fwd"): TileConfig(128, 64, 4, 3),
    ("sm80", 96, "fwd"): TileConfig(128, 32, 4, 3),
    ("sm80", 128, "fwd"): TileConfig(128, 32, 4, 3),
    ("sm80", 192, "fwd"): TileConfig(64, 32, 4, 2),
    ("sm80", 256, "fwd"): TileConfig(64, 32, 4, 2),
    ("sm80", 64, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 96, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 128, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 192, "dkdv"): TileConfig(32, 32, 4, 1),
    ("sm80", 256, "dkdv"): TileConfig(32, 32, 4, 1),
    ("sm80", 64, "dq"): TileConfig(64, 64, 4, 2),
    ("sm80", 96, "dq"): TileConfig(64, 32, 4, 2),
    ("sm80", 128, "dq"): TileConfig(64, 32, 4, 2),
    ("sm80", 192, "dq"): TileConfig(32, 32, 4, 1),
    ("sm80", 256, "dq"): TileConfig(32, 32, 4, 1),
}

HEAD_DIMS = (64, 96, 128, 192, 256)
# whose entries a GPU of this compute capability uses; consumer Blackwell, 12, has sm_86's shared memory and instructions
_ENTRIES: dict[tuple[int, int], Arch] = {
    (8, 0): "sm80", (8, 6): "sm80", (8, 7): "sm80", (8, 9): "sm80", (9, 0): "sm90",
    (10, 0): "sm100", (10, 3): "sm100", (12, 0): "sm80", (12, 1): "sm80",
}  # fmt: skip
# bytes of shared memory that one program may take on the smallest GPU that uses these entries
SHARED_LIMIT: dict[Arch, int] = {"sm80": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024}


def interpreted() -> bool:
    """Whether kernels run in Triton's CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def arch_of(device: torch.device) -> Arch:
    """Whose entries to use on `device`; those of sm80, the most modest, on a GPU that the table does not know."""
    if interpreted():
        return "interpreter"
    return _ENTRIES.get(torch.cuda.get_device_capability(device), "sm80")


def tile_config(arch: Arch, head_dim: int, direction: Pass, itemsize: int) -> TileConfig:
    """The table's tiles; head_dim is the wider of q's and v's, at most 256, itemsize in bytes."""
    if arch == "interpreter":
        return TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)  # small, so that short inputs have edges
    entry = _TILES[arch, next(d for d in HEAD_DIMS if head_dim <= d), direction]
    if itemsize <= 2:
        return entry
    # fp32 takes twice the shared memory and the plain FMA units: quarter the tile
    return TileConfig(max(16, entry.block_m // 2), max(16, entry.block_n // 2), entry.num_warps, 1)


def launch_tiles(device: torch.device, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int) -> TileConfig:
    """The tiles for one launch on `device`: the table's, or smaller ones, with a warning, where those may not fit."""
    arch = arch_of(device)
    tiles = tile_config(arch, max(head_dim, v_head_dim), direction, itemsize)
    if arch == "interpreter":
        return tiles
    return _fitted(device, arch, tiles, head_dim, v_head_dim, direction, itemsize)


@cache  # asked before every launch
def _fitted(
    device: torch.device,
    arch: Arch,
    tiles: TileConfig,
    head_dim: int,
    v_head_dim: int,
    direction: Pass,
    itemsize: int,
) -> TileConfig:
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    fitted = fit(arch, tiles, head_dim, v_head_dim, direction, itemsize, limit)
    if fitted != tiles or torch.cuda.get_device_capability(device) not in _ENTRIES:
        _warn_of_unmeasured(device, limit)
    return fitted


@cache  # one warning a device
def _warn_of_unmeasured(device: torch.device, limit: int) -> None:
    major, minor = torch.cuda.get_device_capability(device)
    warnings.warn(
        f"kernels/flash_attention/tiles.py has no entries for {torch.cuda.get_device_name(device)} (sm_{major}{minor}, "
        f"{limit} bytes of shared memory a program): tiles that fit are used, which may be slow. "
        "scripts/tune_tiles.py measures better ones.",
        stacklevel=2,
    )


def fit(
    arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int, limit: int
) -> TileConfig:
    """`tiles`, with fewer stages and then fewer tokens as far as `limit` bytes of shared memory ask for it."""
    while shared_bytes(arch, tiles, head_dim, v_head_dim, direction, itemsize) > limit:
        if tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.block_n > 16 or tiles.block_m > 16:
            larger = "block_n" if tiles.block_n >= tiles.block_m else "block_m"
            tiles = replace(tiles, **{larger: getattr(tiles, larger) // 2})
        else:
            raise ValueError(
                f"no tile of head_dim {head_dim} and {v_head_dim} fits; wanted at most {limit} bytes of shared memory, "
                f"the smallest takes {shared_bytes(arch, tiles, head_dim, v_head_dim, direction, itemsize)}"
            )
    return tiles


def shared_bytes(
    arch: Arch, tiles: TileConfig, head_dim: int, v_head_dim: int, direction: Pass, itemsize: int
) -> int:
    """Bytes of shared memory that one program takes: never less than what Triton's compiler finds, a few KiB more.

    What the program keeps (Q; Q and dO; K and V), the blocks in flight of what it reads past it, and room to change
    the layout of the scores.
    """
    both = sum(split_width(head_dim)) + sum(split_width(v_head_dim))
    kept_rows, read_rows = (tiles.block_n, tiles.block_m) if direction == "dkdv" else (tiles.block_m, tiles.block_n)
    kept = kept_rows * (sum(split_width(head_dim)) if direction == "fwd" else both) * itemsize
    # rows of lse and delta are in flight beside Q and dO
    block = read_rows * (both * itemsize + (8 if direction == "dkdv" else 0))
    # wgmma and tcgen05 still read one block while the next is awaited; mma.sync has copied it to registers
    in_flight = max(1, tiles.num_stages - 1 if arch == "sm80" else tiles.num_stages)
    # P and dS feed the tensor cores from registers on sm90; sm80 may pass one through shared memory
    scores = tiles.block_m * tiles.block_n * itemsize
    scratch = {"interpreter": 0, "sm80": scores, "sm90": 0, "sm100": 0 if direction == "fwd" else scores}[arch]
    return kept + in_flight * block + scratch + 2048
