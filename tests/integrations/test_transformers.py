"""Tests this project's attention inside transformers models, and compares it with transformers' eager attention."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils

from fa_kernels.flash_attention import schedule
from fa_train.integrations import key_masks, packed_rows
from fa_train.integrations import transformers as fa
from tests.integrations.support.models import MODELS, VOCAB, logits_and_gradients, tiny, tokens
from tests.support.operators import Operators
from tests.support.tolerance import assert_as_accurate

LENGTHS = 7, 1, 9  # of packed documents
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, 7, 8, 17], dtype=torch.int32)
IN_CU_SEQLENS = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS, "max_length_q": 9, "max_length_k": 9}
LEFT = torch.tensor([[1] * 11, [0] * 4 + [1] * 7])
RIGHT = LEFT.flip(1)
HOLES = torch.tensor([[1] * 9, [0, 1, 1, 0, 0, 1, 1, 1, 0]])


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    fa.register()


def assert_as_accurate_as_eager(model: Any, ids: Tensor, weight: Tensor, exact: str = "eager", **inputs: Any) -> None:
    """Asserts that our fp32 errors are at most twice as large as the fp32 errors of eager attention.

    `exact` names the attention that computes the fp64 result.
    """
    results = {}
    for name, dtype, implementation in (
        ("exact", torch.float64, exact), ("eager", torch.float32, "eager"), ("ours", torch.float32, fa.NAME),
    ):  # fmt: skip
        model.to(dtype).set_attn_implementation(implementation)
        results[name] = logits_and_gradients(model, ids, weight, **inputs)
    for i, what in enumerate(("logits", "gradients")):
        assert results["ours"][i].abs().max() > 0
        assert_as_accurate(what, results["ours"][i], results["exact"][i], results["eager"][i])


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager_attention(name):
    assert_as_accurate_as_eager(tiny(name), tokens(1, 13), torch.randn(1, 13, VOCAB))


@pytest.mark.parametrize("name", ["gemma2-soft-cap", "gpt_oss-sinks", "persimmon-layers-without-position_ids"])
@torch.no_grad()
def test_packed_documents_are_separate_documents(name):
    model, ids = tiny(name), tokens(1, sum(LENGTHS))
    separate = torch.cat([model(x, use_cache=False).logits for x in ids.split(LENGTHS, dim=1)], dim=1)
    model.set_attn_implementation(fa.NAME)
    for packed in ({"position_ids": POSITIONS}, {"position_ids": POSITIONS, **IN_CU_SEQLENS}):
        torch.testing.assert_close(model(ids, use_cache=False, **packed).logits, separate)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@torch.no_grad()
def test_packed_rows_of_a_batch_need_no_position_ids_in_layers(compiled):
    model, ids = tiny("persimmon-layers-without-position_ids"), tokens(2, 11)
    positions = torch.stack([POSITIONS[0, :11], torch.arange(11)])
    expected = model(ids, use_cache=False, position_ids=positions).logits
    model.set_attn_implementation(fa.NAME)
    if compiled:
        model = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(model(ids, use_cache=False, position_ids=positions).logits, expected)


def test_packed_rows_of_a_batch_have_the_gradients_of_eager_attention():
    ids, positions = tokens(2, 11), torch.stack([POSITIONS[0, :11], torch.arange(11)])
    assert_as_accurate_as_eager(tiny("mistral-window"), ids, torch.randn(2, 11, VOCAB), position_ids=positions)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [{"position_ids": POSITIONS}, IN_CU_SEQLENS], ids=["position_ids", "cu_seqlens"])
def test_a_document_does_not_change_the_others_by_a_bit(packed):
    model, weight = tiny("llama-three-to-one"), torch.randn(VOCAB)
    model.set_attn_implementation(fa.NAME)
    embeddings = torch.randn(1, sum(LENGTHS), 24)
    results = []
    for change in (0.0, torch.nan):
        changed = embeddings.clone()
        changed[:, 8:] += change
        changed.requires_grad_()
        logits = model(inputs_embeds=changed, use_cache=False, **packed).logits
        (logits * weight)[:, :8].sum().backward()
        results.append((logits[:, :8], changed.grad[:, :8]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].abs().max() > 0


@torch.no_grad()
def test_every_layer_runs_our_operator_and_no_other_attention():
    model = tiny("gemma2-soft-cap")
    model.set_attn_implementation(fa.NAME)
    with Operators() as of_rope:  # in transformers 5.17, RoPE runs a matmul, which is not attention
        model.model.rotary_emb(torch.zeros(1, 8, 1), torch.arange(8)[None])
    with Operators() as seen:
        model(tokens(1, 8), use_cache=False)
    assert seen.names.count("flash_attention.forward.default") == model.config.num_hidden_layers
    assert not [name for name in seen.names if "softmax" in name or "scaled_dot_product" in name]
    assert seen.names.count("aten.bmm.default") == of_rope.names.count("aten.bmm.default")


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param("mistral-window", LEFT, id="left-with-a-window"),
        pytest.param("llama-three-to-one", RIGHT, id="right"),
        pytest.param("llama-three-to-one", HOLES, id="holes"),
        pytest.param("mistral-window", HOLES.repeat(1, 2), id="holes-with-a-window"),
    ],
)
def test_padding_is_left_out(name, mask):
    weight = torch.randn(*mask.shape, VOCAB) * mask[..., None]
    # In fp64, the mask of eager attention becomes -inf, and queries that are padding get NaN.
    assert_as_accurate_as_eager(tiny(name), tokens(*mask.shape), weight, exact="sdpa", attention_mask=mask)


@pytest.mark.slow
def test_an_encoder_and_cross_attention_see_no_padding():
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    weight = torch.randn(2, 5, VOCAB)
    assert_as_accurate_as_eager(model, tokens(2, 11), weight, attention_mask=LEFT, decoder_input_ids=tokens(2, 5))


@pytest.mark.parametrize("mask", [torch.ones_like(LEFT), LEFT, HOLES.repeat(1, 2)], ids=["all", "left", "holes"])
def test_the_mask_decides_about_causality(mask):
    """Aimv2's attention layers say that they are bidirectional, but transformers asks for a causal mask."""
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = transformers.Aimv2TextConfig(**sizes, num_hidden_layers=1, max_position_embeddings=32, eos_token_id=2)
    model, ids = transformers.Aimv2TextModel(config).eval(), tokens(*mask.shape)
    assert not model.encoder.layers[0].attention.is_causal
    results = []
    with torch.no_grad():
        for implementation in ("eager", fa.NAME):
            model.set_attn_implementation(implementation)
            results.append(model(ids, attention_mask=mask).last_hidden_state[mask == 1])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.slow
@torch.no_grad()
def test_a_decoder_that_says_that_it_is_bidirectional_is_causal():
    config = transformers.PegasusXConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.PegasusXModel(config).eval()
    inputs, results = {"input_ids": tokens(1, 6), "decoder_input_ids": tokens(1, 8)}, []
    for implementation in ("eager", fa.NAME):
        model.set_attn_implementation(implementation)
        results.append(model(**inputs, use_cache=False).last_hidden_state)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("mask", [None, LEFT, HOLES], ids=["all", "left", "holes"])
@torch.no_grad()
def test_a_bidirectional_mask_needs_no_is_causal_in_layers(mask):
    layer, config = torch.nn.Identity(), transformers.LlamaConfig(attn_implementation=fa.NAME)
    batch, seqlen = (2, 11) if mask is None else mask.shape
    q, k, v = torch.randn(3, batch, 2, seqlen, 16)
    asked = masking_utils.create_bidirectional_mask(config, torch.zeros(batch, seqlen, 2), mask)
    o, _ = fa.attention(layer, q, k, v, asked, is_causal=True)
    keys = None if mask is None else mask[:, None, None].bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keys).transpose(1, 2)
    torch.testing.assert_close(o, expected)
    with pytest.raises(
        ValueError, match="is_causal must be True or False; got None, and the layer Identity has no is_"
    ):
        fa.attention(layer, q, k, v, None)


@torch.no_grad()
def test_the_window_of_t5gemma_is_that_of_eager_attention():
    module = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    module |= {"vocab_size": VOCAB, "head_dim": 8, "sliding_window": 3, "num_hidden_layers": 1}
    config = transformers.T5GemmaConfig(encoder=dict(module), decoder=dict(module), vocab_size=VOCAB)
    model = transformers.T5GemmaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    inputs, results = {"input_ids": tokens(1, 12), "decoder_input_ids": tokens(1, 4), "use_cache": False}, []
    assert model.model.encoder.layers[0].self_attn.sliding_window == 3
    for implementation in ("eager", fa.NAME):
        model.set_attn_implementation(implementation)
        results.append(model(**inputs).encoder_last_hidden_state)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("mask", [None, LEFT], ids=["all", "left"])
@torch.no_grad()
def test_the_window_of_a_bidirectional_decoder_is_that_of_eager_attention(mask):
    model, ids, results = tiny("mistral-window", is_causal=False), tokens(2, 11), []
    for implementation in ("eager", fa.NAME):
        model.set_attn_implementation(implementation)
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        results.append(logits if mask is None else logits[mask == 1])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("name", "mask"),
    [
        pytest.param("mistral-window", LEFT, id="mistral-padded"),
        pytest.param("mistral-window", HOLES.repeat(1, 2)[:, :-1], id="mistral-with-holes"),
        pytest.param("gpt_oss-sinks", None, id="gpt_oss"),
    ],
)
def test_generation_with_a_cache_is_that_of_eager_attention(name, mask, cache):
    model, ids = tiny(name), tokens(*(LEFT if mask is None else mask).shape)
    results = []
    for implementation in ("eager", fa.NAME):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None,
                cache_implementation=cache, disable_compile=True, return_dict_in_generate=True, output_logits=True,
            )
        )  # fmt: skip
    eager, ours = results
    assert torch.equal(eager.sequences, ours.sequences)
    torch.testing.assert_close(ours.logits, eager.logits)


@pytest.mark.parametrize("mask", [LEFT, HOLES.repeat(1, 2)[:, :-1]], ids=["left", "holes"])
@torch.no_grad()
def test_a_window_on_a_cache_of_all_keys_is_that_of_eager_attention(mask):
    """This cache keeps all keys, because it does not know that the layers have windows."""
    model, ids = tiny("mistral-window"), tokens(len(mask), mask.shape[1])
    results = []
    for implementation in ("eager", fa.NAME):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache()
        model(ids[:, :-2], attention_mask=mask[:, :-2], past_key_values=cache)
        steps = [
            model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for end in (mask.shape[1] - 1, mask.shape[1])
        ]
        results.append(torch.cat(steps, dim=1)[mask[:, -2:] == 1])
    torch.testing.assert_close(results[1], results[0])


@torch.no_grad()
def test_tokens_after_right_padded_prompts_leave_the_padding_out():
    model, ids, later = tiny("llama-three-to-one"), tokens(*RIGHT.shape), tokens(2, 3)
    alone = model(torch.cat([ids[1:, :7], later[1:]], dim=1), use_cache=False).logits[:, 7:]
    model.set_attn_implementation(fa.NAME)
    cache = model(ids, attention_mask=RIGHT, use_cache=True).past_key_values
    mask = torch.cat([RIGHT, torch.ones_like(later)], dim=1)
    positions = torch.tensor([[11, 12, 13], [7, 8, 9]])
    for new in (slice(0, 2), slice(2, 3)):
        logits = model(
            later[:, new],
            attention_mask=mask[:, : 11 + new.stop],
            position_ids=positions[:, new],
            past_key_values=cache,
        ).logits
        torch.testing.assert_close(logits[1:], alone[:, new])


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["all", "left", "right"])
def test_a_token_with_a_cache_builds_no_schedule(mask, monkeypatch):
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a schedule was built")

    for module in (schedule, key_masks, packed_rows):
        monkeypatch.setattr(module, "build_schedule", forbidden)
    k, v = torch.randn(2, *LEFT.shape, 1, 16).transpose(-2, -3)
    o, _ = fa.attention(torch.nn.Identity(), torch.randn(2, 2, 1, 16), k, v, mask, sliding_window=4)
    assert o.shape == (2, 1, 2, 16)


@torch.no_grad()
def test_layers_share_a_schedule_as_long_as_its_tensor_is_unchanged(monkeypatch):
    built = []
    build = packed_rows.build_schedule
    monkeypatch.setattr(packed_rows, "build_schedule", lambda *a, **k: built.append(1) or build(*a, **k))
    model, ids, positions = tiny("llama-three-to-one", num_hidden_layers=2), tokens(1, 17), POSITIONS.clone()
    other = model(ids, position_ids=torch.arange(17)[None], use_cache=False).logits
    model.set_attn_implementation(fa.NAME)
    model(ids, position_ids=positions, use_cache=False)
    assert len(built) == 1
    positions.copy_(torch.arange(17))
    torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, other)
    assert len(built) == 1  # a single document needs no call of build_schedule
    n_kept = len(packed_rows._KEPT)
    del positions
    assert len(packed_rows._KEPT) == n_kept - 1


def test_what_is_not_supported_is_refused_by_name(monkeypatch):
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a kernel ran")

    for name in ("flash_attn_packed", "flash_attn_with_kvcache"):
        monkeypatch.setattr(fa, name, forbidden)
    ids = tokens(1, 4)

    def run(fields: dict[str, Any], name: str = "llama-three-to-one", train: bool = False, **inputs: Any) -> None:
        model = tiny(name, **fields).train(train)
        model.set_attn_implementation(fa.NAME)
        model(ids, use_cache=False, **inputs)

    with pytest.raises(ValueError, match=r"attention_dropout must be 0.0 in training; got 0.1"):
        run({"attention_dropout": 0.1}, train=True)
    with pytest.raises(ValueError, match=r"the config's attn_pdrop must be 0.0 in training; got 0.2"):
        run({"attn_pdrop": 0.2}, name="gpt2", train=True)
    with pytest.raises(ValueError, match="output_attentions must not be given"):
        run({}, output_attentions=True)
    with pytest.raises(ValueError, match=r"no custom masks; got \(1, 1, 4, 4\)"):
        run({}, attention_mask=torch.zeros(1, 1, 4, 4))
    with pytest.raises(ValueError, match=r"no custom masks; got \(1, 1, 1, 4\)"):
        run({}, attention_mask=torch.ones(1, 1, 1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"attention_mask must have 1 rows, one for each sequence; got 2"):
        run({}, attention_mask=torch.tensor([[0, 1, 1, 1]] * 2))
    with pytest.raises(ValueError, match=r"head_dim must be from 1 to 256; got 264"):
        run({"head_dim": 264})
    for name in ("indices", "block_indices", "sinks"):
        with pytest.raises(ValueError, match=f"^{name} must not be given"):
            run({}, **{name: torch.zeros(1, 4)})
    with pytest.raises(ValueError, match=r"cu_seq_lens_k must start at 0, .* end at 4 or before; got \[0, 3, 5\]"):
        run({}, cu_seq_lens_q=torch.tensor([0, 3, 4]), cu_seq_lens_k=torch.tensor([0, 3, 5]))
    with pytest.raises(ValueError, match=r"cu_seq_lens_k must be .* integers on cpu; got .*float32"):
        run({}, cu_seq_lens_q=CU_SEQLENS, cu_seq_lens_k=CU_SEQLENS.float())
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="must run on a CUDA GPU; got cpu"):
        run({})


def test_masks_other_than_causality_windows_and_padding_are_refused():
    config = transformers.LlamaConfig(attn_implementation=fa.NAME, attention_chunk_size=3)
    inputs = config, torch.zeros(1, 4, 2), None, None
    blocks = torch.tensor([[-1, 0, 0, -1]])
    with pytest.raises(ValueError, match="or_mask_function and and_mask_function must not be given"):
        masking_utils.create_causal_mask(*inputs, or_mask_function=lambda b, h, q, k: q >= k)
    with pytest.raises(ValueError, match="no bidirectional blocks"):
        masking_utils.create_causal_mask(*inputs, block_sequence_ids=blocks)
    assert masking_utils.create_causal_mask(*inputs, block_sequence_ids=torch.full_like(blocks, -1)).shape[-1] == 0
    with pytest.raises(ValueError, match=r"at most attention_chunk_size=3 keys.*; got 4"):
        masking_utils.create_chunked_causal_mask(*inputs)


@pytest.mark.slow
def test_compiled_code_refuses_bidirectional_blocks():
    config = transformers.LlamaConfig(attn_implementation=fa.NAME)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def mask(blocks: Tensor) -> Tensor:
        return masking_utils.create_causal_mask(config, torch.zeros(1, 4, 2), None, None, block_sequence_ids=blocks)

    assert key_masks.causality(mask(torch.tensor([[-1, -1, -1, -1]])))
    with pytest.raises(RuntimeError, match="fa_train has no bidirectional blocks"):
        mask(torch.tensor([[-1, 0, 0, -1]]))


def test_masks_of_a_static_cache_tell_how_many_keys_it_holds():
    user = torch.tensor([[0, 0, 1, 1, 1]]).bool()
    mask = key_masks.encoded(user, 1, 8, 0, 5, True, user.device)
    assert mask.dtype == key_masks.RUNS and mask.tolist() == [[[[0, 0, 6, 6, 6, 0, 0, 0]]]]
    # none of the keys 2 to 4 is padding
    assert key_masks.encoded(user, 1, 3, 2, 3, True, user.device).shape == (1, 1, 1, 0)
    for causal in (True, False):  # FSDP2 with mixed precision casts the floating inputs of a layer
        assert not key_masks.encoded(None, 1, 3, 0, 3, causal, user.device).is_floating_point()


@pytest.mark.slow
@torch.no_grad()
def test_compiled_decoding_with_a_static_cache_leaves_keys_in_place():
    model, inputs = tiny("llama-three-to-one"), {"input_ids": tokens(2, 6), "attention_mask": LEFT[:, 3:9]}
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **settings)
    model.set_attn_implementation(fa.NAME)
    operators: list[str] = []

    def record(graph: torch.fx.GraphModule, _: object) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    forward, compiled = model.forward, torch.compile(model.forward, fullgraph=True, backend=record)
    model.forward = lambda **inputs: (compiled if inputs["input_ids"].shape[1] == 1 else forward)(**inputs)
    # the test compiles the model itself, because generate would compile it only on a GPU
    sequences = model.generate(**inputs, **settings, cache_implementation="static", disable_compile=True)
    assert torch.equal(sequences, expected)
    assert any("decode" in name for name in operators) and not any("gather" in name for name in operators)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inputs",
    [{"position_ids": POSITIONS}, {"attention_mask": torch.tensor([[0] * 3 + [1] * 14])}],
    ids=["packed", "padded"],
)
def test_compiled_models_have_one_graph(inputs):
    model, ids = tiny("mistral-window").model, tokens(1, 17)
    model.set_attn_implementation(fa.NAME)
    inputs = inputs | {"use_cache": False}
    results = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        hidden = run(ids, **inputs).last_hidden_state
        hidden[:, 3:].square().sum().backward()
        gradient = model.embed_tokens.weight.grad
        results.append((hidden[:, 3:], gradient / gradient.abs().max()))
    torch.testing.assert_close(results[1], results[0])


def test_schedules_made_in_a_transform_are_not_kept():
    """A tensor that is created inside a torch.func transform cannot be read after the transform."""
    positions, q = POSITIONS.clone(), torch.randn(1, 2, 17, 16)

    def scaled(x: Tensor) -> Tensor:
        o, _ = fa.attention(torch.nn.Module(), q, q, q, None, is_causal=True, position_ids=positions)
        return x * o.sum()

    expected = torch.func.grad(scaled)(torch.ones(()))
    assert torch.equal(scaled(torch.ones(())), expected)
