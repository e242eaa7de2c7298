"""Torch's own context parallelism, for the comparison in scripts/bench/context.py.

torch.distributed.tensor.experimental.context_parallel replaces SDPA with a function that several ranks run together.
context_parallel supports only one document that fills the stream, without an attention window. SDPA runs cuDNN's
kernel, because cuDNN's kernel is faster than SDPA's own flash attention on Hopper GPUs.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

PEER_PARTS = ("torch one", "torch shared")


def peer_parts(
    tokens: int, n_heads: int, n_kv_heads: int, head_dim: int, device: torch.device
) -> dict[str, Callable[[], object]]:
    """Returns a dictionary that maps each name in `PEER_PARTS` to a function.

    Each function runs causal attention in bf16, forward and backward.
    tokens must be a multiple of twice the number of ranks.
    """
    ranks = dist.get_world_size()
    mesh = DeviceMesh(device.type, list(range(ranks)))

    def inputs(length: int) -> list[Tensor]:
        shapes = [(1, heads, length, head_dim) for heads in (n_heads, n_kv_heads, n_kv_heads, n_heads)]
        return [torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_() for shape in shapes]

    def both_passes(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> object:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n_heads != n_kv_heads)
            return torch.autograd.grad(o, (q, k, v), do)

    own = inputs(tokens // ranks)

    def shared() -> object:
        # context_parallel takes the number of tokens from `stream`, and replaces `stream` by this rank's share of it
        stream = torch.empty(tokens, device=device)
        with context_parallel(mesh, buffers=[stream], buffer_seq_dims=[0], no_restore_buffers={stream}):
            return both_passes(*own)

    whole = inputs(tokens)
    return {"torch one": lambda: both_passes(*whole), "torch shared": shared}
