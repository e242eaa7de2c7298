"""If a user has measured tile sizes on a GPU, the user's file replaces the tile table on that GPU."""

import json
import warnings

import pytest

from fa_kernels.flash_attention import tiles as module
from fa_kernels.flash_attention import tuned_tiles
from fa_kernels.flash_attention.tiles import TileConfig, launch_tiles, tile_config
from tests.kernels.flash_attention.support.pretended_gpu import pretended_gpu

TILES = {(64, "fwd", 2): (64, 32, 4, 2), (128, "dq", 4): (32, 16, 8, 1)}


@pytest.fixture
def gpu():
    with pretended_gpu() as pretend:
        yield pretend


@pytest.fixture
def tile_file(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    tuned_tiles.write_tiles(path, "Made Up", TILES)
    monkeypatch.setenv(tuned_tiles.VARIABLE, str(path))
    tuned_tiles.read_tiles.cache_clear()
    return path


@pytest.fixture
def installed_file(tmp_path, monkeypatch):
    """Returns the path of the pretended GPU's tile file. No file exists at this path yet.

    Unsets the environment variable FLASH_ATTENTION_TILES, because it takes precedence over the cache folder.
    """
    monkeypatch.delenv(tuned_tiles.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned_tiles.read_tiles.cache_clear()
    return tmp_path / "cache" / "fa_kernels" / "tiles_Made_Up.json"


def test_an_installed_file_is_found_without_a_variable(gpu, installed_file):
    assert tuned_tiles.installed_file("Made Up") == installed_file
    tuned_tiles.write_tiles(installed_file, "Made Up", TILES)
    assert launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2) == TileConfig(64, 32, 4, 2)


def test_an_installed_file_of_another_gpu_is_not_read(gpu, installed_file):
    tuned_tiles.write_tiles(tuned_tiles.installed_file("Other"), "Other", TILES)
    assert launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2) == tile_config("sm80", 64, "fwd", 2)


def test_the_variable_takes_precedence_over_an_installed_file(gpu, installed_file, tmp_path, monkeypatch):
    tuned_tiles.write_tiles(installed_file, "Made Up", TILES)
    tuned_tiles.write_tiles(tmp_path / "named.json", "Made Up", {(64, "fwd", 2): (32, 32, 4, 1)})
    monkeypatch.setenv(tuned_tiles.VARIABLE, str(tmp_path / "named.json"))
    assert launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2) == TileConfig(32, 32, 4, 1)
    monkeypatch.setenv(tuned_tiles.VARIABLE, "")
    assert launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2) == tile_config("sm80", 64, "fwd", 2)


def test_the_cache_folder_is_in_the_home_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    expected = "/home/someone/.cache/fa_kernels/tiles_NVIDIA_GeForce_RTX_4090.json"
    assert str(tuned_tiles.installed_file("NVIDIA GeForce RTX 4090")) == expected


def test_tiles_of_the_file_replace_those_of_the_table(gpu, tile_file):
    device = gpu((8, 6), 99 * 1024)
    assert launch_tiles(device, 64, 64, "fwd", 2) == TileConfig(64, 32, 4, 2)
    assert launch_tiles(device, 40, 48, "fwd", 2) == TileConfig(64, 32, 4, 2), "narrower heads use the next head_dim"
    assert launch_tiles(device, 128, 128, "dq", 4) == TileConfig(32, 16, 8, 1)
    assert launch_tiles(device, 64, 64, "dq", 2) == tile_config("sm80", 64, "dq", 2), "the file has no such tile"


def test_a_gpu_without_a_table_does_not_warn_of_a_measured_tile(gpu, tile_file):
    device = gpu((13, 0), 99 * 1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch_tiles(device, 64, 64, "fwd", 2)
    with pytest.warns(UserWarning, match="tune_tiles"):
        launch_tiles(device, 64, 64, "dq", 2)


def test_a_tile_still_has_to_fit(gpu, tmp_path, monkeypatch):
    path = tmp_path / "large.json"
    tuned_tiles.write_tiles(path, "Made Up", {(256, "fwd", 2): (128, 128, 8, 4)})
    monkeypatch.setenv(tuned_tiles.VARIABLE, str(path))
    device = gpu((8, 6), 99 * 1024)
    tiles = launch_tiles(device, 256, 256, "fwd", 2)
    assert module.shared_bytes("sm80", tiles, 256, 256, "fwd", 2) <= 99 * 1024


def test_without_a_file_the_table_counts(gpu, installed_file):
    assert launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2) == tile_config("sm80", 64, "fwd", 2)


def changed(**values):
    return {"gpu": "Made Up", "tiles": [{**ENTRY, **values}]}


ENTRY = {"head_dim": 64, "pass": "fwd", "itemsize": 2, "block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("{", "must be JSON", id="not-json"),
        pytest.param("[]", "must hold the keys gpu and tiles", id="a-list"),
        pytest.param(json.dumps(changed() | {"gpu": "Other"}), "this GPU, Made Up; got tiles of Other", id="other-gpu"),
        pytest.param(json.dumps(changed(block_m=48)), "blocks of 16, 32", id="block"),
        pytest.param(json.dumps(changed(block_n=256)), "blocks of 16, 32", id="longer-than-a-tile-of-the-schedule"),
        pytest.param(json.dumps(changed(head_dim=80)), "head_dim of 64, 96", id="head-dim"),
        pytest.param(json.dumps({"gpu": "Made Up", "tiles": [ENTRY | {"pass": "fwdd"}]}), "a pass of fwd", id="pass"),
        pytest.param(json.dumps(changed(itemsize=8)), "an itemsize of 2, 4", id="itemsize"),
        pytest.param(json.dumps(changed(num_warps=True)), "1, 2, 4, 8, 16 warps", id="a-bool"),
        pytest.param(json.dumps(changed(num_stages=0)), "at least one stage", id="stages"),
        pytest.param(json.dumps(changed(speed=1)), "must have head_dim, pass, itemsize", id="unknown-key"),
    ],
)
def test_a_wrong_file_is_one_error(content, said, gpu, tile_file):
    tile_file.write_text(content)
    with pytest.raises(ValueError, match=said):
        launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2)


def test_a_missing_file_is_named(gpu, monkeypatch):
    monkeypatch.setenv(tuned_tiles.VARIABLE, "/nowhere/tiles.json")
    with pytest.raises(ValueError, match="a file of tiles must be readable; got /nowhere"):
        launch_tiles(gpu((8, 6), 99 * 1024), 64, 64, "fwd", 2)
