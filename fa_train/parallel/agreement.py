"""Computes the maximum of one number from each rank, so that all ranks can stop at the same step."""

import torch
import torch.distributed as dist

from fa_train.parallel.communication import TIMEOUT


class Agreement:
    """Finds the largest answer of all ranks. An answer is the integer that a rank passes to `largest`.

    All ranks must stop at the same step. If one rank stopped earlier, the collectives of the remaining ranks would wait
    forever.
    A call of `largest` starts an all-reduce of the answers in a separate gloo group, which does not wait for the GPU.
    The all-reduce overlaps with the next micro-batch. The next call of `largest` returns the result of the all-reduce.
    A flag in torch's TCPStore would not be enough, because some ranks could read it several steps later than others.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._asked: dist.Work | None = None

    def largest(self, answer: int) -> int:
        """Sends this rank's answer.

        Returns the largest answer that the ranks sent in the previous call, or 0 in the first call.
        Each call starts an all-reduce of the ranks' answers, unless an earlier all-reduce has found a maximum other
        than 0. After a maximum other than 0 is found, each call returns this maximum, and starts no all-reduce.
        """
        if self._asked is not None:
            self._asked.wait()
        if self._answer.item():
            return int(self._answer.item())
        self._answer.fill_(answer)
        self._asked = dist.all_reduce(self._answer, dist.ReduceOp.MAX, self._group, async_op=True)
        return 0
