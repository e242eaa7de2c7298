"""Calls public functions of fa_kernels as if the GPU were an H200, and compiles the launched kernels to PTX.

TRITON_INTERPRET must be unset.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from fa_kernels import flash_attn_with_kvcache
from fa_kernels.flash_attention import kvcache
from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_kernels.flash_attention.schedule import build_schedule
from fa_kernels.glu import glu, glu_backward, glu_gradient
from fa_kernels.rmsnorm import add_rms_norm
from fa_kernels.rotary import rotate_heads, rotate_qkv
from tests.kernels.aot.portable import compile_to_ptx
from tests.kernels.support import replayed_launches

BF16 = torch.bfloat16
COMPILED: dict[int, Any] = {}  # {handle of a compiled kernel: result of `keep`}


def compile_call(name: str, keep: Callable[[Callable[[], CompiledKernel]], Any]) -> list[tuple[tuple[int, ...], Any]]:
    """Makes the call `name` of `CALLS`, and returns one pair for each kernel launch.

    Each pair contains the grid of the launch, and the result of the function `keep` for the launched kernel. For each
    kernel, `keep` is called once per process. The argument of `keep` is a function that compiles the kernel.
    """

    def compile(kernel: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, _: Any):
        launchable = replayed_launches._compile(kernel, key, signature, device, constexprs, options, attrs, False)
        source = kernel.ASTSource(kernel, signature, constexprs, attrs)
        COMPILED[launchable.function] = keep(partial(compile_to_ptx, source, 90, options.__dict__))
        return launchable

    launches = replayed_launches.LAUNCHES
    with (
        replayed_launches.without_gpu(),
        mock.patch.object(JITFunction, "_do_compile", compile),
        mock.patch.object(kvcache, "require_backend", lambda *_: None),
    ):
        launches.clear()
        CALLS[name]()
        return [(grid, COMPILED[handle]) for grid, _, handle, *_ in launches]


def _leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def _attention(head_dim: int, *lengths: int, dtype: torch.dtype = BF16, **options: Any) -> None:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    total = sum(lengths)
    schedule = build_schedule(ends, ends, total, total, causal=True, padded=False)
    q, k, v = (_leaf(total, n_heads, head_dim, dtype=dtype) for n_heads in (4, 2, 2))
    o = flash_attn_packed(q, k, v, schedule, **options)
    assert isinstance(o, Tensor)
    o.backward(torch.zeros_like(o))


def _cached_attention(**options: Any) -> None:
    q, k, v = (torch.zeros(4, 2, n_heads, 128, dtype=BF16) for n_heads in (8, 2, 2))
    k_cache, v_cache = torch.zeros(2, 64, 64, 2, 128, dtype=BF16)
    table = torch.arange(64, dtype=torch.int32).view(4, 16)
    lengths = torch.full((4,), 900, dtype=torch.int32)
    flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True, num_splits=4, **options
    )


def _norm(dim: int, dtype: torch.dtype, keep_sum: bool) -> None:
    total, y = add_rms_norm(
        _leaf(64, dim, dtype=dtype), _leaf(64, dim), _leaf(dim, dtype=torch.float32), 1e-5, BF16, keep_sum=keep_sum
    )
    torch.autograd.backward([total, y], [torch.zeros_like(total), torch.zeros_like(y)])


def _rotate_qkv(dtype: torch.dtype) -> None:
    angles = torch.zeros(2, 256, 64)
    parts = rotate_qkv(_leaf(256, 8, 128, dtype=dtype), (4, 2, 2), *angles)
    torch.autograd.backward(parts, [torch.zeros_like(x) for x in parts])


def _glu(dtype: torch.dtype, unit: str) -> None:
    projected, gradient = torch.zeros(64, 2 * 1408, dtype=dtype), torch.zeros(64, 1408, dtype=dtype)
    glu(projected, unit)
    glu_gradient(projected, gradient, unit)
    glu_backward(projected, gradient, unit)


_ANGLES = torch.zeros(2, 1024, 64)
CALLS: dict[str, Callable[[], object]] = {
    **{f"attention-{d}-one": partial(_attention, d, 512) for d in (64, 96, 128, 256)},
    **{f"attention-{d}-several": partial(_attention, d, 50, 462) for d in (64, 96, 128, 256)},
    "attention-64-ordered": partial(_attention, 64, 50, 462, deterministic=True),
    "attention-128-softcap": partial(_attention, 128, 512, softcap=20.0),
    "attention-128-sinks": lambda: _attention(128, 512, sinks=_leaf(4, dtype=torch.float32)),
    "attention-128-fp16-softcap": partial(_attention, 128, 512, dtype=torch.float16, softcap=20.0),
    "attention-80-several": partial(_attention, 80, 50, 462),  # the portable kernels
    "attention-64-fp32": partial(_attention, 64, 512, dtype=torch.float32),
    "cache-plain": _cached_attention,
    "cache-rotary": partial(_cached_attention, rotary_cos=_ANGLES[0], rotary_sin=_ANGLES[1]),
    "norm-2048-kept": partial(_norm, 2048, BF16, True),
    "norm-2048-recomputed": partial(_norm, 2048, torch.float32, False),
    "norm-768-recomputed": partial(_norm, 768, BF16, False),
    "rotate-qkv-bf16": partial(_rotate_qkv, BF16),
    "rotate-qkv-fp32": partial(_rotate_qkv, torch.float32),
    "rotate-heads": lambda: rotate_heads(_leaf(256, 8, 96), torch.zeros(256, 48), torch.zeros(256, 48), n_rotated=6),
    "swiglu-bf16": partial(_glu, BF16, "swiglu"),
    "swiglu-fp32": partial(_glu, torch.float32, "swiglu"),
    "geglu-bf16": partial(_glu, BF16, "geglu"),
}
