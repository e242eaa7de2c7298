"""Hidden states between blocks wait for their backward in host memory.

A block's input is what activation checkpointing keeps of it: at a million tokens the largest part of a step. Copies
run on a stream of their own, out while the block computes, back while the backward of the block above it computes.

Design: saved-tensor hooks around each block. Whatever the block saves that is its input (checkpoint's one argument, or
the norm's input without checkpointing) is kept as a `_Boundary` instead; all else stays where it is. So autograd
decides how long a boundary lives, and every wrapper of a block works unchanged, torch.compile included.

Order on the device, with `copies` the side stream and `compute` autograd's:
- out: copies waits for compute, which wrote the state. The state itself is kept until compute waits for its copy two
  blocks later, so that its memory is not handed out while it is read; at most two states are underway.
- back: compute allocates, copies waits for compute (the memory's last owner) and fills, compute waits for copies.
- host buffers return to the pool with the graph. The one stream orders a buffer's last copy back before its next copy
  out, so nothing ever waits on the host.
No tensor is handed to record_stream, which would free memory only when the host happens to look.
"""

import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def host_bytes(n_layers: int, tokens: int, dim: int, dtype: torch.dtype) -> int:
    """The pinned host memory of one process, in bytes: the states of `tokens` before each block but the last."""
    return (n_layers - 1) * tokens * dim * dtype.itemsize


def available_host_bytes() -> int:
    """What this machine, or the container that this runs in, can still give, in bytes; Linux only."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limits = [_control_group_bytes(Path(folder)) for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")]
    return min([available, *(limit for limit in limits if limit is not None)])


def require_host_memory(needed: int, available: int, processes: int = 1) -> None:
    """ValueError when `processes` of this machine cannot have `needed` bytes each of the `available` ones."""
    if needed * processes > available:
        each = f" in each of {processes} processes" if processes > 1 else ""
        raise ValueError(
            f"memory.offload=true needs {needed / 2**30:.1f} GiB of host memory{each}; {available / 2**30:.1f} GiB are "
            f"available. Choose a shorter seq_len, trainer.precision=bf16-true, or memory.offload=false"
        )


class Offload:
    """The host memory and the stream of one model's boundaries, over all its steps.

    Buffers are allocated in the first step and reused from then on: as many as boundaries wait at once.
    """

    def __init__(self, n_layers: int) -> None:
        self.n_layers = n_layers
        self.pool: HostPool | None = None
        self.copies: torch.cuda.Stream | None = None

    def forward_pass(self, x: Tensor) -> "ForwardPass":
        """For one forward over hidden states like x. Raises: ValueError when the host has too little memory."""
        needed = (self.n_layers - 1) * x.nbytes
        if self.pool is None:
            require_host_memory(needed, available_host_bytes())
            self.pool = HostPool(pinned=x.is_cuda)
            self.copies = torch.cuda.Stream(x.device) if x.is_cuda else None
        return ForwardPass(self.n_layers, self.pool, self.copies)


class HostPool:
    """Buffers of host memory: handed out, handed back, never freed unless they became too small."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.free: list[Tensor] = []
        self.allocated = 0  # how often, for the tests: a step after the first allocates nothing

    def take(self, nbytes: int) -> Tensor:
        """(at least nbytes,) uint8."""
        buffer = self.free.pop() if self.free else None
        if buffer is None or buffer.numel() < nbytes:
            self.allocated += 1
            buffer = _pinned(nbytes) if self.pinned else torch.empty(nbytes, dtype=torch.uint8)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Copies on the pool's stream may still be underway."""
        self.free.append(buffer)


class ForwardPass:
    """The boundaries of one forward, in order."""

    def __init__(self, n_layers: int, pool: HostPool, copies: torch.cuda.Stream | None) -> None:
        self.pool, self.copies = pool, copies
        self.blocks_left = n_layers
        self.below: _Boundary | None = None
        self.underway: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    @contextmanager
    def block(self, x: Tensor) -> Iterator[None]:
        """Around one block's forward on x, which goes to the host if the block saves it.

        The last block's stays: its backward is the first, so it would be needed back at once.
        """
        self.blocks_left -= 1
        self._let_go(keep=1)
        pack = _Pack(x, self)
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            pack.release()
        if not self.blocks_left:
            self._let_go(keep=0)

    def keep(self, state: Tensor) -> "_Boundary":
        """The next boundary, of a state that its block saves."""
        self.below = boundary = _Boundary(state, self.below)
        if self.blocks_left:
            boundary.send(self.pool, self.copies, self.underway)
        return boundary

    def _let_go(self, keep: int) -> None:
        """Frees the states whose copies should have ended by now, all but the `keep` newest."""
        while len(self.underway) > keep:
            _, copied = self.underway.popleft()
            torch.cuda.current_stream().wait_event(copied)


class _Boundary:
    """One hidden state from its forward to its backward; `below` is the one that the backward asks for next."""

    def __init__(self, state: Tensor, below: "_Boundary | None") -> None:
        self.state: Tensor | None = state
        self.below = below
        self.pool: HostPool | None = None
        self.arrived: torch.cuda.Event | None = None

    def send(
        self,
        pool: HostPool,
        copies: torch.cuda.Stream | None,
        underway: deque[tuple[Tensor, torch.cuda.Event]],
    ) -> None:
        """Starts the copy to the host and lets the state go; `underway` holds it until that copy has ended."""
        state = self.state
        assert state is not None
        self.state, self.pool, self.copies, self.device = None, pool, copies, state.device
        self.buffer = pool.take(state.nbytes)
        self.host = self.buffer[: state.nbytes].view(state.dtype).view(state.shape)
        if copies is None:
            self.host.copy_(state)
            return
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            self.host.copy_(state, non_blocking=True)
        underway.append((state, copies.record_event()))

    def fetch(self) -> None:
        """Starts the copy back, unless the state is here or on its way."""
        if self.state is not None:
            return
        self.state = torch.empty_like(self.host, device=self.device, pin_memory=False)
        if self.copies is None:
            self.state.copy_(self.host)
            return
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            self.state.copy_(self.host, non_blocking=True)
        self.arrived = self.copies.record_event()

    def get(self) -> Tensor:
        """The state for its block's backward; the one below sets out."""
        self.fetch()
        self._await()
        if self.below is not None:
            self.below.fetch()
        assert self.state is not None
        return self.state

    def _await(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        # the memory of a state that was fetched in vain must not be handed out while it is written
        self._await()
        if self.pool is not None:
            self.pool.give(self.buffer)


class _Pack:
    """Replaces x among what a block saves. autograd holds on to this with the graph, so in the end it holds nothing."""

    def __init__(self, x: Tensor, forward_pass: ForwardPass) -> None:
        self.x: Tensor | None = x
        self.forward_pass: ForwardPass | None = forward_pass
        self.boundary: _Boundary | None = None

    def __call__(self, saved: Tensor) -> "Tensor | _Boundary":
        assert self.x is not None and self.forward_pass is not None
        if not _is(saved, self.x):
            return saved
        if self.boundary is None:  # x may be saved more than once
            self.boundary = self.forward_pass.keep(saved)
        return self.boundary

    def release(self) -> None:
        self.x = self.forward_pass = self.boundary = None


def _unpack(saved: Tensor | _Boundary) -> Tensor:
    return saved.get() if isinstance(saved, _Boundary) else saved


def _is(saved: Tensor, x: Tensor) -> bool:
    """Whether autograd saves x; it does not hand over the same Python object."""
    return (
        saved.data_ptr() == x.data_ptr()
        and saved.shape == x.shape
        and saved.dtype == x.dtype
        and saved.stride() == x.stride()
    )


def _pinned(nbytes: int) -> Tensor:
    """(nbytes,) uint8 that the GPU copies from and to directly.

    torch's own pinned memory is rounded up to a power of two: 6 GiB would take 8. Pages of its own, because CUDA
    registers whole pages, and each once.
    """
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    buffer.zero_()  # by all threads; registering pages that do not exist yet makes them by one
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    torch.cuda.check_error(int(cudart.cudaHostRegister(address, nbytes, 0)))

    def unregister() -> None:
        torch.cuda.synchronize()  # a copy may be underway
        cudart.cudaHostUnregister(address)

    weakref.finalize(buffer, unregister).atexit = False
    return buffer


def _control_group_bytes(folder: Path) -> int | None:
    """What a container's limit leaves; None where there is none."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),  # version 2
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
    ):
        if (folder / limit).exists() and (folder / limit).read_text().strip() != "max":
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(statistics[cache])  # the cache makes way
            return int((folder / limit).read_text()) - used
    return None
