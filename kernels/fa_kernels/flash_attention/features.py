"""The features of attention, apart from the mask: softmax scale, soft cap, ALiBi, sinks and fp8 scales."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """The features of one attention call. A softcap of 0 means no soft cap.

    sinks: (n_heads,) fp32, contiguous, in nats, or None.
    alibi: an empty sequence, or three tensors that are called `slopes`, `aligned` and `document`.
        slopes: (n_docs or 1, n_heads) fp32, contiguous.
        aligned: (total_q,) int32, the index of the key for which each query's ALiBi bias is 0.
        document: (total_q,) int32, the index of the row of `slopes` that each query uses.
    descale: (2, n_heads) fp32, or None. Row 0 of descale holds a factor for each head's scores. Row 1 holds a factor
    for each head's output. Only the forward pass supports descale.
    """

    softmax_scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Sequence[Tensor]
    descale: Tensor | None = None

    def pointers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Returns (sinks, slopes, aligned, document), in the order of the kernels' parameters."""
        return (self.sinks, *(self.alibi or (None, None, None)))

    def stride_slopes(self) -> int:
        """Returns the stride between the rows of slopes, in elements, or 0 if all documents share one row."""
        return self.alibi[0].stride(0) if self.alibi and self.alibi[0].shape[0] > 1 else 0
