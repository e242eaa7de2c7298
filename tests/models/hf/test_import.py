"""Import and export of Hugging Face checkpoints: tiny random ones of every family, as transformers writes them."""

import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import chunked_attention, flash_attention, naive_attention
from fa_train.models.gpt import Family
from fa_train.models.hf import families, weights
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from tests.models.test_gpt import build

VOCAB = 61
LENGTHS = [13, 1, 0, 22]
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA_LIKE = LLAMA_LIKE | {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2 = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-wide-untied": ("GPT2", GPT2 | {"n_inner": 40, "tie_word_embeddings": False}),
    "llama": ("Llama", LLAMA_LIKE),
    "llama-biased-own-head": ("Llama", LLAMA_LIKE | {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-tied": ("Llama", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "llama-3.1": ("Llama", LLAMA_LIKE | {"rope_parameters": LLAMA3_SCALING}),
    "llama-linear": (
        "Llama",
        LLAMA_LIKE | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}},
    ),
    "llama-yarn": ("Llama", LLAMA_LIKE | {"rope_parameters": YARN}),
    "arcee-gelu": ("Arcee", LLAMA_LIKE | {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("Mistral", LLAMA_LIKE | {"sliding_window": 5}),
    "mistral-no-window": ("Mistral", LLAMA_LIKE | {"sliding_window": None}),
    "qwen2": ("Qwen2", LLAMA_LIKE),
    "qwen2-windows": ("Qwen2", LLAMA_LIKE | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", LLAMA_LIKE | {"head_dim": 16}),
    "smollm3": ("SmolLM3", LLAMA_LIKE | {"no_rope_layers": [1, 0, 1]}),
    "smollm3-windows": (
        "SmolLM3",
        LLAMA_LIKE | {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 4},
    ),
    "gemma2": ("Gemma2", GEMMA_LIKE | {"attn_logit_softcapping": 0.4, "final_logit_softcapping": 0.3}),
    "gemma3": ("Gemma3Text", GEMMA_LIKE | {"final_logit_softcapping": 0.5, "layer_types": ALTERNATING}),
    "gemma3-scaled": (
        "Gemma3Text",
        GEMMA_LIKE
        | {
            "layer_types": ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            },
        },
    ),
}
ARCHITECTURES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
FAMILIES = [pytest.param(name, id=name) for name in CHECKPOINTS]


@pytest.fixture
def checkpoint(tmp_path: Path):
    """Writes the named checkpoint with every weight random, norms and biases too, and returns its folder."""

    def write(name: str, **options) -> Path:
        family, fields = CHECKPOINTS[name]
        config = getattr(transformers, f"{family}Config")(**fields)
        torch.manual_seed(0)
        model = getattr(transformers, ARCHITECTURES.get(family, f"{family}ForCausalLM"))(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        folder = tmp_path / name
        model.to(options.pop("dtype", torch.float32)).save_pretrained(folder, **options)
        return folder

    return write


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def cu_seqlens() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


@torch.no_grad()
def theirs(folder: Path, stream: Tensor) -> Tensor:
    """transformers' logits of one document; eager is its only attention with soft caps."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()(stream[None]).logits[0]


def assert_relatively_close(ours: Tensor, exact: Tensor, relative: float = 1e-4) -> None:
    error = ((ours - exact).abs().max() / exact.abs().max()).item()
    assert error <= relative, f"max difference {error:.1e} of the largest logit, allowed {relative:.0e}"


def edit_config(folder: Path, **fields) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_are_transformers(name, checkpoint):
    folder, stream = checkpoint(name), tokens()
    model = load_pretrained(folder, attention="naive")
    assert_relatively_close(model(stream), theirs(folder, stream))
    packed = model(stream, cu_seqlens())
    for start, end in ((0, 13), (13, 14), (14, 36)):
        assert_relatively_close(packed[start:end], theirs(folder, stream[start:end]))


@torch.no_grad()
def test_the_text_of_a_model_with_images(tmp_path):
    """Gemma 3 from 4B on; its config.json leaves out what transformers has as a default."""
    images = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(
        text_config=GEMMA_LIKE | {"layer_types": ALTERNATING},
        vision_config=images | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "both")
    text = json.loads((tmp_path / "both" / "config.json").read_text())["text_config"]
    del text["attention_bias"], text["final_logit_softcapping"], text["tie_word_embeddings"], text["hidden_activation"]
    folder, stream = edit_config(tmp_path / "both", text_config=text), tokens()
    with_images = transformers.Gemma3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    exact = with_images.eval()(stream[None]).logits[0]
    model = load_pretrained(folder, attention="naive")
    assert_relatively_close(model(stream), exact)
    save_pretrained(model, tmp_path / "text")
    assert_relatively_close(theirs(tmp_path / "text", stream), exact, 1e-6)
    weights = load_file(folder / "model.safetensors")
    newer = {
        f"model.{name}".replace("model.language_model.model.", "model.language_model."): w
        for name, w in weights.items()
    }
    save_file(newer, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_pretrained(folder, attention="naive")(stream), model(stream))
    with pytest.raises(ValueError, match="model_type=gemma3 must have its text_config; got None"):
        load_pretrained(edit_config(folder, text_config=None))


@pytest.mark.parametrize("name", FAMILIES)
def test_import_and_export_is_bit_identical(name, checkpoint, tmp_path):
    folder, exported = checkpoint(name, dtype=torch.bfloat16), tmp_path / "exported"
    save_pretrained(load_pretrained(folder, attention="naive"), exported)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert json_or_bytes(exported / file) == json_or_bytes(folder / file), file
    stream = tokens()
    assert torch.equal(theirs(exported, stream), theirs(folder, stream))


def json_or_bytes(path: Path) -> object:
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_trained_weights_are_exported(name, checkpoint, tmp_path):
    model = load_pretrained(checkpoint(name), attention="naive")
    stream = tokens()
    model(stream, cu_seqlens(), labels=stream.roll(-1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)
        save_pretrained(model, tmp_path / "exported")
        assert_relatively_close(model(stream), theirs(tmp_path / "exported", stream))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_shards(name, checkpoint, tmp_path, monkeypatch):
    whole, sharded = load_pretrained(checkpoint(name)), checkpoint(name, max_shard_size="20kB")
    (sharded / "model.safetensors").unlink()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    model = load_pretrained(sharded)
    assert_same_weights(model, whole)
    save_pretrained(model, tmp_path / "exported", shard_bytes=20_000)
    files = sorted((tmp_path / "exported").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    assert_same_weights(load_pretrained(tmp_path / "exported"), whole)
    assert torch.equal(theirs(tmp_path / "exported", tokens()), theirs(sharded, tokens()))


def assert_same_weights(ours, expected) -> None:
    for (name, a), b in zip(ours.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_weights_are_read_one_at_a_time(checkpoint, monkeypatch):
    """When a tensor is read, the one before it is gone."""
    living: list[weakref.ref[Tensor]] = []
    read = weights._put

    def put(model, place, tensor, dtype, what):
        assert sum(reference() is not None for reference in living) <= 1, "a second tensor is held"
        living.append(weakref.ref(tensor))
        read(model, place, tensor, dtype, what)

    monkeypatch.setattr(weights, "_put", put)
    load_pretrained(checkpoint("llama"))
    assert len(living) == 3 * 9 + 3


def test_on_the_meta_device_no_weights_are_read(checkpoint):
    folder = checkpoint("llama-tied")
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = load_pretrained(folder)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)], ids=str)
def test_dtype(dtype, expected, checkpoint, tmp_path):
    folder = checkpoint("llama-tied", dtype=torch.bfloat16)
    model = load_pretrained(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.head.weight is model.token_embedding.weight
    save_pretrained(model, tmp_path / "exported", dtype="bfloat16")
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    save_pretrained(model, tmp_path / "as-is")
    assert json.loads((tmp_path / "as-is/config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


def test_tensors_as_older_checkpoints_name_them(checkpoint):
    """GPT-2's own on the hub leaves `transformer.` out and holds the mask; its config.json has other fields."""
    folder = checkpoint("gpt2")
    expected = load_pretrained(folder)
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, n_ctx=64, task_specific_params={"text-generation": {"do_sample": True}}, torch_dtype="float32")
    assert_same_weights(load_pretrained(folder), expected)


def test_config_of_a_llama_before_transformers_5(checkpoint):
    """rope_theta and rope_scaling instead of rope_parameters, and fields that did not exist yet left out."""
    folder = checkpoint("llama-3.1")
    expected = load_pretrained(folder, attention="naive")(tokens())
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    for name in ("head_dim", "mlp_bias", "attention_bias"):
        del config[name]
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_pretrained(folder, attention="naive")(tokens()), expected)


def test_config_of_a_gemma_3_before_transformers_5(checkpoint):
    """Two thetas and an interval of global layers instead of dictionaries by kind of layer."""
    folder = checkpoint("gemma3-scaled")
    expected = load_pretrained(folder, attention="naive")(tokens())
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "layer_types"):
        del config[name]
    scaling = {"rope_type": "linear", "factor": 8.0}
    config |= {"rope_theta": 1000.0, "rope_local_base_freq": 10.0, "rope_scaling": scaling, "sliding_window_pattern": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_pretrained(folder, attention="naive")(tokens()), expected)


@torch.no_grad()
def test_dynamic_ntk_looks_at_each_document(checkpoint):
    folder = checkpoint("llama")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    edit_config(folder, max_position_embeddings=16, rope_parameters=dynamic)
    stream = tokens()
    model = load_pretrained(folder, attention="naive")
    packed = model(stream, cu_seqlens())
    for start, end in ((0, 13), (13, 14), (14, 36)):  # one document is longer than 16 tokens
        assert_relatively_close(packed[start:end], theirs(folder, stream[start:end]))


SCALINGS = [
    pytest.param({"rope_type": "linear", "factor": 2}, id="linear"),
    pytest.param({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}, id="yarn"),
    pytest.param({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}, id="llama3"),
    pytest.param({"rope_type": "dynamic", "factor": 2.0}, id="dynamic"),
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ["llama", "llama-3.1", "gemma3", "legacy"])
@torch.no_grad()
def test_another_scaling_is_exported(name, scaling, checkpoint, tmp_path):
    folder = checkpoint("llama" if name == "legacy" else name)
    if name == "legacy":
        config = json.loads((folder / "config.json").read_text())
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        (folder / "config.json").write_text(json.dumps(config))
    own = load_pretrained(folder, attention="naive")
    model = load_pretrained(folder, attention="naive", rope_scaling=scaling)
    save_pretrained(model, tmp_path / "exported")
    stream = torch.cat([tokens(), tokens()])
    assert_relatively_close(model(stream), theirs(tmp_path / "exported", stream))
    assert not torch.allclose(model(stream), own(stream))
    trained = scaling.get("original_max_position_embeddings", 32 if name == "llama-3.1" else 64)
    reach = trained if scaling["rope_type"] == "dynamic" else trained * scaling["factor"]
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["max_position_embeddings"] == model.max_seq_len == reach


def reached(folder: Path, tmp_path: Path, **options) -> dict:
    """config.json of the checkpoint with these options, whose logits beyond its own length are transformers'."""
    model = load_pretrained(folder, attention="naive", **options)
    save_pretrained(model, tmp_path / "reached")
    stream = torch.cat([tokens()] * 3)
    assert_relatively_close(model(stream), theirs(tmp_path / "reached", stream))
    config = json.loads((tmp_path / "reached/config.json").read_text())
    assert model.max_seq_len == config["max_position_embeddings"]
    return config


# of 64 tokens: llama without a scaling; llama-3.1 says 32 of them were trained
@pytest.mark.parametrize(
    ("name", "options", "parameters", "reach"),
    [
        pytest.param("llama", {"rope_scaling": {"rope_type": None}},
                     {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}, 160, id="yarn"),
        pytest.param("llama-3.1", {"rope_scaling": {"rope_type": None}},
                     {"rope_type": "llama3", "factor": 5.0, "original_max_position_embeddings": 32}, 160, id="own"),
        pytest.param("llama-3.1", {"rope_scaling": {"rope_type": "yarn"}},
                     {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": 32}, 160, id="other"),
        pytest.param("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4}},
                     {"rope_type": "linear", "factor": 4}, 256, id="more-than-needed"),
        pytest.param("llama", {"rope_scaling": {"rope_type": "dynamic"}},
                     {"rope_type": "dynamic", "factor": 2.5}, 64, id="dynamic"),
        pytest.param("llama", {"rope_theta": 9000.0}, {"rope_type": "default", "rope_theta": 9000.0}, 160, id="theta"),
        pytest.param("llama-3.1", {"rope_theta": 9000.0},
                     {"rope_type": "llama3", "rope_theta": 9000.0, "original_max_position_embeddings": 32}, 160,
                     id="theta-below-a-scaling"),
    ],
)  # fmt: skip
@torch.no_grad()
def test_a_checkpoint_is_taken_to_a_length(name, options, parameters, reach, checkpoint, tmp_path):
    config = reached(checkpoint(name), tmp_path, max_seq_len=160, **options)
    assert parameters.items() <= config["rope_parameters"].items()
    assert config["max_position_embeddings"] == reach


@pytest.mark.parametrize("name", ["llama", "llama-3.1", "gemma3"])
def test_a_checkpoint_that_reaches_as_far_is_kept(name, checkpoint):
    folder = checkpoint(name)
    own = json.loads((folder / "config.json").read_text())
    assert load_pretrained(folder, rope_scaling={"rope_type": None}, max_seq_len=64).origin.config == own
    assert load_pretrained(folder, max_seq_len=64).origin.config == own


@torch.no_grad()
def test_the_checkpoints_own_scaling_goes_further(checkpoint, tmp_path):
    folder = edit_config(checkpoint("llama-yarn"), rope_parameters=YARN | {"beta_fast": 8.0, "attention_factor": 1.3})
    written = reached(folder, tmp_path, rope_scaling={"rope_type": None}, max_seq_len=160)["rope_parameters"]
    assert (written["factor"], written["original_max_position_embeddings"], written["beta_fast"]) == (10.0, 16, 8.0)
    assert "attention_factor" not in written, "it was the old factor's"


def test_base_and_length_of_a_llama_before_transformers_5(checkpoint, tmp_path):
    folder = checkpoint("llama")
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        written = reached(folder, tmp_path, rope_theta=9000.0, max_seq_len=160)
    assert (written["rope_theta"], written["rope_scaling"], written["max_position_embeddings"]) == (9000.0, None, 160)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        pytest.param("llama", {}, "max_seq_len=160 is more than the 64 tokens that .* reaches: choose", id="nothing"),
        pytest.param("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "more than the 128", id="factor"),
        pytest.param("llama", {"rope_scaling": {"rope_type": "default"}}, "more than the 64 tokens", id="removed"),
        pytest.param("llama", {"rope_theta": -1.0}, "rope_theta must be at least 1; got -1.0", id="theta"),
        pytest.param("gpt2", {}, "rope_scaling needs a checkpoint with RoPE; got model_type=gpt2", id="learned"),
    ],
)
def test_a_length_out_of_reach_is_named(name, options, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load_pretrained(checkpoint(name), max_seq_len=160, **options)


@torch.no_grad()
def test_the_checkpoints_scaling_can_be_removed(checkpoint):
    scaled, plain = checkpoint("llama-3.1"), checkpoint("llama")
    edit_config(plain, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ours = load_pretrained(scaled, attention="naive", rope_scaling={"rope_type": "default"})(tokens())
    torch.testing.assert_close(ours, load_pretrained(plain, attention="naive")(tokens()))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        pytest.param("llama", {"num_experts": 8}, r"not supported for model_type=llama: num_experts=8", id="unknown"),
        pytest.param("llama", {"quantization_config": {"bits": 4}}, "quantization_config=", id="quantized"),
        pytest.param("mistral", {"layer_types": ["full_attention"] * 3}, "model_type=mistral: layer_types", id="other"),
        pytest.param("llama", {"model_type": "mixtral"}, "model_type must be one of gpt2, .*; got mixtral", id="model"),
        pytest.param("llama", {"architectures": ["LlamaModel"]}, "architectures must name LlamaFor", id="head"),
        pytest.param("llama", {"hidden_act": "relu"}, 'hidden_act must be "silu"; got "relu"', id="activation"),
        pytest.param("gpt2", {"activation_function": "gelu"}, 'must be "gelu_pytorch_tanh" or .* got "gelu"', id="erf"),
        pytest.param("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx must be false", id="scale"),
        pytest.param("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping must be null", id="soft-cap"),
        pytest.param("gemma3", {"sliding_window": None}, "sliding_window must be a number of tokens", id="no-window"),
        pytest.param("gemma2", {"sliding_window_size": 9}, "sliding_window_size must be sliding_window=.*; got 9",
            id="two-windows"),
        pytest.param("qwen2", {"use_mrope": True}, "use_mrope must be false or null; got true", id="mrope"),
        pytest.param("gpt2", {"n_special": 3}, "n_special must be 0; got 3", id="more-tokens"),
        pytest.param("gemma2", {"use_bidirectional_attention": True}, "bidirectional_attention must be", id="two-way"),
        pytest.param("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "short_factor": [1.0],
            "long_factor": [1.0], "factor": 1.0, "original_max_position_embeddings": 8}},
            "rope_type must be one of default, linear, dynamic, yarn, llama3; got longrope", id="rope-type"),
        pytest.param("llama", {"rope_parameters": YARN | {"beta_medium": 3}}, "unknown: beta_medium", id="rope-field"),
        pytest.param("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0; got 0.5", id="part"),
        pytest.param("llama", {"num_hidden_layers": "three"}, "num_hidden_layers", id="type"),
        pytest.param("llama", {"num_attention_heads": 5}, "multiple of the number of attention heads", id="heads"),
        pytest.param("llama", {"intermediate_size": 40},
            r"layers.0.mlp.down_proj.weight must be \(32, 40\) by config.json; got \(32, 48\)", id="shape"),
        pytest.param("llama", {"attention_bias": True}, r"tensors are missing, .*proj.bias", id="missing-tensor"),
        pytest.param("llama", {"num_hidden_layers": 2}, r"layers\.2\.\S+ has no place in this", id="extra-tensor"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_named(name, fields, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load_pretrained(edit_config(checkpoint(name), **fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        pytest.param("gpt2", {"n_special": 0, "predict_special_tokens": True, "output_past": True}, id="gpt2-xl"),
        pytest.param("gpt2", {"_num_labels": 1, "id2label": {"0": "LABEL_0"}}, id="distilgpt2"),
        pytest.param("llama", {"max_sequence_length": 2048, "pad_token_id": -1}, id="llama-1"),
        pytest.param("qwen2", {"use_mrope": False}, id="qwen2.5-base"),
        pytest.param("gemma2", {"sliding_window_size": 7, "cache_implementation": "hybrid"}, id="gemma-2-9b"),
    ],
)
def test_fields_of_published_checkpoints(name, fields, checkpoint, tmp_path):
    """What the hub's config.json say beside what transformers' classes know; an export says it again."""
    folder = checkpoint(name)
    before = load_pretrained(folder, attention="naive")
    model = load_pretrained(edit_config(folder, **fields), attention="naive")
    assert torch.equal(model(torch.arange(9)), before(torch.arange(9)))
    save_pretrained(model, tmp_path / "exported")
    assert fields.items() <= json.loads((tmp_path / "exported" / "config.json").read_text()).items()


def test_every_field_that_transformers_writes_is_known(checkpoint):
    """A field of null is one that is not there."""
    folder = edit_config(checkpoint("llama"), mlp_only_layers=None)
    load_pretrained(folder)


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


def test_integer_weights_are_named(checkpoint):
    path = checkpoint("llama") / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}, path)
    with pytest.raises(ValueError, match=r"model.norm.weight must be of float32, .*int8: it is quantized"):
        load_pretrained(path.parent)


def test_a_transposed_tensor_of_another_shape_is_named(checkpoint):
    path = checkpoint("gpt2") / "model.safetensors"
    save_file(load_file(path) | {"transformer.h.1.mlp.c_fc.weight": torch.ones(32, 96)}, path)
    with pytest.raises(ValueError, match=r"h.1.mlp.c_fc.weight must be \(32, 128\) by config.json; got \(32, 96\)"):
        load_pretrained(path.parent)


def test_parts_of_one_matrix_must_be_of_one_dtype(checkpoint):
    path = checkpoint("llama") / "model.safetensors"
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].bfloat16()}, path)
    with pytest.raises(ValueError, match=r"v_proj.weight must be torch.float32, .* choose a dtype; got torch.bfloat16"):
        load_pretrained(path.parent)
    load_pretrained(path.parent, dtype="float32")


def test_folders_without_a_checkpoint(checkpoint, tmp_path):
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
        pytest.param({"vocab_size": 62}, "tokenizer has 62 tokens, .* only 61. Choose data.tok", id="vocabulary"),
        pytest.param({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16; got int8", id="dtype"),
        pytest.param({"attention": "fast"}, "attention must be one of flash, sdpa, naive .* got fast", id="attention"),
        pytest.param({"rope_scaling": {"rope_type": "yarn"}}, "missing: factor", id="scaling"),
    ],
)  # fmt: skip
def test_impossible_choices(options, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load_pretrained(checkpoint("llama"), **options)


def test_choices_that_a_family_cannot_do(checkpoint):
    with pytest.raises(ValueError, match=r"attention=sdpa cannot cap scores, and this model caps them at 0.4"):
        load_pretrained(checkpoint("gemma2"), attention="sdpa")
    with pytest.raises(ValueError, match=r"rope_scaling needs a checkpoint with RoPE; got model_type=gpt2"):
        load_pretrained(checkpoint("gpt2"), rope_scaling={"rope_type": "linear", "factor": 2.0})


def test_an_export_does_not_mix_with_another(checkpoint):
    folder = checkpoint("llama")
    with pytest.raises(ValueError, match="folder must be new or without a model"):
        save_pretrained(load_pretrained(folder), folder)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize(
    "attention", [flash_attention, partial(chunked_attention, chunk_size=8)], ids=["flash", "chunked"]
)
def test_losses_and_gradients_are_transformers(name, attention, checkpoint, device):
    """Soft caps, windows and the embedding's scale in the backward, by way of every lever of memory."""
    folder, stream = checkpoint(name), tokens().to(device)
    loss = LinearCrossEntropy(chunk_size=10, z_loss=0.1, label_smoothing=0.2)
    memory = Memory("full", offload=False, mlp_chunk=5, loss=loss)
    model = load_pretrained(folder, attention, memory=memory).to(device)
    ours = model(stream[:30], labels=stream[1:31])
    ours.backward()
    exact_model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(device)
    logits = exact_model(stream[None, :30]).logits[0]
    exact = F.cross_entropy(logits, stream[1:31], reduction="sum", label_smoothing=0.2)
    exact = exact + 0.1 * logits.logsumexp(-1).square().sum()
    exact.backward()
    torch.testing.assert_close(ours, exact)
    for name, place in weights.places_of(model, families.GEMMA_LAYOUT).items():
        gradient = model.get_parameter(place.parameter).grad[place.rows]
        torch.testing.assert_close(gradient, exact_model.get_parameter(name).grad, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_an_ignored_label_has_no_capped_loss(checkpoint):
    model, stream = load_pretrained(checkpoint("gemma2"), "naive", loss=LinearCrossEntropy(8, z_loss=0.1)), tokens()
    labels = stream.roll(-1)
    labels[4:] = -100
    torch.testing.assert_close(model(stream, labels=labels), model(stream[:4], labels=labels[:4]))


NATIVE: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biased-tied": {"bias": True, "tied": True, "n_kv_heads": None},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "arcee": {"activation": "gelu"},
    "llama-yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_seq_len": 32},
    "gpt2": {"norm": "layernorm", "positions": "learned", "activation": "gelu", "bias": True, "n_kv_heads": None},
}


@pytest.mark.parametrize("name", NATIVE)
@torch.no_grad()
def test_own_models_are_exported(name, tmp_path):
    model = build(**{"attention": naive_attention, "tied": False} | NATIVE[name])
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == name.partition("-")[0]
    stream = tokens() % 40
    assert_relatively_close(model(stream), theirs(tmp_path, stream))
    again = load_pretrained(tmp_path, attention="naive")
    assert_same_weights(again, model)
    assert torch.equal(again(stream, cu_seqlens()), model(stream, cu_seqlens()))


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"norm": "layernorm"}, id="layernorm-and-rope"),
        pytest.param({"positions": "none"}, id="no-positions"),
        pytest.param({"qk_norm": True, "activation": "gelu"}, id="qk-norm-and-gelu"),
        pytest.param({"family": Family(windows=(4, None))}, id="windows"),
        pytest.param({"family": Family(softmax_scale=0.5)}, id="scale"),
    ],
)
def test_a_model_of_no_family_is_not_exported(arguments, tmp_path):
    with pytest.raises(ValueError, match="no family of Hugging Face checkpoints is such a model"):
        save_pretrained(build(**arguments), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_the_tokenizer_is_exported(tmp_path):
    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "one": 3, "two": 4}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), bos_token="<s>", eos_token="</s>"
    )
    save_pretrained(build(), tmp_path, tokenizer)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)("two").input_ids == [4]
    for file in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / file).read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (0, 1), file
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 1
