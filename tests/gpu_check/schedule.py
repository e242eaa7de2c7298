"""Checks that the GPU kernel and torch operators build the same attention schedule."""

import torch

from fa_kernels.flash_attention import schedule
from fa_kernels.flash_attention.schedule_kernel import schedule_tensors
from tests.kernels.support.attention_check import DEVICE, cumulative

MOST_TOKENS = 400  # in a document


def check_schedule(n_docs: int, window: tuple[int, int], keys_in_order: bool) -> None:
    cu_seqlens_q, cu_seqlens_k = (cumulative(_lengths(n_docs)) for _ in range(2))
    total_q, total_k = int(cu_seqlens_q[-1]) + 5, int(cu_seqlens_k[-1])
    documents = cu_seqlens_q, cu_seqlens_k, total_q, total_k, window
    wanted = schedule.tensors_by_torch(*documents, keys_in_order=keys_in_order)
    found = schedule_tensors(
        *documents, keys_in_order=keys_in_order, gradients=True,
        work_tile=schedule.WORK_TILE, wide_tile=schedule.WIDE_TILE,
    )  # fmt: skip
    for name, x, y in zip(schedule.Schedule._fields, found, wanted, strict=False):
        assert torch.equal(x, y), f"{name}: {(x != y).sum().item()} of {x.numel()} elements differ"


def _lengths(n_docs: int) -> list[int]:
    lengths = torch.randint(1, MOST_TOKENS + 1, (n_docs,), device=DEVICE)
    return (lengths * (torch.rand(n_docs, device=DEVICE) > 0.2)).tolist()
