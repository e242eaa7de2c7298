"""Computes the FFN in chunks of tokens, so that most tensors with ffn_dim channels hold only one chunk of tokens.

The forward pass of an FFN saves the input and the weights of the FFN. The backward pass recomputes the activations of
each chunk (ALST, arXiv:2506.13996). With keep=True, the output of the first matmul is also saved, and
memory.offload=all moves it to the host. Outputs and input gradients differ from those of an FFN without chunks only by
rounding. The matmul library may split smaller products differently, and a fused kernel rounds SwiGLU and GeGLU only
once. Gradients of weights and adapters are summed over chunks in fp32.

The loops over chunks are inside custom operators. torch.compile would unroll a Python loop and mix operations of
different chunks, and would then need memory for ffn_dim channels of all tokens.

To save memory traffic, activation kernels overwrite their inputs, and matmuls write directly to the rows of the result.
Memory traffic limits the speed of everything except the matmuls.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.glu import UNITS, glu, glu_backward, glu_gradient
from fa_train.memory.loss import add_product
from fa_train.models.autocast import compute_dtype
from fa_train.models.config import Activation
from fa_train.models.nf4 import nf4_weight


class LinearTensors(NamedTuple):
    """The tensors of a linear layer. The layer computes x W^T + bias + (x A^T) B^T.

    weight: the matrix W, (rows, columns), or the 4-bit codes of W.
    bias: (rows,), or None.
    a: the matrices A of all adapters of the layer, joined into one matrix, (rank, columns). rank is the sum of the
    adapters' ranks. b: the matrices B times LoRA.scale, joined into one matrix, (rows, rank). Without adapters, a and b
    are None.
    The other fields are the parts of a 4-bit weight, in the order of fa_train.models.nf4.NF4_PARTS, or None.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None = None
    b: Tensor | None = None
    quantized_scalers: Tensor | None = None
    quantization_factor: Tensor | None = None
    scaler_mean: Tensor | None = None
    nf4: Tensor | None = None

    def dense(self, shape: tuple[int, int], dtype: torch.dtype) -> "LinearTensors":
        """Returns the layer with W and the bias in `dtype`. shape: (rows, columns), the shape of W."""
        parts = [part for part in (self.weight, *self[4:]) if part is not None]
        weight = self.weight.to(dtype) if self.nf4 is None else nf4_weight(parts, *shape, dtype)
        return LinearTensors(weight, None if self.bias is None else self.bias.to(dtype), self.a, self.b)

    def with_rounded_adapters(self, dtype: torch.dtype) -> "LinearTensors":
        """Returns the layer with A and B in `dtype`. Autograd records the conversion, and converts the gradients back.

        W and the bias are rounded inside the operators, so that the rounded copies do not exist between the passes.
        """
        a, b = (x if x is None else x.to(dtype) for x in (self.a, self.b))
        return self._replace(a=a, b=b)


FIELDS = len(LinearTensors._fields)
Fields = Sequence[Tensor | None]  # the fields of a LinearTensors; operators cannot take a NamedTuple


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
    x: Tensor, up: LinearTensors, down: LinearTensors, activation: Activation, chunk_size: int, keep: bool = False
) -> Tensor:
    """Computes down(activate(up(x))) in chunks of chunk_size tokens.

    Shapes: x (total, dim) -> (total, dim). The weight of `up` is (2 * ffn_dim, dim), or (ffn_dim, dim) for gelu. The
    weight of `down` is (dim, ffn_dim).
    The result has autocast's dtype, or x's dtype without autocast. The gradients of
    weights, biases and adapters are computed only for tensors that require them. The gradient of x is always computed.
    Gradients of adapters are rounded to the result's dtype.
    keep: whether to save up(x) of all tokens. With keep=False, the backward pass recomputes up(x).
    Raises: ValueError if the shapes do not match.
    """
    shapes = _weight_shapes(x.shape[-1], down, activation)
    if x.dim() != 2 or any(
        layer.nf4 is None and layer.weight.shape != shape for layer, shape in zip((up, down), shapes, strict=True)
    ):
        raise ValueError(
            f"x, up and down must be (total, dim), (rows, dim) and (dim, ffn_dim) for {activation}; "
            f"got {tuple(x.shape)}, {tuple(up.weight.shape)} and {tuple(down.weight.shape)}"
        )
    x = x.to(compute_dtype(x))
    tensors = [*up.with_rounded_adapters(x.dtype), *down.with_rounded_adapters(x.dtype)]
    if keep and torch.is_grad_enabled():
        kept: Tensor = _Kept.apply(activation, chunk_size, x, *tensors)
        return kept
    placeholder = _Backward.apply(activation, chunk_size, x, *tensors)
    detached = (t if t is None else t.detach() for t in tensors)
    y: Tensor = _Forward.apply(placeholder, activation, chunk_size, x.detach(), *detached)
    return y


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
    def forward(ctx: Any, activation: str, chunk_size: int, x: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(None, x, *tensors)
        ctx.activation, ctx.chunk_size = activation, chunk_size
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        projected, x, *tensors = ctx.saved_tensors
        up, down, needs = tensors[:FIELDS], tensors[FIELDS:], list(ctx.needs_input_grad[3:])
        dx, found = mlp_backward(dy, x, up, down, projected, ctx.activation, ctx.chunk_size, needs)
        gradients = iter(found)
        return None, None, dx, *[next(gradients) if needed else None for needed in needs]


class _Kept(_Backward):
    """The autograd node for keep=True. `forward` computes the FFN and saves up(x). `_Backward.backward` reads it."""

    @staticmethod
    def forward(ctx: Any, activation: str, chunk_size: int, x: Tensor, *tensors: Tensor | None) -> Tensor:
        y, projected = mlp_forward(x, tensors[:FIELDS], tensors[FIELDS:], activation, chunk_size, True)
        ctx.save_for_backward(projected, x, *tensors)
        ctx.activation, ctx.chunk_size = activation, chunk_size
        return y


class _Forward(torch.autograd.Function):
    """The autograd node whose forward computes the FFN's output.

    The input `placeholder` is the result of `_Backward`. The backward of `_Forward` computes nothing: it returns dy as
    the gradient of `placeholder`. Autograd passes dy to `_Backward`, which computes the FFN's gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, placeholder: Tensor, activation: str, chunk_size: int, x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        return mlp_forward(x, tensors[:FIELDS], tensors[FIELDS:], activation, chunk_size, False)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, *[None] * (3 + 2 * FIELDS)


@torch.library.custom_op("fa_train::mlp_forward", mutates_args=())
def mlp_forward(
    x: Tensor, up: Fields, down: Fields, activation: str, chunk_size: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """Returns the FFN's output, (total, dim), and up(x), which is empty if keep is False.

    up, down: the fields of each layer's LinearTensors. The adapters have x's dtype.
    """
    with torch.autocast(x.device.type, enabled=False):
        first, second = _dense(x, up, down, activation)
        y = x.new_empty(x.shape)
        kept = x.new_empty(x.shape[0] if keep else 0, first.weight.shape[0])
        for rows in row_chunks(x.shape[0], chunk_size):
            projected = _linear(x[rows], first, out=kept[rows] if keep else None)
            activated = activate_outside_autograd(projected, activation, in_place=not keep)
            del projected
            _linear(activated, second, out=y[rows])
            del activated  # free the activations before the next chunk allocates memory
    return y, kept


@mlp_forward.register_fake
def _forward_fake(
    x: Tensor, up: Fields, down: Fields, activation: str, chunk_size: int, keep: bool
) -> tuple[Tensor, Tensor]:
    (up_dim, _), _ = _weight_shapes(x.shape[1], LinearTensors._make(down), activation)
    return x.new_empty(x.shape), x.new_empty(x.shape[0] if keep else 0, up_dim)


@torch.library.custom_op("fa_train::mlp_backward", mutates_args=())
def mlp_backward(
    dy: Tensor,
    x: Tensor,
    up: Fields,
    down: Fields,
    projected: Tensor | None,
    activation: str,
    chunk_size: int,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients of x, and of the tensors in `up` and `down` that need a gradient.

    up, down: as in mlp_forward. projected: up(x), or None to recompute it.
    needs: for each tensor in `up` and `down`, whether to compute its gradient.
    """
    tensors = [*up, *down]
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = [
        x.new_zeros(t.shape, dtype=dtype) if t is not None and needed else None
        for t, needed in zip(tensors, needs, strict=True)
    ]
    dx = x.new_empty(x.shape)
    with torch.autocast(x.device.type, enabled=False):
        first, second = _dense(x, up, down, activation)
        for rows in row_chunks(x.shape[0], chunk_size):
            of_chunk = _linear(x[rows], first) if projected is None else projected[rows]
            d_activated = _input_gradient(dy[rows], second)
            activated, d_projected = activation_backward(of_chunk, d_activated, activation, in_place=projected is None)
            del of_chunk, d_activated
            _add_gradients(sums[FIELDS:], dy[rows], activated, second)
            del activated  # free the activations before the matmuls below allocate memory
            _input_gradient(d_projected, first, out=dx[rows])
            _add_gradients(sums[:FIELDS], d_projected, x[rows], first)
            _add_bias_gradient(sums[:FIELDS], d_projected)
            _add_bias_gradient(sums[FIELDS:], dy[rows])
            del d_projected
    return dx, [d.to(t.dtype) for d, t in zip(sums, tensors, strict=True) if d is not None and t is not None]


@mlp_backward.register_fake
def _backward_fake(dy: Tensor, x: Tensor, up: Fields, down: Fields, *arguments: Any) -> tuple[Tensor, list[Tensor]]:
    needed = [t for t, is_needed in zip((*up, *down), arguments[-1], strict=True) if t is not None and is_needed]
    return x.new_empty(x.shape), [t.new_empty(t.shape) for t in needed]


def _weight_shapes(dim: int, down: LinearTensors, activation: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of the weights of `up` and `down`, which are (up_dim, dim) and (dim, ffn_dim)."""
    # a byte of a 4-bit weight holds the codes of two elements
    ffn_dim = down.weight.shape[1] if down.nf4 is None else 2 * down.weight.numel() // dim
    return (ffn_dim if activation == "gelu" else 2 * ffn_dim, dim), (dim, ffn_dim)


def _dense(x: Tensor, up: Fields, down: Fields, activation: str) -> tuple[LinearTensors, LinearTensors]:
    """Returns the first and the second layer of the FFN, with weights and biases in x's dtype."""
    first, second = LinearTensors._make(up), LinearTensors._make(down)
    of_first, of_second = _weight_shapes(x.shape[1], second, activation)
    return first.dense(of_first, x.dtype), second.dense(of_second, x.dtype)


def _linear(x: Tensor, layer: LinearTensors, out: Tensor | None = None) -> Tensor:
    if layer.bias is None:
        y = torch.mm(x, layer.weight.T, out=out)
    else:
        y = torch.addmm(layer.bias, x, layer.weight.T, out=out)
    if layer.a is not None and layer.b is not None:
        y.addmm_(x @ layer.a.T, layer.b.T)
    return y


def _input_gradient(dy: Tensor, layer: LinearTensors, out: Tensor | None = None) -> Tensor:
    dx = torch.mm(dy, layer.weight, out=out)
    if layer.a is not None and layer.b is not None:
        dx.addmm_(dy @ layer.b, layer.a)
    return dx


def _add_gradients(sums: Fields, dy: Tensor, x: Tensor, layer: LinearTensors) -> None:
    """Adds the gradients of a layer's matrices to `sums`, which has None for a tensor that needs no gradient."""
    d_weight, _, d_a, d_b, *_ = sums
    if d_weight is not None:
        add_product(d_weight, dy.T, x)
    if d_a is not None and layer.b is not None:
        add_product(d_a, (dy @ layer.b).T, x)
    if d_b is not None and layer.a is not None:
        add_product(d_b, dy.T, x @ layer.a.T)


def _add_bias_gradient(sums: Fields, dy: Tensor) -> None:
    d_bias = LinearTensors._make(sums).bias
    if d_bias is not None:
        d_bias += dy.sum(0, dtype=d_bias.dtype)


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


def row_chunks(total: int, chunk_size: int) -> list[slice]:
    return [slice(start, start + chunk_size) for start in range(0, total, chunk_size)]
