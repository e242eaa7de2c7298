"""What the benchmarks of a training step share: our model's loss, its memory, and steps before the clock starts."""

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
WARMUP = 2  # steps: the first allocates the optimizer's state and compiles kernels
FEWEST_STEPS = 2  # timed ones of a case whose steps are slow
VOCABULARY = 50257  # where conf/model leaves it to the tokenizer
Device = Literal["cuda", "cpu"]
Loss = Callable[[], Tensor]


def our_loss(config: DictConfig, device: torch.device) -> tuple[nn.Module, Loss]:
    """The model, and the mean loss of LitGPT's own forward over one document of random tokens."""
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
    """This process's peak and, on a GPU, what it reserved."""
    found = memory(device)
    return found["perf/peak_gib"], found.get("perf/reserved_gib")
