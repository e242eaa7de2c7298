"""The counter that hands out the work of Hopper's forward pass: launches at the same time must not share one."""

from dataclasses import replace

import pytest
import torch

from kernels.flash_attention.features import Features
from kernels.flash_attention.hopper import fwd
from kernels.flash_attention.schedule import causal_schedule
from tests.kernels.hopper import NEEDS_SM_90, tiles_of

pytestmark = NEEDS_SM_90


def problem(lengths, head_dim):
    total = sum(lengths)
    q, k, v = (torch.randn(total, 8, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    features = Features(head_dim**-0.5, softcap=0.0, sinks=None, alibi=[])
    return q, k, v, causal_schedule(cu_seqlens, total, q.device), features, torch.bfloat16


def assert_same(results, expected):
    for o, lse in results:
        assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("head_dim", fwd.FORWARD_TILES)
def test_two_streams_at_the_same_time(head_dim):
    problems = [problem([2048, 2048], head_dim), problem([700, 300, 3000], head_dim)]
    expected = [fwd.attention_forward(*one) for one in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = ([], [])
    for _ in range(30):
        for one, stream, into in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                into.append(fwd.attention_forward(*one))
    torch.cuda.synchronize()
    for into, alone in zip(results, expected, strict=True):
        assert_same(into, alone)


def test_a_graph_replayed_beside_launches_of_the_stream_it_was_captured_on():
    one = problem([700, 300, 3000], 128)
    capturing, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(capturing):
        expected = fwd.attention_forward(*one)
        capturing.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capturing):
            captured = [fwd.attention_forward(*one) for _ in range(3)]
    for _ in range(3):
        with torch.cuda.stream(other):
            graph.replay()
        with torch.cuda.stream(capturing):
            beside = [fwd.attention_forward(*one) for _ in range(3)]
        torch.cuda.synchronize()
        assert_same(captured + beside, expected)


@pytest.mark.parametrize("lengths", [[2048, 2048], [700, 0, 300, 3000, 1], [9000]], ids=["equal", "ragged", "long"])
@pytest.mark.parametrize("head_dim", fwd.FORWARD_TILES)
def test_plain_and_persistent_grids_give_the_same_bits(head_dim, lengths):
    one = problem(lengths, head_dim)
    for tiles in tiles_of(head_dim):
        plain, persistent = (fwd.run_forward(*one, replace(tiles, dynamic=x)) for x in (False, True))
        assert_same([persistent], plain)
