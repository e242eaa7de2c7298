"""Tests which tokens each rank of a context group holds, how the work is divided, and how traffic is limited."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_train.parallel.context.deal import (
    CHUNK_SIZES,
    MAX_PADDING,
    TOLERANCE,
    Deal,
    causal_ranges,
    chunk_size_for,
    deal,
    possible_swaps,
    received_chunks,
    work_of_chunks,
)
from fa_train.parallel.context.traffic import traffic
from tests.parallel.context.support.documents import DOCUMENTS, WINDOWS, boundaries_of, visible


def log_normal(total):
    random, lengths = np.random.default_rng(0), []
    while sum(lengths) < total:
        lengths.append(min(int(random.lognormal(7, 1.2)) + 1, total - sum(lengths)))
    return boundaries_of(lengths)


def balance(dealt, boundaries):
    start, end = causal_ranges(boundaries, dealt.total)
    work = [(end - start)[dealt.positions(rank)].sum() for rank in range(dealt.ranks)]
    return max(work) / np.mean(work)


def received(dealt, boundaries, window=None):
    """Returns how many keys the ranks receive, as a fraction. The fraction is 1 if each rank gathers all keys."""
    sizes = [sum(traffic(dealt, boundaries, rank, window).sizes[1]) for rank in range(dealt.ranks)]
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
    assert total <= dealt.total < total + ranks * dealt.chunk_size
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
def test_work_is_balanced(total, documents, ranks):
    boundaries = np.array([0, total]) if documents == "one" else log_normal(total)
    dealt = deal(boundaries, total, ranks)
    assert balance(dealt, boundaries) <= 1 + TOLERANCE
    contiguous = deal(boundaries, total, ranks, balanced=False)
    assert balance(contiguous, boundaries) > 1.05, "the balanced deal has something to do"


@pytest.mark.parametrize("ranks", [2, 8])
def test_documents_limit_what_is_received(ranks):
    short = boundaries_of([512] * 264)
    assert received(deal(short, 135_168, ranks), short) < 0.005
    boundaries = log_normal(135_168)
    assert received(deal(boundaries, 135_168, ranks), boundaries) < 0.1


def test_whole_documents_change_their_rank():
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
