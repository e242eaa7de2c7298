"""Asks all ranks a yes-or-no question, such as whether any rank must stop the run."""

import torch
import torch.distributed as dist


class Agreement:
    """Tells every rank whether any rank has answered yes. All ranks get the same result, one call later.

    All ranks must stop at the same step. If one rank stopped earlier, the collectives of the others would wait forever.
    Each call of `any` starts an all-reduce of one integer in a separate gloo group, which does not wait for the GPU.
    The all-reduce overlaps with the next micro-batch. The next call of `any` reads the result. A flag in torch's
    TCPStore would not be enough, because the hosts of some ranks can be several steps ahead of the others.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._asked: dist.Work | None = None

    def any(self, yes: bool) -> bool:
        """Returns whether any rank answered yes in an earlier call. If none did, starts the next all-reduce."""
        if self._asked is not None:
            self._asked.wait()
        if self._answer.item():
            return True
        self._answer.fill_(yes)
        self._asked = dist.all_reduce(self._answer, dist.ReduceOp.MAX, self._group, async_op=True)
        return False
