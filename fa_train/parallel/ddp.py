"""The strategy of conf/strategy/auto.yaml: runs on several ranks use DDP, and other runs use no strategy."""

from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy

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
