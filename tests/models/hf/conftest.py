"""A fixture that writes checkpoints in the format of transformers."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.models.hf.support.checkpoints import ARCHITECTURES, CHECKPOINTS


@pytest.fixture
def checkpoint(tmp_path: Path):
    """Returns a function that writes one of `CHECKPOINTS` with random parameters, and returns its folder."""

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
