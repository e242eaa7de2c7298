"""scripts/bench/packing.py packs as many documents as its output says."""

import sys

import pytest

from scripts.bench import packing


def test_a_small_run_prints_its_table(monkeypatch, capsys):
    given = "--documents 5000 --seq-lens 2048 4096 --runs 1"
    monkeypatch.setattr(sys, "argv", ["bench_packing", *given.split()])
    packing.main()
    lines = capsys.readouterr().out.splitlines()
    lengths = packing.lengths_of(5000)
    assert 380 < sorted(lengths)[2500] < 420 and f"5,000 documents, {lengths.sum():,} tokens" in lines[1]
    for seq_len, line in zip((2048, 4096), lines[4:], strict=True):
        _, shown, rows, filled, *_ = (cell.strip() for cell in line.split("|"))
        assert shown == f"{seq_len:,}"
        share = lengths.sum() / (int(rows.replace(",", "")) * seq_len)
        assert float(filled.rstrip("%")) / 100 == pytest.approx(share, abs=1e-5) and share > 0.99


def test_impossible_numbers_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_packing", "--runs", "0"])
    with pytest.raises(SystemExit):
        packing.main()
    assert "--runs must be positive; got 0" in capsys.readouterr().err
