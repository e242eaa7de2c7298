"""Tests attention inside transformers models on a GPU, with compiled kernels, in bf16."""

from typing import Any

import pytest
import torch

from fa_train.integrations import transformers as fa
from tests.integrations.support.models import VOCAB, logits_and_gradients, tiny, tokens
from tests.support.tolerance import assert_as_accurate

pytestmark = pytest.mark.gpu

# head dimensions that the Hopper kernels support
SIZES: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 512}
MODELS = [
    pytest.param(
        "llama-three-to-one", SIZES | {"hidden_size": 384, "num_attention_heads": 6, "head_dim": 64}, id="llama"
    ),
    pytest.param("gemma2-soft-cap", SIZES | {"head_dim": 128, "sliding_window": 100}, id="gemma2"),
    # only one expert, because bf16 rounding could make the two compared models choose different experts
    pytest.param(
        "gpt_oss-sinks", SIZES | {"head_dim": 64, "sliding_window": 128, "num_local_experts": 1}, id="gpt_oss"
    ),
]
LENGTH = 300
LEFT = torch.arange(LENGTH) >= torch.tensor([[0], [70]])
PACKED = torch.cat([torch.arange(200), torch.arange(100)])[None]  # positions of two documents


@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
@pytest.mark.parametrize(("name", "fields"), MODELS)
def test_logits_and_gradients_are_those_of_eager_attention(name, fields, padded, device):
    fa.register()
    model, ids = tiny(name, **fields).to(device), tokens(2, LENGTH).to(device)
    weight, inputs = torch.randn(2, LENGTH, VOCAB, device=device), {}
    if padded:
        inputs["attention_mask"] = LEFT.to(device)
        weight *= inputs["attention_mask"][..., None]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    results = {}
    for run, dtype, implementation in (
        ("exact", torch.float32, "eager"), ("eager", torch.bfloat16, "eager"), ("ours", torch.bfloat16, fa.NAME),
    ):  # fmt: skip
        model.to(dtype).load_state_dict(state)
        model.set_attn_implementation(implementation)
        results[run] = logits_and_gradients(model, ids, weight, **inputs)
    for i, what in enumerate(("logits", "gradients")):
        assert results["ours"][i].abs().max() > 0
        assert_as_accurate(what, results["ours"][i], results["exact"][i], results["eager"][i])


@torch.no_grad()
@pytest.mark.parametrize(("name", "fields"), MODELS)
def test_a_packed_document_does_not_change_the_other_by_a_bit(name, fields, device):
    fa.register()
    model, ids, positions = tiny(name, **fields).to(device), tokens(1, LENGTH).to(device), PACKED.to(device)
    model.set_attn_implementation(fa.NAME)
    alone = model(ids[:, :200], use_cache=False).logits
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, :200], alone, rtol=1e-3, atol=1e-3)
    ids[:, 200:] = tokens(1, 100)
    changed = model(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(packed[:, :200], changed[:, :200]) and not torch.equal(packed, changed)


@pytest.mark.parametrize("cache", ["dynamic", "static"])  # with a static cache, generate compiles the model
@pytest.mark.parametrize(("name", "fields"), MODELS)
def test_generation_is_that_of_eager_attention(name, fields, cache, device):
    fa.register()
    model, ids = tiny(name, **fields).to(device), tokens(2, LENGTH).to(device)
    sequences = []
    for implementation in ("eager", fa.NAME):
        model.set_attn_implementation(implementation)
        sequences.append(
            model.generate(
                ids, attention_mask=LEFT.to(device), max_new_tokens=6, do_sample=False, eos_token_id=None,
                cache_implementation=cache, disable_compile=implementation == "eager",
            )
        )  # fmt: skip
    assert torch.equal(*sequences)
