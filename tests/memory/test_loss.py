"""Compares the chunked linear cross entropy with torch's cross entropy of materialised logits."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa_train.memory import loss as loss_module
from fa_train.memory.loss import LinearCrossEntropy, _liger_cross_entropy, _torch_cross_entropy, linear_cross_entropy
from tests.memory.support.small import LargestTensor
from tests.support.tolerance import assert_as_accurate

TOTAL, DIM, VOCAB = 50, 16, 37


def draw(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(TOTAL, DIM, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (TOTAL,), device=device)
    labels[[0, 7, 8, 9, 49]] = -100
    return hidden, weight, labels


def dense(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0, label_smoothing: float = 0.0, cap: float = 0.0
) -> Tensor:
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    squared_lse = logits.logsumexp(dim=-1).square()[labels != -100]
    cross_entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return cross_entropy + z_loss * squared_lse.sum()


TERMS = pytest.mark.parametrize(
    ("z_loss", "label_smoothing"),
    [
        pytest.param(0.0, 0.0, id="plain"),
        pytest.param(1e-2, 0.0, id="z-loss"),
        pytest.param(0.0, 0.1, id="smoothed"),
        pytest.param(1e-2, 0.1, id="both"),
        pytest.param(0.0, 1.0, id="only-smoothing"),
    ],
)


@TERMS
@pytest.mark.parametrize("chunk_size", [1, 7, 25, 50, 4096])
@pytest.mark.parametrize("upstream", [1.0, 0.125], ids=["whole", "scaled"])
def test_equals_dense(chunk_size, upstream, z_loss, label_smoothing, device):
    hidden, weight, labels = draw(device)
    expected = dense(hidden, weight, labels, z_loss, label_smoothing)
    loss = LinearCrossEntropy(chunk_size, z_loss, label_smoothing)(hidden, weight, labels)
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss * upstream, (hidden, weight)),
        torch.autograd.grad(expected * upstream, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    loss = LinearCrossEntropy(chunk_size, z_loss, label_smoothing)(hidden, weight, labels)
    assert not torch.autograd.grad(loss, hidden)[0][7:10].any()


@TERMS
def test_a_soft_cap_is_that_of_dense_logits(z_loss, label_smoothing, device):
    hidden, weight, labels = draw(device)
    expected = dense(hidden, weight, labels, z_loss, label_smoothing, cap=2.0)
    loss = LinearCrossEntropy(7, z_loss, label_smoothing)(hidden, weight, labels, 2.0)
    torch.testing.assert_close(loss, expected)
    ours, theirs = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (loss - dense(hidden, weight, labels, z_loss, label_smoothing)).abs() > 1


@TERMS
def test_the_loss_is_0_if_all_labels_are_ignored(z_loss, label_smoothing, device):
    hidden, weight, labels = draw(device)
    loss = LinearCrossEntropy(16, z_loss, label_smoothing)(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_hidden_states_or_weight_may_be_frozen(frozen, device):
    hidden, weight, labels = draw(device)
    trained = weight if frozen == "hidden" else hidden
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    expected = torch.autograd.grad(dense(hidden, weight, labels), trained)[0]
    ours = torch.autograd.grad(LinearCrossEntropy(16)(hidden, weight, labels), trained)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_same_without_gradients(device):
    hidden, weight, labels = draw(device)
    with torch.no_grad():
        loss = LinearCrossEntropy(16)(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, dense(hidden, weight, labels))


@TERMS
@pytest.mark.usefixtures("bf16_matmul")
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16-weights"])
def test_bf16_is_as_accurate_as_dense(autocast, z_loss, label_smoothing, device):
    tensors = draw(device, torch.float32 if autocast else torch.bfloat16)

    def run(function, dtype=None) -> list[Tensor]:
        hidden, weight = (x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors[:2])
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast and dtype is None):
            loss = function(hidden, weight, tensors[2])
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    def expected(hidden, weight, labels) -> Tensor:
        return dense(hidden, weight, labels, z_loss, label_smoothing)

    ours = run(LinearCrossEntropy(16, z_loss, label_smoothing))
    exact, baseline = run(expected, torch.float64), run(expected)
    assert ours[0].dtype == torch.float32
    for name, *results in zip(("loss", "d_hidden", "d_weight"), ours, exact, baseline, strict=True):
        assert_as_accurate(name, *results)


def test_logits_never_exist_at_once(device):
    hidden = torch.randn(512, 4, device=device, requires_grad=True)
    weight = torch.randn(256, 4, device=device, requires_grad=True)
    labels = torch.randint(256, (512,), device=device)
    with LargestTensor() as largest:
        # call the Python body of the operator, because a dispatch mode does not see inside an operator
        arguments = (hidden.detach(), weight.detach(), labels, 16, 0.0, 0.0, 0.0, torch.float32, True, True)
        linear_cross_entropy._init_fn(*arguments)
        LinearCrossEntropy(16)(hidden, weight, labels).backward()
    assert largest.elements == 16 * 256  # without chunks, the logits would have 512 x 256 elements


class Alive(TorchDispatchMode):
    """Counts the live tensors of a given shape that do not share memory."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.alive, self.most = shape, set[int](), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.shape:
            storage = result.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive.add(storage._cdata)
                weakref.finalize(storage, self.alive.discard, storage._cdata)
            self.most = max(self.most, len(self.alive))
        return result


def test_two_chunks_of_logits_never_coexist(device, monkeypatch):
    """Replaces the loss by a version that works in place, as the GPU kernel does."""
    hidden, weight, labels = (x.detach() for x in draw(device))

    def cross_entropy(logits: Tensor, labels: Tensor, *terms: float) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(labels, dtype=torch.float32), logits

    for name in ("_torch_cross_entropy", "_liger_cross_entropy"):
        monkeypatch.setattr(loss_module, name, cross_entropy)
    with Alive(10, VOCAB) as logits:
        linear_cross_entropy._init_fn(hidden, weight, labels, 10, 0.0, 0.0, 0.0, torch.float32, True, True)
    assert logits.most == 1


def test_a_frozen_head_costs_no_gradient(device):
    hidden, weight, labels = draw(device)
    expected = torch.autograd.grad(LinearCrossEntropy(16)(hidden, weight, labels), hidden)[0]
    arguments = (hidden.detach(), weight.detach(), labels, 16, 0.0, 0.0, 0.0, torch.float32)
    with Alive(VOCAB, DIM) as frozen:
        _, d_hidden, d_weight = linear_cross_entropy._init_fn(*arguments, True, False)
    with Alive(VOCAB, DIM) as trained:
        linear_cross_entropy._init_fn(*arguments, True, True)
    assert torch.equal(d_hidden, expected) and d_weight.numel() == 0
    assert frozen.most < trained.most


@TERMS
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["uncapped", "capped"])
@pytest.mark.parametrize("vocab", [1, 37, 259, 40_000], ids=str)
def test_ligers_kernel_equals_torch(vocab, z_loss, label_smoothing, softcap, device, monkeypatch):
    logits, labels = 3 * torch.randn(6, vocab, device=device), torch.randint(vocab, (6,), device=device)
    labels[2] = -100
    losses, d_logits = _torch_cross_entropy(logits, labels, z_loss, label_smoothing, softcap)
    if softcap and device.type == "cpu":
        monkeypatch.setattr("liger_kernel.ops.cross_entropy.tanh", tanh)
        softcap = Scalar(softcap)
    liger_losses, liger_d_logits = _liger_cross_entropy(logits.clone(), labels, z_loss, label_smoothing, softcap)
    torch.testing.assert_close(liger_losses, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(liger_d_logits, d_logits, rtol=1e-5, atol=1e-6)


@triton.jit
def tanh(x):
    """Replaces libdevice's tanh, which Triton's interpreter does not have."""
    return 2 * tl.sigmoid(2 * x) - 1


class Scalar(float):
    """A float with the method `to`. A kernel calls `to`, but Triton's interpreter passes floats, which have no `to`."""

    def to(self, dtype):
        return self


def test_operator_keeps_torchs_rules(device):
    hidden, weight, labels = draw(device)
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        arguments = (hidden, weight, labels, 16, 0.0, 0.0, 0.0, torch.float32, *wanted)
        torch.library.opcheck(linear_cross_entropy, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_second_backward_pass_is_refused(device):
    hidden, weight, labels = draw(device)
    loss = LinearCrossEntropy(16)(hidden.requires_grad_(), weight.requires_grad_(), labels)
    torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    with pytest.raises(RuntimeError, match="a loss allows only one backward pass; got a second one"):
        torch.autograd.grad(loss, [hidden, weight])


def test_wrong_settings_and_shapes_are_named(device):
    hidden, weight, labels = draw(device)
    with pytest.raises(ValueError, match="chunk_size must be at least 1 token; got 0"):
        LinearCrossEntropy(0)
    with pytest.raises(ValueError, match=r"z_loss must be a coefficient of at least 0; got -0.1"):
        LinearCrossEntropy(16, z_loss=-0.1)
    with pytest.raises(ValueError, match=r"label_smoothing must be from 0 to 1; got 1.5"):
        LinearCrossEntropy(16, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"got \(50, 16\), \(37, 16\) and \(49,\)"):
        LinearCrossEntropy(16)(hidden, weight, labels[1:])
    with pytest.raises(ValueError, match=r"got \(50, 16\), \(37, 15\) and \(50,\)"):
        LinearCrossEntropy(16)(hidden, weight[:, 1:], labels)


def test_ligers_kernel_runs_on_the_gpu_of_the_logits(monkeypatch):
    """torch.cuda.device_of does nothing for tensors on the CPU, so the test looks at its argument."""
    from liger_kernel.ops import cross_entropy

    done: list[Any] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        done.append(x)
        yield
        done.append("left")

    class Kernel(dict):
        arg_names = cross_entropy.liger_cross_entropy_kernel.arg_names

        def __missing__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda **arguments: done.append("launched")

    monkeypatch.setattr(cross_entropy, "liger_cross_entropy_kernel", Kernel())
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    logits = torch.zeros(2, 8)
    _liger_cross_entropy(logits, torch.zeros(2, dtype=torch.long), 0.0, 0.0, 0.0)
    assert done[0] is logits and done[1:] == ["launched", "left"]
