"""Makes process groups for host memory, and sets NCCL's timeout, its flight recorder (a log of collectives), and the
priority of ddp's kernels.
"""

import os
from datetime import timedelta
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.distributed.constants import default_pg_timeout

from fa_train.private_names import private, replace_private

# A rank may have to wait for rank 0 to write a checkpoint, or for another rank to compile.
TIMEOUT = timedelta(minutes=10)
RECORDED = 2000  # the number of collectives that the flight recorder of each rank keeps


def host_group(timeout: timedelta) -> dist.ProcessGroup:
    """Makes a process group of all ranks for tensors in host memory. All ranks must call this function.

    The group's collectives need no GPU memory and do not wait for the GPU.
    """
    group: Any = dist.new_group(backend="gloo", timeout=timeout)  # torch returns an int on ranks outside a group
    return group


def configure(trainer: L.Trainer, *, has_timeout: bool) -> None:
    """Shortens the timeout of collectives, turns the flight recorder on, and gives ddp's collectives high priority.

    With high priority, NCCL's kernels can begin while kernels of the backward pass wait for free multiprocessors.
    Values that the user has set do not change.
    has_timeout: whether the config has the key strategy.timeout. The value of the timeout does not show whether the
    user has set it, because the user can set torch's default.

    If a collective times out, the rank writes records of its last collectives to nccl_trace_rank_<rank> in the run's
    folder, and ends. Call `configure` before the process group exists.
    """
    if trainer.world_size == 1:
        return
    strategy = trainer.strategy
    if not has_timeout and private("lightning", strategy, "_timeout") == default_pg_timeout:
        replace_private("lightning", strategy, "_timeout", TIMEOUT)
    if isinstance(strategy, DDPStrategy):
        set_unless_given("1", "TORCH_NCCL_HIGH_PRIORITY")
    set_unless_given("1", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    set_unless_given(str(RECORDED), "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    trace = os.path.join(os.path.abspath(trainer.default_root_dir), "nccl_trace_rank_")
    set_unless_given(trace, "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def timeout_of(strategy: Strategy) -> timedelta:
    """Returns how long a rank waits for other ranks. A user can set it as strategy.timeout."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)  # some strategies of Lightning have none
    return TIMEOUT if timeout is None else timeout


def set_unless_given(value: str, name: str, *older_names: str) -> None:
    """Sets the environment variable `name`, unless it is already set under this name or an older name."""
    if not os.environ.keys() & {name, *older_names}:
        os.environ[name] = value
