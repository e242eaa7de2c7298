"""A question to all ranks, such as whether one of them should stop the run."""

import torch
import torch.distributed as dist


class Agreement:
    """Whether any rank says yes, the same answer on all ranks, one question late.

    Ranks that left at different steps would wait for each other in collectives that do not match. Each question is an
    all-reduce of one integer, in a group of its own over the CPUs, so that it meets no other collective and waits for
    no device; as every rank asks at the end of every micro-batch, all get the same answers at the same places. It runs
    during the next micro-batch, at whose end it is read: a host only waits for others a micro-batch behind. A flag in
    the store would not do, since nothing bounds by how many steps hosts run ahead of each other.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._answer = torch.zeros(1, dtype=torch.int32)
        self._asked: dist.Work | None = None

    def any(self, yes: bool) -> bool:
        """Asks, unless the last question, which is answered here, found a yes."""
        if self._asked is not None:
            self._asked.wait()
        if self._answer.item():
            return True
        self._answer.fill_(yes)
        self._asked = dist.all_reduce(self._answer, dist.ReduceOp.MAX, self._group, async_op=True)
        return False
