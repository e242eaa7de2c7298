"""Adapts torchao's low-memory optimizers to torch's schedulers, to Lightning and to checkpoints.

adamw.py imports this file only if one of these optimizers is chosen. Importing torchao takes seconds, and torchao is
not available on every system.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchao import optim
from torchao.optim import AdamW8bit, CPUOffloadOptimizer, subclass_8bit

from fa_train.private_names import private, require_names

Groups = list[dict[str, Any]]
Closure = Callable[[], Any]
_AdamW: Any = private("torchao", optim, "_AdamW")
OptimState8bit: Any = private("torchao", subclass_8bit, "OptimState8bit")


class _PlainLearningRate:
    """Stores the learning rate as a float. `step` passes the rate to torchao as a tensor, which torchao requires."""

    param_groups: Groups
    defaults: dict[str, Any]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        rate = param_group.get("lr", self.defaults["lr"])
        super().add_param_group(param_group)  # type: ignore[misc]
        self.param_groups[-1]["lr"] = rate

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Updates the weights, as `torch.optim.Optimizer.step` does."""
        loss = _run(closure)  # the closure needs the learning rate as a float
        rates = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate, dtype=torch.float32)
        try:
            super().step()  # type: ignore[misc]
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate
        return loss


class EightBitAdamW(_PlainLearningRate, AdamW8bit):
    """AdamW with 8-bit moments. Each block of 256 elements shares a scale (arXiv:2110.02861).

    The saved state contains only plain tensors, because torch.load cannot map torchao's tensor class to another device.
    """

    def state_dict(self) -> dict[str, Any]:
        return _with_states(super().state_dict(), _taken_apart)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(_with_states(state_dict, _put_together))


class RoundingAdamW(_PlainLearningRate, _AdamW):
    """AdamW with bf16 weights and moments. Stochastic rounding preserves small updates on average."""


class OffloadedAdamW(CPUOffloadOptimizer):
    """AdamW that keeps moments and a copy of the weights in host memory, and updates them on the CPU.

    `param_groups` holds the parameters on the GPU. Gradients can therefore be scaled and clipped before `step` copies
    them to the host. torchao's class would copy gradients already during the backward pass, and `param_groups` would
    hold the host copies.
    """

    def __init__(self, groups: Groups, **arguments: Any) -> None:
        self._groups = [{**arguments, **group, "params": list(group["params"])} for group in groups]
        self.state: dict[Tensor, Any] = {}  # must stay empty, because Lightning would move its tensors to the GPU
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
        loss = _run(closure)
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
        """
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for on_gpu, on_host in self.param_d2h_map.items():
                on_host.copy_(on_gpu)

    def _set_hyperparameters(self) -> None:
        """Copies settings such as lr to the inner optimizers. Each large parameter has its own inner optimizer."""
        # after a state is loaded, torchao's list d_param_groups no longer holds the groups of d_opt
        small = iter([] if self.d_opt is None else self.d_opt.param_groups)
        for group in self._groups:
            values = _without_parameters(group)
            moved = [p for p in group["params"] if p in self.optim_dict]
            for parameter in moved:
                self.optim_dict[parameter].param_groups[0].update(values)
            if len(moved) < sum(p.requires_grad for p in group["params"]):
                next(small).update(values)


def _with_states(saved: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a copy of the state_dict `saved` in which `change` was applied to each moment of each parameter."""
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


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _run(closure: Closure | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
