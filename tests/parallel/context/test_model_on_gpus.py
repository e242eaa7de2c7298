"""Tests a model on two GPUs that share rows of 131,072 tokens.

The two GPUs must compute the same gradients as one GPU. Each GPU must receive only the keys that its Traffic object
lists.
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch.profiler import profile

from fa_train.data.packing.collate import Batch
from fa_train.data.packing.rows import IGNORE_INDEX
from fa_train.data.sources.corpus import StdlibCorpus
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import flash_attention
from fa_train.models.config import Family
from fa_train.models.gpt import GPT
from fa_train.models.rope import document_positions
from fa_train.parallel.context import traffic as traffic_module
from fa_train.parallel.context import whole_documents as whole_module
from fa_train.parallel.context.operators import new_context_group, register_group
from fa_train.parallel.context.shard import ContextShard
from tests.support.ranks import ranks_of_torchrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
RANKS, TOTAL, VOCAB = 2, 131_072, 1000
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 64
WINDOWS = [None, 4096, None, 1000]
BYTES_PER_TOKEN = 4  # in source code, about


def lengths_of_files(total: int) -> list[int]:
    """Returns the lengths in tokens of random files of Python's standard library."""
    sizes = [path.stat().st_size // BYTES_PER_TOKEN for path in StdlibCorpus().paths]
    lengths = np.random.default_rng(0).permutation([size for size in sizes if size]).tolist()
    taken: list[int] = []
    while sum(taken) < total:
        taken.append(min(lengths.pop(), total - sum(taken)))
    return taken


def stream() -> Batch:
    boundaries = torch.tensor([0, *lengths_of_files(TOTAL)]).cumsum(0).to(torch.int32)
    tokens = torch.randint(VOCAB, (TOTAL,), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1)
    labels[boundaries[1:].long() - 1] = IGNORE_INDEX
    positions = document_positions(boundaries, TOTAL, torch.device("cpu"))
    return {"tokens": tokens, "labels": labels, "position_ids": positions, "cu_seqlens": boundaries}


def model() -> GPT:
    torch.manual_seed(0)
    loss = LinearCrossEntropy(chunk_size=4096)
    with torch.device("cuda"):
        gpt = GPT(
            attention=flash_attention, loss=loss, memory=Memory("selective", False, None, loss),
            vocab_size=VOCAB, n_layers=LAYERS, dim=512, n_heads=8, n_kv_heads=KV_HEADS, head_dim=HEAD_DIM, ffn_dim=1024,
            norm="rmsnorm", norm_eps=1e-5, positions="rope", rope_theta=1e4, max_seq_len=None, activation="swiglu",
            bias=False, qk_norm=True, tied=False, init="llama", family=Family(windows=WINDOWS, softcap=20.0),
        )  # fmt: skip
    return gpt


def loss_of(gpt: GPT, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    batch = move_data_to_device(batch, torch.device("cuda", torch.cuda.current_device()))
    autocast = torch.autocast("cuda", dtype) if dtype != torch.float32 else nullcontext()
    with autocast:
        own = (batch[name] for name in ("tokens", "cu_seqlens", "position_ids", "labels"))
        loss: torch.Tensor = gpt(*own, TOTAL, batch.get("traffic"), batch.get("last_positions"))
    return loss


def gradients(rank: int, shared: bool, dtype: torch.dtype, traced: Path | None = None) -> dict[str, torch.Tensor]:
    """Returns a dictionary with the gradients of all parameters, and with the loss under the key "loss".

    traced: a file for the profiler's trace.
    """
    gpt, batch = model(), stream()
    if shared:
        gpt.share_context("two")
        batch = gpt.context_shard(rank, RANKS)(batch)
    dynamo.reset()
    gpt.compile_blocks()
    for recorder in (nullcontext(), profile()) if traced else (nullcontext(),):
        gpt.zero_grad()
        with recorder:
            loss = loss_of(gpt, batch, dtype)
            loss.backward()
            torch.cuda.synchronize()
        if isinstance(recorder, profile):
            recorder.export_chrome_trace(str(traced))
    of_parameters = {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}
    assert len(of_parameters) == len(list(gpt.parameters()))
    found = {"loss": loss.detach(), **of_parameters}
    if shared:
        for value in found.values():
            dist.all_reduce(value)
    return found


def on_two_gpus(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    os.environ.update(environments[rank])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    traffic_module.MIN_PAIRS = 0  # makes each rank call attention twice, as it does for long rows
    whole_module.MAX_DOCUMENTS = 0  # makes ranks hold parts of documents, so that ranks send keys
    register_group("two", new_context_group(range(RANKS)))
    exact = gradients(rank, False, torch.float32)
    cases = {
        "fp32, two GPUs": gradients(rank, True, torch.float32),
        "bf16, one GPU": gradients(rank, False, torch.bfloat16),
        "bf16, two GPUs": gradients(rank, True, torch.bfloat16, Path(folder, f"trace_{rank}.json")),
    }
    errors = {
        case: {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}
        for case, found in cases.items()
    }
    Path(folder, f"errors_{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model_on_two_gpus")
    arguments = (str(path), ranks_of_torchrun(RANKS))
    torch.multiprocessing.start_processes(on_two_gpus, args=arguments, nprocs=RANKS, start_method="spawn")
    return path


@pytest.fixture(scope="module", params=range(RANKS))
def errors(request, folder):
    return json.loads((folder / f"errors_{request.param}.json").read_text())


def test_loss_and_all_gradients_are_those_of_one_gpu(errors):
    found = errors["fp32, two GPUs"]
    print({name: f"{error:.1e}" for name, error in found.items()})
    assert max(found.values()) < 1e-5


def test_bf16_gradients_are_as_exact_as_on_one_gpu(errors):
    one, two = errors["bf16, one GPU"], errors["bf16, two GPUs"]
    print({name: f"{one[name]:.2e} {two[name]:.2e}" for name in one})
    # The error of a gradient with few elements can be a tenth larger in one run than in another.
    assert all(two[name] < 1.3 * one[name] + 1e-4 for name in one)
    assert sum(two.values()) < 1.05 * sum(one.values())


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_receives_the_planned_bytes_only(rank, folder):
    events = json.loads((folder / f"trace_{rank}.json").read_text())["traceEvents"]
    messages = [event["args"] for event in events if event.get("cat") == "cpu_op" and "args" in event]
    received = [args for args in messages if args.get("Collective name", "").startswith("all_to_all")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "MAX_DOCUMENTS", 0)
        traffic = ContextShard(rank, RANKS, [*dict.fromkeys(WINDOWS)])(stream())["traffic"]
    # In forward and backward, a layer receives keys and values of the other rank. In the backward, the layer also
    # receives the gradients of the keys and values that it has sent.
    rows = [2 * sum(traffic[window].sizes[1]) + sum(traffic[window].sizes[0]) for window in WINDOWS]
    print(f"received {sum(rows) / (3 * LAYERS * TOTAL / RANKS):.1%} of the other rank's keys")
    assert {args["dtype"] for args in received} == {"BFloat16"}
    assert sum(args["Out msg nelems"] for args in received) == sum(rows) * 2 * KV_HEADS * HEAD_DIM
