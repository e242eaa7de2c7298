"""Compiles the Hopper kernels with no GPU and prints, as JSON, what ptxas says of each. Run as a module.

A case is head_dim-dtype-outdtype-features, such as 128-bf16-bf16-plain or 64-fp16-fp32-sinks+softcap.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.flash_attention.hopper.fwd import FORWARD_TILES, ROWS, _fwd_kernel
from tests.kernels.aot import ptxas

ELEMENT = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


def descriptor(dtype, rows, width):
    """The type of a TMA descriptor, as a launch would name it."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], ELEMENT[dtype])
    return f"tensordesc<{dtype}[{rows}, {width}],{layout!r}>"


def compile_forward(head_dim, dtype, out_dtype, features, tiles=None):
    """The compiled forward kernel of one case."""
    tiles = tiles or FORWARD_TILES[head_dim]
    constants = {"HAS_SINKS": "sinks" in features, "HAS_SOFTCAP": "softcap" in features}
    constants |= tiles.constants()
    names = _fwd_kernel.arg_names
    signature = dict.fromkeys(names, "i32") | {
        "q_desc": descriptor(dtype, ROWS, head_dim),
        "k_desc": descriptor(dtype, tiles.block_n, head_dim),
        "v_desc": descriptor(dtype, tiles.block_n, head_dim),
        "o_desc": descriptor(out_dtype, ROWS, head_dim),
        "softmax_scale": "fp32",
        "softcap": "fp32",
        "lse_ptr": "*fp32",
        "sinks_ptr": "*fp32",
        "tiles_ptr": "*i32",
        "key_start_ptr": "*i32",
        "key_end_ptr": "*i32",
    }
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n].startswith("*")}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(_fwd_kernel, signature, constexprs=places, attrs=attributes)
    options = {"num_warps": 4, "maxnreg": tiles.launch_registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(case):
    """What ptxas says of one case."""
    head_dim, dtype, out_dtype, features = case.split("-")
    compiled = compile_forward(int(head_dim), dtype, out_dtype, features)
    return {"case": case, "shared": compiled.metadata.shared, **ptxas(compiled.asm["ptx"], 90)}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(report(case)), flush=True)
