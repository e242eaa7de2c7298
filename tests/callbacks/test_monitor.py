"""A value is logged under its own step, although Monitor reads it after the next micro-batch has been launched."""

import json
import math
import os
import re
import statistics
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from fa_train import training
from fa_train.callbacks import record
from fa_train.callbacks.monitor import Monitor, Reading, memory, monitor_of
from fa_train.callbacks.progress import describe
from fa_train.callbacks.timestamp import Timestamp
from fa_train.errors import DivergedError
from fa_train.flops import attention_pairs, train_flops
from fa_train.lit_gpt import LitGPT
from tests.support.training import column, composed, tiny

pytestmark = pytest.mark.slow

EVERY, STEPS = 4, 10
SMALL = (
    "model.n_layers=1", "seq_len=16", "data.val_rows=2", "data.micro_batch_size=2", f"max_steps={STEPS}",
    f"trainer.log_every_n_steps={EVERY}", "trainer.val_check_interval=100",
)  # fmt: skip
UNSAVED = "callbacks.checkpoint=null"


class Synchronous(Callback):
    """Reads each step's loss and gradient norm at the end of the step, and counts micro-batches."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.norms: dict[int, float] = {}
        self.rates: dict[int, float] = {}
        self.micro_batches = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.micro_batches += 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.rates[trainer.global_step + 1] = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step:
            self.losses.setdefault(trainer.global_step, float(pl_module.step_loss))
            self.norms.setdefault(trainer.global_step, float(pl_module.step_grad_norm))


def fit(tmp_path, watching, *overrides):
    """Trains a tiny model with the callback `watching`, which runs before all other callbacks."""
    folder = tmp_path / "run"
    folder.mkdir()
    with composed(folder, *tiny(tmp_path, *SMALL, *overrides)) as cfg:
        trainer, lit_gpt, data = training.build(cfg)
    trainer.callbacks.insert(0, watching)
    trainer.fit(lit_gpt, datamodule=data)
    return trainer


@pytest.mark.parametrize("validates_every", [pytest.param(100, id="never"), 3, 4])
def test_logged_values_belong_to_the_logged_step(validates_every, tmp_path, capsys):
    watching = Synchronous()
    trainer = fit(tmp_path, watching, UNSAVED, f"trainer.val_check_interval={validates_every}")
    logged = [4, 8, STEPS]
    assert watching.micro_batches == 2 * STEPS
    for name, values in (("loss", watching.losses), ("grad_norm", watching.norms)):
        assert column(tmp_path, f"train/{name}") == {step: values[step] for step in logged}
    assert column(tmp_path, "lr") == {step: watching.rates[step] for step in logged}
    validated = list(range(validates_every, STEPS + 1, validates_every))
    assert sorted(column(tmp_path, "val/loss")) == validated
    tokens = column(tmp_path, "tokens")
    assert tokens == {step: step * 4 * 16 for step in {*logged, *validated}}
    assert all(ms > 0 for ms in column(tmp_path, "perf/step_ms").values())
    done = describe(monitor_of(trainer).latest, monitor_of(trainer).older_val_step)
    assert re.findall(r"val [\d.]+ \(step (\d+)\)", done) == [str(step) for step in validated[-1:]]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split("/")[0] for line in lines] == [f"step {step}" for step in sorted([*logged, *validated])]
    losses = column(tmp_path, "val/loss")
    expected = [f"step {step}/{STEPS}  val {losses[step]:.4f}" for step in validated]
    assert [line for line in lines if " val " in line] == expected


@pytest.mark.parametrize(
    ("overrides", "micro_batches"),
    [
        pytest.param([UNSAVED], [9, 17, 20], id="the-next-micro-batch"),
        pytest.param([UNSAVED, "trainer.val_check_interval=4"], [8, 16, 20], id="a-validation-reads-first"),
        # at steps 8 and 10, the host also waits in Checkpoint, which measures how long a save delays training
        pytest.param(
            ["callbacks.checkpoint.every_n_train_steps=8"], [9, 16, 16, 20, 20], id="a-checkpoint-reads-first"
        ),
    ],
)
def test_the_host_waits_for_a_step_after_the_next_micro_batch(overrides, micro_batches, tmp_path, monkeypatch):
    """Each step has two micro-batches, and steps 4, 8 and 10 are logged."""
    watching, waited = Synchronous(), []
    monkeypatch.setattr(Timestamp, "wait", lambda _: waited.append(watching.micro_batches))
    fit(tmp_path, watching, *overrides)
    assert waited == micro_batches


class Fails(Synchronous):
    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if trainer.global_step == EVERY:
            raise RuntimeError("broken on purpose")


def test_the_last_log_is_written_when_a_run_fails(tmp_path, capsys):
    watching = Fails()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fit(tmp_path, watching, UNSAVED)
    assert column(tmp_path, "train/loss") == {EVERY: watching.losses[EVERY]}
    assert f"step {EVERY}/{STEPS}  loss" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "arrived", "logs"), [(1, False, True), (2, True, True), (2, False, False)], ids=str)
def test_a_failed_run_does_not_wait_for_other_ranks(ranks, arrived, logs):
    """A wait for the device could last forever, because another rank may have failed."""
    end = SimpleNamespace(passed=lambda: arrived)
    monitor, logged = Monitor(seq_len=1, batch_size=1, max_skipped_steps=None), []
    monitor.log_reading = lambda trainer, together: logged.append(trainer)
    monitor._reading = Reading(1, 1, 0.0, {}, torch.zeros(5), end, end, [], 0.0, None, [])
    monitor.on_exception(SimpleNamespace(world_size=ranks), None, RuntimeError())
    assert bool(logged) == logs and monitor._reading is None


@pytest.mark.parametrize(
    ("error", "said", "diverged"),
    [
        pytest.param(DivergedError("5 steps were skipped"), "error: 5 steps were skipped", True, id="diverged"),
        pytest.param(
            OSError("disk full"), "the last metrics of the run were not logged: disk full", False, id="a-logger-fails"
        ),
    ],
)
def test_an_error_of_the_last_log_does_not_replace_the_first_one(error, said, diverged):
    end, printed = SimpleNamespace(passed=lambda: True), []
    monitor = Monitor(seq_len=1, batch_size=1, max_skipped_steps=None)
    monitor.log_reading = lambda trainer, together: (_ for _ in ()).throw(error)
    monitor._reading = Reading(1, 1, 0.0, {}, torch.zeros(5), end, end, [], 0.0, None, [])
    monitor.on_exception(SimpleNamespace(world_size=1, print=printed.append), None, KeyboardInterrupt())
    assert said in printed[0] and monitor.has_diverged == diverged and monitor._reading is None


@pytest.mark.parametrize("diverged", [False, True])
def test_an_interrupted_run_that_has_diverged_is_not_saved(diverged, tmp_path, monkeypatch):
    def log_reading(monitor, trainer, together=True):
        if monitor._reading is not None and diverged:
            raise DivergedError("skipped")
        monitor._reading = None

    monkeypatch.setattr(Monitor, "log_reading", log_reading)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        fit(tmp_path, Fails(), "callbacks.checkpoint.save_on_exception=true")
    assert bool(list(tmp_path.rglob("*.ckpt"))) != diverged


def test_validation_does_not_count_as_training_time(tmp_path, monkeypatch):
    seconds = iter(range(1000))
    monkeypatch.setattr("fa_train.callbacks.timestamp.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr("fa_train.callbacks.monitor.RECENT_LOGS", 2)
    trainer = fit(tmp_path, Synchronous(), UNSAVED, "trainer.val_check_interval=2")
    # The run starts at 0 s. Step 4 is logged at 3 s, step 8 at 8 s and step 10 at 11 s. The training time leaves out
    # four validations: from 1 to 2 s, from 4 to 5 s, from 6 to 7 s and from 9 to 10 s.
    assert column(tmp_path, "perf/step_ms") == pytest.approx({4: 2e3 / 4, 8: 3e3 / 4, 10: 2e3 / 2})
    assert monitor_of(trainer).latest_step == STEPS
    rates = column(tmp_path, "perf/tokens_per_s")
    assert monitor_of(trainer).summary()["perf/tokens_per_s"] == pytest.approx((rates[8] + rates[10]) / 2)


class DocumentLengths(Callback):
    """Records the document lengths of each step."""

    def __init__(self) -> None:
        self.of_step: dict[int, list[torch.Tensor]] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.of_step.setdefault(trainer.global_step + 1, []).append(batch["cu_seqlens"].diff())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("null", id="no-window"),
        pytest.param("{_target_:fa_train.models.config.Family,windows:[5]}", id="window"),
    ],
)
def test_mfu_counts_the_documents_of_all_steps_since_the_last_log(family, tmp_path, monkeypatch):
    monkeypatch.setattr("fa_train.callbacks.monitor.utilisation", lambda flops_per_s, *_: {"perf/mfu": flops_per_s})
    watching = DocumentLengths()
    trainer = fit(tmp_path, watching, UNSAVED, f"model.family={family}", "trainer.val_check_interval=3")
    model, times = trainer.lightning_module.model, column(tmp_path, "perf/step_ms")
    pairs = [attention_pairs(model.windows, torch.cat(watching.of_step[step])).item() for step in range(1, STEPS + 1)]
    assert len(set(pairs)) > 2, "the steps must differ"
    expected = {
        last: train_flops(model.config, 4 * 16, statistics.mean(pairs[first:last])) / (times[last] / 1e3)
        for first, last in ((0, 4), (4, 8), (8, STEPS))
    }
    assert column(tmp_path, "perf/mfu") == pytest.approx(expected)


@pytest.mark.parametrize("interval", [3, 100])
def test_a_sanity_check_is_not_logged(interval, tmp_path, capsys):
    """Before training, Lightning's sanity check validates the untrained model on some of the rows."""
    sanity = ["trainer.num_sanity_val_steps=1", f"trainer.val_check_interval={interval}", "data.micro_batch_size=1"]
    trainer = fit(tmp_path, Synchronous(), UNSAVED, *sanity)
    validated = list(range(interval, STEPS + 1, interval))
    assert sorted(column(tmp_path, "val/loss")) == validated
    assert ("val/loss" in monitor_of(trainer).summary()) == bool(validated)
    assert f"step 0/{STEPS}" not in capsys.readouterr().out


class NoSync(Callback):
    """Makes torch raise an error if the host waits for the GPU, except in the first steps, which compile kernels."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == EVERY:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, trainer, pl_module) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, trainer, pl_module, exception) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_gpu(tmp_path):
    overrides = ["trainer.accelerator=gpu", "trainer.precision=bf16-mixed", "attention=flash", "data.num_workers=1"]
    fit(tmp_path, NoSync(), UNSAVED, *overrides)
    assert sorted(column(tmp_path, "train/loss")) == [4, 8, STEPS]


def test_a_step_without_labels_has_no_loss(tmp_path, monkeypatch):
    nothing = {"train/loss": math.nan, "train/grad_norm": 0.0, "tokens": 64.0}
    assert describe(nothing).startswith("loss none (no labels in this step)")
    assert describe(nothing | {"train/grad_norm": math.nan}).startswith("loss nan"), "the model has NaN"
    assert describe({"val/loss": 1.0}) == "val 1.0000"
    monkeypatch.setattr(record, "monitor_of", lambda _: Mock(summary=lambda: nothing | {"val/loss": math.inf}))
    record.Record()._write(Mock(is_global_zero=True, default_root_dir=tmp_path))
    assert json.loads((tmp_path / "result.json").read_text()) == {"train/grad_norm": 0.0, "tokens": 64.0}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the system cannot forget a peak")
def test_the_peak_of_a_run_on_the_cpu_is_its_own(monkeypatch):
    """All jobs of a sweep run in one process. On Linux, ru_maxrss includes the peak of the parent process."""
    cpu, earlier = torch.device("cpu"), torch.ones(2**28, dtype=torch.uint8)
    before = memory(cpu)["perf/peak_gib"]
    del earlier
    Monitor(16, 4, None).on_fit_start(Mock(world_size=1), Mock(spec=LitGPT, device=cpu))
    assert memory(cpu)["perf/peak_gib"] < before - 0.2
    monkeypatch.setattr("resource.getrusage", lambda who: Mock(ru_maxrss=2**40))
    assert memory(cpu)["perf/peak_gib"] < before


class SlowStart(Callback):
    """Pretends that the first batch took ten seconds to load."""

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.train_dataloader.waited += 10


def test_the_wait_for_the_first_batch_is_not_part_of_a_step(tmp_path):
    fit(tmp_path, SlowStart(), UNSAVED)
    waits, times = column(tmp_path, "perf/data_wait_ms"), column(tmp_path, "perf/step_ms")
    assert all(waits[step] < times[step] for step in times)


def test_the_time_between_two_calls_of_fit_is_not_training_time():
    monitor, module = Monitor(16, 4, None), Mock(device=torch.device("cpu"))
    optimizer, starts = Mock(param_groups=[{"lr": 1.0}]), []
    trainer = Mock(global_step=0, optimizers=[optimizer], train_dataloader=None)
    for _ in range(2):
        monitor.on_train_start(trainer, module)
        monitor.on_train_batch_start(trainer, module, {}, 0)
        starts.append(monitor._window_start)
    assert starts[1].seconds_since(starts[0]) > 0


def test_a_learning_rate_in_a_tensor_is_logged_as_the_number_of_its_step():
    monitor, lr = Monitor(16, 4, None), torch.tensor(0.5)
    monitor.on_before_optimizer_step(Mock(), Mock(spec=LitGPT), Mock(param_groups=[{"lr": lr}]))
    lr.zero_()  # torch's schedulers change a learning rate in place if it is a tensor
    assert json.dumps(monitor._lr) == "0.5"
