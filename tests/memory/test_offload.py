"""Offload gives bitwise equal results, copies states back before they are needed, and reuses host memory within a
budget.

In these tests, a state is the storage of a tensor that a block saves for its backward.
"""

import gc
import sys

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fa_train.memory import host_memory, offload
from fa_train.memory.host_memory import HostPool, require_host_memory
from tests.memory.support.small import assert_equal, compile_blocks, levers, small_gpt, step, stream
from tests.support.marks import slow

STATE = 24 * 32 * 4  # bytes of one block's input: tokens x dim in fp32
EVERYTHING = levers(offload="all", mlp_chunk=5)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_offload_does_not_change_loss_and_gradients(n_layers, checkpointing, device):
    batch = stream(device)
    expected = step(small_gpt(levers(), device, n_layers=n_layers), batch)
    model = small_gpt(levers(checkpointing, offload=True), device, n_layers=n_layers)
    for _ in range(3):
        assert_equal(step(model, batch), expected)
    assert model.offload.pool.allocated == n_layers - 1


@pytest.mark.parametrize(
    ("qk_norm", "mlp_chunk", "compiled"),
    [
        *((qk_norm, mlp_chunk, False) for qk_norm in (False, True) for mlp_chunk in (None, 5)),
        pytest.param(False, 5, True, marks=pytest.mark.slow),
        pytest.param(True, None, True, marks=pytest.mark.slow),
    ],
)
def test_offload_all_changes_no_result_and_reuses_host_memory(qk_norm, mlp_chunk, compiled, device):
    batch = stream(device)
    expected = step(small_gpt(levers(mlp_chunk=mlp_chunk), device, qk_norm=qk_norm), batch)
    model = small_gpt(levers(offload="all", mlp_chunk=mlp_chunk), device, qk_norm=qk_norm)
    if compiled:
        compile_blocks(model)
    allocated = set()
    for _ in range(3):
        assert_equal(step(model, batch), expected)
        allocated.add(model.offload.pool.allocated)
    assert len(allocated) == 1 and len(model.offload.pool.free) == allocated.pop() > 2 * 3


class Watched(nn.Module):
    """Wraps a block, and records the storage of its first input."""

    def __init__(self, block: nn.Module, states: list[StorageWeakRef]) -> None:
        super().__init__()
        self.block, self.states = block, states

    def forward(self, x, *others):
        self.states.append(StorageWeakRef(x.untyped_storage()))
        return self.block(x, *others)


@pytest.mark.parametrize("compiled", [False, *slow(True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_states_leave_the_device(checkpointing, compiled, device):
    """With offload, only the input of the last block stays on the device, because the backward needs it first.

    A compiled block without checkpointing keeps the sum of its two inputs, and not the first input itself.
    """
    for offloaded in (True, False):
        model = small_gpt(levers(checkpointing, offload=offloaded), device, n_layers=4)
        if compiled:
            compile_blocks(model)
        states = []
        for i, block in enumerate(model.blocks):
            model.blocks[i] = Watched(block, states)
        loss = model(**stream(device))
        gc.collect()
        assert [state.expired() for state in states] == [offloaded or model.adds_later] * 3 + [model.adds_later]
        loss.backward()


def test_states_are_back_one_layer_ahead(device, monkeypatch):
    present = []
    get = offload._SavedStorage.get

    def watched(state):
        previous = state.previous_block
        present.append((state.storage is not None, all(other.storage is not None for other in previous)))
        storage = get(state)
        present[-1] += (all(other.storage is not None for other in previous),)
        return storage

    monkeypatch.setattr(offload._SavedStorage, "get", watched)
    step(small_gpt(levers("full", offload=True), device, n_layers=4), stream(device))
    # When the backward gets a block's input, it also starts to copy the previous block's input to the device.
    assert present == [(True, False, True)] * 3 + [(True, True, True)]


def test_device_memory_of_states_is_freed_block_by_block(device, monkeypatch):
    """In the backward, device memory holds only the state of one block and the state that is being copied."""
    model = small_gpt(levers("full", offload=True), device, n_layers=6)
    alive = []
    get = offload._SavedStorage.get

    def watched(state):
        storage = get(state)
        alive.append(StorageWeakRef(storage.untyped_storage()))
        counts.append(sum(not ref.expired() for ref in alive))
        return storage

    counts = []
    monkeypatch.setattr(offload._SavedStorage, "get", watched)
    step(model, stream(device))
    assert counts == [1] * 6


@pytest.mark.parametrize("memory", [levers("full", offload=True), EVERYTHING], ids=["inputs", "all"])
def test_two_graphs_at_once_do_not_share_buffers(memory, device):
    """A host buffer belongs to an autograd graph until the graph's backward has used the buffer."""
    model, first, second = small_gpt(memory, device), stream(device), stream(device, [20, 4])
    expected = [step(model, batch) for batch in (first, second)]
    alone = model.offload.pool.allocated
    losses = [model(**batch) for batch in (first, second)]
    assert model.offload.pool.allocated == 2 * alone
    for loss, result in reversed(list(zip(losses, expected, strict=True))):
        model.zero_grad()
        loss.backward()
        assert_equal([loss.detach(), *(p.grad for p in model.parameters())], result)


@pytest.mark.parametrize("memory", [levers(offload=True), EVERYTHING], ids=["inputs", "all"])
def test_a_second_backward_gives_the_same_gradients(memory, device):
    model, batch = small_gpt(memory, device), stream(device)
    objective = model(batch["tokens"], batch["cu_seqlens"]).square().sum()
    once = torch.autograd.grad(objective, list(model.parameters()), retain_graph=True)
    assert_equal(list(torch.autograd.grad(objective, list(model.parameters()))), list(once))


@pytest.mark.slow
@pytest.mark.parametrize(
    "memory", [levers("selective", offload=True), levers(offload=True), EVERYTHING], ids=["selective", "inputs", "all"]
)
def test_a_dropped_graph_gives_its_buffers_back(memory, device):
    model, batch, allocated = small_gpt(memory, device), stream(device), set()
    for _ in range(3):
        loss = model(**batch)
        del loss
        gc.collect()
        allocated |= {model.offload.pool.allocated, len(model.offload.pool.free)}
    assert len(allocated) == 1


def test_an_error_in_a_block_leaves_nothing_behind(device):
    """A sweep must be able to continue after one of its runs has run out of memory."""
    model, states = small_gpt(levers("selective", offload=True), device), []
    for i, block in enumerate(model.blocks):
        model.blocks[i] = Watched(block, states)
    model.blocks[2].block.ffn_norm.forward = None
    with pytest.raises(TypeError):
        model(**stream(device))
    gc.collect()
    assert len(states) == 3 and all(state.expired() for state in states)
    assert model.offload.pool.allocated == len(model.offload.pool.free) == 2


def test_buffers_of_a_longer_stream_replace_the_shorter(device):
    model = small_gpt(levers("full", offload=True), device)
    for lengths, allocated in (([9], 2), ([24], 4), ([5, 4], 4)):
        batch = stream(device, lengths)
        assert_equal(step(model, batch), step(small_gpt(levers(), device), batch))
        assert model.offload.pool.allocated == allocated
    assert [buffer.numel() for buffer in model.offload.pool.free] == [STATE, STATE]


def test_nothing_is_copied_without_gradients(device):
    model, batch = small_gpt(levers("selective", offload=True), device), stream(device)
    with torch.no_grad():
        model(**batch)
    assert model.offload.pool is None


def test_the_embedding_may_be_frozen(device):
    """With a frozen embedding, the input of the first block needs no gradient."""
    results = []
    for memory in (levers(), levers("full", offload=True), levers(offload="all")):
        model = small_gpt(memory, device, tied=False)
        model.token_embedding.requires_grad_(False)
        results.append(step(model, stream(device)))
    assert_equal(results[1], results[0])
    assert_equal(results[2], results[0])


@pytest.mark.parametrize("tokens", [24, 32, 48, 64])  # weights have dimensions of 32 (dim), 48 (ffn_dim) and 64 (qkv)
def test_weights_stay_on_the_device(tokens, device, monkeypatch):
    """Weights are never offloaded, even if a dimension of a weight equals the number of tokens."""
    sent, send = [], offload._SavedStorage.send

    def watched(state, *args):
        sent.append(state.storage.untyped_storage().data_ptr())
        return send(state, *args)

    monkeypatch.setattr(offload._SavedStorage, "send", watched)
    model = small_gpt(levers(offload="all"), device)
    step(model, stream(device, [tokens]))
    assert sent and not {p.untyped_storage().data_ptr() for p in model.parameters()} & set(sent)


@pytest.mark.parametrize("compiled", [False, *slow(True)], ids=["eager", "compiled"])
def test_inputs_of_chunks_leave_the_device(compiled, device, monkeypatch):
    tokens, kept, pack = 24, [], offload._Pack.__call__

    def watched(hook, saved):
        packed = pack(hook, saved)
        is_large = saved.untyped_storage().nbytes() >= tokens * 32 * saved.itemsize
        if is_large and isinstance(packed, torch.Tensor) and not isinstance(saved, nn.Parameter):
            kept.append(saved.shape)
        return packed

    monkeypatch.setattr(offload._Pack, "__call__", watched)
    model = small_gpt(levers(offload="all", mlp_chunk=5), device, activation="geglu")
    if compiled:
        compile_blocks(model)
    step(model, stream(device, [tokens]))
    weights = {
        (rows, columns) for p in model.parameters() if p.dim() == 2 for rows, columns in (p.shape, p.shape[::-1])
    }
    assert not set(map(tuple, kept)) - weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_budget_is_what_a_step_takes(dtype, device):
    model = small_gpt(levers("full", offload=True), device, n_layers=4)
    if dtype == torch.float16:
        model.token_embedding.register_forward_hook(lambda module, args, x: x.half())
        model.to(dtype)
    step(model, stream(device))
    taken = sum(buffer.numel() for buffer in model.offload.pool.free)
    assert taken == 3 * 24 * 32 * dtype.itemsize


def test_too_little_host_memory_is_an_error(device, monkeypatch):
    message = r"needs 4.0 GiB of host memory in each of 8 processes; 31.0 GiB are available"
    with pytest.raises(ValueError, match=message):
        require_host_memory(4 * 2**30, 31 * 2**30, processes=8)
    require_host_memory(4 * 2**30, 32 * 2**30, processes=8)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2 * STATE - 1)
    model = small_gpt(levers(offload=True), device)
    with pytest.raises(ValueError, match=r"memory.offload=true needs 0.0 GiB of host memory; 0.0 GiB are available"):
        model(**stream(device))
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 2 * STATE)
    model(**stream(device))


@pytest.mark.parametrize("offload", [True, "all"])
def test_a_failed_pinning_causes_no_second_error(offload, device, monkeypatch):
    def take(pool: HostPool, nbytes: int) -> torch.Tensor:
        raise ValueError("pinning failed")

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_value))
    monkeypatch.setattr(HostPool, "take", take)
    model = small_gpt(levers(offload=offload), device)
    with pytest.raises(ValueError, match="pinning failed"):
        model(**stream(device))
    gc.collect()
    assert not ignored


def test_too_little_host_memory_for_offload_all_is_an_error(device, monkeypatch):
    """offload=all checks host memory after the first block."""
    model = small_gpt(EVERYTHING, device, n_layers=4)
    step(model, stream(device))
    needed, allocated = model.offload.pool.nbytes, model.offload.pool.allocated
    model = small_gpt(EVERYTHING, device, n_layers=4)
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: needed - model.offload.pool.nbytes - 1)
    with pytest.raises(ValueError, match=r"memory.offload=all needs .* Choose .* or memory=offload$"):
        model(**stream(device))
    assert model.offload.pool.allocated == allocated // 3
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: needed - model.offload.pool.nbytes)
    model(**stream(device))


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match=r"memory.offload must be true, false or all; got some"):
        levers(offload="some")
    with pytest.raises(ValueError, match=r"memory.offload=all needs memory.checkpointing=none; got full"):
        levers("full", offload="all")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("checkpointing", "offloaded", "mlp_chunk"),
    [
        ("none", True, None),
        ("selective", True, None),
        ("full", True, None),
        ("none", "all", None),
        ("none", "all", 512),
    ],
)
def test_slow_copies_change_no_result(checkpointing, offloaded, mlp_chunk, compiled, device, monkeypatch):
    """The test delays each copy. Code that does not wait for a copy would then read or overwrite the wrong memory."""
    batch = stream(device, [4000, 96])
    expected = step(small_gpt(levers(checkpointing), device, n_layers=6), batch)
    model = small_gpt(levers(checkpointing, offload=offloaded, mlp_chunk=mlp_chunk), device, n_layers=6)
    if compiled:
        compile_blocks(model)
    wait_stream = torch.cuda.Stream.wait_stream

    def lag(stream, other):
        wait_stream(stream, other)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # cycles: about 10 ms

    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", lag)
    for _ in range(3):
        assert_equal(step(model, batch), expected)
    assert all(buffer.is_pinned() for buffer in model.offload.pool.free)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [levers("selective", offload=True), levers(offload="all", mlp_chunk=64)], ids=str)
def test_a_step_never_waits_for_the_gpu(memory, device):
    model, batch = small_gpt(memory, device, "flash"), stream(device, [150, 106])
    for warm in (False, True):  # the first step allocates memory and compiles kernels
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            step(model, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
