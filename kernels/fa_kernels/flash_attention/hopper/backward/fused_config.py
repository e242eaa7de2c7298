"""Configurations of the fused backward kernel (fused.py), by head_dim and dtype, with and without a soft cap.

The values were chosen by measurements on an H200. docs/hopper.md lists the kernel changes that were tried. If the
accumulators in flight do not fit in the registers, ptxas serialises all matmuls.
"""

from functools import cache
from typing import NamedTuple

import torch

from fa_kernels.flash_attention.hopper.backward.items import SUM_BLOCK


class FusedConfig(NamedTuple):
    """One configuration of the fused backward kernel."""

    block_m: int  # queries of a step
    stages: int  # the number of steps whose Q and dO can be in shared memory at once
    ds_stages: int  # the number of steps whose dS can be in shared memory at once
    dynamic: bool = False  # whether programs draw items from a queue, instead of processing one item each
    bf16_products: bool = False  # whether dS = P * (derivative of the soft cap) * (dP - delta) is multiplied in bf16
    ahead: bool = False  # whether a step starts the next step's matmul S after its own exponentials
    after_dp: bool = False  # with `ahead`: the next step's matmul S starts only when this step's dP is complete
    lse_early: bool = True  # whether lse is read before the wait for dO, not after the wait
    delta_early: bool = False  # whether delta is read before the wait for dP, not after the wait
    each_hands_over: bool = False  # whether all threads, not only one, signal that dS is written (barriers.hand_over)


_BF16_128 = FusedConfig(block_m=64, stages=2, ds_stages=2, bf16_products=True)
# Configurations for calls without a soft cap. Without a soft cap, the kernel uses 193 to 227 KiB of shared memory.
CONFIGS = {
    (64, torch.bfloat16): FusedConfig(
        block_m=64,
        stages=4,
        ds_stages=2,
        dynamic=True,
        bf16_products=True,
        ahead=True,
        after_dp=True,
        lse_early=False,
        each_hands_over=True,
    ),
    (64, torch.float16): FusedConfig(block_m=128, stages=2, ds_stages=2),
    (96, torch.bfloat16): FusedConfig(
        block_m=64, stages=3, ds_stages=2, dynamic=True, bf16_products=True, ahead=True, each_hands_over=True
    ),
    (96, torch.float16): FusedConfig(block_m=64, stages=3, ds_stages=2, dynamic=True),
    (128, torch.bfloat16): _BF16_128._replace(delta_early=True, each_hands_over=True),
    (128, torch.float16): FusedConfig(block_m=64, stages=2, ds_stages=2),
}
# Configurations for calls with a soft cap. The derivative of the soft cap takes registers, so fp16 has no configuration
# at head_dim 128, and bf16 does not use `ahead` at head_dim 96.
_CAPPED_96 = FusedConfig(block_m=64, stages=3, ds_stages=3)
CAPPED_CONFIGS = {
    (64, torch.bfloat16): FusedConfig(
        block_m=64, stages=4, ds_stages=4, bf16_products=True, ahead=True, after_dp=True, lse_early=False
    ),
    (64, torch.float16): FusedConfig(block_m=64, stages=4, ds_stages=2, dynamic=True),
    (96, torch.bfloat16): _CAPPED_96,
    (96, torch.float16): _CAPPED_96,
    (128, torch.bfloat16): _BF16_128,
}


def config_of(
    head_dim: int, dtype: torch.dtype, softcap: float, ordered: bool = False, group: int = 1
) -> FusedConfig | None:
    """Returns the configuration of a call, or None if the fused kernel does not support the call.

    ordered: whether the additions to dQ have a fixed order (dq_order.py). group: the number of query heads per KV head.
    """
    config = (CAPPED_CONFIGS if softcap else CONFIGS).get((head_dim, dtype))
    if config is None:
        return None
    if ordered and config.block_m > SUM_BLOCK:  # dq_order.py supports only steps of SUM_BLOCK queries
        config = CAPPED_CONFIGS[head_dim, dtype]
    return _variant(config, ordered, late_lse=head_dim == 96 and softcap != 0.0 and group > 1)


@cache
def _variant(config: FusedConfig, ordered: bool, late_lse: bool) -> FusedConfig:
    """Returns `config`, changed for the options `ordered` and `late_lse`.

    With `late_lse`, a step reads lse only after the wait for dO. With `ordered`, the additions to dQ have a fixed
    order. With `ordered`, there is no queue, and each program has only one work item. With a queue, a running program
    could wait forever for a program that has not started.
    """
    return config._replace(dynamic=config.dynamic and not ordered, lse_early=config.lse_early and not late_lse)
