"""Each `_target_` in the configs of earlier versions can still be found."""

import pytest
from hydra.utils import get_object

from fa_train import run_config
from fa_train.compat import MOVED, moved_targets
from tests.support.training import composed

# all targets in conf/ at commit 6f94392, before modules moved
TARGETS = (
    "fa_train.callbacks.GracefulInterrupt",
    "fa_train.callbacks.Monitor",
    "fa_train.callbacks.OutOfMemory",
    "fa_train.callbacks.Record",
    "fa_train.callbacks.StepProgress",
    "fa_train.checkpoints.callback.Checkpoint",
    "fa_train.data.datamodule.hf_data",
    "fa_train.data.datamodule.mix_data",
    "fa_train.data.datamodule.sft_data",
    "fa_train.data.datamodule.stdlib_data",
    "fa_train.data.datamodule.synthetic_data",
    "fa_train.data.datamodule.text_data",
    "fa_train.data.mixing.hf_part",
    "fa_train.data.mixing.sft_part",
    "fa_train.data.mixing.text_part",
    "fa_train.evaluation.generation.Sample",
    "fa_train.lit_gpt.LitGPT",
    "fa_train.memory.loss.LinearCrossEntropy",
    "fa_train.memory.stack.Memory",
    "fa_train.models.attention.chunked_attention",
    "fa_train.models.attention.flash_attention",
    "fa_train.models.attention.naive_attention",
    "fa_train.models.attention.sdpa_attention",
    "fa_train.models.gpt.Family",
    "fa_train.models.gpt.GPT",
    "fa_train.models.hf.load_pretrained",
    "fa_train.models.lora.LoRA",
    "fa_train.models.lora.whole_model",
    "fa_train.optim.adamw",
    "fa_train.optim.adamw_8bit",
    "fa_train.optim.adamw_bf16",
    "fa_train.optim.adamw_offload",
    "fa_train.optim.warmup_cosine",
    "fa_train.parallel.fsdp.FullyShardedStrategy",
    "fa_train.wandb_mode.wandb_mode",
    "scripts.ablation_multirun.Report",
    "scripts.ablation_multirun.run_job",
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_of_an_earlier_version_is_found(target):
    assert callable(get_object(MOVED.get(target, target)))


def test_moved_targets_are_found_at_any_depth():
    moved = {"_target_": "fa_train.memory.stack.Memory"}
    config = {"a": {"b": [moved, {"_target_": "fa_train.lit_gpt.LitGPT"}]}, "note": "fa_train.memory.stack.Memory"}
    assert moved_targets(config) == {"a.b.0._target_": "fa_train.memory.memory.Memory"}
    assert not moved_targets({"a": {"_target_": "${b}"}})


def test_a_config_of_a_users_own_may_name_a_moved_target(tmp_path):
    old = ["optimizer._target_=fa_train.optim.adamw", "callbacks.progress._target_=fa_train.callbacks.StepProgress"]
    with composed(tmp_path, "preset=cpu", *old) as cfg:
        run_config.check(cfg)
        assert cfg.optimizer._target_ == cfg.lit_gpt.optimizer._target_ == "fa_train.optim.adamw.adamw"
        assert cfg.callbacks.progress._target_ == "fa_train.callbacks.progress.StepProgress"
