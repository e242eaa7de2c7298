"""In any range of consecutive rows of a mixture, each source has its requested share."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.data.batches import MicroBatches, PackedRows
from fa_train.data.datamodule import PackedDataModule
from fa_train.data.mixing import CYCLE, MixedRows, Mixture, interleave, rows_a_cycle
from tests.data.support.fitting import Killed, Recorder, fit
from tests.data.support.numbered import OPTIONS, PAD, Numbered, NumberedSource

BASE = 10**6  # the tokens of source number i start at i * BASE


class Shifted(Numbered):
    def __init__(self, lengths, base):
        super().__init__(lengths)
        self.base = base

    def __getitem__(self, index):
        return super().__getitem__(index) + self.base


class ShiftedSource(NumberedSource):
    def __init__(self, lengths, base):
        super().__init__(lengths)
        self.base = base

    def documents(self, *, held_out):
        return Shifted(self.lengths, self.base)


def make(weights=(3, 1), lengths=((5, 9, 16, 12, 3, 8, 14), (16, 16, 7)), **changes):
    names = "abc"[: len(weights)]
    sources = {name: ShiftedSource(x, i * BASE) for i, (name, x) in enumerate(zip(names, lengths, strict=True))}
    mixture = Mixture(sources, dict(zip(names, weights, strict=True)))
    return PackedDataModule(mixture, **(OPTIONS | dict(packing="best_fit") | changes))


def tokens_of(rows, first, count):
    return rows.batch(first, count)["tokens"].view(count, -1).numpy()


def sources_of(rows, first, count):
    return tokens_of(rows, first, count)[:, 0] // BASE


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_are_shared_by_weight(packing):
    rows = PackedRows(make(packing=packing), held_out=False, shuffle=True)
    for first in range(0, 400, 8):
        assert abs((sources_of(rows, first, 8) == 0).sum() - 6) <= 1, "the share must hold in every step"
    assert (sources_of(rows, 0, 400) == 0).mean() == 0.75


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=5))
def test_shares_hold_from_any_row_on(weights):
    shares = np.array(weights) / sum(weights)
    counts = rows_a_cycle(dict(zip("abcde", weights, strict=False)))
    assert counts.sum() == CYCLE and np.abs(counts / CYCLE - shares).max() <= 1 / CYCLE
    order = interleave(counts, counts)
    assert np.array_equal(np.bincount(order, minlength=len(weights)), counts)
    for source, count in enumerate(counts):
        so_far = np.cumsum(order == source)
        assert np.abs(so_far - count / CYCLE * np.arange(1, CYCLE + 1)).max() <= len(weights)


class Unshuffled:
    """A fake source with a single endless epoch."""

    max_documents = 1

    def locate(self, index):
        return self, index


def test_a_source_goes_on_in_the_next_round():
    sources = [Unshuffled(), Unshuffled()]
    rows = MixedRows(sources, np.array([0, 1, 0, 0]))
    located = [rows.locate(i) for i in range(12)]
    assert [row for source, row in located if source is sources[0]] == list(range(9))
    assert [row for source, row in located if source is sources[1]] == [0, 1, 2]
    assert [source is sources[1] for source, _ in located] == [False, True, False, False] * 3


def test_a_source_is_gone_through_before_it_starts_over():
    rows = PackedRows(make(weights=(1, 1)), held_out=False, shuffle=True)
    for source, lengths in enumerate([(5, 9, 16, 12, 3, 8, 14), (16, 16, 7)]):
        own = [row for row in tokens_of(rows, 0, 200) if row[0] // BASE == source]
        per_epoch = rows.rows.sources[source].per_epoch
        whole = sorted(source * BASE + i * 1000 + k for i, n in enumerate(lengths) for k in range(n))
        epochs = [np.concatenate(own[i : i + per_epoch]) for i in range(0, 50, per_epoch)]
        assert all(sorted(epoch[epoch != PAD]) == whole for epoch in epochs)
        assert any(not np.array_equal(epochs[0], epoch) for epoch in epochs), "each round has another order"


def test_a_step_has_the_same_rows_on_any_number_of_gpus():
    rows = PackedRows(make(), held_out=False, shuffle=True)

    def step(world_size, size, number):
        count = 8 // (size * world_size)
        ranks = [MicroBatches(rows, size, rank, world_size, step_rows=8) for rank in range(world_size)]
        batches = [ranks[rank][number * count + i] for i in range(count) for rank in range(world_size)]
        return sorted(row for batch in batches for row in batch["tokens"].view(-1, 16).tolist())

    far = CYCLE // 8 - 1  # the next step begins another cycle of the mixture
    for number in (0, far, far + 1):
        expected = sorted(tokens_of(rows, number * 8, 8).tolist())
        assert all(step(*split, number) == expected for split in [(1, 8), (2, 2), (4, 1), (8, 1)])


def test_the_seed_and_the_place_decide_alone():
    first, again, other = (PackedRows(make(seed=seed), held_out=False, shuffle=True) for seed in (1, 1, 2))
    assert np.array_equal(tokens_of(first, 50, 20), tokens_of(again, 50, 20)), "rows must not depend on earlier calls"
    assert not np.array_equal(tokens_of(first, 50, 20), tokens_of(other, 50, 20))
    three = make((3, 1, 4), ((5, 9, 16, 12, 3, 8, 14), (16, 16, 7), (16,)))
    rows = PackedRows(three, held_out=False, shuffle=True)
    alone = [[row.tolist() for row in tokens_of(x, 0, 160) if row[0] < BASE][:50] for x in (first, rows)]
    assert alone[0] == alone[1], "a source's order must not depend on the other sources"


def test_a_resumed_run_goes_on_where_it_stopped(tmp_path):
    whole = fit(tmp_path / "whole", Recorder(), make())
    with pytest.raises(Killed):
        fit(tmp_path / "cut", Recorder(die_at=3), make())
    rest = fit(tmp_path / "cut", Recorder(), make(), ckpt_path=tmp_path / "cut" / "last.ckpt")
    assert len(whole) == 24 and [x.tolist() for x in rest] == [x.tolist() for x in whole[12:]]


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        pytest.param({}, [], id="none"),
        pytest.param(
            {"weights": (1, 1)},
            ["a.percent=75.0; this run has 50.0", "b.percent=25.0; this run has 50.0"],
            id="weights",
        ),
        pytest.param({"lengths": ((16, 9), (16, 16, 7))}, ["a.rows=5; this run has 2"], id="data"),
        pytest.param({"lengths": ((9, 5, 16, 12, 3, 8, 14), (16, 16, 7))}, ["a are not those"], id="other-documents"),
    ],
)
def test_a_resumed_run_warns_if_the_mixture_has_changed(changes, warnings, tmp_path, capsys):
    with pytest.raises(Killed):
        fit(tmp_path, Recorder(die_at=3), make())
    capsys.readouterr()
    fit(tmp_path, Recorder(), make(**changes), tmp_path / "last.ckpt")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(printed) == len(warnings), printed
    for line, expected in zip(printed, warnings, strict=True):
        assert f" data.sources.{expected}" in line and ". The rows differ, so documents may be" in line


def test_validation_sees_every_row_of_every_source_once():
    rows = PackedRows(make(weights=(1, 9)), held_out=True, shuffle=False)
    seen = tokens_of(rows, 0, rows.per_epoch)
    assert len({tuple(row) for row in seen.tolist()}) == rows.per_epoch == sum(x.n_rows for x in rows.layouts.values())
    assert seen[0, 0] >= BASE, "the heavier source first"


def test_the_report_tells_shares_of_rows_and_of_tokens():
    data = make(weights=(3, 1), lengths=((16,), (8,)))
    report = data.packing_report()
    assert report.row_shares == {"a": 0.75, "b": 0.25}
    assert report.token_share("a") == pytest.approx(0.75 / 0.875) and report.epochs("b") == 6 * 8 / 4
    assert "a: 75.00% of rows, 85.71% of tokens, 36.00 epochs in this run\npacking best_fit: 1 rows" in report.text()
    numbers = report.metrics()
    assert numbers["packing/b/tokens_in"] == 8 and numbers["packing/b/row_share"] == 0.25
    drawn = {"packing/a/document_lengths": ((16, 1),), "packing/b/document_lengths": ((8, 1),)}
    assert report.charts() == drawn


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "data.sources must name at least one source; got none"),
        ({"a": 0}, "data.sources.a.weight must be a positive number; got 0"),
        ({"a": float("nan")}, "data.sources.a.weight must be a positive number; got nan"),
        ({"a": 1, "b": 1e-9}, "data.sources.b.weight must be at least 1 / 10000 of the sum of all weights; got 1e-09"),
    ],
)
def test_bad_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture({name: NumberedSource([3]) for name in weights}, weights)


def test_a_source_that_packing_keeps_nothing_of_is_named():
    data = make(lengths=((5,), (20, 30)), long_documents="drop")
    with pytest.raises(ValueError, match=r"packing must keep at least one document from data.sources.b; of "):
        PackedRows(data, held_out=False, shuffle=True)
