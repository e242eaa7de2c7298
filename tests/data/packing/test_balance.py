"""Each data row of a step goes to exactly one rank, and all ranks get nearly equal work."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.data.batches import MicroBatches, PackedRows
from fa_train.data.packing.balance import deal
from fa_train.flops import attention_pairs
from fa_train.models.config import Family
from tests.data.support.fitting import Recorder, fit
from tests.data.support.numbered import lay, make
from tests.memory.support.small import levers, small_gpt


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_every_row_is_dealt_once_and_the_same_again(accumulation, world_size, size, data):
    n = accumulation * world_size * size
    costs = np.array(data.draw(st.lists(st.integers(0, 100), min_size=n, max_size=n)))
    dealt = deal(costs, size, world_size)
    assert dealt.shape == (accumulation, world_size, size)
    assert sorted(dealt.ravel().tolist()) == list(range(n))
    assert np.array_equal(dealt, deal(costs.copy(), size, world_size))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_and_rounds_have_like_work(size):
    generator = np.random.default_rng(0)
    lengths = np.maximum(1, generator.lognormal(6.5, 1.2, 10_000)).astype(np.int64)
    layout = lay(lengths, 4096)
    costs = generator.permutation([(layout.lengths(index) ** 2).sum() for index in range(layout.n_rows)])
    for first in range(0, 10 * 128, 128):
        step = costs[first : first + 128]
        dealt, in_order = (step[x].sum(axis=2) for x in (deal(step, size, 4), np.arange(128).reshape(-1, 4, size)))
        # If ranks wait for each other once per step, the work of each rank in a whole step must be nearly equal.
        assert dealt.sum(axis=0).max() <= 1.01 * dealt.sum(axis=0).mean()
        # If ranks wait for each other after every micro-batch, the work in each micro-batch must be nearly equal.
        waits = [work.max(axis=1).sum() / work.mean(axis=1).sum() for work in (dealt, in_order)]
        assert waits[0] <= 1.05 and waits[1] >= 1.15


def test_a_known_deal():
    # Each micro-batch has an expensive row and a cheap row, with costs 9 + 1, 8 + 2, 7 + 3 or 6 + 4.
    dealt = deal(np.array([1, 2, 3, 4, 6, 7, 8, 9]), 2, 2)
    assert {frozenset(pair) for pair in dealt.reshape(-1, 2).tolist()} == {
        frozenset(pair) for pair in ([0, 7], [1, 6], [2, 5], [3, 4])
    }


def test_a_step_has_the_same_rows_on_any_number_of_gpus():
    rows = PackedRows(make(np.random.default_rng(0).integers(1, 30, 60)), held_out=False, shuffle=True)

    def step(world_size, size, number):
        count = 8 // (size * world_size)
        ranks = [MicroBatches(rows, size, rank, world_size, step_rows=8) for rank in range(world_size)]
        batches = [ranks[rank][number * count + i] for i in range(count) for rank in range(world_size)]
        return sorted(row for batch in batches for row in batch["tokens"].view(-1, 16).tolist())

    for number in (0, 5):  # step 5 contains the end of one epoch and the start of the next
        expected = sorted(rows.batch(number * 8, 8)["tokens"].view(-1, 16).tolist())
        for world_size, size in [(1, 8), (1, 1), (2, 2), (4, 1), (8, 1)]:
            assert step(world_size, size, number) == expected


def test_steps_are_dealt_by_squared_lengths():
    # A row of one document costs 16^2 = 256. A row of eight documents of two tokens costs 8 * 2^2 = 32.
    data = make([16, 16, *[2] * 48], batch_size=8, micro_batch_size=1)
    rows = PackedRows(data, held_out=False, shuffle=True)
    lengths = [rows.lengths(index) for index in range(rows.per_epoch)]
    assert sorted((row**2).sum() for row in lengths) == [32] * 6 + [256] * 2
    for step in range(4):  # each step is one epoch
        ranks = [MicroBatches(rows, 1, rank, 2, step_rows=8) for rank in range(2)]
        edges = [[rank[step * 4 + index]["cu_seqlens"].numpy() for rank in ranks] for index in range(4)]
        costs = [[(np.diff(x) ** 2).sum() for x in micro_batch] for micro_batch in edges]
        assert costs == [[256, 256], *[[32, 32]] * 3]
    unmasked = PackedRows(make([16, 2] * 8, document_mask=False), held_out=False, shuffle=False)
    assert np.array_equal(unmasked.deal(0, 8, 2, 2).ravel(), np.arange(8)), "without the mask every row costs the same"


def test_concatenated_rows_are_balanced_too():
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(3, 1.5, 2000)).astype(np.int64)
    data = make(lengths, packing="concat", seq_len=128, batch_size=64)
    rows = PackedRows(data, held_out=False, shuffle=True)
    for step in range(2 * rows.per_epoch // 64):  # the second epoch has another order of documents
        dealt = rows.deal(step * 64, 64, 2, 4)
        assert sorted(dealt.ravel().tolist()) == list(range(step * 64, step * 64 + 64))
        work = np.vectorize(lambda row: (np.diff(rows.row(row).boundaries) ** 2).sum())(dealt).sum(axis=2)
        assert work.sum(axis=0).max() <= 1.02 * work.sum(axis=0).mean(), "over a step"
        assert work.max(axis=1).sum() <= 1.1 * work.mean(axis=1).sum(), "at each micro-batch"


def test_costs_count_the_windows_of_the_layers():
    windows = [16, 16]
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(3, 1.5, 4000)).astype(np.int64)
    rows = PackedRows(make(lengths, seq_len=256), held_out=False, shuffle=True, windows=windows)
    for step in range(rows.per_epoch // 64):
        dealt = rows.deal(step * 64, 64, 2, 4)
        work = np.vectorize(
            lambda row: attention_pairs(windows, torch.from_numpy(np.diff(rows.row(row).boundaries))).item()
        )(dealt).sum(axis=2)
        assert work.sum(axis=0).max() <= 1.03 * work.sum(axis=0).mean(), "over a step"
        assert work.max(axis=1).sum() <= 1.04 * work.mean(axis=1).sum(), "at each micro-batch"


def test_a_run_deals_rows_by_the_windows_of_its_model(tmp_path):
    recorder = Recorder()
    recorder.model = small_gpt(levers(), torch.device("cpu"), n_layers=2, family=Family(windows=[10, None]))
    data = make([16, 2] * 40)
    data.source.min_vocab_size = 1  # any value: no model is called
    fit(tmp_path, recorder, data)
    assert recorder.trainer.train_dataloader.dataset.rows.windows == [10, None]


@pytest.mark.parametrize("document_mask", [True, False])
def test_every_batch_says_how_long_a_tokens_document_is(document_mask):
    """mean_seqlen is the same integer in every batch, so that a model is compiled only once."""
    # three rows have two documents each, and one row has four documents
    data = make([8] * 6 + [4] * 4, document_mask=document_mask)
    batches = [MicroBatches(PackedRows(data, held_out=False, shuffle=True), 1, 0, 1)[i] for i in range(4)]
    # the mean over tokens is (48 * 8 + 16 * 4) / 64 = 7
    assert {batch["mean_seqlen"] for batch in batches} == {7 if document_mask else 16}
    # mean_seqlen is an int and not a tensor, because Lightning would move a tensor to the GPU
    assert all(type(batch["mean_seqlen"]) is int for batch in batches)
