"""Rows of a micro-batch, end to end as one stream."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from fa_train.data.packing.rows import Row


class Batch(TypedDict):
    """A packed stream: tokens, labels and position_ids (total,) int64, cu_seqlens (n_docs + 1,) int32."""

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    mean_seqlen: NotRequired[int]  # tokens of the document that a token is in, for attention's choice of kernels
    first_row: NotRequired[int]  # the index of its first row among all rows of the run


def collate(
    rows: Sequence[Row], max_documents: int, mean_seqlen: int, *, document_mask: bool, reset_positions: bool
) -> Batch:
    """Rows end to end as one stream.

    cu_seqlens has max_documents + 1 entries for each row of the batch less the shared ends, padded by its last entry,
    so that shapes never change. Without document_mask it holds the rows instead of their documents; without
    reset_positions, positions run from 0 through each row.
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
