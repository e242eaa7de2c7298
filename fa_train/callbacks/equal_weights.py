"""Checks that all copies of the model have equal weights."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from fa_train.bounds import PositiveInt
from fa_train.callbacks.timestamp import Timestamp
from fa_train.errors import DivergedError
from fa_train.models.shards import local
from fa_train.parallel.fsdp import FullyShardedStrategy

PIECE = 2**22  # the number of elements that are hashed at a time
SPREAD = -7046029254386353131  # 2**64 / golden ratio, read as int64; its multiples modulo 2**64 are spread evenly
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # {number of bytes per element: dtype}


@dataclass(frozen=True)
class Check:
    """Hashes of the weights after a step.

    hashes: (ranks,) int64 in host memory. Wait for `end` before reading `hashes`.
    """

    step: int
    hashes: Tensor
    end: Timestamp


class EqualWeights(Callback):
    """Compares the weights of ranks by a hash, at the start of a run and after every `every_n_steps` steps.

    With DDP, all ranks must have equal weights. With HSDP, all replicas of a shard must have equal weights. Without
    replicas, each shard exists only once, so nothing is compared. With optimizer=adamw_master, the low bits of the fp32
    master weights must be equal too.
    Each rank computes the hash on its device. The host reads the hashes of all ranks after it has launched the next
    micro-batch, or before a checkpoint is saved.
    Raises: DivergedError on all ranks if hashes differ.
    """

    def __init__(self, every_n_steps: PositiveInt) -> None:
        self.every_n_steps = every_n_steps
        self._check: Check | None = None  # the newest check, or None once its hashes are compared
        self._checked_step = -1  # the step of the newest check
        self._equal_step: int | None = None  # the newest step after which all copies of the weights were equal

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check, self._checked_step, self._equal_step = None, -1, None
        self._start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._compare(trainer)
        if trainer.global_step % self.every_n_steps == 0 and trainer.global_step != self._checked_step:
            self._start(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._compare(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._compare(trainer)

    def _start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Launches a check of the current weights. The host does not wait for the device."""
        self._checked_step = trainer.global_step
        if copies(trainer) == 1:
            return
        device = trainer.strategy.root_device
        own = bit_hash(weights(trainer, pl_module), device)
        hashes = own.new_zeros(trainer.world_size)
        hashes[trainer.global_rank] = own
        dist.all_reduce(hashes)
        # the host does not wait for this copy, because it goes to pinned memory
        self._check = Check(trainer.global_step, hashes.to("cpu", non_blocking=True), Timestamp(device))

    def _compare(self, trainer: L.Trainer) -> None:
        """Waits for the hashes of the last check, and compares them. All ranks call _compare at the same point."""
        check, self._check = self._check, None
        if check is None:
            return
        check.end.wait()
        different = differences(check.hashes.tolist(), copies(trainer))
        if different:
            pairs = ", ".join(f"rank {rank} from rank {reference}" for rank, reference in different)
            earlier = "" if self._equal_step is None else f" They were equal at step {self._equal_step}."
            raise DivergedError(
                f"step {check.step}: weights that must be equal on all copies of the model differ: {pairs}.{earlier} "
                "The cause may be a faulty GPU, or code that changes weights or gradients on some ranks only"
            )
        self._equal_step = check.step


def weights(trainer: L.Trainer, pl_module: L.LightningModule) -> Iterator[Tensor]:
    """Yields this rank's shards of the weights, and of the low bits that adamw_master stores for bf16 weights."""
    for parameter in pl_module.parameters():
        yield local(parameter.detach())
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            if "low_bits" in state:
                yield local(state["low_bits"])


def copies(trainer: L.Trainer) -> int:
    """Returns the number of copies of the model in a run."""
    strategy = trainer.strategy
    return strategy.replicas if isinstance(strategy, FullyShardedStrategy) else trainer.world_size


def differences(hashes: list[int], copies: int) -> list[tuple[int, int]]:
    """Returns a pair (rank, reference rank) for each rank whose hash differs from that of its reference rank.

    Each rank is compared with its reference rank, which holds the same shard in the first copy of the model.
    hashes: one per rank. Each copy of the model is sharded over consecutive ranks.
    """
    ranks_per_copy = len(hashes) // copies
    references = [(rank, rank % ranks_per_copy) for rank in range(len(hashes))]
    return [(rank, reference) for rank, reference in references if hashes[rank] != hashes[reference]]


def bit_hash(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns a hash of the bits and the order of all elements, as an int64 scalar on the device.

    The bits of each element, read as an integer, are multiplied by an odd number. The hash is the sum of the products,
    modulo 2**64. A change of one element always changes the hash. No temporary tensor has more than `PIECE` elements.
    """
    factors = odd_numbers(0, PIECE, device)
    integers = (tensor.view(INTEGERS[tensor.element_size()]).reshape(-1) for tensor in tensors)
    sums = [(piece * factors[: len(piece)]).sum() for flat in integers for piece in flat.split(PIECE)]
    return (torch.stack(sums) * odd_numbers(PIECE, len(sums), device)).sum()


def odd_numbers(start: int, count: int, device: torch.device) -> Tensor:
    """Returns `count` elements of a fixed sequence of odd numbers, from index `start`. Shape: (count,) int64."""
    return torch.arange(start, start + count, device=device) * SPREAD | 1
