"""Compares one case of a fused operation on a GPU, forward and backward, with torch in fp64."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fa_kernels.glu import glu, glu_gradient
from fa_kernels.nf4 import dequantize
from fa_kernels.rmsnorm import add_rms_norm
from fa_kernels.rotary import rotate_heads, rotate_qkv
from fa_kernels.rows import add_rows, copy_rows
from tests.kernels.support.attention_check import DEVICE
from tests.support.tolerance import assert_as_accurate

ROWS = 130  # with this number of rows, every operation runs several Triton programs


def check_rmsnorm(dtype: torch.dtype, dim: int) -> None:
    """Checks the RMSNorm of the sum of two tensors, for residual streams in fp32 and in `dtype`.

    If the residual stream is fp32, the forward pass stores the sum of the two tensors.
    """
    for stream, keep_sum in ((torch.float32, True), (dtype, False)):
        x, added = _draw(ROWS, dim, dtype=stream), _draw(ROWS, dim, dtype=dtype)
        weight = (1 + 0.1 * torch.randn(dim, device=DEVICE)).requires_grad_()
        d_sum, dy = torch.randn(ROWS, dim, device=DEVICE), torch.randn(ROWS, dim, device=DEVICE)

        def exact(x: Tensor, added: Tensor, weight: Tensor, stream: torch.dtype = stream) -> tuple[Tensor, Tensor]:
            total = x + added
            rounded = total + (total.to(stream).to(x.dtype) - total).detach()
            return rounded, F.rms_norm(rounded, weight.shape, weight, 1e-5)

        ours = add_rms_norm(x, added, weight, 1e-5, dtype, keep_sum=keep_sum)
        _compare(["sum", "y"], ours, exact, (x, added, weight), (d_sum, dy), dtype)


def check_rotary(dtype: torch.dtype, head_dim: int) -> None:
    """Checks rotate_heads with four of five heads, and rotate_qkv with joined q, k and v."""
    angles = torch.randn(ROWS, head_dim // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        wide_cos, wide_sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return torch.cat([first * wide_cos - second * wide_sin, second * wide_cos + first * wide_sin], dim=-1)

    x = _draw(ROWS, 5, head_dim, dtype=dtype)
    dy = torch.randn(ROWS, 5, head_dim, device=DEVICE)
    exact = lambda x: (torch.cat([rotated(x[:, :4]), x[:, 4:]], dim=1),)  # noqa: E731
    _compare(["y"], (rotate_heads(x, cos, sin, 4),), exact, (x,), (dy,), dtype)

    def exact_qkv(qkv: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.split((3, 1, 1), dim=1)
        return rotated(q), rotated(k), v

    ours = rotate_qkv(x, (3, 1, 1), cos, sin)
    _compare(["q", "k", "v"], ours, exact_qkv, (x,), dy.split((3, 1, 1), dim=1), dtype)


def check_glu(dtype: torch.dtype, ffn_dim: int, unit: str) -> None:
    projected = _draw(ROWS, 2 * ffn_dim, dtype=dtype)
    d_activated = torch.randn(ROWS, ffn_dim, device=DEVICE).to(dtype)

    def exact(projected: Tensor) -> Tensor:
        gate, value = projected.chunk(2, dim=1)
        return (F.silu(gate) if unit == "swiglu" else F.gelu(gate, approximate="tanh")) * value

    wide = projected.detach().double().requires_grad_()
    activated = exact(wide)
    (d_projected,) = torch.autograd.grad(activated, wide, d_activated.double())
    overwritten = d_activated.clone()
    gradient = glu_gradient(projected.detach(), overwritten, unit)
    for name, ours, truth in (
        ("activated", glu(projected.detach(), unit), activated),
        ("activated again", overwritten, activated),
        ("d_projected", gradient, d_projected),
    ):
        _require_close(name, ours, truth, dtype)


def check_nf4(dtype: torch.dtype, n_scales: int, scales_per_factor: int) -> None:
    """Checks each dequantized element against table[code] * scale in fp64. Each scale applies to 64 elements."""
    codes = torch.randint(256, (32 * n_scales,), device=DEVICE).byte()
    scalers = torch.randint(-128, 128, (n_scales,), device=DEVICE).to(torch.int8)
    factors = (1000 + torch.rand(n_scales // scales_per_factor, device=DEVICE)).to(dtype)
    mean, table = torch.tensor(0.3, device=DEVICE, dtype=dtype), torch.linspace(-1, 1, 16, device=DEVICE).to(dtype)
    scales = scalers.double() / factors.double().repeat_interleave(scales_per_factor) + mean.double()
    indices = torch.stack([codes >> 4, codes & 15], dim=1).flatten().long()
    truth = table.double()[indices] * scales.repeat_interleave(64)
    for wanted in {dtype, torch.bfloat16}:
        found = dequantize(codes, scalers, factors, mean, table, wanted)
        _require_close("weight", found, truth, torch.bfloat16 if wanted == torch.bfloat16 else dtype)


def check_rows(dtype: torch.dtype, n_heads: int, head_dim: int) -> None:
    """Checks add_rows, and checks copy_rows with all combinations of indices."""
    sources = [_draw(ROWS, n, head_dim, dtype=dtype).detach() for n in (n_heads, 2)]
    order, half = torch.randperm(ROWS, device=DEVICE), ROWS // 2
    for from_rows, to_rows in ((None, None), (order[:half], None), (None, order), (order[:half], order[-half:])):
        ours = [torch.zeros_like(source) for source in sources]
        copy_rows(sources, ours, *(None if rows is None else rows.int() for rows in (from_rows, to_rows)))
        n_rows = ROWS if from_rows is None else half
        for source, found in zip(sources, ours, strict=True):
            wanted, rows = torch.zeros_like(source), source[slice(n_rows) if from_rows is None else from_rows]
            wanted[slice(n_rows) if to_rows is None else to_rows] = rows
            _require_close("copies", found, wanted, dtype)
    counts = torch.arange(half, device=DEVICE) % 4 + 1
    offsets, entries = F.pad(counts.cumsum(0), (1, 0)), torch.randint(ROWS, (int(counts.sum()),), device=DEVICE)
    totals = [source.clone() for source in sources]
    add_rows(totals, [source.roll(1, 0) for source in sources], order[:half].int(), entries.int(), offsets.int())
    index = order[:half].repeat_interleave(counts)
    for source, found in zip(sources, totals, strict=True):
        wanted = source.double().index_add(0, index, source.roll(1, 0)[entries].double())
        _require_close("sums", found, wanted, dtype)


def _compare(names, ours, exact, inputs, gradients, dtype) -> None:
    """Compares the outputs `ours` and their gradients with those of the function `exact` in fp64.

    `ours` was computed from `inputs`, and `exact` is called with fp64 copies of `inputs`.
    """
    wide = [x.detach().double().requires_grad_() for x in inputs]
    truths = exact(*wide)
    found = torch.autograd.grad(ours, inputs, [g.to(x.dtype) for g, x in zip(gradients, ours, strict=True)])
    rounded = [g.to(x.dtype).double() for g, x in zip(gradients, ours, strict=True)]
    wanted = torch.autograd.grad(truths, wide, rounded)
    for name, x, truth in zip(names, ours, truths, strict=True):
        _require_close(name, x, truth, dtype)
    for i, (x, truth) in enumerate(zip(found, wanted, strict=True)):
        _require_close(f"gradient {i}", x, truth, dtype)


def _require_close(name: str, ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Requires an error of at most four rounding units of `dtype`, relative to the largest element."""
    truth = truth.detach()
    floor = 4 * torch.finfo(dtype).eps * truth.abs().max().item()
    assert_as_accurate(name, ours, truth, truth.to(ours.dtype), floor=floor)


def _draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()
