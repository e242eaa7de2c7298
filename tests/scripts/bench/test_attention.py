"""Tests the arithmetic and the reports of scripts/bench/attention.py on invented rows."""

import csv
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.testing import assert_array_equal

from fa_kernels.flash_attention.reference import attention_reference
from scripts.bench import attention
from scripts.bench.attention import (
    DEVICE,
    Backend,
    Workload,
    attended_pairs,
    dense_workload,
    fill_row,
    packed_workloads,
)
from scripts.bench.attention_report import STYLES, Row, draw, draw_rates, markdown
from scripts.bench.page import write_csv
from scripts.bench.timing import captured, median_ms
from tests.support.tolerance import assert_as_accurate


def row(backend: str = "ours", seqlen: int = 1024, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "section": "dense",
        "workload": f"1 × {seqlen}",
        "head_dim": 64,
        "group": 1,
        "batch": 1,
        "seqlen": seqlen,
        "causal": True,
        "backend": backend,
        "direction": "forward",
        "outcome": "ok",
        "ms": seqlen / 1000,
        "tflops": 123.4,
        "peak_gib": seqlen / 2**20,
    }
    return Row(**{**values, **changes})


def without_result(backend: str, seqlen: int, outcome: str, **changes: Any) -> Row:
    return row(backend, seqlen, outcome=outcome, ms=None, tflops=None, peak_gib=None, **changes)


@pytest.mark.parametrize(
    ("workload", "forward"),
    [
        pytest.param(Workload(64, 2, 8, causal=False), 4 * 2048 * 2 * 64, id="dense"),
        pytest.param(Workload(64, 2, 8, causal=True), 2 * 2048 * 2 * 64, id="causal-is-half"),
        pytest.param(Workload(128, 1, 8, causal=False, documents=(5, 3)), 4 * 2048 * (25 + 9), id="documents"),
    ],
)
def test_flops_count_squared_lengths(workload: Workload, forward: float) -> None:
    assert workload.flops("forward") == forward
    assert workload.flops("backward") == 2.5 * forward


def test_short_sequences_share_a_batch_of_one_size() -> None:
    assert [dense_workload(n, 64, causal=True).batch for n in (1024, 16384, 65536)] == [16, 1, 1]
    assert dense_workload(1024, 64, causal=True).n_heads == 32
    assert dense_workload(1024, 96, causal=True, group=4).n_heads == 20
    one = dense_workload(8192, 128, causal=True, group=4, model_dim=4096, batch_tokens=8192)
    assert (one.batch, one.n_heads, one.name) == (1, 32, "1 × 8192")
    assert one.flops("forward") == 2 * 32 * 128 * 8192**2


def test_fill_row_cuts_the_last_document() -> None:
    assert fill_row([3, 4, 5], total=9) == (3, 4, 2)
    assert fill_row([3, 4, 5], total=7) == (3, 4)


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
def test_pairs_of_queries_and_keys(window):
    lengths = (1, 5, 12)
    pairs = sum(min(i + 1, window or i + 1) for length in lengths for i in range(length))
    assert attended_pairs(lengths, window) == pairs


def test_packed_workloads_fill_the_row() -> None:
    long_tailed, short = packed_workloads(128, causal=True)
    for workload in (long_tailed, short):
        assert sum(workload.lengths) == workload.seqlen == 65536
        assert workload.batch == 1
    assert max(long_tailed.lengths) > 8192
    assert all(64 <= length <= 512 for length in short.lengths[:-1])
    assert packed_workloads(128, causal=True) == [long_tailed, short]  # every call returns the same documents
    assert [w.n_heads for w in packed_workloads(128, causal=True, model_dim=4096)] == [32, 32]


def test_a_failure_is_a_row_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> tuple[float, float]:
        raise error

    monkeypatch.setattr(attention, "prepare_pass", fail)
    monkeypatch.setattr(attention, "median_ms", lambda runs, rep: dict.fromkeys(runs, 1.0))
    workload = dense_workload(1024, 64, causal=True)
    backends = {"naive": attention.DENSE_BACKENDS["naive"]}
    error: Exception = torch.OutOfMemoryError("CUDA out of memory")
    rows = attention.measure(backends, workload, rep=1)
    assert [(r.direction, r.outcome, r.ms) for r in rows] == [("forward", "oom", None), ("backward", "oom", None)]
    error = RuntimeError("no kernel\nlong story")
    rows = attention.measure(backends, workload, rep=1)
    assert [r.outcome for r in rows] == ["RuntimeError: no kernel"] * 2


def test_backends_alternate_unless_they_need_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[list[str]] = []

    def prepare(backend: Backend, *_: object) -> tuple[str, float]:
        return "", 100.0 if backend is attention.DENSE_BACKENDS["naive"] else 1.0

    def times(runs: dict[str, object], rep: float) -> dict[str, float]:
        turns.append([*runs])
        return dict.fromkeys(runs, 2.0)

    monkeypatch.setattr(attention, "prepare_pass", prepare)
    monkeypatch.setattr(attention, "median_ms", times)
    backends = {name: attention.DENSE_BACKENDS[name] for name in ("naive", "fa3", "ours")}
    rows = attention.measure(backends, dense_workload(1024, 64, causal=True), rep=1)
    assert turns == [["naive"], ["fa3", "ours"], ["naive"], ["ours"]]
    assert [(r.backend, r.direction) for r in rows] == [
        ("naive", "forward"), ("naive", "backward"), ("fa3", "forward"), ("ours", "forward"), ("ours", "backward")
    ]  # fmt: skip
    assert all(r.ms == 2.0 for r in rows)
    assert rows[0].peak_gib == 100.0


def test_markdown_has_a_column_a_backend() -> None:
    rows = [
        row("naive", 1024),
        row("ours", 1024),
        without_result("naive", 65536, "oom"),
        without_result("ours", 65536, "RuntimeError: no kernel"),
        row("ours", 1024, group=4),
        row("ours", 65536, section="packed documents", workload="3 documents", direction="backward"),
    ]
    text = markdown(rows, {"GPU": "made up", "commit": "0123abc"})
    lines = text.splitlines()
    assert "- GPU: `made up`" in lines
    assert "- commit: `0123abc`" in lines
    assert "## Dense, causal, forward" in lines
    assert "| d | workload | naive | ours |" in lines
    assert "| 64 | 1 × 1024 | 123 · 1.02 ms · 0.000977 | 123 · 1.02 ms · 0.000977 |" in lines
    assert "| 64 | 1 × 65536 | OOM | failed |" in lines
    assert "| 64 | 1 × 1024, 4 query heads per KV head | – | 123 · 1.02 ms · 0.000977 |" in lines
    assert "## Packed documents, causal, backward" in lines
    assert "- ours, d=64, 1 × 65536, forward: RuntimeError: no kernel" in lines
    tables = [line for line in lines if line.startswith("|")]
    assert all(a.count("|") == b.count("|") for a, b in pairwise(tables[:4]))


def test_csv_keeps_every_row(tmp_path: Path) -> None:
    write_csv(Row, [row(), without_result("naive", 65536, "oom")], tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["backend"], float(first["ms"])) == ("ours", 1.024)
    assert (second["outcome"], second["ms"]) == ("oom", "")


@pytest.mark.slow
def test_plot_draws_lines_and_marks_oom(tmp_path: Path) -> None:
    rows = [
        made
        for head_dim in (64, 128)
        for direction in ("forward", "backward")
        for made in (
            row("naive", 1024, head_dim=head_dim, direction=direction),
            without_result("naive", 4096, "oom", head_dim=head_dim, direction=direction),
            row("ours", 1024, head_dim=head_dim, direction=direction),
            row("ours", 4096, head_dim=head_dim, direction=direction),
        )
    ]
    rows.append(row("flex", 65536, section="packed documents"))  # `draw` leaves out results of packed documents
    figure = draw(rows, "made up")
    assert len(figure.axes) == 6  # for each head_dim, one plot for forward, one for backward and one for memory
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert_array_equal(lines["naive"].get_xdata(), [1024])
        assert_array_equal(lines["ours"].get_xdata(), [1024, 4096])
        assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [("OOM", 4096)]
    assert [label.get_text() for label in figure.axes[4].get_xticklabels()] == ["1k", "4k"]
    memory = figure.axes[4].get_lines()[-1]
    assert_array_equal(memory.get_ydata(), [1024 / 2**20, 4096 / 2**20])
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def bars(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_rates_have_a_group_of_bars_a_workload(tmp_path: Path) -> None:
    packed = {"section": "packed documents", "workload": "3 documents, log-normal"}
    rows = [
        row("naive", 1024, tflops=10.0),
        without_result("naive", 4096, "oom"),
        row("ours", 1024, tflops=20.0),
        row("ours", 4096, tflops=30.0),
        row("ours", 65536, tflops=40.0, **packed),
        row("ours", 1024, tflops=50.0, direction="backward"),
        row("ours", 1024, tflops=60.0, group=4),  # a row with grouped heads, which is not plotted
        row("ours", 2048, tflops=70.0, head_dim=128),
    ]
    figure = draw_rates(rows, "made up")
    (forward, wide), (backward, nothing) = (figure.axes[i : i + 2] for i in (0, 2))
    middle = 0.85 / 4  # distance from the center of a bar to the center of its group of two bars
    assert [bar.get_center()[0] for bar in bars(forward)] == pytest.approx([-middle, middle, 1 + middle, 2 + middle])
    assert [bar.get_height() for bar in bars(forward)] == [10.0, 20.0, 30.0, 40.0]
    assert [x.get_text() for x in backward.get_xticklabels()] == ["1 × 1024", "1 × 4096", "3 documents, log-normal"]
    assert [bar.get_height() for bar in bars(backward)] == [50.0]
    assert [bar.get_height() for bar in bars(wide)] == [70.0] and not bars(nothing)
    figure.savefig(tmp_path / "rates.png")
    assert (tmp_path / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_every_backend_has_a_style() -> None:
    assert STYLES.keys() == attention.DENSE_BACKENDS.keys()
    assert attention.PACKED_BACKENDS.keys() <= attention.DENSE_BACKENDS.keys()
    assert len(set(STYLES.values())) == len(STYLES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--head-dims", "512"], "from 1 to 256; got [512]", id="head-dim"),
        pytest.param(["--groups", "64"], "from 1 to 16, the number of query heads; got [64]", id="groups"),
        pytest.param(
            ["--groups", "64", "--model-dim", "4096"],
            "from 1 to 32, the number of query heads; got [64]",
            id="groups-of-more",
        ),
        pytest.param(["--model-dim", "64"], "largest of --head-dims, 128; got 64", id="model-dim"),
        pytest.param(["--packed-tokens", "0"], "--packed-tokens must be positive; got 0", id="packed-tokens"),
        pytest.param(["--batch-tokens", "0"], "--batch-tokens must be positive; got 0", id="batch-tokens"),
        pytest.param(["--seqlens", "0"], "--seqlens must be positive", id="seqlen"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without CUDA")
def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench_attention.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        attention.main()


SMALL_WORKLOADS = [
    pytest.param(Workload(64, 2, 256, causal=True), id="dense-causal"),
    pytest.param(Workload(128, 2, 256, causal=False), id="dense-full"),
    pytest.param(Workload(64, 1, 512, causal=True, documents=(300, 1, 211)), id="documents-causal"),
    pytest.param(Workload(64, 1, 512, causal=False, documents=(300, 1, 211)), id="documents-full"),
    pytest.param(Workload(128, 2, 256, causal=True, group=4), id="grouped-heads"),
]


def installed_backends(workload: Workload) -> dict[str, Backend]:
    backends = attention.PACKED_BACKENDS if workload.documents else attention.DENSE_BACKENDS
    return {name: backend for name, backend in backends.items() if attention.installed(name)}


@pytest.mark.gpu
@pytest.mark.parametrize("workload", SMALL_WORKLOADS)
def test_backends_compute_the_same(workload: Workload) -> None:
    kv_heads = workload.n_heads // workload.group
    q, k, v = (
        torch.randn(workload.batch, workload.seqlen, heads, workload.head_dim, dtype=torch.bfloat16, device=DEVICE)
        for heads in (workload.n_heads, kv_heads, kv_heads)
    )
    ends = workload.cu_seqlens()
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    exact, _ = attention_reference(flat_q, flat_k, flat_v, ends, ends, causal=workload.causal)
    baseline, _ = attention_reference(flat_q, flat_k, flat_v, ends, ends, causal=workload.causal, dtype=q.dtype)
    for name, backend in installed_backends(workload).items():
        into = {
            "batch heads tokens": lambda x: x.transpose(1, 2).contiguous(),
            "batch tokens heads": lambda x: x,
            "tokens heads": lambda x: x.flatten(0, 1),
        }[backend.layout]
        o = backend.prepare(workload)(into(q), into(k), into(v))
        if backend.layout == "batch heads tokens":
            o = o.transpose(1, 2)
        assert_as_accurate(name, o.reshape(exact.shape), exact, baseline)


@pytest.mark.gpu
@pytest.mark.parametrize("workload", SMALL_WORKLOADS)
def test_every_backend_is_measured(workload: Workload) -> None:
    backends = installed_backends(workload)
    results = attention.measure(backends, workload, rep=1)
    assert {result.backend for result in results} == backends.keys()
    for result in results:
        assert result.outcome == "ok"
        assert result.ms is not None and result.ms > 0
        assert result.peak_gib is not None and result.peak_gib > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_time_is_the_gpus_alone() -> None:
    x = torch.ones(1, device="cuda", requires_grad=True)

    def slow_to_launch() -> object:
        time.sleep(0.02)
        return torch.autograd.grad(x * 2, x)

    assert median_ms({"slow": captured(lambda: slow_to_launch)}, rep=5)["slow"] < 5


def test_candidates_run_in_random_order(monkeypatch) -> None:
    """The slow candidate heats the GPU, so the next run of another candidate takes twice as long."""
    clock, ran = 0.0, ["nothing"]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    def run(name: str, ms: float) -> None:
        nonlocal clock
        clock += ms * (2 if ran[-1] == "slow" and name != "slow" else 1)
        ran.append(name)

    driver = SimpleNamespace(get_empty_cache_for_benchmark=lambda: None, clear_cache=lambda _: None)
    monkeypatch.setattr("scripts.bench.timing.triton.runtime.driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    times = {"slow": 8.0, "one": 1.0, "other": 1.0}
    medians = median_ms({name: partial(run, name, ms) for name, ms in times.items()}, rep=40)
    assert medians == times
    counts = {name: ran.count(name) for name in times}
    assert counts == {"slow": 8, "one": 42, "other": 42}  # the counts include two warm-up runs of each candidate
