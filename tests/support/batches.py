"""Micro-batches of one document each, for tests of Lightning's training loop."""

import torch

TOTAL = 24  # tokens of a micro-batch


def batches(number: int) -> list[dict[str, torch.Tensor]]:
    """Returns `number` micro-batches. Micro-batch i is the same in every call."""
    tokens = torch.randint(11, (number, TOTAL), generator=torch.Generator().manual_seed(1))
    return [
        {
            "tokens": row,
            "labels": row.roll(-1),
            "position_ids": torch.arange(TOTAL),
            "cu_seqlens": torch.tensor([0, TOTAL], dtype=torch.int32),
        }
        for row in tokens
    ]
