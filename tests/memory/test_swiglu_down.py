"""Tests the fusion of SwiGLU with the down projection in compiled FFNs, and compares it with plain autograd."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule

from fa_kernels import glu as kernel
from fa_train.memory.swiglu_down import trains_plainly
from fa_train.models import ffn as ffn_module
from fa_train.models.config import Activation
from fa_train.models.ffn import RecomputedFFN
from fa_train.models.gpt import GPT
from fa_train.models.lora import LoRA
from tests.memory.support import simulated
from tests.memory.support.plans import LLAMA_1B, build, changed
from tests.memory.support.simulated import kept_by_compiled_block
from tests.memory.support.small import assert_equal, compile_blocks, levers, small_gpt, step, stream
from tests.support.tolerance import assert_as_accurate

DIM, FFN_DIM = 16, 24
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list to which each run of SwiGLU's backward kernel adds an entry."""
    calls: list[None] = []
    backward = kernel._backward

    def counted(projected: Tensor, d_activated: Tensor, d_projected: Tensor, unit: str) -> None:
        calls.append(None)
        backward(projected, d_activated, d_projected, unit)

    monkeypatch.setattr(kernel, "_backward", counted)
    return calls


@pytest.fixture(autouse=True)
def _forget_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def feed_forward(device: torch.device, bias: bool = False, activation: Activation = "swiglu") -> RecomputedFFN:
    """Builds an FFN with the same weights in every call."""
    torch.manual_seed(0)
    up = nn.Linear(DIM, FFN_DIM if activation == "gelu" else 2 * FFN_DIM, bias=bias)
    return RecomputedFFN(up, nn.Linear(FFN_DIM, DIM, bias=bias), activation, checkpointed=False).to(device)


def compiled(ffn: nn.Module) -> Callable[[Tensor], Tensor]:
    """Compiles the FFN with a backend that needs no C++ compiler."""
    return torch.compile(ffn, backend="aot_eager", fullgraph=True)


def draw(device: torch.device, total: int = 10) -> tuple[Tensor, Tensor]:
    """Returns a random input x of the FFN, and a random gradient of the FFN's output y."""
    return torch.randn(total, DIM, device=device, requires_grad=True), torch.randn(total, DIM, device=device)


def gradients(ffn: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Returns the result and all gradients by name."""
    y = run(x)
    names, tensors = zip(*ffn.named_parameters(), strict=True)
    found = torch.autograd.grad(y, (x, *tensors), dy.to(y.dtype))
    return {"y": y.detach()} | dict(zip(("x", *names), found, strict=True))


def assert_alike(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, found in ours.items():
        torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@BIAS
def test_equals_eager(bias, device, passes):
    ffn, (x, dy) = feed_forward(device, bias), draw(device)
    expected = gradients(ffn, ffn, x, dy)
    assert not passes  # the eager FFN does not use the fused backward
    assert_alike(gradients(ffn, compiled(ffn), x, dy), expected)
    assert len(passes) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("bf16_matmul")
@BIAS
@pytest.mark.parametrize("autocast", [True, False], ids=["mixed", "true"])
def test_bf16_is_as_accurate_as_eager(autocast, bias, device, passes):
    x, dy = draw(device)
    exact_ffn = feed_forward(device, bias).double()
    exact = gradients(exact_ffn, exact_ffn, x.detach().double().requires_grad_(), dy.double())
    ffn = feed_forward(device, bias)
    if not autocast:
        ffn, x = ffn.bfloat16(), x.detach().bfloat16().requires_grad_()

    def under(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                return run(x)

        return forward

    expected, ours = gradients(ffn, under(ffn), x, dy), gradients(ffn, under(compiled(ffn)), x, dy)
    assert len(passes) == 1 and ours["y"].dtype == torch.bfloat16
    for name, found in ours.items():
        assert found.dtype == expected[name].dtype, name
        assert_as_accurate(name, found, exact[name], expected[name])


def test_a_second_backward_reads_the_saved_tensors(device, passes):
    ffn, (x, dy) = feed_forward(device), draw(device)
    y = compiled(ffn)(x)
    first, second = (torch.autograd.grad(y, (x, *ffn.parameters()), dy, retain_graph=True) for _ in range(2))
    assert len(passes) == 2
    assert_equal(list(first), list(second))


@pytest.mark.slow
def test_gradients_may_have_any_layout(device, passes):
    ffn, (x, _) = feed_forward(device), draw(device)
    run = compiled(ffn)
    for dy in (torch.ones(1, 1, device=device).expand(10, DIM), torch.randn(DIM, 10, device=device).T):
        assert_alike(gradients(ffn, run, x, dy), gradients(ffn, ffn, x, dy))
    assert len(passes) == 2


@pytest.mark.slow
def test_the_ffn_is_compiled_once_for_all_lengths(device, passes):
    """torch.compile compiles for the first length, and then once more for all other lengths."""
    ffn = feed_forward(device)
    run = compiled(ffn)
    for total in (10, 12):
        gradients(ffn, run, *draw(device, total))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for total in (7, 33):
            x, dy = draw(device, total)
            assert_alike(gradients(ffn, run, x, dy), gradients(ffn, ffn, x, dy))
    assert len(passes) == 4


@pytest.mark.slow
def test_keeps_what_autograd_keeps(monkeypatch):
    """A compiled block keeps no rounded copy of its weights.

    tests/memory/planner/test_planner.py checks the kept bytes with other memory levers.
    """
    precision = "bf16-true"
    plan = changed(LLAMA_1B, n_layers=1, vocab_size=64, seq_len=64, precision=precision)
    uses = []

    def partition(joint: GraphModule, *args: Any, **options: Any) -> Any:
        uses.append("glu.gradient" in str(joint.graph))
        return min_cut_rematerialization_partition(joint, *args, **options)

    monkeypatch.setattr(simulated, "min_cut_rematerialization_partition", partition)
    ours = kept_by_compiled_block(lambda: build(plan), plan.run.tokens, precision)
    monkeypatch.setattr(ffn_module, "trains_plainly", lambda linear: False)
    assert ours == kept_by_compiled_block(lambda: build(plan), plan.run.tokens, precision)
    assert uses == [True, False]


def test_the_output_is_the_same_without_gradients(device):
    ffn, (x, _) = feed_forward(device), draw(device)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ffn)(x), ffn(x))


class Sharded(Tensor):
    """Stands in for tensor subclasses such as DTensor."""


def test_only_plain_layers_train_plainly(device):
    frozen, sharded = nn.Linear(8, 4), nn.Linear(8, 4)
    frozen.weight.requires_grad_(False)
    sharded.weight = nn.Parameter(sharded.weight.detach().as_subclass(Sharded))
    adapted = LoRA(2, 4.0, 0.0, "all-linear", False, None, None)(small_gpt(levers(), device, n_layers=1))
    assert trains_plainly(nn.Linear(8, 4))
    assert not any(map(trains_plainly, (frozen, sharded, adapted.blocks[0].ffn.down)))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["down_proj", "gate_proj", "q_proj"])
def test_adapters_keep_their_path(target, device, passes):
    """The adapter of q_proj is outside the FFN, and the other adapters are inside it."""

    def adapted() -> GPT:
        return LoRA(2, 4.0, 0.0, [target], False, None, None)(small_gpt(levers(), device, n_layers=1))

    torch.manual_seed(1)
    model = adapted()
    expected = step(model, stream(device))
    assert_equal(step(compile_blocks(model), stream(device)), expected)
    assert not passes


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_other_activations_keep_their_path(activation, device, passes):
    ffn, (x, dy) = feed_forward(device, activation=activation), draw(device)
    assert_alike(gradients(ffn, compiled(ffn), x, dy), gradients(ffn, ffn, x, dy))
    assert not passes


@pytest.mark.gpu
def test_the_backward_needs_no_more_memory(device, monkeypatch):
    """SwiGLU's backward kernel stores the recomputed activations in the memory of the activations' gradient.

    If later code needs the gradient of the activations, torch.compile copies this gradient before SwiGLU's backward
    kernel runs.
    """
    total, ffn_dim = 4096, 512
    up, down = nn.Linear(64, 2 * ffn_dim, bias=False), nn.Linear(ffn_dim, 64, bias=False)
    ffn = RecomputedFFN(up, down, "swiglu", checkpointed=False).to(device)
    x = torch.randn(total, 64, device=device, requires_grad=True)

    def most() -> int:
        torch._dynamo.reset()
        run = torch.compile(ffn, fullgraph=True)
        for _ in range(2):  # the first run compiles
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                y = run(x)
            torch.autograd.grad(y, (x, *ffn.parameters()), torch.ones_like(y))
        return torch.cuda.max_memory_allocated()

    ours = most()
    monkeypatch.setattr(ffn_module, "trains_plainly", lambda linear: False)
    assert ours <= most() + total * ffn_dim  # the tolerance is half the size of the bf16 activations
