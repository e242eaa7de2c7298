"""All blocks share one compiled graph. A block's last residual addition is fused into the next block's first norm."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fa_kernels import rmsnorm
from tests.memory.support.small import assert_equal, compile_blocks, levers, small_gpt, step, stream
from tests.support.marks import slow

LAYERS = 3
ADDS_LATER = [levers(), levers(offload="all"), levers(mlp_chunk=8)]
ADDS_AT_ONCE = [levers("selective"), levers("full"), levers("full", offload=True), levers(offload=True)]


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


@pytest.mark.parametrize("memory", [ADDS_LATER[0], *slow(*ADDS_LATER[1:])], ids=str)
def test_both_norms_of_a_block_add(memory, device, passes):
    expected = step(small_gpt(memory, device, n_layers=LAYERS), stream(device))
    assert not passes  # eager mode uses torch's norm, whose memory the planner predicts
    assert_equal(step(compile_blocks(small_gpt(memory, device, n_layers=LAYERS)), stream(device)), expected)
    assert len(passes) == 2 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize("memory", [ADDS_AT_ONCE[0], *ADDS_AT_ONCE[1:]], ids=str)
def test_what_is_kept_of_a_blocks_input_is_one_tensor(memory, device, passes):
    expected = step(small_gpt(memory, device, n_layers=LAYERS), stream(device))
    assert_equal(step(compile_blocks(small_gpt(memory, device, n_layers=LAYERS)), stream(device)), expected)
    assert not passes


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("memory", [levers(), levers("full")], ids=["adds-later", "adds-at-once"])
def test_all_blocks_share_one_graph(memory, norm, device):
    model = compile_blocks(small_gpt(memory, device, n_layers=LAYERS, norm=norm, positions="none", qk_norm=False))
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
