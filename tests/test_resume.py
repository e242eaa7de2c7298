"""A resumed run draws the same random numbers as a run that never stopped."""

import os
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from fa_train import training
from fa_train.parallel.sharded_checkpoint import CheckpointFiles
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.training import column, composed, tiny, write_corpus

pytestmark = pytest.mark.slow

SMALL = (
    "model.n_layers=1", "max_steps=6", "callbacks.checkpoint.every_n_train_steps=3",
    "callbacks.checkpoint.save_top_k=-1", "data.micro_batch_size=1", "optimizer.lr=2e-2",
)  # fmt: skip
RANDOM = {
    "dropout": ["adapter=lora", "adapter.lora_dropout=0.5"],
    "adamw_8bit": ["optimizer=adamw_8bit", "trainer.precision=bf16-true"],
    "adamw_bf16": ["optimizer=adamw_bf16", "trainer.precision=bf16-true"],
}


@pytest.fixture(autouse=True)
def _plain_arithmetic(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # on some CPUs, oneDNN's bf16 matmuls crash
    with torch.compiler.set_stance("force_eager"):  # keeps torchao from compiling an update for each shape
        yield


def run(folder: Path, *overrides: str) -> Path:
    folder.mkdir()
    with composed(folder, *tiny(folder.parent, *SMALL, *overrides)) as cfg:
        training.train(cfg)
    return folder


def from_step_three(whole: Path) -> str:
    return f"ckpt_path={whole}/checkpoints/step_0000003.ckpt"


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_a_run_never_stopped(name, tmp_path):
    whole = run(tmp_path / "whole", *RANDOM[name])
    losses = column(whole, "train/loss")
    resumed = column(run(tmp_path / "resumed", *RANDOM[name], from_step_three(whole)), "train/loss")
    assert resumed == {step: losses[step] for step in (4, 5, 6)}
    other = column(run(tmp_path / "other", *RANDOM[name], from_step_three(whole), "lit_gpt.seed=1"), "train/loss")
    assert other[6] != losses[6], "randomness must affect the run"


class Seen(Callback):
    """Records the settings of the optimizer at each step of the latest run in this process."""

    groups: ClassVar[dict[int, list[dict[str, Any]]]] = {}

    def on_fit_start(self, trainer, pl_module) -> None:
        self.groups.clear()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        names = ("lr", "weight_decay", "betas", "eps", "fused")
        settings = [{name: group.get(name) for name in names} for group in optimizer.param_groups]
        self.groups[trainer.global_step + 1] = settings


SEEN = "+callbacks.seen._target_=tests.test_resume.Seen"
OPTIMIZERS = {
    "adamw": ["optimizer=adamw"],
    "adamw_8bit": ["optimizer=adamw_8bit"],
    "adamw_bf16": ["optimizer=adamw_bf16", "trainer.precision=bf16-true"],
    "adamw_master": ["optimizer=adamw_master", "trainer.precision=bf16-true"],
    "adamw_offload": ["optimizer=adamw_offload", "trainer.accelerator=gpu"],
}
ON_GPU = pytest.param("adamw_offload", marks=pytest.mark.gpu)
CHANGED = (
    "optimizer.lr=1e-3", "optimizer.weight_decay=0.3", "optimizer.betas=[0.8,0.9]", "optimizer.eps=1e-6",
    "scheduler.warmup_steps=8", "max_steps=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Returns a dictionary {optimizer: run}, to which `run_of` adds each run when it is first needed.

    The entry for the key "" is the folder that contains the folders of all runs.
    """
    return {"": tmp_path_factory.mktemp("runs")}


def run_of(name: str, runs: dict[str, Path]) -> Path:
    if name not in runs:
        runs[name] = run(runs[""] / name, *OPTIMIZERS[name])
    return runs[name]


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adamw_master", ON_GPU])
def test_changed_settings_count_from_the_first_step(name, runs, tmp_path):
    whole = run_of(name, runs)
    folder = run(tmp_path / "changed", *OPTIMIZERS[name], *CHANGED, from_step_three(whole), SEEN)
    rates = column(folder, "lr")
    # eight steps of warm-up to 1e-3, step 9 at the peak, and step 10 in the middle of a cosine decay
    assert rates == pytest.approx({step: 1e-3 * min(step, 8) / 8 for step in range(4, 10)} | {10: 0.55e-3})
    for step, groups in Seen.groups.items():
        assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
        for group in groups:
            assert group["lr"] == pytest.approx(rates[step])
            assert tuple(group["betas"]) == (0.8, 0.9) and group["eps"] == 1e-6


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adamw_master", ON_GPU])
def test_a_learning_rate_of_zero_leaves_the_weights(name, runs, tmp_path):
    """The update uses the learning rate in `param_groups`, which the resumed run sets to 0."""
    whole = run_of(name, runs)
    folder = run(tmp_path / "still", *OPTIMIZERS[name], "optimizer.lr=0", from_step_three(whole))
    before, after = (
        torch.load(path / "checkpoints" / f"step_000000{step}.ckpt", weights_only=True)["state_dict"]
        for path, step in ((whole, 3), (folder, 6))
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_a_fused_optimizer_goes_on_from_one_that_was_not(runs, tmp_path):
    whole = run(tmp_path / "whole", "optimizer.fused=false")
    resumed = run(tmp_path / "resumed", "optimizer.fused=true", from_step_three(whole), SEEN)
    assert all(group["fused"] for groups in Seen.groups.values() for group in groups)
    expected = column(whole, "train/loss")
    assert column(resumed, "train/loss") == pytest.approx({step: expected[step] for step in (4, 5, 6)}, rel=1e-5)


@pytest.mark.parametrize(
    ("saved", "given"),
    [
        ("adamw_8bit", "adamw"),
        ("adamw_8bit", "adamw_bf16"),
        ("adamw_bf16", "adamw_8bit"),
        ("adamw_bf16", "adamw_master"),
        ("adamw_master", "adamw_bf16"),
        ("adamw", "adamw_offload"),
        pytest.param("adamw_offload", "adamw", marks=pytest.mark.gpu),
    ],
)
def test_another_kind_of_optimizer_is_refused(saved, given, runs, tmp_path):
    whole = run_of(saved, runs)
    on_cpu = "trainer.accelerator=cpu"
    with pytest.raises(ValueError, match=rf"checkpoint of optimizer={given}; got one of optimizer={saved}$"):
        run(tmp_path / "other", *OPTIMIZERS[given], from_step_three(whole), on_cpu)
    assert not list((tmp_path / "other").rglob("*.ckpt*"))


def rmsprop(model: torch.nn.Module, *, lr: float, **others: Any) -> torch.optim.Optimizer:
    """Returns an optimizer whose states have other names than AdamW's states."""
    return torch.optim.RMSprop(model.parameters(), lr=lr)


def test_a_run_with_a_users_own_optimizer_goes_on(tmp_path):
    own = "optimizer._target_=tests.test_resume.rmsprop"
    whole = run(tmp_path / "whole", own)
    losses = column(whole, "train/loss")
    resumed = run(tmp_path / "resumed", own, from_step_three(whole))
    assert column(resumed, "train/loss") == {step: losses[step] for step in (4, 5, 6)}


FSDP = ("strategy=fsdp", "trainer.devices=2", "trainer.precision=bf16-true")
MASTER = OPTIMIZERS["adamw_master"]
DDP = ("strategy=ddp", "trainer.devices=2")
WITHOUT_A_GRADIENT = ("+callbacks.one_less._target_=tests.test_resume.WithoutAGradient",)


class WithoutAGradient(Callback):
    """Removes the gradient of one parameter in each step, so that the optimizer never makes a state for it."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.param_groups[0]["params"][1].grad = None


def in_two_processes(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    """Trains as one of two ranks, and makes the checks that need two ranks."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    os.environ.update(environments[rank])
    shared = Path(folder)

    def train_in(name: str, *overrides: str) -> Path:
        (shared / name).mkdir(exist_ok=True)
        with composed(shared / name, *tiny(shared, *SMALL, *overrides)) as cfg:
            trainer, lit_gpt, data = training.build(cfg)
            trainer.fit(lit_gpt, datamodule=data, ckpt_path=cfg.ckpt_path)
        if overrides[0] == DDP[0]:
            weights = torch.cat([p.detach().flatten().float() for p in lit_gpt.parameters()])
            gathered = [torch.empty_like(weights) for _ in range(2)]
            dist.all_gather(gathered, weights)
            assert torch.equal(*gathered), "ranks have drawn other numbers"
        return shared / name

    with torch.compiler.set_stance("force_eager"):
        train_in("dropout", *DDP, *RANDOM["dropout"])
        rounded = train_in("ddp", *DDP, *RANDOM["adamw_bf16"])
        for name in ("adamw_bf16", "adamw_master"):
            whole = train_in(f"fsdp-{name}", *FSDP, f"optimizer={name}")
            train_in(f"fsdp-{name}-resumed", *FSDP, f"optimizer={name}", from_step_three(whole))
        sharded = shared / "fsdp-adamw_bf16"
        train_in("fsdp-changed", *FSDP, "optimizer=adamw_bf16", *CHANGED, from_step_three(sharded))
        train_in("fsdp-of-a-file", *FSDP, "optimizer=adamw_bf16", *CHANGED, from_step_three(rounded))
        train_in("fsdp-from-one", *FSDP, *MASTER, "optimizer.lr=0", from_step_three(shared / "one"))
        train_in("fsdp-without-a-state", *FSDP, *MASTER, from_step_three(shared / "without-a-state"))
        partly = train_in("fsdp-without-a-gradient", *FSDP, *MASTER, *WITHOUT_A_GRADIENT)
        train_in("fsdp-without-a-gradient-resumed", *FSDP, *MASTER, *WITHOUT_A_GRADIENT, from_step_three(partly))
        for checkpoint in (sharded, rounded):
            with pytest.raises(ValueError, match=r"of optimizer=adamw; got one of optimizer=adamw_bf16$"):
                train_in("refused", *FSDP, "optimizer=adamw", from_step_three(checkpoint))
    dist.destroy_process_group()


def remove_a_state(run: Path, changed: Path) -> None:
    """Copies a checkpoint without the optimizer state of one parameter, as if the parameter never had a gradient."""
    name = "checkpoints/step_0000003.ckpt"
    checkpoint = torch.load(run / name, weights_only=True)
    del checkpoint["optimizer_states"][0]["state"][1]
    (changed / name).parent.mkdir(parents=True)
    torch.save(checkpoint, changed / name)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, runs) -> Path:
    folder: Path = tmp_path_factory.mktemp("two_ranks")
    write_corpus(folder / "corpus")
    (folder / "one").symlink_to(run_of("adamw_master", runs))
    remove_a_state(folder / "one", folder / "without-a-state")
    start_server()
    arguments = (str(folder), ranks_of_torchrun(2))
    torch.multiprocessing.start_processes(in_two_processes, args=arguments, nprocs=2, start_method="forkserver")
    return folder


@needs_ports
def test_dropout_is_the_same_on_two_processes(two_ranks, tmp_path):
    """Two processes run two micro-batches each per step, so the order of the fp32 sums differs."""
    one = column(run(tmp_path / "one", *RANDOM["dropout"]), "train/loss")
    assert column(two_ranks / "dropout", "train/loss") == pytest.approx(one, rel=1e-5), "fp32 sums in another order"


@needs_ports
@pytest.mark.parametrize("name", ["fsdp-changed", "fsdp-of-a-file"])
def test_changed_settings_count_on_two_ranks(name, two_ranks):
    expected = {step: 1e-3 * min(step, 8) / 8 for step in range(4, 10)} | {10: 0.55e-3}
    assert column(two_ranks / name, "lr") == pytest.approx(expected)


@needs_ports
@pytest.mark.parametrize("name", ["fsdp-adamw_bf16", "fsdp-adamw_master"])
def test_sharded_runs_round_as_if_never_stopped(name, two_ranks):
    """tests/parallel/test_fsdp.py resumes runs with AdamW."""
    losses = column(two_ranks / name, "train/loss")
    assert column(two_ranks / f"{name}-resumed", "train/loss") == {step: losses[step] for step in (4, 5, 6)}


def master_weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Returns the bf16 weights of a checkpoint, and the low bits of their fp32 master weights.

    checkpoint: the file of a run with one process, or the folder of a run with two ranks.
    """
    saved = CheckpointFiles().load_checkpoint(checkpoint)
    states = saved["optimizer_states"][0]["state"]
    low_bits = {str(number): state["low_bits"] for number, state in sorted(states.items())}
    assert all(bits.dtype is torch.int16 and bits.any() for bits in low_bits.values())
    return saved["state_dict"] | low_bits


def test_master_weights_are_those_of_a_run_never_stopped(runs, tmp_path):
    whole = run_of("adamw_master", runs)
    resumed = run(tmp_path / "resumed", *OPTIMIZERS["adamw_master"], from_step_three(whole))
    expected, found = (master_weights_of(path / "checkpoints/step_0000006.ckpt") for path in (whole, resumed))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_ports
@pytest.mark.parametrize(("saved", "given"), [("one", "fsdp-from-one"), ("fsdp-adamw_master", "one-from-fsdp")])
def test_master_weights_move_to_another_number_of_ranks(saved, given, two_ranks):
    """The resumed run has a learning rate of 0, so it must save the same master weights that it has loaded."""
    if given == "one-from-fsdp":
        run(two_ranks / given, *MASTER, "optimizer.lr=0", from_step_three(two_ranks / saved))
    before, after = (
        master_weights_of(two_ranks / name / "checkpoints" / f"step_000000{step}.ckpt")
        for name, step in ((saved, 3), (given, 6))
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@needs_ports
def test_two_ranks_go_on_although_a_parameter_has_no_state(two_ranks):
    assert sorted(column(two_ranks / "fsdp-without-a-state", "train/loss")) == [4, 5, 6]
    whole, resumed = (
        column(two_ranks / f"fsdp-without-a-gradient{suffix}", "train/loss") for suffix in ("", "-resumed")
    )
    assert resumed == {step: loss for step, loss in whole.items() if step > 3}


@needs_ports
def test_master_weights_of_two_ranks_train_as_on_one(two_ranks):
    """With two ranks, bf16 gradients are added in another order than with one rank."""
    one, two = (column(two_ranks / name, "train/loss") for name in ("one", "fsdp-adamw_master"))
    assert two == pytest.approx(one, rel=5e-3)
