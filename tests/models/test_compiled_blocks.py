"""All blocks share one compiled graph. A block's last residual addition is fused into the next block's first norm."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fa_kernels import glu, rmsnorm
from tests.memory.support.small import assert_equal, compile_blocks, levers, small_gpt, step, stream
from tests.support.marks import slow

LAYERS = 3
ADDS_LATER = [levers(), levers(offload="all"), levers(mlp_chunk=8)]
ADDS_AT_ONCE = [
    levers("selective"), levers("full"), levers("full", offload=True), levers("selective", offload=True),
    levers(offload=True),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that gets one entry for each call that adds two tensors and normalises the sum."""
    calls: list[None] = []
    forward = rmsnorm._forward_by_kernel if torch.cuda.is_available() else rmsnorm._forward_plainly

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return forward(*arguments)

    monkeypatch.setattr(rmsnorm, forward.__name__, counted)
    return calls


@pytest.fixture
def swiglu_passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that gets one entry for each run of SwiGLU's backward kernel."""
    calls: list[None] = []
    backward = glu._backward

    def counted(*arguments: Any, **options: Any) -> None:
        calls.append(None)
        backward(*arguments, **options)

    monkeypatch.setattr(glu, "_backward", counted)
    return calls


@pytest.mark.parametrize("memory", [ADDS_LATER[0], *slow(*ADDS_LATER[1:], *ADDS_AT_ONCE)], ids=str)
def test_compiled_blocks_share_one_graph_and_compute_the_same(memory, device, passes, swiglu_passes):
    """Both norms of a block also add the residual, unless the block's input is recomputed or offloaded.

    If the input is recomputed or offloaded, a block keeps one input tensor instead of two.
    """
    expected = step(small_gpt(memory, device, n_layers=LAYERS), stream(device))
    assert not passes  # eager mode uses torch's norm, whose memory the planner predicts
    model = compile_blocks(small_gpt(memory, device, n_layers=LAYERS))
    assert_equal(step(model, stream(device)), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(passes) == (2 * LAYERS if memory in ADDS_LATER else 0)
    if memory.mlp_chunk is None:  # a chunked FFN runs the kernel once per chunk, also in eager mode
        assert len(swiglu_passes) == LAYERS
    if memory.offload is True:
        assert model.offload.pool.allocated == LAYERS - 1


@pytest.mark.slow
@pytest.mark.parametrize("memory", [levers(), levers("full")], ids=["adds-later", "adds-at-once"])
def test_all_blocks_share_one_graph_with_layernorm(memory, device):
    model = compile_blocks(
        small_gpt(memory, device, n_layers=LAYERS, norm="layernorm", positions="none", qk_norm=False)
    )
    step(model, stream(device))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_all_blocks_share_one_graph_under_autocast(device, passes):
    model = compile_blocks(small_gpt(levers(), device, n_layers=LAYERS))
    with torch.autocast(device.type, torch.bfloat16):
        step(model, stream(device))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(passes) == 2 * LAYERS


@pytest.mark.slow
def test_what_the_first_block_adds_is_let_go(device):
    """The first block adds a tensor of zeros to its input.

    If the tensor of zeros were a leaf of autograd, it would stay in memory until its gradient exists.
    """
    model = compile_blocks(small_gpt(levers(), device, n_layers=1))
    first = []
    model.blocks[0].register_forward_pre_hook(lambda _, arguments: first.append(arguments[-1]))
    model(**stream(device)).backward()
    (added,) = first
    assert added.requires_grad and not added.is_leaf and not added.any()
