"""Restores optimizers and learning-rate schedules from checkpoints.

A restored optimizer has the settings of the new run, such as lr, and not the settings of the checkpoint. A restored
schedule has the settings of the new run, and continues at the checkpoint's step. The optimizers of adamw.py
reject a checkpoint that another kind of optimizer wrote.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial, partialmethod
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Adam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fa_train.optim.adamw import OptimizerKind, kind_of
from fa_train.optim.compiled_step import CompiledStep
from fa_train.optim.schedule import LearningRateSchedule, steps_in

TRAINED_WEIGHTS = "trained_weights"  # a checkpoint stores the result of trained_weights under this key
OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}  # torch's add these
NEED_STATE = ("amsgrad", "centered", "momentum")  # with these settings, torch's Adam and RMSprop store more tensors


def keep_own_settings(optimizer: Optimizer, scheduler: LRScheduler) -> None:
    """Makes an optimizer and its scheduler keep their settings when they load a checkpoint.

    A scheduler of torch loads only its number of steps, and repeats these steps with the settings of the new run. A
    scheduler with its own load_state_dict is not changed, and continues with the checkpoint's lr. An optimizer that
    does not call Optimizer.__init__, such as torchao's CPUOffloadOptimizer, is not changed.
    """
    kind: Any = type(scheduler)
    is_torch = isinstance(scheduler, LRScheduler) and kind.load_state_dict.__module__ == LRScheduler.__module__
    repeats = is_torch and not isinstance(scheduler, ReduceLROnPlateau)  # ReduceLROnPlateau needs a metric
    sets_lr = repeats or isinstance(scheduler, LearningRateSchedule)
    kept_from_checkpoint = {"params"} if sets_lr else {"params", "lr"}
    # before FSDP2 loads a checkpoint, it makes an optimizer step, which can add entries such as a step count
    names = [group.keys() - kept_from_checkpoint for group in optimizer.param_groups]
    with suppress(AttributeError):
        optimizer.register_load_state_dict_pre_hook(partial(with_own_settings, names=names))
    if repeats:
        # a new class is used, because a new attribute of the scheduler would be part of its state_dict
        changed = {"load_state_dict": partialmethod(_repeat_steps, kind.load_state_dict)}
        scheduler.__class__ = cast(Any, type(kind.__name__, (kind,), changed))


def with_own_settings(optimizer: Optimizer, saved: dict[str, Any], names: Sequence[Collection[str]]) -> dict[str, Any]:
    """Returns the state_dict `saved` with the optimizer's current settings, such as lr and betas.

    names: the names of the settings of each parameter group.
    Moments and step counts do not change. In some optimizers, the parameter groups also hold values that every step
    updates, such as d of Prodigy. Such values have defaults, but are not arguments of the optimizer's class. The
    function does not replace them.
    Raises: ValueError if another optimizer wrote the checkpoint, if the number of weights or the shape of a moment
        differs, or if a setting needs a state that the checkpoint lacks.
    """
    _require_same_class(optimizer, saved)
    require_same_weights(optimizer, saved)
    constructors = [vars(kind)["__init__"] for kind in type(optimizer).__mro__ if "__init__" in vars(kind)]
    arguments = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    values = set(optimizer.defaults) - arguments
    own = [
        {name: group[name] for name in chosen if name in group and name not in values}
        for group, chosen in zip(optimizer.param_groups, names, strict=False)
    ]
    if len(own) != len(saved["param_groups"]):
        return saved  # a parameter group was added after the call of keep_own_settings
    for group, settings in zip(saved["param_groups"], own, strict=True):
        for name in NEED_STATE if isinstance(optimizer, Adam | RMSprop) else ():
            if settings.get(name) and not group.get(name, True):
                raise ValueError(
                    f"optimizer.{name} must be {group[name]}, as in the checkpoint, which lacks the state that "
                    f"another value needs; got {settings[name]}"
                )
    groups = [group | settings for group, settings in zip(saved["param_groups"], own, strict=True)]
    return saved | {"param_groups": groups}


def _require_same_class(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises: ValueError if `optimizer` is torch's, and the names of settings show that another class wrote `saved`.

    Versions of torch differ in their settings, so the error is raised only if one setting is missing and another is
    unknown.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return  # a user's subclass may have renamed its own settings
    for own, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        missing = sorted(optimizer.defaults.keys() - theirs.keys())
        unknown = sorted(theirs.keys() - own.keys() - OF_SCHEDULERS)
        if missing and unknown:
            raise ValueError(
                f"ckpt_path must be a checkpoint of the same optimizer: {type(optimizer).__name__} has the settings "
                f"{', '.join(missing)}; got {', '.join(unknown)}"
            )


def trained_weights(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[list[str]]:
    """Returns the names of each optimizer's weights, in the order of the weights in the optimizer's groups.

    The name of a weight that is not in `module` is an empty text.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [
        [names.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]
        for optimizer in optimizers
    ]


def require_same_names(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]] | None) -> None:
    """Checks that a run trains the weights that its checkpoint's run trained, in the same order.

    The optimizer's states in a checkpoint file have no names, only positions in this order.
    own, saved: the results of trained_weights in the two runs. `saved` is None or empty if the checkpoint has no names.
    Raises: ValueError if the names or their order differ.
    """
    if not saved or own == saved:
        return
    ours, theirs = ([name for names in x for name in names] for x in (own, saved))
    more, fewer = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    if more or fewer:
        raise ValueError(
            "ckpt_path must be a checkpoint of a run that trained the same weights. Trained only by this run: "
            f"{_first_of(more)}; trained only by the checkpoint's run: {_first_of(fewer)}. Freeze the same weights in "
            "both runs"
        )
    counts = [len(names) for names in own], [len(names) for names in saved]
    ours_first, theirs_first = next((x for x in zip(ours, theirs, strict=False) if x[0] != x[1]), counts)
    raise ValueError(
        "ckpt_path must be a checkpoint whose optimizers have the same weights in the same order: "
        f"{ours_first}; got {theirs_first}"
    )


def _first_of(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def require_same_weights(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Checks that the state_dict `saved` fits the optimizer's weights.

    `saved` has no names of weights (see require_same_names), so the check compares the numbers of weights. For the
    optimizers of fa_train and most optimizers of torch, the check also compares the shapes of the moments. With a
    moment of another shape, a fused optimizer of torch would write outside its memory.
    Raises: ValueError if a group of `saved` has another number of weights, or a moment has another shape.
    """
    own, theirs = ([len(group["params"]) for group in x] for x in (optimizer.param_groups, saved["param_groups"]))
    if own != theirs:
        raise ValueError(
            f"ckpt_path must be a checkpoint of a run that trained the same weights: {own} weights in the optimizer's "
            f"groups; got {theirs}. Freeze the same weights as that run"
        )
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for weight, number in zip(weights, numbers, strict=True):
        for moment in _moments_like_weights(optimizer, saved["state"].get(number, {})):
            if moment.shape != weight.shape:
                raise ValueError(
                    "ckpt_path must be a checkpoint of a run that trained the same weights: a moment of the optimizer "
                    f"must have the shape {tuple(weight.shape)}; got {tuple(moment.shape)}. Freeze the same weights as "
                    "that run"
                )


def _moments_like_weights(optimizer: Optimizer, state: Mapping[str, Any]) -> list[Tensor]:
    """Returns those tensors of a weight's state that must have the weight's shape."""
    own_step = not type(optimizer).step.__module__.startswith("torch.optim") and not isinstance(optimizer, CompiledStep)
    if own_step or isinstance(optimizer, Adafactor | LBFGS):  # such optimizers may store tensors of any shape
        moments = [state.get("exp_avg")] if isinstance(optimizer, Adam) else []
    else:
        moments = [value for name, value in state.items() if name != "step"]
    # scalars, such as mu_product of NAdam, do not have the weight's shape
    return [moment for moment in moments if isinstance(moment, Tensor) and moment.dim()]


def _repeat_steps(scheduler: Any, load: Callable[[Any, Any], None], saved: dict[str, Any]) -> None:
    """Calls scheduler.step() until the scheduler has made as many steps as the scheduler that wrote `saved`.

    load: the scheduler's own load_state_dict, which is called if the scheduler must go back to an earlier step. Only
    Lightning's tuners go back to an earlier step.
    """
    missing = steps_in(saved) - steps_in(scheduler.state_dict())
    if missing < 0:
        load(scheduler, saved)
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        for _ in range(missing):
            scheduler.step()


def require_same_kind(configured: Callable[..., Optimizer], saved: Mapping[str, Any]) -> None:
    """Checks that the configured optimizer can load the state_dict `saved`.

    configured: the function that makes the optimizer, as for fa_train.optim.adamw.kind_of. A user's own optimizer is
    not checked.
    Raises: ValueError if another optimizer wrote `saved`.
    """
    own = kind_of(configured)
    if own is None:
        return  # the state of a user's optimizer has an unknown format
    written_by = kinds_that_write(saved)
    if own not in written_by:
        got = f"one of optimizer={' or '.join(written_by)}" if written_by else "one that no optimizer in conf/ wrote"
        raise ValueError(f"ckpt_path must be a checkpoint of optimizer={own}; got {got}")


def kinds_that_write(saved: Mapping[str, Any]) -> Sequence[OptimizerKind]:
    """Returns the optimizers of fa_train.optim.adamw that may have written the state_dict `saved`.

    The result is empty if none of these optimizers can have written `saved`.
    """
    if "offloaded" in saved:
        return ["adamw_offload"]
    states = saved["state"].values()
    if any("exp_avg" not in state for state in states) or any("betas" not in group for group in saved["param_groups"]):
        return []
    if any("fused" in group for group in saved["param_groups"]):
        return ["adamw"]
    if any("low_bits" in state for state in states):
        return ["adamw_master"]
    if not states:  # no parameter has had a gradient yet
        return ["adamw_8bit", "adamw_bf16", "adamw_master"]
    moments = [state["exp_avg"] for state in states]
    if any(isinstance(moment, dict) for moment in moments):
        return ["adamw_8bit"]
    if any(moment.numel() >= 4096 and moment.numel() % 256 == 0 for moment in moments):  # adamw_8bit quantizes these
        return ["adamw_bf16"]
    return ["adamw_8bit", "adamw_bf16"]
