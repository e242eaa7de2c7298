"""Computes the maximum of one number from each rank, so that all ranks can stop at the same step."""

from datetime import timedelta

import torch
import torch.distributed as dist

from fa_train.parallel.communication import TIMEOUT, host_group


class Agreement:
    """Finds the largest answer of all ranks. An answer is the integer that a rank passes to `largest`.

    All ranks must stop at the same step. If one rank stopped earlier, the collectives of the remaining ranks would wait
    forever.
    A call of `largest` starts an all-reduce of the answers in a separate gloo group, which does not wait for the GPU.
    The all-reduce overlaps with the next micro-batch. The next call of `largest` returns the result of the all-reduce.
    After a second call without a micro-batch in between, each rank knows the answers of all ranks to the first call.
    A flag in torch's TCPStore would not be enough, because some ranks could read it several steps later than others.
    timeout: how long a rank waits for the answers of other ranks.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self._group = host_group(timeout)
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._asked: dist.Work | None = None

    def largest(self, answer: int) -> int:
        """Sends this rank's answer, which must not be negative. All ranks must call `largest` equally often.

        Returns the largest answer that the ranks sent in all previous calls, or 0 in the first call.
        """
        if self._asked is not None:
            self._asked.wait()
        found = int(self._answer.item())
        self._answer.fill_(max(answer, found))
        self._asked = dist.all_reduce(self._answer, dist.ReduceOp.MAX, self._group, async_op=True)
        return found
