"""Files of tile sizes that a user measured on their GPU. scripts/bench/tune_tiles.py writes such files.

The first launch reads the file that the environment variable FLASH_ATTENTION_TILES names. If FLASH_ATTENTION_TILES is
not set, the first launch reads the installed file of the GPU, if there is one (`installed_file`). The tile sizes in the
file replace those in tiles.py. If the file is for another GPU, the launch raises an error. If FLASH_ATTENTION_TILES is
empty, no file is read.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Pass = Literal["fwd", "dkdv", "dk", "dv", "dq"]  # the dkdv kernel computes the scores once and uses them for dk and dv

VARIABLE = "FLASH_ATTENTION_TILES"
HEAD_DIMS = (64, 96, 128, 192, 256)  # the head dimensions in the table of tiles.py
ITEMSIZES = (2, 4)  # bytes
BLOCKS = (16, 32, 64, 128)  # at most schedule.WORK_TILE
WARPS = (1, 2, 4, 8, 16)
SIZES = ("block_m", "block_n", "num_warps", "num_stages")

Key = tuple[int, Pass, int]  # head_dim, the `Pass` of the kernel, and the bytes per element
Sizes = tuple[int, int, int, int]  # one value for each name in `SIZES`, in the same order


def installed_file(gpu: str) -> Path:
    """Returns the path of the file that is read if FLASH_ATTENTION_TILES is not set.

    It is ~/.cache/fa_kernels/tiles_<GPU>.json. XDG_CACHE_HOME replaces ~/.cache.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = re.sub(r"\W+", "_", gpu)
    return Path(cache, "fa_kernels", f"tiles_{name}.json")


def file_to_read(gpu: str) -> str:
    """Returns the path of the file that holds tiles for a GPU, or an empty string if there is none."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return named
    installed = installed_file(gpu)
    return str(installed) if os.path.isfile(installed) else ""


def write_tiles(path: Path, gpu: str, tiles: Mapping[Key, Sizes]) -> None:
    """Writes tile sizes for the GPU with the name `gpu` (see torch.cuda.get_device_name). Replaces an older file."""
    entries = [
        {"head_dim": head_dim, "pass": pass_, "itemsize": itemsize, **dict(zip(SIZES, sizes, strict=True))}
        for (head_dim, pass_, itemsize), sizes in sorted(tiles.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": gpu, "tiles": entries}, indent=1) + "\n", encoding="utf-8")


@cache  # the file is read once per process and GPU
def read_tiles(path: str, gpu: str) -> dict[Key, Sizes]:
    """Returns the tile sizes that a file holds.

    Raises: ValueError if the file is missing, is not in the form that write_tiles writes, or is for another GPU.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"a file of tiles must be readable; got {path} ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"a file of tiles must be JSON; got {path} ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("tiles"), list):
        raise ValueError(f"{path} must hold the keys gpu and tiles; scripts/bench/tune_tiles.py writes such files")
    if content.get("gpu") != gpu:
        raise ValueError(f"{path} must be measured on this GPU, {gpu}; got tiles of {content.get('gpu')}")
    return dict(_parse(entry, path) for entry in content["tiles"])


def _parse(entry: Any, path: str) -> tuple[Key, Sizes]:
    if not isinstance(entry, dict) or entry.keys() != {"head_dim", "pass", "itemsize", *SIZES}:
        raise ValueError(f"each tile in {path} must have head_dim, pass, itemsize and {', '.join(SIZES)}; got {entry}")
    block_m, block_n, num_warps, num_stages = sizes = tuple(entry[name] for name in SIZES)
    if not (
        all(type(size) is int for size in sizes)
        and {block_m, block_n} <= {*BLOCKS}
        and num_warps in WARPS
        and num_stages >= 1
    ):
        raise ValueError(
            f"each tile in {path} must have blocks of {_listed(BLOCKS)}, {_listed(WARPS)} warps, and at least one "
            f"stage; got {entry}"
        )
    key = entry["head_dim"], entry["pass"], entry["itemsize"]
    if key[0] not in HEAD_DIMS or key[1] not in get_args(Pass) or key[2] not in ITEMSIZES:
        raise ValueError(
            f"each tile in {path} must have a head_dim of {_listed(HEAD_DIMS)}, a pass of {_listed(get_args(Pass))}, "
            f"and an itemsize of {_listed(ITEMSIZES)}; got {entry}"
        )
    return key, (block_m, block_n, num_warps, num_stages)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
