"""Adapts torchao's low-memory optimizers to torch's schedulers, to Lightning and to checkpoints.

adamw.py imports this file only if one of torchao's optimizers is chosen. Importing torchao takes seconds, and torchao
is not available on every system.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao import optim
from torchao.optim import AdamW8bit, CPUOffloadOptimizer, quant_utils, subclass_8bit

from fa_train.models.shards import local
from fa_train.optim.compiled_step import (
    Closure,
    CompiledStep,
    Groups,
    Scalars,
    adamw_values,
    run,
    update_in_place,
)
from fa_train.optim.resume import require_same_weights
from fa_train.private_names import private, require_names

_AdamW: Any = private("torchao", optim, "_AdamW")
OptimState8bit: Any = private("torchao", subclass_8bit, "OptimState8bit")
_round_stochastically, _dequantize, _quantize, _divide_blocks = (
    private("torchao", quant_utils, name)
    for name in ("_fp32_to_bf16_sr", "dequant_with_qmap", "quantize_8bit_with_qmap", "scale_tensor")
)


Moment = tuple[Tensor, ...]  # one tensor, or three tensors for a moment of 8-bit values: codes, scales and code book


def _update_tensors(
    weight: Tensor,
    gradient: Tensor,
    first: Moment,
    second: Moment,
    step: Tensor,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
    stochastic: bool,
) -> None:
    """Updates a weight, its moments and its number of steps in place, in fp32.

    first, second: the moments. stochastic: whether the new weight and a bf16 second moment are rounded stochastically.
    """
    steps = step + 1
    new, mean, square = adamw_values(
        weight.float(), gradient.float(), _value(first), _value(second), steps, scalars, betas, eps
    )
    updates = [(weight, _round_stochastically(new) if stochastic else new.to(weight.dtype))]
    for moment, value, is_signed in ((first, mean, True), (second, square, False)):
        parts = _parts_of(value, moment, is_signed=is_signed, stochastic=stochastic)
        updates += zip(moment, parts, strict=False)  # the code book stays
    update_in_place(scalars.found_inf != 0, [*updates, (step, steps)])


_compiled_update = torch.compile(_update_tensors, fullgraph=True, dynamic=False)


def _value(moment: Moment) -> Tensor:
    """Returns a moment in fp32."""
    if len(moment) == 1:
        return moment[0].float()
    codes, scales, book = moment
    value: Tensor = _dequantize(codes, book, scales)
    return value


def _parts_of(value: Tensor, moment: Moment, *, is_signed: bool, stochastic: bool) -> Moment:
    """Converts an fp32 value to the format of `moment`: one tensor, or the codes and scales of an 8-bit moment.

    is_signed: whether `value` is the first moment; the second moment is never negative. A positive second moment is
    never rounded to 0, because a step divides by its square root. stochastic: whether a bf16 second moment is rounded
    stochastically. Without stochastic rounding, a second moment could stop decreasing too early, because small
    decreases would be rounded away.
    """
    if len(moment) == 1:
        rounds = stochastic and not is_signed and moment[0].dtype is torch.bfloat16
        return (_round_stochastically(value) if rounds else value.to(moment[0].dtype),)
    codes, scales, book = moment
    divided, new_scales = _divide_blocks(value, codes.numel() // scales.numel())
    new_codes = _quantize(divided, book)
    if not is_signed:
        new_codes = torch.where(value > 0, new_codes.clamp(min=1), new_codes)
    return new_codes, new_scales


def _parts(moment: Any) -> Moment:
    return (moment.codes, moment.scale, moment.qmap) if isinstance(moment, OptimState8bit) else (moment,)


class _AdamWOfTorchao(CompiledStep):
    """Replaces the `step` of torchao's AdamW with a `step` that computes the same weights and needs less host time.

    torchao's `step` calls torch.compile for each parameter in each step, and passes DTensors to the compiled function.
    The new `step` calls one function, which is compiled once for each shape, and passes local shards to this function.
    The learning rate is a float, as in torch's optimizers.
    """

    defaults: dict[str, Any]
    bf16_stochastic_round: bool
    _new_buffer: Any

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)  # type: ignore[misc]
        self.param_groups[-1]["lr"] = rate

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        signed, unsigned = (self._new_buffer(parameter, is_signed) for is_signed in (True, False))
        return {"exp_avg": signed, "exp_avg_sq": unsigned}

    def _update_parameter(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], scalars: Scalars, group: dict[str, Any]
    ) -> None:
        first, second = (_parts(local(state[name])) for name in ("exp_avg", "exp_avg_sq"))
        stochastic = self.bf16_stochastic_round and weight.dtype is torch.bfloat16
        _compiled_update(
            weight, gradient, first, second, state["step"], scalars, tuple(group["betas"]), group["eps"], stochastic
        )


class EightBitAdamW(_AdamWOfTorchao, AdamW8bit):
    """AdamW with 8-bit moments. Each block of 256 elements shares a scale (arXiv:2110.02861).

    The saved state contains only plain tensors, because torch.load cannot map torchao's tensor class to another device.
    """

    def state_dict(self) -> dict[str, Any]:
        return _with_states(super().state_dict(), _taken_apart)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(_with_states(state_dict, _put_together))


class RoundingAdamW(_AdamWOfTorchao, _AdamW):
    """AdamW with bf16 weights and moments. Stochastic rounding preserves small updates on average."""


class OffloadedAdamW(CPUOffloadOptimizer):
    """AdamW that keeps moments and a copy of the weights in host memory, and updates them on the CPU.

    `param_groups` holds the parameters on the GPU. Gradients can therefore be scaled and clipped before `step` copies
    them to the host. torchao's class differs: it copies gradients during the backward pass, and its `param_groups`
    holds the host copies.
    """

    def __init__(self, groups: Groups, **arguments: Any) -> None:
        self._groups = [{**arguments, **group, "params": list(group["params"])} for group in groups]
        # this dict stays empty, because Lightning moves all tensors in `state` to the GPU
        self.state: dict[Tensor, Any] = {}
        self.defaults = dict(arguments)
        super().__init__([dict(group) for group in groups], torch.optim.AdamW, fused=True, **arguments)
        require_names("torchao", self, "param_d2h_map", "optim_dict", "d_opt", "queue", "stream")
        for parameter in self.param_d2h_map:
            assert parameter._post_accumulate_grad_hooks is not None
            parameter._post_accumulate_grad_hooks.clear()

    @property
    def param_groups(self) -> Groups:
        return self._groups

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Updates the weights, as `torch.optim.Optimizer.step` does. Waits for the CPU to update the host copies."""
        loss = run(closure)
        self._set_hyperparameters()
        self.stream.wait_stream(torch.cuda.current_stream())
        for on_gpu, on_host in self.param_d2h_map.items():
            if on_gpu.grad is not None:
                with torch.cuda.stream(self.stream):
                    on_host.grad.copy_(on_gpu.grad, non_blocking=True)
                self.queue[on_gpu] = self.stream.record_event()
        super().step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the moments, and copies the current weights from the GPU to the host.

        Settings such as lr are not loaded, because `step` passes the current settings to the inner optimizers.
        Raises: ValueError as fa_train.optim.resume.require_same_weights.
        """
        self._require_same_weights(state_dict)
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for on_gpu, on_host in self.param_d2h_map.items():
                on_host.copy_(on_gpu)

    def _require_same_weights(self, saved: dict[str, Any]) -> None:
        """Checks that the inner optimizers have the same weights as the inner optimizers that wrote `saved`."""
        own = [*self.optim_dict.values(), *([] if self.d_opt is None else [self.d_opt])]
        theirs = [*saved["offloaded"], *([saved["on-device"]] if "on-device" in saved else [])]
        counts = [len(self.optim_dict), _count([] if self.d_opt is None else self.d_opt.param_groups)]
        saved_counts = [len(saved["offloaded"]), _count(saved.get("on-device", {}).get("param_groups", []))]
        if counts != saved_counts:
            raise ValueError(
                f"ckpt_path must be a checkpoint of a run that trained the same weights: {counts} large and small "
                f"weights in adamw_offload; got {saved_counts}. Freeze the same weights as that run"
            )
        for optimizer, state in zip(own, theirs, strict=True):
            require_same_weights(optimizer, state)

    def _set_hyperparameters(self) -> None:
        """Copies settings such as lr to the inner optimizers. Each large parameter has its own inner optimizer."""
        # torchao's d_param_groups is not used, because it is outdated after a state is loaded
        small = iter([] if self.d_opt is None else self.d_opt.param_groups)
        for group in self._groups:
            values = _without_parameters(group)
            moved = [p for p in group["params"] if p in self.optim_dict]
            for parameter in moved:
                self.optim_dict[parameter].param_groups[0].update(values)
            if len(moved) < sum(p.requires_grad for p in group["params"]):
                next(small).update(values)


def _with_states(saved: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a copy of the state_dict `saved`.

    In the copy, `change` is applied to all values in the parameters' states.
    """
    states = {
        parameter: {name: change(value) for name, value in state.items()} for parameter, state in saved["state"].items()
    }
    return saved | {"state": states}


def _taken_apart(value: Any) -> Any:
    if not isinstance(value, OptimState8bit):
        return value
    require_names("torchao", value, "codes", "scale", "qmap", "signed")
    return {"codes": value.codes, "scale": value.scale, "qmap": value.qmap, "signed": value.signed}


def _put_together(value: Any) -> Any:
    return OptimState8bit(**value) if isinstance(value, dict) else value


def _count(groups: Groups) -> int:
    return sum(len(group["params"]) for group in groups)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
