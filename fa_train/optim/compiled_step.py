"""The step that AdamW's variants share: it calls a compiled update for each parameter, and can skip an update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa_train.models.shards import local
from fa_train.private_names import private, private_module

Groups = list[dict[str, Any]]
Closure = Callable[[], Any]
_without_compile_limit: Any = private("torch", private_module("torch", "torch._dynamo.utils"), "disable_cache_limit")


class Scalars(NamedTuple):
    """Scalar fp32 tensors, shape (), that all parameters of a group share.

    If the scalars were Python numbers, they would be constants of the compiled update, and each new value would need a
    new compilation.

    decay: the learning rate times the weight decay. grad_scale, found_inf: see `CompiledStep`.
    """

    rate: Tensor
    decay: Tensor
    grad_scale: Tensor
    found_inf: Tensor


def adamw_values(
    old: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    steps: Tensor,
    scalars: Scalars,
    betas: tuple[float, float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight and its two moments after a step of AdamW (arXiv:1711.05101). All tensors are in fp32.

    In the paper's symbols, with the gradient g, the moments m (`mean`) and v (`square`), and the step t (`steps`):

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = w - rate * weight_decay * w - rate * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + eps)

    steps: the number of steps, including the current step.
    """
    exact = gradient / scalars.grad_scale
    mean = mean.lerp(exact, 1 - betas[0])
    square = square.lerp(exact.square(), 1 - betas[1])
    spread = square.sqrt() / (1 - betas[1] ** steps).sqrt() + eps
    new = old - scalars.decay * old - scalars.rate * (mean / (1 - betas[0] ** steps)) / spread
    return new, mean, square


def update_in_place(skipped: Tensor, updates: list[tuple[Tensor, Tensor]]) -> None:
    """Copies the second tensor of each pair to the first one, unless `skipped` is true."""
    for tensor, value in updates:
        tensor.copy_(torch.where(skipped, tensor, value))


class CompiledStep:
    """Gives an optimizer a method `step`, which passes the local shards of DTensors to a compiled function.

    grad_scale, found_inf: fp32 scalars on the device of the weights. As in torch's fused AdamW, `step` divides the
    gradients by grad_scale, and changes nothing if found_inf is not 0. The host does not wait for grad_scale and
    found_inf.
    """

    param_groups: Groups
    state: Any
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    # torch.amp.GradScaler and fa_train.lit_gpt.scale_or_skip set grad_scale and found_inf only if
    # _step_supports_amp_scaling is true
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Updates the weights, as `torch.optim.Optimizer.step` does."""
        loss = run(closure)
        with _without_compile_limit():  # torch may compile a separate function for each parameter shape
            for group in self.param_groups:
                rate = torch.tensor(group["lr"], dtype=torch.float32)
                decay = rate * group["weight_decay"]
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_parameter(parameter, parameter.grad, rate, decay, group)
        return loss

    def _step_parameter(
        self, parameter: Tensor, gradient: Tensor, rate: Tensor, decay: Tensor, group: dict[str, Any]
    ) -> None:
        state, weight = self.state[parameter], local(parameter.detach())
        if not state:
            state.update(step=torch.zeros((), device=weight.device), **self._new_state(parameter))
        if state["step"].device != weight.device:  # old checkpoints store the step on the CPU
            state["step"] = state["step"].to(weight.device)
        if self.grad_scale is None or self.found_inf is None:
            self.grad_scale, self.found_inf = (torch.full((), x, device=weight.device) for x in (1.0, 0.0))
        scalars = Scalars(rate, decay, self.grad_scale, self.found_inf)
        self._update_parameter(weight, local(gradient), state, scalars, group)

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        """Returns the initial optimizer state of a parameter, without the entry `step`."""
        raise NotImplementedError

    def _update_parameter(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Any], scalars: Scalars, group: dict[str, Any]
    ) -> None:
        """Updates one parameter and its state in place. weight, gradient: this rank's rows."""
        raise NotImplementedError


def run(closure: Closure | None) -> Any:
    """Calls the closure of an optimizer's step, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
