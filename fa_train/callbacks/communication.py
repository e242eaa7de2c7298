"""Measures how long a device waits for communication between ranks, and compares the ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from fa_train.callbacks.timestamp import Timestamp
from fa_train.parallel.context.operators import surround_waits
from fa_train.private_names import private, private_module, replace_private

Span = tuple[Timestamp, Timestamp]
FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
# FSDP's functions during which the compute stream can wait for communication
FSDP_STEPS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


class CommunicationTimer:
    """Measures one step: collects the time spans during which the device only waits for communication.

    With DDP, a time span lasts from the last gradient of a backward pass to the end of the all-reduces. With FSDP, each
    call of a function in `FSDP_STEPS` is a span. If strategy.context is greater than 1, each wait for keys, for values
    or for gradients of keys and values is a span. A wait during the recomputation of activations is also a span. A
    span includes the time until the other ranks are ready. Communication that overlaps with computation does not count.
    The host never waits for a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[Span] = []
        self._installed = ExitStack()  # _installed.close() removes all hooks
        self._gradients_done: Timestamp | None = None
        self.start: Timestamp | None = None  # of the measured step; None between measurements

    def begin(self, module: nn.Module, *, sharded: bool) -> None:
        """Starts to measure a step. sharded: whether FSDP has sharded the module."""
        self.start, self._spans = Timestamp(self._device), []
        self._installed.enter_context(surround_waits(self._span))
        if sharded:
            group = private("torch", private_module("torch", FSDP_MODULE), "FSDPParamGroup")
            for name in FSDP_STEPS:
                original = private("torch", group, name)
                self._installed.callback(setattr, group, name, original)
                replace_private("torch", group, name, self._span()(original))  # _span() serves as a decorator here
        else:
            parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
            self._installed.callback(register_multi_grad_hook(parameters, self._all_gradients).remove)

    def end_of_backward(self) -> None:
        """Ends the span that measures DDP's all-reduces. Call this method after each backward pass."""
        if self._gradients_done is not None:
            self._spans.append((self._gradients_done, Timestamp(self._device)))
            self._gradients_done = None

    def end(self) -> list[Span]:
        """Ends the measurement. The spans can be read after the device has finished the step."""
        self._installed.close()
        self.start = None
        return self._spans

    def _all_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        self._gradients_done = Timestamp(self._device)

    @contextmanager
    def _span(self) -> Iterator[None]:
        """Adds a span for the work that the device does within this context."""
        start = Timestamp(self._device)
        yield
        self._spans.append((start, Timestamp(self._device)))


def compare_ranks(own: Mapping[str, float], group: dist.ProcessGroup) -> dict[str, float]:
    """Gathers `own` from all ranks with one small collective, and returns the result of `compare`.

    own: this rank's numbers, by name. The names and their order must be equal on all ranks.
    group: a gloo group of all ranks, so that the collective does not use the GPU.
    """
    mine = torch.tensor(list(own.values()), dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine, group)
    return compare([dict(zip(own, row.tolist(), strict=True)) for row in rows])


def compare(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each number, returns the mean over the ranks as <name> and the largest value as <name>_max.

    A rank's time is the sum of perf/compute_ms and perf/data_wait_ms. perf/slowest_rank is the rank with the largest
    time. perf/slowest_over_mean is the largest time divided by the mean time of all ranks.
    """
    summary: dict[str, float] = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        summary |= {name: sum(values) / len(values), f"{name}_max": max(values)}
    times = [rank["perf/compute_ms"] + rank["perf/data_wait_ms"] for rank in ranks]
    slowest = max(times)
    return summary | {
        "perf/slowest_rank": float(times.index(slowest)),
        "perf/slowest_over_mean": slowest * len(times) / sum(times),
    }
