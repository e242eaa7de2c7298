"""The Triton kernels against the fp64 reference, forward and backward: in the interpreter here, compiled on a GPU."""

import pytest
import torch
from torch import Tensor

from kernels import flash_attn_func, flash_attn_varlen_func
from kernels.flash_attention.interface import flash_attn_packed
from kernels.flash_attention.reference import attention_reference
from kernels.flash_attention.schedule import causal_schedule
from tests.tolerance import assert_as_accurate

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]  # the interpreter's bf16 is wrong
DTYPES += [torch.float32]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def draw(total_q, total_k, n_heads, n_kv_heads, head_dim, v_head_dim=None, dtype=torch.float32, seed=0) -> list[Tensor]:
    """q, k, v and the gradients of o and lse."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shapes = [
        (total_q, n_heads, head_dim),
        (total_k, n_kv_heads, head_dim),
        (total_k, n_kv_heads, v_head_dim or head_dim),
        (total_q, n_heads, v_head_dim or head_dim),
    ]
    tensors = [torch.randn(s, generator=generator, device=DEVICE).to(dtype).requires_grad_() for s in shapes]
    dlse = torch.randn(n_heads, total_q, generator=generator, device=DEVICE)
    return [*tensors, dlse]


def check(q, k, v, do, dlse, cu_q, cu_k, run, **mask):
    """Outputs and gradients of `run` are as accurate as dense attention in the same dtype."""
    results = {}
    for name, function in {
        "ours": run,
        "exact": lambda *x: attention_reference(*x, cu_q, cu_k, **mask),
        "same dtype": lambda *x: attention_reference(*x, cu_q, cu_k, dtype=q.dtype, **mask),
    }.items():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = function(*inputs)
        # lse of a row that sees nothing is -inf for all; its gradient counts for nothing
        seen = torch.isfinite(lse)
        grads = torch.autograd.grad((o, lse), inputs, (do.to(o.dtype), torch.where(seen, dlse, 0.0).to(lse.dtype)))
        assert all(torch.isfinite(g).all() for g in grads), name
        results[name] = [o, torch.where(seen, lse, -1e4), *grads]
    # do . v and delta are sums of head_dim fp32 products each; where they cancel, their rounding is what is left
    floor = torch.finfo(torch.float32).eps * v.shape[-1] * max(x.detach().abs().max().item() for x in (q, k, v, do))
    for name, ours, exact, baseline in zip(("o", "lse", "dq", "dk", "dv"), *results.values(), strict=True):
        assert_as_accurate(name, ours, exact, baseline, floor=floor)


LENGTHS = [
    pytest.param([40], id="one-document"),
    pytest.param([1], id="one-token"),
    pytest.param([32, 64], id="tile-edges"),
    pytest.param([33, 31, 65], id="one-row-over"),
    pytest.param([3, 1, 0, 17, 2, 50, 0], id="ragged-and-empty"),
    pytest.param([0, 0, 5], id="empty-first"),
    pytest.param([2] * 24, id="many-short"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_packed_documents(lengths, causal, dtype):
    cu = cumulative(lengths)
    tensors = draw(sum(lengths), sum(lengths), 2, 1, 16, dtype=dtype)
    check(
        *tensors, cu, cu, causal=causal,
        run=lambda q, k, v: flash_attn_varlen_func(q, k, v, cu, cu, 0, 0, causal=causal, return_lse=True),
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128, 256])
def test_head_dims(head_dim):
    cu = cumulative([35, 14])
    check(
        *draw(49, 49, 2, 2, head_dim), cu, cu, causal=True,
        run=lambda q, k, v: flash_attn_varlen_func(q, k, v, cu, cu, 35, 35, causal=True, return_lse=True),
    )  # fmt: skip


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
def test_grouped_query_heads(n_heads, n_kv_heads):
    cu = cumulative([35, 14])
    check(
        *draw(49, 49, n_heads, n_kv_heads, 16), cu, cu, causal=True,
        run=lambda q, k, v: flash_attn_varlen_func(q, k, v, cu, cu, 35, 35, causal=True, return_lse=True),
    )  # fmt: skip


@pytest.mark.parametrize("window", [(-1, -1), (7, 0), (20, 5), (0, 0), (-1, 3)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_more_or_fewer_keys_than_queries_in_a_window(causal, window):
    """Queries align with the last keys, and those that see none give 0, lse -inf and zero gradients."""
    cu_q, cu_k = cumulative([5, 40, 3, 0, 7]), cumulative([9, 20, 0, 4, 70])
    tensors = draw(55, 103, 2, 1, 16, v_head_dim=32)
    check(
        *tensors, cu_q, cu_k, causal=causal, window_size=window,
        run=lambda q, k, v: flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 40, 70, causal=causal, window_size=window, return_lse=True
        ),
    )  # fmt: skip


def test_rows_outside_every_document_give_zero():
    cu = cumulative([30, 12, 0, 0])
    q, k, v, do, dlse = draw(50, 50, 2, 1, 16)
    o, lse = flash_attn_varlen_func(q, k, v, cu, cu, 30, 30, causal=True, return_lse=True)
    assert torch.all(o[42:] == 0) and torch.all(lse[:, 42:] == float("-inf"))
    grads = torch.autograd.grad(o, (q, k, v), do)
    assert all(torch.all(g[42:] == 0) for g in grads)
    check(
        q, k, v, do, dlse, cu, cu, causal=True,
        run=lambda q, k, v: flash_attn_varlen_func(q, k, v, cu, cu, 30, 30, causal=True, return_lse=True),
    )  # fmt: skip


def test_dense_batch_is_a_packed_one_with_equal_documents():
    q, k, v, *_ = draw(3 * 21, 3 * 33, 4, 2, 16)
    o, lse = flash_attn_func(
        *(x.unflatten(0, (3, -1)) for x in (q, k, v)), causal=True, softmax_scale=0.3, return_lse=True
    )
    cu_q, cu_k = cumulative([21] * 3), cumulative([33] * 3)
    packed, packed_lse = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 21, 33, causal=True, softmax_scale=0.3, return_lse=True
    )
    assert torch.equal(o.flatten(0, 1), packed)
    assert lse.shape == (3, 4, 21) and torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)


def test_non_contiguous_inputs_and_gradient():
    """Slices of one qkv projection, heads before tokens, and a broadcast gradient."""
    qkv = torch.randn(45, 3, 2, 16, device=DEVICE)
    q, k = qkv[:, 0].requires_grad_(), qkv[:, 1].requires_grad_()
    v = qkv[:, 2].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    cu = cumulative([45])
    grads = []
    for make in (lambda x: x, lambda x: x.contiguous()):
        o = flash_attn_varlen_func(make(q), make(k), make(v), cu, cu, 45, 45, causal=True)
        grads.append((o, *torch.autograd.grad(o.sum(), (q, k, v))))
    for strided, contiguous in zip(*grads, strict=True):
        assert torch.equal(strided, contiguous)


def test_schedule_is_shared_with_the_varlen_function():
    q, k, v, *_ = draw(49, 49, 2, 1, 16)
    cu = cumulative([35, 0, 14])
    shared = flash_attn_packed(q, k, v, causal_schedule(cu, 49, q.device))
    assert torch.equal(shared, flash_attn_varlen_func(q, k, v, cu, cu, 35, 35, causal=True))
    alone = flash_attn_packed(q, k, v, causal_schedule(None, 49, q.device))
    one = cumulative([49])
    assert torch.equal(alone, flash_attn_varlen_func(q, k, v, one, one, 49, 49, causal=True))


def test_documents_do_not_leak():
    """What stands in document 1, even NaN, leaves document 2's output and gradients bit-equal."""
    cu = cumulative([37, 40])
    q, k, v, do, _ = draw(77, 77, 2, 1, 16)
    results = []
    for filler in (None, 3.0):
        inputs = [x.detach().clone() for x in (q, k, v)]
        if filler is not None:
            for x in inputs:
                x[:37] *= filler
        inputs = [x.requires_grad_() for x in inputs]
        o = flash_attn_varlen_func(*inputs, cu, cu, 40, 40, causal=True)
        results.append([x[37:] for x in (o, *torch.autograd.grad(o, inputs, do))])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


def test_operator_registration():
    q, k, v, *_ = draw(20, 20, 2, 1, 16)
    schedule = causal_schedule(cumulative([13, 7]), 20, q.device).tensors()
    torch.library.opcheck(
        torch.ops.flash_attention.forward,
        (q, k, v, schedule, 0.25, torch.float32),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_compiles_without_a_graph_break():
    def attend(q, k, v, cu):
        return flash_attn_packed(q, k, v, causal_schedule(cu, q.shape[0], q.device))

    q, k, v, *_ = draw(40, 40, 2, 1, 16)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ([10, 30], [40, 0], [1, 39]):
            cu = cumulative(lengths)
            assert torch.equal(compiled(q, k, v, cu), attend(q, k, v, cu))


Q = torch.empty(8, 4, 16)
KV = torch.empty(8, 2, 16)
CU = torch.tensor([0, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((Q[:, :3], KV, KV, CU, CU), "multiple of n_kv_heads; got 3 and 2", id="heads"),
        pytest.param((Q, KV, KV[:, :1], CU, CU), "same tokens and heads", id="k-and-v"),
        pytest.param((Q, KV[..., :8], KV, CU, CU), "one head_dim", id="head-dim"),
        pytest.param((Q[..., :8], KV[..., :8], KV, CU, CU), "from 16 to 256; got 8", id="small-head-dim"),
        pytest.param((Q.half(), KV, KV, CU, CU), "one dtype.*got float16", id="mixed-dtype"),
        pytest.param((Q.double(), KV.double(), KV.double(), CU, CU), "one dtype.*got float64", id="fp64"),
        pytest.param((Q, KV, KV, CU.long(), CU), "cu_seqlens_q must be .* int32; got .* int64", id="cu-dtype"),
        pytest.param((Q, KV, KV, CU, CU[:1]), "same number of documents; got 1 and 0", id="cu-count"),
        pytest.param((Q[None], KV, KV, CU, CU), r"must be \(total", id="dense-input"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(*arguments, 8, 8)


@pytest.mark.parametrize(
    "extra",
    [{"dropout_p": 0.1}, {"softcap": 30.0}, {"alibi_slopes": torch.ones(4)}, {"sinks": torch.ones(4)}],
    ids=lambda extra: next(iter(extra)),
)
def test_what_is_not_there_yet_says_so(extra):
    with pytest.raises(NotImplementedError, match=next(iter(extra))):
        flash_attn_varlen_func(Q, KV, KV, CU, CU, 8, 8, **extra)
