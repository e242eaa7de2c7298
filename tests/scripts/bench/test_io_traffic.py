"""Compares the formulas of scripts/bench/io_traffic.py with counted blocks, and tests its parser of ncu's output."""

from itertools import product

import pytest
import torch

from fa_kernels.flash_attention.schedule import causal_schedule
from fa_kernels.flash_attention.tiles import tile_config
from scripts.bench import io_traffic
from scripts.bench.io_traffic import (
    METRICS,
    Case,
    Measured,
    _blocks,
    cases_of,
    keys_read,
    least_bytes,
    markdown,
    order_bytes,
    parse_arguments,
    queries_read,
    read_counts,
    roofline,
    transfers,
)


def visited_rows(seqlen, own_block, other_block, causal, own_is_query):
    """Returns how many key rows the query tiles load in total, or how many query rows the key tiles load.

    A tile of queries loads a whole block of keys if any query of the tile sees any key of the block. A tile of keys
    loads a whole block of queries if any query of the block sees any key of the tile.
    """
    total = 0
    for first in range(0, seqlen, own_block):
        own = range(first, min(first + own_block, seqlen))
        start = first if causal and not own_is_query else 0  # causal kernels skip queries before the tile of keys
        for block in range(start, seqlen, other_block):
            other = range(block, min(block + other_block, seqlen))
            pairs = ((i, j) if own_is_query else (j, i) for i in own for j in other)
            if any(not causal or key <= query for query, key in pairs):
                total += len(other)
    return total


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen", "block_m", "block_n"),
    [
        pytest.param(32, 8, 4, id="even"),
        pytest.param(29, 8, 4, id="ragged"),
        pytest.param(29, 4, 8, id="wide-keys"),
        pytest.param(5, 8, 16, id="less-than-a-block"),
    ],
)
def test_rows_read_are_those_of_the_blocks_visited(seqlen, block_m, block_n, causal):
    keys = keys_read(seqlen, block_m, block_n, causal=causal)
    assert keys == visited_rows(seqlen, block_m, block_n, causal, own_is_query=True)
    queries = queries_read(seqlen, block_n, causal=causal)
    assert queries == visited_rows(seqlen, block_n, block_m, causal, own_is_query=False)


def test_rows_read_are_those_of_the_schedule():
    schedule = causal_schedule(None, 300, torch.device("cpu"))
    tile, block = 64, 32
    ends = [int(schedule.key_end[min(first + tile, 300) - 1]) for first in range(0, 300, tile)]
    assert keys_read(300, tile, block, causal=True) == sum(min(-(-end // block) * block, 300) for end in ends)
    starts = [int(schedule.query_start[first]) for first in range(0, 300, tile)]
    assert queries_read(300, tile, causal=True) == sum(300 - start for start in starts)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_naive_counts_every_matrix_of_its_products(direction, causal):
    n, d, heads = 64, 32, 2048 // 32
    squares, rows = {"forward": (4, 4), "backward": (7, 8)}[direction]
    expected = 2 * (squares * n * n + rows * n * d) + (5 * n * n if causal else 0)
    assert sum(transfers(Case("naive", direction, n, d, causal), "sm90").values()) == heads * expected


def test_naive_over_least_is_n_over_d():
    case = Case("naive", "forward", 4096, 64, causal=False)
    lse = 4 * 4096 * case.n_heads
    assert sum(transfers(case, "sm90").values()) / (least_bytes(case) - lse) == 4096 / 64 + 1


def test_portable_forward_reads_keys_once_a_tile_of_queries():
    case = Case("portable", "forward", 4096, 128, causal=False)
    block_m = tile_config("sm90", 128, "fwd", 2).block_m
    keys = transfers(case, "sm90")["read K, V"]
    assert keys == case.n_heads * (4096 // block_m) * 2 * 4096 * 128 * 2
    # arXiv:2205.14135 bounds the traffic of flash attention by O(N^2 d^2 / M), far below that of naive attention
    assert 1 < keys / order_bytes(case, "sm90") < 64
    assert keys < sum(transfers(Case("naive", "forward", 4096, 128, False), "sm90").values()) / 1.9


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("method", ["portable", "hopper"])
def test_flash_reads_and_writes_every_tensor_once_at_least(method, direction):
    for seqlen, head_dim in product((1, 100, 4096), (128, 256)):
        case = Case(method, direction, seqlen, head_dim, causal=False)
        moved = sum(transfers(case, "sm90").values())
        assert moved >= least_bytes(case)
        assert moved >= sum(transfers(Case(method, direction, seqlen, head_dim, causal=True), "sm90").values())


def test_backward_counts_both_kernels():
    case = Case("portable", "backward", 4096, 128, causal=True)
    sizes = transfers(case, "sm90")
    dkdv, dq = tile_config("sm90", 128, "dkdv", 2), tile_config("sm90", 128, "dq", 2)
    rows = 2 * 128 * 2 * case.n_heads  # bytes of one row of Q and of dO, or of one row of K and of V
    assert sizes["dkdv: read Q, dO"] == rows * queries_read(4096, dkdv.block_n, causal=True)
    assert sizes["dq: read K, V"] == rows * keys_read(4096, dq.block_m, dq.block_n, causal=True)


def test_backward_counts_dk_and_dv_apart_where_they_are():
    case = Case("portable", "backward", 4096, 256, causal=True)
    sizes, row = transfers(case, "sm90"), 256 * 2 * case.n_heads
    for name, read, row_values in (("dk", "K, V", "lse, delta"), ("dv", "K", "lse")):
        queries = queries_read(4096, tile_config("sm90", 256, name, 2).block_n, causal=True)
        assert sizes[f"{name}: read {read}"] == len(read.split()) * 4096 * row
        assert sizes[f"{name}: read Q, dO"] == 2 * queries * row
        assert sizes[f"{name}: read {row_values}"] == len(row_values.split()) * queries * 4 * case.n_heads
    written = {"dk: write dK", "dv: write dV", "dq: write dQ", "delta: write delta"}
    assert {name for name in sizes if "write" in name} == written
    assert "dkdv: write dK, dV" in transfers(case, "sm80")


def test_hopper_backward_of_wide_heads_counts_both_kernels():
    """The kernel of dK and dV has 64 keys per tile. The kernel of dQ has 128 queries per tile, for two warpgroups."""
    case = Case("hopper", "backward", 4096, 256, causal=True)
    sizes, row = transfers(case, "sm90"), 256 * 2 * case.n_heads
    assert sizes["dkdv: read Q, dO"] == 2 * row * queries_read(4096, 64, causal=True)
    assert sizes["dq: read K, V"] == 2 * row * keys_read(4096, 128, 64, causal=True)
    writes = sum(size for name, size in sizes.items() if "write d" in name)
    assert writes == 3 * 4096 * row + 4 * 4096 * case.n_heads, "three gradients in 16 bits, and delta"
    assert "add to dQ" in transfers(Case("hopper", "backward", 4096, 128, causal=True), "sm90")


def test_roofline():
    assert roofline(206e9, 1e9, 1000.0, 5.0) == (206.0, 1000.0, "compute")
    assert roofline(100e9, 1e9, 1000.0, 5.0) == (100.0, 500.0, "memory")


NCU = f"""==PROF== Connected to process 1
"ID","Kernel Name",{",".join(f'"{metric}"' for metric in sorted(METRICS))}
"","","byte","byte","ns","sector"
"0","first","100","10","1,000","4"
"1","second","23","1","500","6"
"2","at::cuda::spin_kernel(long)","7","7","7","7"
"3","third","5","6","2000","8"
"4","at::cuda::spin_kernel(long)","7","7","7","7"
"""


def test_counts_are_summed_between_separators():
    assert list(read_counts(NCU)) == [Measured(123, 11, 320, 1.5e-6), Measured(5, 6, 256, 2e-6)]
    assert list(read_counts("==ERROR== ERR_NVGPUCTRPERM\n")) == []


def small_cases():
    return cases_of(
        parse_arguments(["--seqlens", "4096", "--head-dims", "128", "--methods", "naive", "portable"]), "sm90"
    )


def test_report_places_naive_under_memory_and_flash_under_compute():
    lines = markdown(small_cases(), None, {"GPU": "none"}, "sm90", 989.0, 4.8).splitlines()
    naive, flash = (next(line for line in lines if f"| 32 | {method} |" in line) for method in ("naive", "portable"))
    assert "| memory | 298 |" in naive
    assert "| compute | 989 |" in flash
    assert any("read Q, K" in line and "write S" in line for line in lines), "the formulas must be spelt out"


def test_report_with_counts():
    cases = small_cases()
    counted = [Measured(1e9, 2e9, 5e9, 1e-3)] * len(cases)
    text = markdown(cases, counted, {}, "sm90", 989.0, 4.8)
    intensity = cases[0].flops() / 3e9
    assert f"| 5.000 | 1.000 | 2.000 | {intensity:.0f} | memory |" in text


def test_head_dims_without_hopper_kernels_are_portable_only():
    args = parse_arguments(["--head-dims", "32", "128", "256", "--seqlens", "64"])
    methods = ["naive", "portable", "hopper"]
    assert [case.method for case in cases_of(args, "sm90")] == methods[:2] * 2 + methods * 4
    assert [case.method for case in cases_of(args, "sm80")] == methods[:2] * 6


def test_hopper_forward_counts_the_tiles_that_it_takes():
    assert [_blocks(Case("hopper", "forward", n, 64, False), "sm90", "fwd") for n in (256, 2048, 4096)] == [
        (192, 64),
        (128, 128),
        (192, 128),
    ]


def test_wrong_arguments_are_refused(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--head-dims", "100"])
    assert "must divide 2048 and be 8 to 256; got 100" in capsys.readouterr().err


def test_formulas_need_no_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "traffic"
    monkeypatch.setattr("sys.argv", ["io_traffic", "--no-ncu", "--arch", "sm90", "--seqlens", "256", "--out", str(out)])
    io_traffic.main()
    assert "no, formulas only: --no-ncu" in capsys.readouterr().out
    assert "| forward | 64 | 256 | 4 | naive |" in out.with_suffix(".md").read_text()
