"""Tests the context length of a checkpoint, with RoPE scalings and with texts longer than those in training."""

import json
from pathlib import Path

import pytest
import torch

from fa_train.models.hf.import_ import load_pretrained, save_pretrained
from fa_train.models.hf.rope import with_rope
from tests.models.hf.support.checkpoints import YARN, assert_relatively_close, cu_seqlens, edit_config, theirs, tokens
from tests.support.marks import slow


@torch.no_grad()
def test_dynamic_ntk_looks_at_each_document(checkpoint):
    folder = checkpoint("llama")
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    edit_config(folder, max_position_embeddings=16, rope_parameters=dynamic)
    stream = tokens()
    model = load_pretrained(folder, attention="naive")
    packed = model(stream, cu_seqlens())
    for start, end in ((0, 13), (13, 14), (14, 36)):  # one of the documents is longer than 16 tokens
        assert_relatively_close(packed[start:end], theirs(folder, stream[start:end]))


SCALINGS = [
    pytest.param({"rope_type": "linear", "factor": 2}, id="linear"),
    pytest.param({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}, id="yarn"),
    pytest.param({"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}, id="llama3"),
    pytest.param({"rope_type": "dynamic", "factor": 2.0}, id="dynamic"),
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("name", ["llama", *slow("llama-3.1", "gemma3", "legacy")])
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
    assert config["max_position_embeddings"] == model.config.max_seq_len == reach


def reached(folder: Path, tmp_path: Path, **options) -> dict:
    """Exports a checkpoint, compares its logits for a long text with those of transformers, and returns its config."""
    model = load_pretrained(folder, attention="naive", **options)
    save_pretrained(model, tmp_path / "reached")
    stream = torch.cat([tokens()] * 3)
    assert_relatively_close(model(stream), theirs(tmp_path / "reached", stream))
    config = json.loads((tmp_path / "reached/config.json").read_text())
    assert model.config.max_seq_len == config["max_position_embeddings"]
    return config


# All checkpoints in the test below support 64 tokens. In llama-3.1 and llama-linear, RoPE scaling extends the context
# from 32 to 64 tokens. Factors that are computed are at least the checkpoint's factor, which is 8 in llama-3.1.
@pytest.mark.parametrize(
    ("name", "options", "parameters", "reach"),
    [
        pytest.param("llama", {"rope_scaling": {"rope_type": None}},
                     {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 64}, 160, id="yarn"),
        pytest.param("llama-3.1", {"rope_scaling": {"rope_type": None}},
                     {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}, 256, id="own"),
        pytest.param("llama-3.1", {"rope_scaling": {"rope_type": "yarn"}},
                     {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}, 256, id="other"),
        pytest.param("llama-linear", {"rope_scaling": {"rope_type": None}},
                     {"rope_type": "linear", "factor": 5.0}, 160, id="own-linear"),
        pytest.param("llama-linear", {"rope_scaling": {"rope_type": "yarn"}},
                     {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": 32}, 160,
                     id="linear-to-yarn"),
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
    assert "attention_factor" not in written, "the attention factor belongs to the old scaling"


@torch.no_grad()
def test_a_factor_that_is_large_enough_is_kept(checkpoint, tmp_path):
    folder = edit_config(checkpoint("llama-yarn"), max_position_embeddings=16)
    edit_config(folder, rope_parameters=YARN | {"factor": 16.0, "attention_factor": 1.3})
    config = reached(folder, tmp_path, rope_scaling={"rope_type": None}, max_seq_len=160)
    written = config["rope_parameters"]
    assert (written["factor"], written["attention_factor"], config["max_position_embeddings"]) == (16.0, 1.3, 256)


def test_another_factor_drops_the_attention_factor(checkpoint):
    folder = edit_config(checkpoint("llama-yarn"), rope_parameters=YARN | {"attention_factor": 1.3})
    for factor, attention_factor in ((YARN["factor"], 1.3), (12.0, None)):
        rope = load_pretrained(folder, rope_scaling={"factor": factor}).origin.config["rope_parameters"]
        assert (rope["factor"], rope.get("attention_factor")) == (factor, attention_factor)


def test_linear_scaling_of_gemma_3_is_multiplied(checkpoint):
    model = load_pretrained(checkpoint("gemma3-scaled"), "naive", rope_scaling={"rope_type": None}, max_seq_len=128)
    rope = model.origin.config["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 16.0, "rope_theta": 1000.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10.0}
    assert model.config.max_seq_len == 128


# transformers prefers these fields to the fields in rope_parameters
PREFERRED = {"original_max_position_embeddings": 32, "rope_scaling": YARN}


@pytest.mark.parametrize("field", PREFERRED)
@torch.no_grad()
def test_fields_outside_rope_parameters_are_read_and_replaced(field, checkpoint, tmp_path):
    folder = edit_config(checkpoint("llama-yarn"), rope_parameters=YARN | {"factor": 2.0})
    edit_config(folder, **{field: PREFERRED[field]})
    stream = torch.cat([tokens()] * 3)
    assert_relatively_close(load_pretrained(folder, attention="naive")(stream), theirs(folder, stream))
    written = reached(folder, tmp_path, rope_scaling={"rope_type": None}, max_seq_len=160, rope_theta=9000.0)
    original = 32 if field == "original_max_position_embeddings" else 16
    rope = written["rope_parameters"]
    assert (rope["factor"], rope["original_max_position_embeddings"], rope["rope_theta"]) == (
        160 / original,
        original,
        9000.0,
    )
    assert field not in written


def test_the_given_config_is_not_changed(checkpoint):
    folder = edit_config(checkpoint("llama-yarn"), original_max_position_embeddings=32, rope_scaling=YARN)
    text = (folder / "config.json").read_text()
    config = json.loads(text)
    assert with_rope(config, folder / "config.json", None, 9000.0, None) != config == json.loads(text)


def test_a_llama_before_transformers_5_can_get_another_base_and_length(checkpoint, tmp_path):
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
        pytest.param("llama", {}, "max_seq_len=160 is more than the 64 tokens that .* supports", id="nothing"),
        pytest.param("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "more than the 128", id="factor"),
        pytest.param("llama", {"rope_scaling": {"rope_type": "default"}}, "more than the 64 tokens", id="removed"),
        pytest.param("llama", {"rope_theta": -1.0}, "rope_theta must be at least 1; got -1.0", id="theta"),
        pytest.param("gpt2", {}, "rope_scaling need a checkpoint with RoPE; got model_type=gpt2", id="learned"),
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
