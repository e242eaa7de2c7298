"""Fuses the last linear layer with the cross entropy, so that the logits of all tokens never exist at the same time.

A token with hidden state h has the logits z = W h and the loss logsumexp(z) - z[label]. The gradients are:

    dz = softmax(z) - onehot(label)        dh = W^T dz        dW = the sum of dz h^T over all tokens

The gradients for a token need only this token's logits. The forward pass therefore processes the tokens in chunks, and
computes the logits, the losses, and the gradients of the hidden states and of the weight for each chunk. The backward
pass only multiplies the stored gradients by the gradient of the loss.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fa_kernels.options import OPTIONS
from fa_train.bounds import Fraction, NonNegativeFloat, PositiveInt
from fa_train.models.autocast import compute_dtype
from fa_train.private_names import require_parameters

IGNORE_INDEX = -100  # a token with the label -100 has no loss, as in torch


@dataclass(frozen=True)
class LinearCrossEntropy:
    """Computes the cross entropy of the logits hidden @ weight.T, summed over all labels except -100.

    chunk_size: tokens per chunk. Only chunk_size * vocab_size logits exist at a time.
    z_loss: for each label except -100, adds z_loss * logsumexp ** 2 to the loss, so that logits do not drift. PaLM uses
    z_loss=1e-4 (arXiv:2204.02311, section 5).
    label_smoothing: as in torch's cross_entropy. z_loss and label_smoothing also apply in validation.
    A loss allows only one backward pass, even with retain_graph=True.
    Raises: ValueError if chunk_size < 1, z_loss < 0, or label_smoothing is not between 0 and 1.
    """

    chunk_size: PositiveInt
    z_loss: NonNegativeFloat = 0.0
    label_smoothing: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"memory.loss.chunk_size must be at least 1 token; got {self.chunk_size}")
        if not 0.0 <= self.z_loss < float("inf"):
            raise ValueError(f"memory.loss.z_loss must be a coefficient of at least 0; got {self.z_loss}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"memory.loss.label_smoothing must be from 0 to 1; got {self.label_smoothing}")

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float = 0.0) -> Tensor:
        """Returns the summed loss in nats, an fp32 scalar.

        Shapes: hidden (total, dim), weight (vocab, dim), labels (total,) int64. Labels of -100 are ignored.
        softcap: if it is not 0, logits are softcap * tanh(hidden @ weight.T / softcap), as in Gemma 2.
        Matrix products are computed in autocast's dtype, or in hidden's dtype without autocast. The softmax is computed
        in fp32. The weight's gradient is accumulated in fp32.
        Raises: ValueError if the shapes do not match.
        """
        if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
            raise ValueError(
                "hidden, weight and labels must be (total, dim), (vocab, dim) and (total,); "
                f"got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
            )
        of_weight = torch.is_grad_enabled() and weight.requires_grad
        of_hidden = torch.is_grad_enabled() and hidden.requires_grad
        return linear_cross_entropy(
            hidden, weight, labels, self.chunk_size, self.z_loss, self.label_smoothing, softcap, compute_dtype(hidden),
            of_hidden, of_weight,
        )[0]  # fmt: skip


@torch.library.custom_op("fa_train::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_size: int,
    z_loss: float,
    label_smoothing: float,
    softcap: float,
    dtype: torch.dtype,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, and the gradients of hidden and weight. A gradient that is not needed is an empty tensor.

    The fused loss is a custom operator, so that torch.compile neither breaks the graph nor unrolls the loop over
    chunks.
    """
    d_hidden = torch.empty_like(hidden) if of_hidden else hidden.new_empty(0)
    d_weight = weight.new_zeros(weight.shape if of_weight else 0, dtype=torch.float32)
    losses = torch.zeros_like(labels, dtype=torch.float32)
    cross_entropy = _liger_cross_entropy if hidden.is_cuda else _torch_cross_entropy
    with torch.autocast(hidden.device.type, enabled=False):
        rounded_weight = weight.to(dtype)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            chunk = hidden[rows].to(dtype)
            logits = chunk @ rounded_weight.T
            losses[rows], d_logits = cross_entropy(logits, labels[rows], z_loss, label_smoothing, softcap)
            del logits
            if of_hidden:
                d_hidden[rows] = d_logits @ rounded_weight
            if of_weight:
                add_product(d_weight, d_logits.T, chunk)
            del chunk, d_logits  # free chunk and d_logits before the next chunk allocates memory
    return losses.sum(), d_hidden, d_weight.to(weight.dtype)


@linear_cross_entropy.register_fake
def _fake(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_size: int,
    z_loss: float,
    label_smoothing: float,
    softcap: float,
    dtype: torch.dtype,
    of_hidden: bool,
    of_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_hidden = torch.empty_like(hidden) if of_hidden else hidden.new_empty(0)
    d_weight = weight.new_empty(weight.shape if of_weight else 0)
    return hidden.new_empty((), dtype=torch.float32), d_hidden, d_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.of_hidden, ctx.of_weight = inputs[-2:]
    ctx.is_spent = False
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_loss: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    if ctx.is_spent:
        raise RuntimeError("a loss allows only one backward pass; got a second one. Compute the loss again")
    d_hidden, d_weight = ctx.saved_tensors
    ctx.is_spent = True
    # multiply in place to save memory
    of_hidden = d_hidden.mul_(d_loss) if ctx.of_hidden else None
    of_weight = d_weight.mul_(d_loss) if ctx.of_weight else None
    return of_hidden, of_weight, *[None] * 8


linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def _torch_cross_entropy(
    logits: Tensor, labels: Tensor, z_loss: float, label_smoothing: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Computes the losses of a chunk and the gradient of its logits. Losses and gradient are 0 where a label is -100.

    Shapes: logits (tokens, vocab), labels (tokens,) -> losses (tokens,) fp32, gradient (tokens, vocab).
    The gradient is `p * (1 + 2 * z_loss * lse) - target`, where p is the softmax and target is the smoothed label. With
    a soft cap, the gradient is multiplied by the derivative of the cap.
    """
    ignored = labels == IGNORE_INDEX
    target = labels.masked_fill(ignored, 0)[:, None]
    logits_dtype, logits = logits.dtype, logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    lse = logits.logsumexp(dim=-1, keepdim=True) if z_loss else None
    log_probabilities = logits.log_softmax(dim=-1)
    losses = -log_probabilities.gather(1, target)[:, 0]
    if label_smoothing:
        losses = losses.lerp(-log_probabilities.mean(dim=-1), label_smoothing)
    d_logits = log_probabilities.exp_()
    if lse is not None:
        losses = losses + z_loss * lse[:, 0].square()
        d_logits *= 1 + 2 * z_loss * lse
    d_logits.scatter_add_(1, target, torch.full_like(target, label_smoothing - 1.0, dtype=d_logits.dtype))
    if label_smoothing:
        d_logits -= label_smoothing / logits.shape[-1]
    if softcap:
        d_logits *= 1 - (logits / softcap).square()
    return losses.masked_fill(ignored, 0.0), d_logits.masked_fill_(ignored[:, None], 0.0).to(logits_dtype)


def _liger_cross_entropy(
    logits: Tensor, labels: Tensor, z_loss: float, label_smoothing: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Returns the same as `_torch_cross_entropy`. Liger's kernel overwrites the logits with their gradient.

    The kernel is called directly, because Liger's wrapper makes the host wait for the GPU twice per call.
    """
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel  # importing Liger needs a GPU

    n_tokens, vocab_size = logits.shape
    losses = torch.zeros_like(labels, dtype=torch.float32)  # the kernel writes no loss for a label of -100
    arguments: dict[str, Any] = dict(
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=labels,
        Y_stride=labels.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=vocab_size,
        n_non_ignore=0,  # used only if losses are averaged
        sum_non_ignore_weight=0,
        weight_sum=0.0,
        ignore_index=IGNORE_INDEX,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        reduction="sum",
        softcap=softcap or None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=softcap != 0.0,
        HAS_GRADIENTS=True,
        BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (vocab_size - 1).bit_length()),
    )
    require_parameters("liger-kernel", "liger_cross_entropy_kernel", liger_cross_entropy_kernel.arg_names, arguments)
    with torch.cuda.device_of(logits):  # Triton launches kernels on the current device
        liger_cross_entropy_kernel[(n_tokens,)](**arguments, num_warps=32, **OPTIONS)
    return losses, logits


def add_product(accumulated: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to `accumulated`, an fp32 tensor. a and b may be fp32, bf16 or fp16."""
    if a.is_cuda and a.dtype != torch.float32:
        # torch.addmm accumulates in fp32 and needs no temporary tensor
        torch.addmm(accumulated, a, b, out_dtype=torch.float32, out=accumulated)
    else:
        accumulated += a @ b
