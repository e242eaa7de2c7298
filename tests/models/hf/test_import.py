"""For each model family, transformers writes a tiny random checkpoint, and the tests import this checkpoint."""

import json
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fa_train.memory.loss import LinearCrossEntropy
from fa_train.memory.memory import Memory
from fa_train.models.attention import chunked_attention, flash_attention
from fa_train.models.hf import families, weights
from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from tests.models.hf.support.checkpoints import (
    FAMILIES,
    assert_relatively_close,
    assert_same_weights,
    cu_seqlens,
    edit_config,
    theirs,
    tokens,
    write_with_images,
)


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
def test_a_model_with_images_is_imported_without_them(tmp_path):
    """The config.json of a Gemma 3 model with images leaves out values that equal transformers' defaults."""
    write_with_images(tmp_path / "both")
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


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_sharded_files_hold_the_same_weights(name, checkpoint, tmp_path):
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


def test_weights_are_read_one_at_a_time(checkpoint, monkeypatch):
    living: list[weakref.ref[Tensor]] = []
    read = weights._read

    def read_one(file, stored, rows):
        assert not any(reference() is not None for reference in living), "a second tensor is in memory"
        tensor = read(file, stored, rows)
        living.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(weights, "_read", read_one)
    load_pretrained(checkpoint("llama"))
    assert len(living) == 3 * 9 + 3


def test_on_the_meta_device_no_weights_are_read(checkpoint):
    folder = checkpoint("llama-tied")
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = load_pretrained(folder)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.bfloat16), ("float32", torch.float32)], ids=str)
def test_an_import_and_an_export_choose_the_dtype(dtype, expected, checkpoint, tmp_path):
    folder = checkpoint("llama-tied", dtype=torch.bfloat16)
    model = load_pretrained(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.head.weight is model.token_embedding.weight
    save_pretrained(model, tmp_path / "exported", dtype="bfloat16")
    assert (tmp_path / "exported/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    save_pretrained(model, tmp_path / "as-is")
    assert json.loads((tmp_path / "as-is/config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


def test_older_names_of_tensors_are_read(checkpoint):
    """GPT-2 on the Hub omits the prefix `transformer.`, stores the attention mask, and has other fields in
    config.json.
    """
    folder = checkpoint("gpt2")
    expected = load_pretrained(folder)
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, n_ctx=64, task_specific_params={"text-generation": {"do_sample": True}}, torch_dtype="float32")
    assert_same_weights(load_pretrained(folder), expected)


def test_a_llama_config_before_transformers_5_is_read(checkpoint):
    """A Llama config before transformers 5 has rope_theta and rope_scaling instead of rope_parameters, and lacks newer
    fields.
    """
    folder = checkpoint("llama-3.1")
    expected = load_pretrained(folder, attention="naive")(tokens())
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    for name in ("head_dim", "mlp_bias", "attention_bias"):
        del config[name]
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_pretrained(folder, attention="naive")(tokens()), expected)


def test_a_gemma_3_config_before_transformers_5_is_read(checkpoint):
    """Before transformers 5, a Gemma 3 config had two RoPE thetas and `sliding_window_pattern`."""
    folder = checkpoint("gemma3-scaled")
    expected = load_pretrained(folder, attention="naive")(tokens())
    config = json.loads((folder / "config.json").read_text())
    for name in ("rope_parameters", "layer_types"):
        del config[name]
    scaling = {"rope_type": "linear", "factor": 8.0}
    config |= {"rope_theta": 1000.0, "rope_local_base_freq": 10.0, "rope_scaling": scaling, "sliding_window_pattern": 2}
    (folder / "config.json").write_text(json.dumps(config))
    assert torch.equal(load_pretrained(folder, attention="naive")(tokens()), expected)


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
def test_fields_of_published_checkpoints_are_kept(name, fields, checkpoint, tmp_path):
    """Configs on the Hub have fields that the classes of transformers lack."""
    folder = checkpoint(name)
    before = load_pretrained(folder, attention="naive")
    model = load_pretrained(edit_config(folder, **fields), attention="naive")
    assert torch.equal(model(torch.arange(9)), before(torch.arange(9)))
    save_pretrained(model, tmp_path / "exported")
    assert fields.items() <= json.loads((tmp_path / "exported" / "config.json").read_text()).items()


def test_every_field_that_transformers_writes_is_known(checkpoint):
    """A config field that is null counts as missing."""
    folder = edit_config(checkpoint("llama"), mlp_only_layers=None)
    load_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize(
    "attention", [flash_attention, partial(chunked_attention, chunk_size=8)], ids=["flash", "chunked"]
)
def test_losses_and_gradients_are_transformers(name, attention, checkpoint, device):
    """Tests the backward of soft caps, windows and the embedding's scale, with checkpointing and chunks."""
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
