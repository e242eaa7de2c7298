"""Tests the tables, the picture and the charts of an ablation."""

import pytest

from scripts.ablation.formula import Formula
from scripts.ablation.report import chart, draw, in_order, markdown, tables
from scripts.ablation.results import Job, Result, Settings

GIB = 2**30
FORMULA = Formula(4, 8, GIB, 100)
SETTINGS = Settings([], "nano, 32-true", "no GPU", 80 * GIB, FORMULA)
HEAD = {"command": "python train.py", "GPU": "none"}


def ok(**numbers):
    return Result("ok", **{"peak_gib": 1.0, "step_ms": 10.0, "tokens_per_s": 102400.0, "tflops": 1.5} | numbers)


RESULTS = {
    Job("mine", 1024): ok(),
    Job("flash", 1024): ok(mfu=0.5, timed_steps=20),
    Job("naive", 4096): Result("skipped: 2048 ran out of memory"),
    Job("naive", 1024): ok(peak_gib=2.0, reserved_gib=2.5, mfu=0.25),
    Job("naive", 2048): Result("oom", 79.0, 80.0),
}
ROWS = in_order(RESULTS)


def test_charts_mark_where_memory_ran_out():
    peak, tokens = chart(ROWS, "peak_gib", 80 * GIB), chart(ROWS, "tokens_per_s", 80 * GIB)
    assert peak.keys == tokens.keys == ["naive", "naive OOM", "flash", "mine"]
    assert (peak.xs, peak.ys) == ([[1024], [2048], [1024], [1024]], [[2.0], [80.0], [1.0], [1.0]])
    assert tokens.ys[1] == [0.0]
    assert chart(ROWS, "mfu", 80 * GIB).keys == ["naive", "naive OOM", "flash"]


def test_the_tables_have_every_result_and_the_formula():
    text = markdown(ROWS, SETTINGS, HEAD)
    lines = [line for line in text.splitlines() if line.startswith(("| naive", "| flash", "| mine"))]
    assert lines == [
        "| naive | 1024 | ok | 2 | 2.5 | 10 | 102400 | 1.5 | 0.25 | – | 0 |",
        "| naive | 2048 | oom | 79 | 80 | – | – | – | – | – | 1 |",
        "| naive | 4096 | skipped: 2048 ran out of memory | – | – | – | – | – | – | – | 0 |",
        "| flash | 1024 | ok | 1 | – | 10 | 102400 | 1.5 | 0.5 | 20 | 0 |",
        "| mine | 1024 | ok | 1 | – | 10 | 102400 | 1.5 | – | – | 0 |",
    ]
    assert "- command: `python train.py`" in text and "a training step of nano, 32-true" in text
    _, formula = tables(ROWS, SETTINGS)
    assert formula.rows[0] == [1024, 128.0, 4 * 4 * 1024**2 / GIB, FORMULA.peak(1024) / GIB, 2.0, "may fit"]
    assert [row[-2] for row in formula.rows] == [2.0, None, None]
    fails_at = FORMULA.fails_at(SETTINGS.device_bytes)
    _, formula = tables([(Job("flash", n), ok()) for n in (fails_at - 1, fails_at)], SETTINGS)
    assert [row[-2:] for row in formula.rows] == [[None, "may fit"], [None, "must fail"]]


def test_the_picture_shows_formula_failures_and_where_naive_must_fail():
    axes = draw(ROWS, SETTINGS, "title").axes[0]
    assert [text.get_text() for text in axes.texts] == ["OOM"]
    assert "naive must fail from here" not in [line.get_label() for line in axes.get_lines()], "all lengths may fit"
    axes = draw([(Job("naive", n), ok()) for n in (1024, 65536)], SETTINGS, "title").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "64k"]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["naive must fail from here"].get_xdata()[0] == FORMULA.fails_at(80 * GIB)
    [x], [y] = lines["naive, predicted least"].get_data()
    assert (x, y) == (1024, FORMULA.peak(1024) / GIB), "65536 tokens need more than four times the memory"


@pytest.mark.parametrize(
    ("result", "memory", "mfu"),
    [
        pytest.param(Result("oom"), *[["OOM", "no job was measured"]] * 2, id="oom"),
        pytest.param(Result("failed: x"), *[["no job was measured"]] * 2, id="failed"),
        pytest.param(ok(), [], ["unknown on this device"], id="ok"),
    ],
)
def test_a_panel_without_a_point_says_why(result, memory, mfu):
    first, _, last = draw([(Job("naive", 1024), result)], SETTINGS, "title").axes
    assert [[text.get_text() for text in axes.texts] for axes in (first, last)] == [memory, mfu]
