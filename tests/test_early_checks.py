"""Settings that exclude each other are refused before ranks start and before data or weights are read."""

import re
from contextlib import nullcontext

import pytest

from fa_train import early_checks, run_config
from fa_train.early_checks import is_fsdp, require_checkpoint_name
from fa_train.parallel.ranks import ranks_to_start
from fa_train.preflight import chooses_reshard, gradient_buckets
from tests.support.training import composed, own_option, tiny


def start(tmp_path, *overrides):
    """Makes the checks that train.py makes before it starts ranks."""
    with composed(tmp_path, *tiny(tmp_path, *overrides)) as cfg:
        run_config.require_start(cfg, ranks_to_start(cfg.trainer))


SHARDED = ("strategy=fsdp", "trainer.devices=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["trainer.devices=3"], r"batch_size must be a multiple of 3 \(.*3 processes\); got 4", id="batch"),
        pytest.param(
            ["trainer.devices=[0,2,4]", "trainer.accelerator=gpu"], "batch_size must be a multiple of 3 .*; got 4",
            id="list",
        ),
        pytest.param([*SHARDED, "strategy.context=3"], "context must divide the number of devices, 2; got 3", id="sp"),
        pytest.param(
            ["strategy=fsdp", "trainer.devices=4", "strategy.context=2", "data.micro_batch_size=3"],
            r"a multiple of 6 \(data.micro_batch_size=3 \* 4 processes / strategy.context=2\); got 4", id="batch-sp",
        ),
        pytest.param(
            [f"max_steps={10**18}", "batch_size=100"], rf"max_steps \* batch_size must be .* 2\*\*63; got {10**20}$",
            id="rows",
        ),
        pytest.param([f"seq_len={2**63}"], rf"seq_len must be less than 2\*\*63; got {2**63}$", id="seq-len"),
        pytest.param(["strategy=fsdp"], "strategy=fsdp needs at least 2 devices; got 1", id="fsdp-alone"),
        pytest.param([*SHARDED, "strategy.replicas=2"], "strategy.replicas must divide the 2 devices", id="replicas"),
        pytest.param([*SHARDED, "adapter=qlora"], "strategy=fsdp cannot shard 4-bit weights", id="qlora"),
        pytest.param([*SHARDED, "optimizer=adamw_8bit"], "strategy=fsdp needs optimizer=adamw, .*8bit", id="8bit"),
        pytest.param([*SHARDED, "strategy.head_groups=2"], "head_groups=2 needs attention=flash and", id="groups"),
        pytest.param(
            [*SHARDED, "logger=wandb", "+logger.log_model=all"],
            "log_model must be false with strategy=fsdp, whose checkpoints are folders; got all", id="upload",
        ),
        pytest.param(["trainer.logger=csv"], "trainer.logger must be a .*; got csv.*, such as logger=csv", id="logger"),
        pytest.param(
            ["trainer.logger={mine: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: logs}}"],
            'trainer.logger must be a .*, a list of them, .*; got {"mine": ', id="mapping-of-loggers",
        ),
        pytest.param(["optimizer=adamw_bf16"], "needs trainer.precision=bf16-true; got 32-true", id="bf16-weights"),
        pytest.param(["lit_gpt.float8=tensorwise"], "lit_gpt.float8 needs lit_gpt.compile_model=true", id="float8"),
    ],
)  # fmt: skip
def test_settings_that_exclude_each_other_start_no_ranks(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        start(tmp_path, *overrides)


@pytest.mark.parametrize(
    ("own", "of_rank_zero", "message"),
    [
        pytest.param({"a": {"lr": 0.01}}, {"a": {"lr": 0.001}}, "a.lr .*; got 0.01 on rank 1 and 0.001", id="number"),
        pytest.param({"packing": "concat"}, {"packing": "best_fit"}, "packing .*; got concat on rank 1", id="option"),
        pytest.param({"a": 1}, {"a": 1, "b": 2}, "b must be equal .*; got no value on rank 1 and 2", id="missing"),
        pytest.param({"a": 1, "b": None}, {"a": 1}, "b must be .*; got null on rank 1 and no value", id="additional"),
        pytest.param({"cache_dir": "/scratch/1"}, {"cache_dir": None}, None, id="path"),
        pytest.param({"data": {"path": "corpus"}}, {"data": {"path": "copy"}}, None, id="name-of-a-folder"),
        pytest.param({"ckpt_path": None}, {"ckpt_path": "last"}, None, id="checkpoint"),
        pytest.param({"data": {"num_workers": 1}}, {"data": {"num_workers": 2}}, None, id="workers"),
        pytest.param({"logger": {"tags": ["a"]}}, {"logger": {"tags": []}}, None, id="logger"),
    ],
)
def test_ranks_with_other_settings_are_refused(own, of_rank_zero, message):
    """The ranks would wait for each other without an end, or train in different ways without an error."""
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        early_checks.require_equal_settings(own, of_rank_zero, 1)


def test_the_settings_of_ranks_are_compared_before_they_start(tmp_path, monkeypatch):
    def other(question, own, compare):
        compare(1, own.replace('"batch_size": 4', '"batch_size": 8'))

    monkeypatch.setattr(run_config, "compared_by_rank_zero", other)
    with pytest.raises(ValueError, match=r"batch_size must be equal on all ranks; got 8 on rank 1 and 4 on rank 0"):
        start(tmp_path)


def test_environment_variables_may_differ_between_ranks(tmp_path, monkeypatch):
    sent: list[str] = []
    monkeypatch.setattr(run_config, "compared_by_rank_zero", lambda question, own, compare: sent.append(own))
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        start(tmp_path, "+trainer.profiler.filename=rank${oc.env:RANK}")
    assert len(sent) == 2 and sent[0] == sent[1]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["+learning_rate.lora=nan"], id="nan"),
        pytest.param(["trainer.devices=4"], id="ddp"),
        pytest.param(["strategy=fsdp", "trainer.devices=8", "strategy.context=2"], id="context"),
        pytest.param(["optimizer=adamw_master", "trainer.precision=bf16-true"], id="master"),
        pytest.param(["logger=wandb"], id="wandb-chooses-its-mode"),
    ],
)
def test_settings_that_fit_together_pass(overrides, tmp_path):
    start(tmp_path, *overrides)


def test_offloaded_moments_need_a_gpu(tmp_path, monkeypatch):
    offloaded = ("optimizer=adamw_offload", "trainer.devices=2")
    for has_gpu in (False, True):
        monkeypatch.setattr(early_checks, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        with pytest.raises(ValueError, match=r"adamw_offload needs a CUDA GPU; got trainer\.accelerator=cpu$"):
            start(tmp_path, *offloaded)
        start(tmp_path, *offloaded, "trainer.accelerator=gpu")
    start(tmp_path, *offloaded, "trainer.accelerator=auto")
    monkeypatch.setattr(early_checks, "has_gpu", lambda: False)
    with pytest.raises(ValueError, match=r"got trainer\.accelerator=auto on a machine without a CUDA GPU$"):
        start(tmp_path, *offloaded, "trainer.accelerator=auto")
    start(tmp_path, "trainer.accelerator=auto", "optimizer=adamw")


@pytest.mark.parametrize("accelerator", ["cpu", "auto"])
@pytest.mark.parametrize(
    ("devices", "shown"), [pytest.param("-1", "-1", id="all"), pytest.param("[0,1]", "[0, 1]", id="list")]
)
def test_chosen_gpus_need_a_gpu(devices, shown, accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr(early_checks, "has_gpu", lambda: False)
    message = re.escape(f"trainer.devices={shown} needs a GPU; got a run on the CPU")
    with pytest.raises(ValueError, match=message):
        start(tmp_path, f"trainer.devices={devices}", f"trainer.accelerator={accelerator}")


def test_an_own_option_built_on_fsdp_is_checked_like_fsdp(tmp_path):
    own = own_option(tmp_path, "strategy/mine", "defaults: [fsdp, _self_]\ncontext: 2\n")
    mine = (own, "strategy=mine", "batch_size=1")
    start(tmp_path, *mine, "trainer.devices=2")
    for overrides, message in (
        (["trainer.devices=4"], r"a multiple of 2 \(.* 4 processes / strategy.context=2\); got 1"),
        (["trainer.devices=2", "adapter=qlora"], "strategy=fsdp cannot shard 4-bit weights"),
        (["trainer.devices=3"], "context must divide the number of devices, 3; got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            start(tmp_path, *mine, *overrides)


@pytest.mark.parametrize(
    ("option", "devices", "sharded", "buckets"),
    [
        pytest.param("fsdp", 2, True, "none", id="fsdp"),
        pytest.param("ddp", 1, False, "views", id="ddp"),
        pytest.param("auto", 1, False, "none", id="auto-1"),
        pytest.param("auto", 2, False, "views", id="auto-2"),
    ],
)
@pytest.mark.parametrize("name", ["", "mine"], ids=["ours", "own"])
def test_the_node_says_what_a_strategy_is(name, option, devices, sharded, buckets, tmp_path):
    own = own_option(tmp_path, "strategy/mine", f"defaults: [{option}, _self_]\n")
    with composed(tmp_path, *tiny(tmp_path, own, f"strategy={name or option}")) as cfg:
        assert is_fsdp(cfg.strategy) is sharded
        assert chooses_reshard(cfg.strategy, "flash") is sharded
        assert gradient_buckets(cfg.strategy, devices) == buckets


def test_the_number_of_ranks_is_that_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch_size must be a multiple of 3 "):
        start(tmp_path, "trainer.devices=3")


@pytest.mark.parametrize(
    ("devices", "nodes", "started", "got"),
    [
        pytest.param("2", 1, 4, "2 * 1", id="more"),
        pytest.param("4", 1, 2, "4 * 1", id="fewer"),
        pytest.param("2", 2, 2, "2 * 2", id="nodes"),
        pytest.param("auto", 1, 4, "1 * 1", id="auto"),
        pytest.param("2", 2, 4, None, id="equal"),
        pytest.param("auto", 4, 4, None, id="auto-equal"),
    ],
)
def test_a_launcher_starts_one_rank_for_each_device(devices, nodes, started, got, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(started))
    monkeypatch.setattr(run_config, "decided_by_rank_zero", lambda question, decide: decide())  # there is no rank 0
    monkeypatch.setattr(run_config, "compared_by_rank_zero", lambda question, own, compare: None)
    message = f"num_nodes must be {started}, the number of ranks that torchrun or srun has started; got {got}"
    with nullcontext() if got is None else pytest.raises(ValueError, match=re.escape(message)):
        start(tmp_path, f"trainer.devices={devices}", f"trainer.num_nodes={nodes}")


def test_a_checkpoint_is_a_folder_or_a_possible_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    for name in ("whole", str(tmp_path / "whole"), "gpt2", "some/name-1.5B", None):
        require_checkpoint_name(name)
    for name, reason in (
        ("/nope", "which does not exist"),
        ("../nope", "which does not exist"),
        ("runs/a/exported", "which does not exist"),
        ("empty", "a folder without config.json"),
        ("whole/config.json", "which is a file"),
    ):
        with pytest.raises(ValueError, match=f"^model.pretrained must be .*; got {name}, {reason}$"):
            require_checkpoint_name(name)
