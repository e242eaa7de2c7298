"""SwiGLU and GeGLU (arXiv:2002.05202), two gated linear units: act(gate) * value, where act is SiLU or GELU.

Each row of the input (rows, 2 ffn_dim) holds ffn_dim gates, followed by ffn_dim values. GELU is computed with its tanh
approximation.

The forward and the backward pass are one kernel each. The output of the forward pass is called the activations. The
backward kernel also recomputes the activations, so the forward pass does not have to save them. The next linear layer
needs the activations to compute the gradient of its weight. The backward kernel overwrites the gradient of the
activations with the activations. `glu_backward` overwrites the input with its gradient, and `glu_gradient` returns the
gradient as a new tensor.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fa_kernels.options import OPTIONS

UNITS = ("swiglu", "geglu")
BLOCK = 1024  # columns per program; in 16-bit dtypes, a thread loads 16 bytes of each operand


@triton.jit
def _row_and_columns(FFN_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Returns this program's row, its columns [BLOCK], and a mask of the columns that exist."""
    blocks: tl.constexpr = (FFN_DIM + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    cols = program % blocks * BLOCK + tl.arange(0, BLOCK)
    # rows are int64, because 131k tokens x 2 x 8192 elements reach 2**31
    return (program // blocks).to(tl.int64), cols, cols < FFN_DIM


@triton.jit
def _act(gate, USES_GELU: tl.constexpr):
    """Returns the activation function (SiLU or GELU) of the gates, and its derivative.

    SiLU is x sigmoid(x). GELU's tanh approximation is x (1 + tanh(u)) / 2 = x sigmoid(2u), where u = sqrt(2 / pi) (x +
    0.044715 x^3).
    """
    if USES_GELU:
        # the constant 1.5957691216057308 is 2 sqrt(2 / pi)
        sigmoid = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        act = gate * sigmoid
        d_2u = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        return act, sigmoid + act * (1.0 - sigmoid) * d_2u
    sigmoid = tl.sigmoid(gate)
    act = gate * sigmoid
    return act, sigmoid + act * (1.0 - sigmoid)


@triton.jit
def _forward_kernel(projected_ptr, activated_ptr, FFN_DIM: tl.constexpr, USES_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One program processes `BLOCK` columns of one row. All tensors are contiguous."""
    row, cols, inside = _row_and_columns(FFN_DIM, BLOCK)
    gate_ptrs = projected_ptr + row * (2 * FFN_DIM) + cols
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate_ptrs + FFN_DIM, mask=inside, other=0.0).to(tl.float32)
    act, _ = _act(gate, USES_GELU)
    tl.store(activated_ptr + row * FFN_DIM + cols, act * value, mask=inside)


@triton.jit
def _backward_kernel(
    projected_ptr, d_activated_ptr, d_projected_ptr, FFN_DIM: tl.constexpr, USES_GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """One program processes `BLOCK` columns of one row.

    d_projected_ptr may equal projected_ptr, because each program overwrites only elements that it has read.
    """
    row, cols, inside = _row_and_columns(FFN_DIM, BLOCK)
    gate_ptrs = projected_ptr + row * (2 * FFN_DIM) + cols
    d_gate_ptrs = d_projected_ptr + row * (2 * FFN_DIM) + cols
    activated_ptrs = d_activated_ptr + row * FFN_DIM + cols
    gate = tl.load(gate_ptrs, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate_ptrs + FFN_DIM, mask=inside, other=0.0).to(tl.float32)
    d_activated = tl.load(activated_ptrs, mask=inside, other=0.0).to(tl.float32)
    act, d_act = _act(gate, USES_GELU)
    tl.store(d_gate_ptrs, d_activated * value * d_act, mask=inside)
    tl.store(d_gate_ptrs + FFN_DIM, d_activated * act, mask=inside)
    tl.store(activated_ptrs, act * value, mask=inside)


def glu(projected: Tensor, unit: str) -> Tensor:
    """Returns act(gate) * value, without support for autograd.

    unit: one of `UNITS`. Shapes: projected (rows, 2 ffn_dim), contiguous -> (rows, ffn_dim).
    """
    rows, ffn_dim = projected.shape[0], projected.shape[1] // 2
    if not projected.is_cuda:
        return _forward_plainly(projected, unit)
    activated = projected.new_empty(rows, ffn_dim)
    with torch.cuda.device_of(projected):  # Triton launches kernels on the current device
        _forward_kernel[_grid(rows, ffn_dim)](projected, activated, ffn_dim, unit == "geglu", BLOCK, **OPTIONS)
    return activated


@torch.library.custom_op("glu::backward", mutates_args=("projected", "d_activated"))
def glu_backward(projected: Tensor, d_activated: Tensor, unit: str) -> None:
    """Overwrites `projected` with its gradient, and `d_activated` with the activations.

    Shapes: projected (rows, 2 ffn_dim), d_activated (rows, ffn_dim), both contiguous.
    glu_backward is one torch operator, so that a simulation of GPU memory on the CPU does not count the temporary
    tensors of `_backward_plainly`. The GPU kernel has no temporary tensors.
    """
    _backward(projected, d_activated, d_projected=projected, unit=unit)


@torch.library.custom_op("glu::gradient", mutates_args=("d_activated",))
def glu_gradient(projected: Tensor, d_activated: Tensor, unit: str) -> Tensor:
    """Returns the gradient of `projected`, and overwrites `d_activated` with the activations.

    Shapes: projected and its gradient (rows, 2 ffn_dim), d_activated (rows, ffn_dim), all contiguous.
    torch.compile copies d_activated only if later code reads the old values of d_activated, because glu_gradient is a
    torch operator.
    """
    d_projected = torch.empty_like(projected)
    _backward(projected, d_activated, d_projected, unit)
    return d_projected


@glu_gradient.register_fake
def _gradient_fake(projected: Tensor, d_activated: Tensor, unit: str) -> Tensor:
    return torch.empty_like(projected)


def _backward(projected: Tensor, d_activated: Tensor, d_projected: Tensor, unit: str) -> None:
    """Writes d_projected, and overwrites d_activated with the activations. d_projected may be `projected` itself."""
    rows, ffn_dim = d_activated.shape
    if projected.is_cuda:
        with torch.cuda.device_of(projected):  # Triton launches kernels on the current device
            _backward_kernel[_grid(rows, ffn_dim)](
                projected, d_activated, d_projected, ffn_dim, unit == "geglu", BLOCK, **OPTIONS
            )
    else:
        _backward_plainly(projected, d_activated, d_projected, unit)


def _forward_plainly(projected: Tensor, unit: str) -> Tensor:
    """Computes `glu` on the CPU, with torch's operators."""
    gate, value = projected.chunk(2, dim=1)
    return _act_plainly(gate, unit).mul_(value)


def _backward_plainly(projected: Tensor, d_activated: Tensor, d_projected: Tensor, unit: str) -> None:
    """Computes `_backward` on the CPU, with torch's own backward operators."""
    gate, value = projected.chunk(2, dim=1)
    d_gate, d_value = d_projected.chunk(2, dim=1)
    act = _act_plainly(gate, unit)
    activated = act * value
    if unit == "geglu":
        torch.ops.aten.gelu_backward(d_activated * value, gate, approximate="tanh", grad_input=d_gate)
    else:
        torch.ops.aten.silu_backward(d_activated * value, gate, grad_input=d_gate)
    torch.mul(d_activated, act, out=d_value)
    d_activated.copy_(activated)


def _act_plainly(gate: Tensor, unit: str) -> Tensor:
    return F.gelu(gate, approximate="tanh") if unit == "geglu" else F.silu(gate)


def _grid(rows: int, ffn_dim: int) -> tuple[int]:
    return (rows * triton.cdiv(ffn_dim, BLOCK),)
