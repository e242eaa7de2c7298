"""Computes an FFN in chunks of tokens if the FFN has adapters or 4-bit weights. tiled_ffn.py computes other FFNs.

The weights of the FFN are frozen. The backward pass recomputes the activations of each chunk, and computes the
gradients of the input and of the adapters. The gradients of the adapters are summed over chunks in fp32, and the sums
are rounded to the dtype of the input. The loops over chunks are inside custom operators. torch.compile would unroll a
Python loop and mix operations of different chunks, and would then need memory for ffn_dim channels of all tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_train.memory.loss import add_product
from fa_train.memory.tiled_ffn import activate_outside_autograd, activation_backward, row_chunks
from fa_train.models.autocast import compute_dtype
from fa_train.models.config import Activation
from fa_train.models.nf4 import nf4_weight


class FrozenLinear(NamedTuple):
    """The tensors of a linear layer with frozen weights. The layer computes x W^T + bias + (x A^T) B^T.

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

    def dense(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns W, (rows, columns), in `dtype`."""
        if self.nf4 is None:
            return self.weight.to(dtype)
        parts = [part for part in (self.weight, *self[4:]) if part is not None]
        return nf4_weight(parts, rows, columns, dtype)


FIELDS = len(FrozenLinear._fields)


def tiled_adapted_mlp(
    x: Tensor, up: FrozenLinear, down: FrozenLinear, activation: Activation, chunk_size: int
) -> Tensor:
    """Computes down(activate(up(x))) in chunks of chunk_size tokens.

    Shapes: x (total, dim) -> (total, dim). The result has autocast's dtype, or x's dtype without autocast.
    Raises: ValueError if x is not (total, dim). ValueError if a weight or a bias is not frozen while gradients are
    recorded.
    """
    if x.dim() != 2:
        raise ValueError(f"x must be (total, dim); got {tuple(x.shape)}")
    weights = {"up.weight": up.weight, "up.bias": up.bias, "down.weight": down.weight, "down.bias": down.bias}
    trained = [name for name, w in weights.items() if w is not None and w.requires_grad]
    if trained and torch.is_grad_enabled():
        raise ValueError(
            "memory.mlp_chunk needs frozen weights in an FFN with adapters; "
            f"got weights that are trained: {', '.join(trained)}. Freeze them, or choose memory=selective"
        )
    x = x.to(compute_dtype(x))
    tensors = [*_rounded_adapters(up, x.dtype), *_rounded_adapters(down, x.dtype)]
    placeholder = _Backward.apply(activation, chunk_size, x, *tensors)
    result: Tensor = _Forward.apply(
        placeholder, activation, chunk_size, x.detach(), *(t if t is None else t.detach() for t in tensors)
    )
    return result


def _rounded_adapters(linear: FrozenLinear, dtype: torch.dtype) -> FrozenLinear:
    a, b = (x if x is None else x.to(dtype) for x in (linear.a, linear.b))
    return linear._replace(a=a, b=b)


class _Backward(torch.autograd.Function):
    """The autograd node whose backward computes the gradients of x and of the adapters. See tiled_ffn._Backward."""

    @staticmethod
    def forward(ctx: Any, activation: str, chunk_size: int, x: Tensor, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.activation, ctx.chunk_size = activation, chunk_size
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        up, down = tensors[:FIELDS], tensors[FIELDS:]
        dx, *d_adapters = adapted_mlp_backward(dy, x, up, down, ctx.activation, ctx.chunk_size)
        gradients: list[Tensor | None] = [None] * (2 * FIELDS)
        for place, gradient in zip((2, 3, FIELDS + 2, FIELDS + 3), d_adapters, strict=True):
            gradients[place] = None if tensors[place] is None else gradient
        return None, None, dx, *gradients


class _Forward(torch.autograd.Function):
    """The autograd node whose forward computes the FFN's output. See tiled_ffn._Forward."""

    @staticmethod
    def forward(
        ctx: Any, placeholder: Tensor, activation: str, chunk_size: int, x: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        return adapted_mlp_forward(x, tensors[:FIELDS], tensors[FIELDS:], activation, chunk_size)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, *[None] * (3 + 2 * FIELDS)


@torch.library.custom_op("fa_train::adapted_mlp_forward", mutates_args=())
def adapted_mlp_forward(
    x: Tensor, up: Sequence[Tensor | None], down: Sequence[Tensor | None], activation: str, chunk_size: int
) -> Tensor:
    """Returns the FFN's output, (total, dim). up, down: the fields of each layer's FrozenLinear."""
    with torch.autocast(x.device.type, enabled=False):
        first, second = _dense(x, up, down, activation)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for rows in row_chunks(x.shape[0], chunk_size):
            activated = activate_outside_autograd(_linear(x[rows], first), activation, in_place=True)
            _linear(activated, second, out=y[rows])
            del activated  # free the activations before the next chunk allocates memory
    return y


@adapted_mlp_forward.register_fake
def _forward_fake(
    x: Tensor, up: Sequence[Tensor | None], down: Sequence[Tensor | None], activation: str, chunk_size: int
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fa_train::adapted_mlp_backward", mutates_args=())
def adapted_mlp_backward(
    dy: Tensor, x: Tensor, up: Sequence[Tensor | None], down: Sequence[Tensor | None], activation: str, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, up.a, up.b, down.a and down.b. Without adapters, gradients of a and b are empty."""
    adapters = [*up[2:4], *down[2:4]]
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = [x.new_zeros(0 if w is None else w.shape, dtype=dtype) for w in adapters]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.autocast(x.device.type, enabled=False):
        first, second = _dense(x, up, down, activation)
        for rows in row_chunks(x.shape[0], chunk_size):
            projected = _linear(x[rows], first)
            d_activated = _input_gradient(dy[rows], second)
            activated, d_projected = activation_backward(projected, d_activated, activation, in_place=True)
            del projected, d_activated
            _add_adapter_gradients(sums[2:], dy[rows], activated, second)
            del activated  # free the activations before the products below allocate memory
            _input_gradient(d_projected, first, out=dx[rows])
            _add_adapter_gradients(sums[:2], d_projected, x[rows], first)
            del d_projected
    a_up, b_up, a_down, b_down = (d.to(x.dtype) for d in sums)
    return dx, a_up, b_up, a_down, b_down


@adapted_mlp_backward.register_fake
def _backward_fake(
    dy: Tensor, x: Tensor, up: Sequence[Tensor | None], down: Sequence[Tensor | None], activation: str, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a_up, b_up, a_down, b_down = (x.new_empty(0 if w is None else w.shape) for w in (*up[2:4], *down[2:4]))
    return x.new_empty(x.shape), a_up, b_up, a_down, b_down


class _Dense(NamedTuple):
    """A linear layer whose tensors have the dtype of x. `weight` is not quantized."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None


def _dense(
    x: Tensor, up: Sequence[Tensor | None], down: Sequence[Tensor | None], activation: str
) -> tuple[_Dense, _Dense]:
    """Returns the first and the second layer of the FFN, with weights in x's dtype."""
    first, second = FrozenLinear(*up), FrozenLinear(*down)  # type: ignore[arg-type]
    dim = x.shape[1]
    ffn_dim = second.weight.shape[1] if second.nf4 is None else 2 * second.weight.numel() // dim
    rows = ffn_dim if activation == "gelu" else 2 * ffn_dim
    layers = []
    for layer, shape in ((first, (rows, dim)), (second, (dim, ffn_dim))):
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        layers.append(_Dense(layer.dense(*shape, x.dtype), bias, layer.a, layer.b))
    return layers[0], layers[1]


def _linear(x: Tensor, layer: _Dense, out: Tensor | None = None) -> Tensor:
    if layer.bias is None:
        y = torch.mm(x, layer.weight.T, out=out)
    else:
        y = torch.addmm(layer.bias, x, layer.weight.T, out=out)
    if layer.a is not None and layer.b is not None:
        y.addmm_(x @ layer.a.T, layer.b.T)
    return y


def _input_gradient(dy: Tensor, layer: _Dense, out: Tensor | None = None) -> Tensor:
    dx = torch.mm(dy, layer.weight, out=out)
    if layer.a is not None and layer.b is not None:
        dx.addmm_(dy @ layer.b, layer.a)
    return dx


def _add_adapter_gradients(sums: list[Tensor], dy: Tensor, x: Tensor, layer: _Dense) -> None:
    """Adds the gradients of A and B to the two tensors in `sums`."""
    if layer.a is None or layer.b is None:
        return
    d_a, d_b = sums
    add_product(d_a, (dy @ layer.b).T, x)
    add_product(d_b, dy.T, x @ layer.a.T)
