"""Trains a small model for two steps under a strategy, in one process or in several, and records the results."""

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from fa_train import training
from fa_train.callbacks.equal_weights import EqualWeights
from fa_train.errors import DivergedError
from fa_train.evaluation.generation import generate
from fa_train.memory.memory import Memory
from fa_train.models.gpt import GPT
from fa_train.models.shards import local, norm_of, whole
from fa_train.parallel.fsdp import FullyShardedStrategy, shard
from tests.memory.support.small import VOCAB, compile_blocks, levers, small_gpt
from tests.support.trainers import lit_gpt
from tests.support.training import composed

STEPS, LENGTHS = 2, [9, 1, 0, 14]
RECORDED = ("losses", "gradients", "weights", "gathered", "reduced_early")
RANKS = {"ddp": 2, "fsdp": 2, "hsdp": 4}
CONTEXTS = (1, 2)  # the values of strategy.context with which experiment=finetune runs
COPIES = {2: "ddp", 4: "hsdp"}  # {number of ranks: a strategy that keeps several copies of the model}
MEMORIES: dict[str, Memory] = {
    "none": levers(),
    "selective": levers("selective", mlp_chunk=8),
    "full-offload": levers("full", offload=True),
    "offload-all": levers(offload="all"),
}


@dataclass(frozen=True)
class Case:
    """strategy: a key of `RANKS`, or "one", which means a single process.

    accumulation: the number of micro-batches that a rank processes in a step.
    """

    strategy: str
    accumulation: int
    memory: str = "none"
    compiled: bool = False
    tied: bool = True
    reshard: bool = True
    reduce_once: bool = False
    reduce_dtype: str = "float32"

    @property
    def ranks(self) -> int:
        return RANKS.get(self.strategy, 1)

    @property
    def micro_batches(self) -> int:
        return self.ranks * self.accumulation

    def __str__(self) -> str:
        options = [name for name in ("compiled", "reduce_once") if getattr(self, name)]
        options += [f"not-{name}" for name in ("tied", "reshard") if not getattr(self, name)]
        options += [self.reduce_dtype] if self.reduce_dtype != "float32" else []
        return "-".join([self.strategy, str(self.accumulation), self.memory, *options])


class Recorder(L.Callback):
    """Records losses, norms, gradients and weights, and which parameters are gathered while the loss is computed."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}
        self.gathered: set[str] = set()
        self.reduced_early = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # FSDP's own hook, which gathers the head, runs first
        pl_module.model.head.register_forward_pre_hook(partial(self._note, pl_module.model))

    def _note(self, model: GPT, head: object, inputs: object) -> None:
        self.gathered = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Records gradients before clipping."""
        named = pl_module.model.named_parameters()
        self.gradients = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            self.reduced_early |= any(p.grad is not None for p in pl_module.parameters())
        else:
            self.losses += [pl_module.step_loss, pl_module.step_grad_norm]

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.weights = {name: whole(p.detach()).clone() for name, p in pl_module.model.named_parameters()}


def micro_batches(number: int) -> list[dict[str, Tensor]]:
    """Returns packed micro-batches with different numbers of labels."""
    generator = torch.Generator().manual_seed(1)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    batches = []
    for i in range(number):
        tokens = torch.randint(VOCAB, (sum(LENGTHS),), generator=generator)
        labels = tokens.roll(-1)
        labels[cu_seqlens[1:] - 1] = labels[: 3 * i] = -100
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        batches.append(
            {"tokens": tokens, "labels": labels, "position_ids": positions, "cu_seqlens": cu_seqlens.to(torch.int32)}
        )
    return batches


def strategy_of(case: Case) -> Any:
    if case.strategy == "one":
        return "auto"
    if case.strategy == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True)
    replicas = 2 if case.strategy == "hsdp" else 1
    return FullyShardedStrategy(replicas, case.reshard, case.reduce_once, case.reduce_dtype)  # type: ignore[arg-type]


def build(case: Case) -> GPT:
    device = torch.device("meta" if case.strategy in ("fsdp", "hsdp") else "cpu")
    with device:
        model = small_gpt(MEMORIES[case.memory], device, n_layers=2, tied=case.tied)
    return compile_blocks(model) if case.compiled else model


class FlipBit(L.Callback):
    @torch.no_grad()
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1 and trainer.global_step == 1:
            local(pl_module.model.blocks[1].ffn_norm.weight.detach()).view(torch.int32)[-1] ^= 1 << 12


def train(case: Case, rank: int = 0, *callbacks: L.Callback) -> Recorder:
    """Trains on this rank's share of the micro-batches. The rows of a step do not depend on the number of ranks."""
    lit = lit_gpt(build(case), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu", devices=case.ranks, strategy=strategy_of(case), max_steps=STEPS, logger=False,
        accumulate_grad_batches=case.accumulation, gradient_clip_val=0.5, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        callbacks=[recorder, *callbacks],
    )  # fmt: skip
    own = micro_batches(STEPS * case.micro_batches)[rank :: case.ranks]
    loader: DataLoader[Any] = DataLoader(cast(Any, own), batch_size=None)
    trainer.fit(lit, loader)
    return recorder


def finetune_overrides(folder: Path) -> list[str]:
    return [
        "experiment=finetune", "preset=cpu", f"data.path={folder}/chats.jsonl", f"model.pretrained={folder}/base",
        f"data.cache_dir={folder}/cache", "data.num_workers=0", "data.micro_batch_size=2", "seq_len=64", "batch_size=4",
        "scheduler.warmup_steps=1", "sample.max_new_tokens=4", "trainer.accelerator=cpu",
        "trainer.val_check_interval=2",
    ]  # fmt: skip


def generated(model: GPT) -> list[list[int]]:
    """Returns three continuations of a prompt: the most likely tokens, the most likely tokens without a cache, and
    sampled tokens.
    """
    common: dict[str, Any] = {"prompt": [3, 1, 4], "max_new_tokens": 5}
    options: list[dict[str, Any]] = [{}, {"cached": False}, {"temperature": 1.0, "seed": 3}]
    return [generate(model, **common, **chosen) for chosen in options]


def finetune(folder: Path, context: int) -> None:
    run = folder / f"finetuned-{context}"
    run.mkdir(exist_ok=True)
    sharded = ["strategy=fsdp", f"strategy.context={context}", "trainer.devices=2"]
    overrides = [*finetune_overrides(folder), *sharded, "max_steps=2", "logger=csv"]
    with composed(run, *overrides) as cfg:
        training.train(cfg)


def difference(case: Case, rank: int, *callbacks: L.Callback) -> str:
    """Trains, and compares the ranks' weights after each step.

    Returns an error message if the ranks' weights differ, and "" if the ranks' weights are equal.
    """
    try:
        train(case, rank, *callbacks, EqualWeights(every_n_steps=1))
    except DivergedError as error:
        return str(error)
    return ""


def in_processes(rank: int, folder: str, environments: list[dict[str, str]], cases: list[Case]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    for case in cases:
        recorder = train(case, rank)
        torch.save({name: getattr(recorder, name) for name in RECORDED}, Path(folder, f"{case}.{rank}.pt"))
    copies = Case(COPIES[len(environments)], 1)
    flipped = difference(copies, rank, FlipBit())
    Path(folder, f"flipped.{len(environments)}.{rank}.txt").write_text(flipped)
    if copies.strategy == "hsdp":
        # This patch makes the gradient norms of the two replicas differ. In a real run, the gradient norms can differ
        # because the replicas add in different orders.
        with patch("fa_train.lit_gpt.norm_of", lambda gradients: norm_of(gradients) * (1.001 if rank < 2 else 1)):
            Path(folder, f"norms.{rank}.txt").write_text(difference(copies, rank))
    if len(environments) == 2:
        model = build(Case("fsdp", 1, tied=False))
        shard(model, init_device_mesh("cpu", (2,)), "32-true")
        model.materialise(torch.device("cpu"))
        Path(folder, f"generated.{rank}.json").write_text(json.dumps(generated(model)))
        if Path(folder, "base").exists():
            for context in CONTEXTS:
                finetune(Path(folder), context)
    dist.destroy_process_group()


def assert_close(ours: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Checks that a tensor's largest error is at most `relative` times the tensor's largest absolute value."""
    assert ours.keys() == expected.keys()
    for name, theirs in expected.items():
        error = float((ours[name] - theirs).abs().max())
        assert error <= relative * float(theirs.abs().max()), (name, error)
