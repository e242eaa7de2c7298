"""The Hopper backward kernels compile without a GPU: they use wgmma, fit in shared memory and spill few registers."""

import itertools

import pytest
import torch

from fa_kernels.flash_attention import backend
from fa_kernels.flash_attention.features import Features
from fa_kernels.flash_attention.hopper.backward import choose as bwd
from fa_kernels.flash_attention.hopper.backward import dq_order, dq_sum, fused, items, keys, queries, wide
from fa_kernels.flash_attention.hopper.backward.fused_config import CAPPED_CONFIGS, CONFIGS, config_of
from fa_kernels.flash_attention.hopper.supported import HEAD_DIMS
from fa_kernels.flash_attention.portable import backward as portable_bwd
from fa_kernels.flash_attention.schedule import causal_schedule
from tests.kernels.aot.hopper_backward import TORCH_DTYPES
from tests.kernels.aot.reports import compile_all
from tests.kernels.aot.support.limits import BACKWARD_SPILLS

# `make test-oldest-triton` compiles only the cases in CORE, one for each kernel and head_dim.
CORE = {
    "bf16-64-4-1-1", "bf16-96-4-1-1", "bf16-128-1-1-1", "bf16-64ordered-4-1-1", "bf16-96ordered-1-1-1",
    "bf16-128ordered-1-1-1", "fp16-128dkdv-4-1-1", "fp16-128dq-4-1-1", "bf16-256dkdv-4-1-1", "bf16-256dq-4-1-1",
}  # fmt: skip
SHARED = 227 * 1024  # bytes of shared memory that one program can use on an H100


@pytest.mark.parametrize("core", [pytest.param(True, id="core"), pytest.param(False, id="rest")])
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiles_within_limits(core):
    assert BACKWARD_SPILLS.keys() >= CORE
    cases = [case for case in BACKWARD_SPILLS if (case in CORE) == core]
    for case, report in compile_all("tests.kernels.aot.hopper_backward", cases).items():
        assert report["warnings"] == [], (case, report)  # for example, C7512 warns that ptxas serialises matmuls
        assert report["misplaced_descriptors"] == [], (case, report)
        assert report["tensor_core"] == "HGMMA", (case, report)
        assert report["shared"] <= SHARED, (case, report)
        assert report["spill_bytes"] <= BACKWARD_SPILLS[case], (case, report)
        assert report["stores_of_16"] == stores_of_sums(*case.split("-")), (case, report)
        assert report["idle_barriers"] == [], (case, report)


def stores_of_sums(dtype, kernel, group, softcap, marks):
    """Returns the number of 16-byte stores to shared memory that one step of the kernel needs to add to dQ."""
    head_dim = kernel.removesuffix("ordered")
    if not head_dim.isdigit():
        return 0
    ordered = kernel != head_dim
    config = config_of(int(head_dim), TORCH_DTYPES[dtype], float(softcap), ordered)
    return config.block_m * int(head_dim) // (4 * 128)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_ordered_configs_have_one_semaphore_per_step(head_dim, dtype, softcap):
    """If programs took items from a queue, a program could wait for an item that no program has started."""
    config = config_of(head_dim, dtype, softcap, ordered=True)
    if config is None:
        assert config_of(head_dim, dtype, softcap) is None
    else:
        assert config.block_m == items.SUM_BLOCK and not config.dynamic


def test_three_groups_share_all_registers():
    """The two consumer warp groups must get equal numbers of registers."""
    registers = fused.WORKER_REGISTERS
    of_four_warps = fused.START_REGISTERS * (1 + len(registers))
    assert of_four_warps <= 64 * 1024 // 128
    assert of_four_warps - sum(registers) == registers[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("head_dim", [8, 96])
@pytest.mark.parametrize("total", [pytest.param(128, id="whole"), pytest.param(70, id="padded")])
def test_prepared_rows_delta_and_sums_are_exact(device, total, head_dim, with_dlse, dtype):
    """For every dtype, delta is rowsum(do * o), minus dlse if given."""
    o = torch.randn(total, 3, head_dim, device=device).to(dtype)
    do = torch.randn(3, total, head_dim + 8, device=device).to(dtype)[..., :head_dim].transpose(0, 1)
    lse, dlse = torch.randn(2, 3, total, device=device)
    lse[1, 5] = float("-inf")
    expected = (o.double() * do.double()).sum(-1).T - (dlse if with_dlse else 0)
    got = dq_sum.prepare(o, do, dlse if with_dlse else None, lse, dq_sum.Needs(True, True, True))
    rows, delta, sums_of_dq, semaphores = got
    tables = CONFIGS, CAPPED_CONFIGS
    of_one = [config.block_m for table in tables for config in table.values()]
    longest = max(wide.BLOCK, keys.BLOCK_M, *of_one)
    assert rows.shape[:2] == (2, 3) and rows.shape[2] % 4 == 0  # TMA requires a multiple of four elements per row
    assert rows.shape[2] >= total - 1 + longest, "the last block of queries reads the next head's lse and delta"
    log2_lse = lse * 1.4426950408889634
    log2_lse[1, 5] = float("inf")  # `prepare` writes inf for a row that sees no key, because 2^(score - inf) is 0
    assert rows[0, :, :total].equal(log2_lse) and rows[1, :, :total].equal(delta)
    assert (rows[0, :, total:] == float("inf")).all() and not rows[1, :, total:].any()
    torch.testing.assert_close(delta.double(), expected, atol=1e-4, rtol=1e-5)
    assert sums_of_dq.shape == (3 * 2 * 64 * head_dim // 32, 1, 32) and not sums_of_dq.any()
    assert semaphores.tolist() == [dq_order.NO_TILE.value] * 6


@pytest.mark.parametrize("sums", [False, True])
def test_only_requested_buffers_are_prepared(device, sums):
    made = []
    with pytest.MonkeyPatch.context() as patch:
        empty = torch.empty

        def guarded(*shape, **options):
            n = torch.Size(shape).numel()
            made.append(empty(n + 64, **options).fill_(7))
            return made[-1][:n].view(shape)

        patch.setattr(torch, "empty", guarded)
        o, lse = torch.ones(70, 3, 96, device=device), torch.ones(3, 70, device=device)
        prepared = dq_sum.prepare(o, o, None, lse, dq_sum.Needs(delta=False, dq_sum=sums, semaphores=False))
    rows, delta, sums_of_dq, semaphores = prepared
    assert delta is None and semaphores is None and (sums_of_dq is not None) == sums
    assert len(made) == 1 + sums
    for x, guard in zip([rows, sums_of_dq], made, strict=False):
        assert not (x == 7).any() and (guard[x.numel() :] == 7).all()


@pytest.mark.parametrize("needs", [dq_sum.Needs(*x) for x in itertools.product([False, True], repeat=3)], ids=str)
def test_prepared_tensors_keep_their_names(needs):
    given = [torch.tensor(i) if kept else None for i, kept in enumerate([True, *needs])]
    prepared = dq_sum.Prepared(*given)
    assert all(x is y for x, y in zip(dq_sum.Prepared.of(prepared.tensors(), needs), prepared, strict=True))
    assert not needs.delta or prepared.tensors()[-1] is prepared.delta


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtype_width_and_features_choose_the_kernels(device, monkeypatch, dtype, head_dim, softcap, deterministic):
    """In a deterministic call, a kernel that adds partial sums to dQ adds them in a fixed order."""
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    launched = []
    monkeypatch.setattr(backend, "supports", lambda *_: True)

    def prepare(o, do, dlse, lse, needs):
        kept = torch.zeros(2, 3) if needs.delta else None
        name = f"dq, ordered={needs.semaphores}" if needs.dq_sum else None
        return dq_sum.Prepared(torch.zeros(2, 2, 256), kept, name, None)

    monkeypatch.setattr(bwd, "prepare", prepare)
    do, q, k, v = torch.zeros(4, 3, 2, head_dim, device=device, dtype=dtype)

    def note(name, *outputs):
        launched.append(name)
        return outputs[0] if len(outputs) == 1 else outputs

    monkeypatch.setattr(bwd, "finish", lambda sums, *_: note(sums, q))
    for module in (keys, fused, wide):
        name = module.__name__.split(".")[-1]
        monkeypatch.setattr(module, "gradients_of_keys", lambda *_, name=name: note(name, k, v))
    monkeypatch.setattr(queries, "gradient_of_queries", lambda *_: note("dq", q))
    monkeypatch.setattr(portable_bwd, "attention_backward", lambda *_: note("portable", q, k, v))
    o, lse = torch.zeros_like(q), torch.zeros(2, 3, device=device)
    schedule, features = causal_schedule(None, 3, q.device), Features(1.0, softcap, None, [])
    arguments = do, None, q, k, v, o, lse, schedule, features, deterministic
    backend.backward(*arguments)
    spills = head_dim == 128 and softcap and dtype == torch.float16
    if head_dim == 256:
        assert launched == ["wide", "dq"]
    elif spills:
        assert launched == ["keys", "dq"]
    else:
        assert launched == ["fused", f"dq, ordered={deterministic}"]
    launched.clear()
    monkeypatch.setenv(backend.VARIABLE, "portable")
    backend.backward(*arguments)
    assert launched == ["portable"]
