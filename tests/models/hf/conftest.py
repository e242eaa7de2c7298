"""A fixture that writes checkpoints in the format of transformers."""

from pathlib import Path

import pytest

from tests.models.hf.support.checkpoints import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path):
    """Returns a function that writes one of `CHECKPOINTS`, and returns its folder."""

    def write(name: str, **options) -> Path:
        write_checkpoint(name, tmp_path / name, **options)
        return tmp_path / name

    return write
