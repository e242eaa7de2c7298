"""Tests the search for the fastest memory levers that fit, the predicted times, and the advice to the user."""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from fa_train.memory.memory import Levers
from fa_train.memory.planner.block import BlockBytes
from fa_train.memory.planner.levers import (
    COMBINATIONS,
    combinations,
    extra_seconds,
    fastest_that_fits,
    fits,
    longest_of_all_levers,
    longest_seq_len,
    next_lever,
    smallest,
    with_levers,
)
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import GIB, predict
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.traffic import Counts, traffic
from tests.memory.support.plans import GPT2, HOST, LLAMA_1B, changed, with_adapters

H200 = int(139.8 * GIB)  # bytes of memory


@pytest.mark.parametrize("levers", COMBINATIONS, ids=str)
@pytest.mark.parametrize("model", [GPT2, LLAMA_1B], ids=["gpt2", "llama_1b"])
def test_the_longest_fits_and_one_more_does_not(model, levers):
    plan = with_levers(model, levers)
    longest = longest_seq_len(plan, H200, HOST)
    assert fits(predict(changed(plan, seq_len=longest)), H200, HOST)
    assert not fits(predict(changed(plan, seq_len=longest + 1)), H200, HOST)
    assert longest_seq_len(plan, 2 * GIB, HOST) < longest


def test_nothing_fits_into_nothing():
    assert longest_seq_len(LLAMA_1B, GIB, HOST) == 0
    assert fastest_that_fits(LLAMA_1B, GIB, HOST) is None
    gathered = changed(LLAMA_1B, ranks=2, reshard_after_forward=False)
    assert next_lever(LLAMA_1B, GIB, HOST) == next_lever(gathered, GIB, HOST) == "a smaller model"


def test_every_lever_saves_memory_and_none_is_free():
    assert len(set(COMBINATIONS)) == 3 * 2 * 2 + 2
    base = changed(LLAMA_1B, seq_len=2**17)
    none = predict(base).gpu_bytes
    for levers in COMBINATIONS[1:]:
        plan = with_levers(base, levers)
        assert predict(plan).gpu_bytes < none, levers
        assert extra_seconds(plan) > 0 == extra_seconds(base), levers


def test_auto_takes_the_cheapest_that_fits():
    plan = changed(LLAMA_1B, seq_len=2**17, compiled=True)
    previous = -1.0
    for gib in (250, 140, 80, 60, 50):
        levers = fastest_that_fits(plan, gib * GIB, HOST)
        assert levers is not None
        chosen = with_levers(plan, levers)
        assert fits(predict(chosen), gib * GIB, HOST)
        assert extra_seconds(chosen) >= previous, "less memory must cost more time"
        previous = extra_seconds(chosen)
        cheaper = [one for one in COMBINATIONS if extra_seconds(with_levers(plan, one)) < previous]
        assert not any(fits(predict(with_levers(plan, one)), gib * GIB, HOST) for one in cheaper)
    assert fastest_that_fits(plan, 250 * GIB, HOST) == Levers("none", False, None)
    crowded = fastest_that_fits(plan, 40 * GIB, 0)
    assert crowded is None or not crowded.offload, "offload needs host memory"


# Measured milliseconds of a compiled step, for each number of tokens and each set of levers. The measurements are from
# scripts/results/memory_llama_1b_h200_202611.md.
STEP_MS = {
    2**15: [
        (Levers("none", False, None), 951.2),
        (Levers("none", False, 16384), 993.2),
        (Levers("selective", False, None), 1017.8),
        (Levers("selective", True, None), 1021.1),
        (Levers("selective", False, 16384), 1013.6),
        (Levers("selective", True, 16384), 1014.0),
    ],
    2**17: [
        (Levers("selective", False, None), 10408.5),
        (Levers("selective", True, None), 10407.7),
        (Levers("selective", False, 16384), 10364.4),
        (Levers("selective", True, 16384), 10302.0),
        (Levers("full", False, None), 12588.5),
        (Levers("full", True, None), 12598.3),
    ],
}


@pytest.mark.parametrize("tokens", STEP_MS)
def test_auto_ranks_levers_as_they_were_measured(tokens):
    plan = changed(LLAMA_1B, seq_len=tokens, compiled=True)
    measured = STEP_MS[tokens]
    predicted = [1e3 * extra_seconds(with_levers(plan, levers)) for levers, _ in measured]
    first, first_ms = predicted[0], measured[0][1]
    for ours, (levers, ms) in zip(predicted, measured, strict=True):
        assert ours - first == pytest.approx(ms - first_ms, abs=0.02 * first_ms), levers
        for theirs, (others, more_ms) in zip(predicted, measured, strict=True):
            assert more_ms < 1.02 * ms or ours < theirs, (levers, others)


@pytest.mark.parametrize("tokens", STEP_MS)
def test_auto_takes_chunks_before_host_memory(tokens):
    """Offload takes pinned host memory, which the whole machine shares."""
    plan = changed(LLAMA_1B, seq_len=tokens, compiled=True)
    none, chunks, copies, both = (
        extra_seconds(with_levers(plan, Levers("selective", offload, mlp_chunk)))
        for offload, mlp_chunk in ((False, None), (False, 16384), (True, None), (True, 16384))
    )
    assert none < chunks < copies < both


def test_copies_save_no_time_where_chunks_are_computed_again():
    """An FFN with adapters recomputes its chunks even with offload=all, so copies to the host save no computation."""
    plan = changed(with_adapters(LLAMA_1B)[0], seq_len=2**17)
    chunks, copies = (extra_seconds(with_levers(plan, Levers("none", x, 16384))) for x in (False, "all"))
    assert chunks < copies
    plain = changed(LLAMA_1B, seq_len=2**18)
    chunks, copies = (extra_seconds(with_levers(plain, Levers("none", x, 16384))) for x in (False, "all"))
    assert copies < chunks


@pytest.mark.parametrize(
    ("plan", "gpu_gib"),
    [
        pytest.param(changed(LLAMA_1B, seq_len=2**17), 139.8, id="a-lever"),
        pytest.param(changed(LLAMA_1B, seq_len=2**19), 139.8, id="more-levers"),
        pytest.param(changed(LLAMA_1B, seq_len=2**14), 20, id="the-optimizer"),
        pytest.param(changed(LLAMA_1B, seq_len=2**24), 139.8, id="the-length"),
    ],
)
def test_following_the_advice_helps(plan, gpu_gib):
    gpu_bytes = int(gpu_gib * GIB)
    assert not fits(predict(plan), gpu_bytes, HOST)
    plan = followed(plan, next_lever(plan, gpu_bytes, HOST))
    assert fits(predict(plan), gpu_bytes, HOST)
    assert next_lever(plan, gpu_bytes, HOST) == ""


def followed(plan: Plan, advice: str) -> Plan:
    """Returns a copy of the plan, changed by the overrides in `advice`. The rows per step stay the same."""
    for override in advice.split():
        name, value = override.split("=")
        last = name.rpartition(".")[2]
        field = {"micro_batch_size": "rows", "chunk_size": "loss_chunk"}.get(last, last)
        known: dict[str, Any] = {"true": True, "false": False, "null": None}
        value = known.get(value, int(value) if value.isdigit() else value)
        before, plan = plan, changed(plan, **{field: value})
        assert plan != before, "advice must change the setting"
        if field == "rows":
            plan = changed(plan, accumulates=True)
    return plan


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(changed(LLAMA_1B, seq_len=2**14, compiled=True, rows=4), id="one-gpu"),
        pytest.param(changed(LLAMA_1B, seq_len=2**14, compiled=True, rows=4, buckets="views"), id="ddp"),
        pytest.param(changed(LLAMA_1B, seq_len=2**14, compiled=True, rows=4, ranks=8), id="fsdp"),
        pytest.param(changed(LLAMA_1B, seq_len=2**14, compiled=True, rows=4, ranks=8, reduce_once=True), id="once"),
    ],
)
def test_a_run_with_fewer_rows_per_micro_batch_fits(plan):
    """A step of several micro-batches keeps its gradients from the first micro-batch to the last."""
    for gib in (36, 34, 30, 28, 20, 12, 9, 6):
        advice = next_lever(plan, gib * GIB, HOST)
        assert advice == "a smaller model" or fits(predict(followed(plan, advice)), gib * GIB, HOST), advice


def test_levers_come_before_accumulation_if_gradients_need_more_memory_than_rows():
    bf16 = {"precision": "bf16-true", "optimizer": "adamw_bf16", "ranks": 8, "reduce_once": True, "compiled": True}
    plan = changed(LLAMA_1B, seq_len=2**14, rows=2, **bf16)
    assert next_lever(plan, 9 * GIB, HOST) == "memory.checkpointing=selective memory.mlp_chunk=16384"


def test_advice_starts_with_fewer_rows():
    eight_rows = changed(LLAMA_1B, seq_len=2**14, rows=8)
    assert next_lever(eight_rows, H200, HOST) == "data.micro_batch_size=4"
    assert next_lever(changed(eight_rows, seq_len=2**17, rows=1), H200, HOST) == "memory.mlp_chunk=16384"
    offloaded = "data.micro_batch_size=1 memory.offload=true memory.mlp_chunk=16384"
    assert next_lever(eight_rows, 30 * GIB, HOST) == offloaded
    assert next_lever(changed(LLAMA_1B, seq_len=2**11, rows=4), H200, HOST) == ""


@pytest.mark.parametrize(
    ("changes", "gpu_gib", "advice"),
    [
        pytest.param({"seq_len": 8192}, 26.5, "", id="before-other-levers"),
        pytest.param({"seq_len": 8192, "rows": 2}, 31, "data.micro_batch_size=1 ", id="after-rows"),
        pytest.param(
            {"seq_len": 2**15, "loss_chunk": 16384},
            22,
            "memory.checkpointing=selective memory.offload=true memory.mlp_chunk=16384 ",
            id="with-other-levers-before-the-optimizer",
        ),
        pytest.param(
            {
                "seq_len": 8192,
                "precision": "bf16-true",
                "optimizer": "adamw_8bit",
                "adapters": with_adapters(LLAMA_1B)[0].run.adapters,
                "checkpointing": "full",
                "offload": True,
            },
            4.2,
            "",
            id="before-shorter-sequences",
        ),
    ],
)
def test_advice_has_smaller_chunks_of_the_loss(changes, gpu_gib, advice):
    plan, gpu_bytes = changed(LLAMA_1B, compiled=True, **changes), int(gpu_gib * GIB)
    assert next_lever(plan, gpu_bytes, HOST) == f"{advice}memory.loss.chunk_size=1024"
    smaller = followed(plan, next_lever(plan, gpu_bytes, HOST))
    assert fits(predict(smaller), gpu_bytes, HOST)
    assert "chunk_size" not in next_lever(changed(smaller, loss_chunk=512, seq_len=2**20), gpu_bytes, HOST)


def test_advice_for_float8_has_micro_batches_of_a_multiple_of_16_tokens():
    plan = changed(LLAMA_1B, seq_len=36872, rows=4, compiled=True, float8=True)
    assert plan.run.seq_len % 16 == 8
    assert next_lever(plan, 120 * GIB, HOST) == "data.micro_batch_size=2"
    assert next_lever(plan, 80 * GIB, HOST) == "data.micro_batch_size=2 memory.checkpointing=selective"
    assert next_lever(changed(plan, rows=2), 80 * GIB, HOST) == "memory.checkpointing=selective"
    length, rows, *_ = next_lever(plan, 10 * GIB, HOST).split()
    assert int(length.removeprefix("seq_len=")) % 16 == 0 and rows == "data.micro_batch_size=1"


def test_auto_reaches_as_far_as_any_levers():
    longest = longest_of_all_levers(LLAMA_1B, H200, HOST)
    assert longest > longest_seq_len(LLAMA_1B, H200, HOST)
    assert fastest_that_fits(changed(LLAMA_1B, seq_len=longest), H200, HOST) is not None
    assert fastest_that_fits(changed(LLAMA_1B, seq_len=longest + 1), H200, HOST) is None


@pytest.mark.parametrize("adapters", [False, True], ids=["all-weights", "adapters"])
def test_advice_for_sharded_weights_is_what_they_can_take(adapters):
    """require_shardable refuses optimizers with 8-bit states or with states on the host."""
    plan = changed(with_adapters(LLAMA_1B)[0] if adapters else LLAMA_1B, ranks=8, seq_len=2**14)
    sizes = {GIB * gib for gib in range(4, 20)}
    advice = {next_lever(plan, gpu_bytes, HOST) for gpu_bytes in sizes}
    assert not any("8bit" in text or "adamw_offload" in text for text in advice)
    assert any(text.endswith("trainer.precision=bf16-true") for text in advice)
    assert any("optimizer=adamw_bf16 trainer.precision" in text for text in advice) != adapters
    assert any("optimizer=adamw_8bit" in next_lever(changed(plan, ranks=1), size, HOST) for size in sizes)


@pytest.mark.parametrize(
    ("ranks", "sizes", "smaller"), [(1, (22, 20, 17), "adamw_8bit"), (8, (9, 6, 5), "adamw_bf16")], ids=["one", "eight"]
)
def test_advice_keeps_fp32_weights_as_long_as_possible(ranks, sizes, smaller):
    """adamw_master cannot train adapters."""
    plan = changed(LLAMA_1B, ranks=ranks, seq_len=2**14)
    none, master, less_exact = (next_lever(plan, GIB * gib, HOST) for gib in sizes)
    assert "optimizer" not in none and f"optimizer={smaller}" in less_exact
    assert master.endswith(" optimizer=adamw_master trainer.precision=bf16-true")
    half = changed(plan, optimizer="adamw_master", precision="bf16-true")
    assert next_lever(half, GIB * sizes[2], HOST).endswith(f" optimizer={smaller}")
    adapters = changed(with_adapters(LLAMA_1B)[0], ranks=ranks, seq_len=2**16)
    assert "adamw_master" not in next_lever(adapters, GIB * sizes[1] / 2, HOST)


def test_levers_with_dropout_are_those_that_lora_accepts():
    """LoRA refuses dropout in a model with memory levers that recompute activations."""
    plan = changed(with_adapters(LLAMA_1B, dropout=0.1)[0], seq_len=2**17, compiled=True)
    accepted = []
    for levers in COMBINATIONS:
        with suppress(ValueError):
            with_adapters(changed(with_levers(GPT2, levers), n_layers=1), dropout=0.1)
            accepted.append(levers)
    assert combinations(plan) == accepted == [Levers("none", offload, None) for offload in (False, True, "all")]
    assert combinations(changed(plan, float8=True)) == accepted[:2]
    assert combinations(with_adapters(LLAMA_1B)[0]) == COMBINATIONS
    assert fastest_that_fits(plan, 80 * GIB, HOST) in (None, *accepted)
    assert smallest(plan) in accepted
    assert longest_of_all_levers(plan, 80 * GIB, HOST) == max(
        longest_seq_len(with_levers(plan, levers), 80 * GIB, HOST) for levers in accepted
    )
    advice = {next_lever(changed(plan, seq_len=2**i), 80 * GIB, HOST) for i in range(15, 20)}
    assert len(advice) > 2
    assert not any("mlp_chunk=16384" in text or "checkpointing=" in text for text in advice)


def test_advice_names_only_settings_that_change_and_turns_levers_off():
    offloaded = changed(LLAMA_1B, seq_len=2**14, offload=True, mlp_chunk=16384)
    assert next_lever(offloaded, H200, host_bytes=0) == "memory.offload=false memory.mlp_chunk=null"
    assert next_lever(changed(offloaded, mlp_chunk=None), H200, host_bytes=0) == "memory.offload=false"


def test_sequences_are_longer_if_fewer_heads_are_gathered_at_a_time():
    levers, sizes = Levers("full", True, 16384), {"precision": "bf16-true", "optimizer": "adamw_bf16"}
    plan = with_levers(changed(LLAMA_1B, ranks=8, context=8, compiled=True, **sizes), levers)
    longest = [longest_seq_len(changed(plan, head_groups=groups), H200, 10 * HOST) for groups in (1, 2, 4, 8)]
    assert longest == sorted(longest) and longest[-1] > 1.5 * longest[0]
    assert next_lever(changed(plan, seq_len=longest[0]), H200, 10 * HOST) == ""
    assert next_lever(changed(plan, seq_len=longest[0] + 1), H200, 10 * HOST) == "strategy.head_groups=8"
    assert "head_groups" not in next_lever(changed(plan, seq_len=longest[0] + 1), H200, 10 * HOST, "sdpa")
    fewer = with_levers(changed(plan, seq_len=longest[0] // 8), Levers("none", False, None))
    assert next_lever(fewer, H200, 10 * HOST).startswith("memory."), "memory levers come first"
    alone = changed(plan, context=1, seq_len=longest[0])
    assert "head_groups" not in next_lever(alone, H200, 10 * HOST)


@pytest.mark.parametrize("total", [4096, 8192, 131_072, 786_432, 1_048_576])
@pytest.mark.parametrize("context", [2, 4, 8])
def test_the_plan_counts_all_rows_of_the_largest_buffer(context, total):
    """The buffer of gathered keys can have more rows than there are keys, because its size is rounded up."""
    boundaries = np.array([0, total])
    dealt = deal(boundaries, total, context)
    rows = max(Counts(*traffic(dealt, boundaries, rank, None).counts).rows for rank in range(context))
    plan = changed(LLAMA_1B, ranks=context, context=context, seq_len=total)
    nbytes = 2 * rows * plan.model.kv_dim * plan.run.compute_bytes
    assert total <= rows and nbytes <= BlockBytes(plan)._gathered()


@pytest.mark.parametrize("context", [2, 4, 8])
def test_ranks_that_share_a_sequence_hold_a_longer_one(context):
    alone = changed(LLAMA_1B, ranks=context, seq_len=8192)
    shared = changed(alone, context=context, seq_len=8192 * context)
    assert predict(shared).activations == predict(alone).activations
    attention = [BlockBytes(plan).backward_peaks()["attention's backward"] for plan in (shared, alone)]
    assert attention[0] > attention[1], "gathered keys and values need memory"
    longest = longest_seq_len(alone, H200, HOST)
    assert longest < longest_seq_len(shared, H200, HOST) <= context * longest
