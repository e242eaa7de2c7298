"""Helpers for the benchmarks of a training step: the loss of our model, its memory, and the number of warm-up steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn

from fa_train.callbacks.monitor import memory
from fa_train.data.packing.collate import Batch
from fa_train.lit_gpt import LitGPT
from fa_train.models.attention import require_backend

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf"
WARMUP = 2  # steps; the first allocates the optimizer's state and compiles kernels
FEWEST_STEPS = 2  # number of timed steps of a slow case
VOCABULARY = 50257  # for models whose config leaves the size to the tokenizer
Device = Literal["cuda", "cpu"]
Loss = Callable[[], Tensor]


def our_loss(config: DictConfig, device: torch.device) -> tuple[nn.Module, Loss]:
    """Returns the model, and the mean loss of LitGPT's forward over one document of random tokens."""
    require_backend(instantiate(config.attention), device)
    with device:
        lit_gpt: LitGPT = instantiate(config.lit_gpt, model=instantiate(config.model))
        tokens = torch.randint(config.model.vocab_size, (config.seq_len + 1,))
        batch: Batch = {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "position_ids": torch.arange(config.seq_len),
            "cu_seqlens": torch.tensor([0, config.seq_len], dtype=torch.int32),
        }
    return lit_gpt.model, lambda: lit_gpt.loss_sum(batch) / config.seq_len


def memory_gib(device: torch.device) -> tuple[float, float | None]:
    """Returns the peak memory of this process and, on a GPU, its reserved memory."""
    found = memory(device)
    return found["perf/peak_gib"], found.get("perf/reserved_gib")
