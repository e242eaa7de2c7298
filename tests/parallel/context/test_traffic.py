"""Tests which keys the ranks of a context group send and receive, and the schedule of these keys."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fa_kernels.flash_attention.schedule import WIDE_TILE, WORK_TILE, schedule_of_ranges
from fa_train.parallel.context import traffic as traffic_module
from fa_train.parallel.context import whole_documents as whole_module
from fa_train.parallel.context.attention import shared_schedule
from fa_train.parallel.context.deal import Deal, causal_ranges, deal
from fa_train.parallel.context.traffic import (
    MAX_CROSSING,
    STEP,
    STEPS,
    Counts,
    Traffic,
    buffer_rows,
    query_rows,
    traffic,
)
from tests.parallel.context.support.documents import DOCUMENTS, WINDOWS, boundaries_of, visible


def test_the_example_in_the_docstring_of_traffic(monkeypatch):
    monkeypatch.setattr(traffic_module, "MIN_PAIRS", 0)
    monkeypatch.setattr(traffic_module, "MAX_CROSSING", 1)
    dealt = Deal(owner=np.array([0, 1, 1, 0]), chunk_size=2, ranks=2)
    plan = traffic(dealt, np.array([0, 8]), 0, None)
    counts, (n_sent, n_taken) = Counts(*plan.counts), map(sum, plan.sizes)
    lengths = dict.fromkeys(("crossing", "key_start", "key_end"), counts.crossing)
    lengths |= dict.fromkeys(("kept", "kept_rows"), counts.kept)
    lengths |= {"summed": counts.summed, "offsets": counts.summed + 1, "entries": n_sent + counts.kept}
    lengths |= {"own_start": 4, "own_end": 4, "sent": n_sent, "taken": n_taken}
    documented = re.findall(r"(\w+) += (\[[\d, ]*\])", Traffic.__doc__)
    assert {name: json.loads(values) for name, values in documented} == {
        name: getattr(plan, name)[:length].tolist() for name, length in lengths.items()
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_window_costs_at_most_one_window_for_each_run_of_tokens(ranks):
    total, window = 135_168, 4096
    boundaries = np.array([0, total])
    dealt = deal(boundaries, total, ranks)
    for rank in range(ranks):
        runs = 1 + np.count_nonzero(np.diff(dealt.positions(rank)) != 1)
        assert sum(traffic(dealt, boundaries, rank, window).sizes[1]) <= runs * (window - 1)


@settings(max_examples=60, deadline=None)
@given(
    DOCUMENTS, WINDOWS, st.integers(1, 4), st.integers(0, 40), st.booleans(), st.sampled_from([MAX_CROSSING, 1 / 3]),
    st.sampled_from([0, 200]), st.sampled_from([0, whole_module.MAX_DOCUMENTS]),
)  # fmt: skip
def test_the_buffers_of_all_ranks_hold_what_their_queries_see(
    lengths, window, ranks, tail, splits, max_crossing, min_pairs, max_documents
):
    boundaries, total = boundaries_of(lengths), sum(lengths) + tail
    if not total:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "MAX_DOCUMENTS", max_documents)
        dealt = deal(boundaries, total, ranks)
        patch.setattr(traffic_module, "MAX_CROSSING", max_crossing)
        patch.setattr(traffic_module, "MIN_PAIRS", min_pairs)
        plans = [traffic(dealt, boundaries, rank, window, may_split=splits) for rank in range(ranks)]
    mask = visible(*causal_ranges(boundaries, dealt.total, window), dealt.total)
    n_crossing = [_n_crossing(mask, dealt.positions(rank)) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        own, mine = dealt.positions(rank), mask[dealt.positions(rank)]
        arriving = []  # the stream positions that all_to_all delivers, in the order of the sending ranks
        for source, other in enumerate(plans):
            sent = other.sent[: sum(other.sizes[0])].split(other.sizes[0])[rank]
            assert len(sent) == plan.sizes[1][source]
            arriving.append(dealt.positions(source)[sent.numpy()])
        received = np.concatenate(arriving)
        assert not np.isin(received, own).any(), "own rows do not travel"
        counts, capacity, zeros = Counts(*plan.counts), len(plan.taken), -1
        crossing = plan.crossing.numpy()[: counts.crossing]
        seen = mine[crossing].any(axis=0)  # by crossing queries
        buffer = np.full(capacity, zeros)
        kept, kept_rows = (x.numpy()[: counts.kept] for x in (plan.kept, plan.kept_rows))
        buffer[kept_rows] = own[kept]
        assert np.array_equal(kept, np.flatnonzero(seen[own]))
        buffer[plan.taken.numpy()[: len(received)]] = received
        keys = buffer[: counts.keys]
        assert np.array_equal(keys, np.flatnonzero(seen)), "each key that is seen, in order"
        assert np.all(buffer[counts.keys :] == zeros)
        assert counts.keys < counts.rows <= capacity
        expected = np.zeros_like(mine)
        assert counts.exchanges == (not splits or max(n_crossing) > 0)
        if counts.splits:
            by_own = visible(plan.own_start.numpy(), plan.own_end.numpy(), len(own))
            assert not by_own[crossing].any()
            expected[:, own] = by_own
        by_crossing = visible(plan.key_start.numpy(), plan.key_end.numpy(), counts.keys)
        assert not by_crossing[counts.crossing :].any()
        expected[np.ix_(crossing, keys)] = by_crossing[: counts.crossing]
        assert np.array_equal(expected, mine)
        assert counts.crossing <= counts.queries <= len(own)
        enough = np.count_nonzero(mask) >= min_pairs * ranks
        few = max(n_crossing) == 0 or (enough and max(n_crossing) <= max_crossing * len(own))
        assert counts.splits == (splits and few)
        summed, offsets = plan.summed[: counts.summed], plan.offsets[: counts.summed + 1]
        assert torch.all(summed.diff() > 0) and torch.all(offsets.diff() > 0)
        parts = [plan.sent[: sum(plan.sizes[0])], plan.kept[: counts.kept * counts.splits]]
        assert offsets[0] == 0 and offsets[-1] == sum(map(len, parts))
        again = torch.cat(parts)[plan.entries[: offsets[-1]].long()]
        assert torch.equal(again, summed.repeat_interleave(offsets.diff())), "each part returns to its token"
        for first, last in itertools.pairwise(offsets.tolist()):
            assert torch.all(plan.entries[first:last].diff() > 0), "sums have one order"


def _n_crossing(mask, own):
    """Returns how many of a rank's queries see keys of other ranks.

    mask: (total, total), True where a query sees a key.
    """
    return np.count_nonzero(np.delete(mask[own], own, axis=1).any(axis=1))


def test_numbers_of_queries_have_few_sizes():
    limit = 65_536
    sizes = [query_rows(n, limit) for n in range(limit + 1)]
    assert len(set(sizes)) <= 40
    assert all(n <= size <= min(limit, max(n + STEP, 1.25 * n)) and size >= 1 for n, size in enumerate(sizes))
    assert query_rows(50, 60) == 60, "a rank has no more queries than tokens"


def test_buffers_have_few_sizes_and_a_row_that_no_query_sees():
    for total in (300, 135_168):
        sizes = [buffer_rows(n, total) for n in range(total + 1)]
        assert len(set(sizes)) <= STEPS + 1
        assert all(0 < size - n <= max(STEP, 1.1 * total / STEPS) for n, size in enumerate(sizes))


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, WINDOWS, st.integers(0, 3), st.sampled_from(["short", "medium"]), st.booleans())
@example([12, 21, 77], None, 2, "medium", False)  # after the last document, there are keys that no query sees
@example([700, 3, 900], None, 1, "medium", True)  # many tiles of queries see no key
def test_a_schedule_of_ranges_is_their_mask(lengths, window, rank, length_class, splits):
    boundaries, total = boundaries_of([*lengths, 70, 70]), sum(lengths) + 140 + 9
    dealt = deal(boundaries, total, 4)
    plan = traffic(dealt, boundaries, rank, window, may_split=splits)
    counts = Counts(*plan.counts)
    schedule = schedule_of_ranges(plan.key_start, plan.key_end, len(plan.taken), length_class)
    queries, keys = torch.arange(len(plan.key_start))[:, None], torch.arange(len(plan.taken))
    by_query = (keys >= schedule.key_start[:, None]) & (keys < schedule.key_end[:, None])
    by_key = (queries >= schedule.query_start) & (queries < schedule.query_end)
    assert torch.equal(by_query, by_key)
    for ends in schedule[:4]:
        assert ends.dtype == torch.int32
        assert torch.all(ends.diff() >= 0)
    for tiles, tokens, size in (
        (schedule.query_tiles, len(queries), WORK_TILE),
        (schedule.wide_query_tiles, len(queries), WIDE_TILE),
        (schedule.key_tiles, len(keys), WORK_TILE),
    ):
        assert sorted(tiles.tolist()) == list(range(-(-tokens // size)))
    used = -(-counts.rows // WORK_TILE)
    assert torch.all(schedule.key_tiles[:used] < used), "tiles without keys come last"
    for tiles, size in ((schedule.query_tiles, WORK_TILE), (schedule.wide_query_tiles, WIDE_TILE)):
        used = -(-counts.queries // size)
        assert torch.all(tiles[:used] < used), "tiles whose queries see no key come last"


@pytest.mark.parametrize(("documents", "window"), [("short", None), ("long", None), ("long", 512)])
def test_a_tile_of_keys_has_few_queries_that_do_not_see_it(documents, window, monkeypatch):
    """For a tile of keys, a kernel processes each query from the first to the last one that sees a key of the tile."""
    monkeypatch.setattr(traffic_module, "MAX_CROSSING", 1 / 4)
    monkeypatch.setattr(traffic_module, "MIN_PAIRS", 0)
    lengths = [150, 90] * 68 if documents == "short" else [9000, 100, 7220]
    boundaries, ranks = boundaries_of(lengths), 2
    dealt = deal(boundaries, int(boundaries[-1]), ranks, balanced=window is None)
    runs = 0
    for rank in range(ranks):
        plan = traffic(dealt, boundaries, rank, window)
        schedule = shared_schedule(plan, "medium")
        for part in (schedule.crossing, schedule.own):
            for first in range(0, len(part.query_start), WORK_TILE):
                tile = slice(first, first + WORK_TILE)
                start, end = part.query_start[tile], part.query_end[tile]
                sees = (end - start).max() if torch.any(end > start) else 0
                assert end[-1] - start[0] <= 2 * sees + 2 * WORK_TILE
        runs += Counts(*plan.counts).splits
    assert runs, "at least one rank runs attention twice"
