"""What changes the scores, apart from the mask: the scale, a soft cap, ALiBi, sinks and fp8's scales."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """The features of one call. A softcap of 0 means none.

    sinks: (n_heads,) fp32, in nats, or None.
    alibi: empty, or three tensors. slopes (n_docs or 1, n_heads) fp32; aligned (total_q,) int32, the key that each
        query is aligned with; document (total_q,) int32, the row of slopes that each query takes.
    descale: (2, n_heads) fp32, the factors of each head's scores and of its output (forward only), or None.
    """

    softmax_scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Sequence[Tensor]
    descale: Tensor | None = None

    def pointers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Sinks, slopes, aligned, document: the order in which kernels take them."""
        return (self.sinks, *(self.alibi or (None, None, None)))

    def stride_slopes(self) -> int:
        """Elements from one document's slopes to the next document's; 0 if all documents share a row."""
        return self.alibi[0].stride(0) if self.alibi and self.alibi[0].shape[0] > 1 else 0

    def switches(self) -> dict[str, bool]:
        """The constants that select code in the kernels."""
        return {
            "HAS_SINKS": self.sinks is not None,
            "HAS_SOFTCAP": self.softcap != 0.0,
            "HAS_ALIBI": bool(self.alibi),
        }
