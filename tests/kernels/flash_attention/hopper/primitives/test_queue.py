"""Tests the counter from which programs take work: concurrent launches must not share one counter."""

import pytest
import torch

from fa_kernels.flash_attention.hopper.backward.fused_config import CAPPED_CONFIGS, CONFIGS, config_of
from fa_kernels.flash_attention.hopper.forward import kernel as fwd
from fa_kernels.flash_attention.hopper.forward.config import FORWARD_CONFIGS
from tests.kernels.flash_attention.hopper.support.hopper import (
    NEEDS_SM_90,
    backward_problem,
    gradients,
    problem,
)

pytestmark = NEEDS_SM_90

DYNAMIC = [
    pytest.param(table, key, id=f"{key[1]}-{key[0]}-{name}".removeprefix("torch."))
    for name, table in (("plain", CONFIGS), ("capped", CAPPED_CONFIGS))
    for key, config in table.items()
    if config.dynamic
]


def run(one):
    """Runs a call and returns the outputs that are bitwise equal in every run: o and lse, or the gradients.

    If a call is not deterministic, the bits of dq depend on the order of the additions.
    """
    if len(one) == 6:
        return fwd.attention_forward(*one)
    dq, dk, dv = gradients(*one)
    return (dq, dk, dv) if one[-1] else (dk, dv)


def problems(head_dim):
    """Yields one pair of forward calls.

    If the fused backward supports head_dim, also yields two pairs of backward calls.
    """
    lengths = [2048, 2048], [700, 300, 3000]
    yield [problem(x, head_dim) for x in lengths]
    if config_of(head_dim, torch.bfloat16, softcap=0.0) is not None:
        for deterministic in (False, True):
            yield [backward_problem(x, x, head_dim, deterministic=deterministic) for x in lengths]


def assert_same(results, expected):
    for result in results:
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@pytest.mark.parametrize("head_dim", FORWARD_CONFIGS)
def test_two_streams_at_the_same_time_give_the_results_of_each_alone(head_dim):
    for pair in problems(head_dim):
        expected = [run(one) for one in pair]
        streams = [torch.cuda.Stream() for _ in pair]
        torch.cuda.synchronize()
        results = ([], [])
        for _ in range(30):
            for one, stream, into in zip(pair, streams, results, strict=True):
                with torch.cuda.stream(stream):
                    into.append(run(one))
        torch.cuda.synchronize()
        for into, alone in zip(results, expected, strict=True):
            assert_same(into, alone)


@pytest.mark.parametrize("pass_", ["forward", "backward", "deterministic"])
def test_a_replayed_graph_and_launches_on_its_capture_stream_do_not_disturb_each_other(pass_):
    lengths = [700, 300, 3000]
    if pass_ == "forward":
        one = problem(lengths, 128)
    else:
        one = backward_problem(lengths, lengths, 64, deterministic=pass_ == "deterministic")
    capturing, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(capturing):
        expected = run(one)
        capturing.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capturing):
            captured = [run(one) for _ in range(3)]
    for _ in range(3):
        with torch.cuda.stream(other):
            graph.replay()
        with torch.cuda.stream(capturing):
            beside = [run(one) for _ in range(3)]
        torch.cuda.synchronize()
        assert_same(captured + beside, expected)


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([9000], [9000]), ([64] * 150, [64] * 150), ([700, 1, 300, 0, 3000, 2000], [900, 1, 300, 6000, 3000, 0])],
    ids=["long", "short", "unseen"],
)
@pytest.mark.parametrize(("table", "key"), DYNAMIC)
def test_plain_and_persistent_grids_of_the_backward_give_the_same(monkeypatch, table, key, lengths_q, lengths_k):
    """The two grids add dQ's fp32 partial sums in different orders, so only dQ can differ."""
    softcap = 30.0 if table is CAPPED_CONFIGS else 0.0
    one = backward_problem(lengths_q, lengths_k, *key, softcap)
    persistent = [gradients(*one) for _ in range(3)]
    monkeypatch.setitem(table, key, table[key]._replace(dynamic=False))
    plain_dq, *plain = gradients(*one)
    for dq, *others in persistent:
        assert_same([others], plain)
        torch.testing.assert_close(dq, plain_dq, rtol=torch.finfo(dq.dtype).eps, atol=1e-5)
