"""Reads which options the groups of conf/ have, and which keys an option has.

If a user gives an unknown option or key, the error message names options or keys that exist.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
# maps names that users may know, such as those of transformers' TrainingArguments, to keys of conf/
OTHER_NAMES = {
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "scheduler.warmup_steps",
    "max_grad_norm": "trainer.gradient_clip_val",
    "micro_batch_size": "data.micro_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "gradient_accumulation_steps": "batch_size",
    "train_batch_size": "batch_size",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_length": "seq_len",
    "max_seq_length": "seq_len",
    "block_size": "seq_len",
    "context_length": "seq_len",
    "precision": "trainer.precision",
    "bf16": "trainer.precision",
    "devices": "trainer.devices",
    "num_gpus": "trainer.devices",
    "gradient_checkpointing": "memory.checkpointing",
    "logging_steps": "trainer.log_every_n_steps",
    "eval_steps": "trainer.val_check_interval",
    "save_steps": "callbacks.checkpoint.every_n_train_steps",
    "output_dir": "hydra.run.dir",
    "resume_from_checkpoint": "ckpt_path",
    "model_name_or_path": "model.pretrained",
    "tokenizer": "data.tokenizer",
}


# {node of conf/ that is a copy (an interpolation): the original node}
COPIED_NODES = {
    "model.attention": "attention",
    "model.loss": "memory.loss",
    "model.memory": "memory",
    "trainer.strategy": "strategy",
    "trainer.logger": "logger",
    "lit_gpt.optimizer": "optimizer",
    "lit_gpt.scheduler": "scheduler",
}


def options(group: str) -> list[str]:
    """Returns the names of the options in a config group of conf/.

    Files whose names start with _ are not options: they hold keys that options share.
    """
    return sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))


def options_with(key: str) -> list[str]:
    """Returns the options whose config contains `key`. The options belong to the config group that `key` starts with.

    For example, options_with("strategy.context") returns ["strategy=fsdp"].
    """
    group, _, name = key.partition(".")
    if not name or not group.isidentifier():
        return []
    return [f"{group}={option}" for option in options(group) if value_of(_content(group, option), name) is not ...]


def _content(group: str, option: str) -> dict[str, Any]:
    """Returns the keys of an option and of the options in its defaults list.

    If the option's file starts with `# @package`, the option sets keys outside its group, and the result is empty.
    """
    text = (CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
    if text.startswith("# @package"):
        return {}
    own = yaml.safe_load(text) or {}
    bases = [name for name in own.pop("defaults", []) if isinstance(name, str) and name != "_self_"]
    keys: dict[str, Any] = {}
    for base in bases:
        keys |= _content(group, base)
    return keys | own


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a key such as "trainer.max_steps". If the config lacks the key, returns Ellipsis."""
    value: Any = config
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return ...
        value = value[name]
    return value


def in_quotes(text: str) -> str:
    """Quotes `text` for Hydra, as the value of an override. Hydra reads only backslashes before a quote as escapes."""
    return '"' + re.sub(r'(\\+)($|")', r"\1\1\2", text).replace('"', r"\"") + '"'
