"""Tests which checkpoints and options are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fa_train.models.hf.import_ import load_pretrained
from tests.models.hf.support.checkpoints import YARN, assert_same_weights, edit_config


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        pytest.param("llama", {"num_experts": 8}, r"not supported for model_type=llama: num_experts=8", id="unknown"),
        pytest.param("llama", {"quantization_config": {"bits": 4}}, "quantization_config=", id="quantized"),
        pytest.param("mistral", {"layer_types": ["full_attention"] * 3}, "model_type=mistral: layer_types", id="other"),
        pytest.param("llama", {"model_type": "mixtral"}, "model_type must be one of gpt2, .*; got mixtral", id="model"),
        pytest.param("llama", {"model_type": ["llama"]}, r"model_type must be one of .*; got \['llama'\]", id="list"),
        pytest.param("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive", id="zero"),
        pytest.param("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be positive or null",
            id="no-cap"),
        pytest.param("gemma3", {"final_logit_softcapping": -1.0}, "final_logit_softcapping must be .*; got -1.0",
            id="no-cap-of-logits"),
        pytest.param("llama", {"architectures": ["LlamaModel"]}, "architectures must name LlamaFor", id="head"),
        pytest.param("llama", {"architectures": 3}, "architectures must name LlamaForCausalLM; got 3", id="number"),
        pytest.param("llama", {"num_attention_heads": 0}, "config.json: integer modulo by zero", id="no-heads"),
        pytest.param("llama", {"dtype": "float8"}, "config.json: module 'torch' has no attribute", id="no-dtype"),
        pytest.param("llama", {"hidden_act": "relu"}, 'hidden_act must be "silu"; got "relu"', id="activation"),
        pytest.param("gpt2", {"activation_function": "gelu"}, 'must be "gelu_pytorch_tanh" or .* got "gelu"', id="erf"),
        pytest.param("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be false", id="scale"),
        pytest.param("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping must be null", id="soft-cap"),
        pytest.param("gemma3", {"sliding_window": None}, "sliding_window must be a number of tokens", id="no-window"),
        pytest.param("qwen3", {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "layer_types must be full_attention if .* use_sliding_window is false; got sliding", id="unused-window"),
        pytest.param("gemma2", {"sliding_window_size": 9}, "sliding_window_size must equal sliding_window, .*; got 9",
            id="two-windows"),
        pytest.param("qwen2", {"use_mrope": True}, "use_mrope must be false or null; got true", id="mrope"),
        pytest.param("gpt2", {"n_special": 3}, "n_special must be 0; got 3", id="more-tokens"),
        pytest.param("gemma2", {"use_bidirectional_attention": True}, "bidirectional_attention must be", id="two-way"),
        pytest.param("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "short_factor": [1.0],
            "long_factor": [1.0], "factor": 1.0, "original_max_position_embeddings": 8}},
            "rope_type must be one of default, linear, dynamic, yarn, llama3; got longrope", id="rope-type"),
        pytest.param("llama", {"rope_parameters": YARN | {"beta_medium": 3}}, "unknown: beta_medium", id="rope-field"),
        pytest.param("gemma3", {"rope_parameters": {"full_attention": YARN | {"truncate": False}}},
            "full_attention must not have truncate=false, which transformers ignores", id="truncate"),
        pytest.param("gemma3", {"rope_parameters": {"full_attention": YARN, "truncate": False}},
            "rope_parameters.truncate must be true or missing; got false", id="outer-truncate"),
        pytest.param("llama", {"rope_parameters": YARN | {"truncate": None}},
            "rope_parameters.truncate must be true or false; got null", id="null-truncate"),
        pytest.param("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0; got 0.5", id="part"),
        pytest.param("llama", {"rope_parameters": None, "rope_theta": None}, "rope_theta must be a number; got null",
            id="no-theta"),
        pytest.param("smollm3", {"layer_types": None, "no_rope_layers": [1]}, "config.json: list index out of range",
            id="short-list"),
        pytest.param("llama", {"num_hidden_layers": "three"}, "num_hidden_layers", id="type"),
        pytest.param("llama", {"num_attention_heads": 5}, "multiple of the number of attention heads", id="heads"),
        pytest.param("llama", {"intermediate_size": 40},
            r"layers.0.mlp.down_proj.weight must be \(32, 40\) according to config.json; got \(32, 48\)", id="shape"),
        pytest.param("llama", {"attention_bias": True}, r"all tensors .* missing: .*proj.bias", id="missing-tensor"),
        pytest.param("llama", {"num_hidden_layers": 2}, r"layers\.2\.\S+ is not part of the model", id="extra-tensor"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(name, fields, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load_pretrained(edit_config(checkpoint(name), **fields))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def garbled(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(truncated, "model-00002-of-.*safetensors is not a whole safetensors file", id="truncated"),
        pytest.param(garbled, "model-00002-of-.*safetensors is not a whole safetensors file", id="garbled"),
        pytest.param(
            Path.unlink, "model-00002-of-.*safetensors is missing; model.safetensors.index.json", id="missing"
        ),
        pytest.param(
            lambda path: save_file({"x": torch.ones(1)}, path),
            "model-00002-of-.* must hold .*index.json says",
            id="wrong",
        ),
    ],
)
def test_a_corrupt_shard_is_named(damage, message, checkpoint):
    folder = checkpoint("llama", max_shard_size="20kB")
    damage(next(folder.glob("model-00002-of-*.safetensors")))
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{}", "must name the file of each tensor in weight_map; got None", id="no-map"),
        pytest.param('{"weight_map": {"x": 3}}', "must name files in its folder; got 3 for the tensor x", id="number"),
        pytest.param('{"weight_map": {"x": "../a"}}', r"must name files in its folder; got '\.\./a'", id="outside"),
        pytest.param('{"weight_map": {"x": "/a"}}', "must name files in its folder; got '/a'", id="absolute"),
        pytest.param('{"weight_map": {"x": "."}}', "is missing; model.safetensors.index.json names it", id="folder"),
    ],
)
def test_a_wrong_index_is_named(content, message, checkpoint):
    folder = checkpoint("llama")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_integer_weights_are_named(checkpoint):
    path = checkpoint("llama") / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, path)
    with pytest.raises(ValueError, match=r"model.norm.weight must be float32, .*I8. Quantized checkpoints are"):
        load_pretrained(path.parent)


def test_a_tensor_that_is_stored_twice_is_named(checkpoint):
    """Both names are known, because the tensors of some checkpoints have no prefix."""
    path = checkpoint("gpt2") / "model.safetensors"
    save_file(load_file(path) | {"h.0.ln_1.weight": torch.zeros(32)}, path)
    with pytest.raises(ValueError, match=r"must be the only transformer.h.0.ln_1.weight; got two"):
        load_pretrained(path.parent)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"text_config": {"final_logit_softcapping": 30.0}},
            "text_config.final_logit_softcapping must be null, .*; got 30.0", id="soft-cap"),
        pytest.param({"quantization_config": {"bits": 4}}, 'not supported .* quantization_config={"bits": 4}',
            id="quantized"),
        pytest.param({"text_config": None}, "model_type=gemma3 must have its text_config; got None", id="no-text"),
    ],
)  # fmt: skip
def test_what_is_not_supported_in_a_model_with_images_is_named(fields, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {}} | fields))
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


def test_a_transposed_tensor_of_another_shape_is_named(checkpoint):
    path = checkpoint("gpt2") / "model.safetensors"
    save_file(load_file(path) | {"transformer.h.1.mlp.c_fc.weight": torch.ones(32, 96)}, path)
    with pytest.raises(
        ValueError, match=r"h.1.mlp.c_fc.weight must be \(32, 128\) according to config.json; got \(32, 96\)"
    ):
        load_pretrained(path.parent)


@pytest.mark.parametrize("module", ["self_attn.v_proj", "self_attn.o_proj", "input_layernorm"])
def test_only_norms_may_have_another_dtype(module, checkpoint):
    path = checkpoint("llama") / "model.safetensors"
    name = f"model.layers.1.{module}.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].bfloat16()}, path)
    if "norm" in name:
        assert load_pretrained(path.parent).blocks[1].attention_norm.weight.dtype == torch.bfloat16
        return
    with pytest.raises(ValueError, match=rf"{name} must be torch.float32 like .*; got torch.bfloat16. Set dtype"):
        load_pretrained(path.parent)
    load_pretrained(path.parent, dtype="float32")


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize(("name", "embedding"), [("llama-tied", "model.embed_tokens"), ("gpt2", "transformer.wte")])
def test_a_tied_head_must_equal_the_embedding(name, embedding, files, checkpoint):
    folder = checkpoint(name)
    tensors = load_file(folder / "model.safetensors")
    expected = load_pretrained(folder)
    message = r"safetensors: tensor lm_head.weight must equal the token embedding, .*; got another tensor. To keep it"
    for change, error in ((0.0, None), (0.1, message)):
        head = {"lm_head.weight": tensors[f"{embedding}.weight"].clone()}
        head["lm_head.weight"][-1, -1] += change
        write_files(folder, [head, tensors] if files == "several" else [head | tensors])
        if error is None:
            assert_same_weights(load_pretrained(folder), expected)
        else:
            with pytest.raises(ValueError, match=error):
                load_pretrained(folder)
    separate = load_pretrained(edit_config(folder, tie_word_embeddings=False))
    assert torch.equal(separate.head.weight, head["lm_head.weight"])


@pytest.mark.parametrize("of_head", [True, False], ids=["head", "embedding"])
def test_a_tied_head_may_be_a_rounded_copy(of_head, checkpoint):
    folder = checkpoint("llama-tied")
    tensors = load_file(folder / "model.safetensors")
    whole, rounded = tensors["model.embed_tokens.weight"], {name: x.bfloat16() for name, x in tensors.items()}
    head = {"lm_head.weight": whole.bfloat16() if of_head else whole.clone()}
    write_files(folder, [(tensors if of_head else rounded) | head])
    load_pretrained(folder)


def write_files(folder: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    """Replaces the weights of a checkpoint with one file, or with several files and an index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = [f"model-{i}.safetensors" for i in range(len(parts))] if len(parts) > 1 else ["model.safetensors"]
    for name, tensors in zip(names, parts, strict=True):
        save_file(tensors, folder / name, {"format": "pt"})
    if len(parts) > 1:
        index = {tensor: name for name, tensors in zip(names, parts, strict=True) for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_a_tied_head_must_have_the_shape_of_the_embedding(checkpoint):
    path = checkpoint("llama-tied") / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": torch.ones(64, 32)}, path)
    with pytest.raises(ValueError, match=r"lm_head.weight must be \(61, 32\) according to config.json; got \(64, 32\)"):
        load_pretrained(path.parent)


def test_folders_without_a_checkpoint_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"must hold config\.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_pretrained(tmp_path)
    folder = checkpoint("llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"found only pytorch_model.bin, which is not read"):
        load_pretrained(folder)
    with pytest.raises(
        ValueError, match="must be a folder with a checkpoint or a name on the Hugging Face hub; got a/b/c"
    ):
        load_pretrained("a/b/c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"vocab_size": 62}, "61 tokens, .*; got 62. Choose .* a copy .* from id 61 on", id="vocabulary"),
        pytest.param({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16; got int8", id="dtype"),
        pytest.param({"attention": "fast"}, "attention must be one of flash, sdpa, naive .* got fast", id="attention"),
        pytest.param({"rope_scaling": {"rope_type": "yarn"}}, "missing: factor", id="scaling"),
    ],
)  # fmt: skip
def test_impossible_choices_are_named(options, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load_pretrained(checkpoint("llama"), **options)


def test_choices_that_a_family_does_not_support_are_refused(checkpoint):
    with pytest.raises(ValueError, match=r"attention=sdpa cannot cap scores, and this model caps them at 0.4"):
        load_pretrained(checkpoint("gemma2"), attention="sdpa")
    with pytest.raises(ValueError, match=r"rope_scaling need a checkpoint with RoPE; got model_type=gpt2"):
        load_pretrained(checkpoint("gpt2"), rope_scaling={"rope_type": "linear", "factor": 2.0})
