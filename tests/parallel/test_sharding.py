"""Two and four processes compute the same losses, gradients and weights as one process, with every strategy and memory
lever.

By default, a few cases run, as in CI. With SHARDING_CASES=pairwise, the cases contain every combination of the values
of any two settings. With SHARDING_CASES=all, all combinations run.
"""

import json
import os
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from tests.data.support.chats import many_chats, save_tokenizer, write_jsonl
from tests.memory.support.small import levers, small_gpt
from tests.parallel.support.sharding import (
    CONTEXTS,
    MEMORIES,
    RANKS,
    Case,
    Recorder,
    assert_close,
    build,
    finetune_overrides,
    generated,
    in_processes,
    train,
)
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.training import composed

pytestmark = [pytest.mark.slow, needs_ports]
IN_CI = [  # every value of every option occurs; each strategy runs compiled and not compiled
    Case("ddp", 1, "full-offload", compiled=True),
    Case("ddp", 2, "selective"),
    Case("fsdp", 1, "none", tied=False, reshard=False),
    Case("fsdp", 2, "full-offload", tied=False, reduce_once=True),
    Case("fsdp", 2, "offload-all", compiled=True),
    Case("hsdp", 1, "offload-all", tied=False),
    Case("hsdp", 2, "none", compiled=True),
]
PAIRWISE = [
    *IN_CI,
    Case("ddp", 1, "none", compiled=True),
    Case("ddp", 2, "offload-all"),
    Case("fsdp", 1, "selective", compiled=True),
    Case("hsdp", 1, "selective", reduce_once=True),
    Case("hsdp", 2, "full-offload", compiled=True, tied=False),
]
ROUNDED = Case("fsdp", 2, tied=False, reduce_dtype="bfloat16")
ANY = [(tied, reshard, once) for tied, reshard, once in product([True, False], repeat=3)]
OPTIONS = {"ddp": [(True, True, False)], "fsdp": ANY, "hsdp": ANY}  # tied, reshard, reduce_once
ALL = [
    Case(strategy, accumulation, memory, compiled, *options)
    for strategy, accumulation, memory, compiled in product(RANKS, (1, 2), MEMORIES, (False, True))
    for options in OPTIONS[strategy]
]
CHOSEN = os.environ.get("SHARDING_CASES", "ci")
CASES = {"ci": IN_CI, "pairwise": PAIRWISE, "all": ALL}[CHOSEN]


def test_each_two_values_meet():
    assert all(case in ALL for case in PAIRWISE)
    assert {(case.strategy, case.compiled) for case in IN_CI} == set(product(RANKS, (False, True)))
    factors = ("strategy", "accumulation", "memory", "compiled")
    for one, other in product(factors, factors):
        pairs = [{(getattr(case, one), getattr(case, other)) for case in cases} for cases in (PAIRWISE, ALL)]
        assert pairs[0] == pairs[1], (one, other)


def write_finetuning(folder: Path) -> None:
    write_jsonl(folder / "chats.jsonl", many_chats())
    save_tokenizer(folder / "base")
    save_pretrained(small_gpt(levers(), torch.device("cpu"), n_layers=2, vocab_size=400), folder / "base")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """Runs all cases with the same number of ranks in the same processes, because a process takes seconds to start."""
    folder: Path = tmp_path_factory.mktemp("sharding")
    if CHOSEN != "ci":
        write_finetuning(folder)
    start_server()
    for ranks in sorted(set(RANKS.values())):
        cases = [case for case in (*CASES, ROUNDED) if case.ranks == ranks]
        arguments = (str(folder), ranks_of_torchrun(ranks), cases)
        torch.multiprocessing.start_processes(in_processes, args=arguments, nprocs=ranks, start_method="forkserver")
    return folder


@cache
def one_process(micro_batches: int, tied: bool) -> Recorder:
    return train(Case("one", micro_batches, tied=tied))


def of_rank(results: Path, case: Case, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(results / f"{case}.{rank}.pt")
    return loaded


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_compute_what_one_process_does(case, results):
    expected = one_process(case.micro_batches, case.tied)
    for rank in range(case.ranks):
        ours = of_rank(results, case, rank)
        # a step without labels has no loss
        torch.testing.assert_close(ours["losses"], expected.losses, rtol=1e-5, atol=0, equal_nan=True)
        assert_close(ours["gradients"], expected.gradients, 1e-5)
        assert_close(ours["weights"], expected.weights, 1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.strategy != "ddp"], ids=str)
def test_only_what_is_needed_is_gathered(case, results):
    """While the loss is computed, blocks are gathered only if reshard_after_forward=false."""
    gathered = of_rank(results, case, 0)["gathered"]
    outside = {"norm.weight", "token_embedding.weight" if case.tied else "head.weight"}
    assert {name for name in gathered if not name.startswith("blocks.")} == outside
    assert any(name.startswith("blocks.") for name in gathered) == (not case.reshard)


@pytest.mark.parametrize("case", [case for case in CASES if case.accumulation > 1 and case.strategy == "fsdp"], ids=str)
def test_reduce_once_waits_for_the_last_micro_batch(case, results):
    assert of_rank(results, case, 0)["reduced_early"] == (not case.reduce_once)


def test_gradients_are_reduced_in_the_chosen_dtype(results):
    ours, expected = of_rank(results, ROUNDED, 0)["gradients"], one_process(ROUNDED.micro_batches, ROUNDED.tied)
    assert_close(ours, expected.gradients, 2**-6)
    with pytest.raises(AssertionError):
        assert_close(ours, expected.gradients, 1e-4)


@pytest.mark.parametrize(
    ("ranks", "last", "reference"), [pytest.param(2, 1, 0, id="ddp"), pytest.param(4, 3, 1, id="hsdp")]
)
def test_all_ranks_end_after_one_bit_of_the_last_rank_has_changed(ranks, last, reference, results):
    """Before and after step 1, all copies of the model have equal weights."""
    for rank in range(ranks):
        assert (
            (results / f"flipped.{ranks}.{rank}.txt")
            .read_text()
            .startswith(
                "step 2: weights that must be equal on all copies of the model differ: "
                f"rank {last} from rank {reference}. They were equal at step 1. "
            )
        )


def test_replicas_have_equal_weights_even_if_their_gradient_norms_are_rounded_differently(results):
    assert [(results / f"norms.{rank}.txt").read_text() for rank in range(4)] == [""] * 4


def test_ranks_generate_what_one_process_does(results):
    expected = generated(build(Case("one", 1, tied=False)))
    for rank in range(2):
        assert json.loads((results / f"generated.{rank}.json").read_text()) == expected


@pytest.mark.skipif(CHOSEN == "ci", reason="takes seconds: choose SHARDING_CASES=pairwise")
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_sharded_run_finetunes_samples_and_exports(context, results, tmp_path):
    """The first sample is the checkpoint's greedy answer, and the second is the exported model's greedy answer."""
    samples = [json.loads(line) for line in (results / f"finetuned-{context}/samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [0, 2], "rank 0 writes, and no other rank"
    with composed(tmp_path / "one", *finetune_overrides(results)) as cfg:
        sample = instantiate(cfg.sample)
    for recorded, folder in zip(samples, ("base", f"finetuned-{context}/exported"), strict=True):
        model = load_pretrained(results / folder, "sdpa")
        trainer = SimpleNamespace(
            is_global_zero=True, precision_plugin=SimpleNamespace(forward_context=nullcontext), print=print,
            global_step=recorded["step"], default_root_dir=tmp_path,
        )  # fmt: skip
        sample(trainer, SimpleNamespace(model=model))
    again = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert again == samples
