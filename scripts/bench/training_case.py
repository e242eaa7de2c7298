"""Measures training steps with train.py's model, data and loop."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch import Tensor

from fa_train.callbacks.monitor import memory
from fa_train.data.datamodule import PackedDataModule
from fa_train.fit import empty_before_teardown
from fa_train.flops import attention_pairs, train_flops
from fa_train.lit_gpt import LitGPT
from fa_train.models.attention import require_backend
from fa_train.models.float8 import require_float8_gpu
from fa_train.models.gpt import GPT
from fa_train.training import build_model
from scripts.composed import composed

WARMUP = 2  # number of untimed steps; the first allocates the optimizer's state and compiles kernels
FEWEST_STEPS = 2  # maximum number of timed steps if the second step is slow
VOCABULARY = 50257  # vocabulary size of models whose config does not set one
Device = Literal["cuda", "cpu"]
Loss = Callable[[], Tensor]


class StepTimes:
    """Collects the times and the losses of a case's steps.

    slow_step: a limit in seconds. Normally, the second step is only a warm-up. If the second step takes longer than
    `slow_step`, the second step counts as a timed step, and at most `FEWEST_STEPS` steps are timed.
    """

    def __init__(self, steps: int, slow_step: float = math.inf, warmup: int = WARMUP) -> None:
        self.warmup, self.steps, self.slow_step = warmup, steps, slow_step
        self.losses: list[float] = []  # of all steps
        self._milliseconds: list[float] = []

    @property
    def complete(self) -> bool:
        return len(self._milliseconds) >= self.warmup + self.steps

    @property
    def milliseconds(self) -> list[float]:
        return self._milliseconds[self.warmup :]

    def add(self, seconds: float, loss: float = math.nan) -> None:
        self._milliseconds.append(seconds * 1e3)
        self.losses.append(loss)
        # the first step includes compilation, so the time of the second step shows whether the case is slow
        if len(self._milliseconds) == WARMUP and seconds > self.slow_step:
            self.warmup, self.steps = WARMUP - 1, min(self.steps, FEWEST_STEPS)


class StepTimer(Callback):
    """Times each optimizer step between two device syncs, and ends the run after enough steps."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self._start = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            wait(pl_module.device)
            self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        wait(pl_module.device)
        seconds = time.perf_counter() - self._start
        assert isinstance(pl_module, LitGPT)
        self.times.add(seconds, pl_module.step_loss.item())
        trainer.should_stop = self.times.complete


def training_config(
    model: str, attention: str, seq_len: int, steps: int, device: Device, overrides: Sequence[str]
) -> DictConfig:
    """Composes conf/train.yaml as train.py does. By default, a step trains on one document of random tokens."""
    config = composed(
        [
            f"preset={'gpu' if device == 'cuda' else 'cpu'}",
            f"trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}",
            f"model={model}",
            f"attention={attention}",
            f"seq_len={seq_len}",
            f"max_steps={steps}",
            "data=synthetic",
            "batch_size=1",
            *overrides,
        ]
    )
    if config.model.vocab_size is None:
        config.model.vocab_size = VOCABULARY
    config.data.vocab_size = config.model.vocab_size
    return config


def measure(config: DictConfig, device: torch.device, times: StepTimes, callbacks: Sequence[Callback] = ()) -> None:
    """Trains as train.py does, with LitGPT, Lightning's loop and the data of the config. Fills `times`.

    The planner does not check beforehand whether the run fits in memory. On a GPU, the peak memory of the process
    covers only the training, because the callback Monitor resets the peak at the start. The hooks of `callbacks` run
    after the hooks of StepTimer.
    """
    require_backend(instantiate(config.attention), device)
    if config.lit_gpt.float8 is not None:
        require_float8_gpu(device)
    data: PackedDataModule = instantiate(config.data)
    timer = StepTimer(times)  # must be the first callback, so that a timed step ends before other callbacks run
    trainer: L.Trainer = instantiate(
        config.trainer,
        callbacks=[timer, *callbacks, instantiate(config.callbacks.monitor)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.accumulate_grad_batches = data.accumulation(trainer.world_size)
    with device:
        model = build_model(config, config.model.vocab_size)
    lit_gpt = instantiate(config.lit_gpt, model=model)
    empty_before_teardown(trainer, lit_gpt)
    trainer.fit(lit_gpt, datamodule=data)
    assert times.complete


def document_lens(config: DictConfig) -> list[int]:
    """Returns the length in tokens of each document in a row.

    Raises: ValueError if a row does not hold whole documents, or if data.length_sigma is positive.
    """
    if config.data.length_sigma:
        raise ValueError(
            "this benchmark needs data.length_sigma=0, because it needs the same documents in every row; "
            f"got {config.data.length_sigma}"
        )
    length = min(config.data.document_len, config.seq_len)
    if config.seq_len % length:
        raise ValueError(f"data.document_len must divide seq_len={config.seq_len}; got {length}")
    return [length] * (config.seq_len // length)


def step_flops(model: DictConfig, lengths: Sequence[int]) -> float:
    """Returns the model FLOPs of a training step on documents of these lengths. model: the config of the model."""
    with torch.device("meta"):
        gpt: GPT = instantiate(model)
    pairs = attention_pairs(gpt.windows, torch.tensor(lengths))
    return train_flops(gpt.config, sum(lengths), pairs.item())


def wait(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_gib(device: torch.device) -> tuple[float, float | None]:
    """Returns the peak memory of this process and, on a GPU, its reserved memory, in GiB."""
    found = memory(device)
    return found["perf/peak_gib"], found.get("perf/reserved_gib")
