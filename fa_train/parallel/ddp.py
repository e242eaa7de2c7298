"""The strategy of conf/strategy/auto.yaml, and a check of the weights whose gradients DDP averages."""

from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fa_train.errors import TrainedWeightsError
from fa_train.parallel.ranks import is_one_of_several, ranks_to_start


def automatic(
    devices: Any, num_nodes: Any, accelerator: Any, gradient_as_bucket_view: bool
) -> DDPStrategy | Literal["auto"]:
    """Returns DDP for a run on several devices, and otherwise "auto".

    With "auto" on one device, Lightning's Trainer uses no distributed strategy. With "auto" on several devices, the
    Trainer would use DDP with gradients outside the communication buckets.
    devices, num_nodes, accelerator: copies of the Trainer's settings. fa_train.settings checks trainer.devices instead
    of its copy strategy.devices, so that error messages name trainer.devices.
    gradient_as_bucket_view: as for DDPStrategy.
    """
    trainer = {"devices": devices, "accelerator": accelerator}
    if is_one_of_several() or num_nodes > 1 or ranks_to_start(trainer) > 1:
        return DDPStrategy(gradient_as_bucket_view=gradient_as_bucket_view)
    return "auto"


def require_averaged(model: Any, at_start: Mapping[nn.Parameter, bool], optimizers: Iterable[Optimizer]) -> None:
    """Checks that DDP will average the gradients of all weights that the optimizers train.

    The check needs no GPU time.

    DDP averages the gradients of the weights that are trained when DDP wraps the model. DDP ignores weights that are
    unfrozen later. If a weight is frozen later, DDP averages only a part of the gradients, unless
    find_unused_parameters is true.
    model: the strategy's model. Only a DistributedDataParallel is checked.
    at_start: whether each weight was trained when DDP wrapped the model.
    Raises: TrainedWeightsError if DDP would not average the gradients of all trained weights.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    changed = {p for p, was_trained in at_start.items() if p.requires_grad != was_trained}
    if not changed:
        return
    updated = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if unfrozen := {p for p in changed & updated if p.requires_grad}:
        raise TrainedWeightsError(
            "strategy=ddp averages only gradients of weights that are trained from the start; got weights that were "
            f"unfrozen later: {_names(model.module, unfrozen)}. Choose strategy=fsdp, or trainer.devices=1"
        )
    frozen = {p for p in changed if not p.requires_grad}
    if frozen and not model.find_unused_parameters:
        raise TrainedWeightsError(
            "strategy=ddp must train the same weights in all steps; got weights that were frozen after the start: "
            f"{_names(model.module, frozen)}. Set strategy=ddp +strategy.find_unused_parameters=true, or strategy=fsdp"
        )


def _names(module: nn.Module, parameters: Set[nn.Parameter]) -> str:
    """Returns a text with the name of the first parameter, and the number of the other parameters if there are any."""
    first, *others = [name for name, parameter in module.named_parameters() if parameter in parameters]
    return f"{first} and {len(others)} more" if others else first
