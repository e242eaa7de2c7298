"""A training step of Hugging Face transformers' LlamaForCausalLM, for the comparison in scripts/bench/step.py.

The model has the sizes, the dtypes, the optimizer and the adapters that the config of train.py chooses.

The peer `hf` uses Liger's RMSNorm, RoPE, SwiGLU and fused linear cross entropy. In the peer `hf`, torch chooses the
SDPA kernel.

In the peer `hf-compiled`, torch.compile compiles each decoder layer into one graph, and SDPA uses cuDNN. The compiled
layers contain no Liger kernels, because Liger kernels would prevent fusions. In `hf-compiled`, only the loss uses a
Liger kernel: the fused linear cross entropy. If cuDNN cannot compute the model's attention, torch chooses the SDPA
kernel, and a note on the results page gives the reason.

The variant `hf-fa_train` equals `hf`, except that our attention replaces SDPA.

With adapter=lora, the peer has adapters like peft's LoRA. Each linear layer in adapter.target_modules has one pair of
matrices A and B in fp32. Matrix products with LoRA's A or B use the dtype of the layer's input, or autocast's
dtype if autocast is on. With optimizer=adamw_8bit, our variants and the peers use torchao's AdamW8bit.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa_train.integrations.transformers import NAME as FA_TRAIN
from fa_train.integrations.transformers import register as register_attention
from fa_train.models.lora import LoRA
from scripts.bench.training_case import Loss, StepTimes, document_lens, wait
from scripts.bench.variants import Variant


class CannotRunError(Exception):
    """Raised if a variant cannot be measured on this machine."""


@dataclass(frozen=True)
class Peer:
    """A model of transformers that is ready to train.

    loss: computes the mean loss over random tokens, in nats per label.
    sdpa: returns a context manager that selects the SDPA kernel. Forward and backward must run inside the context
    manager that `sdpa` returns.
    note: text for the results page.
    """

    model: nn.Module
    loss: Loss
    sdpa: Callable[[], AbstractContextManager[Any]]
    note: str


def build_peer(config: DictConfig, device: torch.device, variant: Variant) -> Peer:
    """Builds transformers' LlamaForCausalLM in the sizes of our model.

    Raises: CannotRunError if transformers is not installed, its Llama cannot express our model, or PlainLoRA does not
    support a setting of the adapter.
    """
    if find_spec("transformers") is None:
        raise CannotRunError("transformers is not installed")
    lora = adapter_of(config)
    lengths, notes = document_lens(config), [use_liger(device, variant)]
    model = build_llama(config, device, variant)
    if lora is not None:
        add_lora(model, lora)
    model.train()
    if variant.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sdpa: Callable[[], AbstractContextManager[Any]] = nullcontext
    if variant.compiled:
        compile_layers(model)
        reason = without_cudnn(config, device)
        notes.append(f"SDPA's kernel is torch's choice: {reason}" if reason else "SDPA: cuDNN")
        sdpa = nullcontext if reason else partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)

    with device:
        tokens = torch.randint(config.model.vocab_size, (1, config.seq_len))
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = tokens.masked_fill(positions == 0, -100)  # the first token of a document is never a label

    def loss() -> Tensor:
        # Each step gets a new tensor of positions, as in training, so attention cannot reuse results of earlier steps.
        documents = {"position_ids": positions.clone()} if len(lengths) > 1 else {}
        value: Tensor = model(input_ids=tokens, labels=labels, **documents).loss
        return value

    return Peer(model, loss, sdpa, "; ".join(filter(None, notes)))


def build_llama(config: DictConfig, device: torch.device, variant: Variant) -> Any:
    """Returns a LlamaForCausalLM with random weights. Raises: CannotRunError if Llama cannot express our model."""
    wanted = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "bias": False, "qk_norm": False}
    others = {name: config.model[name] for name, value in wanted.items() if config.model[name] != value}
    if others:
        found = ", ".join(f"{name}={value}" for name, value in others.items())
        raise CannotRunError(f"Hugging Face's Llama has no {found}")
    from transformers import AutoModelForCausalLM, LlamaConfig

    if variant.fa_train:
        register_attention()
    sizes = config.model
    llama = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        intermediate_size=sizes.ffn_dim,
        num_hidden_layers=sizes.n_layers,
        num_attention_heads=sizes.n_heads,
        num_key_value_heads=sizes.n_kv_heads or sizes.n_heads,
        head_dim=head_dim(config),
        rms_norm_eps=sizes.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        max_position_embeddings=config.seq_len,
        tie_word_embeddings=sizes.tied,
        use_cache=False,
    )
    dtype = torch.bfloat16 if config.trainer.precision == "bf16-true" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(
            llama, attn_implementation=FA_TRAIN if variant.fa_train else "sdpa", dtype=dtype
        )
    return model.to(device)


def head_dim(config: DictConfig) -> int:
    return int(config.model.head_dim or config.model.dim // config.model.n_heads)


def use_liger(device: torch.device, variant: Variant) -> str:
    """Makes transformers use Liger's kernels. Returns why Liger's kernels cannot be used, or an empty string."""
    if find_spec("liger_kernel") is None:
        return "plain transformers: liger-kernel is not installed"
    if device.type != "cuda":
        return "plain transformers: Liger's kernels need a GPU"
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    inside_layers = not variant.compiled
    apply_liger_kernel_to_llama(
        rope=inside_layers,
        rms_norm=inside_layers,
        swiglu=inside_layers,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
    )
    return ""


def compile_layers(model: Any, **options: Any) -> None:
    """Compiles each decoder layer with torch.compile(**options)."""
    for layer in model.model.layers:
        layer.compile(fullgraph=True, **options)


def without_cudnn(config: DictConfig, device: torch.device) -> str:
    """Returns why cuDNN cannot compute the model's attention, or an empty string if cuDNN can compute it."""
    if device.type != "cuda":
        return "cuDNN needs a GPU"
    if len(document_lens(config)) > 1:
        return "packed documents need a mask"
    sizes, shape = config.model, (config.seq_len, head_dim(config))
    dtype = torch.bfloat16 if config.trainer.precision.startswith("bf16") else torch.float32
    q, k = (
        torch.zeros(1, heads, *shape, dtype=dtype, device=device, requires_grad=True)
        for heads in (sizes.n_heads, sizes.n_kv_heads or sizes.n_heads)
    )
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum().backward()
        wait(device)
    except RuntimeError as error:
        return f"cuDNN: {str(error).splitlines()[0]}"
    return ""


def adapter_of(config: DictConfig) -> LoRA | None:
    """Returns the settings of the adapters, or None without adapters.

    Raises: CannotRunError if PlainLoRA does not support a setting of the adapter.
    """
    adapter = instantiate(config.adapter)
    if not isinstance(adapter, LoRA):
        return None
    unsupported = {
        f"adapter.{name}": getattr(adapter, name)
        for name in ("lora_dropout", "quantization", "path")
        if getattr(adapter, name)
    }
    if unsupported:
        found = ", ".join(f"{name}={value}" for name, value in unsupported.items())
        raise CannotRunError(f"the peer's LoRA has no {found}")
    return adapter


def add_lora(model: Any, settings: LoRA) -> None:
    """Freezes the model, and adds adapters to the linear layers of its decoder layers."""
    model.requires_grad_(False)
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if name.startswith("model.layers.") and isinstance(module, nn.Linear) and settings.targets(name)
    ]
    for name, linear in linears:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, PlainLoRA(linear, settings.r, settings.scale))


class PlainLoRA(nn.Module):
    """Computes `x W^T + scale * (x A^T) B^T`. A (r, in_features) and B (out_features, r) are in fp32."""

    def __init__(self, base: nn.Linear, r: int, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        device, bound = base.weight.device, base.in_features**-0.5
        self.a = nn.Parameter(torch.empty(r, base.in_features, device=device).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(base.out_features, r, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., in_features) -> (..., out_features)."""
        y: Tensor = self.base(x)
        return y + self.scale * F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))


def measure(config: DictConfig, device: torch.device, peer: Peer, times: StepTimes) -> None:
    """Trains the peer without gradient clipping, and adds the duration and the loss of each step to `times`."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    if config.trainer.precision == "bf16-mixed":
        autocast = partial(torch.autocast, device.type, torch.bfloat16)
    with peer.sdpa():
        time_steps(peer.loss, instantiate(config.optimizer)(peer.model), device, times, autocast)


def time_steps(
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    times: StepTimes,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Runs training steps (forward, backward, optimizer) and times them, until `times` has enough steps."""
    while not times.complete:
        start = time.perf_counter()
        with autocast():
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        times.add(time.perf_counter() - start, value.item())
