"""Selects the tokens of one rank from a packed stream, in a data worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from fa_train.data.packing.collate import Batch
from fa_train.data.packing.rows import IGNORE_INDEX
from fa_train.models.rope import last_positions
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.traffic import traffic


@dataclass(frozen=True)
class ContextShard:
    """One rank of a context group.

    windows: the distinct attention windows of the model's layers, in tokens. None means no window.
    may_split: as for fa_train.parallel.context.traffic.traffic.
    """

    rank: int
    ranks: int
    windows: Sequence[int | None]
    may_split: bool = True

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch with only this rank's tokens, and with this rank's traffic for each window.

        last_positions holds the last position in each token's document. cu_seqlens still describes the whole stream. If
        needed, the stream is padded at its end, so that all ranks hold the same number of tokens. Padding has no
        labels, and no query sees padding.
        """
        boundaries = batch["cu_seqlens"].numpy().astype(np.int64)
        total = batch["tokens"].numel()
        sees_all = any(window is None or window >= total for window in self.windows)
        dealt = deal(boundaries, total, self.ranks, balanced=sees_all)
        own = torch.from_numpy(dealt.positions(self.rank))
        # a rank's own tokens do not show where documents end
        whole: Batch = {**batch, "last_positions": last_positions(batch["position_ids"])}
        padding = {"tokens": 0, "labels": IGNORE_INDEX, "position_ids": 0, "last_positions": 0}
        shards = {
            name: F.pad(whole[name], (0, dealt.total - total), value=value)[own]  # type: ignore[literal-required]
            for name, value in padding.items()
        }
        plans = {
            window: traffic(dealt, boundaries, self.rank, window, may_split=self.may_split) for window in self.windows
        }
        return {**batch, **shards, "context_rank": self.rank, "traffic": plans}  # type: ignore[typeddict-item]
