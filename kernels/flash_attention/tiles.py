"""The sizes of the tiles: one frozen table by architecture, head dimension and pass."""

import os
from dataclasses import dataclass
from typing import Literal

import torch

Pass = Literal["fwd", "dkdv", "dq"]
Arch = Literal["interpreter", "sm80", "sm90"]


@dataclass(frozen=True)
class TileConfig:
    """block_m query tokens by block_n key tokens, worked by num_warps warps with num_stages blocks in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (arch, head_dim of at most this, pass), for 2-byte dtypes. sm90 at 64 and 128: the best of the eight to ten
# tried for each entry on an H200 (scripts/results/portable_tiles_h200_202611.md). The others are chosen to fit.
_TILES: dict[tuple[Arch, int, Pass], TileConfig] = {
    ("sm90", 64, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm90", 128, "fwd"): TileConfig(128, 64, 8, 3),
    ("sm90", 256, "fwd"): TileConfig(128, 64, 8, 2),
    ("sm90", 64, "dkdv"): TileConfig(64, 64, 4, 3),
    ("sm90", 128, "dkdv"): TileConfig(64, 128, 8, 3),
    ("sm90", 256, "dkdv"): TileConfig(32, 64, 8, 2),
    ("sm90", 64, "dq"): TileConfig(64, 64, 4, 3),
    ("sm90", 128, "dq"): TileConfig(128, 64, 8, 3),
    ("sm90", 256, "dq"): TileConfig(128, 32, 8, 2),
    ("sm80", 64, "fwd"): TileConfig(128, 64, 4, 3),
    ("sm80", 128, "fwd"): TileConfig(128, 32, 4, 3),
    ("sm80", 256, "fwd"): TileConfig(64, 32, 4, 2),
    ("sm80", 64, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 128, "dkdv"): TileConfig(32, 64, 4, 2),
    ("sm80", 256, "dkdv"): TileConfig(32, 32, 4, 1),
    ("sm80", 64, "dq"): TileConfig(64, 64, 4, 2),
    ("sm80", 128, "dq"): TileConfig(64, 32, 4, 2),
    ("sm80", 256, "dq"): TileConfig(32, 32, 4, 1),
}


HEAD_DIMS = (64, 128, 256)


def interpreted() -> bool:
    """Whether kernels run in Triton's CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def arch_of(device: torch.device) -> Arch:
    """Whose tiles to use on `device`."""
    if interpreted():
        return "interpreter"
    # 9 and 10 have 228 KiB of shared memory; consumer Blackwell, 12, has the 100 KiB that the sm80 entries fit in
    return "sm90" if torch.cuda.get_device_capability(device)[0] in (9, 10) else "sm80"


def tile_config(arch: Arch, head_dim: int, direction: Pass, itemsize: int) -> TileConfig:
    """The tiles for one launch; head_dim is the wider of q's and v's, at most 256, itemsize in bytes."""
    if arch == "interpreter":
        return TileConfig(block_m=32, block_n=16, num_warps=4, num_stages=1)  # small, so that short inputs have edges
    entry = _TILES[arch, next(d for d in HEAD_DIMS if head_dim <= d), direction]
    if itemsize == 2:
        return entry
    # fp32 takes twice the shared memory and the plain FMA units: quarter the tile
    return TileConfig(max(16, entry.block_m // 2), max(16, entry.block_n // 2), entry.num_warps, 1)
