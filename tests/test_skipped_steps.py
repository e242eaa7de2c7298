"""If the gradients of an optimizer step are not finite, the step is skipped and counted.

With SKIPPED_STEPS=300, runs have 300 steps instead of 16.
"""

import copy
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from fa_train import training
from fa_train.checkpoints.files import read_file, write_file
from fa_train.errors import DivergedError
from fa_train.lit_gpt import SKIPPED, SKIPPED_IN_A_ROW
from tests.support import processes
from tests.support.processes import start_server
from tests.support.ranks import FORKED, needs_ports, ranks_of_torchrun
from tests.support.training import column, composed, quiet_environment, tiny, write_corpus

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("SKIPPED_STEPS", "16"))  # steps of a run
BAD = 6  # value of trainer.global_step during the step with the infinite loss, which is step 7 in the logs
SMALL = (
    "model.n_layers=1", "seq_len=16", "batch_size=2", "trainer.val_check_interval=12", "data.val_rows=2",
    "data.micro_batch_size=2", "callbacks.checkpoint=null",
)  # fmt: skip
SAVING = tuple(override for override in SMALL if override != "callbacks.checkpoint=null")
RUNS = {
    "adamw": [],
    "adamw-not-fused": ["optimizer.fused=false"],
    "adamw-of-two-micro-batches": ["data.micro_batch_size=1"],
    "adamw_8bit": ["optimizer=adamw_8bit"],
    "adamw_bf16": ["optimizer=adamw_bf16", "trainer.precision=bf16-true"],
    # runs are compared bit for bit, and naive attention is deterministic on a GPU
    "adamw_offload": ["optimizer=adamw_offload", "trainer.accelerator=gpu", "attention=naive"],
}
ON_TWO_RANKS = ["ddp", "fsdp"]


class InfiniteLoss(Callback):
    """Makes the loss of the last rank infinite, so that all gradients of that rank are infinite or NaN.

    steps: the loss is infinite when trainer.global_step has one of these values.
    """

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def on_fit_start(self, trainer, pl_module) -> None:
        def times_infinity(model, inputs, loss):
            bad = model.training and trainer.global_step in self.steps
            return loss * math.inf if bad and trainer.global_rank == trainer.world_size - 1 else loss

        pl_module.model.register_forward_hook(times_infinity)


class Undo(Callback):
    """After the step with trainer.global_step=step, restores weights and optimizer state from before that step."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.before: tuple[list[torch.Tensor], dict[str, Any]] | None = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == self.step:
            weights = [p.detach().clone() for p in pl_module.parameters()]
            self.before = weights, copy.deepcopy(optimizer.state_dict())

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self.before is not None:
            weights, state = self.before
            for parameter, weight in zip(pl_module.parameters(), weights, strict=True):
                parameter.copy_(weight)
            [optimizer] = trainer.optimizers
            rates = [group["lr"] for group in optimizer.param_groups]  # learning rates of the next step
            optimizer.load_state_dict(state)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            self.before = None


def bad_steps(*steps: int) -> list[str]:
    return [
        "+callbacks.bad._target_=tests.test_skipped_steps.InfiniteLoss",
        f"+callbacks.bad.steps={list(steps)}",
    ]


UNDONE = ["+callbacks.undo._target_=tests.test_skipped_steps.Undo", f"+callbacks.undo.step={BAD}"]


def run(folder: Path, corpus: Path, *overrides: str, settings: tuple[str, ...] = SMALL) -> Path:
    folder.mkdir()
    with composed(folder, *tiny(corpus, *settings, *overrides)) as cfg:
        training.train(cfg)
    return folder


def assert_only_the_bad_step_differs(skipping: Path, undone: Path) -> None:
    """Asserts that two runs have bitwise equal losses except in the bad step.

    In the run `undone`, the bad step has a finite loss and is undone afterwards.
    """
    losses, expected = column(skipping, "train/loss"), column(undone, "train/loss")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert not math.isfinite(losses.pop(BAD + 1)) and math.isfinite(expected.pop(BAD + 1))
    assert losses == expected
    assert column(skipping, "val/loss") == column(undone, "val/loss")
    counts = column(skipping, "train/skipped_steps")
    assert counts == {step: float(step > BAD) for step in range(1, STEPS + 1)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.gpu] if name == "adamw_offload" else []) for name in RUNS]
)
def test_a_step_without_finite_gradients_changes_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # on some CPUs, oneDNN's bf16 matmuls crash
    with torch.compiler.set_stance("force_eager"):  # keeps torchao from compiling an update for each shape
        skipping = run(tmp_path / "skipping", tmp_path, f"max_steps={STEPS}", *RUNS[name], *bad_steps(BAD))
        undone = run(tmp_path / "undone", tmp_path, f"max_steps={STEPS}", *RUNS[name], *UNDONE)
    assert_only_the_bad_step_differs(skipping, undone)


def in_two_processes(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    """Trains as one of two ranks, and makes the checks that need two ranks."""
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    for strategy in ON_TWO_RANKS:
        overrides = [f"max_steps={STEPS}", "data.micro_batch_size=1", f"strategy={strategy}", "trainer.devices=2"]
        for name, how in (("skipping", bad_steps(BAD)), ("undone", UNDONE)):
            path = Path(folder, f"{strategy}-{name}")
            path.mkdir(exist_ok=True)
            with (
                composed(path, *tiny(Path(folder), *SMALL, *overrides, *how)) as cfg,
                patch.object(dist, "barrier", wraps=dist.barrier) as barrier,
            ):
                training.train(cfg)
            # A run calls `barrier` at its start, at its end and in validations. A run of 16 steps calls `barrier` 12
            # times, and a run of 32 steps calls `barrier` 14 times.
            assert barrier.call_count < STEPS // 2 + 8, "NCCL's barrier waits for the GPU, so no step may have one"
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("two_ranks")
    write_corpus(folder / "corpus")
    start_server()
    arguments = (str(folder), ranks_of_torchrun(2))
    torch.multiprocessing.start_processes(in_two_processes, args=arguments, nprocs=2, start_method="forkserver")
    return folder


@needs_ports
@pytest.mark.parametrize("strategy", ON_TWO_RANKS)
def test_all_ranks_skip_what_one_finds(strategy, two_ranks):
    skipping, undone = two_ranks / f"{strategy}-skipping", two_ranks / f"{strategy}-undone"
    assert_only_the_bad_step_differs(skipping, undone)


DIVERGING = [
    "max_steps=20", "trainer.log_every_n_steps=4", "trainer.val_check_interval=3", "data.micro_batch_size=1",
    "callbacks.checkpoint.every_n_train_steps=4", "export=true",
]  # fmt: skip


@needs_ports
def test_five_skipped_steps_in_a_row_end_a_run(tmp_path):
    """Validation after steps 6 and 9 does not reset the count of skipped steps.

    The run ends at step 12, the first logged step after step 10.
    """
    overrides = tiny(tmp_path, *SAVING, *DIVERGING, "batch_size=4", "strategy=ddp", "trainer.devices=2")
    arguments = ["train.py", *overrides, *bad_steps(*range(5, 10))]
    done = processes.finish(FORKED, arguments, tmp_path, quiet_environment())
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert errors[0].startswith("error: step 12: 5 consecutive optimizer steps were skipped, because their gradients")
    assert not list(tmp_path.rglob("exported*"))
    names = sorted(path.name for path in tmp_path.rglob("*.ckpt"))
    assert names == ["step_0000004.ckpt", "step_0000008.ckpt"], "a diverged model must not replace an older checkpoint"
    [metrics] = tmp_path.rglob("metrics.csv")
    assert column(metrics.parent, "train/skipped_steps") == {4: 0, 8: 3, 12: 5}


def test_a_finite_step_ends_a_row(tmp_path, capsys):
    bad = [2, 3, 4, 5, 7, 8, 9, 10]
    folder = run(tmp_path / "run", tmp_path, "max_steps=12", *bad_steps(*bad))
    assert column(folder, "train/skipped_steps")[12] == 8
    assert "skipped 8" in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "ends"), [("2", True), ("null", False)])
def test_the_limit_is_a_setting(limit, ends, tmp_path):
    limited = [f"callbacks.monitor.max_skipped_steps={limit}", "max_steps=8", *bad_steps(*range(1, 7))]
    with pytest.raises(DivergedError, match=r"step 3: 2 consecutive optimizer steps were") if ends else nullcontext():
        run(tmp_path / "run", tmp_path, *limited)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of 5 steps, in which steps 2, 4 and 5 are skipped. Returns the checkpoint that the run saved at step 5."""
    folder = tmp_path_factory.mktemp("stopped")
    run(folder / "run", folder, "max_steps=5", *bad_steps(1, 3, 4), settings=SAVING)
    [path] = folder.rglob("step_0000005.ckpt")
    return path


def test_a_resumed_run_continues_the_counts(stopped, tmp_path):
    folder = run(tmp_path / "run", tmp_path, "max_steps=7", f"ckpt_path={stopped}", *bad_steps(5))
    assert column(folder, "train/skipped_steps") == {6: 4, 7: 4}
    limited = ["max_steps=7", f"ckpt_path={stopped}", "callbacks.monitor.max_skipped_steps=3"]
    with pytest.raises(DivergedError, match="step 6: 3 consecutive optimizer steps were skipped"):
        run(tmp_path / "limited", tmp_path, *limited, *bad_steps(5))


def test_a_run_resumes_after_more_skips_than_its_limit(stopped, tmp_path):
    limited = ["max_steps=6", f"ckpt_path={stopped}", "callbacks.monitor.max_skipped_steps=2"]
    assert column(run(tmp_path / "run", tmp_path, *limited), "train/skipped_steps") == {6: 3}


def test_a_checkpoint_without_the_counts_is_counted_from_zero(stopped, tmp_path):
    content = read_file(stopped)
    assert (content.pop(SKIPPED), content.pop(SKIPPED_IN_A_ROW)) == (3, 2)
    write_file(content, tmp_path / "older.ckpt")
    folder = run(tmp_path / "run", tmp_path, "max_steps=6", f"ckpt_path={tmp_path}/older.ckpt", *bad_steps(5))
    assert column(folder, "train/skipped_steps") == {6: 1}
