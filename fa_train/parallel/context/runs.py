"""Runs of flash attention inside the operators of context parallelism. A run calls kernels directly."""

from typing import NamedTuple

from torch import Tensor

from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.delta import sink_gradient
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.ops import evenly_strided
from fa_kernels.flash_attention.schedule import Schedule


class Run(NamedTuple):
    """One run of flash attention. A Run calls the kernels directly, without torch operators."""

    schedule: Schedule
    features: Features

    def of_heads(self, heads: slice) -> "Run":
        """Returns a copy of this Run that processes only the query heads in `heads`."""
        alibi, sinks = self.features.alibi, self.features.sinks
        alibi = [alibi[0][:, heads].contiguous(), *alibi[1:]] if alibi else []
        sinks = None if sinks is None else sinks[heads]
        return self._replace(features=self.features._replace(alibi=alibi, sinks=sinks))

    def without_sinks(self) -> "Run":
        return self._replace(features=self.features._replace(sinks=None))

    def forward(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns o and lse."""
        q, keys, values = (evenly_strided(x) for x in (q, keys, values))
        return backend.forward(q, keys, values, self.schedule, self.features, q.dtype)

    def backward(
        self, do: Tensor, q: Tensor, keys: Tensor, values: Tensor, o: Tensor, lse: Tensor, deterministic: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv and dsinks. dsinks is empty without sinks."""
        do, q, keys, values = (evenly_strided(x) for x in (do, q, keys, values))
        dq, dk, dv, *delta = backend.backward(
            do, None, q, keys, values, o, lse, self.schedule, self.features, deterministic
        )
        sinks = self.features.sinks
        return dq, dk, dv, lse.new_empty(0) if sinks is None else sink_gradient(sinks, lse, *delta)


class BackwardPhases:
    """The backward pass of a Run in three steps. The first step can run before keys and values are received."""

    def __init__(
        self, run: Run, do: Tensor, q: Tensor, keys: Tensor, values: Tensor, o: Tensor, lse: Tensor, deterministic: bool
    ) -> None:
        """Launches the first kernel, which does not read the elements of keys and values."""
        do, q, keys, values = (evenly_strided(x) for x in (do, q, keys, values))
        self.sinks = run.features.sinks
        self.inputs = do, q, keys, values, lse
        self.options = run.schedule, run.features, deterministic
        self.prepared = backend.prepare_backward(do, q, keys, values, o, lse, *self.options)

    def gradients_of_keys(self) -> tuple[Tensor, Tensor]:
        """Returns dk and dv. `gradients_of_keys` must be called once, and before `gradient_of_queries`."""
        return backend.gradients_of_keys(*self.inputs, self.prepared, *self.options)

    def gradient_of_queries(self) -> tuple[Tensor, Tensor]:
        """Returns dq and dsinks. dsinks is empty without sinks."""
        (dq,) = backend.gradient_of_queries(*self.inputs, self.prepared, *self.options)
        lse = self.inputs[-1]
        return dq, lse.new_empty(0) if self.sinks is None else sink_gradient(self.sinks, lse, self.prepared[-1])
