"""Hidden states between blocks, or all that blocks keep, wait for their backward in host memory.

A block's input is what activation checkpointing keeps of it: at a million tokens the largest part of a step. Without
checkpointing a block keeps eight times as much (llama_1b, mixed precision), and copying that takes about as long as the
block computes on 131,072 tokens; then nothing is computed twice. Copies run on a stream of their own, out while the
next blocks compute, back while the backward of the block above computes.

Design: saved-tensor hooks around each block. Of what the block saves, its input (checkpoint's one argument, or the
norm's input without checkpointing), or everything that has a row for each token, is kept as a `_State` instead; all
else stays where it is. A state is a whole storage, as q, k and v are views of one. So autograd decides how long a state
lives, and every wrapper of a block works unchanged, torch.compile included.

Order on the device, with `copies` the side stream and `compute` autograd's:
- out: copies waits for compute, which wrote the state. The state itself is kept until compute waits for its copy, so
  that its memory is not handed out while it is read: two blocks later or, of everything, IN_FLIGHT + 1 blocks later, as
  copies may be a little slower than blocks, and those of the last blocks run on beside the loss.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Offloaded = bool | Literal["all"]  # nothing, hidden states between blocks, or all that blocks keep
IN_FLIGHT = 2  # blocks whose copies to the host may still run while a block computes, where everything leaves


def require_offload(offload: Offloaded, checkpointing: str) -> None:
    """ValueError unless it is one, and blocks keep what "all" would send."""
    if offload not in (False, True, "all"):
        raise ValueError(f"memory.offload must be true, false or all; got {offload}")
    if offload == "all" and checkpointing != "none":
        raise ValueError(f"memory.offload=all needs memory.checkpointing=none; got {checkpointing}")


def available_host_bytes() -> int:
    """What this machine, or the container that this runs in, can still give, in bytes; Linux only."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limits = [_control_group_bytes(Path(folder)) for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")]
    return min([available, *(limit for limit in limits if limit is not None)])


def require_host_memory(needed: int, available: int, processes: int = 1, *, everything: bool = False) -> None:
    """ValueError when `processes` of this machine cannot have `needed` bytes each of the `available` ones."""
    if needed * processes > available:
        each = f" in each of {processes} processes" if processes > 1 else ""
        offload, other = ("all", "memory=offload") if everything else ("true", "memory.offload=false")
        raise ValueError(
            f"memory.offload={offload} needs {needed / 2**30:.1f} GiB of host memory{each}; {available / 2**30:.1f} "
            f"GiB are available. Choose a shorter seq_len, trainer.precision=bf16-true, or {other}"
        )


def worth_a_copy(nbytes: int, tokens: int, dim: int) -> bool:
    """Whether a tensor with a row for each token goes to the host: not lse, norms' statistics and angles.

    nbytes is of the tensor's whole storage; dim is that of hidden states.
    """
    return nbytes >= tokens * dim


class Offload:
    """The host memory and the stream of one model's states, over all its steps.

    everything: whether whatever a block keeps goes to the host, or its input alone.
    Buffers are allocated in the first step and reused from then on: as many as states wait at once.
    """

    def __init__(self, n_layers: int, everything: bool = False) -> None:
        self.n_layers, self.everything = n_layers, everything
        self.pool: HostPool | None = None
        self.copies: torch.cuda.Stream | None = None

    def forward_pass(self, x: Tensor) -> "ForwardPass":
        """For one forward over hidden states like x.

        Raises: ValueError when the host has too little memory; of everything, after the first block.
        """
        if self.pool is None:
            self.pool = HostPool(pinned=x.is_cuda)
            self.copies = torch.cuda.Stream(x.device) if x.is_cuda else None
        if not self.everything:
            self.pool.require((self.n_layers - 1) * x.nbytes, everything=False)
        return ForwardPass(self.n_layers, self.everything, self.pool, self.copies)


class HostPool:
    """Buffers of host memory: handed out, handed back, never freed unless they became too small."""

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.free: list[Tensor] = []
        self.allocated = 0  # how often, for the tests: a step after the first allocates nothing
        self.nbytes = 0  # of all buffers

    def require(self, nbytes: int, *, everything: bool) -> None:
        """ValueError unless the host has what is missing of nbytes."""
        if nbytes > self.nbytes:
            require_host_memory(nbytes, available_host_bytes() + self.nbytes, everything=everything)

    def take(self, nbytes: int) -> Tensor:
        """(at least nbytes,) uint8: the smallest of the free ones that is large enough, else a new one.

        A new one takes the place of the largest of the free, which is too small.
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
        """Copies on the pool's stream may still be underway."""
        self.free.append(buffer)


class ForwardPass:
    """The states of one forward, in order."""

    def __init__(self, n_layers: int, everything: bool, pool: HostPool, copies: torch.cuda.Stream | None) -> None:
        self.everything, self.pool, self.copies = everything, pool, copies
        self.n_layers = self.blocks_left = n_layers
        self.below: list[_State] = []  # of the block before
        self.underway = _Underway(blocks=IN_FLIGHT if everything else 1)

    @contextmanager
    def block(self, x: Tensor) -> Iterator[None]:
        """Around one block's forward on x: what it saves goes to the host, or x alone.

        The last block's stays: its backward is the first, so it would be needed back at once.
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
        """After the last block, whose result is x: the copies of everything have until x gets its gradient."""
        self.below, underway = [], self.underway
        if self.everything and x.requires_grad:
            x.register_hook(lambda _: underway.let_go())
        else:
            underway.let_go()

    def keep(self, storage: Tensor) -> "_State":
        """The next state that this block saves, (nbytes,) uint8."""
        state = _State(storage, self.below)
        if self.blocks_left:
            state.send(self.pool, self.copies, self.underway)
        return state


class _Underway:
    """The memory of states whose copies to the host may not have ended: of so many blocks before the one that runs."""

    def __init__(self, blocks: int) -> None:
        self.keep = blocks
        self.blocks: deque[list[tuple[Tensor, torch.cuda.Event | None]]] = deque()

    def next_block(self) -> None:
        """Lets go of the blocks that should have arrived by now."""
        self.let_go(self.keep)
        self.blocks.append([])

    def add(self, storage: Tensor, copied: torch.cuda.Event | None) -> None:
        """copied is None where the copy has been waited for, as on a CPU."""
        self.blocks[-1].append((storage, copied))

    def let_go(self, keep: int = 0) -> None:
        """Has the current stream wait for the copies of all but the `keep` newest blocks, and frees their memory."""
        while len(self.blocks) > keep:
            for _, copied in self.blocks.popleft():
                if copied is not None:
                    torch.cuda.current_stream().wait_event(copied)

    def __del__(self) -> None:
        self.let_go()


class _State:
    """The memory of one saved tensor, and of its views; `below` are those that the backward asks for next."""

    def __init__(self, storage: Tensor, below: "list[_State]") -> None:
        self.storage: Tensor | None = storage
        self.nbytes = storage.nbytes
        self.below = below
        self.left = 0  # saved views of it that the backward has not asked for
        self.pool: HostPool | None = None
        self.arrived: torch.cuda.Event | None = None

    def send(self, pool: HostPool, copies: torch.cuda.Stream | None, underway: _Underway) -> None:
        """Starts the copy to the host and lets the memory go; `underway` holds it until that copy has ended."""
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
        """Starts the copy back, unless it is here or on its way."""
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
        """(nbytes,) uint8 for its block's backward; those below set out. Kept here as long as others will ask."""
        self.fetch()
        self._await()
        for state in reversed(self.below):
            state.fetch()
        self.below = []
        storage = self.storage
        assert storage is not None
        self.left -= 1
        if self.left <= 0 and self.pool is not None:  # a second backward would fetch it again
            self.storage = None
        return storage

    def _await(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        # the memory of a state that was fetched in vain must not be handed out while it is written
        self._await()
        if self.pool is not None:
            self.pool.give(self.buffer)


@dataclass(frozen=True)
class _View:
    """What stands for one saved tensor."""

    state: _State
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Pack:
    """Replaces what a block saves. autograd holds on to this with the graph, so in the end it holds nothing."""

    def __init__(self, x: Tensor, forward_pass: ForwardPass) -> None:
        self.x: Tensor | None = x
        self.forward_pass: ForwardPass | None = forward_pass
        self.states: dict[int, _State] = {}  # by address of the storage, which may be saved more than once
        self.memory: list[Tensor] = []  # of the states, whose addresses no other tensor may get meanwhile

    def __call__(self, saved: Tensor) -> "Tensor | _View":
        assert self.x is not None and self.forward_pass is not None
        leaves = _is_of_tokens if self.forward_pass.everything else _is
        if not leaves(saved, self.x):
            return saved.detach()  # itself, as its node's own result, it would hold the node that holds it
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


def _is(saved: Tensor, x: Tensor) -> bool:
    """Whether autograd saves x; it does not hand over the same Python object."""
    return (
        saved.data_ptr() == x.data_ptr()
        and saved.shape == x.shape
        and saved.dtype == x.dtype
        and saved.stride() == x.stride()
    )


def _is_of_tokens(saved: Tensor, x: Tensor) -> bool:
    """Whether it is, or is a view of, what has a row for each token of x and is worth a copy: no weight."""
    base = saved if saved._base is None else saved._base
    return (
        not isinstance(base, nn.Parameter)
        and saved.device == x.device
        and x.shape[0] in base.shape
        and worth_a_copy(saved.untyped_storage().nbytes(), *x.shape)
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
