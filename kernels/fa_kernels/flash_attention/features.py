"""The features that change the scores, apart from the mask: the scale, a soft cap, ALiBi, sinks and fp8's scales."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """The features of one call. A softcap of 0 means no soft cap.

    sinks: (n_heads,) fp32, in nats, or None.
    alibi: empty, or the three tensors slopes, aligned and document.
        slopes: (n_docs or 1, n_heads) fp32.
        aligned: (total_q,) int32, the key that each query is aligned with.
        document: (total_q,) int32, the row of slopes that each query uses.
    descale: (2, n_heads) fp32, the factors of each head's scores and of its output, or None. Only the forward pass
        supports it.
    """

    softmax_scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Sequence[Tensor]
    descale: Tensor | None = None

    def pointers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Returns sinks, slopes, aligned and document, which is the order of the kernels' parameters."""
        return (self.sinks, *(self.alibi or (None, None, None)))

    def stride_slopes(self) -> int:
        """Returns the distance, in elements, between the slopes of two documents; 0 if all documents share a row."""
        return self.alibi[0].stride(0) if self.alibi and self.alibi[0].shape[0] > 1 else 0

    def switches(self) -> dict[str, bool]:
        """Returns the constexpr parameters that select code in the kernels."""
        return {
            "HAS_SINKS": self.sinks is not None,
            "HAS_SOFTCAP": self.softcap != 0.0,
            "HAS_ALIBI": bool(self.alibi),
        }
