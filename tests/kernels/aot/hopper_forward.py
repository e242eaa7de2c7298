"""Compiles the Hopper forward kernels without a GPU and prints the report of ptxas as JSON.

The name of a case is head_dim-length_class-dtype-out_dtype-features, for example 128-long-bf16-bf16-plain or
64-short-fp16-fp32-softcap+marks.
"""

import json
import sys

from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fa_kernels.columns_of_head import split_columns
from fa_kernels.flash_attention.hopper.forward.config import ROWS, forward_config
from fa_kernels.flash_attention.hopper.forward.kernel import _fwd_kernel
from tests.kernels.aot.portable import compile_to_ptx, idle_barriers, ptxas

ELEMENT = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


def descriptor(dtype, rows, columns):
    """Returns the type of a host-side TMA descriptor, as the launcher writes it."""
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENT[dtype])
    return f"tensordesc<{dtype}{block},{layout!r}>"


def case_source(head_dim, documents, dtype, out_dtype, features):
    """Returns the kernel source of one case, its compute capability and its compile options."""
    config = forward_config(int(head_dim), documents, out_dtype == "fp32")
    constants = {"HAS_SINKS": "sinks" in features, "HAS_SOFTCAP": "softcap" in features}
    constants |= {"CONFIG": config}
    if "marks" not in features:
        constants["marks_ptr"] = None
    names, descriptors = _fwd_kernel.arg_names, {}
    for part, columns in zip(("", "_2"), split_columns(int(head_dim)), strict=True):
        for operand, rows in (("q", ROWS), ("k", config.block_n), ("v", config.block_n), ("o", ROWS)):
            kind = descriptor(out_dtype if operand == "o" else dtype, rows, columns) if columns else None
            (descriptors if columns else constants)[f"{operand}{part}_desc"] = kind
    signature = (
        dict.fromkeys(names, "i32")
        | descriptors
        | {
            "softmax_scale": "fp32",
            "softcap": "fp32",
            "lse_ptr": "*fp32",
            "sinks_ptr": "*fp32",
            "counter_ptr": "*i32",
            "tiles_ptr": "*i32",
            "key_start_ptr": "*i32",
            "key_end_ptr": "*i32",
            "marks_ptr": "*i32",
        }
    )
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n].startswith("*")}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(_fwd_kernel, signature, constexprs=places, attrs=attributes)
    options = {"num_warps": 4, "maxnreg": config.start_registers}
    return source, 90, options


def report(case):
    """Returns the report of ptxas on one case."""
    compiled = compile_to_ptx(*case_source(*case.split("-")))
    idle = idle_barriers(compiled.asm["ttgir"])
    return {"case": case, "shared": compiled.metadata.shared, "idle_barriers": idle, **ptxas(compiled.asm["ptx"], 90)}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(report(case)), flush=True)
