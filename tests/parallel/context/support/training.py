"""Trains a small model on token streams that are split among ranks, and records losses, gradients and weights."""

import os
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fa_kernels.flash_attention.interface import flash_attn_packed
from fa_train.memory.memory import Memory
from fa_train.models.attention import Attention, flash_attention
from fa_train.models.config import Family
from fa_train.models.gpt import GPT
from fa_train.models.initial import draw
from fa_train.models.rope import document_positions
from fa_train.parallel.context import traffic as traffic_module
from fa_train.parallel.context.attention import ContextAttention
from fa_train.parallel.fsdp import FullyShardedStrategy
from tests.memory.support.small import ATTENTIONS, VOCAB, compile_blocks
from tests.parallel.support.sharding import MEMORIES, STEPS, Recorder
from tests.support.interpreter import patched_once_a_launch
from tests.support.trainers import lit_gpt

TOTAL = 60
BOUNDARIES = {
    "one": [0, TOTAL],
    "several": [0, 13, 14, 14, 30, 39, TOTAL],
    "padded": [0, 13, 14, 30, 39, 55, 55],  # the last document ends five tokens before the end of the stream
}
FEATURES: dict[str, dict[str, Any]] = {
    "gqa": {"n_kv_heads": 1},
    "window": {"family": Family(windows=[None, 5])},
    "cap": {"family": Family(softcap=5.0, logit_softcap=5.0)},
    "sinks": {},
}


@dataclass(frozen=True)
class Case:
    """attention: a key of `ATTENTIONS`. packing: a key of `BOUNDARIES`. feature: a key of `FEATURES`.

    accumulation: the number of micro-batches that a context group processes in a step. data: the number of context
    groups, which train on different data. context: the number of ranks in a context group. memory: a key of `MEMORIES`.
    """

    attention: str
    packing: str
    feature: str
    accumulation: int
    data: int
    context: int
    memory: str
    compiled: bool

    @property
    def mesh(self) -> tuple[int, int]:
        return self.data, self.context

    @property
    def ranks(self) -> int:
        return self.data * self.context

    @property
    def possible(self) -> bool:
        impossible = {"cap": ["sdpa"], "sinks": ["naive", "sdpa", "chunked"]}
        return self.attention not in impossible.get(self.feature, [])

    def __str__(self) -> str:
        *options, compiled = astuple(self)
        return "-".join([*map(str, options), "compiled" if compiled else "eager"])


class WithSinks(nn.Module):
    """Flash attention with one trained sink for each head."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.attention: Any = flash_attn_packed
        self.sinks = nn.Parameter(torch.empty(n_heads))

    def forward(self, *inputs: Any, **scores: float) -> Tensor:
        o: Tensor = self.attention(*inputs, sinks=self.sinks, **scores)
        return o


class SinkGPT(GPT):
    def _add_modules(self, attention: Attention, memory: Memory) -> None:
        super()._add_modules(attention, memory)
        for block in self._blocks():
            block.attention.attend = WithSinks(self.config.n_heads)

    def init_weights(self) -> None:
        super().init_weights()
        for name, parameter in self.named_parameters():
            if name.endswith("sinks"):
                draw(parameter, nn.init.normal_, self.seed, name)

    def share_context(self, group: str, head_groups: int = 1) -> None:
        attention = ContextAttention(flash_attention, group, head_groups)
        for block in self._blocks():
            cast(WithSinks, block.attention.attend).attention = attention


class GradientRecorder(Recorder):
    """Records the gradients that the optimizer gets.

    LitGPT rescales the gradients to a mean over the step's labels before the optimizer uses them.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        record = super().on_before_optimizer_step
        trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: record(trainer, pl_module, optimizer))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Does nothing, because Lightning calls this method before the gradients are rescaled."""


def build(case: Case, device: str) -> GPT:
    memory, kind = MEMORIES[case.memory], SinkGPT if case.feature == "sinks" else GPT
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, head_dim=None, ffn_dim=48, norm="rmsnorm",
        norm_eps=1e-5, positions="rope", rope_theta=1e4, max_seq_len=None, activation="swiglu", bias=False,
        qk_norm=False, tied=True, init="gpt2",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(
            attention=ATTENTIONS[case.attention], loss=memory.loss, memory=memory, **sizes | FEATURES[case.feature]
        )
    # chunked attention is not compiled, so it breaks the graph of a block
    return compile_blocks(model, fullgraph=case.attention != "chunked") if case.compiled else model


def micro_batches(packing: str, number: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    boundaries = torch.tensor(BOUNDARIES[packing], dtype=torch.int32)
    positions = document_positions(boundaries, TOTAL, torch.device("cpu"))
    batches = []
    for i in range(number):
        tokens = torch.randint(VOCAB, (TOTAL,), generator=generator)
        labels = tokens.roll(-1)
        labels[boundaries[1:].long() - 1] = labels[boundaries[-1] :] = labels[: 3 * i] = -100
        batches.append({"tokens": tokens, "labels": labels, "position_ids": positions, "cu_seqlens": boundaries})
    return batches


def train(case: Case, rank: int | None = None) -> Recorder:
    """Trains on the data of `rank`. If rank is None, trains on the data of all ranks in a single process."""
    alone = rank is None
    lit = lit_gpt(build(case, "cpu" if alone else "meta"), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    batches: list[Any] = micro_batches(case.packing, STEPS * case.data * case.accumulation)
    accumulation = case.accumulation * (case.data if alone else 1)
    if rank is not None:
        group, place = divmod(rank, case.context)
        batches = batches[group :: case.data]
        if case.context > 1:
            batches = [lit.model.context_shard(place, case.context)(x) for x in batches]
    recorder = GradientRecorder()
    trainer = L.Trainer(
        accelerator="cpu", devices=1 if alone else case.ranks, max_steps=STEPS, logger=False,
        strategy="auto" if alone else FullyShardedStrategy(1, True, False, "float32", case.context),
        accumulate_grad_batches=accumulation, gradient_clip_val=0.5, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, callbacks=[recorder],
    )  # fmt: skip
    loader: DataLoader[Any] = DataLoader(cast(Any, batches), batch_size=None)
    trainer.fit(lit, loader)
    return recorder


def in_processes(rank: int, folder: str, environments: list[dict[str, str]], cases: list[Case]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    traffic_module.MAX_CROSSING, traffic_module.MIN_PAIRS = 1 / 4, 0  # makes some cases run attention twice
    with patched_once_a_launch():
        for case in cases:
            recorder = train(case, rank)
            if rank == 0:
                recorded = {name: getattr(recorder, name) for name in ("losses", "gradients", "weights")}
                torch.save(recorded, Path(folder, f"{case}.pt"))
    dist.destroy_process_group()
