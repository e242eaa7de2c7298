"""Finds the metrics that a run had at the step of a checkpoint."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from fa_train.models.hf.weights import read_json
from fa_train.parallel.sharded_checkpoint import read_parts

TOKENS, LOSSES = "tokens", "losses"  # a checkpoint stores the number of trained tokens and its losses under these keys
VAL_STEP = "val/step"  # the step of val/loss in the metrics of a run


def metrics_of(checkpoint: Path, result: Mapping[str, float]) -> dict[str, float]:
    """Returns the tokens, train/loss and val/loss of a checkpoint's step. Omits metrics that are not known.

    A checkpoint that is written before the validation of its step does not store val/loss. If the
    checkpoint does not store val/loss, val/loss comes from `result`, but only if all metrics in `result` belong to the
    checkpoint's step.
    result: the newest metrics of the checkpoint's run, as in its result.json. The metrics in result.json can belong to
    a later step, or to another run in the same folder.
    Raises: CheckpointError if the checkpoint is damaged.
    """
    content, _ = read_parts(checkpoint)
    stored = {name: content[name] for name in (TOKENS,) if name in content} | content.get(LOSSES, {})
    own, latest = ({k: v for k, v in values.items() if isfinite(v)} for values in (stored, result))
    is_same = all(own.get(name) == latest.get(name) for name in (TOKENS, "train/loss"))
    if is_same and latest.get(VAL_STEP) == content["global_step"] and "val/loss" in latest:
        own["val/loss"] = latest["val/loss"]
    return own


def read_result(run: Path) -> dict[str, float]:
    """Returns the metrics in a run's result.json, or an empty dict if there is no such file.

    Raises: ValueError if the file cannot be read, or holds anything but numbers.
    """
    path = run / "result.json"
    result = read_json(path) if path.exists() else {}
    for name, value in result.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{path} must hold numbers; got {value!r} for {name}")
    return result
