"""Concatenates the rows of a micro-batch into one packed stream of tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from fa_train.data.packing.rows import Row

if TYPE_CHECKING:
    from fa_train.parallel.context.traffic import Traffic


class Batch(TypedDict):
    """A packed stream: tokens, labels and position_ids (total,) int64, cu_seqlens (n_docs + 1,) int32."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    mean_seqlen: NotRequired[int]  # the mean document length in tokens, from which the attention kernels are chosen
    first_row: NotRequired[int]  # the index of the batch's first row among all rows of the run
    # The next three fields exist only in a stream that several ranks share. In a shared stream, all tensors except
    # cu_seqlens hold only this rank's tokens.
    context_rank: NotRequired[int]  # this rank's place in its context group
    traffic: NotRequired[dict[int | None, "Traffic"]]  # {attention window: the keys to send and to receive}
    last_positions: NotRequired[Tensor]  # (total,) int64, for each token the last position in its document


def collate(
    rows: Sequence[Row], max_documents: int, mean_seqlen: int, *, document_mask: bool, reset_positions: bool
) -> Batch:
    """Concatenates rows into one stream. cu_seqlens holds the document boundaries.

    cu_seqlens always has `len(rows) * max_documents + 1` entries, so that its shape never changes. The unused
    entries of cu_seqlens repeat the last boundary. Without document_mask, cu_seqlens holds only the row boundaries.
    Without reset_positions, positions start at 0 in each row, and not in each document.
    """
    seq_len = len(rows[0].tokens)
    edges = [row.boundaries if document_mask else np.array([0, seq_len]) for row in rows]
    ends = np.concatenate([[0], *(edge[1:] + index * seq_len for index, edge in enumerate(edges))])
    cu_seqlens = np.full(len(rows) * max_documents + 1, len(rows) * seq_len, dtype=np.int32)
    cu_seqlens[: len(ends)] = ends
    positions = [row.position_ids if reset_positions else np.arange(seq_len) for row in rows]
    return {
        "tokens": torch.from_numpy(np.concatenate([row.tokens for row in rows])),
        "labels": torch.from_numpy(np.concatenate([row.labels for row in rows])),
        "position_ids": torch.from_numpy(np.concatenate(positions)),
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "mean_seqlen": mean_seqlen,
    }
