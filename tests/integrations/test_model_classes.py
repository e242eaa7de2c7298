"""Tests that transformers refuses fa_train for exactly those model classes that do not support flash attention."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from fa_train.integrations import transformers as fa
from fa_train.integrations.model_classes import WINDOW_ONLY_IN_MASK
from tests.integrations.support.models import DECODER, tiny, tokens

HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2}
BLOOM = {"vocab_size": 61, "hidden_size": 16, "n_layer": 1, "n_head": 2}
VISION = HEADS | {"hidden_size": 16, "intermediate_size": 24, "image_size": 8, "patch_size": 4}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    fa.register()


def gemma3(**attention: Any) -> Any:
    config = transformers.Gemma3Config(
        text_config=DECODER | {"head_dim": 8, "layer_types": ["sliding_attention"]}, vision_config=VISION, **attention
    )
    return transformers.Gemma3ForConditionalGeneration._from_config(config).eval()


def paligemma(attention: Any) -> Any:
    text, vision = {"model_type": "gemma", "head_dim": 8}, {"model_type": "siglip_vision_model"}
    config = transformers.PaliGemmaConfig(text_config=DECODER | text, vision_config=VISION | vision, projection_dim=16)
    return transformers.PaliGemmaForConditionalGeneration._from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("name", ["Bloom", "Splinter"])  # Bloom has its own attention; Splinter's lacks is_causal
def test_a_class_without_flash_attention_is_refused_however_it_is_loaded(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(**(BLOOM if name == "Bloom" else DECODER))
    model = transformers.AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    message = f'"fa_train" must be used with a model class .*; got {name}Model'
    with pytest.raises(ValueError, match=message):
        transformers.AutoModel.from_config(copy.deepcopy(config), attn_implementation=fa.NAME)
    with pytest.raises(ValueError, match=message):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation=fa.NAME)
    if name == "Splinter":  # set_attn_implementation changes nothing if a class has its own attention
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation(fa.NAME)
    assert model.config._attn_implementation != fa.NAME


def test_a_sub_model_that_supports_fa_train_can_use_it_alone():
    if not transformers.PaliGemmaPreTrainedModel._supports_flash_attn:  # transformers 5.17 declares support
        with pytest.raises(ValueError, match="got PaliGemma"):
            paligemma(fa.NAME)
    model = paligemma({"": "eager", "text_config": fa.NAME, "vision_config": "eager"})
    assert model.model.language_model.config._attn_implementation == fa.NAME
    ids = tokens(1, 6)
    other = ids.clone()
    other[0, -1] = 64 - other[0, -1]
    with torch.no_grad():
        ours = model(ids).logits
        torch.testing.assert_close(model(other).logits[:, :-1], ours[:, :-1])  # earlier logits ignore the last token
        model.set_attn_implementation("eager")
        torch.testing.assert_close(ours, model(ids).logits)


def test_classes_that_only_refuse_images_or_long_chunks_are_supported():
    model, ids = gemma3(), tokens(1, 6)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(ids).logits
        model.set_attn_implementation(fa.NAME)
        torch.testing.assert_close(model(ids).logits, expected)
        with pytest.raises(ValueError, match="for text, omit token_type_ids"):
            model(ids, token_type_ids=torch.zeros_like(ids))
        with pytest.raises(ValueError, match="no bidirectional blocks"):
            model(ids, token_type_ids=torch.ones_like(ids))
    llama4 = transformers.Llama4TextConfig(**DECODER, head_dim=8, num_local_experts=2, intermediate_size_mlp=24)
    assert transformers.Llama4ForCausalLM._from_config(llama4, attn_implementation=fa.NAME)


def test_a_user_s_class_is_supported_if_it_declares_flash_attention():
    class Declares(transformers.LlamaForCausalLM):
        pass

    class OldFlag(modeling_llama.LlamaPreTrainedModel):
        _supports_flash_attn = False
        _supports_flash_attn_2 = True

    class Lacks(transformers.LlamaForCausalLM):
        _supports_flash_attn = False

    config = tiny("llama-three-to-one").config
    for model_class in (Declares, OldFlag):
        assert model_class._from_config(config, attn_implementation=fa.NAME)
    with pytest.raises(ValueError, match=r"got Lacks, whose attribute _supports_flash_attn is not True"):
        Lacks._from_config(config, attn_implementation=fa.NAME)


def test_registering_twice_adds_one_check():
    check = transformers.PreTrainedModel.get_correct_attn_implementation
    fa.register()
    assert transformers.PreTrainedModel.get_correct_attn_implementation is check


@pytest.mark.parametrize("name", ["Qwen2Moe", "Phimoe", "SmolLM3"])
def test_a_window_that_layers_do_not_pass_on_is_refused(name):
    def build(window: int | None) -> Any:
        fields = DECODER | {"max_position_embeddings": 9, "sliding_window": window, "num_experts": 2}
        if name == "SmolLM3":
            fields |= {"use_sliding_window": False, "layer_types": ["sliding_attention"]}
        if name == "Qwen2Moe":
            fields |= {"use_sliding_window": window is not None, "max_window_layers": 0}
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{name}Config")(**fields), attn_implementation=fa.NAME
        )

    with pytest.raises(
        ValueError, match=rf"sliding_window of {name}ForCausalLM must be None, or at least .*=9, .*got 5"
    ):
        build(5)
    for window in (9, None):
        assert build(window).config._attn_implementation == fa.NAME


def test_all_classes_that_do_not_pass_windows_on_are_known():
    """Looks for model files that build masks with windows, but never pass a window to the attention function."""
    masks = re.compile(r"create_(bidirectional_)?sliding_window(_causal)?_mask")
    found = set()
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        calls_attention = "_supports_flash_attn = True" in text and "attention_interface(" in text
        if calls_attention and masks.search(text) and "sliding_window=" not in text:
            found |= set(re.findall(r"^class (\w+PreTrainedModel)\(", text, re.MULTILINE))
    assert found == WINDOW_ONLY_IN_MASK
