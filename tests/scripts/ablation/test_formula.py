"""Tests the minimum memory of naive attention."""

import pytest
import torch

from fa_kernels.flash_attention.schedule import causal_schedule
from fa_train.models.attention import naive_attention
from scripts.ablation.formula import BACKWARD, KEPT, MASK, Formula, step_formula
from tests.support.training import composed, tiny

GIB = 2**30


def formula_of(tmp_path, *overrides):
    own = ["data=synthetic", "data.vocab_size=300", "attention=naive", "trainer.precision=32-true", "memory=none"]
    with composed(tmp_path, *tiny(tmp_path, *own, *overrides)) as cfg:
        formula = step_formula(cfg)
        assert cfg.model.vocab_size is None, "the config of the run stays as it is"
        return formula


@pytest.mark.slow
def test_the_formula_of_a_step_counts_every_component(tmp_path):
    parameters = 300 * 32 + 2 * (32 * 64 + 32 * 32 + 32 * 128 + 64 * 32 + 2 * 32) + 32
    assert formula_of(tmp_path) == Formula(4, 8, 16 * parameters, (4 * 4 + 1) + (12 * 4 + 1))
    assert formula_of(tmp_path, "trainer.precision=bf16-mixed").per_pair == (6 * 4 + 1) + (12 * 4 + 1)
    compiled = "lit_gpt.compile_model=true"
    for memory in ("full", "selective", "auto"):  # all may recompute naive attention
        assert formula_of(tmp_path, f"memory={memory}").per_pair == 12 * 4 + 1
        assert formula_of(tmp_path, f"memory={memory}", compiled).per_pair == 2 * 4 * 4
    for optimizer, size in (("adamw_8bit", 10), ("adamw_bf16", 8), ("adamw_master", 14), ("adamw_offload", 4)):
        assert formula_of(tmp_path, f"optimizer={optimizer}").fixed == size * parameters
    assert formula_of(tmp_path, compiled).per_pair == (1 + 2) * 4 * 4
    assert formula_of(tmp_path, compiled, "trainer.precision=bf16-mixed").per_pair == (1 + 2) * 2 * 4


def allocated(run):
    """Returns the peak bytes of torch's CPU allocator during `run`, and the bytes that are allocated at its end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most, now


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "n_heads"), [(torch.float32, 4), (torch.float16, 4), (torch.float16, 8)], ids=str)
def test_naive_attention_takes_what_its_formula_says(dtype, n_heads):
    """The measured memory is at least that of the formula, which leaves out terms linear in N.

    In fp32, the measured memory may include a second attention mask of N^2 bytes. In fp16, the test checks no upper
    bound of the measured memory, because torch copies the operands of fp16 matmuls on some CPUs.
    """
    n = 512
    schedule = causal_schedule(None, n, torch.device("cpu"))
    q, k, v, do = (torch.randn(n, n_heads, 8, dtype=dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    _, kept = allocated(lambda: naive_attention(q, k, v, schedule))
    peak, _ = allocated(lambda: torch.autograd.grad(naive_attention(q, k, v, schedule), (q, k, v), do))
    for per_score, found in ((KEPT[dtype.itemsize], kept), (BACKWARD, peak)):
        least = (per_score * n_heads + MASK) * n**2
        assert least <= found, per_score
        assert found <= 1.03 * (least + n**2) or dtype == torch.float16, per_score


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_naive_attention_keeps_at_least_one_tensor_of_scores(dtype):
    n, n_heads, kept = 64, 2, []
    schedule = causal_schedule(None, n, torch.device("cpu"))
    q, k, v = (torch.randn(n, n_heads, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    # this backend partitions the graph as inductor does, but needs no C++ compiler
    compiled = torch.compile(naive_attention, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        compiled(q, k, v, schedule)
    scores = [x for x in kept if x.numel() >= n**2]
    assert sum(x.nbytes for x in scores) >= n_heads * n**2 * dtype.itemsize
    assert all(x.numel() == n_heads * n**2 for x in scores), "it keeps no mask"


def test_naive_fails_from_the_first_length_that_does_not_fit():
    formula = Formula(2, 64, 1000, 8)
    assert formula.peak(50) == 1000 + 8 * 50**2 < formula.peak(51)
    assert formula.fails_at(1000 + 8 * 50**2) == 51 and formula.fails_at(1000 + 8 * 50**2 - 1) == 50
    assert formula.fails_at(500) == formula.fails_at(1000) == 1
    assert formula.scores(1024) == 4 * 2 * 1024**2
    text = formula.explain("here", 10 * GIB)
    assert f"N = {formula.fails_at(10 * GIB)} tokens on this device of 10.0 GiB" in text and "8 N^2 in all" in text
