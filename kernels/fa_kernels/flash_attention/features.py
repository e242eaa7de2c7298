"""What changes the scores, beside the mask: the scale, a soft cap, ALiBi, sinks and fp8's scales."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Features(NamedTuple):
    """Of one call. softcap 0 is none.

    Shapes: sinks (n_heads,) fp32, in nats; alibi () or slopes (n_docs or 1, n_heads) fp32, beside (total_q,) int32,
    the key that each query stands beside, and document (total_q,) int32, the row of slopes that it takes; descale
    (2, n_heads) fp32, what a head's scores and its output are multiplied with (forward only).
    """

    softmax_scale: float
    softcap: float
    sinks: Tensor | None
    alibi: Sequence[Tensor]
    descale: Tensor | None = None

    def pointers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Sinks, slopes, beside, document, as the kernels take them."""
        return (self.sinks, *(self.alibi or (None, None, None)))

    def stride_slopes(self) -> int:
        """From one document's slopes to the next one's; 0 where all share a row."""
        return self.alibi[0].stride(0) if self.alibi and self.alibi[0].shape[0] > 1 else 0

    def switches(self) -> dict[str, bool]:
        """Which code the kernels are compiled with."""
        return {
            "HAS_SINKS": self.sinks is not None,
            "HAS_SOFTCAP": self.softcap != 0.0,
            "HAS_ALIBI": bool(self.alibi),
        }
