"""Packing loses no token, takes no label from another document, and reports the right document boundaries."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.data.packing.collate import collate
from fa_train.data.packing.concat import ConcatenatedEpoch, max_documents_in_row, n_rows
from fa_train.data.packing.rows import IGNORE_INDEX
from tests.data.support.numbered import PAD, Numbered


def pack_all(lengths, seq_len, seed):
    documents = Numbered(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    epoch = ConcatenatedEpoch(documents, order, np.cumsum(documents.lengths[order]), seq_len, PAD)
    return epoch, [epoch.row(index) for index in range(n_rows(sum(lengths), seq_len))]


lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda x: sum(x) > 0)


@settings(max_examples=300, deadline=None)
@given(lengths_of_documents, st.integers(1, 25), st.integers(0, 5))
def test_every_token_is_there_once_and_labels_stay_within_documents(lengths, seq_len, seed):
    epoch, rows = pack_all(lengths, seq_len, seed)
    stream = np.concatenate([epoch.documents[i] for i in epoch.order])
    laid = np.concatenate([row.tokens for row in rows])
    n_real = (laid != PAD).sum()
    # the last token of the stream can be a label without being an input of any row
    assert n_real in (len(stream), len(stream) - 1)
    assert np.array_equal(laid[:n_real], stream[:n_real])
    labelled = 0
    for row in rows:
        for token, label in zip(row.tokens, row.labels, strict=True):
            if label != IGNORE_INDEX:
                assert label == token + 1, "the next token of the same document"
                labelled += 1
    assert labelled == sum(max(0, length - 1) for length in lengths), (
        "each token except the first of a document is a label once"
    )


@settings(max_examples=200, deadline=None)
@given(lengths_of_documents, st.integers(1, 25), st.integers(0, 5))
def test_rows_have_correct_boundaries_and_positions(lengths, seq_len, seed):
    epoch, rows = pack_all(lengths, seq_len, seed)
    assert all(np.array_equal(epoch.lengths(i), np.diff(row.boundaries)) for i, row in enumerate(rows))
    bound = max_documents_in_row(np.array(lengths), seq_len)
    for row in rows:
        assert row.boundaries[0] == 0 and row.boundaries[-1] == seq_len and np.all(np.diff(row.boundaries) > 0)
        assert len(row.boundaries) - 1 <= bound
        for start, end in zip(row.boundaries, row.boundaries[1:], strict=False):
            assert np.array_equal(row.position_ids[start:end], np.arange(end - start))
            piece = row.tokens[start:end]
            assert np.all(piece == PAD) or np.all(np.diff(piece) == 1), "one document, or padding"
            assert row.labels[end - 1] == IGNORE_INDEX or end == seq_len


@pytest.mark.parametrize("seed", range(4))
def test_documents_of_whole_rows_share_none(seed):
    lengths = [8, 16, 0, 8]
    assert max_documents_in_row(np.array(lengths), 8) == 1 < max_documents_in_row(np.array([8, 15]), 8)
    _, rows = pack_all(lengths, 8, seed)
    assert [row.boundaries.tolist() for row in rows] == [[0, 8]] * 4


def test_empty_documents_do_not_count_in_a_row():
    assert max_documents_in_row(np.array([0] * 9 + [8, 15]), 8) == max_documents_in_row(np.array([8, 15]), 8) < 8


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("reset_positions", [True, False])
def test_a_batch_is_rows_end_to_end(document_mask, reset_positions):
    _, rows = pack_all([5, 3, 9, 2], seq_len=8, seed=0)
    batch = collate(rows[:2], 4, 7, document_mask=document_mask, reset_positions=reset_positions)
    assert batch.pop("mean_seqlen") == 7
    assert {name: x.shape for name, x in batch.items()} == {
        "tokens": (16,), "labels": (16,), "position_ids": (16,), "cu_seqlens": (9,)
    }  # fmt: skip
    assert batch["cu_seqlens"].dtype == torch.int32 and batch["tokens"].dtype == torch.int64
    ends = np.concatenate([rows[0].boundaries, rows[1].boundaries[1:] + 8]) if document_mask else np.array([0, 8, 16])
    assert batch["cu_seqlens"].tolist() == [*ends, *[16] * (9 - len(ends))]
    positions = [row.position_ids if reset_positions else np.arange(8) for row in rows[:2]]
    assert batch["position_ids"].tolist() == np.concatenate(positions).tolist()


def test_rows_share_one_token_and_the_last_is_padded():
    _, rows = pack_all([10], seq_len=4, seed=0)
    assert [row.tokens.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PAD, PAD]]
    assert [row.labels.tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, *[IGNORE_INDEX] * 3]]
