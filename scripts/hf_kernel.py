"""Writes the kernels to a folder that Hugging Face's package `kernels` can load without a build.

    python -m scripts.hf_kernel fa-kernels    # writes the folder.

    from kernels import get_local_kernel    # imports the loader.
    flash_attn_func = get_local_kernel(Path("fa-kernels")).flash_attn_func    # loads the folder.

The folder can be uploaded as a kernel repository. The folder build/torch-universal holds a copy of kernels/fa_kernels.
The copy works with every version of CUDA and Python that the sources support, and with the versions of torch that
pyproject.toml allows. A kernel repository must use relative imports, and must register its torch operators in a
separate namespace. The name of the copy's namespace contains a hash of the sources, so one process can load fa_kernels
and several versions of the copy.

Source: huggingface.co/docs/kernels/v0.17.0/kernel-requirements.
"""

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from base64 import b64encode
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "kernels" / "fa_kernels"
NAME = "fa-kernels"
VERSION = 0  # version 0 means that the interface can still change
ARCHITECTURES = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")  # those of fa_kernels/device.py
OTHER_FUNCTIONS = "\nfrom . import glu as glu, rmsnorm as rmsnorm, rotary as rotary\n"

# The text of fa_kernels/__init__.py, which older versions of the package `kernels` import. The file loads
# ../__init__.py.
COMPATIBILITY = '''"""The kernel, for older versions of the package that loads it."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if "{name}" not in sys.modules:
    _spec = spec_from_file_location("{name}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{name}"] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["{name}"])
globals().update((k, v) for k, v in vars(sys.modules["{name}"]).items() if not k.startswith("__"))
'''


def write_kernel(folder: Path) -> Path:
    """Writes the kernel to `folder`. Returns the folder of the kernel's only build, build/torch-universal.

    Raises: ValueError if `folder` already holds a kernel.
    """
    variant = folder / "build" / "torch-universal"
    if variant.exists():
        raise ValueError(f"the folder must not hold a kernel yet; got {folder} with {variant.relative_to(folder)}")
    sources = {path.relative_to(PACKAGE): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    module = f"_fa_kernels_{hashlib.sha256(repr(sources).encode()).hexdigest()[:12]}"
    files = {path: relocated(text, path, module) for path, text in sources.items()}
    files[Path("__init__.py")] += OTHER_FUNCTIONS
    files[Path(PACKAGE.name) / "__init__.py"] = COMPATIBILITY.format(name=module)
    for path, text in files.items():
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        (variant / path).write_text(text, encoding="utf-8")
    metadata = {
        "name": NAME,
        "id": module,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": list(ARCHITECTURES)},
        "digest": {"algorithm": "sha256", "files": {str(path): digest(text) for path, text in sorted(files.items())}},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    shutil.copy(REPOSITORY / "LICENSE", folder)
    return variant


def relocated(text: str, path: Path, namespace: str) -> str:
    """Rewrites a module's source: imports of fa_kernels become relative, and operator a::b becomes namespace::a_b."""
    dots = "." * len(path.parts)
    text = re.sub(
        r"^(\s*from )fa_kernels(?:\.([\w.]+))?(?= import )",
        lambda found: found[1] + dots + (found[2] or ""),
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r'custom_op\("(\w+)::(\w+)"', rf'custom_op("{namespace}::\1_\2"', text)
    text = re.sub(r"\btorch\.ops\.(\w+)\.(\w+)", rf"torch.ops.{namespace}.\1_\2", text)
    for node in ast.walk(ast.parse(text)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        assert not any(name.split(".")[0] == PACKAGE.name for name in names), f"{path}: {ast.unparse(node)}"
    return text


def digest(text: str) -> str:
    return b64encode(hashlib.sha256(text.encode()).digest()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder, without a kernel")
    folder: Path = parser.parse_args().folder
    try:
        print(f"wrote {write_kernel(folder)}")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
