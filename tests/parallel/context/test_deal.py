"""Tests which tokens each rank of a context group holds, how the work is divided, and how traffic is limited."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.parallel.context import whole_documents as whole_module
from fa_train.parallel.context.deal import (
    CHUNK_SIZES,
    MAX_PADDING,
    TOLERANCE,
    Deal,
    causal_ranges,
    chunk_size_for,
    deal,
    deal_whole_documents,
    possible_swaps,
    received_chunks,
    work_of_chunks,
)
from fa_train.parallel.context.traffic import traffic
from tests.parallel.context.support.documents import DOCUMENTS, WINDOWS, boundaries_of, visible


@pytest.fixture
def in_chunks(monkeypatch):
    """Makes `deal` give chunks to the ranks, even if it could give them whole documents."""
    monkeypatch.setattr(whole_module, "MAX_DOCUMENTS", 0)


def log_normal(total):
    random, lengths = np.random.default_rng(0), []
    while sum(lengths) < total:
        lengths.append(min(int(random.lognormal(7, 1.2)) + 1, total - sum(lengths)))
    return boundaries_of(lengths)


def balance(dealt, boundaries):
    start, end = causal_ranges(boundaries, dealt.total)
    work = [(end - start)[dealt.positions(rank)].sum() for rank in range(dealt.ranks)]
    return max(work) / np.mean(work)


def received(dealt, boundaries):
    """Returns which fraction of the other ranks' keys a rank receives, averaged over all ranks.

    A result of 1 means that each rank gathers all keys.
    """
    sizes = [sum(traffic(dealt, boundaries, rank, None).sizes[1]) for rank in range(dealt.ranks)]
    return sum(sizes) / (dealt.total * (dealt.ranks - 1))


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, WINDOWS)
def test_ranges_are_those_of_the_definition(lengths, window):
    boundaries, total = boundaries_of(lengths), sum(lengths) + 3
    start, end = causal_ranges(boundaries, total, window)
    mask = np.zeros((total, total), bool)
    for first, last in itertools.pairwise(boundaries):
        for query in range(first, last):
            mask[query, max(first, 0 if window is None else query - window + 1) : query + 1] = True
    assert np.array_equal(visible(start, end, total), mask)


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.integers(1, 5), st.integers(1, 40))
def test_each_token_has_one_owner_and_ranks_hold_equal_numbers(lengths, ranks, tail):
    total = sum(lengths) + tail
    dealt = deal(boundaries_of(lengths), total, ranks)
    positions = [dealt.positions(rank) for rank in range(ranks)]
    assert np.array_equal(np.sort(np.concatenate(positions)), np.arange(dealt.total))
    assert {len(held) for held in positions} == {dealt.total // ranks}
    assert total <= dealt.total < total + ranks * chunk_size_for(total, ranks)
    for rank, held in enumerate(positions):
        assert np.array_equal(dealt.owner_of(held), np.full(len(held), rank))


@pytest.mark.parametrize("total", [8192, 131072, 100_000])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_long_stream_is_hardly_padded(total, ranks):
    size = chunk_size_for(total, ranks)
    assert size == CHUNK_SIZES[0] or -(-total // (ranks * CHUNK_SIZES[0])) * ranks * CHUNK_SIZES[0] > total * (
        1 + MAX_PADDING
    )
    assert deal(np.array([0, total]), total, ranks).total <= total * (1 + MAX_PADDING)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("documents", ["one", "log-normal"])
@pytest.mark.parametrize("total", [65_536, 135_168])
def test_work_of_chunks_is_balanced(total, documents, ranks, in_chunks):
    boundaries = np.array([0, total]) if documents == "one" else log_normal(total)
    dealt = deal(boundaries, total, ranks)
    assert balance(dealt, boundaries) <= 1 + TOLERANCE
    contiguous = deal(boundaries, total, ranks, balanced=False)
    assert balance(contiguous, boundaries) > 1.05, "the balanced deal has something to do"


@pytest.mark.parametrize("ranks", [2, 8])
def test_documents_limit_what_is_received(ranks, in_chunks):
    short = boundaries_of([512] * 264)
    assert received(deal(short, 135_168, ranks), short) < 0.005
    boundaries = log_normal(135_168)
    assert received(deal(boundaries, 135_168, ranks), boundaries) < 0.1


def test_chunks_of_whole_documents_change_their_rank(in_chunks):
    """The second half of the stream has four documents of four chunks each, which need almost all of the work. To
    balance the work, the plan swaps whole documents between the ranks.
    """
    size = CHUNK_SIZES[0]
    short, long = [size // 4] * 4 * 16, [4 * size] * 4
    boundaries = boundaries_of([*short, *long])
    dealt = deal(boundaries, 32 * size, 2)
    assert balance(dealt, boundaries) <= 1 + TOLERANCE
    assert received(dealt, boundaries) == 0
    assert received(deal(boundaries, 32 * size, 2, balanced=False), boundaries) == 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("total", [131_072, 98_304])  # 98,304 tokens need no padding
def test_short_documents_stay_whole(total, ranks):
    lengths = np.random.default_rng(0).integers(64, 513, total // 64)
    boundaries = np.append(lengths.cumsum()[lengths.cumsum() < total], total)
    boundaries = np.append(0, boundaries)
    dealt = deal(boundaries, total, ranks)
    assert received(dealt, boundaries) == 0
    assert balance(dealt, boundaries) <= 1 + 2 * whole_module.AIM


@settings(max_examples=100, deadline=None)
@given(DOCUMENTS, st.integers(1, 5), st.integers(0, 40), st.sampled_from([0, 1000, whole_module.SMALL_WORK]))
def test_no_document_is_cut(lengths, ranks, tail, small_work):
    boundaries = boundaries_of(lengths)
    total = -(-(sum(lengths) + tail) // ranks) * ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "SMALL_WORK", small_work)
        dealt = deal_whole_documents(boundaries, total, ranks)
    if dealt is None:
        return
    assert dealt.total == total
    assert np.all(np.bincount(dealt.owner, minlength=ranks) == total // ranks)
    owners = [dealt.owner[first:last] for first, last in itertools.pairwise(boundaries)]
    assert all(np.all(owner == owner[:1]) for owner in owners)
    work = np.zeros(ranks)
    for owner in owners:
        work[owner[:1]] += len(owner) * (len(owner) + 1) // 2
    assert work.max() <= work.mean() + max(small_work, whole_module.TOLERANCE * work.mean())


@pytest.mark.parametrize(
    ("lengths", "ranks", "why"),
    [
        pytest.param([700, 100, 224], 2, "the first document is longer than a share", id="long"),
        pytest.param([300, 300, 300], 2, "two of the three documents do not fit", id="fit"),
        pytest.param([500, *[100] * 5], 2, "the first document has most of the work", id="work"),
        pytest.param([400] * 3 + [100] * 12, 2, "one rank gets two of the three long documents", id="imbalance"),
    ],
)
def test_documents_are_cut_if_necessary(lengths, ranks, why, monkeypatch):
    monkeypatch.setattr(whole_module, "SMALL_WORK", 0)
    boundaries = boundaries_of(lengths)
    assert deal_whole_documents(boundaries, -(-sum(lengths) // ranks) * ranks, ranks) is None, why


def test_many_different_lengths():
    """A rank's documents have more than `MAX_LENGTHS` different lengths, so the search tries only some of them."""
    lengths = np.random.default_rng(0).integers(64, 2049, 2**14)
    ends = lengths.cumsum()
    boundaries = np.append(0, np.append(ends[ends < 2**20], 2**20))
    assert received(deal(boundaries, 2**20, 2), boundaries) == 0


def test_swaps_balance_work_and_then_tokens():
    """`owners_of_documents` finds an assignment of these documents only because it tries two values of `weight`."""
    lengths = np.random.default_rng(0).lognormal(7, 0.8, 2000).astype(int) + 1
    ends = lengths.cumsum()
    boundaries = np.append(0, np.append(ends[ends < 131_072], 131_072))
    assert deal_whole_documents(boundaries, 131_072, 4) is not None


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60)), min_size=2, max_size=40),
    st.sampled_from([0.01, 1.0]),
    st.integers(2, 5),
)
def test_each_swap_reduces_the_excess(documents, weight, max_lengths):
    owner, lengths = (np.array(values) for values in zip(*documents, strict=True))
    work = whole_module.work_of_documents(lengths)
    share = whole_module.Share(-(-sum(lengths) // 3), work.sum() / 3)

    def loads():
        return whole_module.Loads(*(np.bincount(owner, x, 3) for x in (lengths, work)))

    def excess():
        return share.excess(loads(), weight).sum()

    before = excess()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "MAX_LENGTHS", max_lengths)
        swapped = whole_module._swap(owner, lengths, loads(), share, weight)
    assert excess() < before if swapped else excess() == before


def test_empty_documents_change_nothing():
    lengths = np.random.default_rng(0).integers(64, 513, 455).tolist()
    total = -(-sum(lengths) // 8) * 8
    deals = [deal_whole_documents(boundaries_of(lengths + [0] * n), total, 8) for n in (0, 20_000)]
    assert np.array_equal(deals[0].owner, deals[1].owner)


def test_padding_fills_shares():
    dealt = deal_whole_documents(np.array([0, 300, 600, 900]), 1200, 3)
    assert np.array_equal(np.sort(dealt.owner[:900:300]), [0, 1, 2])
    assert np.array_equal(np.bincount(dealt.owner[900:]), [100, 100, 100])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), min_size=1, max_size=40), st.integers(0, 200))
def test_swaps_are_of_runs_of_the_two_ranks(chunks, limit):
    owner, work = (np.array(values) for values in zip(*chunks, strict=True))
    for length, gives, takes, moved in zip(*possible_swaps(owner, work, 0, 1, limit), strict=True):
        given, taken = (np.arange(first, first + length) for first in (gives, takes))
        assert np.all(owner[given] == 0) and np.all(owner[taken] == 1)
        assert 0 < moved == work[given].sum() - work[taken].sum() <= limit


@settings(max_examples=50, deadline=None)
@given(DOCUMENTS, st.integers(2, 4), st.integers(0, 3))
def test_received_chunks_are_those_of_the_traffic(lengths, ranks, padding):
    boundaries = boundaries_of([8 * length for length in [*lengths, ranks]])
    n_chunks = sum(lengths) + ranks + padding
    _, first = work_of_chunks(*causal_ranges(boundaries, 8 * n_chunks), 8)
    owner = np.random.default_rng(0).permutation(np.arange(n_chunks) % ranks)
    counts = received_chunks(owner == np.arange(ranks)[:, None], first)
    for rank in range(ranks):
        assert 8 * counts[rank] == sum(traffic(Deal(owner, 8, ranks), boundaries, rank, None).sizes[1])
