"""Tests scripts/plan_memory.py and its table."""

import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy

from fa_train import training
from fa_train.memory.memory import Levers
from fa_train.memory.planner.levers import longest_of_all_levers
from fa_train.memory.planner.plan import Plan, RunSize
from fa_train.memory.planner.predict import GIB, predict
from scripts.composed import composed as composed_for_plan
from scripts.memory_table import memory_table, plan_of_run
from tests.memory.support.plans import GPT2, HOST, LLAMA_1B, changed
from tests.support import processes
from tests.support.finetuning import write_base
from tests.support.marks import slow, slow_except
from tests.support.training import REPOSITORY, composed, quiet_environment, tiny

CUDA = torch.device("cuda")


def numbers(table: str) -> dict[str, float]:
    """Parses a memory table and returns each component in GiB."""
    lines = [line.split() for line in table.splitlines() if " GiB" in line and not line.startswith("fits")]
    return {" ".join(words[: words.index("GiB") - 1]): float(words[words.index("GiB") - 1]) for words in lines}


def test_the_table_adds_up_to_the_prediction():
    table = memory_table(["model=llama_1b", "seq_len=131072", "memory=selective", "gpu_gib=139", "host_gib=125"])
    found = numbers(table)
    parts = {name: gib for name, gib in found.items() if name not in ("GPU", "host")}
    assert found["weights"] == 4.60 and found["optimizer"] == 9.21
    assert sum(parts.values()) == pytest.approx(found["GPU"], abs=0.06)
    plan = changed(LLAMA_1B, seq_len=131072, checkpointing="selective", accumulates=True, compiled=True)
    assert found["GPU"] == pytest.approx(predict(plan).gpu_bytes / GIB, abs=0.006)
    assert "fits: yes" in table and "next lever" not in table
    assert "of 139.0, peak at" in table and "of 125.0" in table


def test_a_plan_needs_no_data(tmp_path):
    """A memory plan depends on the data only through the vocabulary size, which the tokenizer determines."""
    base = write_base(tmp_path / "base")
    overrides = ["experiment=finetune", f"model.pretrained={base}", "seq_len=64", "gpu_gib=80", "host_gib=10"]
    (tmp_path / "chats.jsonl").write_text("")
    assert memory_table(overrides) == memory_table([*overrides, f"data.path={tmp_path / 'chats.jsonl'}"])
    assert "fits: yes" in memory_table(["data=text", "seq_len=64", "gpu_gib=80", "host_gib=10"])
    with pytest.raises(ValueError, match=r"data\.tokenizer must be given"):
        memory_table(["data=sft"])


@pytest.mark.slow
def test_what_does_not_fit_gets_advice():
    table = memory_table(["model=llama_1b", "seq_len=131072", "gpu_gib=64", "host_gib=125"])
    assert "fits: no, " in table and "GiB too much for the GPU" in table
    assert "next lever: memory.checkpointing=selective" in table
    table = memory_table(["model=llama_1b", "seq_len=262144", "memory=offload", "gpu_gib=139", "host_gib=10"])
    assert "fits: no, 20.0 GiB too much for the host" in table
    table = memory_table(["model=llama_1b", "seq_len=32768", "data.micro_batch_size=8", "gpu_gib=139", "host_gib=10"])
    assert "next lever: data.micro_batch_size=2" in table


@pytest.mark.slow
def test_what_train_refuses_and_what_shards_are_said():
    eight_b = ["model=llama_8b", "seq_len=8192", "trainer.devices=4", "gpu_gib=80", "host_gib=100"]
    refused = memory_table([*eight_b, "batch_size=1", "strategy=fsdp"]).splitlines()[-1]
    assert refused.startswith("train.py refuses this run: batch_size must be a multiple of 4 ")
    assert "fits: no" in (whole := memory_table([*eight_b, "batch_size=4"])) and "strategy=fsdp shards the" in whole
    sharded = memory_table([*eight_b, "batch_size=1", "strategy=fsdp", "strategy.context=4"])
    assert "train.py refuses" not in sharded and "strategy=fsdp shards" not in sharded


def test_the_longest_length_is_of_one_row():
    def longest(*overrides: str) -> int:
        table = memory_table(["model=gpt2", "gpu_gib=139", "host_gib=100", *overrides])
        return int(table.partition("longest seq_len that fits: ")[2].splitlines()[0].replace(",", ""))

    assert longest("data.micro_batch_size=4", "batch_size=8") == longest() // 4
    assert longest("memory=offload") > longest("memory=selective") > longest() > 100_000


def test_the_longest_length_is_one_that_the_checkpoint_supports(tmp_path):
    base = [f"model.pretrained={write_base(tmp_path)}", "model=pretrained", "gpu_gib=80", "host_gib=100"]
    assert "longest seq_len that fits: 64, the longest that the model supports" in memory_table([*base, "seq_len=64"])
    with pytest.raises(ValueError, match="seq_len must be at most the 64 tokens that the checkpoint supports; got 256"):
        memory_table([*base, "seq_len=256"])
    cut = ["seq_len=256", "data.packing=best_fit", "data.max_doc_len=64"]
    assert "the longest that the model supports" not in memory_table([*base, *cut])
    with pytest.raises(ValueError, match=r"model\.pretrained must be .*; got /nope, which does not exist"):
        memory_table(["model=pretrained", "model.pretrained=/nope"])


@pytest.mark.slow
def test_auto_is_planned_too():
    few, many = (
        memory_table(["model=llama_1b", "seq_len=131072", "memory=auto", f"gpu_gib={gib}", "host_gib=125"])
        for gib in (40, 300)
    )
    assert "checkpointing=none, offload=False, mlp_chunk=None" in many and "fits: yes" in many
    assert "checkpointing=none" not in few and "fits: yes" in few


@pytest.mark.slow
def test_the_longest_length_of_auto_uses_the_best_levers():
    table = memory_table(["model=llama_1b", "memory=auto", "seq_len=8192", "gpu_gib=139.8", "host_gib=120"])
    longest = longest_of_all_levers(changed(LLAMA_1B, compiled=True, accumulates=True), int(139.8 * GIB), HOST)
    assert "checkpointing=none" in table
    assert f"longest seq_len that fits with memory=auto: {longest:,}" in table


@pytest.mark.slow
def test_auto_shows_the_smallest_plan_if_none_fits():
    table = memory_table(["model=llama_1b", "memory=auto", "seq_len=131072", "gpu_gib=20", "host_gib=1000"])
    assert "memory: checkpointing=full, offload=True, mlp_chunk=16384" in table and "fits: no" in table


@pytest.mark.slow
def test_sharded_weights_are_planned_as_train_does():
    overrides = ["model=llama_1b", "strategy=fsdp", "seq_len=4096", "batch_size=16", "data.micro_batch_size=1"]
    plan = plan_of_run(composed_for_plan([*overrides, "trainer.devices=8"]))
    assert plan.run.ranks == 8 and plan.run.accumulates
    two_machines = plan_of_run(composed_for_plan([*overrides, "trainer.devices=8", "trainer.num_nodes=2"]))
    assert two_machines.run.ranks == 16 and not two_machines.run.accumulates
    four_share = plan_of_run(composed_for_plan([*overrides, "trainer.devices=8", "strategy.context=4"]))
    assert four_share.run.context == 4 and four_share.run.tokens == 1024 and four_share.run.accumulates
    with pytest.raises(ValueError, match="must divide the number of devices, 8; got 3"):
        plan_of_run(composed_for_plan([*overrides, "trainer.devices=8", "strategy.context=3"]))
    with pytest.raises(ValueError, match=r"head_groups must divide the 8 KV heads of the model; got 3"):
        plan_of_run(composed_for_plan([*overrides, "trainer.devices=8", "strategy.head_groups=3"]))
    for wrong in (["strategy.context=1"], ["strategy.context=2", "attention=sdpa"]):
        with pytest.raises(ValueError, match=r"head_groups=2 needs attention=flash and strategy.context of at least 2"):
            plan_of_run(composed_for_plan([*overrides, "trainer.devices=8", "strategy.head_groups=2", *wrong]))
    with pytest.raises(ValueError, match="strategy=fsdp needs at least 2 devices; got 1"):
        plan_of_run(composed_for_plan(overrides))
    assert plan_of_run(composed_for_plan(["model=llama_1b", "trainer.devices=8"])).run.ranks == 1


@pytest.mark.parametrize(
    ("overrides", "buckets"),
    slow_except(
        ["auto-2", "ddp-copies"],
        [
            pytest.param(["strategy=auto", "trainer.devices=1"], "none", id="auto-1"),
            pytest.param(["strategy=auto", "trainer.devices=2"], "views", id="auto-2"),
            pytest.param(["strategy=auto", "trainer.num_nodes=2"], "views", id="auto-2-machines"),
            pytest.param(["strategy=ddp", "trainer.devices=1"], "views", id="ddp-1"),
            pytest.param(["strategy=ddp", "trainer.devices=2"], "views", id="ddp-2"),
            pytest.param(["strategy=ddp", "strategy.gradient_as_bucket_view=false"], "copies", id="ddp-copies"),
            pytest.param(["strategy=fsdp", "trainer.devices=2"], "none", id="fsdp"),
        ],
    ),
)
def test_buckets_are_planned_as_lightning_makes_them(overrides, buckets, tmp_path, monkeypatch):
    planned: list[Plan] = []
    monkeypatch.setattr(training, "plan_memory", lambda plan, *args, **options: planned.append(plan) or plan)
    with composed(tmp_path, *tiny(tmp_path, *overrides)) as cfg:
        trainer = instantiate(cfg.trainer)
        training.fill_in_levers(cfg, trainer, vocab_size=257)
        planned.append(plan_of_run(cfg))
    assert [plan.run.buckets for plan in planned] == [buckets, buckets]
    assert isinstance(trainer.strategy, DDPStrategy) == (buckets != "none")
    if buckets != "none":
        assert trainer.strategy._ddp_kwargs.get("gradient_as_bucket_view", False) == (buckets == "views")


@pytest.mark.parametrize(
    ("devices", "gib"),
    [("1", 120.0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("4", 30.0), ("[0,1]", 60.0)))],
)
def test_processes_of_a_machine_share_its_host_memory(devices, gib, monkeypatch):
    monkeypatch.setattr("scripts.memory_table.available_host_bytes", lambda: 120 * GIB)
    table = memory_table(["model=gpt2", f"trainer.devices={devices}", "batch_size=4", "gpu_gib=80"])
    assert f"host                0.00 GiB of {gib}" in table


@pytest.mark.slow
def test_assumptions_of_the_plan_are_printed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assumed = memory_table(["model=gpt2"]).splitlines()[-1]
    assert assumed.startswith("assumed: an H200's GPU and this machine's host memory; ")
    told = memory_table(["model=gpt2", "gpu_gib=80", "host_gib=100"])
    assert "assumed" not in told and "attention=" not in told
    for attention in ("naive", "sdpa", "chunked"):
        other = memory_table(["model=gpt2", f"attention={attention}", "gpu_gib=80", "host_gib=100"])
        assert "the plan assumes attention=flash; other kinds of attention may need more memory" in other


@pytest.mark.parametrize("optimizer", ["adamw", *slow("adamw_8bit", "adamw_bf16", "adamw_master", "adamw_offload")])
def test_every_optimizer_is_known(optimizer):
    precision = "bf16-true" if optimizer in ("adamw_bf16", "adamw_master") else "bf16-mixed"
    settings = [f"optimizer={optimizer}", f"trainer.precision={precision}", "lit_gpt.compile_model=false"]
    plan = plan_of_run(composed_for_plan([*settings, "batch_size=1"]))
    assert plan == changed(GPT2, vocab_size=259, optimizer=optimizer, precision=precision)


@pytest.mark.parametrize("optimizer", ["adamw_bf16", "adamw_master"])
def test_optimizers_of_bf16_weights_refuse_other_weights(optimizer):
    with pytest.raises(ValueError, match=f"optimizer={optimizer} needs trainer.precision=bf16-true; got bf16-mixed"):
        plan_of_run(composed_for_plan([f"optimizer={optimizer}"]))
    with pytest.raises(ValueError, match=f"optimizer={optimizer} cannot train adapters, which are fp32"):
        plan_of_run(composed_for_plan([f"optimizer={optimizer}", "trainer.precision=bf16-true", "adapter=lora"]))


def test_every_value_of_a_plan_is_read():
    overrides = [
        "model=nano",
        "model.vocab_size=1000",
        "model.tied=false",
        "model.norm=layernorm",
        "model.bias=true",
        "model.qk_norm=true",
        "model.positions=learned",
        "model.max_seq_len=2048",
        "trainer.precision=32-true",
        "seq_len=2048",
        "batch_size=4",
        "data.micro_batch_size=2",
        "memory=offload",
        "memory.loss.chunk_size=100",
        "lit_gpt.compile_model=true",
    ]
    model = changed(
        GPT2,
        vocab_size=1000,
        n_layers=4,
        dim=128,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=384,
        norm="layernorm",
        positions="learned",
        rope_theta=10000.0,
        max_seq_len=2048,
        activation="swiglu",
        bias=True,
        qk_norm=True,
        tied=False,
    ).model
    run = RunSize(
        seq_len=2048,
        rows=2,
        precision="32-true",
        optimizer="adamw",
        accumulates=True,
        compiled=True,
        loss_chunk=100,
    )
    assert plan_of_run(composed_for_plan(overrides)) == Plan(model, Levers("selective", True, 16384), run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["gpu_gib=much"], "error: gpu_gib must be a positive number; got much", id="number"),
        pytest.param(["seq_len=foo"], "error: seq_len must be a positive integer; got foo", id="type"),
        pytest.param(["memory=nothing"], "error: memory must be one of auto, default, full, none, ", id="group"),
        pytest.param(["model.n_kv_heads=5"], "must be a multiple of model.n_kv_heads; got 12 and 5", id="model"),
    ],
)
def test_a_mistake_ends_the_script_with_one_line(arguments, message, tmp_path):
    done = processes.finish(REPOSITORY / "scripts" / "plan_memory.py", arguments, tmp_path, quiet_environment())
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1 and message in done.stderr, done.stderr
