"""Two GPUs that share a packed stream of tokens compute the same attention as one GPU."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device

from fa_kernels.flash_attention.schedule import length_class_of
from fa_train.models.attention import flash_attention
from fa_train.models.stream import windowed_schedule
from fa_train.parallel.context import traffic as traffic_module
from fa_train.parallel.context import whole_documents as whole_module
from fa_train.parallel.context.attention import ContextAttention, shared_schedule
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.operators import new_context_group, register_group
from fa_train.parallel.context.traffic import traffic
from tests.support.ranks import ranks_of_torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS = 2
# The fused backward computes the two KV heads together in the case "one", and one after the other in "long". Each GPU
# gets whole documents in the case "whole", and chunks of documents in the other cases.
LENGTHS = {
    "one": [12_000],
    "long": [48_000],
    "several": [5000, 1, 700, 0, 4000, 1100, 900],
    "short": [150] * 79,
    "whole": [150, 90, 300, 1000] * 20,
}
WINDOWS = (None, 1000)
# pairs (head_dim, number of groups of KV heads); there are always two KV heads
HEADS = ((64, 1), (64, 2), (96, 1), (128, 1), (128, 2), (256, 1))


def on_two_gpus(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    os.environ.update(environments[rank])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    register_group("two", new_context_group(range(RANKS)))
    traffic_module.MAX_CROSSING, traffic_module.MIN_PAIRS = 1 / 4, 0  # makes some cases run attention twice
    errors = {
        (documents, window, heads): compare(rank, lengths, window, *heads)
        for documents, lengths in LENGTHS.items()
        for window in WINDOWS
        for heads in HEADS
    }
    torch.save(errors, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def compare(rank: int, lengths: list[int], window: int | None, head_dim: int, head_groups: int) -> list[float]:
    """Returns this rank's largest errors of o, dq, dk and dv, relative to the largest value on one GPU."""
    torch.manual_seed(0)
    boundaries = np.cumsum([0, *lengths])
    total = int(boundaries[-1])
    whole_module.MAX_DOCUMENTS = 2**14 if lengths is LENGTHS["whole"] else 0
    dealt = deal(boundaries, total, RANKS, balanced=window is None)
    own = torch.from_numpy(dealt.positions(rank)).cuda()
    q, k, v, do = (torch.randn(dealt.total, n, head_dim, device="cuda", dtype=torch.bfloat16) for n in (8, 2, 2, 8))
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device="cuda")
    mean = total // len(lengths)
    whole = windowed_schedule(cu_seqlens, dealt.total, q.device, window, mean)
    expected = outputs(lambda q, k, v: flash_attention(q, k, v, whole), q, k, v, do)
    plan = traffic(dealt, boundaries, rank, window)
    schedule = shared_schedule(
        move_data_to_device(plan, own.device), length_class_of(mean if window is None else min(mean, window))
    )
    attention = ContextAttention(flash_attention, "two", head_groups)
    got = outputs(lambda q, k, v: attention(q, k, v, schedule), *(x[own] for x in (q, k, v, do)))
    return [
        ((mine.float() - theirs[own].float()).abs().max() / theirs.float().abs().max()).item()
        for mine, theirs in zip(got, expected, strict=True)
    ]


def outputs(attend, q, k, v, do):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, do)


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_gpus")
    arguments = (str(folder), ranks_of_torchrun(RANKS))
    torch.multiprocessing.start_processes(on_two_gpus, args=arguments, nprocs=RANKS, start_method="spawn")
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("documents", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_that_of_one_gpu(documents, window, heads, errors):
    for of_rank in errors:
        assert max(of_rank[documents, window, heads]) < 1e-2
