"""Refuses a config if a node, such as `data` or `trainer`, contradicts settings of the whole run."""

from collections.abc import Mapping
from typing import Any

from fa_train.config_options import value_of
from fa_train.settings import classes_of, shown

# {key: another key, which must have the same value}. If the two values differed, the data, the schedule and the metrics
# would contradict each other.
COPIES = {
    "data.seq_len": "seq_len",
    "data.batch_size": "batch_size",
    "data.max_steps": "max_steps",
    "trainer.max_steps": "max_steps",
    "trainer.strategy": "strategy",
    "strategy.devices": "trainer.devices",
    "strategy.num_nodes": "trainer.num_nodes",
    "strategy.accelerator": "trainer.accelerator",
    "callbacks.monitor.seq_len": "seq_len",
    "callbacks.monitor.batch_size": "batch_size",
    "callbacks.out_of_memory.seq_len": "seq_len",
    "callbacks.checkpoint.run_name": "run_name",
    "callbacks.out_of_memory.micro_batch_size": "data.micro_batch_size",
}
# {argument of Lightning's Trainer: (the supported values, advice for users of other values)}
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "trainer.accumulate_grad_batches": (
        (1,), "Set batch_size and data.micro_batch_size, which determine the accumulation",
    ),
    "trainer.limit_train_batches": ((None, 1.0), "Set max_steps instead"),
    "trainer.fast_dev_run": ((0, False), "Set max_steps=1 instead"),
    "trainer.max_epochs": ((None, -1), "Set epochs or max_steps instead"),
    "trainer.min_epochs": ((None,), "Only max_steps or epochs determines the length of a run"),
    "trainer.min_steps": ((None,), "Only max_steps or epochs determines the length of a run"),
    "trainer.check_val_every_n_epoch": ((None,), "Set trainer.val_check_interval, a number of steps, instead"),
    "trainer.callbacks": ((None,), "Add nodes to callbacks instead, such as +callbacks.mine._target_=my_module.Mine"),
    "trainer.plugins": ((None,), "train.py sets the plugins itself"),
    "trainer.barebones": ((False,), "A run needs its callbacks and logs"),
    "trainer.overfit_batches": ((0, 0.0), "Train on a small file instead, with data=text and data.path"),
}  # fmt: skip
# {callback of Lightning: advice}. Each of these callbacks would fail in a run of train.py, or would change the rows of
# a step or the learning rate.
UNSUPPORTED_CALLBACKS = {
    "lightning.pytorch.callbacks.batch_size_finder.BatchSizeFinder":
        "Set batch_size and data.micro_batch_size instead. scripts.plan_memory predicts which sizes fit",
    "lightning.pytorch.callbacks.gradient_accumulation_scheduler.GradientAccumulationScheduler":
        "Set batch_size and data.micro_batch_size instead, which determine the accumulation",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder":
        "Set optimizer.lr instead, for example in a sweep: -m optimizer.lr=1e-4,1e-3",
    "lightning.pytorch.callbacks.stochastic_weight_avg.StochasticWeightAveraging":
        "It averages weights only at the ends of epochs. Use lightning.pytorch.callbacks.EMAWeightAveraging instead",
}  # fmt: skip
# {callback with an argument `monitor`: the values of `monitor` that it can read}
MONITORING = {
    "lightning.pytorch.callbacks.early_stopping.EarlyStopping": (None, "val/loss"),
    # ModelCheckpoint itself adds step and epoch to the metrics
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint": (None, "val/loss", "step", "epoch"),
}
LEARNING_RATES = "lightning.pytorch.callbacks.lr_monitor.LearningRateMonitor"  # makes learning rates readable


def require_one_value(config: Mapping[str, Any], folder: str) -> None:
    """Checks that no node of the config, such as `data`, contradicts the settings of the run.

    config: a config that fa_train.settings.check has checked. folder: the run's folder.
    Raises: ValueError if a key of a config node has a value that contradicts the run's settings, if callbacks.monitor
    is missing, or if a callback is not supported. The error message says what to set instead.
    """
    for key, original in COPIES.items():
        value, wanted = value_of(config, key), value_of(config, original)
        if value not in (..., wanted):
            of_run = f", which is {shown(wanted)}" if not isinstance(wanted, Mapping) else ""
            raise ValueError(f"{key} must equal {original}{of_run}; got {shown(value)}. Set {original} instead")
    for key, (supported, advice) in UNSUPPORTED.items():
        value = value_of(config, key)
        # compare types too, because 1 == 1.0, but limit_train_batches=1 is one batch and 1.0 is all batches
        if value is not ... and not any(type(value) is type(other) and value == other for other in supported):
            raise ValueError(f"{key} must be {shown(supported[-1])}; got {shown(value)}. {advice}")
    for key, callback in (("enable_progress_bar", "progress"), ("enable_checkpointing", "checkpoint")):
        if value_of(config, f"trainer.{key}") is False and config["callbacks"].get(callback):
            raise ValueError(f"trainer.{key}=false needs callbacks.{callback}=null; got a callback")
    for key in ("trainer.max_steps", "trainer.precision", "trainer.val_check_interval"):
        if value_of(config, key) is ...:  # train.py needs these values, and does not use Lightning's defaults
            raise ValueError(f"{key} must be given; got nothing")
    sampler = value_of(config, "trainer.use_distributed_sampler")
    if sampler is not False:  # if use_distributed_sampler is not set, Lightning uses true
        raise ValueError(
            f"trainer.use_distributed_sampler must be false; got {'no value' if sampler is ... else shown(sampler)}. "
            "The data module itself assigns rows to ranks"
        )
    if value_of(config, "trainer.default_root_dir") not in (..., folder):
        raise ValueError(
            f"trainer.default_root_dir must be the run's folder, {folder}; got "
            f"{value_of(config, 'trainer.default_root_dir')}. Set hydra.run.dir instead"
        )
    if value_of(config, "callbacks.monitor") in (None, ...):
        raise ValueError(
            "callbacks.monitor must be a node, because checkpoints and logs need its measurements; got none"
        )
    require_supported_callbacks(config)


def require_supported_callbacks(config: Mapping[str, Any]) -> None:
    """Refuses callbacks that cannot work in a run of train.py.

    Raises: ValueError if a callback is, or is derived from, a class in UNSUPPORTED_CALLBACKS. ValueError if a
    callback monitors a metric that is not in MONITORING, unless a user's class or LearningRateMonitor may log metrics.
    """
    callbacks = {f"callbacks.{name}": node for name, node in config["callbacks"].items() if node}
    targets = [node["_target_"] for node in (config["lit_gpt"], *callbacks.values())]
    has_own_code = not all(target.startswith(("fa_train.", "lightning.")) for target in targets)
    all_classes = {key: set(classes_of(key, node["_target_"])) for key, node in callbacks.items()}
    has_own_code |= any(LEARNING_RATES in classes for classes in all_classes.values())
    for key, node in callbacks.items():
        classes = all_classes[key]
        for name in UNSUPPORTED_CALLBACKS.keys() & classes:
            raise ValueError(f"{key} must not be a {name.rpartition('.')[2]}; got one. {UNSUPPORTED_CALLBACKS[name]}")
        readable = next((MONITORING[name] for name in MONITORING.keys() & classes), None)
        if readable and not has_own_code and node.get("monitor") not in readable:
            raise ValueError(f"{key}.monitor must be val/loss; got {node['monitor']}, which callbacks cannot read")
