"""Offloads activations: moves them to host memory, and copies them back to the GPU for the backward pass.

memory.offload=true offloads the input of each block except the last. With full activation checkpointing, a block saves
only its input, so almost all saved memory moves to the host. memory.offload=all offloads all large tensors that blocks
save, except those of the last block. offload=all requires checkpointing=none.

Copies run on a side stream while blocks compute. With offload=true and four blocks, whose inputs are x0 to x3:

    compute stream | block 0 | block 1 | block 2 | block 3 | backward 3 | backward 2 | backward 1 | backward 0
    copy stream    | x0 out  | x1 out  | x2 out  |         | x2 in      | x1 in      | x0 in      |

A copy to the host starts after the compute stream has written the tensor. With offload=true, the compute stream waits
for the copies of block `i` before block `i + 2` starts. With offload=all, the compute stream waits for the copies of
block `i` before block `i + IN_FLIGHT + 1` starts. After the compute stream has waited for a block's copies, the GPU
memory of the copied tensors is freed. The memory for a copy back to the GPU is allocated on the compute stream, which
later waits for the copy. When autograd's graph is freed, host buffers return to a pool. All copies run in order on one
stream, so a buffer is never overwritten before it has been read. The host never waits. Tensor.record_stream is not
used, because it would delay the freeing of memory by a time that depends on the host.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fa_train.memory.host_memory import HostPool

Offloaded = bool | Literal["all"]  # "all" offloads all large saved tensors, and True offloads only block inputs
IN_FLIGHT = 2  # with offload=all, the number of earlier blocks whose copies to the host may still run


def require_offload(offload: Offloaded, checkpointing: str) -> None:
    """Raises: ValueError if `offload` is unknown, or `offload` is "all" and `checkpointing` is not "none"."""
    if offload not in (False, True, "all"):
        raise ValueError(f"memory.offload must be true, false or all; got {offload}")
    if offload == "all" and checkpointing != "none":
        raise ValueError(f"memory.offload=all needs memory.checkpointing=none; got {checkpointing}")


def worth_a_copy(nbytes: int, tokens: int, dim: int) -> bool:
    """Returns whether a tensor is large enough to offload.

    Attention's lse, the statistics of norms and RoPE's angles are too small to offload.

    nbytes: the size of the tensor's whole storage. dim: the number of channels of a hidden state.
    """
    return nbytes >= tokens * dim


class Offload:
    """Offloads the activations of one model in all steps. Owns the host buffers and the copy stream.

    The first step allocates the host buffers, and later steps reuse the buffers.
    everything: whether to offload all large tensors that a block saves, and not only the block's input.
    """

    def __init__(self, n_layers: int, everything: bool = False) -> None:
        self.n_layers, self.everything = n_layers, everything
        self.pool: HostPool | None = None
        self.copies: torch.cuda.Stream | None = None

    def forward_pass(self, x: Tensor) -> "ForwardPass":
        """Starts a forward pass. x: the input of the first block. Only the size and the device of x are used.

        Raises: ValueError if the host has too little memory. If `everything` is true, the host's free memory is checked
        at the end of the first block.
        """
        if self.pool is None:
            self.pool = HostPool(pinned=x.is_cuda)
            self.copies = torch.cuda.Stream(x.device) if x.is_cuda else None
        if not self.everything:
            self.pool.require((self.n_layers - 1) * x.nbytes, everything=False)
        return ForwardPass(self.n_layers, self.everything, self.pool, self.copies)


class ForwardPass:
    """Offloads the saved tensors of one forward pass, block by block."""

    def __init__(self, n_layers: int, everything: bool, pool: HostPool, copies: torch.cuda.Stream | None) -> None:
        self.everything, self.pool, self.copies = everything, pool, copies
        self.n_layers = self.blocks_left = n_layers
        self.previous_block: list[_SavedStorage] = []  # the offloaded storages of the previous block
        self.in_flight = _CopiesInFlight(blocks=IN_FLIGHT if everything else 1)

    @contextmanager
    def block(self, x: Tensor) -> Iterator[None]:
        """Wraps the forward pass of one block with input x, and offloads the tensors that the block saves.

        The saved tensors of the last block stay on the GPU, because the backward pass begins with this block.
        """
        self.blocks_left -= 1
        self.in_flight.next_block()
        pack = _Pack(x, self)
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            self.previous_block = list(pack.storages.values())
            pack.release()
        if self.everything and self.blocks_left == self.n_layers - 1:
            of_block = sum(saved.nbytes for saved in self.previous_block)
            self.pool.require(of_block * (self.n_layers - 1), everything=True)

    def end(self, x: Tensor) -> None:
        """Finishes the offloading of a forward pass after the last block. x: the output of the last block.

        With offload=all, copies to the host may still run after the last block. Tensors whose copies may still run stay
        on the GPU until the backward pass has computed the gradient of x.
        """
        self.previous_block, in_flight = [], self.in_flight
        if self.everything and x.requires_grad:
            x.register_hook(lambda _: in_flight.let_go())
        else:
            in_flight.let_go()

    def save(self, storage: Tensor) -> "_SavedStorage":
        """Returns a `_SavedStorage` for a saved storage, which is a (nbytes,) uint8 tensor.

        Starts the copy to the host, except in the last block.
        """
        saved = _SavedStorage(storage, self.previous_block)
        if self.blocks_left:
            saved.send(self.pool, self.copies, self.in_flight)
        return saved


class _CopiesInFlight:
    """Holds the GPU memory of storages while their copies to the host may still run.

    blocks: the number of earlier blocks whose storages are kept when a new block starts.
    """

    def __init__(self, blocks: int) -> None:
        self.keep = blocks
        self.blocks: deque[list[tuple[Tensor, torch.cuda.Event | None]]] = deque()

    def next_block(self) -> None:
        """Starts a new block. Releases the storages of all but the newest `keep` blocks."""
        self.let_go(self.keep)
        self.blocks.append([])

    def add(self, storage: Tensor, copied: torch.cuda.Event | None) -> None:
        """Adds a storage. copied: the event at the end of the storage's copy, or None if the copy has finished."""
        self.blocks[-1].append((storage, copied))

    def let_go(self, keep: int = 0) -> None:
        """Makes the stream wait for the copies of all but the newest `keep` blocks, and frees the copied storages."""
        while len(self.blocks) > keep:
            for _, copied in self.blocks.popleft():
                if copied is not None:
                    torch.cuda.current_stream().wait_event(copied)

    def __del__(self) -> None:
        self.let_go()


class _SavedStorage:
    """The storage of a saved tensor, on GPU or host.

    previous_block: the storages of the previous block, which the backward pass needs next.
    """

    def __init__(self, storage: Tensor, previous_block: "list[_SavedStorage]") -> None:
        self.storage: Tensor | None = storage
        self.nbytes = storage.nbytes
        self.previous_block = previous_block
        self.views_left = 0  # the number of saved views that the backward pass has not used yet
        self.pool: HostPool | None = None
        self.arrived: torch.cuda.Event | None = None

    def send(self, pool: HostPool, copies: torch.cuda.Stream | None, in_flight: _CopiesInFlight) -> None:
        """Starts the copy to the host. `in_flight` holds the GPU memory until the copy has ended."""
        storage = self.storage
        assert storage is not None
        # pool.take can raise an error. self.pool is set only afterwards, so that __del__ then gives no buffer back.
        self.buffer = pool.take(storage.nbytes)
        self.storage, self.pool, self.copies, self.device = None, pool, copies, storage.device
        self.host = self.buffer[: storage.nbytes]
        if copies is None:
            self.host.copy_(storage)
            in_flight.add(storage, None)
            return
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            self.host.copy_(storage, non_blocking=True)
        in_flight.add(storage, copies.record_event())

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
        """Returns the storage on the GPU, (nbytes,) uint8. Also starts to fetch the storages of the previous block.

        The storage stays on the GPU until the backward pass has used all saved views of the storage.
        """
        self.fetch()
        self._await()
        for saved in reversed(self.previous_block):
            saved.fetch()
        self.previous_block = []
        storage = self.storage
        assert storage is not None
        self.views_left -= 1
        if self.views_left <= 0 and self.pool is not None:  # a second backward pass fetches the storage again
            self.storage = None
        return storage

    def _await(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream().wait_event(self.arrived)
            self.arrived = None

    def __del__(self) -> None:
        # If the storage was fetched but never used, the copy must end before the storage's GPU memory is reused.
        self._await()
        if self.pool is not None:
            self.pool.give(self.buffer)


@dataclass(frozen=True)
class _SavedView:
    """Takes the place of one saved tensor, and says which part of an offloaded storage the tensor uses.

    For example, q, k and v are views of one storage, so their three `_SavedView` refer to the same `_SavedStorage`.
    """

    storage: _SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Pack:
    """The pack hook of saved_tensors_hooks. Replaces each offloaded tensor of a block by a `_SavedView`.

    With offload=true, the hook replaces only the block's input. With offload=all, the hook replaces every large tensor
    that has one row per token. autograd owns each `_SavedView` and `_SavedStorage`, and frees both together with its
    graph. The hook works with every wrapper around a block, including torch.compile.
    autograd keeps the hook alive after the forward pass, so `release` removes the hook's references to tensors.
    """

    def __init__(self, x: Tensor, forward_pass: ForwardPass) -> None:
        self.x: Tensor | None = x
        self.forward_pass: ForwardPass | None = forward_pass
        # {address of storage: saved storage}, because a block can save a storage twice
        self.storages: dict[int, _SavedStorage] = {}
        self.memory: list[Tensor] = []  # keeps the saved storages alive, so that no two storages have the same address

    def __call__(self, saved: Tensor) -> "Tensor | _SavedView":
        assert self.x is not None and self.forward_pass is not None
        is_offloaded = _has_row_per_token if self.forward_pass.everything else _is_same_tensor
        if not is_offloaded(saved, self.x):
            return saved.detach()  # detach prevents a reference cycle if an autograd node saves its own output
        storage = saved.untyped_storage()
        saved_storage = self.storages.get(storage._cdata)
        if saved_storage is None:
            whole = saved.detach().as_strided((storage.nbytes() // saved.itemsize,), (1,), 0).view(torch.uint8)
            saved_storage = self.storages[storage._cdata] = self.forward_pass.save(whole)
            self.memory.append(whole)
        saved_storage.views_left += 1
        return _SavedView(saved_storage, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset()))

    def release(self) -> None:
        self.x = self.forward_pass = None
        self.storages, self.memory = {}, []


def _unpack(saved: Tensor | _SavedView) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.storage.get().view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)


def _is_same_tensor(saved: Tensor, x: Tensor) -> bool:
    """Returns whether `saved` is the tensor x.

    `saved is x` can be false for the same tensor, because autograd may pass the tensor as a new Python object.
    """
    return (
        saved.data_ptr() == x.data_ptr()
        and saved.shape == x.shape
        and saved.dtype == x.dtype
        and saved.stride() == x.stride()
    )


def _has_row_per_token(saved: Tensor, x: Tensor) -> bool:
    """Returns whether offload=all must offload the tensor `saved`.

    If `saved` is a view, its base tensor is checked instead. The checked tensor must be large and have one row per
    token of x. Weights are never offloaded.
    """
    base = saved if saved._base is None else saved._base
    return (
        not isinstance(base, nn.Parameter)
        and saved.device == x.device
        and x.shape[0] in base.shape
        and worth_a_copy(saved.untyped_storage().nbytes(), *x.shape)
    )
