"""Tests the candidates, arguments and reports of scripts/bench/tune_tiles.py."""

import re

import pytest

from fa_kernels.flash_attention.portable import forward
from fa_kernels.flash_attention.tiles import (
    HEAD_DIMS,
    SHARED_LIMIT,
    TileConfig,
    key_passes,
    shared_bytes,
    tile_config,
)
from fa_kernels.flash_attention.tuned_tiles import read_tiles
from scripts.bench.tune_tiles import (
    APART,
    PASSES,
    WIDE,
    Candidate,
    Result,
    add_tiles,
    best,
    candidates,
    check,
    entries,
    flops,
    held_a_thread,
    markdown,
    near,
    one_step,
    parse_arguments,
    tiles_to_load,
)
from tests.support.marks import slow


def result(head_dim, direction, tiles, ms):
    candidate = Candidate(head_dim, direction, TileConfig(*tiles))
    return Result(candidate, None, None, "OutOfResources") if ms is None else Result(candidate, ms, 100 / ms)


RESULTS = [
    result(64, "fwd", (64, 64, 4, 3), 2.0),
    result(64, "fwd", (128, 64, 8, 3), 1.5),
    result(128, "fwd", (128, 128, 8, 4), None),
    result(64, "dq", (128, 64, 8, 3), 3.0),
    result(64, "dv", (64, 128, 8, 2), 4.0),
]


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_candidates_fit_and_hold_the_entry_of_the_table(head_dim, direction):
    limit = SHARED_LIMIT["sm90"]
    found = list(candidates("sm90", head_dim, direction, limit))
    if direction in APART and head_dim < WIDE:
        assert not found, "one kernel has room for both"
        return
    if direction not in APART or direction in key_passes("sm90", head_dim, 2):
        assert tile_config("sm90", head_dim, direction, 2) in found
    assert len(set(found)) == len(found)
    assert all(shared_bytes("sm90", tiles, head_dim, head_dim, direction, 2) <= limit for tiles in found)
    smaller = list(candidates("sm90", head_dim, direction, 99 * 1024))
    assert smaller and set(smaller) < set(found), "less shared memory must leave fewer candidates, and some"


def test_candidates_of_4_bytes_have_a_score_a_thread_and_half_the_numbers():
    """For head_dim 128, 32 x 32 with four warps was fastest on an H200, although each warp has only 8 rows."""
    found = list(candidates("sm90", 128, "dkdv", SHARED_LIMIT["sm90"], "float32"))
    assert TileConfig(32, 32, 4, 1) in found and TileConfig(32, 32, 8, 1) in found
    assert all(tiles.block_m * tiles.block_n >= 32 * tiles.num_warps for tiles in found)
    assert max(held_a_thread(tiles, 128, "dkdv") for tiles in found) <= 112


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_candidates_of_4_bytes_fit(head_dim, direction):
    limit = SHARED_LIMIT["sm90"]
    found = list(candidates("sm90", head_dim, direction, limit, "float32"))
    if direction in APART:
        assert not found, "fp32 takes one kernel for both at any head_dim"
        return
    assert all(shared_bytes("sm90", tiles, head_dim, head_dim, direction, 4) <= limit for tiles in found)
    entry = tile_config("sm90", head_dim, direction, 4)
    assert entry in found
    assert next(near("sm90", head_dim, direction, limit, "float32")) == entry


@pytest.mark.parametrize("direction", PASSES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_near_are_the_entry_and_candidates_one_step_from_it(head_dim, direction):
    limit = SHARED_LIMIT["sm90"]
    found = list(near("sm90", head_dim, direction, limit))
    if direction in APART and head_dim < WIDE:
        assert not found
        return
    # The tile table has no entries for the passes "dk" and "dv" at head_dim 192, so `near` starts from the entries for
    # head_dim 256.
    entry = tile_config("sm90", 256 if direction in APART else head_dim, direction, 2)
    assert found[0] == entry and 2 <= len(found) <= 9 and len(set(found)) == len(found)
    every = list(candidates("sm90", head_dim, direction, limit))
    assert set(found[1:]) == {tiles for tiles in every if one_step(tiles, entry)}


@pytest.mark.parametrize(
    ("sizes", "near_it"),
    [
        pytest.param((64, 64, 8, 3), True, id="half-block-m"),
        pytest.param((128, 128, 8, 3), True, id="double-block-n"),
        pytest.param((128, 64, 4, 3), True, id="half-warps"),
        pytest.param((128, 64, 8, 2), True, id="a-stage-less"),
        pytest.param((128, 64, 8, 3), False, id="itself"),
        pytest.param((32, 64, 8, 3), False, id="a-quarter"),
        pytest.param((128, 64, 8, 5), False, id="two-stages"),
        pytest.param((64, 128, 8, 3), False, id="two-sizes"),
        pytest.param((64, 64, 8, 2), False, id="size-and-stage"),
    ],
)
def test_one_step(sizes, near_it):
    assert one_step(TileConfig(*sizes), TileConfig(128, 64, 8, 3)) is near_it


def test_tiles_that_spill_are_no_candidates():
    # On an H200, a tile of 64 x 128 with four warps spilled registers and was slow. A tile of 64 x 64 with four warps
    # was 4.5 times as fast as the tile of 64 x 128.
    assert TileConfig(64, 128, 4, 2) not in candidates("sm90", 64, "dkdv", SHARED_LIMIT["sm90"])


@pytest.mark.parametrize(
    ("tiles", "direction", "expected"),
    [
        pytest.param((128, 64, 8, 3), "fwd", (128 * 128 + 128 * 64) // 256, id="fwd-O-and-S"),
        pytest.param((64, 128, 8, 3), "dkdv", (2 * 128 * 128 + 2 * 64 * 128) // 256, id="dkdv-two-outputs"),
        pytest.param((64, 128, 8, 2), "dk", (128 * 128 + 2 * 64 * 128) // 256, id="dk-S-and-dP"),
        pytest.param((64, 128, 8, 2), "dv", (128 * 128 + 64 * 128) // 256, id="dv-S"),
        pytest.param((128, 64, 8, 3), "dq", (128 * 128 + 2 * 128 * 64) // 256, id="dq-S-and-dP"),
    ],
)
def test_registers_held(tiles, direction, expected):
    assert held_a_thread(TileConfig(*tiles), 128, direction) == expected


def test_flops_count_the_products_of_the_pass():
    tiles = TileConfig(64, 64, 4, 2)
    one_product = 2 * 16 * 1024**2 * 128 / 2
    counted = [flops(Candidate(128, direction, tiles), 1024) / one_product for direction in PASSES]
    assert counted == [2, 4, 3, 2, 3]


def test_best_passes_over_failures_and_is_printed_as_the_table_is_written():
    assert {key: chosen.ms for key, chosen in best(RESULTS).items()} == {
        (64, "fwd"): 1.5,
        (64, "dq"): 3.0,
        (64, "dv"): 4.0,
    }
    text = entries(RESULTS, "sm90")
    assert text.splitlines() == [
        '    ("sm90", 64, "fwd"): TileConfig(128, 64, 8, 3),',
        '    ("sm90", 64, "dv"): TileConfig(64, 128, 8, 2),',
        '    ("sm90", 64, "dq"): TileConfig(128, 64, 8, 3),',
    ]
    assert eval("{" + text + "}", {"TileConfig": TileConfig})["sm90", 64, "dq"] == TileConfig(128, 64, 8, 3)


def test_only_entries_of_the_table_are_written_to_load():
    # sm90 has separate passes for dK and dV only with head_dim 256
    assert tiles_to_load([*RESULTS, result(72, "fwd", (64, 64, 4, 2), 1.0)], "sm90") == {
        (64, "fwd", 2): (128, 64, 8, 3),
        (64, "dq", 2): (128, 64, 8, 3),
    }


def test_new_tiles_replace_those_of_the_same_entry_in_a_file(tmp_path):
    file = tmp_path / "new folder" / "tiles.json"
    add_tiles(file, "Made Up", {(64, "fwd", 2): (32, 32, 4, 2), (64, "dq", 2): (64, 64, 4, 2)})
    add_tiles(file, "Made Up", tiles_to_load(RESULTS[:2], "sm90"))
    read_tiles.cache_clear()
    assert read_tiles(str(file), "Made Up") == {(64, "fwd", 2): (128, 64, 8, 3), (64, "dq", 2): (64, 64, 4, 2)}


@pytest.mark.parametrize("direction", ["fwd", *slow(*PASSES[1:])])
def test_a_correct_tile_passes_the_check(direction, device):
    assert check(Candidate(64, direction, TileConfig(64, 64, 4, 1), "float32"), str(device)) == ""


@pytest.mark.parametrize(
    ("wrong", "place", "message"),
    [
        (1e-5, (0, 0, 0), "the largest error is .* is allowed"),
        (1e-6, ..., "the root mean square error is .* is allowed"),
        (float("nan"), (0, 0, 0), "nan"),
    ],
)
def test_a_tile_with_wrong_results_is_no_result(wrong, place, message, monkeypatch, device):
    right = forward.attention_forward

    def forward_with_an_error(*arguments):
        o, lse = right(*arguments)
        o[place] += wrong
        return o, lse

    monkeypatch.setattr(forward, "attention_forward", forward_with_an_error)
    assert re.search(message, check(Candidate(64, "fwd", TileConfig(64, 64, 4, 1), "float32"), str(device)))


def test_report_sorts_by_time_and_marks_the_current_entry():
    text = markdown(RESULTS, {"GPU": "made up"}, "sm90", "sm90", 4096)
    lines = text.splitlines()
    first = lines.index("| **128** | **64** | **8** | **3** | **1.500** | **67** |")
    assert lines[first + 1] == "| 64 | 64 | 4 | 3 | 2.000 | 50 |"
    assert "- GPU: `made up`" in lines
    assert "| 128 | 128 | 8 | 4 | OutOfResources |  |" in lines
    assert "| 64 | 128 | 8 | 2 | 4.000 | 25 |" in lines, "the table has no such entry"
    assert entries(RESULTS, "sm90") in text


def test_report_of_4_bytes_marks_their_entry():
    entry = tile_config("sm90", 64, "fwd", 4)
    text = markdown([Result(Candidate(64, "fwd", entry, "float32"), 2.0, 30.0)], {}, "sm90", "sm90", 4096)
    assert f"| **{entry.block_m}** | **{entry.block_n}** |" in text
    assert "4096 tokens, float32," in text


def test_arguments():
    args = parse_arguments(["--head-dims", "96", "--passes", "dq", "--tiles", "64,32,4,2", "128,64,8,3"])
    assert (args.head_dims, args.passes) == ([96], ["dq"])
    assert args.tiles == [TileConfig(64, 32, 4, 2), TileConfig(128, 64, 8, 3)]
    assert parse_arguments([]).head_dims == list(HEAD_DIMS)
    assert parse_arguments(["--near"]).near and not parse_arguments([]).near
    assert parse_arguments([]).dtype == "bfloat16" and parse_arguments(["--dtype", "float32"]).dtype == "float32"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["--head-dims", "100"], "multiples of 8 from 8 to 256; got 100", id="head-dim"),
        pytest.param(["--tiles", "64,32,4"], "must be block_m,block_n,num_warps,num_stages; got 64,32,4", id="three"),
        pytest.param(["--tiles", "64,48,4,2"], "blocks must be 16, 32, 64 or 128", id="not-a-power-of-two"),
        pytest.param(["--passes", "bwd"], "invalid choice: 'bwd'", id="pass"),
        pytest.param(["--dtype", "float16"], "invalid choice: 'float16'", id="dtype"),
        pytest.param(["--jobs", "0"], "--jobs must be positive; got 0", id="jobs"),
        pytest.param(["--near", "--tiles", "64,32,4,2"], "not allowed with argument --near", id="near-and-named"),
        pytest.param(["--install", "--tiles", "64,32,4,2"], "must not be used with --tiles", id="install-and-named"),
    ],
)
def test_wrong_arguments_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert said in capsys.readouterr().err
