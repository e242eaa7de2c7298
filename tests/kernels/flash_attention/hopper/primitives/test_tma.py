"""TMA copies have the same names with each version of Triton."""

import importlib.util
import re
from pathlib import Path

from triton.experimental.gluon.language.nvidia.hopper import tma as of_triton

from fa_kernels.flash_attention.hopper.primitives import tma


def test_new_names_of_triton_are_preferred(monkeypatch):
    """Triton 3.9 still has functions with the old names, but they raise an error."""
    monkeypatch.setattr(of_triton, "async_load", "load", raising=False)
    monkeypatch.setattr(of_triton, "async_store", "store", raising=False)
    spec = importlib.util.spec_from_file_location("tma_again", tma.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert (again.async_copy_global_to_shared, again.async_copy_shared_to_global) == ("load", "store")


def test_kernels_take_tma_from_here():
    files = [path for path in Path(tma.__file__).parents[1].rglob("*.py") if path.name != "tma.py"]
    imports = re.compile(r"from triton\.[\w.]*hopper import (?:\([^)]*\btma\b|[^\n(]*\btma\b)")
    assert len(files) > 20 and [path.name for path in files if imports.search(path.read_text())] == []
