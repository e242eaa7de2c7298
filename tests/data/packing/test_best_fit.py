"""Best-fit decreasing packing counts every token that it drops, pads little, and depends only on its arguments."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.data.batches import PackedRows
from fa_train.data.datamodule import PackedDataModule, stdlib_data
from fa_train.data.packing import best_fit
from fa_train.data.packing.best_fit import best_fit_decreasing, load_plan, make_plan
from fa_train.data.packing.rows import IGNORE_INDEX
from fa_train.data.sources.corpus import StdlibCorpus
from tests.data.support.numbered import OPTIONS, PAD, NumberedSource, lay, make

policies = st.sampled_from(["split", "truncate", "drop"])
lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def naive_best_fit_decreasing(lengths, capacity):
    """Packs the pieces one by one, and returns the free space of each row."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity - length)
        else:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
    return sorted(rooms)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 50))
def test_it_is_best_fit_decreasing(lengths, capacity):
    row_of = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    room = capacity - np.bincount(row_of, lengths)
    assert sorted(room) == naive_best_fit_decreasing(lengths, capacity)


@settings(max_examples=300, deadline=None)
@given(lengths_of_documents, st.integers(1, 25), st.data(), policies)
def test_every_token_is_there_once_or_counted(lengths, seq_len, data, policy):
    max_doc_len = data.draw(st.none() | st.integers(1, seq_len))
    limit = max_doc_len or seq_len
    layout = lay(lengths, seq_len, policy, max_doc_len)
    rows = [layout.row(i) for i in range(layout.n_rows)]
    assert all(len(row.tokens) == len(row.labels) == len(row.position_ids) == seq_len for row in rows)
    laid = sorted(token for row in rows for token in row.tokens.tolist() if token != PAD)
    kept = {
        "split": lengths,
        "truncate": [min(n, limit) for n in lengths],
        "drop": [n if n <= limit else 0 for n in lengths],
    }[policy]
    assert laid == [i * 1000 + k for i, n in enumerate(kept) for k in range(n)]
    report = layout.report
    assert report.tokens_packed == len(laid) and report.rows == len(rows)
    lost = sum(lengths) - sum(kept)
    assert (report.tokens_truncated, report.tokens_dropped) == {
        "split": (0, 0), "truncate": (lost, 0), "drop": (0, lost)
    }[policy]  # fmt: skip
    n_long = sum(n > limit for n in lengths)
    assert (report.documents_split, report.documents_truncated, report.documents_dropped) == {
        "split": (n_long, 0, 0), "truncate": (0, n_long, 0), "drop": (0, 0, n_long)
    }[policy]  # fmt: skip
    assert (report.documents, report.documents_empty) == (len(lengths), lengths.count(0))
    assert sum(count for _, count in report.histogram) == len(lengths)
    labelled = sum(int((row.labels != IGNORE_INDEX).sum()) for row in rows)
    assert labelled == sum(max(0, n - 1) for n in kept), (
        "each kept token except the first of a document is a label once"
    )


@settings(max_examples=200, deadline=None)
@given(lengths_of_documents.filter(any), st.integers(1, 25), st.booleans())
def test_rows_have_correct_labels_positions_boundaries_and_lengths(lengths, seq_len, split):
    layout = lay(lengths, seq_len, "split" if split else "truncate")
    for index in range(layout.n_rows):
        row = layout.row(index)
        assert row.boundaries[0] == 0 and row.boundaries[-1] == seq_len and np.all(np.diff(row.boundaries) > 0)
        assert len(row.boundaries) - 1 <= layout.max_documents
        assert np.array_equal(layout.lengths(index), np.diff(row.boundaries))
        for start, end in zip(row.boundaries, row.boundaries[1:], strict=False):
            piece, labels = row.tokens[start:end], row.labels[start:end]
            is_padding = piece[0] == PAD
            assert np.array_equal(row.position_ids[start:end], np.arange(end - start) * (not is_padding))
            if is_padding:
                assert np.all(piece == PAD) and np.all(labels == IGNORE_INDEX) and end == seq_len
                continue
            assert np.all(np.diff(piece) == 1), "one document"
            document, last = divmod(int(piece[-1]), 1000)
            assert np.array_equal(labels[:-1], piece[1:])
            goes_on = split and last + 1 < lengths[document]
            assert labels[-1] == (piece[-1] + 1 if goes_on else IGNORE_INDEX)


def test_a_layout_equals_a_worked_example():
    layout = lay([3, 9, 5, 0, 2], seq_len=8)
    rows = [layout.row(i) for i in range(layout.n_rows)]
    # The document of 9 tokens continues in another row, so the last token of its first piece has a label.
    assert rows[0].tokens.tolist() == [*range(1000, 1008)] and rows[0].labels.tolist() == [*range(1001, 1009)]
    assert rows[1].tokens.tolist() == [*range(2000, 2005), 0, 1, 2]
    assert rows[1].labels.tolist() == [*range(2001, 2005), IGNORE_INDEX, 1, 2, IGNORE_INDEX]
    assert rows[1].boundaries.tolist() == [0, 5, 8]
    assert rows[2].tokens.tolist() == [4000, 4001, 1008, *[PAD] * 5]
    assert rows[2].boundaries.tolist() == [0, 2, 3, 8]
    assert [layout.lengths(index).tolist() for index in range(3)] == [[8], [5, 3], [2, 1, 5]]


@pytest.mark.parametrize("seq_len", [1024, 4096, 32768])
def test_log_normal_lengths_are_padded_at_most_1_percent(seq_len):
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6.5, 1.2, 20_000)).astype(np.int64)
    plan = make_plan(lengths, seq_len, seq_len, "split")
    report = best_fit.report_plan(plan, lengths, seq_len, seq_len, "split")
    assert report.tokens_packed == lengths.sum() and report.efficiency >= 0.99


@pytest.mark.parametrize("seq_len", [1024, 4096])
def test_the_standard_library_is_padded_at_most_1_percent(seq_len):
    lengths = np.array([path.stat().st_size + 2 for path in StdlibCorpus().paths])
    report = lay(lengths, seq_len).report
    assert report.tokens_packed == lengths.sum() and report.efficiency >= 0.99


def test_rows_are_shuffled_by_seed_and_epoch_alone():
    lengths = np.random.default_rng(0).integers(1, 30, 60)
    rows = PackedRows(make(lengths), held_out=False, shuffle=True)
    n = rows.per_epoch
    first, second = (rows.batch(start, n)["tokens"].view(n, 16) for start in (0, n))
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())
    fresh = PackedRows(make(lengths), held_out=False, shuffle=True)
    assert torch.equal(fresh.batch(n + 3, 1)["tokens"], second[3]), "rows must not depend on earlier calls"
    other = PackedRows(make(lengths, seed=2), held_out=False, shuffle=True).batch(0, n)["tokens"].view(n, 16)
    assert not torch.equal(first, other)


def test_a_plan_is_made_once_and_anew_for_other_arguments(tmp_path, monkeypatch):
    lengths = np.array([3, 9, 5, 2])
    first = load_plan(lengths, 8, 8, "split", tmp_path)
    assert np.array_equal(first, make_plan(lengths, 8, 8, "split"))
    made = []
    monkeypatch.setattr(best_fit, "make_plan", lambda *arguments: made.append(arguments) or make_plan(*arguments))
    assert np.array_equal(load_plan(lengths, 8, 8, "split", tmp_path), first) and not made
    for arguments in [(lengths + 1, 10, 8, "split"), (lengths, 9, 8, "split"), (lengths, 8, 7, "split"),
                      (lengths, 8, 8, "drop")]:  # fmt: skip
        assert np.array_equal(load_plan(*arguments, tmp_path), make_plan(*arguments))
    assert len(made) == 4


def test_a_plan_half_written_is_never_found(tmp_path, monkeypatch):
    def disk_full(path, plan):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", disk_full)
    with pytest.raises(OSError, match="No space left"):
        lay([3, 9], cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_plan_lies_next_to_the_tokenised_file(tmp_path):
    data = stdlib_data(str(tmp_path), **(OPTIONS | dict(seq_len=4096)), packing="best_fit")
    data.prepare_data()
    assert len(list(tmp_path.glob("*.arrow"))) == 1 and len(list(tmp_path.glob("*.plan.npy"))) == 2
    report = data.packing_report()
    rows = PackedRows(data, held_out=False, shuffle=True)
    real = sum(int((rows.batch(i, 1)["tokens"] != data.source.pad_id).sum()) for i in range(0, rows.per_epoch, 50))
    assert real >= 0.99 * 4096 * len(range(0, rows.per_epoch, 50))
    assert report.tokens_in == report.tokens_packed == data.source.documents(held_out=False).lengths.sum()


def test_the_report_gives_text_metrics_and_a_chart():
    report = lay([3, 9, 40, 0, 2], seq_len=8, long_documents="truncate").report
    lengths = ((1, 1), (2, 1), (4, 1), (8, 0), (16, 1), (32, 0), (64, 1))
    assert report.charts() == {"packing/document_lengths": lengths}
    assert report.metrics() == {
        "packing/documents": 5, "packing/documents_empty": 1, "packing/documents_split": 0,
        "packing/documents_truncated": 2, "packing/documents_dropped": 0, "packing/tokens_in": 54,
        "packing/tokens_packed": 21, "packing/tokens_truncated": 33, "packing/tokens_dropped": 0, "packing/rows": 3,
        "packing/seq_len": 8, "packing/efficiency": 21 / 24, "packing/documents_up_to_1": 1,
        "packing/documents_up_to_2": 1, "packing/documents_up_to_4": 1, "packing/documents_up_to_8": 0,
        "packing/documents_up_to_16": 1, "packing/documents_up_to_32": 0, "packing/documents_up_to_64": 1,
    }  # fmt: skip
    text = report.text()
    assert "packing best_fit: 3 rows of 8 tokens, 87.50% full" in text
    assert "documents 5: 1 empty, 0 split, 2 truncated, 0 dropped" in text
    assert "tokens 54: 21 packed, 33 truncated, 0 dropped" in text
    assert re.search(r"≤ 64 +1 █", text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(packing="worst_fit"), "data.packing must be concat or best_fit; got worst_fit"),
        (dict(packing="best_fit", max_doc_len=17), "data.max_doc_len must be null or from 1 to seq_len=16; got 17"),
        (dict(packing="best_fit", max_doc_len=0), "data.max_doc_len must be null or from 1 to seq_len=16; got 0"),
        (dict(packing="best_fit", long_documents="cut"), "data.long_documents must be one of split, .*; got cut"),
        (dict(packing="concat", max_doc_len=4), "data.packing=concat needs .*; got 4 and split"),
        (dict(packing="concat", long_documents="drop"), "data.packing=concat needs .*; got None and drop"),
        (dict(packing="best_fit", long_documents="drop"), "packing must keep at least one document; of "),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        PackedRows(PackedDataModule(NumberedSource([20, 30]), **(OPTIONS | changes)), held_out=False, shuffle=True)
