"""AdamW for bf16 weights, with fp32 master weights that need only 16 more bits per weight.

The bits of an fp32 master weight, read as int32, equal 2**16 * high + low. `high` is the bits of the bf16 weight, read
as int16. `low`, called the low bits of the master weight, is a signed 16-bit number. Source: the split weights of
arXiv:2005.04680. The bf16 weight is the master weight rounded to nearest, and ties are rounded away from zero.

Before the first step, the low bits are pseudo-random. If all low bits started at 0, many bf16 weights would stay
unchanged for several steps, and then all change in the same step.
"""

import math
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fa_train.models.shards import local, own_rows
from fa_train.optim.compiled_step import CompiledStep, Groups, Scalars, adamw_values, update_in_place
from fa_train.optim.resume import require_same_weights

DRAWN = 2**23  # the number of elements whose low bits are drawn at a time; drawing takes up to 16 bytes per element
COLUMNS = 16  # if the number of elements is a multiple of 16, Triton uses vector loads, which are twice as fast


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits fp32 values into two int16 tensors: the bits of the rounded bf16 values, and the low bits."""
    bits = master.view(torch.int32)
    quiet_nan = (bits >> 16) | 0x40  # rounding could turn a NaN into infinity or zero
    high = torch.where(master.isnan(), quiet_nan, (bits + 0x8000) >> 16)
    return high.to(torch.int16), (bits - (high << 16)).to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Reverses `split`. A NaN stays NaN, but its bits may change.

    If the bf16 weight is 0, negative low bits count as 0, because the result would otherwise be NaN.
    """
    is_zero = (high & 0x7FFF) == 0
    bits = (high.to(torch.int32) << 16) + torch.where(is_zero, low.clamp(min=0), low).to(torch.int32)
    return bits.view(torch.float32)


def first_low_bits(parameter: Tensor) -> Tensor:
    """Returns the initial low bits of a bf16 parameter, int16, in the shape of this rank's rows.

    The low bits depend only on the element's place in the parameter, and not on the number of ranks.
    """
    own, rows = own_rows(parameter.detach())
    result = torch.empty_like(own, dtype=torch.int16)
    flat, begin = result.view(-1), rows.start * math.prod(own.shape[1:])
    for first in range(0, flat.numel(), DRAWN):
        part = flat[first : first + DRAWN]
        part.copy_(_mixed(torch.arange(begin + first, begin + first + part.numel(), device=own.device)))
    return result


def _mixed(x: Tensor) -> Tensor:
    """Replaces int64 numbers by pseudo-random numbers from -2**15 to 2**15 - 1, in place, similarly to SplitMix64."""
    x.mul_(-7046029254386353131)  # 0x9E3779B97F4A7C15
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x.bitwise_xor_(x >> shift).mul_(factor)
    return x.bitwise_right_shift_(48)


def _update_tensors(
    high: Tensor,
    low: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Updates the two halves of a master weight, its moments and its number of steps in place."""
    steps = step + 1
    new, mean, square = adamw_values(join(high, low), gradient.float(), first, second, steps, scalars, betas, eps)
    new_high, new_low = split(new)
    updates = [(high, new_high), (low, new_low), (first, mean), (second, square), (step, steps)]
    update_in_place(scalars.found_inf != 0, updates)


_compiled_update = torch.compile(_update_tensors, fullgraph=True)


def _flat(x: Tensor) -> Tensor:
    """Reshapes x to a matrix of `COLUMNS` columns, or to a vector if its size is not a multiple of `COLUMNS`.

    Parameters of many shapes become matrices of the same width, so one compiled update serves all of them. The result
    shares the memory of x.
    """
    flat = x.view(-1, COLUMNS) if x.numel() and x.numel() % COLUMNS == 0 else x.view(-1)
    # Without `.data`, the result is a view of x, and torch.compile compiles the update again for each shape of x.
    return flat.data


class MasterWeightsAdamW(CompiledStep, Optimizer):
    """AdamW with fp32 moments. The state `low_bits` holds the bits that the bf16 weights lack."""

    def __init__(self, groups: Groups, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the states without changing their dtypes.

        Optimizer.load_state_dict of torch would round the states to the dtype of the weights.
        Raises: ValueError as fa_train.optim.resume.require_same_weights.
        """
        require_same_weights(self, state_dict)
        super().load_state_dict(state_dict | {"state": {}})
        for parameter, saved in zip(
            _parameters(self.param_groups), _parameters(state_dict["param_groups"]), strict=True
        ):
            state = state_dict["state"].get(saved, {})
            if state:
                self.state[parameter] = {name: value.to(parameter.device) for name, value in state.items()}

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32, "low_bits": torch.int16}
        state = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in dtypes.items()}
        local(state["low_bits"]).copy_(first_low_bits(parameter))
        return state

    def _update_parameter(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], scalars: Scalars, group: dict[str, Any]
    ) -> None:
        low, first, second = (_flat(local(state[name])) for name in ("low_bits", "exp_avg", "exp_avg_sq"))
        high, gradient = _flat(weight.view(torch.int16)), _flat(gradient.contiguous())
        _compiled_update(
            high, low, gradient, first, second, state["step"], scalars, tuple(group["betas"]), group["eps"]
        )


def _parameters(groups: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(group["params"] for group in groups)
