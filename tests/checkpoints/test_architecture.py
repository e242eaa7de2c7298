"""Tests how the model settings of a checkpoint are compared with those of a run that resumes from it."""

from dataclasses import replace

import pytest

from fa_train.checkpoints.architecture import differences, require_same_head
from fa_train.checkpoints.files import CheckpointError
from fa_train.models.config import Family, ModelConfig

CONFIG = ModelConfig(
    vocab_size=67, n_layers=2, dim=32, n_heads=4, n_kv_heads=None, head_dim=None, ffn_dim=48, norm="rmsnorm",
    norm_eps=1e-5, positions="rope", rope_theta=1e4, max_seq_len=64, activation="swiglu", bias=False, qk_norm=False,
    tied=True, init="llama",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({"n_kv_heads": 4, "head_dim": 8, "init": "gpt2", "family": Family()}, [], id="same"),
        pytest.param({"norm_eps": 0.1}, ["model.norm_eps=1e-05; this run has 0.1"], id="number"),
        pytest.param(
            {"family": Family(windows=[4, None])}, ["model.family.windows=null; this run has [4, null]"], id="family"
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            [
                "model.rope_scaling.factor=null; this run has 2.0",
                "model.rope_scaling.rope_type=null; this run has linear",
            ],
            id="scaling",
        ),
    ],
)
def test_each_difference_is_a_line(changes, names):
    lines = differences("model", replace(CONFIG, **changes).values(), CONFIG.values())
    assert lines == [f"the checkpoint was written with {name}" for name in names]


def test_chosen_settings_are_not_compared():
    changed = replace(CONFIG, norm_eps=0.1, rope_scaling={"rope_type": "linear", "factor": 2.0}).values()
    [line] = differences("model", changed, CONFIG.values(), "the export", ["model.rope_scaling", "model.norm"])
    assert line == "the checkpoint was written with model.norm_eps=1e-05; the export has 0.1"


def test_a_head_is_shared_in_both_or_in_none():
    require_same_head(CONFIG, CONFIG.values())
    for own, stored in ((True, False), (False, True)):
        with pytest.raises(
            CheckpointError, match=rf"model.tied={str(stored).lower()}; this run has {str(own).lower()}"
        ):
            require_same_head(replace(CONFIG, tied=own), replace(CONFIG, tied=stored).values())


def test_a_checkpoint_of_an_older_version_is_not_compared():
    assert differences("model", CONFIG.values(), None) == []
    require_same_head(CONFIG, None)
