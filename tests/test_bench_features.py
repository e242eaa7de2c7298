"""scripts/bench_features.py: shares of work as the kernels' own schedule counts them, and its arguments."""

import pytest
import torch

from kernels.flash_attention.schedule import build_schedule
from scripts.bench_features import features, log_normal_lengths, parse_arguments, visible_pairs


def test_pairs_are_the_schedules():
    for feature in features(seqlen=2048, n_heads=4, window=100):
        cu = torch.tensor([0, *feature.lengths]).cumsum(0).to(torch.int32)
        masks = {name: feature.arguments[name] for name in ("causal", "window_size") if name in feature.arguments}
        schedule = build_schedule(cu, cu, 2048, 2048, **masks)
        assert feature.pairs == (schedule.key_end - schedule.key_start).sum().item(), feature.name


@pytest.mark.parametrize(("length", "left"), [(1, 0), (5, 0), (5, 4), (5, 9), (7, 3)])
def test_pairs_in_a_window(length, left):
    assert visible_pairs(length, left, causal=True) == sum(min(i, left) + 1 for i in range(length))


def test_documents_fill_the_row():
    lengths = log_normal_lengths(65536)
    assert sum(lengths) == 65536 and lengths == log_normal_lengths(65536) and len(set(lengths)) > 10


@pytest.mark.parametrize("arguments", [["--heads", "6"], ["--seqlen", "1000"]], ids=str)
def test_bad_arguments_end_with_a_message(arguments, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert "must be a multiple of" in capsys.readouterr().err
