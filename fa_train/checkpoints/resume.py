"""Finds the checkpoint that a run resumes from."""

import re
import shlex
from pathlib import Path

from fa_train import settings
from fa_train.checkpoints.base import require_same_weights
from fa_train.checkpoints.files import SUFFIX, CheckpointError, newest, shapes
from fa_train.config_options import in_quotes
from fa_train.models.gpt import GPT
from fa_train.parallel.sharded_checkpoint import read_parts, require_whole


def runs_folder(run_name: object) -> Path:
    """Returns the folder that ckpt_path=last searches. Raises: ValueError if run_name is not a valid folder name."""
    return Path("runs", settings.run_folder(run_name))


def override_for(checkpoint: Path, runs: Path) -> str:
    """Returns the override of train.py that resumes from `checkpoint`: ckpt_path=last or ckpt_path=<path>.

    A checkpoint in the folder of a run name gets the override ckpt_path=last, and any other checkpoint gets its path. A
    path with special characters is quoted for Hydra and for the shell. runs: as for checkpoint_path.
    """
    if runs.resolve() in checkpoint.resolve().parents[1:3]:
        return "ckpt_path=last"
    path = str(checkpoint)
    if re.fullmatch(r"[A-Za-z0-9_./-]+", path):
        return f"ckpt_path={path}"
    return shlex.quote(f"ckpt_path={in_quotes(path)}")


def checkpoint_path(ckpt_path: str | None, runs: Path) -> str | None:
    """Returns the path of the checkpoint to resume from, or None to start a new run.

    ckpt_path: a path, "last" for the newest undamaged checkpoint of the runs in `runs`, or None. `runs` itself and each
    folder in `runs` can be the folder of a run. Deeper folders are not searched, because they belong to runs
    with another run_name. The function prints a line for each damaged checkpoint that "last" skips.
    Raises: ValueError if ckpt_path is empty, does not exist, is damaged or is not a checkpoint.
    """
    if ckpt_path is None:
        return None
    if not ckpt_path.strip():
        raise ValueError("ckpt_path must be a checkpoint, `last` or null; got an empty text")
    if ckpt_path != "last":
        if not Path(ckpt_path).exists():
            raise ValueError(f"ckpt_path must be a checkpoint or `last`; {ckpt_path} does not exist")
        require_whole(Path(ckpt_path))
        return ckpt_path
    found = newest(path for folder in ("*", "*/*") for path in runs.glob(f"{folder}/*{SUFFIX}"))
    for path in found:
        try:
            require_whole(path)
        except CheckpointError as error:
            print(f"ckpt_path=last skips a checkpoint: {error}")
        else:
            return str(path)
    if found:
        raise ValueError(f"ckpt_path=last found only damaged checkpoints below {runs} ({len(found)} in all)")
    raise ValueError(f"ckpt_path=last found no checkpoint below {runs}. Set run_name to that of the run to resume")


def steps_done(ckpt_path: str | None, model: GPT) -> int:
    """Returns the number of optimizer steps that a checkpoint was trained for, or 0 without a checkpoint.

    Raises: CheckpointError if the checkpoint was written by a run with another model or adapter.
    """
    if ckpt_path is None:
        return 0
    content, weights = read_parts(Path(ckpt_path))
    require_same_weights(model, shapes(weights), content, ckpt_path)
    return int(content["global_step"])
