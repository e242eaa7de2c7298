"""The data module in a Trainer that train.py did not make."""

import os

import lightning as L
import pytest
import torch

from fa_train.data.batches import PackedRows
from tests.data.support import numbered
from tests.data.support.fitting import Recorder
from tests.models.support.gpt import build
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun

LENGTH, STEPS = 16, 3


def make():
    """Returns a data module whose steps have 4 micro-batches of 2 rows."""
    return numbered.make([10] * 60, packing="concat", max_steps=STEPS)


def trainer(folder, **changes):
    """Makes a Trainer. Lightning's default values apply to all settings that can change the rows of a step."""
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    return L.Trainer(accelerator="cpu", default_root_dir=folder, num_sanity_val_steps=0, **quiet, **changes)


def rows_of(batches):
    return sorted(torch.cat(batches).view(-1, LENGTH).tolist())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param(
            dict(max_steps=STEPS),
            r"trainer\.accumulate_grad_batches must be 4, .* for batch_size=8; got 1",
            id="accumulation",
        ),
        pytest.param(
            dict(max_steps=STEPS + 1, accumulate_grad_batches=4),
            r"trainer\.max_steps must be from 0 to 3, .*; got 4\. More steps would repeat",
            id="more-steps",
        ),
        pytest.param(
            dict(max_epochs=2, accumulate_grad_batches=4),
            r"trainer\.max_steps must be from 0 to 3, .*; got -1",
            id="two-epochs",
        ),
        *(
            pytest.param(
                dict(max_steps=STEPS, accumulate_grad_batches=4, limit_train_batches=limit),
                rf"trainer\.limit_train_batches must be 1\.0 unless trainer\.max_epochs is 1; got {limit}\. To train",
                id=f"limit-{limit}",
            )
            for limit in (1, 0.5)
        ),
    ],
)
def test_a_trainer_that_would_repeat_or_leave_out_rows_is_refused(settings, message, tmp_path):
    recorder = Recorder()
    with pytest.raises(ValueError, match=f"^{message}"):
        trainer(tmp_path, **settings).fit(recorder, datamodule=make())
    assert not recorder.seen


def test_a_rank_with_other_documents_than_rank_0_is_refused(tmp_path, monkeypatch):
    """The rows of a step would come from two orders of documents, so rows would be missing or repeated."""
    recorder, own = Recorder(), trainer(tmp_path, max_steps=STEPS, accumulate_grad_batches=4)

    def broadcast(values):
        """Lightning also broadcasts values that are no dict."""
        return values | {"packing/documents": 1} if isinstance(values, dict) else values

    monkeypatch.setattr(own.strategy, "broadcast", broadcast)
    with pytest.raises(ValueError, match=r"must read the same documents; got packing/documents=\d+ on .* and 1"):
        own.fit(recorder, datamodule=make())
    assert not recorder.seen


def test_rank_0_alone_may_ask_for_another_loader(tmp_path, monkeypatch):
    """If only rank 0 called broadcast, torch could pair it with the other ranks' all-reduce of gradients."""

    class Peek(L.Callback):
        def on_train_start(self, trainer, pl_module):
            monkeypatch.setattr(trainer.strategy, "broadcast", lambda values: pytest.fail("the other ranks are absent"))
            next(iter(trainer.datamodule.train_dataloader()))
            monkeypatch.undo()

    own = trainer(tmp_path, max_steps=STEPS, accumulate_grad_batches=4, callbacks=[Peek()])
    own.fit(Recorder(), datamodule=make())
    assert own.global_step == STEPS


class StepsItself(Recorder):
    """Accumulates gradients itself. Lightning then requires accumulate_grad_batches=1."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx).backward()
        if batch_idx % 4 == 3:
            self.optimizers().step()


@pytest.mark.parametrize(
    ("recorder", "settings", "steps"),
    [
        pytest.param(Recorder, dict(max_steps=STEPS, accumulate_grad_batches=4), STEPS, id="steps"),
        pytest.param(Recorder, dict(max_steps=1, accumulate_grad_batches=4), 1, id="fewer-steps"),
        pytest.param(Recorder, dict(max_epochs=1, accumulate_grad_batches=4), STEPS, id="one-epoch"),
        pytest.param(StepsItself, dict(max_steps=STEPS), STEPS, id="manual-optimization"),
    ],
)
def test_each_row_is_trained_on_once(recorder, settings, steps, tmp_path):
    module, data = recorder(), make()
    running = trainer(tmp_path, **settings)
    running.fit(module, datamodule=data)
    assert running.global_step == steps
    rows = PackedRows(data, held_out=False, shuffle=True)
    assert rows_of(module.seen) == rows_of([rows.batch(0, 8 * steps)["tokens"]])


def test_a_validation_needs_no_settings_of_the_training(tmp_path):
    trainer(tmp_path).validate(Recorder(), datamodule=make(), verbose=False)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda data: data.setup("fit"), id="setup"),
        pytest.param(lambda data: data.train_dataloader(), id="train_dataloader"),
        pytest.param(lambda data: data.val_dataloader(), id="val_dataloader"),
    ],
)
def test_a_data_module_without_a_trainer_says_how_to_read_rows(use):
    with pytest.raises(ValueError, match=r"^a data module needs a trainer, .*PackedRows\(data, "):
        use(make())


@pytest.mark.parametrize(
    ("vocab_size", "fields", "message"),
    [
        pytest.param(41, {}, "the model's vocab_size must be at least .*, 41; got 40", id="vocabulary"),
        pytest.param(
            40,
            {"positions": "learned", "max_seq_len": LENGTH - 1},
            f".*documents of at most model.max_seq_len=15 tokens; got {LENGTH}",
            id="learned-positions",
        ),
    ],
)
@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_model_with_too_few_embeddings_is_refused(run, vocab_size, fields, message, tmp_path):
    module, data = Recorder(), make()
    module.model, data.source.vocab_size = build(**fields), vocab_size
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(trainer(tmp_path, max_steps=STEPS, accumulate_grad_batches=4), run)(module, datamodule=data)


@pytest.mark.slow
@needs_ports
def test_lightning_keeps_the_rows_of_each_rank(tmp_path):
    start_server()
    torch.multiprocessing.start_processes(
        in_two_processes, args=(tmp_path, ranks_of_torchrun(2)), nprocs=2, start_method="forkserver"
    )
    data = make()
    for name, held_out, count in (("trained", False, 8 * STEPS), ("validated", True, 4)):
        seen = [batch for rank in range(2) for batch in torch.load(tmp_path / f"{name}{rank}.pt")]
        assert rows_of(seen) == rows_of([PackedRows(data, held_out=held_out, shuffle=True).batch(0, count)["tokens"]])


class RecordsValidation(Recorder):
    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["tokens"])


def in_two_processes(rank, folder, environments):
    os.environ.update(environments[rank])
    torch.set_num_threads(1)
    module, data = RecordsValidation(), make()
    settings = dict(strategy="ddp", devices=2, max_steps=STEPS, accumulate_grad_batches=2, limit_val_batches=0)
    trainer(folder, **settings).fit(module, datamodule=data)
    trainer(folder, strategy="ddp", devices=2).validate(module, datamodule=data, verbose=False)
    torch.save(module.seen, folder / f"trained{rank}.pt")
    torch.save(module.validated, folder / f"validated{rank}.pt")
