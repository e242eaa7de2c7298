"""If four processes on the CPU share streams of tokens, their results and losses equal those of one process."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from safetensors.torch import load_file

from fa_kernels.flash_attention.reference import attention_reference
from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import chunked_attention, flash_attention, naive_attention, sdpa_attention
from fa_train.models.config import Family
from fa_train.models.gpt import GPT
from fa_train.models.rope import document_positions
from fa_train.parallel.context import traffic as traffic_module
from fa_train.parallel.context import whole_documents as whole_module
from fa_train.parallel.context.attention import ContextAttention, shared_schedule
from fa_train.parallel.context.deal import deal
from fa_train.parallel.context.operators import new_context_group, register_group
from fa_train.parallel.context.shard import ContextShard
from fa_train.parallel.context.traffic import Counts, traffic
from scripts import trained_model
from tests.parallel.support.runs import train_in
from tests.support.interpreter import patched_once_a_launch
from tests.support.processes import start_server
from tests.support.ranks import needs_ports, ranks_of_torchrun
from tests.support.training import column, write_corpus

pytestmark = [pytest.mark.slow, needs_ports]
RANKS, EXCHANGE_MS = 4, 50
TOTAL, BOUNDARIES = 60, [0, 13, 14, 30, 39, 55, 55]  # the stream ends five tokens after the last document
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}}
FEATURES = {
    "plain": {},
    "windows": {"family": Family(windows=[None, 5]), **DYNAMIC},
    "only windows": {"family": Family(windows=[4, 9])},
    "norms": {"qk_norm": True, "n_kv_heads": 1},
    "cap": {"family": Family(softcap=20.0, logit_softcap=30.0)},
    "z-loss": {"loss": LinearCrossEntropy(chunk_size=17, z_loss=0.1)},
    "all": {"family": Family(windows=[None, 5], softcap=20.0, logit_softcap=30.0), "qk_norm": True, "n_kv_heads": 1},
}
# A case is a tuple (attention, features, checkpointing, compiled, deterministic, number of groups of KV heads, number
# of ranks that share a stream). Cases named `whole` give ranks whole documents; other cases give ranks chunks.
CASES = {
    "naive-2": (naive_attention, "cap", "none", False, False, 1, 2),
    "naive-4": (naive_attention, "plain", "full", False, False, 1, 4),
    "sdpa-2": (sdpa_attention, "norms", "selective", True, False, 1, 2),
    "sdpa-4": (sdpa_attention, "windows", "none", False, False, 1, 4),
    "sdpa-z-loss-2": (sdpa_attention, "z-loss", "none", False, True, 1, 2),
    "chunked-2": (partial(chunked_attention, chunk_size=16), "only windows", "full", False, False, 1, 2),
    "flash-2": (flash_attention, "windows", "selective", False, False, 1, 2),
    "flash-4": (flash_attention, "all", "full", False, False, 1, 4),
    "flash-whole-2": (flash_attention, "windows", "selective", True, False, 2, 2),
    "sdpa-whole-4": (sdpa_attention, "plain", "none", False, False, 1, 4),
    "flash-groups-2": (partial(flash_attention), "windows", "selective", True, False, 2, 2),
}
# A case is a tuple (additional tensors of attention, window, softcap, number of groups of KV heads, number of ranks
# that share a stream).
ATTENTIONS = {
    "sinks-2": (["sinks"], None, 0.0, 1, 2),
    "alibi-2": (["alibi_slopes"], None, 0.0, 1, 2),
    "both-4": (["sinks", "alibi_slopes"], 5, 20.0, 1, 4),
    "groups-2": (["sinks", "alibi_slopes"], None, 0.0, 2, 2),
    "whole-4": (["sinks", "alibi_slopes"], None, 20.0, 1, 4),
}
SETTINGS = (
    "seq_len=96",
    "model.max_seq_len=16",
    "model.rope_scaling={rope_type:dynamic,factor:2.0}",
    "data.micro_batch_size=1",
    "batch_size=4",
    "max_steps=4",
    "callbacks.checkpoint.every_n_train_steps=2",
    "trainer.val_check_interval=4",
    "data.val_rows=3",
)
FSDP = ("strategy=fsdp", f"trainer.devices={RANKS}", "strategy.context=2")
FOUR = ("strategy=fsdp", f"trainer.devices={RANKS}", "strategy.context=4")
ADAPTER = ("adapter=lora", "optimizer.lr=0.01")
# In the run `shared`, each rank gets whole documents. In the other runs, each rank gets chunks of the token stream.
RUNS = {
    "shared": FSDP,
    "all": (*FOUR, "strategy.replicas=2", "memory.mlp_chunk=16", "lit_gpt.compile_model=true"),
    "longer": (*FOUR, "memory=offload"),
    "adapter": (*FSDP, *ADAPTER),
}


def gpt(attention, features, checkpointing):
    torch.manual_seed(0)
    loss = FEATURES[features].get("loss", LinearCrossEntropy(chunk_size=17))
    return GPT(
        attention=attention, memory=Memory(checkpointing, False, None, loss),
        **dict(
            loss=loss,
            vocab_size=67, n_layers=2, dim=32, n_heads=4, n_kv_heads=2, head_dim=None, ffn_dim=48, norm="rmsnorm",
            norm_eps=1e-5, positions="rope", rope_theta=1e4, max_seq_len=None, activation="swiglu", bias=False,
            qk_norm=False, tied=True, init="gpt2",
        )
        | FEATURES[features],
    )  # fmt: skip


def stream(seed=1):
    boundaries = torch.tensor(BOUNDARIES, dtype=torch.int32)
    tokens = torch.randint(67, (TOTAL,), generator=torch.Generator().manual_seed(seed))
    labels = tokens.roll(-1)
    labels[boundaries[1:].long() - 1] = -100
    labels[BOUNDARIES[-1] :] = -100
    positions = document_positions(boundaries, TOTAL, torch.device("cpu"))
    return {"tokens": tokens, "labels": labels, "position_ids": positions, "cu_seqlens": boundaries}


def shared_loss(model, batch, context, rank):
    shard = model.context_shard(rank % context, context)(batch)
    own = (shard[name] for name in ("tokens", "cu_seqlens", "position_ids", "labels"))
    return model(*own, 12, shard["traffic"], shard["last_positions"])


def in_four_processes(rank: int, folder: str, environments: list[dict[str, str]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environments[rank])
    compile_without_inductor()
    shared = Path(folder)
    # with these limits, some cases run attention twice
    traffic_module.MAX_CROSSING, traffic_module.MIN_PAIRS = 1 / 4, 0
    for name, overrides in RUNS.items():
        start = [f"ckpt_path={shared}/shared/checkpoints/step_0000002.ckpt"] if name == "longer" else []
        with slow_exchanges() if name == "longer" else nullcontext(), dealing(whole=name == "shared"):
            train_in(shared / name, shared, *SETTINGS, *overrides, *start)
    pairs = [new_context_group([first, first + 1]) for first in range(0, RANKS, 2)]
    groups = {2: pairs[rank // 2], RANKS: new_context_group(range(RANKS))}
    for size, group in groups.items():
        register_group(f"of {size}", group)
    with patched_once_a_launch():  # only rank 0 saves results, so cases for two ranks run only on ranks 0 and 1
        results = {"perturbed": perturb(rank)}
        for cases, run in ((CASES, compare), (ATTENTIONS, attend)):
            for name, case in cases.items():
                if rank < case[-1]:
                    with dealing(whole="whole" in name):
                        results[name] = run(rank, groups[case[-1]], *case)
    if rank == 0:
        torch.save(results, shared / "results.pt")
    dist.destroy_process_group()


@contextmanager
def dealing(whole: bool) -> Iterator[None]:
    """If `whole` is true, ranks get whole documents where possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "MAX_DOCUMENTS", whole_module.MAX_DOCUMENTS if whole else 0)
        yield


@contextmanager
def slow_exchanges() -> Iterator[None]:
    """Makes this rank wait EXCHANGE_MS longer for each exchange of keys, values or their gradients."""
    begin_exchange = dist.all_to_all_single

    def begin(*args, **kwargs):
        exchange = begin_exchange(*args, **kwargs)
        return SimpleNamespace(wait=lambda: (exchange.wait(), time.sleep(EXCHANGE_MS / 1e3)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", begin)
        yield


def compile_without_inductor():
    """Compiles the models of this process with a faster backend, which needs no C++ compiler."""
    compile_blocks = GPT.compile_blocks
    GPT.compile_blocks = partialmethod(compile_blocks, backend="aot_eager")


def compare(rank, group, attention, features, checkpointing, compiled, deterministic, head_groups, context):
    """Returns the relative errors of the loss and of each gradient, the counts of graph breaks, and a list.

    The first item of the list is the number of compiled graphs after the first batch. If `compiled` is true, the second
    item is the number of compiled graphs after a second batch, with other document boundaries. Use only the errors that
    rank 0 returns, because only rank 0 computes the reference.
    """
    torch.use_deterministic_algorithms(deterministic)
    batch = stream()
    alone = gpt(attention, features, checkpointing)
    expected = torch.ones(())
    if rank == 0:
        expected = alone(*(batch[name] for name in ("tokens", "cu_seqlens", "position_ids", "labels")), 12)
        expected.backward()
    model = gpt(attention, features, checkpointing)
    model.share_context(f"of {context}", head_groups)
    dynamo.reset()
    dynamo.utils.counters.clear()
    if compiled:
        model.compile_blocks()
    loss = shared_loss(model, batch, context, rank)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    errors = [abs(total / expected.detach() - 1)]
    for parameter, reference in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(parameter.grad, group=group)
        if rank == 0:
            errors.append((parameter.grad - reference.grad).abs().max() / reference.grad.abs().max())
    graphs = [dynamo.utils.counters["stats"]["unique_graphs"]]
    if compiled:  # a second stream of the same length, with other document boundaries
        other = batch | {"cu_seqlens": torch.tensor([0, 1, 2, 40, 41, 60, 60], dtype=torch.int32)}
        shared_loss(model, other, context, rank).backward()
        graphs.append(dynamo.utils.counters["stats"]["unique_graphs"])
    return [float(error) for error in errors], dict(dynamo.utils.counters["graph_break"]), graphs


def attend(rank, group, names, window, softcap, head_groups, context):
    """Returns the errors of o, dq, dk, dv and the gradients of sinks, relative to the largest element of the reference.

    Each returned error is the maximum over the ranks of `group`.
    """
    torch.manual_seed(0)
    boundaries = np.array(BOUNDARIES)
    dealt = deal(boundaries, TOTAL, context, balanced=window is None)
    q, k, v, do = (torch.randn(dealt.total, heads, 16) for heads in (4, 2, 2, 4))
    given = {name: torch.rand(4) for name in names}
    schedule = shared_schedule(traffic(dealt, boundaries, rank, window), "short")
    own = torch.from_numpy(dealt.positions(rank))

    def outputs(attention, do, **inputs):
        leaves = {name: x.detach().requires_grad_(name != "alibi_slopes") for name, x in inputs.items()}
        o = attention(**leaves)
        o.backward(do.to(o.dtype))
        return [o.detach(), *(leaf.grad for leaf in leaves.values() if leaf.requires_grad)]

    cu_seqlens = torch.tensor(BOUNDARIES, dtype=torch.int32)
    reference = partial(
        attention_reference, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True, softcap=softcap,
        window_size=(-1 if window is None else window - 1, 0),
    )  # fmt: skip
    expected = outputs(lambda **inputs: reference(**inputs)[0], do, q=q, k=k, v=v, **given)
    attention = ContextAttention(flash_attention, f"of {context}", head_groups)
    shared = partial(attention, schedule=schedule, softcap=softcap)
    ours = outputs(shared, do[own], q=q[own], k=k[own], v=v[own], **given)
    if "sinks" in names:
        dist.all_reduce(ours[4], group=group)
    errors = [
        (x - (y if y.dim() == 1 else y[own])).abs().max() / y.abs().max() for x, y in zip(ours, expected, strict=True)
    ]
    errors = torch.stack(errors)
    dist.all_reduce(errors, dist.ReduceOp.MAX, group=group)
    return errors.tolist()


def perturb(rank):
    """Changes the tokens of the first document. Returns two tensors that say which logits stayed bitwise equal.

    The first tensor is for the tokens of the first document, and the second tensor is for all later tokens.
    """
    model = gpt(naive_attention, "plain", "none")
    model.share_context(f"of {RANKS}")
    batch, outputs = stream(), []
    changed = batch | {"tokens": batch["tokens"].clone()}
    changed["tokens"][:13] = 5
    for one in (batch, changed):
        shard = model.context_shard(rank, RANKS)(one)
        names = ("tokens", "cu_seqlens", "position_ids", "traffic", "last_positions")
        logits = model(**{name: shard[name] for name in names})
        gathered = [torch.empty_like(logits) for _ in range(RANKS)]
        dist.all_gather(gathered, logits.detach())
        outputs.append(torch.cat(gathered))
    dealt = ContextShard(rank, RANKS, [None])(batch | {"tokens": torch.arange(TOTAL)})["tokens"]
    positions = [torch.empty_like(dealt) for _ in range(RANKS)]
    dist.all_gather(positions, dealt)
    position = torch.cat(positions)
    same = (outputs[0] == outputs[1]).all(dim=1)
    return same[position < 13], same[position >= 13]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("context")
    write_corpus(folder / "corpus")
    train_in(folder / "whole", folder, *SETTINGS)
    train_in(folder / "whole_adapter", folder, *SETTINGS, *ADAPTER)
    start_server()
    arguments = (str(folder), ranks_of_torchrun(RANKS))
    torch.multiprocessing.start_processes(in_four_processes, args=arguments, nprocs=RANKS, start_method="forkserver")
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_loss_and_all_gradients_are_those_of_one_process(case, four_ranks):
    errors, breaks, graphs = torch.load(four_ranks / "results.pt")[case]
    assert max(errors) < 1e-5
    assert not breaks
    assert len(set(graphs)) == 1 and (graphs[0] > 0) == CASES[case][3], "other documents must not compile again"


@pytest.mark.parametrize("case", ATTENTIONS)
def test_sinks_and_alibi_are_those_of_the_definition(case, four_ranks):
    errors = torch.load(four_ranks / "results.pt")[case]
    assert len(errors) == 4 + ("sinks" in ATTENTIONS[case][0])
    assert max(errors) < 1e-5


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_documents_can_be_dealt_whole(ranks):
    """The cases with `whole` in their name exchange nothing."""
    boundaries = np.array(BOUNDARIES)
    plans = [traffic(deal(boundaries, TOTAL, ranks), boundaries, rank, None) for rank in range(ranks)]
    assert not any(Counts(*plan.counts).exchanges for plan in plans)


def test_a_document_does_not_change_another(four_ranks):
    first, others = torch.load(four_ranks / "results.pt")["perturbed"]
    assert not first.all()
    assert others.all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("value", ["train/loss", "train/grad_norm", "val/loss"])
def test_runs_have_the_values_of_one_process(run, value, four_ranks):
    alone = "whole_adapter" if run == "adapter" else "whole"
    expected, got = (column(four_ranks / folder, value) for folder in (alone, run))
    assert got
    assert got == pytest.approx({step: expected[step] for step in got}, rel=2e-5)


def test_communication_includes_the_waits_of_exchanges(four_ranks):
    """A step has 4 micro-batches, and each of the 2 layers waits for an exchange in forward and in backward."""
    waits = column(four_ranks / "longer", "perf/communication_ms")
    assert sorted(waits) == [3, 4] and min(waits.values()) >= 4 * 2 * 2 * EXCHANGE_MS


def test_one_process_goes_on_from_shared_streams(four_ranks, tmp_path):
    run = train_in(
        tmp_path / "run", four_ranks, *SETTINGS, f"ckpt_path={four_ranks}/shared/checkpoints/step_0000002.ckpt"
    )
    expected = column(four_ranks / "whole", "train/loss")
    assert column(run, "train/loss") == pytest.approx({step: expected[step] for step in (3, 4)}, rel=2e-5)


@pytest.mark.parametrize("run", ["all", "adapter"])
def test_a_checkpoint_of_shared_streams_exports_what_one_process_does(run, four_ranks, tmp_path):
    alone = "whole_adapter" if run == "adapter" else "whole"
    for name in (alone, run):
        trained_model.export(four_ranks / name / "checkpoints/step_0000004.ckpt", tmp_path / name, [], None)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in (alone, run))
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert (tmp_path / run / "config.json").read_text() == (tmp_path / alone / "config.json").read_text()
