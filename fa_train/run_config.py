"""Checks a run's config after Hydra has composed it, and before torch or Lightning is imported.

A run's settings are checked in this order. Each check relies on the checks above it:

| check | finds | needs |
|:--|:--|:--|
| settings.check | unknown keys, and values of a wrong type | the config |
| copied_keys.require_one_value | keys of a node, such as `trainer`, that contradict the run | the config |
| early_checks.require_runnable | settings that exclude each other | the number of ranks |
| preflight.plan_of | settings that the model does not support | torch, and the model without weights |
| memory.planner.run.plan_memory | a run that does not fit in memory | the GPU |

The function `check` runs the first two rows, and `require_start` runs the third row. train.py calls both functions
before it starts any rank. fa_train.training runs the last two rows on each rank.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write

from fa_train import compat, copied_keys, early_checks, settings
from fa_train.errors import RankFailedError
from fa_train.parallel.ctrl_c import ctrl_c_raises
from fa_train.parallel.decisions import compared_by_rank_zero, decided_by_rank_zero
from fa_train.parallel.ranks import is_started_by_train_py, launcher_decisions, world_size

OF_LAUNCHER = re.compile(r"[+~]*hydra[./](mode|run|sweep|sweeper|launcher)\b")  # overrides that ranks must not get
FORBIDDEN_IN_PROJECT = "/\\#?%:"  # characters that the name of a W&B project must not contain


def check(cfg: DictConfig) -> None:
    """Checks all keys and values of a config. Replaces each `_target_` of an earlier version with its current name.

    If Hydra has read run_name as a number, replaces the number with the text that the user typed.

    Raises: ValueError if a key is unknown, has an invalid value or contradicts another key.
    """
    for key, target in compat.moved_targets(to_container(cfg, resolve=False)).items():
        OmegaConf.update(cfg, key, target)
    if HydraConfig.get().job.chdir:
        raise ValueError(
            "hydra.job.chdir must be false, because relative paths such as ckpt_path and data.path start at the folder "
            "in which train.py was started; got true"
        )
    chosen = HydraConfig.get().runtime.choices
    for group in settings.ONE_OPTION:
        if group in cfg and group not in chosen:  # the user chose several options of a group, and Hydra merged them
            raise ValueError(f"{group} must be one option of conf/{group}; got a list of them")
    for group, option in cfg.choices.items():
        if option != chosen.get(group):
            raise ValueError(f"choices.{group} only records the option; choose one with {group}={option}")
    settings.require_given(to_container(cfg, resolve=False))
    cfg.run_name = settings.as_typed(cfg.run_name, typed_overrides().get("run_name", ""))
    config = to_container(cfg)
    settings.check(config, typed_overrides())
    copied_keys.require_one_value(config, HydraConfig.get().runtime.output_dir)


def require_start(cfg: DictConfig, n_ranks: int) -> None:
    """Checks whether the run can start, before ranks are started. Does nothing in a rank that train.py has started.

    cfg: a config that `check` has checked.
    n_ranks: the result of fa_train.parallel.ranks.ranks_to_start.
    Raises: ValueError if settings exclude each other, or differ between ranks. The ValueError of `require_wandb`.
    """
    if is_started_by_train_py():
        return
    config = to_container(cfg)
    early_checks.require_runnable(config, world_size(n_ranks))
    own = json.dumps(to_container(cfg, resolve=False), default=str)  # the value of ${oc.env:RANK} differs by rank
    compared_by_rank_zero("settings", own, partial(require_equal_settings, own))
    decided_by_rank_zero("logger", partial(require_wandb, config))


def require_equal_settings(own: str, rank: int, of_rank: str) -> None:
    """Checks the settings of `rank` on rank 0. own, of_rank: configs in JSON. Raises: ValueError if they differ."""
    early_checks.require_equal_settings(json.loads(of_rank), json.loads(own), rank)


def require_wandb(config: Mapping[str, Any]) -> None:
    """Checks whether W&B can log, if the run uses W&B. Only rank 0 logs, so other ranks may have other loggers.

    config: the whole config as a dict.
    Raises: ValueError if W&B must log online but has no API key. ValueError if W&B would refuse the name of the project
    or the value of an environment variable. ValueError if the jobs of a multirun would share one W&B run.
    """
    logger = config["trainer"].get("logger")  # trainer.logger=false switches logging off
    if config["choices"]["logger"] != "wandb" or not isinstance(logger, dict):
        return
    project = str(logger.get("project"))
    if forbidden := [character for character in project if character in FORBIDDEN_IN_PROJECT]:
        raise ValueError(
            f"logger.project must not contain {forbidden[0]}; got {project}. Set the team with +logger.entity=<team>"
        )
    from fa_train.wandb_mode import require_api_key, require_known_variables  # importing wandb takes a second

    require_known_variables()
    setting, mode = "logger.mode", logger.get("mode")
    if not isinstance(mode, str):  # by default, logger.mode is a config node that chooses the mode
        setting, mode = "WANDB_MODE", os.environ.get("WANDB_MODE")
    if mode == "online":
        require_api_key(f"{setting}=online")
    # an agent of a W&B sweep sets both variables, and may start a multirun with one job
    if in_sweep() and mode != "disabled" and "WANDB_SWEEP_ID" not in os.environ and os.environ.get("WANDB_RUN_ID"):
        raise ValueError(
            "WANDB_RUN_ID must not be set in a multirun, whose jobs would all write to the same run of W&B; "
            f"got {os.environ['WANDB_RUN_ID']}"
        )


def launch_ranks(n_ranks: int) -> dict[str, float]:
    """Trains this run, or this job of a multirun, in n_ranks new processes. Returns the last metrics of rank 0.

    The result is empty if the run had nothing to do.
    Raises: fa_train.errors.RankFailedError if a rank fails. If a job of a multirun runs out of memory, the function
    raises no error, and returns a dict with the single metric `oom`, which is 1.
    """
    from fa_train.parallel.launch import launch  # imports torch, which takes seconds

    ctrl_c_raises()
    folder = Path(HydraConfig.get().runtime.output_dir)
    arguments = arguments_of_job(sys.argv[1:]) if in_sweep() else sys.argv[1:]
    file = folder / "result.json"
    before = file.stat().st_mtime_ns if file.exists() else None
    try:
        launch(n_ranks, arguments, decisions={"folder": str(folder), "sweep_group": sweep_group()})
    except RankFailedError as error:
        if not (in_sweep() and error.out_of_memory):
            raise
        print(f"error: {error}", file=sys.stderr)
        return {"oom": 1.0}
    if not file.exists() or file.stat().st_mtime_ns == before:  # an unchanged file is from an earlier run
        return {}
    result: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return result


def arguments_of_job(given: Sequence[str]) -> list[str]:
    """Returns the arguments with which a rank composes the same config as this job of a multirun.

    given: the arguments of the multirun.
    """
    hydra = HydraConfig.get()
    of_hydra = [override for override in hydra.overrides.hydra if not OF_LAUNCHER.match(override)]
    return [*config_options(given), *of_hydra, f"hydra.job.num={hydra.job.num}", *hydra.overrides.task]


def config_options(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments that choose a config, such as --config-dir, in their long form."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, short in (("dir", "cd"), ("name", "cn"), ("path", "cp")):
        parser.add_argument(f"--config-{name}", f"-{short}", dest=name)
    chosen = vars(parser.parse_known_args(arguments)[0])
    return [f"--config-{name}={value}" for name, value in chosen.items() if value is not None]


def in_sweep() -> bool:
    """Returns whether this run is part of a Hydra multirun."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def typed_overrides() -> dict[str, str]:
    """Returns the overrides of the command line, {key: text}."""
    overrides = (override.lstrip("+").partition("=") for override in HydraConfig.get().overrides.task)
    return {key: text.strip() for key, _, text in overrides}


def to_container(cfg: DictConfig, resolve: bool = True) -> dict[str, Any]:
    """Converts a config to dicts and lists."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=resolve))


class OneFolder(Callback):
    """A Hydra callback that makes all ranks of a run use one folder.

    Without OneFolder, an interpolation such as ${now:%H-%M-%S} in hydra.run.dir could have a different value on each
    rank.
    """

    def on_run_start(self, config: DictConfig, **others: Any) -> None:
        HydraConfig.instance().set_config(config)  # the value of hydra.run.dir may refer to ${hydra:...}
        # This callback ignores an invalid hydra.run.dir, because Hydra only prints a warning if a callback fails. Hydra
        # itself later resolves hydra.run.dir, and raises a ValueError.
        with suppress(ValueError), read_write(config.hydra.run):
            config.hydra.run.dir = launcher_decisions().get("folder") or decided_by_rank_zero(
                "hydra.run.dir", lambda: str(config.hydra.run.dir)
            )


def run_folder(run_name: object) -> str:
    """Returns the folder of a run. The name of the folder is `run_name` as the user typed it."""
    return settings.run_folder(settings.as_typed(run_name, typed_overrides().get("run_name", "")))


def sweep_group() -> str | None:
    """Returns the W&B group of a multirun's runs, or None for a single run."""
    return HydraConfig.get().sweep.dir if in_sweep() else launcher_decisions().get("sweep_group")


def wandb_tags(*tags: str) -> ListConfig:
    """Returns the tags in the environment variable WANDB_TAGS, or `tags` if the variable is not set."""
    given = os.environ.get("WANDB_TAGS")
    chosen = tags if given is None else [tag.strip() for tag in given.split(",") if tag.strip()]
    return ListConfig(list(chosen))
