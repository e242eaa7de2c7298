"""Tests the tokens that a rank of a context group holds."""

import pytest
import torch

from fa_train.models.rope import document_positions, rope_scaling, rotary_table
from fa_train.parallel.context.shard import ContextShard

RANKS, TOTAL, ORIGINAL = 2, 4096, 512
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0},
    "llama3": {"factor": 32.0},
}
# the stream "several" ends five tokens after its last document
STREAMS = {"one": [0, TOTAL], "several": [0, 700, 701, 3000, 3100, TOTAL - 5]}


def stream(boundaries):
    """Returns a stream whose tokens are their own positions in the stream."""
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32)
    positions = document_positions(cu_seqlens, TOTAL, torch.device("cpu"))
    tokens = torch.arange(TOTAL)
    return {"tokens": tokens, "labels": tokens, "position_ids": positions, "cu_seqlens": cu_seqlens}


def shards(batch, windows=(None,)):
    return [ContextShard(rank, RANKS, windows)(batch) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("documents", STREAMS)
def test_a_rank_has_the_rotary_table_of_the_whole_stream(documents, kind):
    scaling = rope_scaling({"rope_type": kind, **SCALINGS[kind]}, ORIGINAL)
    batch = stream(STREAMS[documents])
    whole = rotary_table(batch["position_ids"], 64, 1e4, scaling)
    assert any(shard["tokens"].diff().max() > 1 for shard in shards(batch)), "a rank's tokens have gaps"
    for shard in shards(batch):
        own = shard["tokens"]
        table = rotary_table(shard["position_ids"], 64, 1e4, scaling, shard["last_positions"])
        assert torch.equal(table.cos, whole.cos[own])
        assert torch.equal(table.sin, whole.sin[own])


@pytest.mark.parametrize(
    ("windows", "contiguous"),
    [
        pytest.param([300], True, id="one-window"),
        pytest.param([300, 1000], True, id="two-windows"),
        pytest.param([None, 300], False, id="some-layers"),
        pytest.param([300, TOTAL], False, id="window-as-long-as-the-stream"),
    ],
)
def test_only_windows_keep_shares_contiguous(windows, contiguous):
    for rank, shard in enumerate(shards(stream(STREAMS["one"]), windows)):
        share = torch.arange(rank * TOTAL // RANKS, (rank + 1) * TOTAL // RANKS)
        assert torch.equal(shard["tokens"], share) == contiguous
