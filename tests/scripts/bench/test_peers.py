"""Tests scripts/bench/peers.py: our model equals the peer, layers compile, LoRA works, and SDPA's kernel is chosen."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hydra.utils import instantiate
from torch import nn
from torchao.optim import AdamW8bit

from fa_train.training import build_model
from scripts.bench import peers
from scripts.bench.case_process import Case
from scripts.bench.peers import build_peer, compile_layers
from scripts.bench.step import configuration, measure
from scripts.bench.training_case import StepTimes
from scripts.bench.variants import variant_of
from tests.support.marks import slow
from tests.support.operators import Operators

CPU = torch.device("cpu")
TINY = (
    "model.n_layers=2", "model.dim=32", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_dim=64",
    "model.vocab_size=259",
)  # fmt: skip
CASE = Case("nano", 64, "ours-none", "cpu", "sdpa", steps=2, slow_step=60, overrides=TINY)
ADAPTED = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"


def peer_of(name, *overrides):
    torch.manual_seed(0)
    return build_peer(configuration(replace(CASE, overrides=(*TINY, *overrides))), CPU, variant_of(name))


def copy_weights(ours, llama):
    for block, layer in zip(ours.blocks, llama.layers, strict=True):
        q, k, v, out, gate, up, down = (
            getattr(linear, "base", linear).weight
            for linear in (
                *(getattr(layer.self_attn, f"{name}_proj") for name in "qkvo"),
                layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj,
            )
        )  # fmt: skip
        block.attention.qkv.weight.copy_(torch.cat([q, k, v]))
        block.attention.out.weight.copy_(out)
        block.ffn.up.weight.copy_(torch.cat([gate, up]))
        block.ffn.down.weight.copy_(down)
    ours.token_embedding.weight.copy_(llama.embed_tokens.weight)


def copy_adapters(ours, llama):
    """Sets each matrix B of the peer's adapters to random values, and then copies the adapters to our model."""
    for block, layer in zip(ours.blocks, llama.layers, strict=True):
        for joined in (block.attention.qkv, block.attention.out, block.ffn.up, block.ffn.down):
            for name in joined.rows:
                single = getattr(layer.mlp, name, None) or getattr(layer.self_attn, name)
                nn.init.normal_(single.b)
                joined.lora_A[name].copy_(single.a)
                joined.lora_B[name].copy_(single.b)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_both_sides_train_the_same_model(adapter):
    """Equal logits show that sizes, theta, the norm's eps and the scale of the adapters are equal."""
    config = configuration(replace(CASE, overrides=(*TINY, f"adapter={adapter}")))
    ours = build_model(config, config.model.vocab_size)
    peer = build_peer(config, CPU, variant_of("hf")).model
    for trained in (True, False):
        ours_, peer_ = (
            sum(p.numel() for p in model.parameters() if p.requires_grad is trained) for model in (ours, peer)
        )
        assert ours_ == peer_
    with torch.no_grad():
        copy_weights(ours, peer.model)
        if adapter == "lora":
            copy_adapters(ours, peer.model)
        tokens = torch.randint(259, (64,))
        expected = peer(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(ours(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("document_len", [*slow(64), 16], ids=["dense", "packed"])
def test_transformers_has_the_same_loss_with_our_attention(document_len):
    losses, gradients = [], []
    for name in ("hf", "hf-fa_train"):
        peer = peer_of(name, "model.n_layers=1", f"data.document_len={document_len}")
        with Operators() as seen:
            losses.append(peer.loss())
        losses[-1].backward()
        gradients.append(peer.model.model.layers[0].self_attn.q_proj.weight.grad)
        ours = seen.names.count("flash_attention.forward.default")
        assert ours == (1 if name == "hf-fa_train" else 0)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-compiled", "hf-compiled-checkpointing"])
def test_each_layer_is_compiled(name, monkeypatch):
    """Each layer is compiled without graph breaks, and all layers share one compiled graph."""
    graphs, calls = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *arguments: calls.append(graph) or graph(*arguments)

    monkeypatch.setattr(peers, "compile_layers", partial(compile_layers, backend=backend))
    torch._dynamo.reset()
    expected, found = peer_of("hf", "model.n_layers=3"), peer_of(name, "model.n_layers=3")
    assert found.model.is_gradient_checkpointing == ("checkpointing" in name)
    loss = found.loss()
    assert len(graphs) == 1 and len(calls) == 3
    torch.testing.assert_close(loss, expected.loss())
    loss.backward()
    expected.loss().backward()
    for ours, theirs in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.slow
def test_a_graph_break_is_an_error(monkeypatch):
    class Breaks(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    monkeypatch.setattr(peers, "compile_layers", partial(compile_layers, backend="eager"))
    peer = peer_of("hf-compiled")
    peer.model.model.layers[0].mlp.act_fn = Breaks()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        peer.loss()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "note"), [("", "SDPA: cuDNN"), ("no GPU", "SDPA's kernel is torch's choice: no GPU")]
)
def test_sdpa_is_restricted_to_cudnn_if_it_can_run(reason, note, monkeypatch):
    monkeypatch.setattr(peers, "without_cudnn", lambda *arguments: reason)
    peer, seen = peer_of("hf-compiled"), []
    assert peer.note.endswith(note)
    weight = peer.model.model.norm.weight

    def enabled(*arguments):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))

    def loss():
        enabled()
        value = weight.sum() * 1
        value.register_hook(enabled)
        return value

    times = StepTimes(1, slow_step=60)
    peers.measure(configuration(CASE), CPU, replace(peer, loss=loss), times)
    assert seen == [(True, bool(reason))] * 6  # forward and backward of three steps
    assert torch.backends.cuda.flash_sdp_enabled()


def test_packed_documents_do_not_use_cudnn():
    config = configuration(replace(CASE, overrides=(*TINY, "data.document_len=16")))
    assert peers.without_cudnn(config, torch.device("cuda")) == "packed documents need a mask"
    assert peers.without_cudnn(config, CPU) == "cuDNN needs a GPU"


def test_lora_with_weights_in_bf16():
    targets = "adapter.target_modules=[q_proj,k_proj,v_proj,o_proj,down_proj]"
    peer = peer_of("hf", "adapter=lora", "trainer.precision=bf16-true", targets)
    peer.loss().backward()
    found = {name.removeprefix("model.layers.0."): p for name, p in peer.model.named_parameters() if p.requires_grad}
    assert {f"{name}.{matrix}" for name in ADAPTED for matrix in "ab"} <= found.keys()
    assert not any("gate_proj" in name or "up_proj" in name for name in found)
    for name, parameter in peer.model.named_parameters():
        adapts = name.endswith((".a", ".b"))
        assert parameter.dtype == (torch.float32 if adapts else torch.bfloat16)
        assert (parameter.grad is not None) == adapts


def test_full_training_with_8_bit_states():
    config = configuration(replace(CASE, overrides=(*TINY, "optimizer=adamw_8bit", "trainer.precision=bf16-true")))
    model = build_peer(config, CPU, variant_of("hf")).model
    optimizer = instantiate(config.optimizer)(model)
    trained = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert isinstance(optimizer, AdamW8bit) and trained == sum(p.numel() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_adapters_that_the_peer_does_not_have():
    row = measure(replace(CASE, name="hf", overrides=(*TINY, "adapter=lora", "adapter.lora_dropout=0.1")))
    assert row.outcome == "missing: the peer's LoRA has no adapter.lora_dropout=0.1"
