"""Compares the planner's predicted peak memory of a sharded step with the peak of FSDP2 on fake tensors.

FSDP2 frees a gathered weight by resizing its storage to 0 bytes, so `LiveShards` follows the sizes of storages.

The cases that run by default contain every setting and every moment of a step (class Moment) that occurs in `CASES`.
With PLANNER_CASES=all, all cases run.

No case combines a tied embedding with few tokens and a large vocabulary. With this combination, a step uses the most
memory while autograd adds the two gradients of the tied embedding. Autograd adds the two gradients in place on real
tensors, but not on fake tensors. The peak on fake tensors would therefore be wrong.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  lets collectives run on fake tensors
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore

from fa_train.memory.planner.moments import Moment, moments_of
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.sharded import Sharded
from fa_train.parallel.fsdp import shard
from tests.memory.support.plans import EVERY_CASE, LLAMA_1B, build, changed
from tests.memory.support.simulated import HOST, Live, as_on_a_gpu, autocast_of_lightning
from tests.support.marks import slow_if


class LiveShards(Live):
    """Counts live bytes as `Live` does, and also follows storages that are resized."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == HOST:
            return
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            weakref.finalize(storage, self._finalized, storage._cdata)
        self._measure(storage)

    def following(self, resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Returns a function that resizes a tensor's storage and counts the change."""

        def resize_and_count(tensor: Tensor) -> None:
            resize(tensor)
            self._measure(tensor.untyped_storage())
            self.most = max(self.most, self.now)

        return resize_and_count

    def _measure(self, storage: torch.UntypedStorage) -> None:
        self.now += storage.nbytes() - self._sizes[storage._cdata]
        self._sizes[storage._cdata] = storage.nbytes()

    def _finalized(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


@contextmanager
def two_ranks() -> Iterator[DeviceMesh]:
    """Yields a mesh of two ranks. Rank 0 runs in this process, and rank 1 does not run."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def simulated_peak(plan: Plan) -> int:
    """Returns the peak bytes of a micro-batch. The peak includes gathered weights, but no shards or optimizer states.

    The function measures only the second of two micro-batches, because FSDP2's allocations in the first micro-batch
    differ from those in later micro-batches.
    """
    run = plan.run
    autocast = autocast_of_lightning(run.precision)
    with (
        two_ranks() as mesh,
        FakeTensorMode(),
        as_on_a_gpu(),
        LiveShards() as live,
        pytest.MonkeyPatch.context() as patch,
    ):
        alloc, free = live.following(_fsdp_param.alloc_storage), live.following(_fsdp_param.free_storage)
        patch.setattr(_fsdp_param, "alloc_storage", alloc)
        patch.setattr(_fsdp_param_group, "alloc_storage", alloc, raising=False)
        patch.setattr(_fsdp_param, "free_storage", free)
        torch.set_default_dtype(torch.bfloat16 if run.precision == "bf16-true" else torch.float32)
        try:
            model = build(plan)
        finally:
            torch.set_default_dtype(torch.float32)
        shard(model, mesh, run.precision, reshard_after_forward=run.reshard_after_forward)
        before = live.now

        def micro_batch() -> None:
            ids, positions, labels = (torch.empty(run.tokens, dtype=torch.int64) for _ in range(3))
            with autocast:
                loss = model(ids, torch.empty(2, dtype=torch.int32), positions, labels)
            loss.backward()

        cast(FSDPModule, model).set_requires_gradient_sync(not run.reduce_once)
        micro_batch()
        cast(FSDPModule, model).set_requires_gradient_sync(True)
        if not run.accumulates:
            for parameter in model.parameters():
                parameter.grad = None
            assert live.now == before
        live.most = 0
        micro_batch()
        return live.most - before


BASE = changed(LLAMA_1B, n_layers=4, ranks=2, vocab_size=259, seq_len=8192)
FEW: dict[str, Any] = {"seq_len": 256}
HALF: dict[str, Any] = {"precision": "bf16-true"}
UNTIED: dict[str, Any] = {"tied": False, "vocab_size": 65536}
KEPT: dict[str, Any] = {"reshard_after_forward": False}
LEARNED: dict[str, Any] = {"positions": "learned", "max_seq_len": 32768}
OFFLOADED: dict[str, Any] = {"checkpointing": "selective", "offload": True, "mlp_chunk": 4096, "seq_len": 32768}
ONCE: dict[str, Any] = {"accumulates": True, "reduce_once": True}

LAST, SECOND = "FFN's backward of the last block", "the end of the second block's backward"
EMBEDDING = "the averaging of the embedding's gradient"
# {name of a case: (moment of the expected peak, changed fields of the plan)}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": (LAST, {}),
    "bf16": (LAST, HALF),
    "fp32": (LAST, {"precision": "32-true"}),
    "kept": (LAST, KEPT),
    "chunks": ("FFN's backward of the second to last block", {"mlp_chunk": 2048}),
    "few-tokens": (SECOND, FEW),
    "few-tokens-bf16": (SECOND, FEW | HALF),
    "tied-loss": ("the loss", {"vocab_size": 65536}),
    "untied": ("the loss", UNTIED),
    "untied-bf16": ("the loss", UNTIED | HALF),
    "untied-few-tokens": (EMBEDDING, UNTIED | FEW),
    "untied-few-tokens-bf16": (EMBEDDING, UNTIED | FEW | HALF),
    "untied-kept": ("the loss", UNTIED | KEPT),
    "untied-offloaded-bf16": (LAST, UNTIED | HALF | OFFLOADED),
    "learned-positions": ("the embedding's backward", LEARNED | FEW),
    "untied-learned-positions": (EMBEDDING, UNTIED | LEARNED | FEW),
    "accumulates": (LAST, {"accumulates": True}),
    "untied-accumulates": ("the loss", UNTIED | HALF | {"accumulates": True}),
    "reduces-once": (LAST, ONCE),
    "untied-reduces-once": ("the loss", UNTIED | HALF | FEW | ONCE),
}

REST = {
    "bf16", "kept", "few-tokens-bf16", "untied", "untied-bf16", "untied-few-tokens", "untied-learned-positions",
    "reduces-once",
}  # fmt: skip


def test_the_default_cases_have_every_moment_and_setting():
    def of(names):
        cases = [CASES[name] for name in names]
        return {moment for moment, _ in cases} | {(key, x) for _, changes in cases for key, x in changes.items()}

    assert of(CASES.keys() - REST) == of(CASES)


@pytest.mark.parametrize(
    ("moment", "changes"),
    [
        pytest.param(
            *case, id=name, marks=slow_if(name not in ("mixed", "few-tokens", "untied-kept", "untied-few-tokens-bf16"))
        )
        for name, case in CASES.items()
        if EVERY_CASE or name not in REST
    ],
)
def test_predictions_are_the_simulated_peaks(moment, changes, monkeypatch):
    """Predictions count the last gradient of each group. torch 2.15 frees this gradient earlier than older versions."""
    plan = changed(BASE, **changes)
    expected = max(moments_of(plan), key=Moment.total)
    assert expected.name == moment
    if [int(number) for number in torch.__version__.split(".")[:2]] >= [2, 15]:
        averaged = Sharded._averaged
        monkeypatch.setattr(Sharded, "_averaged", lambda self, n, size, is_last=True: averaged(self, n, size, False))
        expected = max(moments_of(plan), key=Moment.total)
    assert expected.total() == pytest.approx(simulated_peak(plan), rel=0.01)
