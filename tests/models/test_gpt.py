"""Tests the decoder: packed documents, initialisation, precision, and the errors that it raises."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fa_train.models.attention import chunked_attention, flash_attention, naive_attention, sdpa_attention
from fa_train.models.config import Family
from fa_train.models.ffn import RecomputedFFN
from fa_train.models.gpt import GPT
from fa_train.models.norms import OffsetRMSNorm, add_and_norm
from tests.models.support.gpt import build

ATTENTIONS = {
    "naive": naive_attention,
    "sdpa": sdpa_attention,
    "chunked": partial(chunked_attention, chunk_size=8),
    "flash": flash_attention,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
GEMMA_LIKE = {
    "norm": "offset_rmsnorm",
    "activation": "geglu",
    "family": Family(
        windows=(4, None),
        local_rope_theta=100.0,
        softmax_scale=0.3,
        logit_softcap=0.5,
        embedding_scale=32**0.5,
        post_norms=True,
    ),
}
VARIANTS = [
    pytest.param({}, id="llama-like"),
    pytest.param(
        {"norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True, "n_kv_heads": None},
        id="gpt2-like",
    ),
    pytest.param({"qk_norm": True, "tied": False, "head_dim": 32}, id="qk-norm-untied-wide-heads"),
    pytest.param({"qk_norm": True, "norm": "layernorm", "bias": True, "positions": "none"}, id="no-positions"),
    pytest.param(GEMMA_LIKE, id="gemma-like"),
]


def stream(lengths: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, cu_seqlens and labels of packed documents. The last token of each document has no label."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    tokens = torch.randint(40, (sum(lengths),))
    labels = tokens.roll(-1)
    labels[cu_seqlens[1:].long()[torch.tensor(lengths) > 0] - 1] = -100
    return tokens.to(device), cu_seqlens.to(device), labels.to(device)


def gradients(model: GPT) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("overrides", VARIANTS)
def test_loss_is_the_cross_entropy_of_the_logits(overrides, device):
    model = build(**overrides).to(device)
    tokens, cu_seqlens, labels = stream([9, 1, 0, 14], device)
    dense = F.cross_entropy(model(tokens, cu_seqlens), labels, reduction="sum")
    expected = torch.autograd.grad(dense, list(model.parameters()))
    loss = model(tokens, cu_seqlens, labels=labels)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, dense)
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overrides", VARIANTS)
def test_attentions_give_one_model(overrides, device):
    tokens, cu_seqlens, labels = stream([9, 1, 0, 14], device)
    results = {}
    for name, attention in ATTENTIONS.items():
        model = build(attention=attention, **overrides).to(device)
        loss = model(tokens, cu_seqlens, labels=labels)
        loss.backward()
        results[name] = [loss.detach(), *gradients(model)]
    for name, result in results.items():
        for ours, theirs in zip(result, results["naive"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_documents_do_not_leak(attention, device):
    model = build(attention=ATTENTIONS[attention]).to(device)
    tokens, cu_seqlens, labels = stream([11, 0, 13], device)
    labels[:11] = -100
    results = []
    for first_document in (tokens[:11], (tokens[:11] + 7) % 40):
        model.zero_grad()
        loss = model(torch.cat((first_document, tokens[11:])), cu_seqlens, labels=labels)
        loss.backward()
        results.append([loss.detach(), *gradients(model)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_packed_document_equals_the_document_alone(device):
    model = build().to(device)
    tokens, cu_seqlens, _ = stream([11, 1, 0, 13], device)
    packed = model(tokens, cu_seqlens)
    for start, end in ((0, 11), (11, 12), (12, 25)):
        torch.testing.assert_close(packed[start:end], model(tokens[start:end]))


def test_the_future_does_not_leak(device):
    model = build().to(device)
    tokens, _, _ = stream([12], device)
    changed = tokens.clone()
    changed[8:] = (changed[8:] + 1) % 40
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:8], after[:8])
    assert not torch.allclose(before[8:], after[8:])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_window_ends_what_a_token_sees(attention, device):
    """Both layers have a window of 4 tokens: a token sees itself and the 3 tokens before it."""
    tokens, cu_seqlens, _ = stream([16, 8], device)
    changed = tokens.clone()
    changed[[2, 18]] = (changed[[2, 18]] + 1) % 40
    for windows, reach in (((4, 4), 6), ((4, None), 16), ((1, 1), 0)):
        model = build(attention=ATTENTIONS[attention], family=Family(windows=windows)).to(device)
        for documents, starts in ((None, [2]), (cu_seqlens, [2, 18])):
            count = 16 if documents is None else 24
            differs = (model(tokens[:count], documents) - model(changed[:count], documents)).abs().amax(dim=1) > 1e-7
            expected = [
                any(start <= i <= start + reach and (i < 16) == (start < 16) for start in starts) for i in range(count)
            ]
            assert differs.tolist() == expected, (windows, documents)


def test_layers_may_have_no_rope_or_a_separate_theta(device):
    """If no layer has RoPE, changed positions do not change the logits."""
    tokens, _, _ = stream([12], device)
    far = torch.arange(12, device=device) * 3
    for family, same in (
        (Family(rope_layers=(False, False)), True),
        (Family(rope_layers=(False, True)), False),
        (Family(windows=(12, 12), local_rope_theta=1e30), False),
    ):
        model = build(family=family).to(device)
        assert torch.allclose(model(tokens), model(tokens, position_ids=far), atol=1e-6) == same
    local = build(family=Family(windows=(12, 12), local_rope_theta=100.0), rope_scaling=LINEAR).to(device)
    torch.testing.assert_close(local(tokens), build(rope_theta=100.0).to(device)(tokens))


def test_rope_scaling_stretches_positions(device):
    tokens, _, _ = stream([12], device)
    scaled, plain = build(rope_scaling=LINEAR).to(device), build().to(device)
    far = torch.arange(12, device=device) * 3
    torch.testing.assert_close(scaled(tokens, position_ids=far), plain(tokens))
    assert not torch.allclose(scaled(tokens), plain(tokens))


def test_gemmas_norm_counts_from_one():
    norm, x = OffsetRMSNorm(8, eps=1e-6), torch.randn(3, 8)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), eps=1e-6))
    nn.init.constant_(norm.weight, 1.0)
    torch.testing.assert_close(norm(x), 2 * F.rms_norm(x, (8,), eps=1e-6))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep_sum", [False, True])
def test_gemmas_fused_norm_is_its_norm(dtype, keep_sum):
    norm = OffsetRMSNorm(8, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight)
    x, added, d_sum, dy = (torch.randn(5, 8, dtype=dtype) for _ in range(4))

    def results(fused: bool) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), added.clone().requires_grad_()]
        total = leaves[0] + leaves[1]
        outputs = add_and_norm(leaves[0], leaves[1], norm, keep_sum=keep_sum) if fused else (total, norm(total))
        return [*outputs, *torch.autograd.grad(outputs, [*leaves, norm.weight], [d_sum, dy])]

    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.03}
    for fused, plain in zip(results(True), results(False), strict=True):
        torch.testing.assert_close(fused, plain, **tolerance)


def test_positions_can_run_on_across_documents(device):
    model = build(positions="learned").to(device)
    tokens, cu_seqlens, _ = stream([6, 6], device)
    reset = model(tokens, cu_seqlens)
    torch.testing.assert_close(model(tokens, cu_seqlens, torch.arange(6, device=device).repeat(2)), reset)
    running = model(tokens, cu_seqlens, torch.arange(12, device=device))
    torch.testing.assert_close(running[:6], reset[:6])
    assert not torch.allclose(running[6:], reset[6:])


@pytest.mark.usefixtures("bf16_matmul")
@pytest.mark.parametrize("overrides", VARIANTS)
def test_autocast_hands_attention_one_half_dtype(overrides, device):
    seen = []

    def attention(q, k, v, schedule, **scores):
        seen.append((q.dtype, k.dtype, v.dtype))
        return sdpa_attention(q, k, v, schedule, **scores)

    model = build(attention=attention, **overrides).to(device)
    tokens, cu_seqlens, labels = stream([9, 15], device)
    exact = model(tokens, cu_seqlens, labels=labels)
    seen.clear()
    with torch.autocast(device.type, torch.bfloat16):
        loss = model(tokens, cu_seqlens, labels=labels)
    loss.backward()
    assert set(seen) == {(torch.bfloat16,) * 3}
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients(model))
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0.0)


@pytest.mark.usefixtures("bf16_matmul")
@pytest.mark.parametrize("overrides", VARIANTS)
def test_bf16_weights_give_an_fp32_loss(overrides, device):
    model = build(**overrides).to(device)
    tokens, cu_seqlens, labels = stream([9, 15], device)
    exact = model(tokens, cu_seqlens, labels=labels)
    loss = model.to(torch.bfloat16)(tokens, cu_seqlens, labels=labels)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0.0)


@pytest.mark.gpu
def test_flash_trains_under_autocast(device):
    model = build(attention=flash_attention).to(device)
    tokens, cu_seqlens, labels = stream([150, 0, 1, 105], device)
    results = {}
    for name in ("flash", "naive"):
        for block in model.blocks:
            block.attention.attend = ATTENTIONS[name]
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, cu_seqlens, labels=labels)
        loss.backward()
        results[name] = torch.cat([loss.detach()[None], *(g.flatten() for g in gradients(model))])
    difference = (results["flash"] - results["naive"]).norm() / results["naive"].norm()
    assert difference < 1e-2  # bf16 has a relative error of 4e-3


@pytest.mark.gpu
def test_a_step_never_waits_for_the_gpu(device):
    model = build(attention=flash_attention).to(device)
    tokens, cu_seqlens, labels = stream([150, 0, 1, 105], device)
    for warm in (False, True):  # the first call compiles the kernels
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            with torch.autocast("cuda", torch.bfloat16):
                model(tokens, cu_seqlens, labels=labels).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "overrides"),
    [
        pytest.param("flash", {}, id="flash"),
        pytest.param("flash", GEMMA_LIKE, id="gemma-like"),
        pytest.param("sdpa", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_seq_len": 8}, id="dynamic"),
    ],
)
def test_compiles_without_a_graph_break(attention, overrides, device):
    torch._dynamo.reset()
    model = build(attention=ATTENTIONS[attention], **overrides).to(device)
    tokens, cu_seqlens, labels = stream([9, 15], device)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = run(tokens, cu_seqlens, labels=labels)
        (loss / 2).backward()
        results.append([loss.detach(), *gradients(model)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


class Products(TorchDispatchMode):
    """Counts the matmuls that run."""

    times = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.times += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu"])
def test_the_ffn_keeps_what_it_projected_and_repeats_no_product(activation, device):
    rows = 24 if activation == "gelu" else 48
    up, down = nn.Linear(16, rows, bias=False), nn.Linear(24, 16, bias=False)
    ffn = RecomputedFFN(up, down, activation, checkpointed=False).to(device)
    x, dy = torch.randn(5, 16, device=device, requires_grad=True), torch.randn(5, 16, device=device)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(tuple(s.shape)) or s, lambda s: s):
        y = ffn(x)
    activations = [shape for shape in saved if shape[:1] == (5,)]
    assert sorted(activations) == [(5, 16), tuple(ffn.up(x).shape)], "the FFN keeps its input and the result of `up`"
    with Products() as products:
        gradients = torch.autograd.grad(y, [x, ffn.up.weight, ffn.down.weight], dy)
    assert products.times == 4, "the backward needs two matmuls per weight"
    plain = torch.autograd.grad(ffn.at_once(x), [x, ffn.up.weight, ffn.down.weight], dy)
    assert all(map(torch.equal, gradients, plain))


@pytest.mark.parametrize("init", ["gpt2", "llama"])
def test_initialisation_is_the_published_one(init):
    model = build(dim=256, ffn_dim=512, n_layers=8, vocab_size=500, positions="learned", init=init, bias=True)
    residual = 0.02 / 4 if init == "gpt2" else 0.02
    deviations = {
        "token_embedding.weight": 0.02,
        "position_embedding.weight": 0.01 if init == "gpt2" else 0.02,
        "blocks.7.attention.qkv.weight": 0.02,
        "blocks.7.attention.out.weight": residual,
        "blocks.7.ffn.up.weight": 0.02,
        "blocks.7.ffn.down.weight": residual,
    }
    for name, deviation in deviations.items():
        weight = model.get_parameter(name)
        assert weight.mean().abs() < deviation / 20, name
        assert weight.std().item() == pytest.approx(deviation, rel=0.05), name
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_from_the_meta_device_is_initialised_alike(tied):
    overrides = {"bias": True, "norm": "layernorm", "positions": "learned", "activation": "gelu", "tied": tied}
    with torch.device("meta"):
        model = build(**overrides)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(1)  # the model uses the seed that was set when the model was built
    model.materialise(torch.device("cpu"))
    for (name, ours), theirs in zip(model.named_parameters(), build(**overrides).parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_tied_head_is_the_embedding():
    tied, untied = build(tied=True), build(tied=False)
    assert tied.head.weight is tied.token_embedding.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 40 * 32


def test_loading_with_assign_keeps_the_head_tied():
    model, weights = build(), build(seed=1).state_dict()
    model.load_state_dict({name: weight.clone() for name, weight in weights.items()}, assign=True)
    assert model.head.weight is model.token_embedding.weight
    assert torch.equal(model.head.weight, weights["head.weight"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param({"n_heads": 4, "n_kv_heads": 3}, "n_heads must be a multiple .* got 4 and 3", id="grouping"),
        pytest.param({"n_heads": 3, "n_kv_heads": 1}, "dim must be a multiple .* got 32 and 3", id="head-width"),
        pytest.param({"head_dim": 15}, "head_dim must be even for model.positions=rope; got 15", id="odd-rope"),
        pytest.param({"norm": "batch"}, "norm must be one of rmsnorm, layernorm, offset_rmsnorm; got batch", id="norm"),
        pytest.param({"positions": "alibi"}, "positions must be one of rope, learned, none; got alibi", id="positions"),
        pytest.param(
            {"activation": "relu"}, "activation must be one of swiglu, gelu, geglu; got relu", id="activation"
        ),
        pytest.param({"init": "xavier"}, "init must be one of gpt2, llama; got xavier", id="init"),
        pytest.param({"vocab_size": None}, "vocab_size must be at least 1; got None", id="no-vocabulary"),
        pytest.param({"n_layers": 0}, "n_layers must be at least 1; got 0", id="no-layers"),
        pytest.param({"n_kv_heads": 0}, "n_kv_heads must be at least 1; got 0", id="no-kv-heads"),
        pytest.param(
            {"positions": "learned", "max_seq_len": None},
            "learned needs model.max_seq_len, .*; got null",
            id="no-length",
        ),
        pytest.param(
            {"family": Family(windows=(4,))}, "family.windows must have model.n_layers=2 entries; got 1", id="windows"
        ),
        pytest.param(
            {"family": Family(rope_layers=(True,) * 3)}, "family.rope_layers must have .*=2 entries; got 3", id="rope"
        ),
        pytest.param({"family": {"softcap": 5.0}}, "model.family must be a Family or None; got a dict", id="family"),
        pytest.param({"attention": "sdpa"}, "attention must be a function, .*; got sdpa", id="attention"),
        pytest.param(
            {"attention": nn.MultiheadAttention(4, 2)},
            "attention must be .* without parameters; got MultiheadAttention with the parameters in_proj_weight, ",
            id="attention-with-weights",
        ),
        pytest.param({"family": Family(softcap=50.0)}, "attention=sdpa cannot cap scores", id="sdpa-softcap"),
        pytest.param(
            {"positions": "learned", "rope_scaling": LINEAR}, "rope_scaling needs model.positions=rope", id="scaling"
        ),
        pytest.param(
            {"head_dim": 2, "rope_scaling": LINEAR | {"rope_type": "dynamic"}, "max_seq_len": 64},
            "head_dim must be at least 4 for rope_type=dynamic; got 2",
            id="dynamic-head",
        ),
        pytest.param(
            {"rope_theta": 1.0, "rope_scaling": LINEAR | {"rope_type": "yarn"}, "max_seq_len": 64},
            "rope_theta must be more than 1 for rope_type=yarn; got 1",
            id="yarn-theta",
        ),
    ],
)
def test_impossible_sizes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(**overrides)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"windows": (4, 0)}, "family.windows must each be at least 1 token or null; got 0", id="window"),
        pytest.param({"softcap": -1.0}, r"family.softcap must be at least 0 \(0 disables it\); got -1.0", id="softcap"),
        pytest.param({"logit_softcap": float("inf")}, "family.logit_softcap must be .* got inf", id="logits"),
    ],
)
def test_impossible_families_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Family(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param((torch.zeros(2, 5, dtype=torch.long),), r"tokens must be .* got \(2, 5\)", id="batched"),
        pytest.param((torch.zeros(0, dtype=torch.long),), r"tokens must be .* got \(0,\)", id="empty"),
        pytest.param(
            (torch.zeros(5, dtype=torch.long), torch.tensor([0, 5])), r"cu_seqlens .* got \(2,\) int64", id="cu-dtype"
        ),
        pytest.param(
            (torch.zeros(5, dtype=torch.long), None, torch.arange(4)), r"position_ids .* \(5,\); got \(4,\)", id="ids"
        ),
        pytest.param(
            (torch.zeros(5, dtype=torch.long), None, None, torch.zeros(6, dtype=torch.long)),
            r"labels .* \(5,\); got \(6,\)",
            id="labels",
        ),
        pytest.param(
            (torch.zeros(5, dtype=torch.long), None, torch.arange(5), None, None, {}),
            "last_positions must be given with traffic",
            id="traffic",
        ),
    ],
)
def test_impossible_streams_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build()(*arguments)


def test_learned_positions_end():
    model = build(positions="learned", max_seq_len=8)
    tokens = torch.zeros(9, dtype=torch.long)
    message = "needs documents of at most model.max_seq_len=8 tokens; got 9"
    with pytest.raises(ValueError, match=message):
        model(tokens)
    with pytest.raises(ValueError, match=message):
        model.require_seq_len(9)
    model.require_seq_len(8)
    model(tokens, torch.tensor([0, 4, 9], dtype=torch.int32))  # the limit of 8 tokens applies to each document
    build(max_seq_len=8)(tokens)
