"""The configs in conf/model, conf/attention and conf/memory compose and instantiate, and models have the published
sizes.
"""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from fa_train.models.gpt import GPT
from fa_train.models.hf.import_ import save_pretrained
from fa_train.models.rope import Rope, YarnScaling

CONF = Path(__file__).parents[2] / "conf"
PUBLISHED_GPT2 = ["model.norm=layernorm", "model.positions=learned", "model.max_seq_len=1024", "model.bias=true"]


def build(model: str, attention: str = "sdpa", overrides: tuple[str, ...] = ()) -> GPT:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+model={model}", f"+attention={attention}", "+memory=default", *overrides])
    vocabulary = {} if config.model.vocab_size else {"vocab_size": 50257}
    return instantiate(config.model, **vocabulary)


def groups(folder: str) -> list[str]:
    return sorted(path.stem for path in (CONF / folder).glob("[!_]*.yaml"))


@pytest.mark.parametrize(
    ("name", "overrides", "parameters"),
    [
        pytest.param("gpt2", PUBLISHED_GPT2, 124_439_808, id="gpt2"),
        pytest.param("gpt2_medium", PUBLISHED_GPT2, 354_823_168, id="gpt2-medium"),
        pytest.param("gpt2_xl", PUBLISHED_GPT2, 1_557_611_200, id="gpt2-xl"),
        pytest.param("llama_1b", [], 1_235_814_400, id="llama-3.2-1b"),
        pytest.param("llama_8b", [], 8_030_261_248, id="llama-3-8b"),
    ],
)
def test_parameters_are_the_published_number(name, overrides, parameters):
    with torch.device("meta"):
        model = build(name, overrides=tuple(overrides))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", [name for name in groups("model") if name != "pretrained"])
def test_every_model_composes_and_instantiates(name):
    with torch.device("meta"):
        assert build(name).config.n_layers >= 1


def test_a_pretrained_model_composes_and_instantiates(tmp_path):
    save_pretrained(build("nano", overrides=("model.vocab_size=300",)), tmp_path)
    scaling = "model.rope_scaling={rope_type: yarn, factor: 4, original_max_position_embeddings: 128}"
    model = build("pretrained", overrides=(f"model.pretrained={tmp_path}", "model.vocab_size=259", scaling))
    assert model.config.vocab_size == 300 and model.config.max_seq_len == 512
    assert model.ropes == [Rope(10000.0, YarnScaling(factor=4, original_max_position_embeddings=128))] * 4
    own = build("pretrained", overrides=(f"model.pretrained={tmp_path}", "model.vocab_size=259"))
    assert own.ropes == [Rope(10000.0, None)] * 4


def test_an_own_model_may_have_rope_scaling():
    overrides = ("model.vocab_size=259", "model.max_seq_len=512", "model.rope_scaling={rope_type: yarn, factor: 8}")
    assert build("nano", overrides=overrides).ropes[0].scaling == YarnScaling(8, 512)


@pytest.mark.parametrize("attention", groups("attention"))
def test_nano_runs_with_every_attention(attention, device):
    model = build("nano", attention, ("model.vocab_size=259",)).to(device)
    tokens = torch.randint(259, (20,), device=device)
    loss = model(tokens, labels=tokens.roll(-1))
    loss.backward()
    # an untrained model predicts all 259 tokens with nearly equal probability, and ln 259 = 5.56
    assert loss.item() / 20 == pytest.approx(5.56, abs=0.2)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
