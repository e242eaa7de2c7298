"""Loss masks stay aligned with tokens in the cache, after best-fit packing and after concatenation."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.data.batches import PackedRows
from fa_train.data.datamodule import sft_data
from fa_train.data.packing.best_fit import BestFit
from fa_train.data.packing.concat import Concatenation
from fa_train.data.packing.rows import IGNORE_INDEX
from fa_train.data.sources.corpus import TextCorpus
from fa_train.data.tokens.encoding import TextEncoder
from fa_train.data.tokens.store import StoredMask, TokenizedCorpus
from fa_train.data.tokens.tokenizer import ByteTokenizer
from tests.data.support.chats import many_chats, save_tokenizer, write_jsonl
from tests.data.support.numbered import OPTIONS, PAD, Numbered


class Masked(Numbered):
    """Numbered documents with loss masks.

    The loss masks are divided into two arrays, because the token cache also stores loss masks in several arrays.
    """

    def __init__(self, masks):
        super().__init__([len(mask) for mask in masks])
        half = len(masks) // 2
        chunks = [np.concatenate([[], *part]).astype(bool) for part in (masks[:half], masks[half:])]
        halves = self.lengths[:half], self.lengths[half:]
        start = np.concatenate([np.cumsum([0, *lengths])[:-1] for lengths in halves])
        chunk = np.arange(len(masks)) >= half
        self.loss_mask = StoredMask(chunks, chunk.astype(int), start.astype(int), self.lengths)


masks_of_documents = st.lists(st.lists(st.booleans(), max_size=20), min_size=1, max_size=12).filter(
    lambda masks: sum(map(len, masks)) > 0
)


@settings(max_examples=200, deadline=None)
@given(masks_of_documents, st.integers(1, 12), st.sampled_from(["concat", "split", "truncate", "drop"]))
def test_exactly_the_tokens_that_are_trained_on_are_labels(masks, seq_len, how):
    documents = Masked(masks)
    if how == "concat":
        layout = Concatenation(documents, seq_len, PAD)
    else:
        layout = BestFit(documents, seq_len, PAD, max_doc_len=None, long_documents=how, cache_dir=None)
    epoch = layout.epoch(np.random.default_rng(0))
    rows = [epoch.row(i) for i in range(layout.n_rows)]
    labels = [label for row in rows for label in row.labels.tolist() if label != IGNORE_INDEX]
    kept = {"concat": masks, "split": masks, "truncate": [mask[:seq_len] for mask in masks],
            "drop": [mask if len(mask) <= seq_len else [] for mask in masks]}[how]  # fmt: skip
    expected = [1000 * i + k for i, mask in enumerate(kept) for k, trained_on in enumerate(mask) if trained_on and k]
    assert sorted(labels) == expected
    for row in rows:
        has_label = row.labels != IGNORE_INDEX
        assert np.array_equal(row.labels[has_label], row.tokens[has_label] + 1)
    counts = layout.report.labels
    assert (counts.labels_in, counts.labels_packed) == (sum(sum(mask[1:]) for mask in masks), len(labels))


def test_documents_and_pieces_without_a_label_are_counted():
    masks = [[0] * 6 + [1] * 2, [0] * 3, [0, 1], [1, 0], []]
    # {policy: (number of pieces without a label, number of packed labels)}
    expected = {"split": (3, 3), "truncate": (3, 1), "drop": (2, 1)}
    for policy, (without, packed) in expected.items():
        layout = BestFit(Masked(masks), 4, PAD, max_doc_len=None, long_documents=policy, cache_dir=None)
        counts = layout.report.labels
        assert (counts.pieces_unlearned, counts.labels_in, counts.labels_packed) == (without, 3, packed)
    assert "labels 3: 1 packed, 2 lost; 2 documents or pieces without labels" in layout.report.text()
    assert layout.report.metrics()["packing/pieces_unlearned"] == 2
    counts = Concatenation(Masked(masks), 4, PAD).report.labels
    assert (counts.pieces_unlearned, counts.labels_packed) == (2, 3)


@pytest.mark.parametrize(
    ("policy", "max_doc_len", "fate"),
    [
        pytest.param("concat", None, "seq_len=4; they are split, and a part does not see", id="concat"),
        pytest.param("split", None, "seq_len=4; they are split, and a part does not see", id="split"),
        pytest.param("truncate", None, "seq_len=4; their ends are cut off", id="truncate"),
        pytest.param("drop", None, "seq_len=4; they are dropped", id="drop"),
        pytest.param("split", 3, "data.max_doc_len=3; they are split, and a part does not see", id="max-doc-len"),
    ],
)
def test_a_warning_counts_chats_that_do_not_fit(policy, max_doc_len, fate):
    def report(masks):
        documents, seq_len = Masked(masks), 4
        if policy == "concat":
            return Concatenation(documents, seq_len, PAD).report
        given = {"max_doc_len": max_doc_len, "long_documents": policy, "cache_dir": None}
        return BestFit(documents, seq_len, PAD, **given).report

    long = [1] * 6, [0] * 5
    assert f"\n  warning: 2 of 4 chats are longer than {fate}" in report([*long, [0, 1, 1], []]).text()
    assert "warning" not in report([[0, 1, 1], [0, 1], []]).text(), "no chat is too long"


def test_texts_that_do_not_fit_cause_no_warning():
    layout = BestFit(Numbered([9]), 4, PAD, max_doc_len=None, long_documents="split", cache_dir=None)
    assert layout.report.documents_long == 1 and "warning" not in layout.report.text()


def answers(hf, tokens):
    return sorted(hf.decode(tokens).split("<|im_end|>")[:-1])


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("n", [7, 200])
def test_every_answer_of_a_file_becomes_labels(tmp_path, packing, n):
    path = write_jsonl(tmp_path / "chats.jsonl", many_chats(n))
    options = OPTIONS | dict(seq_len=128, packing=packing)
    data = sft_data(str(path), save_tokenizer(tmp_path / "tokenizer"), None, str(tmp_path / "cache"), **options)
    hf, every = data.source.encoder.tokenizer.hf, [chat["messages"][1]["content"] for chat in many_chats(n)]
    held_out = data.source.documents(held_out=True)
    kept_back = answers(hf, np.concatenate([held_out[i][held_out.loss_mask[i]] for i in range(len(held_out))]))
    assert 0 < len(kept_back) < 20 and set(kept_back) < set(every)
    # keep concatenated rows in order, because an answer can continue in the next row
    rows = PackedRows(data, held_out=False, shuffle=packing == "best_fit")
    batches = [rows.batch(index, 1) for index in range(rows.per_epoch)]
    labels = [label for batch in batches for label in batch["labels"].tolist() if label != IGNORE_INDEX]
    assert answers(hf, labels) == sorted(answer for answer in every if answer not in kept_back)
    assert data.packing_report().labels.pieces_unlearned == 0
    # the column names must not change, so that caches of older versions stay readable
    for shard in data.source.prepare().glob("*.arrow"):
        assert pa.ipc.open_file(shard).schema.names == ["tokens", "held_out", "learned"]


@pytest.mark.parametrize(("mask", "labels"), [([0, 0, 0, 0, 1], 1), ([0, 0, 0], 0)], ids=["cut-off", "no-label"])
def test_training_documents_without_a_label_are_refused(mask, labels):
    layout = BestFit(Masked([mask, mask[:2]]), 4, PAD, max_doc_len=None, long_documents="truncate", cache_dir=None)
    data = SimpleNamespace(
        layouts=lambda held_out: {"": layout}, document_mask=True, reset_positions=True, seq_len=4
    )  # fmt: skip
    message = f"packing must keep at least one label; got none of {labels}. .* raise seq_len=4 or data.max_doc_len"
    with pytest.raises(ValueError, match=message):
        PackedRows(data, held_out=False, shuffle=True)


def test_text_has_no_mask_on_disk(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    corpus = TextCorpus(str(tmp_path / "a.txt"), "text")
    source = TokenizedCorpus(corpus, TextEncoder(ByteTokenizer()), str(tmp_path / "cache"))
    assert source.documents(held_out=False).loss_mask is None
    [shard] = source.prepare().glob("*.arrow")
    assert pa.ipc.open_file(shard).schema.names == ["tokens", "held_out"]
