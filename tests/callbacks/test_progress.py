"""Tests what the progress bar shows in terminals of different widths."""

import pytest

from fa_train.callbacks.progress import StepProgress


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_a_bar_shows_steps_times_and_all_metrics_in_terminals_of_each_width(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    metrics = "loss 2.7307  val 2.8941 (step 90)  3,344 tokens/s  mfu 45.0%  peak 70.84 GiB  host 10.8 GiB"
    progress = StepProgress()
    progress._bar.update(progress._task, total=100000, completed=99999, description=metrics)
    with progress._bar.console.capture() as shown:
        progress._bar.console.print(progress._bar.get_renderable())
    words = shown.get().split()
    assert "99999/100000" in words and words.count("-:--:--") + words.count("0:00:00") == 2
    assert not set(metrics.split()) - set(words)
