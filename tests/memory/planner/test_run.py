"""Tests the plan of a run: what train.py prints and refuses, and what memory=auto chooses."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from fa_train import training
from fa_train.memory.memory import Levers
from fa_train.memory.planner import run as planner
from fa_train.memory.planner.levers import longest_of_all_levers, longest_seq_len, next_lever
from fa_train.memory.planner.predict import GIB, predict
from fa_train.parallel.fsdp import FullyShardedStrategy
from scripts.memory_table import memory_table
from tests.memory.support.plans import GPT2, HOST, LLAMA_1B, changed
from tests.support.training import composed, own_option, tiny

CUDA = torch.device("cuda")


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "device_bytes", lambda device: int(139.8 * GIB))
    monkeypatch.setattr(planner, "available_host_bytes", lambda: HOST)
    set_gpu_memory(monkeypatch, free=138 * GIB)


def set_gpu_memory(monkeypatch: pytest.MonkeyPatch, *, free: int, reserved: int = 0) -> None:
    """Makes an H200 tell how much of its memory is free, and torch how much of it this process has reserved."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)


@pytest.mark.usefixtures("an_h200")
def test_a_run_that_cannot_fit_is_refused():
    fitting = changed(LLAMA_1B, seq_len=2**15)
    assert planner.require_memory(fitting, CUDA, 1) == predict(fitting)
    with pytest.raises(ValueError, match=r"needs about \d+.\d GiB of GPU memory; cuda has 139.8 GiB. Try memory\."):
        planner.require_memory(changed(LLAMA_1B, seq_len=2**17), CUDA, 1)
    with pytest.raises(ValueError, match=r"parameters need .* GiB .* cuda has 139.8 GiB. Choose a smaller model"):
        planner.require_memory(changed(LLAMA_1B, n_layers=256), CUDA, 1)
    offloaded = changed(LLAMA_1B, seq_len=2**17, checkpointing="selective", offload=True, mlp_chunk=16384)
    planner.require_memory(offloaded, CUDA, 8)
    with pytest.raises(ValueError, match=r"memory.offload=true needs 15.0 GiB of host memory in each of 9 processes"):
        planner.require_memory(offloaded, CUDA, 9)
    with pytest.raises(ValueError, match=r"adamw_offload needs .* GiB of host memory in each of 8 processes"):
        planner.require_memory(changed(fitting, optimizer="adamw_offload"), CUDA, 8)


@pytest.mark.usefixtures("an_h200")
def test_a_run_slightly_over_the_memory_may_start():
    longest = longest_seq_len(LLAMA_1B, int(139.8 * GIB), HOST)
    tight = changed(LLAMA_1B, seq_len=longest + 4096)
    assert 1.0 < planner.require_memory(tight, CUDA, 1).gpu_bytes / (139.8 * GIB) < 1.1
    printed = planner.summary(predict(tight), CUDA, processes=1, attention="flash")
    assert "this run may not fit. Try memory." in printed


@pytest.mark.usefixtures("an_h200")
def test_a_run_prints_its_plan_and_the_longest_length():
    printed = planner.summary(predict(GPT2), CUDA, processes=1, attention="flash")
    planned, parts, longest = printed.splitlines()
    assert planned == "planned: 4.9 of 139.8 GiB, peak at the loss"
    assert "GiB: weights 0.5, optimizer 0.9, rounded weights 0.1, " in parts and parts.endswith("host 0.0 of 120.0")
    assert longest == f"  the longest seq_len that fits is {longest_seq_len(GPT2, int(139.8 * GIB), HOST):,}"
    farthest = longest_of_all_levers(GPT2, int(139.8 * GIB), HOST)
    printed = planner.summary(predict(changed(GPT2, rows=2)), CUDA, processes=1, attention="flash", auto=True)
    assert printed.splitlines()[-1] == f"  the longest seq_len that fits with memory=auto is {farthest // 2:,}"
    assert farthest > longest_seq_len(GPT2, int(139.8 * GIB), HOST), "memory=auto changes levers for a longer one"


@pytest.mark.usefixtures("an_h200")
def test_auto_chooses_or_says_why_not():
    assert planner.fastest_levers(changed(LLAMA_1B, seq_len=2**17), torch.device("cpu"), 1) == Levers(
        "none", False, None
    )
    assert planner.fastest_levers(changed(LLAMA_1B, seq_len=2**13), CUDA, 1) == Levers("none", False, None)
    chosen = planner.fastest_levers(changed(LLAMA_1B, seq_len=900_000), CUDA, 1)
    assert chosen.offload
    with pytest.raises(
        ValueError, match=r"memory=auto found no memory settings .* 139.8 GiB of cuda .* Try seq_len=\d+ "
    ):
        planner.fastest_levers(changed(LLAMA_1B, seq_len=2**23), CUDA, 1)


@pytest.mark.usefixtures("an_h200")
def test_memory_that_other_processes_use_is_not_planned(monkeypatch):
    plan = changed(LLAMA_1B, seq_len=2**16)
    alone = planner.fastest_levers(plan, CUDA, 1)
    assert not alone.offload and "other processes" not in planner.summary(predict(plan), CUDA, 1, "flash")
    set_gpu_memory(monkeypatch, free=38 * GIB, reserved=100 * GIB)
    assert planner.bytes_of_others(CUDA) == 0 and planner.fastest_levers(plan, CUDA, 1) == alone
    set_gpu_memory(monkeypatch, free=30 * GIB, reserved=10 * GIB)
    assert planner.fastest_levers(plan, CUDA, 1) == Levers("selective", False, None) != alone
    planned, *_, longest, others = planner.summary(predict(plan), CUDA, 1, "flash").splitlines()
    assert "of 39.8 GiB" in planned and others == "  other processes use 100.0 of the 139.8 GiB of cuda"
    assert "this run may not fit" in longest
    planner.require_memory(plan, CUDA, 1)  # not refused, because the other processes may end
    with pytest.raises(ValueError, match=r"fits in 39.8 GiB of cuda \(other processes use 100.0 GiB\) and"):
        planner.fastest_levers(changed(plan, seq_len=2**22), CUDA, 1)


def test_blocks_stay_gathered_if_memory_allows():
    """To find the longest seq_len, the planner assumes that gathered blocks are freed, even if the run keeps them."""
    sharded = ["model=llama_1b", "seq_len=8192", "strategy=fsdp", "trainer.devices=2", "batch_size=2", "host_gib=100"]
    shown = "strategy.reshard_after_forward: "
    roomy, tight = (memory_table([*sharded, f"gpu_gib={gib}"]) for gib in (80, 22))
    freed = memory_table([*sharded, "gpu_gib=80", "strategy.reshard_after_forward=true"])
    # with attention=sdpa, reshard_after_forward=auto means true, because sdpa can need more memory than planned
    other = memory_table([*sharded, "gpu_gib=80", "attention=sdpa"])
    assert f"{shown}false" in roomy and all(f"{shown}true" in text for text in (tight, freed, other))
    assert shown not in memory_table(["model=gpt2", "gpu_gib=80", "host_gib=100"])
    longest = [[line for line in text.splitlines() if line.startswith("longest")] for text in (roomy, freed)]
    assert longest[0] == longest[1] and "fits: yes" in tight


def test_an_own_option_built_on_fsdp_is_planned_like_fsdp(tmp_path):
    own = own_option(tmp_path, "strategy/mine", "defaults: [fsdp, _self_]\ncontext: 2\n")
    sizes = ["model=nano", "batch_size=1", "trainer.devices=2", "gpu_gib=80", "host_gib=10"]
    theirs = memory_table([*sizes, "strategy=fsdp", "strategy.context=2"])
    assert memory_table([*sizes, own, "strategy=mine"]) == theirs
    assert "strategy.reshard_after_forward: false" in theirs and "refuses" not in theirs


@pytest.mark.usefixtures("an_h200")
def test_a_run_chooses_whether_blocks_stay_gathered():
    said: list[str] = []
    sharded = changed(LLAMA_1B, seq_len=2**13, ranks=2)
    plan = planner.plan_memory(
        sharded, CUDA, 2, auto=True, auto_reshard=True, attention="flash", in_sweep=False, say=said.append
    )
    assert not plan.run.reshard_after_forward
    assert "strategy.reshard_after_forward=auto: false" in said
    assert f"planned: {predict(plan).gpu_bytes / GIB:.1f} of" in said[-1]


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(("attention", "resharded"), [("flash", False), ("naive", True)])
def test_the_strategy_and_the_logged_config_get_the_choice(attention, resharded, tmp_path, monkeypatch):
    monkeypatch.setattr(FullyShardedStrategy, "root_device", CUDA)
    strategy = FullyShardedStrategy(1, "auto", False, "float32")
    trainer: Any = SimpleNamespace(strategy=strategy, num_devices=2, world_size=2, precision="bf16-mixed", print=str)
    sharded = tiny(tmp_path, "strategy=fsdp", "trainer.devices=2", "batch_size=2", f"attention={attention}")
    with composed(tmp_path, *sharded) as cfg:
        assert cfg.strategy.reshard_after_forward == "auto"
        training.fill_in_levers(cfg, trainer, vocab_size=257)
        assert strategy.reshard_after_forward is cfg.strategy.reshard_after_forward is resharded


def test_blocks_that_stay_gathered_are_the_first_thing_to_give_up():
    gathered = changed(LLAMA_1B, seq_len=2**13, ranks=2, reshard_after_forward=False)
    between = (predict(gathered).gpu_bytes + predict(changed(gathered, reshard_after_forward=True)).gpu_bytes) // 2
    assert next_lever(gathered, between, HOST) == "strategy.reshard_after_forward=auto"
    far = next_lever(changed(gathered, seq_len=2**17), between, HOST)
    assert far.startswith("strategy.reshard_after_forward=auto memory.")


@pytest.mark.slow
def test_train_fills_in_what_auto_chose(tmp_path, monkeypatch):
    chosen = Levers("selective", True, 32)
    monkeypatch.setattr(planner, "fastest_levers", lambda *arguments: chosen)
    with composed(tmp_path, *tiny(tmp_path, "memory=auto")) as cfg:
        _, lit_gpt, _ = training.build(cfg)
        assert {name: cfg.memory[name] for name in asdict(chosen)} == asdict(chosen), "loggers record these values"
    model = lit_gpt.model
    assert model.offload is not None
    assert (model.memory.checkpointing, model.memory.mlp_chunk) == ("selective", 32)
    with composed(tmp_path, *tiny(tmp_path)) as cfg:
        assert not instantiate(cfg.memory).auto


def printed_plan(folder: Path, devices: int, *overrides: str) -> str:
    """Returns the memory plan that train.py prints for a run on GPUs with one micro-batch per step."""
    printed: list[str] = []
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=CUDA),
        num_devices=devices,
        world_size=devices,
        precision="bf16-mixed",
        print=printed.append,
    )
    settings = ["attention=flash", "trainer.precision=bf16-mixed", f"batch_size={devices}"]
    with composed(folder, *tiny(folder, *settings, *overrides)) as cfg:
        training.fill_in_levers(cfg, trainer, vocab_size=257)
    return printed[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("an_h200")
def test_train_prints_how_far_auto_reaches(tmp_path):
    printed = [printed_plan(tmp_path, 1, f"memory={memory}") for memory in ("auto", "none")]
    lengths = [int(text.rpartition(" ")[2].replace(",", "")) for text in printed]
    assert lengths[0] > lengths[1] > 0


@pytest.mark.usefixtures("an_h200")
def test_train_prints_ddps_buckets(tmp_path):
    model = ["model.n_layers=8", "model.dim=2048", "model.ffn_dim=8192", "seq_len=32768"]
    alone, ddp = (printed_plan(tmp_path, n, *model, f"strategy={name}") for n, name in ((1, "auto"), (2, "ddp")))
    assert "weights 1.9, " in alone and "gradients" not in alone
    assert "weights 1.9, " in ddp and "gradients 1.9, " in ddp


@pytest.mark.usefixtures("an_h200")
def test_the_plan_of_another_attention_has_a_warning():
    printed = planner.summary(predict(GPT2), CUDA, processes=1, attention="naive")
    assert "attention=naive can need more memory than planned" in printed and "that fits is" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("an_h200")
def test_the_plan_of_float8_has_a_warning():
    printed = planner.summary(predict(changed(GPT2, float8=True)), CUDA, processes=1, attention="flash")
    assert printed.splitlines()[3:] == [f"  {planner.WITHOUT_FLOAT8}"]
    settings = ["model=gpt2", "trainer.precision=bf16-true", "gpu_gib=80", "host_gib=100"]
    assert planner.WITHOUT_FLOAT8 not in memory_table(settings)
    assert memory_table([*settings, "lit_gpt.float8=tensorwise"]).splitlines()[-1] == planner.WITHOUT_FLOAT8
    with pytest.raises(ValueError, match=r"lit_gpt\.float8 needs memory\.mlp_chunk=null; got 16384"):
        memory_table([*settings, "lit_gpt.float8=tensorwise", "memory=offload"])


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(("auto", "attention"), [(auto, name) for auto in (False, True) for name in ("flash", "sdpa")])
def test_advice_has_head_groups_only_with_flash(auto, attention, monkeypatch):
    monkeypatch.setattr(planner, "device_bytes", lambda device: 8 * GIB)
    plan = changed(LLAMA_1B, seq_len=2**19, ranks=4, context=4, precision="bf16-true", optimizer="adamw_bf16")
    with pytest.raises(ValueError, match=r"Try seq_len=\d+ ") as error:
        planner.plan_memory(plan, CUDA, 1, auto=auto, attention=attention, in_sweep=False, say=str)
    assert ("head_groups" in str(error.value)) == (attention == "flash")


@pytest.mark.parametrize("attention", ["flash", "sdpa"])
def test_a_table_has_head_groups_only_with_flash(attention):
    run = ["model=llama_1b", f"seq_len={2**18}", "batch_size=1", "strategy=fsdp", "trainer.devices=4"]
    table = memory_table([*run, "strategy.context=4", f"attention={attention}", "gpu_gib=8", "host_gib=100"])
    assert ("head_groups" in table) == (attention == "flash")


@pytest.mark.usefixtures("an_h200")
def test_auto_chooses_only_levers_that_float8_supports():
    plan = changed(LLAMA_1B, seq_len=2**18, precision="bf16-true", compiled=True)
    assert planner.fastest_levers(plan, CUDA, 1) == Levers("none", False, 16384)
    assert planner.fastest_levers(changed(plan, float8=True), CUDA, 1) == Levers("selective", False, None)
    with pytest.raises(ValueError, match=r"memory=auto found no memory settings .* Try seq_len=\d+ ") as error:
        planner.fastest_levers(changed(plan, seq_len=2**23, float8=True), CUDA, 1)
    assert int(str(error.value).rpartition("seq_len=")[2].split()[0]) % 16 == 0


@pytest.mark.parametrize("in_sweep", [False, True], ids=["run", "sweep"])
def test_a_sweep_lets_a_run_find_out_that_it_does_not_fit(in_sweep, tmp_path, monkeypatch):
    def refuse(*args: object) -> None:
        raise planner.DoesNotFitError("too large")

    monkeypatch.setattr(planner, "require_memory", refuse)
    monkeypatch.setattr(training, "in_sweep", lambda: in_sweep)
    with composed(tmp_path, *tiny(tmp_path)) as cfg:
        if in_sweep:
            training.build(cfg)
        else:
            with pytest.raises(planner.DoesNotFitError):
                training.build(cfg)
