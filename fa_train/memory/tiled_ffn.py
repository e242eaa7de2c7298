"""Computes the FFN in chunks of tokens, so that most tensors with ffn_dim channels hold only one chunk of tokens.

The forward pass of an FFN saves the input and the weights of the FFN. The backward pass recomputes the activations of
each chunk (ALST, arXiv:2506.13996). With keep=True, the output of the first matmul is also saved, and
memory.offload=all moves it to the host. Outputs and input gradients differ from those of an FFN without chunks only by
rounding. The matmul library may split smaller products differently, and a fused kernel rounds SwiGLU and GeGLU only
once. Weight gradients are summed over chunks in fp32.

To save memory traffic, activation kernels overwrite their inputs, and matmuls write directly to the rows of the result.
Memory traffic limits the speed of everything except the matmuls.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.glu import UNITS, glu, glu_backward, glu_gradient
from fa_train.memory.loss import add_product
from fa_train.models.autocast import compute_dtype
from fa_train.models.config import Activation


def activate(projected: Tensor, activation: str) -> Tensor:
    """Applies SwiGLU, GeGLU (arXiv:2002.05202) or GELU. GeGLU and GELU use the tanh approximation of GELU.

    Shapes: (..., up_dim) -> (..., ffn_dim). For GELU, up_dim is ffn_dim. Otherwise, up_dim is 2 * ffn_dim, and gates
    come before values.
    """
    if activation == "gelu":
        return F.gelu(projected, approximate="tanh")
    gate, value = projected.chunk(2, dim=-1)
    if activation == "geglu":
        return F.gelu(gate, approximate="tanh") * value
    return F.silu(gate) * value


def tiled_mlp(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: Activation,
    chunk_size: int,
    keep: bool = False,
) -> Tensor:
    """Computes down(activate(up(x))) in chunks of chunk_size tokens.

    Shapes: x (total, dim); up (2 * ffn_dim, dim), or (ffn_dim, dim) for gelu; down (dim, ffn_dim); the result
    (total, dim). A bias is None or has one element per row of its weight.
    The result has autocast's dtype, or x's dtype without autocast.
    keep: whether to save up(x) of all tokens. With keep=False, the backward pass recomputes up(x).
    Raises: ValueError if the shapes do not match.
    """
    ffn_dim = up.shape[0] if activation == "gelu" else up.shape[0] // 2
    if x.dim() != 2 or up.shape[1:] != x.shape[1:] or down.shape[1:] != (ffn_dim,):
        raise ValueError(
            f"x, up and down must be (total, dim), (rows, dim) and (dim, ffn_dim) for {activation}; "
            f"got {tuple(x.shape)}, {tuple(up.shape)} and {tuple(down.shape)}"
        )
    x = x.to(compute_dtype(x))
    if keep and torch.is_grad_enabled():
        return _Kept.apply(x, up, up_bias, down, down_bias, activation, chunk_size)
    placeholder = _Backward.apply(x, up, up_bias, down, down_bias, activation, chunk_size)
    weights = (w if w is None else w.detach() for w in (up, up_bias, down, down_bias))
    return _Forward.apply(placeholder, x.detach(), *weights, activation, chunk_size)


class _Backward(torch.autograd.Function):
    """The autograd node whose backward computes the FFN's gradients. `forward` returns a placeholder without memory.

    The forward pass calls two autograd functions: first `_Backward`, which saves all tensors that the backward pass
    needs, and then `_Forward`, which computes the FFN:

        forward:   x  -> _Backward -> placeholder -> _Forward -> y
        backward:  dx <- _Backward <- dy          <- _Forward <- dy

    Activation checkpointing recomputes a block only until all saved tensors exist again. The recomputation therefore
    ends before the FFN, unless a norm follows the FFN.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activation: Activation,
        chunk_size: int,
    ) -> Tensor:
        ctx.save_for_backward(x, up, up_bias, down, down_bias)
        ctx.activation, ctx.chunk_size = activation, chunk_size
        return x.new_zeros(()).expand(x.shape[0], down.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dy, None, *ctx.saved_tensors)


def _gradients(ctx: Any, dy: Tensor, projected: Tensor | None, *saved: Tensor | None) -> tuple[Tensor | None, ...]:
    x, up, up_bias, down, down_bias = saved
    with_weights = any(ctx.needs_input_grad[1:5])  # False if all weights of the FFN are frozen
    dx, *d_weights = mlp_backward(
        dy, x, up, up_bias, down, down_bias, projected, ctx.activation, ctx.chunk_size, with_weights
    )
    needed = (d if needs else None for d, needs in zip(d_weights, ctx.needs_input_grad[1:5], strict=True))
    return dx, *needed, None, None


class _Kept(torch.autograd.Function):
    """The autograd node for keep=True, whose backward does not compute up(x) again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activation: Activation,
        chunk_size: int,
    ) -> Tensor:
        y, projected = mlp_forward(x, up, up_bias, down, down_bias, activation, chunk_size, True)
        ctx.save_for_backward(projected, x, up, up_bias, down, down_bias)
        ctx.activation, ctx.chunk_size = activation, chunk_size
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, dy, *ctx.saved_tensors)


class _Forward(torch.autograd.Function):
    """The autograd node whose forward computes the FFN's output.

    The input `placeholder` is the result of `_Backward`. The backward of `_Forward` computes nothing: it returns dy as
    the gradient of `placeholder`. Autograd passes dy to `_Backward`, which computes the FFN's gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        placeholder: Tensor,
        x: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        activation: Activation,
        chunk_size: int,
    ) -> Tensor:
        return mlp_forward(x, up, up_bias, down, down_bias, activation, chunk_size, False)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, None, None, None, None, None, None, None


@torch.library.custom_op("fa_train::mlp_forward", mutates_args=())
def mlp_forward(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the FFN's output, (total, dim), and up(x), which is empty if keep is False.

    mlp_forward is a custom operator, so that torch.compile does not unroll the loop over chunks.
    """
    with torch.autocast(x.device.type, enabled=False):
        up, up_bias, down, down_bias = _rounded(x.dtype, up, up_bias, down, down_bias)
        y = x.new_empty(x.shape[0], down.shape[0])
        kept = x.new_empty(x.shape[0] if keep else 0, up.shape[0])
        for rows in row_chunks(x.shape[0], chunk_size):
            if keep:
                activated = activate_outside_autograd(
                    _linear(x[rows], up, up_bias, out=kept[rows]), activation, in_place=False
                )
            else:
                activated = activate_outside_autograd(F.linear(x[rows], up, up_bias), activation, in_place=True)
            _linear(activated, down, down_bias, out=y[rows])
            del activated  # free the activations before the next chunk allocates memory
    return y, kept


@mlp_forward.register_fake
def _forward_fake(
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], down.shape[0]), x.new_empty(x.shape[0] if keep else 0, up.shape[0])


@torch.library.custom_op("fa_train::mlp_backward", mutates_args=())
def mlp_backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    projected: Tensor | None,
    activation: str,
    chunk_size: int,
    with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, up, up_bias, down and down_bias. A gradient that is not needed is an empty tensor.

    projected: up(x), or None to recompute it.
    """
    weights = (up, up_bias, down, down_bias)
    sums = [x.new_zeros(w.shape if with_weights and w is not None else 0, dtype=torch.float32) for w in weights]
    d_up, d_up_bias, d_down, d_down_bias = sums
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.autocast(x.device.type, enabled=False):
        up, up_bias, down, _ = _rounded(x.dtype, *weights)
        for rows in row_chunks(x.shape[0], chunk_size):
            if projected is None:
                recomputed = F.linear(x[rows], up, up_bias)
                activated, d_projected = activation_backward(recomputed, dy[rows] @ down, activation, in_place=True)
                del recomputed
            else:
                kept = projected[rows]
                activated, d_projected = activation_backward(kept, dy[rows] @ down, activation, in_place=False)
            if with_weights:
                add_product(d_down, dy[rows].T, activated)
            del activated  # free the activations before the matmuls below allocate memory
            torch.mm(d_projected, up, out=dx[rows])
            if with_weights:
                add_product(d_up, d_projected.T, x[rows])
                if up_bias is not None:
                    d_up_bias += d_projected.sum(0, dtype=torch.float32)
                if down_bias is not None:
                    d_down_bias += dy[rows].sum(0, dtype=torch.float32)
            del d_projected
    d_up, d_up_bias, d_down, d_down_bias = (
        d if w is None else d.to(w.dtype) for d, w in zip(sums, weights, strict=True)
    )
    return dx, d_up, d_up_bias, d_down, d_down_bias


@mlp_backward.register_fake
def _backward_fake(
    dy: Tensor,
    x: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    projected: Tensor | None,
    activation: str,
    chunk_size: int,
    with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_up, d_up_bias, d_down, d_down_bias = (
        x.new_empty(0, dtype=torch.float32 if w is None else w.dtype)
        if w is None or not with_weights
        else w.new_empty(w.shape)
        for w in (up, up_bias, down, down_bias)
    )
    return x.new_empty(x.shape), d_up, d_up_bias, d_down, d_down_bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
    """Computes F.linear into `out`."""
    if bias is None:
        return torch.mm(x, weight.T, out=out)
    return torch.addmm(bias, x, weight.T, out=out)


def activate_outside_autograd(projected: Tensor, activation: str, *, in_place: bool) -> Tensor:
    """Computes `activate` with less memory, outside autograd. in_place: whether GELU may overwrite `projected`."""
    if activation in UNITS:
        return glu(projected, activation)
    gelu = torch.ops.aten.gelu_ if in_place else torch.ops.aten.gelu
    return gelu(projected, approximate="tanh")


def activation_backward(
    projected: Tensor, d_activated: Tensor, activation: str, *, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Returns the activations and the gradient of `projected`. in_place: whether `projected` may be overwritten.

    This function computes the derivatives itself, because autograd does not record inside a custom operator.
    """
    if activation == "gelu":
        torch.ops.aten.gelu_backward(d_activated, projected, approximate="tanh", grad_input=d_activated)
        return activate_outside_autograd(projected, activation, in_place=in_place), d_activated
    if not in_place:
        d_projected = glu_gradient(projected, d_activated, activation)
        return d_activated, d_projected
    glu_backward(projected, d_activated, activation)
    return d_activated, projected


def _rounded(dtype: torch.dtype, *weights: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    up, up_bias, down, down_bias = (w if w is None else w.to(dtype) for w in weights)
    assert up is not None and down is not None
    return up, up_bias, down, down_bias


def row_chunks(total: int, chunk_size: int) -> list[slice]:
    return [slice(start, start + chunk_size) for start in range(0, total, chunk_size)]
