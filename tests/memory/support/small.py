"""Builds a small decoder and its training step, for tests that compare memory levers."""

from functools import cache, partial
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fa_train.memory.checkpointing import Checkpointing
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import Attention, chunked_attention, flash_attention, naive_attention, sdpa_attention
from fa_train.models.gpt import GPT

VOCAB, LENGTHS = 40, [9, 1, 0, 14]
ATTENTIONS: dict[str, Attention] = {
    "naive": naive_attention,
    "sdpa": sdpa_attention,
    "chunked": partial(chunked_attention, chunk_size=8),
    "flash": flash_attention,
}


def levers(
    checkpointing: Checkpointing = "none", offload: bool | Literal["all"] = False, mlp_chunk: int | None = None
) -> Memory:
    return Memory(checkpointing, offload, mlp_chunk, LinearCrossEntropy(chunk_size=7))


def small_gpt(
    memory: Memory, device: torch.device, attention: str = "sdpa", n_layers: int = 3, **overrides: Any
) -> GPT:
    """Builds a model with the same weights in every call."""
    arguments: dict[str, Any] = {
        "vocab_size": VOCAB,
        "dim": 32,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": None,
        "ffn_dim": 48,
        "norm": "rmsnorm",
        "norm_eps": 1e-5,
        "positions": "rope",
        "rope_theta": 10000.0,
        "max_seq_len": None,
        "activation": "swiglu",
        "bias": False,
        "qk_norm": True,
        "tied": True,
        "init": "gpt2",
    }
    torch.manual_seed(0)
    model = GPT(
        **(arguments | overrides),
        n_layers=n_layers,
        attention=ATTENTIONS[attention],
        loss=memory.loss,
        memory=memory,
    )
    return model.to(device)


def stream(device: torch.device, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    """Returns packed documents, the same in every call. The last token has no label."""
    tokens = torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1)
    labels[-1] = -100
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"tokens": tokens.to(device), "cu_seqlens": cu_seqlens.to(device), "labels": labels.to(device)}


def step(model: GPT, batch: dict[str, Tensor]) -> list[Tensor]:
    """Returns the loss and all gradients."""
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@cache
def step_without_levers(attention: str, device: torch.device) -> list[Tensor]:
    """Returns the loss and the gradients of small_gpt without memory levers."""
    return step(small_gpt(levers(), device, attention), stream(device))


def compile_blocks(model: GPT, *, fullgraph: bool = True) -> GPT:
    """Compiles the model's blocks as LitGPT does, but with a backend that needs no C++ compiler."""
    torch._dynamo.reset()
    model.compile_blocks(backend="aot_eager", fullgraph=fullgraph)
    return model


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Requires bitwise equality, except on a GPU, where the order of additions in attention's backward varies."""
    for a, b in zip(ours, theirs, strict=True):
        if a.is_cuda:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(a, b), (a - b).abs().max()


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that any torch operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        self.elements = max(self.elements, *(x.numel() for x in outputs if isinstance(x, Tensor)), 0)
        return result
