"""Writes a checkpoint of several ranks while training goes on.

torch's dcp.async_save is not used, for three reasons. dcp.async_save cannot write a single file, but `strategy=ddp`
saves single files. The thread of dcp.async_save keeps a process from exiting while another rank hangs. dcp.async_save
also allocates new host memory for each checkpoint.
"""

import copy
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fa_train.checkpoints.files import PARTIAL, CheckpointError, not_written, rename_into_place
from fa_train.memory.host_memory import own_pages
from fa_train.parallel.communication import host_group

PATIENCE = timedelta(hours=1)  # how long a rank waits for the slowest rank to write its part of a checkpoint
PINNED_FROM = 2**20  # in bytes; smaller tensors are copied fast enough without pinned memory
Key = tuple[Any, ...]


class BackgroundSave:
    """Copies a checkpoint to host memory and writes the copy in a thread. Writes one checkpoint at a time.

    All ranks must create their BackgroundSave at the same time. The memory of the copies is kept for the next
    checkpoint. The writing thread communicates in the process group `writers`.
    """

    def __init__(self, device: torch.device) -> None:
        # The writing thread and the training loop have separate groups, because both communicate at the same time.
        self.writers, self._askers = (host_group(PATIENCE) for _ in range(2))
        self._copies = HostCopies(device)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_done = torch.zeros(1, dtype=torch.int32)
        self._asked: dist.Work | None = None
        self.seconds = 0.0  # how long this rank took to write the last checkpoint

    def start(self, state: Any, write: Callable[[Any], None], partial: Path) -> None:
        """Copies `state`, starts the thread and returns.

        The thread calls write(copy). On rank 0, the thread then renames `partial` to its final name.
        """
        assert self._thread is None, "the last checkpoint must be finished first"
        self._error = None
        arguments = (self._copies.of(state), write, partial)
        # the thread is a daemon: at exit, the interpreter must not wait for a thread that may wait for another rank
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def done_everywhere(self) -> bool:
        """Returns True if all ranks had already finished the save at the previous call of this method.

        The first call after the start of a save returns False. All ranks must call this method the same number of
        times.
        """
        if self._asked is not None:
            self._asked.wait()
            if self._is_done.item():
                return True
        self._is_done.fill_(not self._is_running)
        self._asked = dist.all_reduce(self._is_done, dist.ReduceOp.MIN, self._askers, async_op=True)
        return False

    def finish(self) -> None:
        """Waits until all ranks have finished. Raises: CheckpointError on all ranks if any rank failed."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
        self._join(None)
        own = self._error
        told = own if own is None or isinstance(own, CheckpointError) else CheckpointError(f"save failed: {own!r}")
        errors: list[CheckpointError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, told, group=self._askers)
        if own is not None:
            raise own
        for error in errors:
            if error is not None:
                raise error

    def finish_alone(self, seconds: float) -> bool:
        """Waits for this rank's thread, but no longer than `seconds`. Returns whether the checkpoint is complete."""
        started = self._thread is not None
        self._join(seconds)
        return started and self._thread is None and self._error is None

    @property
    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _join(self, seconds: float | None) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None

    def _run(self, state: Any, write: Callable[[Any], None], partial: Path) -> None:
        start = time.perf_counter()
        try:
            write(state)
            if dist.get_rank() == 0:
                rename_into_place(partial, partial.with_name(partial.name.removesuffix(PARTIAL)))
        except OSError as error:
            self._error = not_written(partial, error)
        except BaseException as error:  # `finish` raises it
            self._error = error
        self.seconds = time.perf_counter() - start


class HostCopies:
    """Copies nested dicts and lists of tensors to host memory. Copies of large GPU tensors are in pinned memory.

    Each call of the method `of` overwrites the copy that the previous call returned.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[Key, Tensor] = {}
        self._pinned: list[Tensor] = []
        weakref.finalize(self, _unpin, self._pinned).atexit = False

    def of(self, state: Any) -> Any:
        """Returns a complete copy of `state`. Tensors that share memory also share memory in the copy."""
        copied = self._copied(state, (), {})
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return copied

    def _copied(self, value: Any, key: Key, seen: dict[Key, Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._copied_tensor(value.detach(), key, seen)
        if isinstance(value, Mapping):
            copied: Any = copy.copy(value)  # keeps a state_dict's type and attributes
            for name, item in value.items():
                copied[name] = self._copied(item, (*key, name), seen)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, (*key, i), seen) for i, item in enumerate(value))
        return copy.deepcopy(value)

    def _copied_tensor(self, x: Tensor, key: Key, seen: dict[Key, Tensor]) -> Tensor:
        if hasattr(x, "__tensor_flatten__"):  # a DTensor: copy this rank's shard
            names, context = x.__tensor_flatten__()
            inner = {name: getattr(x, name) for name in names}
            inner |= {
                name: self._copied_tensor(part, (*key, name), seen)
                for name, part in inner.items()
                if isinstance(part, Tensor)
            }
            whole: Tensor = type(x).__tensor_unflatten__(inner, context, x.size(), x.stride())  # type: ignore[attr-defined]
            return whole
        place = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride())
        if x.numel() and place in seen:  # a tied weight
            return seen[place]
        host = self._memory.get(key)
        if host is None or (host.dtype, host.shape, host.stride()) != (x.dtype, x.shape, x.stride()):
            host = self._memory[key] = self._allocated(x)
        host.copy_(x, non_blocking=True)
        seen[place] = host
        return host

    def _allocated(self, x: Tensor) -> Tensor:
        """Returns host memory for a copy of x.

        Pinned memory does not come from torch's pinned allocator, because that allocator rounds sizes up to powers of
        two.
        """
        if not x.is_cuda or x.nbytes < PINNED_FROM:
            return torch.empty_like(x, device="cpu")
        host = pinnable_like(x)
        error = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 1))  # 1: on all GPUs
        if error:
            raise CheckpointError(
                "callbacks.checkpoint.asynchronous=true needs pinned host memory for a copy of the checkpoint; "
                f"pinning {host.nbytes / 2**30:.2f} GiB failed with CUDA error {error}. "
                "Set callbacks.checkpoint.asynchronous=false"
            )
        self._pinned.append(host)
        return host


def pinnable_like(x: Tensor) -> Tensor:
    """Returns host memory for a copy of x, on pages that no other tensor uses.

    The result has the strides of torch.empty_like(x).
    """
    like = torch.empty_like(x, device="meta")
    return own_pages(like.nbytes).view(x.dtype).as_strided(like.shape, like.stride())


def _unpin(pinned: list[Tensor]) -> None:
    for host in pinned:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    pinned.clear()
