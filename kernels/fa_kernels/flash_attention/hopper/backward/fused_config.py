"""How the fused backward kernel works a call: one frozen configuration for each head_dim, dtype and soft cap.

The choices were measured on an H200; docs/hopper.md says what was tried. The compiler forces some of them: ptxas
serialises all matmuls if the accumulators in flight do not fit in the registers (fused.py).
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from fa_kernels.flash_attention.hopper.backward.items import SUM_BLOCK


@dataclass(frozen=True)
class FusedConfig:
    """block_m: queries of a step; stages, ds_stages: steps of Q and dO, and of dS, in flight.

    dynamic: programs take items from a queue.
    halves: P, the soft cap's factor and dP - delta are multiplied in 16 bits.
    ahead: S of the next step is begun in this one, after the exponentials, or `after_dp`: when dP is complete.
    lse_early, delta_early: lse is read before the wait for dO, delta before the wait for dP.
    each_hands_over: each thread signals for itself that dS is written (barriers.hand_over), not one for all.
    """

    block_m: int
    stages: int
    ds_stages: int
    dynamic: bool = False
    halves: bool = False
    ahead: bool = False
    after_dp: bool = False
    lse_early: bool = True
    delta_early: bool = False
    each_hands_over: bool = False


_HALVES_128 = FusedConfig(64, 2, 2, halves=True)
# by head_dim and dtype; 193 to 227 KiB of shared memory
CONFIGS = {
    (64, torch.bfloat16): FusedConfig(
        64, 4, 2, dynamic=True, halves=True, ahead=True, after_dp=True, lse_early=False, each_hands_over=True
    ),
    (64, torch.float16): FusedConfig(128, 2, 2),
    (96, torch.bfloat16): FusedConfig(64, 3, 2, dynamic=True, halves=True, ahead=True, each_hands_over=True),
    (96, torch.float16): FusedConfig(64, 3, 2, dynamic=True),
    (128, torch.bfloat16): replace(_HALVES_128, delta_early=True, each_hands_over=True),
    (128, torch.float16): FusedConfig(64, 2, 2),
}
# With a soft cap, whose factor of dS takes registers. fp16 at 128 has too few, and bf16 at 96 too few for `ahead`.
_CAPPED_96 = FusedConfig(64, 3, 3)
CAPPED_CONFIGS = {
    (64, torch.bfloat16): FusedConfig(64, 4, 4, halves=True, ahead=True, after_dp=True, lse_early=False),
    (64, torch.float16): FusedConfig(64, 4, 2, dynamic=True),
    (96, torch.bfloat16): _CAPPED_96,
    (96, torch.float16): _CAPPED_96,
    (128, torch.bfloat16): _HALVES_128,
}


def config_of(
    head_dim: int, dtype: torch.dtype, softcap: float, ordered: bool = False, group: int = 1
) -> FusedConfig | None:
    """The configuration of a call, or None if the fused kernel does not take it.

    ordered: tiles add to dQ in one order (order.py). group: query heads per KV head.
    """
    config = (CAPPED_CONFIGS if softcap else CONFIGS).get((head_dim, dtype))
    if config is None:
        return None
    if ordered and config.block_m > SUM_BLOCK:  # steps of 128 queries would wait for one another in a chain
        config = CAPPED_CONFIGS[head_dim, dtype]
    return _variant(config, ordered, late_lse=head_dim == 96 and softcap != 0.0 and group > 1)


@cache
def _variant(config: FusedConfig, ordered: bool, late_lse: bool) -> FusedConfig:
    """`config` for the dQ order, in which a program has one item: in a queue it could wait for a missing program."""
    return replace(config, dynamic=config.dynamic and not ordered, lse_early=config.lse_early and not late_lse)
