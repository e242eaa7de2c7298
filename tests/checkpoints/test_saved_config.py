"""A saved config may name only the classes and functions that build a model."""

from pathlib import Path

import pytest
import yaml
from hydra.utils import get_object
from omegaconf import OmegaConf

from fa_train.checkpoints.saved_config import TARGETS, require_own_targets
from fa_train.settings import leaves
from tests.support.training import CONF


def test_the_targets_of_all_options_are_known():
    paths = [path for group in ("model", "attention", "memory", "adapter") for path in Path(CONF, group).glob("*.yaml")]
    named = {str(value) for path in paths for key, value in leaves("", yaml.safe_load(path.read_text()) or {})
             if key.rpartition(".")[2] == "_target_"}  # fmt: skip
    assert named and named <= TARGETS
    assert all(callable(get_object(target)) for target in TARGETS)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            {"_target_": "fa_train.models.hf.export._replace", "target": "a", "new": "b"}, id="deletes-a-folder"
        ),
        pytest.param({"loss": [{"_target_": "fa_train.models.hf.import_.save_pretrained"}]}, id="writes-a-folder"),
        pytest.param({"_target_": ["fa_train.models.gpt.GPT"]}, id="a-list"),
    ],
)
def test_other_functions_of_ours_are_refused(config):
    with pytest.raises(ValueError, match=r"^model must contain only the targets that .* lists; got _target_: "):
        require_own_targets({"_target_": "fa_train.models.gpt.GPT", "attention": config}, "model")


def test_an_escaped_interpolation_is_refused():
    """Hydra would resolve the text to a config with the target torch.load, and would call torch.load."""
    config = OmegaConf.create(
        {"_target_": "fa_train.models.gpt.GPT", "attention": r"\${oc.create:{_target_:torch.load,f:x}}"}
    )
    resolved = OmegaConf.to_container(config, resolve=True)
    with pytest.raises(ValueError, match=r"^model must contain no escaped interpolations; got \$\{oc.create:"):
        require_own_targets(resolved, "model")
