"""Trains with strategy=fsdp in two processes on the CPU."""

import itertools
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

from fa_train import training
from fa_train.callbacks.checkpoint import Checkpoint
from fa_train.callbacks.monitor import Monitor
from fa_train.checkpoints.files import CheckpointError
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.memory.planner.plan import Plan
from fa_train.memory.planner.predict import predict
from fa_train.models.attention import sdpa_attention
from fa_train.models.gpt import GPT
from fa_train.models.shards import local, whole
from fa_train.optim.resume import TRAINED_WEIGHTS
from fa_train.parallel.agreement import Agreement
from fa_train.parallel.fsdp import FullyShardedStrategy, shard
from fa_train.parallel.sharded_checkpoint import load_sharded, read_parts
from scripts import trained_model
from tests.memory.support.plans import LLAMA_1B, changed
from tests.parallel.support.runs import SETTINGS, train_in
from tests.support.pickles import Evil
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.runs import start_and_stop
from tests.support.training import column, command_line, composed, tiny, write_corpus

pytestmark = [pytest.mark.slow, needs_ports]
RANKS = ("strategy=fsdp", "trainer.devices=2")
FROZEN = ("+callbacks.freeze._target_=tests.checkpoints.support.callbacks.FreezeAfterStepTwo",)
UNFROZEN = ("+callbacks.unfreeze._target_=tests.checkpoints.support.callbacks.UnfreezeAfterStepTwo",)
CUT = ("+callbacks.cut._target_=tests.parallel.test_fsdp.SignalToRankOne",)


class OwnAveraging(EMAWeightAveraging):
    def setup(self, trainer, pl_module, stage) -> None:
        super().setup(trainer, pl_module, stage)


class SignalToRankOne(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class SpoilRankOne(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 6 and trainer.global_rank == 1:
            local(next(pl_module.parameters()).detach()).fill_(float("nan"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """Two ranks cannot share the three validation rows evenly."""
    folder: Path = tmp_path_factory.mktemp("strategy")
    for number in range(100):
        (write_corpus(folder / "corpus") / f"more_{number}.txt").write_text(f"{number} more " * 20)
    return folder


@pytest.fixture(scope="module")
def whole_run(shared) -> Path:
    return train_in(shared / "whole", shared, "export=true")


def lora(shared: Path) -> tuple[str, ...]:
    """Returns overrides that train an adapter of the model that `whole_run` has exported."""
    return "adapter=lora", "optimizer.lr=0.01", "model=pretrained", f"model.pretrained={shared}/whole/exported"


@pytest.fixture(scope="module")
def adapter_run(shared, whole_run) -> Path:
    return train_in(shared / "adapter", shared, *lora(shared))


def write_evil(folder: Path, in_metadata: bool) -> None:
    """Puts a pickled program into a sharded checkpoint, in place of its metadata or of a value that is not a tensor."""
    program = Evil(folder.parent / "ran")
    if in_metadata:
        (folder / ".metadata").write_bytes(pickle.dumps(program))
        return
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = next(stored for index, stored in metadata.storage_data.items() if index.fqn.endswith(".lr"))
    with (folder / stored.relative_path).open("ab") as file:
        stored.offset = file.tell()
        torch.save(program, file)
        stored.length = file.tell() - stored.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def two_ranks(shared, whole_run, adapter_run) -> Path:
    start_server()
    arguments = (str(shared), ranks_of_torchrun(2))
    torch.multiprocessing.start_processes(in_two_processes, args=arguments, nprocs=2, start_method="forkserver")
    return shared


def in_two_processes(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    """All tests with two ranks use the same two processes, because each process takes seconds to start."""
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    shared = Path(folder)
    step_three = "checkpoints/step_0000003.ckpt"
    methods = dict(vars(FSDPParamGroup))
    train_in(shared / "sharded", shared, *RANKS, "export=true")
    assert dict(vars(FSDPParamGroup)) == methods, "the measurement of communication leaves no wrapper behind"
    train_in(shared / "two_from_two", shared, *RANKS, f"ckpt_path={shared}/sharded/{step_three}")
    train_in(shared / "two_from_one", shared, *RANKS, f"ckpt_path={shared}/whole/{step_three}")
    with pytest.raises(SystemExit) as ended:
        train_in(shared / "cut", shared, *RANKS, *CUT)
    assert ended.value.code == 128 + signal.SIGTERM
    dist.barrier()  # wait until rank 0 has renamed the checkpoint
    newest = max((shared / "cut" / "checkpoints").iterdir())
    train_in(shared / "two_from_cut", shared, *RANKS, f"ckpt_path={newest}")
    train_in(shared / "sharded_adapter", shared, *RANKS, *lora(shared), "memory.mlp_chunk=16")
    for run, start in (("two_from_two_adapters", "sharded_adapter"), ("two_from_one_adapter", "adapter")):
        train_in(shared / run, shared, *RANKS, *lora(shared), f"ckpt_path={shared}/{start}/{step_three}")
    train_in(shared / "sharded_frozen", shared, *RANKS, *FROZEN)
    train_in(shared / "ddp_frozen", shared, *RANKS, "strategy=ddp", "+strategy.find_unused_parameters=true", *FROZEN)
    train_in(shared / "sharded_unfrozen", shared, *RANKS, *UNFROZEN)
    train_in(shared / "two_from_two_frozen", shared, *RANKS, *FROZEN, f"ckpt_path={shared}/sharded_frozen/{step_three}")
    with pytest.raises(ValueError, match=r"by this run: none; .* run: model\.token_embedding"):
        others = "adapter._target_=tests.checkpoints.support.callbacks.freeze_embedding"
        train_in(shared / "others_frozen", shared, *RANKS, others, f"ckpt_path={shared}/whole/{step_three}")
    for case in ("evil_item", "evil_metadata"):
        if rank == 0:
            shutil.copytree(shared / "sharded" / step_three, shared / f"{case}.ckpt")
            write_evil(shared / f"{case}.ckpt", in_metadata=case == "evil_metadata")
        dist.barrier()
        refuse(shared, case)
    for strategy in ("fsdp", "ddp"):
        fill_the_disk(shared, strategy)
    spoil_one_rank(shared)
    agree(rank)
    compare_gradients(rank)
    dist.destroy_process_group()


def refuse(shared: Path, case: str) -> None:
    """Every rank raises an error and runs no code from the checkpoint, even if the checks of ckpt_path are skipped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.resume, "checkpoint_path", lambda path, *_: path)
        patch.setattr(training.resume, "steps_done", lambda *_: 0)
        with pytest.raises(CheckpointError, match="is damaged or is not a checkpoint of"):
            train_in(shared / f"from_{case}", shared, *RANKS, f"ckpt_path={shared}/{case}.ckpt")
    assert not (shared / "ran").exists()


def fill_the_disk(shared: Path, strategy: str) -> None:
    run = shared / f"full_{strategy}"
    full = ("+callbacks.full._target_=tests.checkpoints.support.callbacks.FullDisk", "+callbacks.full.step=6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", torch.save)  # FullDisk replaces torch.save; the end of this block restores it
        with pytest.raises(CheckpointError, match=r"step_0000006.ckpt could not be written: File too large"):
            train_in(run, shared, *RANKS, f"strategy={strategy}", *full)
    dist.barrier()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_0000003.ckpt"]


def spoil_one_rank(shared: Path) -> None:
    train_in(shared / "spoilt", shared, *RANKS, "+callbacks.spoil._target_=tests.parallel.test_fsdp.SpoilRankOne")
    assert [path.name for path in (shared / "spoilt" / "checkpoints").iterdir()] == ["step_0000003.ckpt"]


def agree(rank: int) -> None:
    """Calls Agreement.largest five times on each rank. Before each call, one of the two ranks sleeps.

    In call 2, rank 0 passes 1. In call 3, rank 1 passes 143, the exit code after SIGTERM. Calls 4 and 5 must return 143
    on both ranks, even if one rank is faster.
    """
    agreement = Agreement()
    answers = []
    for question in range(5):
        time.sleep(0.05 * (rank == question % 2))
        answers.append(agreement.largest({(0, 1): 1, (1, 2): 143}.get((rank, question), 0)))
    assert answers == [0, 0, 1, 143, 143]


@pytest.fixture(scope="module")
def sharded_run(two_ranks) -> Path:
    return two_ranks / "sharded"


def assert_goes_on(run: Path, whole_run: Path) -> None:
    losses, expected = (column(folder, "train/loss") for folder in (run, whole_run))
    assert sorted(losses) == [4, 5, 6]
    assert losses == pytest.approx({step: expected[step] for step in (4, 5, 6)}, rel=1e-5)


def test_two_ranks_have_the_losses_of_one(whole_run, sharded_run):
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        one, two = column(whole_run, name), column(sharded_run, name)
        assert len(one) and two == pytest.approx(one, rel=1e-5), "fp32 sums in another order"  # labels differ by rank


@pytest.mark.parametrize("step", [3, 6], ids=["before-validation", "after-validation"])
def test_a_sharded_checkpoint_names_the_trained_weights_as_a_file_does(whole_run, sharded_run, step):
    parts = (read_parts(run / f"checkpoints/step_000000{step}.ckpt")[0] for run in (whole_run, sharded_run))
    whole, sharded = (part[TRAINED_WEIGHTS] for part in parts)
    assert whole == sharded and "model.token_embedding.weight" in whole[0]


def test_the_ranks_of_a_sharded_run_are_compared(sharded_run):
    waits, times = (column(sharded_run, f"perf/{name}_ms") for name in ("communication", "compute"))
    assert sorted(waits) == sorted(times) == [1, 2, 3, 4, 5, 6]
    assert min(waits.values()) > 0 and min(times.values()) > 0


def test_a_sharded_checkpoint_is_a_folder_with_a_part_a_rank(sharded_run):
    checkpoints = sorted((sharded_run / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step_0000003.ckpt", "step_0000006.ckpt"], (
        "no checkpoint is .partial"
    )
    sizes = [[(path / f"__{rank}_0.distcp").stat().st_size for rank in range(2)] for path in checkpoints]
    for first, second in sizes:
        assert 0.4 < first / (first + second) < 0.6, "no rank has the whole model"


def test_a_sharded_run_exports_what_one_process_does(whole_run, sharded_run, tmp_path):
    for run in (whole_run, sharded_run):
        trained_model.export(run / "checkpoints/step_0000006.ckpt", tmp_path / run.parent.name / run.name, [], None)
    whole, exported = (tmp_path / run.parent.name / run.name for run in (whole_run, sharded_run))
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (whole, exported))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    for name in ("config.json", "tokenizer.json"):
        assert (exported / name).read_text() == (whole / name).read_text()
    at_its_end = sharded_run / "exported" / "model.safetensors"
    assert at_its_end.read_bytes() == (exported / "model.safetensors").read_bytes(), "export=true writes the same"


@pytest.mark.parametrize("run", ["two_from_two", "two_from_one"])
def test_two_ranks_go_on(run, whole_run, two_ranks):
    assert_goes_on(two_ranks / run, whole_run)


@pytest.mark.parametrize("run", ["two_from_two_adapters", "two_from_one_adapter"])
def test_two_ranks_go_on_with_an_adapter(run, adapter_run, two_ranks):
    assert_goes_on(two_ranks / run, adapter_run)


def test_a_sharded_checkpoint_of_an_adapter_holds_no_base(shared, adapter_run, two_ranks, tmp_path):
    folder = two_ranks / "sharded_adapter" / "checkpoints" / "step_0000003.ckpt"
    content = load_sharded(folder)
    assert content["state_dict"] and all("lora_" in name for name in content["state_dict"])
    rest = train_in(shared / "one_from_two_adapters", shared, *lora(shared), f"ckpt_path={folder}")
    assert_goes_on(rest, adapter_run)
    for name in ("adapter", "sharded_adapter"):
        trained_model.export(shared / name / "checkpoints/step_0000006.ckpt", tmp_path / name, [], None)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("adapter", "sharded_adapter"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_a_sharded_checkpoint_holds_weights_that_are_frozen_without_an_adapter(shared, two_ranks, tmp_path):
    assert_goes_on(two_ranks / "two_from_two_frozen", two_ranks / "sharded_frozen")
    three, six = (
        load_sharded(two_ranks / f"sharded_frozen/checkpoints/step_000000{step}.ckpt")["state_dict"] for step in (3, 6)
    )
    embedding = "model.token_embedding.weight"
    assert three.keys() == six.keys() and torch.equal(three[embedding], six[embedding])
    trained_model.export(two_ranks / "sharded_frozen/checkpoints/step_0000006.ckpt", tmp_path / "exported", [], None)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert any(torch.equal(weight, six[embedding]) for weight in exported.values())


@pytest.mark.parametrize(
    ("runs", "change"),
    [
        pytest.param(["ddp_frozen", "sharded_frozen"], FROZEN, id="frozen"),
        pytest.param(["sharded_unfrozen"], UNFROZEN, id="unfrozen"),
    ],
)
def test_the_settings_that_ddp_advises_after_a_change_have_the_losses_of_one(runs, change, shared, two_ranks):
    one = train_in(shared / f"one_{runs[0]}", shared, *change)
    for run, name in itertools.product(runs, ("train/loss", "train/grad_norm")):
        assert column(two_ranks / run, name) == pytest.approx(column(one, name), rel=1e-5), (run, name)


@pytest.mark.parametrize("in_metadata", [True, False], ids=["metadata", "item"])
def test_one_process_runs_no_code_of_a_sharded_checkpoint(in_metadata, shared, sharded_run, tmp_path):
    folder = shutil.copytree(sharded_run / "checkpoints/step_0000003.ckpt", tmp_path / "x.ckpt")
    write_evil(tmp_path / "x.ckpt", in_metadata)
    done = command_line(tmp_path, *tiny(shared, *SETTINGS, f"ckpt_path={folder}"))
    assert done.returncode == 1 and not (tmp_path / "ran").exists()
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {folder} is damaged or is not a checkpoint")


def test_a_signal_to_one_rank_saves_at_one_step_of_both(whole_run, two_ranks):
    cut, rest = (column(two_ranks / run, "train/loss") for run in ("cut", "two_from_cut"))
    assert max(cut) in (4, 5) and sorted(cut | rest) == [1, 2, 3, 4, 5, 6] and min(rest) == max(cut) + 1
    assert cut | rest == pytest.approx(column(whole_run, "train/loss"), rel=1e-5)


def test_one_rank_goes_on_from_two(shared, whole_run, sharded_run):
    start = f"ckpt_path={sharded_run}/checkpoints/step_0000003.ckpt"
    assert_goes_on(train_in(shared / "one_from_two", shared, start), whole_run)


def test_last_is_the_newest_folder(sharded_run):
    found = training.resume.checkpoint_path("last", sharded_run)
    assert found == str(sharded_run / "checkpoints/step_0000006.ckpt")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["trainer.devices=1"], "at least 2 devices; got 1", id="one-device"),
        pytest.param(["adapter=qlora"], "4-bit weights; got adapter=qlora", id="qlora"),
        pytest.param(["optimizer=adamw_8bit"], "needs optimizer=adamw.* got adamw_8bit", id="8-bit"),
        pytest.param(["strategy.context=3"], "must divide the number of devices, 2; got 3", id="context"),
        pytest.param(["optimizer=adamw_offload"], "needs optimizer=adamw.* got adamw_offload", id="offload"),
        pytest.param(["strategy.head_groups=1000"], "divide the . KV heads of the model; got 1000", id="head-groups"),
        pytest.param(
            ["strategy.head_groups=2", "attention=flash"], "needs attention=flash and strategy.context",
            id="head-groups-without-context",
        ),
        pytest.param(
            ["strategy.head_groups=2", "attention=sdpa", "strategy.context=2"], "got attention=sdpa",
            id="head-groups-without-flash",
        ),
        pytest.param(
            ["+callbacks.ema._target_=lightning.pytorch.callbacks.EMAWeightAveraging"],
            "fsdp cannot average weights; got the callback EMAWeightAveraging", id="averaging",
        ),
        pytest.param(
            [f"+callbacks.mine._target_={__name__}.OwnAveraging"],
            "fsdp cannot average weights; got the callback OwnAveraging", id="own-averaging",
        ),
        pytest.param(["strategy.replicas=2"], "divide the 2 devices into groups of at least 2; got 2", id="copies"),
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_named_before_anything_is_computed(overrides, message, tmp_path):
    settings = dict(override.split("=", 1) for override in (*RANKS, *overrides))
    with (
        composed(tmp_path, *tiny(tmp_path, *(f"{name}={value}" for name, value in settings.items()))) as cfg,
        pytest.raises(ValueError, match=message),
    ):
        training.build(cfg)


def test_groups_of_heads_reach_the_plan_and_the_attention(tmp_path, monkeypatch):
    planned: list[Plan] = []
    monkeypatch.setattr(training, "plan_memory", lambda plan, *args, **options: planned.append(plan) or plan)
    monkeypatch.setattr(FullyShardedStrategy, "shard", lambda *arguments: None)
    settings = (*RANKS, "attention=flash", "strategy.context=2", "strategy.head_groups=2")
    with composed(tmp_path, *tiny(tmp_path, *settings)) as cfg:
        trainer, lit_gpt, _ = training.build(cfg)
    lit_gpt.trainer = trainer
    lit_gpt.configure_model()
    assert [plan.run.head_groups for plan in planned] == [2]
    assert {block.attention.attend.head_groups for block in lit_gpt.model.blocks} == {2}


@pytest.mark.parametrize(
    ("world_size", "exception", "saves"),
    [
        (2, SIGTERMException(), True),
        (2, RuntimeError("of one rank"), False),
        (1, RuntimeError("of the only one"), True),
    ],
)
def test_an_error_of_one_rank_waits_for_no_other(world_size, exception, saves, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Checkpoint, "_save", lambda self, trainer, module: saved.append(module))
    trainer = SimpleNamespace(
        world_size=world_size, strategy=SimpleNamespace(launcher=None), print=print, callbacks=[Monitor(1, 1, None)],
        global_step=1,
    )  # fmt: skip
    checkpoint = Checkpoint(str(tmp_path), "mine", 1, 2, keep_best=False, save_on_exception=True, asynchronous=True)
    checkpoint.on_exception(trainer, None, exception)
    assert bool(saved) == saves


LONG = ("data.val_rows=2", "max_steps=40", "trainer.val_check_interval=40")
DDP = (*LONG, "strategy=ddp", "trainer.devices=2", "data.num_workers=1", "run_name=stopped")


@pytest.fixture(scope="module")
def stopped_run(shared) -> Path:
    """Sends SIGTERM to all processes of a run at once, as SLURM does."""
    return start_and_stop(shared, tiny(shared, *DDP), 7, signal.SIGTERM, to_all=True)


def test_a_signal_to_all_processes_saves_and_stops(stopped_run):
    steps = sorted(column(stopped_run, "train/loss"))
    assert 7 <= len(steps) < 40, "the run ended before the signal came"
    assert [path.name for path in (stopped_run / "checkpoints").iterdir()] == [f"step_{steps[-1]:07d}.ckpt"]


def test_a_stopped_run_goes_on_and_stops_by_its_main_process_too(stopped_run, shared):
    again = start_and_stop(shared, tiny(shared, *DDP, "ckpt_path=last"), 20, signal.SIGTERM)
    [newest] = (again / "checkpoints").iterdir()
    rest = train_in(shared / "rest", shared, *LONG, f"ckpt_path={newest}")
    parts = [column(folder, "train/loss") for folder in (stopped_run, again, rest)]
    assert sum(len(part) for part in parts) == 40, "no step is done twice"
    whole = column(train_in(shared / "unstopped", shared, *LONG), "train/loss")
    assert parts[0] | parts[1] | parts[2] == pytest.approx(whole, rel=1e-4), "fp32 sums in another order"


def small_gpt(tied: bool, memory: Memory) -> GPT:
    torch.manual_seed(0)
    return GPT(
        vocab_size=67, n_layers=3, dim=16, n_heads=2, n_kv_heads=1, head_dim=None, ffn_dim=24, norm="rmsnorm",
        norm_eps=1e-5, positions="rope", rope_theta=1e4, max_seq_len=None, activation="swiglu", bias=True,
        qk_norm=True, tied=tied, init="gpt2", attention=sdpa_attention, loss=memory.loss, memory=memory,
    )  # fmt: skip


LOSS = LinearCrossEntropy(chunk_size=5)
CASES = {
    "untied": (False, Memory("selective", False, 4, LOSS)),
    "tied": (True, Memory("none", False, None, LOSS)),
}


def gradients(model: GPT, tokens: Tensor, mixed: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(tokens[:-1], labels=tokens[1:])
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare_gradients(rank: int) -> None:
    """In bf16-mixed, the loss on each rank equals the loss of an unsharded model. The gradients equal the mean of the
    unsharded model's gradients on the data of the two ranks. test_sharding.py tests fp32.
    """
    torch.backends.mkldnn.set_flags(False)  # on some CPUs, oneDNN has no bf16
    mesh = init_device_mesh("cpu", (2,))
    streams = torch.randint(67, (2, 18), generator=torch.Generator().manual_seed(1))
    for name, (tied, memory) in CASES.items():
        expected = [gradients(small_gpt(tied, memory), stream) for stream in streams]
        exact = [gradients(small_gpt(tied, memory), stream, mixed=False) for stream in streams]
        model = small_gpt(tied, memory)
        elements = sum(p.numel() for p in model.parameters())
        shard(model, mesh, "bf16-mixed")
        parameters = list(model.parameters())
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in parameters)
        assert sum(local(p).numel() for p in parameters) < 0.6 * elements
        loss, ours = gradients(model, streams[rank])
        torch.testing.assert_close(loss, expected[rank][0], rtol=1e-3, atol=0)
        assert ours.keys() == expected[0][1].keys()
        for parameter, gradient in ours.items():
            mean = (expected[0][1][parameter] + expected[1][1][parameter]) / 2
            # The tolerance is twice the error of bf16 without sharding, plus rounding of norm weights and gradients.
            of_bf16 = (mean - (exact[0][1][parameter] + exact[1][1][parameter]) / 2).abs().max()
            atol = float(2 * of_bf16 + 2**-7 * mean.abs().max())
            error = float((whole(gradient) - mean).abs().max())
            assert error <= atol, (name, parameter, error)


def test_the_planner_counts_a_part_a_rank():
    plan = changed(
        LLAMA_1B, n_layers=32, dim=4096, head_dim=128, ffn_dim=14336, tied=False, checkpointing="full",
        accumulates=True, compiled=True,
    )  # fmt: skip
    one, four, eight = (predict(changed(plan, ranks=ranks)) for ranks in (1, 4, 8))
    assert one.optimizer == 4 * four.optimizer == 8 * eight.optimizer
    assert one.gpu_bytes > 120 * 2**30 > four.gpu_bytes > eight.gpu_bytes > one.gpu_bytes / 8
    gathered = 128256 * 4096 * 4
    assert eight.weights > one.weights / 8 + gathered, "embeddings or head are gathered whole"
    kept, whole = (
        predict(changed(plan, ranks=8, **x)) for x in ({"reshard_after_forward": False}, {"reduce_once": True})
    )
    assert kept.weights - eight.weights > 0.8 * one.weights / 2, "all blocks are gathered in bf16"
    assert whole.gradients - eight.gradients > 0.8 * one.weights, "whole gradients are in fp32"
