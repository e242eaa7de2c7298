"""Trains a GPT: `python train.py [key=value ...]`. The settings are in conf/, starting with conf/train.yaml."""

import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from fa_train.parallel.ctrl_c import ctrl_c_ends_at_once, ctrl_c_raises

if __name__ == "__main__":
    ctrl_c_ends_at_once()  # called before the other imports, which take a second

import hydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fa_train.command_line import require_form, sweep_folder_mistake
from fa_train.cuda_driver import has_gpu
from fa_train.errors import DivergedError, RankFailedError, errors_in_one_line
from fa_train.output import outlive_readers, replace_unprintable
from fa_train.parallel.decisions import decided_by_rank_zero, fresh_folder
from fa_train.parallel.failures import failures_reported
from fa_train.parallel.ranks import end_with_launcher, is_one_of_several, is_started_by_train_py, ranks_to_start
from fa_train.run_config import (
    check,
    in_sweep,
    launch_ranks,
    require_start,
    require_wandb,
    run_folder,
    sweep_group,
    to_container,
    wandb_tags,
)
from fa_train.sweep_table import print_tables

MISTAKES = ValueError, DivergedError, RankFailedError, HydraException, OmegaConfBaseException  # reported in one line
# {metric: another metric of the same log, which is never NaN}. result.json omits NaN. If result.json has only the
# second metric, the first one was NaN.
LOGGED_WITH = {"train/loss": "lr", "train/grad_norm": "lr", "val/loss": "val/step"}
OmegaConf.register_new_resolver("auto_preset", lambda: "gpu" if has_gpu() else "cpu", replace=True)
OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)  # also checks run_name
OmegaConf.register_new_resolver("sweep_group", sweep_group, replace=True)
OmegaConf.register_new_resolver("wandb_tags", wandb_tags, replace=True)
# use_cache: Hydra resolves the folder's name several times, but a run must create only one folder
OmegaConf.register_new_resolver(
    "fresh_folder",
    lambda wanted: decided_by_rank_zero("folder", partial(fresh_folder, wanted)),
    use_cache=True,
    replace=True,
)


def mistakes_reported() -> AbstractContextManager[None]:
    """Returns a context manager that catches errors of types in `MISTAKES`, prints one line and ends the process."""
    return failures_reported(MISTAKES) if is_one_of_several() else errors_in_one_line(MISTAKES)


def optimized(result: dict[str, float], metric: str) -> float:
    """Returns the metric that a sweeper optimizes.

    Returns NaN if the metric was NaN, or if the run ran out of memory or had nothing to do.

    result: the metrics of a run, as in its result.json.
    Raises: ValueError if the run has not measured `metric`.
    """
    if result and "oom" not in result and metric not in result and LOGGED_WITH.get(metric) not in result:
        raise ValueError(f"optimized_metric must be a metric of this run: {', '.join(sorted(result))}; got {metric}")
    return result.get(metric, float("nan"))


def run(cfg: DictConfig) -> dict[str, float]:
    """Trains in this process, or starts one process per rank. Returns the run's last metrics."""
    n_ranks = ranks_to_start(cfg.trainer)
    require_start(cfg, n_ranks)
    if n_ranks > 1:
        return launch_ranks(n_ranks)
    from fa_train.training import train  # the import of torch and Lightning takes seconds

    ctrl_c_raises()
    return train(cfg)


def run_in_own_process(cfg: DictConfig) -> dict[str, float]:
    """Trains one job of a sweep in a new process, with `cfg.sweep_job`. Returns the run's last metrics."""
    require_wandb(to_container(cfg))
    from fa_train.training import train

    ctrl_c_raises()
    result: dict[str, float] = instantiate(cfg.sweep_job)(train, cfg)
    return result


def set_environment() -> None:
    """Sets environment variables that Hydra, torch and Triton read.

    If the user has already set a variable of torch or Triton, the variable keeps its value.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # prevents fragmentation
    # Triton's default folder. If TRITON_CACHE_DIR is not set, torch.compile chooses another folder after some kernels
    # have been compiled, and the next run compiles these kernels again.
    triton_home = os.environ.get("TRITON_HOME", os.path.expanduser("~"))
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(triton_home, ".triton", "cache"))


def is_raised_by_hydra(error: OSError) -> bool:
    """Returns True if Hydra's own code, and not the code of a run, raised this error about a file."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    # from Python 3.13 on, pathlib is a folder
    files = [file for file in files if "pathlib" not in (file.stem, file.parent.name)]
    return error.filename is not None and bool(files) and Path(hydra.__file__).parent in files[-1].parents


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> dict[str, float] | float:
    with nullcontext() if in_sweep() else mistakes_reported():  # a sweep reports all errors at its end
        check(cfg)
        result = run_in_own_process(cfg) if in_sweep() and "sweep_job" in cfg else run(cfg)
    if "oom" in result and not in_sweep():
        sys.exit(1)
    # a rank that train.py has started returns no metric, because its parent process returns the metric
    is_asked = cfg.optimized_metric is not None and not is_started_by_train_py()
    return result if not is_asked else optimized(result, cfg.optimized_metric)


if __name__ == "__main__":
    set_environment()
    outlive_readers()
    replace_unprintable()
    if is_started_by_train_py():
        end_with_launcher()
    with mistakes_reported():
        try:
            require_form(sys.argv[1:])
            main()
        except OSError as error:
            if not is_raised_by_hydra(error):
                raise
            raise ValueError(
                f"hydra.run.dir or hydra.sweep.dir must be a folder that can be written; got {error.filename}: "
                f"{error.strerror}"
            ) from error
        except ValueError as error:
            if message := sweep_folder_mistake(error, sys.argv[1:]):
                raise ValueError(message) from error
            raise
        finally:
            print_tables()
