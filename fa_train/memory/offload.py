"""Offloads activations to host memory until the backward: the hidden states between blocks, or all that blocks keep.

With full activation checkpointing a block keeps only its input. Offloading these inputs (memory.offload=true) frees
most of the memory of very long sequences. memory.offload=all offloads everything that blocks without checkpointing
keep, and nothing is recomputed. Copies run on a side stream, while other blocks compute.

Saved-tensor hooks around each block replace tensors by a `_State`. With offload=true only the block's input is
replaced, and with offload=all every tensor with one row per token. A state is a whole storage, because q, k and v are
views of one storage. autograd owns the states, so their lifetime is correct for every wrapper of a block, including
torch.compile.

A copy to the host starts after the compute stream has written the state. The compute stream waits for the copy two
blocks later (IN_FLIGHT + 1 blocks later with "all"), and then the state's GPU memory is freed. For a copy back to the
GPU, the compute stream allocates memory, the side stream copies, and the compute stream waits for the copy.
Host buffers return to the pool when the graph is freed. All copies use one stream, so a buffer's last copy to the GPU
ends before the next copy into the buffer. The host never waits. record_stream is not used, because it would free the
memory later, at a time that depends on the host.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Offloaded = bool | Literal["all"]  # nothing, hidden states between blocks, or all that blocks keep
IN_FLIGHT = 2  # with "all": the earlier blocks whose copies to the host may still run


def require_offload(offload: Offloaded, checkpointing: str) -> None:
    """Raises: ValueError if `offload` is unknown, or is "all" with checkpointing other than none."""
    if offload not in (False, True, "all"):
        raise ValueError(f"memory.offload must be true, false or all; got {offload}")
    if offload == "all" and checkpointing != "none":
        raise ValueError(f"memory.offload=all needs memory.checkpointing=none; got {checkpointing}")


def available_host_bytes() -> int:
    """Returns the available memory of this machine or container in bytes. Linux only."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limits = [_control_group_bytes(Path(folder)) for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")]
    return min([available, *(limit for limit in limits if limit is not None)])


def require_host_memory(needed: int, available: int, processes: int = 1, *, everything: bool = False) -> None:
    """Raises: ValueError if `processes` processes with `needed` bytes each do not fit in the `available` bytes."""
    if needed * processes > available:
        each = f" in each of {processes} processes" if processes > 1 else ""
        offload, other = ("all", "memory=offload") if everything else ("true", "memory.offload=false")
        raise ValueError(
            f"memory.offload={offload} needs {needed / 2**30:.1f} GiB of host memory{each}; {available / 2**30:.1f} "
            f"GiB are available. Choose a shorter seq_len, trainer.precision=bf16-true, or {other}"
        )


def worth_a_copy(nbytes: int, tokens: int, dim: int) -> bool:
    """Returns whether a tensor is large enough to offload. Excludes lse, statistics of norms, and rotation angles.

    nbytes: the size of the tensor's whole storage. dim: the width of hidden states.
    """
    return nbytes >= tokens * dim


class Offload:
    """Offloads the states of one model, in all its steps. Owns the host buffers and the copy stream.

    everything: True offloads everything that a block keeps, False only its input.
    The first step allocates the buffers, and later steps reuse them.
    """

    def __init__(self, n_layers: int, everything: bool = False) -> None:
        self.n_layers, self.everything = n_layers, everything
        self.pool: HostPool | None = None
        self.copies: torch.cuda.Stream | None = None

    def forward_pass(self, x: Tensor) -> "ForwardPass":
        """Starts a forward pass. x: the hidden states, whose size and device it uses.

        Raises: ValueError if the host has too little memory. With everything=True, the first block raises it.
        """
        if self.pool is None:
            self.pool = HostPool(pinned=x.is_cuda)
            self.copies = torch.cuda.Stream(x.device) if x.is_cuda else None
        if not self.everything:
            self.pool.require((self.n_layers - 1) * x.nbytes, everything=False)
        return ForwardPass(self.n_layers, self.everything, self.pool, self.copies)


class HostPool:
    """A pool of host buffers. A buffer is freed only if it is too small for a new request."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.free: list[Tensor] = []
        self.allocated = 0  # the number of allocations, for tests: only the first step allocates
        self.nbytes = 0  # the size of all buffers

    def require(self, nbytes: int, *, everything: bool) -> None:
        """Raises: ValueError if the host has too little memory to grow the pool to nbytes."""
        if nbytes > self.nbytes:
            require_host_memory(nbytes, available_host_bytes() + self.nbytes, everything=everything)

    def take(self, nbytes: int) -> Tensor:
        """Returns a uint8 buffer of at least nbytes: the smallest free one that is large enough, or a new one.

        A new buffer replaces the largest free one, which is too small.
        """
        self.free.sort(key=Tensor.numel)
        for place, buffer in enumerate(self.free):
            if buffer.numel() >= nbytes:
                return self.free.pop(place)
        if self.free:
            self.nbytes -= self.free.pop().numel()
        self.allocated += 1
        self.nbytes += nbytes
        return _pinned(nbytes) if self.pinned else torch.empty(nbytes, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool. Copies on the pool's stream can still use it."""
        self.free.append(buffer)


class ForwardPass:
    """Offloads the states of one forward pass, block by block."""

    def __init__(self, n_layers: int, everything: bool, pool: HostPool, copies: torch.cuda.Stream | None) -> None:
        self.everything, self.pool, self.copies = everything, pool, copies
        self.n_layers = self.blocks_left = n_layers
        self.below: list[_State] = []  # the states of the previous block
        self.underway = _Underway(blocks=IN_FLIGHT if everything else 1)

    @contextmanager
    def block(self, x: Tensor) -> Iterator[None]:
        """Wraps one block's forward on x, and offloads what it saves.

        The last block keeps its states on the GPU, because its backward is the first one and needs them immediately.
        """
        self.blocks_left -= 1
        self.underway.next_block()
        pack = _Pack(x, self)
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self.below = list(pack.states.values())
            pack.release()
        if self.everything and self.blocks_left == self.n_layers - 1:
            self.pool.require(sum(state.nbytes for state in self.below) * (self.n_layers - 1), everything=True)

    def end(self, x: Tensor) -> None:
        """Call this after the last block. x: the last block's result.

        With "all", the states of the last blocks are held until x gets its gradient, so that copies can still run.
        """
        self.below, underway = [], self.underway
        if self.everything and x.requires_grad:
            x.register_hook(lambda _: underway.let_go())
        else:
            underway.let_go()

    def keep(self, storage: Tensor) -> "_State":
        """Makes a state of a saved storage, (nbytes,) uint8, and starts its copy unless this is the last block."""
        state = _State(storage, self.below)
        if self.blocks_left:
            state.send(self.pool, self.copies, self.underway)
        return state


class _Underway:
    """Holds the GPU memory of states whose copies to the host may still run.

    blocks: the number of blocks whose states are held.
    """

    def __init__(self, blocks: int) -> None:
        self.keep = blocks
        self.blocks: deque[list[tuple[Tensor, torch.cuda.Event | None]]] = deque()

    def next_block(self) -> None:
        """Starts a new block. Releases the oldest blocks if too many are held."""
        self.let_go(self.keep)
        self.blocks.append([])

    def add(self, storage: Tensor, copied: torch.cuda.Event | None) -> None:
        """Adds a state's memory. copied: the event at the end of its copy; None if the copy has finished."""
        self.blocks[-1].append((storage, copied))

    def let_go(self, keep: int = 0) -> None:
        """Makes the current stream wait for the copies of all but the `keep` newest blocks, and frees their memory."""
        while len(self.blocks) > keep:
            for _, copied in self.blocks.popleft():
                if copied is not None:
                    torch.cuda.current_stream().wait_event(copied)

    def __del__(self) -> None:
        self.let_go()


class _State:
    """The storage of one saved tensor and of its views. below: the states that the backward needs next."""

    def __init__(self, storage: Tensor, below: "list[_State]") -> None:
        self.storage: Tensor | None = storage
        self.nbytes = storage.nbytes
        self.below = below
        self.left = 0  # the saved views that the backward has not used yet
        self.pool: HostPool | None = None
        self.arrived: torch.cuda.Event | None = None

    def send(self, pool: HostPool, copies: torch.cuda.Stream | None, underway: _Underway) -> None:
        """Starts the copy to the host and gives up the GPU memory. `underway` holds it until the copy has ended."""
        storage = self.storage
        assert storage is not None
        self.storage, self.pool, self.copies, self.device = None, pool, copies, storage.device
        self.buffer = pool.take(storage.nbytes)
        self.host = self.buffer[: storage.nbytes]
        if copies is None:
            self.host.copy_(storage)
            underway.add(storage, None)
            return
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            self.host.copy_(storage, non_blocking=True)
        underway.add(storage, copies.record_event())

    def fetch(self) -> None:
        """Starts the copy back to the GPU unless it has already started."""
        if self.storage is not None:
            return
        self.storage = torch.empty_like(self.host, device=self.device, pin_memory=False)
        if self.copies is None:
            self.storage.copy_(self.host)
            return
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.storage.copy_(self.host, non_blocking=True)
        self.arrived = self.copies.record_event()

    def get(self) -> Tensor:
        """Returns the storage on the GPU, (nbytes,) uint8, and starts the copies of the states below.

        This state keeps the storage until the backward has used all saved views of it.
        """
        self.fetch()
        self._await()
        for state in reversed(self.below):
            state.fetch()
        self.below = []
        storage = self.storage
        assert storage is not None
        self.left -= 1
        if self.left <= 0 and self.pool is not None:  # a second backward fetches it again
            self.storage = None
        return storage

    def _await(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        # A state that was fetched may never be used. Wait for the copy before the memory is reused.
        self._await()
        if self.pool is not None:
            self.pool.give(self.buffer)


@dataclass(frozen=True)
class _View:
    """Replaces one saved tensor: a view of a state's storage."""

    state: _State
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Pack:
    """The pack hook, which replaces the tensors that a block saves.

    autograd keeps the hook alive after the forward, so `release` empties it.
    """

    def __init__(self, x: Tensor, forward_pass: ForwardPass) -> None:
        self.x: Tensor | None = x
        self.forward_pass: ForwardPass | None = forward_pass
        self.states: dict[int, _State] = {}  # by the address of the storage, which can be saved more than once
        self.memory: list[Tensor] = []  # keeps the storages alive, so that no address is reused

    def __call__(self, saved: Tensor) -> "Tensor | _View":
        assert self.x is not None and self.forward_pass is not None
        is_offloaded = _has_row_per_token if self.forward_pass.everything else _is_same_tensor
        if not is_offloaded(saved, self.x):
            return saved.detach()  # a node that saves its own result would otherwise be in a reference cycle
        storage = saved.untyped_storage()
        state = self.states.get(storage._cdata)
        if state is None:
            whole = saved.detach().as_strided((storage.nbytes() // saved.itemsize,), (1,), 0).view(torch.uint8)
            state = self.states[storage._cdata] = self.forward_pass.keep(whole)
            self.memory.append(whole)
        state.left += 1
        return _View(state, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))

    def release(self) -> None:
        self.x = self.forward_pass = None
        self.states, self.memory = {}, []


def _unpack(saved: Tensor | _View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.state.get().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


def _is_same_tensor(saved: Tensor, x: Tensor) -> bool:
    """Returns whether `saved` is x. autograd passes another Python object for the same tensor."""
    return (
        saved.data_ptr() == x.data_ptr()
        and saved.shape == x.shape
        and saved.dtype == x.dtype
        and saved.stride() == x.stride()
    )


def _has_row_per_token(saved: Tensor, x: Tensor) -> bool:
    """Returns whether `saved`, or the tensor it is a view of, has one row per token of x and is large enough.

    Weights are never offloaded.
    """
    base = saved if saved._base is None else saved._base
    return (
        not isinstance(base, nn.Parameter)
        and saved.device == x.device
        and x.shape[0] in base.shape
        and worth_a_copy(saved.untyped_storage().nbytes(), *x.shape)
    )


def _pinned(nbytes: int) -> Tensor:
    """Returns a pinned host buffer, (nbytes,) uint8.

    torch's own pinned allocator is not used, because it rounds sizes up to a power of two. No page belongs to two
    buffers, because CUDA registers whole pages, and each page only once.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    buffer.zero_()  # creates the pages with all threads; registering would use one
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, nbytes, 0)))

    def unregister() -> None:
        torch.cuda.synchronize()  # a copy can still run
        cudart.cudaHostUnregister(address)

    weakref.finalize(buffer, unregister).atexit = False
    return buffer


def _control_group_bytes(folder: Path) -> int | None:
    """Returns the bytes that are left below a container's memory limit, or None if there is no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),  # cgroup version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # cgroup version 1
    ):
        if (folder / limit).exists() and (folder / limit).read_text().strip() != "max":
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(statistics[cache])  # the page cache can be freed
            return int((folder / limit).read_text()) - used
    return None
