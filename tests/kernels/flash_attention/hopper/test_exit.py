"""The end of a process that compiled a Gluon kernel."""

import subprocess
import sys

from tests.kernels.aot.reports import ROOT, environment

COMPILE = """
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

import fa_kernels


@gluon.jit
def kernel(x):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    columns = x + gl.arange(0, 128, layout=layout)
    value = gl.load(columns)
    value, _ = gl.split(gl.join(value, value))  # the compiler computes the layouts of the results
    gl.store(columns, gl.convert_layout(value, layout))


source = GluonASTSource(kernel, signature={"x": "*fp32"}, constexprs={})
compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
print("compiled")
"""


def test_nothing_is_reported_as_leaked(tmp_path):
    path = tmp_path / "compile_one_kernel.py"
    path.write_text(COMPILE)
    variables = environment() | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    ended = subprocess.run([sys.executable, path], env=variables, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "compiled\n", "")
