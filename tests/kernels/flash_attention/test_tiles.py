"""A launch uses the tile sizes of the table."""

import warnings

import pytest

from fa_kernels.device import arch_of
from fa_kernels.flash_attention import tiles as module
from fa_kernels.flash_attention.tiles import (
    HEAD_DIMS,
    SHARED_LIMIT,
    TileConfig,
    fit,
    key_passes,
    launch_tiles,
    shared_bytes,
    tile_config,
)
from tests.kernels.flash_attention.support.pretended_gpu import pretended_gpu

PASSES = ("fwd", "dkdv", "dq")
APART = ("dk", "dv")


def passes_of(arch, head_dim, itemsize):
    """Returns fwd, dkdv and dq, followed by dk and dv if dK and dV have separate kernels."""
    apart = key_passes(arch, head_dim, itemsize) == APART
    return PASSES + APART if apart else PASSES


@pytest.fixture
def gpu():
    with pretended_gpu() as pretend:
        yield pretend


@pytest.mark.parametrize(
    ("capability", "shared", "arch"),
    [
        pytest.param((8, 0), 163, "sm80", id="A100"),
        pytest.param((8, 6), 99, "sm80", id="RTX3090"),
        pytest.param((9, 0), 227, "sm90", id="H100"),
        pytest.param((10, 0), 227, "sm100", id="B200"),
        pytest.param((12, 0), 99, "sm80", id="RTX5090"),
    ],
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_known_gpus_get_the_table_silently(gpu, capability, shared, arch, itemsize):
    device = gpu(capability, shared * 1024)
    assert arch_of(device) == arch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for head_dim in HEAD_DIMS:
            for direction in passes_of(arch, head_dim, itemsize):
                expected = tile_config(arch, head_dim, direction, itemsize)
                assert launch_tiles(device, head_dim, head_dim, direction, itemsize) == expected


@pytest.mark.parametrize(
    ("capability", "shared", "itemsizes"),
    [
        pytest.param((7, 5), 64, (2,), id="older"),
        pytest.param((11, 0), 227, (2, 4), id="newer"),
        pytest.param((9, 0), 99, (2, 4), id="known-with-less-memory"),
    ],
)
def test_other_gpus_get_what_fits_with_one_warning(gpu, capability, shared, itemsizes):
    device, limit = gpu(capability, shared * 1024), shared * 1024
    with pytest.warns(UserWarning, match=rf"no measured tiles for Made Up \(sm_.*{limit} bytes") as caught:
        for head_dim in HEAD_DIMS:
            for direction in PASSES:
                for itemsize in itemsizes:
                    tiles = launch_tiles(device, head_dim, head_dim, direction, itemsize)
                    needed = shared_bytes(arch_of(device), tiles, head_dim, head_dim, direction, itemsize)
                    assert needed <= limit, (head_dim, direction, itemsize)
                    assert min(tiles.block_m, tiles.block_n) >= 16
    assert len(caught) == 1


def test_4_byte_dtypes_have_entries_of_their_own():
    keys = {(arch, head_dim, direction) for arch in ("sm80", "sm90") for head_dim in HEAD_DIMS for direction in PASSES}
    assert set(module._TILES_OF_4_BYTES) == keys
    for (arch, head_dim, direction), entry in module._TILES_OF_4_BYTES.items():
        for used_by in {"sm80": ("sm80", "sm100", "unknown"), "sm90": ("sm90",)}[arch]:
            assert tile_config(used_by, head_dim, direction, 4) == entry


@pytest.mark.parametrize(("width", "entry"), [(8, 64), (64, 64), (72, 96), (104, 128), (136, 192), (200, 256)])
def test_a_head_dim_between_two_entries_takes_the_next(width, entry):
    assert tile_config("sm90", width, "dq", 2) == tile_config("sm90", entry, "dq", 2)
    assert tile_config("sm90", width, "dq", 4) == tile_config("sm90", entry, "dq", 4)


def test_the_wider_of_both_head_dims_counts(gpu):
    device = gpu((9, 0), 227 * 1024)
    assert launch_tiles(device, 192, 128, "dkdv", 2) == tile_config("sm90", 192, "dkdv", 2)
    assert launch_tiles(device, 64, 128, "dkdv", 2) == tile_config("sm90", 128, "dkdv", 2)


@pytest.mark.parametrize("arch", SHARED_LIMIT)
@pytest.mark.parametrize("direction", PASSES + APART)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_entry_fits_its_smallest_gpu_with_any_head_dims(arch, direction, itemsize):
    for head_dim in range(8, 257, 8):
        for v_head_dim in range(8, 257, 8):
            if direction not in passes_of(arch, max(head_dim, v_head_dim), itemsize):
                continue
            tiles = tile_config(arch, max(head_dim, v_head_dim), direction, itemsize)
            needed = shared_bytes(arch, tiles, head_dim, v_head_dim, direction, itemsize)
            assert needed <= SHARED_LIMIT[arch], (head_dim, v_head_dim, tiles)


@pytest.mark.parametrize(
    ("arch", "head_dim", "itemsize", "passes"),
    [
        pytest.param("sm90", 256, 2, APART, id="wide"),
        pytest.param("sm90", 200, 2, APART, id="in-between"),
        pytest.param("sm90", 192, 2, ("dkdv",), id="narrow"),
        pytest.param("sm90", 256, 4, ("dkdv",), id="fp32"),
        pytest.param("sm80", 256, 2, ("dkdv",), id="no-entries"),
        pytest.param("unknown", 256, 2, ("dkdv",), id="unknown"),
        pytest.param("interpreter", 256, 4, APART, id="interpreter-wide"),
        pytest.param("interpreter", 192, 4, ("dkdv",), id="interpreter-narrow"),
    ],
)
def test_dk_and_dv_are_taken_apart_where_the_table_says(arch, head_dim, itemsize, passes):
    assert key_passes(arch, head_dim, itemsize) == passes
    for direction in passes:
        assert tile_config(arch, head_dim, direction, itemsize)


def test_shared_bytes_counts_what_is_kept_and_in_flight():
    tiles = TileConfig(128, 64, 8, 3)
    q, keys_and_values = 128 * 128 * 2, 64 * (128 + 128) * 2
    assert 0 < shared_bytes("sm90", tiles, 128, 128, "fwd", 2) - (q + 3 * keys_and_values) <= 2048
    wider = shared_bytes("sm90", tiles, 128, 256, "fwd", 2) - shared_bytes("sm90", tiles, 128, 128, "fwd", 2)
    assert wider == 3 * 64 * 128 * 2, "only V is wider"
    keys, values = (shared_bytes("sm90", TileConfig(64, 128, 8, 2), 128, 128, direction, 2) for direction in APART)
    assert keys - values == 128 * 128 * 2, "dV needs no V"


def test_shared_bytes_counts_both_halves_of_fp32():
    """Expects the bytes of shared memory that Triton uses if each fp32 product is computed as three TF32 products."""
    reported = {
        ("sm90", 64, "fwd"): 131072,
        ("sm90", 128, "fwd"): 196608,
        ("sm90", 64, "dkdv"): 81920,
        ("sm90", 128, "dkdv"): 98304,
        ("sm90", 64, "dq"): 81920,
        ("sm80", 128, "dkdv"): 81920,
        ("sm80", 128, "dq"): 81920,
    }
    for (arch, head_dim, direction), shared in reported.items():
        tiles = tile_config(arch, head_dim, direction, 4)
        assert 0 <= shared_bytes(arch, tiles, head_dim, head_dim, direction, 4) - shared < 3072, (arch, direction)
    # An H200 refused to launch the dq kernel with 294912 bytes. The tiles of 16 rows are those of decoding kernels,
    # which need more shared memory than forward kernels with the same tiles.
    assert shared_bytes("sm90", TileConfig(128, 32, 8, 1), 128, 128, "dq", 4) >= 294912
    assert shared_bytes("sm80", TileConfig(16, 32, 8, 1), 256, 256, "fwd", 4) >= 102400
    assert shared_bytes("sm90", TileConfig(16, 64, 8, 1), 256, 256, "fwd", 4) >= 172032


def test_fit_gives_up_stages_before_tokens_and_refuses_what_cannot_fit():
    tiles = TileConfig(128, 64, 8, 3)
    three, two = (shared_bytes("sm90", TileConfig(128, 64, 8, n), 128, 128, "fwd", 2) for n in (3, 2))
    assert fit("sm90", tiles, 128, 128, "fwd", 2, three) == tiles
    assert fit("sm90", tiles, 128, 128, "fwd", 2, three - 1) == TileConfig(128, 64, 8, 2)
    assert two < three
    assert fit("sm90", tiles, 128, 128, "fwd", 2, 64 * 1024).block_m < 128
    with pytest.raises(ValueError, match=r"head_dim 256 .* needs at least \d+ bytes .* the device has 1024"):
        fit("sm90", tiles, 256, 256, "fwd", 2, 1024)


@pytest.mark.parametrize("direction", PASSES)
def test_halving_leaves_a_warpgroup_its_64_rows(direction):
    for arch in SHARED_LIMIT:
        for head_dim in HEAD_DIMS:
            tiles = tile_config(arch, head_dim, direction, 2)
            for limit in (64, 99, 163):
                smaller = fit(arch, tiles, head_dim, head_dim, direction, 2, limit * 1024)
                rows = smaller.block_n if direction == "dkdv" else smaller.block_m
                halved = (smaller.block_m, smaller.block_n) != (tiles.block_m, tiles.block_n)
                assert not (halved and rows == 64 and smaller.num_warps > 4), (arch, head_dim, limit, smaller)
