"""Compares the memory planner's predictions with the memory that a real model with adapters needs."""

from itertools import product

import pytest

from fa_train.memory.memory import Levers
from fa_train.memory.planner.levers import with_levers
from fa_train.memory.planner.optimizer import optimizer_bytes
from fa_train.memory.planner.predict import predict
from fa_train.memory.planner.weights import parameter_sizes, trained_sizes
from tests.memory.support.plans import (
    EVERY_CASE,
    GPT2,
    LLAMA_1B,
    changed,
    kept_per_layer,
    predicted_peak,
    with_adapters,
)
from tests.memory.support.simulated import kept_by_compiled_block, simulate

# Each tuple chooses four settings: the model, the precision, checkpointing and the chunks of the FFN.
PAIRWISE = [(0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "precision", "checkpointing", "mlp_chunk"),
    [
        (quantization, precision, checkpointing, mlp_chunk)
        for (a, quantization), (b, precision), (c, (checkpointing, mlp_chunk)) in product(
            enumerate((None, "nf4")),
            enumerate(("bf16-mixed", "bf16-true")),
            enumerate((("none", None), ("full", 512), ("none", 512), ("selective", None))),
        )
        if EVERY_CASE or (quantization and (b + c) % 2 == 0) or (a, b, c) == (0, 0, 0)
    ],
)
def test_saved_activations_of_adapters_are_exact_where_compiled(quantization, precision, checkpointing, mlp_chunk):
    """A compiled block keeps no dequantized weight for its backward."""
    plan = changed(LLAMA_1B, n_layers=1, vocab_size=64, seq_len=1024, precision=precision, compiled=True)
    plan, adapted = with_adapters(changed(plan, checkpointing=checkpointing, mlp_chunk=mlp_chunk), quantization)
    assert kept_by_compiled_block(adapted, plan.run.tokens, precision) == kept_per_layer(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "precision", "levers"),
    [
        (
            ("gpt2", "llama_1b")[a],
            ("bf16-mixed", "bf16-true")[b],
            (("none", "selective")[c], False, (None, 8192)[d]),
        )
        for a, b, c, d in (product((0, 1), repeat=4) if EVERY_CASE else PAIRWISE)
    ]
    + [("llama_1b", "bf16-mixed", ("none", "all", mlp_chunk)) for mlp_chunk in (None, *[8192] * EVERY_CASE)],
)
def test_predictions_are_the_simulated_peaks_of_adapters(model, precision, levers):
    # with many layers, tensors that are kept by mistake make a visible difference
    n_layers = 12 if "all" in levers else 4
    base = changed({"gpt2": GPT2, "llama_1b": LLAMA_1B}[model], n_layers=n_layers, vocab_size=259, seq_len=32768)
    plan, adapted = with_adapters(with_levers(changed(base, precision=precision), Levers(*levers)))
    step = simulate(adapted, plan.run.tokens, plan.run.precision, accumulates=False)
    assert predicted_peak(plan) == pytest.approx(max(step.forward, step.backward), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "target_modules", "precision", "levers"),
    [
        (quantization, target_modules, precision, levers)
        for (a, quantization), (b, target_modules), (c, (precision, levers)) in product(
            enumerate((None, "nf4")),
            enumerate((["q_proj", "v_proj"], ["k_proj", "o_proj", "gate_proj", "up_proj"])),
            enumerate(
                (
                    ("bf16-mixed", Levers("selective", True, None)),
                    ("bf16-mixed", Levers("none", False, 8192)),
                    ("bf16-true", Levers("full", False, 8192)),
                    ("32-true", Levers("none", False, None)),
                )
            ),
        )
        if EVERY_CASE or (a + b + c) % 2 == 0
    ],
    ids=str,
)
def test_predictions_are_the_simulated_peaks_of_some_adapters(quantization, target_modules, precision, levers):
    base = changed(LLAMA_1B, n_layers=4, vocab_size=259, seq_len=32768, precision=precision)
    plan, adapted = with_adapters(with_levers(base, levers), quantization, target_modules=target_modules)
    step = simulate(adapted, plan.run.tokens, precision, accumulates=False)
    assert predicted_peak(plan) == pytest.approx(max(step.forward, step.backward), rel=0.03)


def test_frozen_weights_are_not_in_buckets():
    base = changed(LLAMA_1B, n_layers=2, vocab_size=259, seq_len=1024, precision="32-true")
    plan, adapted = with_adapters(base)
    alone, ddp = (simulate(adapted, 1024, "32-true", False, buckets) for buckets in ("none", "views"))
    assert ddp.forward - alone.forward == 4 * sum(trained_sizes(plan)) > 0
    assert predict(changed(plan, buckets="views")).gradients == 4 * sum(trained_sizes(plan))


def test_frozen_weights_have_no_states_and_4_bits():
    whole, (plan, _), (small, _) = LLAMA_1B, with_adapters(LLAMA_1B), with_adapters(LLAMA_1B, "nf4")
    trained, parameters = sum(trained_sizes(plan)), sum(parameter_sizes(whole.model))
    assert trained == 16 * 16 * (4 * 2048 + 2048 + 2 * 512 + 2048 + 2048 + 2048 + 2 * 8192 + 2 * 2048 + 8192 - 2048)
    assert optimizer_bytes(plan) == (8 * trained, 0)
    assert predict(plan).weights == 4 * (parameters + trained)
    assert predict(plan).gradients <= 4 * trained < predict(changed(whole, accumulates=True)).gradients
    matrices = 16 * (2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192)
    assert predict(small).weights == pytest.approx(4 * (parameters + trained - matrices) + 0.516 * matrices, rel=1e-3)
