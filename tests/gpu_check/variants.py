"""Lists all tile sizes that the GPU of this machine can run: those in the tables, and smaller ones for GPUs with less
shared memory.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from fa_kernels.columns_of_head import split_columns
from fa_kernels.device import Arch, arch_of, shared_memory
from fa_kernels.flash_attention.portable.decode import decode_tiles, padded_width
from fa_kernels.flash_attention.tiles import (
    SHARED_LIMIT,
    Pass,
    TileConfig,
    fit,
    key_passes,
    launch_tiles,
    shared_bytes,
    tile_config,
)

Width = tuple[int, int]  # head_dim of q and k, and head_dim of v
Tiles = Mapping[Pass, TileConfig]

HEAD_DIMS = (8, 16, 24, 32, 40, 48, 64, 72, 80, 88, 96, 104, 128, 136, 144, 160, 176, 192, 200, 256)
WIDTHS: list[Width] = [*((d, d) for d in HEAD_DIMS), (192, 128), (64, 128), (24, 80)]
KEY_PASSES: tuple[tuple[Pass, ...], ...] = (("dkdv",), ("dk", "dv"))
ARCHS: tuple[Arch, ...] = (*SHARED_LIMIT, "unknown")
# Bytes of shared memory that one program may use.
SHARED_SIZES = (
    64 * 1024,  # GPUs older than those in the tile tables
    99 * 1024,  # RTX 30 to 50
    163 * 1024,  # A100
    227 * 1024,  # H100 and B200
)
DECODE_ROWS = (1, 17, 64, 300)  # tested numbers of queries per KV head, which determine the tile heights of decoding


def own_tiles(width: Width, itemsize: int, device: torch.device) -> Tiles:
    """Returns the tile sizes that a call uses on `device` for each pass, from the table or from the user's file."""
    keys = key_passes(arch_of(device), max(width), itemsize)
    return {p: launch_tiles(device, *width, p, itemsize) for p in _passes(keys, itemsize)}


def other_tiles(width: Width, itemsize: int, device: torch.device) -> Iterator[Tiles]:
    """Yields a dictionary {pass: tile sizes} for each call to check.

    Together, the calls cover all tile sizes that `device` can run, except the tile sizes that own_tiles() returns.
    `width` holds the head_dim of q and k, and the head_dim of v. The function yields nothing if one of the two
    head_dims fills only a part of a tile's columns. A kernel for partly filled columns differs from the kernel for full
    columns only by a mask.
    """
    if not _fills_its_parts(width, itemsize):
        return
    own = own_tiles(width, itemsize, device)
    for keys in KEY_PASSES if itemsize > 1 else KEY_PASSES[:1]:
        tiles = {p: distinct_tiles(width, p, itemsize, device) for p in _passes(keys, itemsize)}
        others = {p: [t for t in found if t != own.get(p)] for p, found in tiles.items()}
        if all(tiles.values()):
            for i in range(max(map(len, others.values()))):
                yield {p: others[p][i % len(others[p])] if others[p] else tiles[p][0] for p in tiles}


def _passes(keys: Sequence[Pass], itemsize: int) -> list[Pass]:
    """Returns the names of the passes of one attention call, such as "fwd" and "dq".

    keys: the names of the passes that compute dK and dV. Attention in fp8 has no backward pass.
    """
    return ["fwd"] if itemsize == 1 else ["fwd", *keys, "dq"]


def distinct_tiles(width: Width, direction: Pass, itemsize: int, device: torch.device) -> list[TileConfig]:
    """Returns all tile sizes of one pass that `device` can run, without duplicates."""
    archs = [arch_of(device), *ARCHS]
    found = [
        smaller(arch, tile_config(arch, max(width), direction, itemsize), width, direction, itemsize, size)
        for arch in archs
        if direction not in ("dk", "dv") or direction in key_passes(arch, max(width), itemsize)
        for size in reversed(SHARED_SIZES)
    ]
    runnable = [tiles for tiles in found if tiles is not None and _fits(tiles, width, direction, itemsize, device)]
    return list(dict.fromkeys(runnable))


def smaller(
    arch: Arch, tiles: TileConfig, width: Width, direction: Pass, itemsize: int, size: int
) -> TileConfig | None:
    """Returns the tile sizes that `fit` finds for `size` bytes of shared memory per program, or None if nothing
    fits.
    """
    try:
        return fit(arch, tiles, *width, direction, itemsize, size)
    except ValueError:
        return None


def own_decode_tiles(width: Width, itemsize: int, paged: bool, device: torch.device) -> list[tuple[int, TileConfig]]:
    """Returns pairs (number of queries per KV head, tile sizes that `device` uses for decoding)."""
    return _decode_tiles(arch_of(device), width, itemsize, paged, shared_memory(device))


def other_decode_tiles(width: Width, itemsize: int, paged: bool, device: torch.device) -> list[tuple[int, TileConfig]]:
    """Returns pairs (number of queries per KV head, tile sizes that only other GPUs use for decoding)."""
    padded = padded_width(width[0]), padded_width(width[1])
    if width != next(w for w in WIDTHS if (padded_width(w[0]), padded_width(w[1])) == padded):
        return []
    found = [
        case
        for arch in ARCHS
        for size in SHARED_SIZES
        for case in _decode_tiles(arch, width, itemsize, paged, size)
        if _fits(case[1], padded, "fwd", itemsize, device)
    ]
    own = own_decode_tiles(width, itemsize, paged, device)
    return [case for case in dict.fromkeys(found) if case not in own]


def _decode_tiles(arch: Arch, width: Width, itemsize: int, paged: bool, size: int) -> list[tuple[int, TileConfig]]:
    """Returns pairs (number of queries per KV head, tile sizes for decoding).

    size: the shared memory in bytes that a program can use.
    """
    try:
        return [(rows, decode_tiles(arch, *width, itemsize, rows, paged, size)) for rows in DECODE_ROWS]
    except ValueError:
        return []


def _fills_its_parts(width: Width, itemsize: int) -> bool:
    return all(sum(split_columns(columns, itemsize)) == columns for columns in width)


def _fits(tiles: TileConfig, width: Width, direction: Pass, itemsize: int, device: torch.device) -> bool:
    needed = shared_bytes(arch_of(device), tiles, *width, direction, itemsize)
    return needed <= shared_memory(device)
