"""Code that several benchmarks of a training step use: the loss of our model, its memory, and the timing of steps."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch import Tensor, nn

from fa_train.callbacks.monitor import memory
from fa_train.data.datamodule import PackedDataModule
from fa_train.data.packing.collate import Batch
from fa_train.fit import empty_before_teardown
from fa_train.lit_gpt import LitGPT
from fa_train.models.attention import require_backend
from fa_train.models.float8 import require_float8_gpu
from fa_train.models.gpt import GPT

REPOSITORY = Path(__file__).parents[2]
WARMUP = 2  # number of untimed steps; the first allocates the optimizer's state and compiles kernels
FEWEST_STEPS = 2  # number of timed steps if a step is slow
VOCABULARY = 50257  # vocabulary size of models whose config does not set one
Device = Literal["cuda", "cpu"]
Loss = Callable[[], Tensor]


class StepTimes:
    """Collects the times and the losses of a case's steps.

    slow_step: seconds. If the second step takes longer, it is timed too, and at most `FEWEST_STEPS` steps are timed.
    """

    def __init__(self, steps: int, slow_step: float) -> None:
        self.warmup, self.steps, self.slow_step = WARMUP, steps, slow_step
        self.losses: list[float] = []  # of all steps
        self._milliseconds: list[float] = []

    @property
    def complete(self) -> bool:
        return len(self._milliseconds) >= self.warmup + self.steps

    @property
    def milliseconds(self) -> list[float]:
        """Returns the milliseconds of the timed steps."""
        return self._milliseconds[self.warmup :]

    def add(self, seconds: float, loss: float) -> None:
        self._milliseconds.append(seconds * 1e3)
        self.losses.append(loss)
        # the first step compiles, so the second step is the first that shows whether the case is slow
        if len(self._milliseconds) == WARMUP and seconds > self.slow_step:
            self.warmup, self.steps = WARMUP - 1, min(self.steps, FEWEST_STEPS)


class StepTimer(Callback):
    """A Lightning callback that times each optimizer step between two device syncs, and ends the run after enough
    steps.
    """

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


def measure(config: DictConfig, device: torch.device, times: StepTimes) -> None:
    """Trains as train.py does, with LitGPT, Lightning's loop and the data of the config. Fills `times`.

    The planner does not check beforehand whether the run fits in memory. Nothing is logged or saved.
    """
    require_backend(instantiate(config.attention), device)
    if config.lit_gpt.float8 is not None:
        require_float8_gpu(device)
    data: PackedDataModule = instantiate(config.data)
    timer = StepTimer(times)  # must be the first callback, so that the times do not include other callbacks
    trainer: L.Trainer = instantiate(
        config.trainer,
        callbacks=[timer, instantiate(config.callbacks.monitor)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.accumulate_grad_batches = data.accumulation(trainer.world_size)
    with device:
        model = our_model(config)
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


def wait(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def our_model(config: DictConfig) -> GPT:
    """Builds our model and its adapter on torch's default device."""
    model: GPT = instantiate(config.adapter)(instantiate(config.model))
    return model


def our_loss(config: DictConfig, device: torch.device) -> tuple[nn.Module, Loss]:
    """Returns our model, and a function that computes LitGPT's mean loss over one document of random tokens."""
    require_backend(instantiate(config.attention), device)
    with device:
        lit_gpt: LitGPT = instantiate(config.lit_gpt, model=our_model(config))
        tokens = torch.randint(config.model.vocab_size, (config.seq_len + 1,))
        batch: Batch = {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "position_ids": torch.arange(config.seq_len),
            "cu_seqlens": torch.tensor([0, config.seq_len], dtype=torch.int32),
        }
    return lit_gpt.model, lambda: lit_gpt.loss_sum(batch) / config.seq_len


def memory_gib(device: torch.device) -> tuple[float, float | None]:
    """Returns the peak memory of this process and, on a GPU, its reserved memory, in GiB."""
    found = memory(device)
    return found["perf/peak_gib"], found.get("perf/reserved_gib")
