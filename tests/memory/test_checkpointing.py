"""Tests activation checkpointing: gradients, the number of attention forwards, and the tensors that a block keeps."""

from itertools import product

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.schedule import causal_schedule
from fa_train.memory import checkpointing
from fa_train.memory.checkpointing import ATTENTION_OPERATORS
from tests.memory.support.small import (
    assert_equal,
    compile_blocks,
    levers,
    small_gpt,
    step,
    step_without_levers,
    stream,
)

N_LAYERS = 3
OTHER_ATTENTIONS = ("naive", "sdpa", "chunked")  # flash attention has a separate test


CASES = [(*case, False) for case in product(OTHER_ATTENTIONS, ("selective", "full"))]
# For naive attention, selective and full checkpointing are equal, because neither keeps a result of attention. Chunked
# attention is never compiled. tests/models/test_compiled_blocks.py compiles blocks with sdpa.
CASES += [("naive", "selective", True), ("chunked", "full", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "checkpointing", "compiled"),
    [pytest.param(*case, id="-".join((*case[:2], "compiled" if case[2] else "eager"))) for case in CASES],
)
def test_checkpointing_does_not_change_loss_and_gradients(attention, checkpointing, compiled, device):
    model = small_gpt(levers(checkpointing), device, attention)
    if compiled:
        compile_blocks(model, fullgraph=attention != "chunked")
    assert_equal(step(model, stream(device)), step_without_levers(attention, device))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "times", "compiled"),
    [
        pytest.param("none", 1, False, id="none-eager"),
        pytest.param("none", 1, True, id="none-compiled"),
        pytest.param("selective", 1, False, id="selective-eager"),
        pytest.param("selective", 1, True, id="selective-compiled"),
        pytest.param("full", 2, False, id="full-eager"),
        pytest.param("full", 2, True, id="full-compiled"),
    ],
)
def test_flash_has_the_same_loss_and_gradients(checkpointing, times, compiled, device, monkeypatch):
    """Only full checkpointing runs the forward of flash attention twice."""
    expected = step_without_levers("flash", device)
    calls = []
    forward = backend.forward
    monkeypatch.setattr(backend, "forward", lambda *args: calls.append(None) or forward(*args))
    model = small_gpt(levers(checkpointing), device, "flash", N_LAYERS)
    if compiled:
        compile_blocks(model)
    loss = model(**stream(device))
    assert len(calls) == N_LAYERS
    loss.backward()
    assert len(calls) == times * N_LAYERS
    assert_equal([loss.detach(), *(p.grad for p in model.parameters())], expected)


class Operators(TorchDispatchMode):
    """Records the names of all torch operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran.append(func)
        return func(*args, **(kwargs or {}))

    def count(self, operators) -> int:
        return sum(operator in operators for operator in self.ran)


@pytest.mark.parametrize(
    ("checkpointing", "times"), [pytest.param("selective", 1, id="selective"), pytest.param("full", 2, id="full")]
)
@pytest.mark.parametrize("documents", ["packed", "one"])
def test_recomputation_repeats_torchs_attention_only_as_chosen(documents, checkpointing, times, device):
    batch = stream(device)
    if documents == "one":
        del batch["cu_seqlens"]
    # no grouped heads, because with grouped heads, torch's CPU kernel would materialise the scores
    model = small_gpt(levers(checkpointing), device, "sdpa", N_LAYERS, n_kv_heads=None)
    with Operators() as operators:
        step(model, batch)
    assert operators.count(ATTENTION_OPERATORS) == times * N_LAYERS


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_attention_without_an_operator_is_recomputed(checkpointing, device):
    with Operators() as operators:
        step(small_gpt(levers(checkpointing), device, "naive", N_LAYERS), stream(device))
    assert operators.count({torch.ops.aten._softmax.default}) == 2 * N_LAYERS


@pytest.mark.parametrize(
    ("checkpointing", "compiled", "expected"),
    [
        pytest.param("full", False, ["x"], id="full-eager"),
        pytest.param("full", True, ["x"], id="full-compiled", marks=pytest.mark.slow),
        # selective checkpointing stores o and lse where no saved-tensor hook sees them
        pytest.param("selective", False, ["x"], id="selective-eager"),
        pytest.param("selective", True, ["lse", "o", "x"], id="selective-compiled", marks=pytest.mark.slow),
    ],
)
def test_a_block_keeps_only_the_expected_tensors(checkpointing, compiled, expected, device):
    model = small_gpt(levers(checkpointing), device, "flash", n_layers=1, positions="none")
    if compiled:
        compile_blocks(model)
    cu_seqlens = stream(device)["cu_seqlens"]
    x = torch.randn(24, 32, device=device, requires_grad=True)
    weights = {p.data_ptr() for p in model.parameters()}
    names = {(24, 32): "x", (24, 2, 16): "o", (2, 24): "lse"}
    kept = []

    def pack(saved):
        # the checkpoint function of torch 2.11 also saves an empty tensor
        if saved.is_floating_point() and saved.numel() and saved.data_ptr() not in weights:
            kept.append(names.get(tuple(saved.shape), str(saved.shape)))
        return saved

    with saved_tensors_hooks(pack, lambda saved: saved):
        model.blocks[0](x, causal_schedule(cu_seqlens, 24, device), None)
    assert sorted(kept) == expected


@pytest.mark.usefixtures("bf16_matmul")
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputation_keeps_autocasts_dtype(checkpointing, device):
    results = []
    for memory in (levers(), levers(checkpointing)):
        model = small_gpt(memory, device, "naive")
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**stream(device))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert_equal(*results)


def test_an_unknown_checkpointing_is_named():
    with pytest.raises(ValueError, match=r"memory.checkpointing must be one of none, selective, full; got some"):
        levers("some")


def test_full_checkpointing_has_a_policy_in_compiled_code(monkeypatch):
    """Without a policy, torch 2.11 (but no newer version) keeps the outputs of a compiled autograd.Function."""
    given = []
    monkeypatch.setattr(checkpointing, "recomputed", lambda block, x, contexts: given.append(contexts))
    run = checkpointing.block_runner("full")
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        run(torch.clone, torch.zeros(1))
    assert given == [checkpointing.noop_context_fn, checkpointing._KEEP_NOTHING]
