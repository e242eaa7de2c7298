"""Recomputation uses the same default dtype as the forward pass. Hooks do not see what a policy keeps."""

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint, create_selective_checkpoint_contexts

from fa_train.memory.checkpointing import block_runner
from fa_train.memory.recompute import recomputed


class SavesEmptyTensor(torch.autograd.Function):
    """Saves an empty tensor of the default dtype, as torch 2.11 does for nested checkpoints."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.empty(0), x)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[1]


def gradient(run, passes=1):
    """Returns the gradient of `run`. The forward pass runs with default dtype bf16, as in Lightning with bf16-true."""
    x = torch.full((2,), 3.0, requires_grad=True)
    with HalfPrecision("bf16-true").forward_context():
        y = run(SavesEmptyTensor.apply, x).sum()
    for _ in range(passes):
        y.backward(retain_graph=True)
    assert torch.get_default_dtype() == torch.float32
    return x.grad


def test_torchs_checkpoint_finds_another_dtype():
    """If torch's own checkpoint raised no CheckpointError here, `recomputed` would not be needed."""
    with pytest.raises(CheckpointError, match="different metadata"):
        gradient(partial(checkpoint, use_reentrant=False))


@pytest.mark.parametrize(
    "run",
    [
        recomputed,
        lambda function, x: recomputed(recomputed, function, x),
        block_runner("selective"),
        block_runner("full"),
    ],
    ids=["once", "nested", "selective", "full"],
)
def test_recomputation_has_the_default_dtype_of_the_forward_pass(run):
    assert torch.equal(gradient(run), torch.full((2,), 3.0))


def test_several_backward_passes_of_one_graph():
    assert torch.equal(gradient(recomputed, passes=2), torch.full((2,), 6.0))


def test_the_default_dtype_is_restored_after_an_error():
    calls = []

    def fails_when_recomputed(x):
        calls.append(torch.get_default_dtype())
        if len(calls) == 2:
            raise RuntimeError("recomputed")
        return SavesEmptyTensor.apply(x)

    with pytest.raises(RuntimeError, match="recomputed"):
        gradient(lambda _, x: recomputed(fails_when_recomputed, x))
    assert calls == [torch.bfloat16, torch.bfloat16] and torch.get_default_dtype() == torch.float32


def test_hooks_for_saved_tensors_do_not_see_what_a_policy_keeps():
    """From torch 2.15 on, torch warns if `recomputed` does not say whether the hooks should see these tensors."""
    keeps_sines = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    x, seen = torch.arange(3.0, requires_grad=True), []

    def pack(tensor):
        seen.append(tensor.detach().clone())
        return tensor

    with warnings.catch_warnings(action="error"), saved_tensors_hooks(pack, lambda tensor: tensor):
        recomputed(lambda x: x.sin().exp(), x, contexts=keeps_sines).sum().backward()
    assert torch.allclose(x.grad, x.detach().sin().exp() * x.detach().cos())
    assert seen and all(not torch.equal(tensor, x.sin()) for tensor in seen)
