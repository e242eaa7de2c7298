"""Maps old `_target_` names in configs to current names. Older configs therefore still work."""

from typing import Any

from fa_train.settings import leaves

# {`_target_` of an earlier version: current name of the same class or function}
MOVED = {
    "fa_train.callbacks.GracefulInterrupt": "fa_train.callbacks.interrupt.GracefulInterrupt",
    "fa_train.callbacks.Monitor": "fa_train.callbacks.monitor.Monitor",
    "fa_train.callbacks.OutOfMemory": "fa_train.callbacks.out_of_memory.OutOfMemory",
    "fa_train.callbacks.Record": "fa_train.callbacks.record.Record",
    "fa_train.callbacks.StepProgress": "fa_train.callbacks.progress.StepProgress",
    "fa_train.checkpoints.callback.Checkpoint": "fa_train.callbacks.checkpoint.Checkpoint",
    "fa_train.memory.stack.Memory": "fa_train.memory.memory.Memory",
    "fa_train.models.gpt.Family": "fa_train.models.config.Family",
    "fa_train.models.hf.load_pretrained": "fa_train.models.hf.import_.load_pretrained",
    "fa_train.optim.adamw": "fa_train.optim.adamw.adamw",
    "fa_train.optim.adamw_8bit": "fa_train.optim.adamw.adamw_8bit",
    "fa_train.optim.adamw_bf16": "fa_train.optim.adamw.adamw_bf16",
    "fa_train.optim.adamw_offload": "fa_train.optim.adamw.adamw_offload",
    "fa_train.optim.warmup_cosine": "fa_train.optim.schedule.warmup_cosine",
    "scripts.ablation_multirun.Report": "scripts.ablation.multirun.Report",
    "scripts.ablation_multirun.run_job": "scripts.ablation.multirun.run_job",
}


def moved_targets(config: dict[str, Any]) -> dict[str, str]:
    """Returns {key: new value} for each outdated `_target_` in `config`. Keys look like memory._target_."""
    return {
        key: MOVED[value]
        for key, value in leaves("", config)
        if key.rpartition(".")[2] == "_target_" and isinstance(value, str) and value in MOVED
    }
