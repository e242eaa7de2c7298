"""Compiles the Hopper backward kernel without a GPU and prints, as JSON, what ptxas says of each case. Run as a module.

A case is dtype-head_dim-group-softcap-marks, such as bf16-128-4-0-1. Head_dim 256 has two
kernels, 256dkdv and 256dq.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.flash_attention.hopper import bwd, bwd_wide
from kernels.flash_attention.hopper.bwd_dq import ROW_ALIGNMENT
from kernels.flash_attention.portable.load import split_width
from tests.kernels.aot import ptxas

DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


def descriptor(dtype, block):
    """The type of a host-made tensor descriptor, as the launcher spells it."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


def compile_kernel(dtype, head_dim, group, softcap, marks):
    """The compiled kernel of one case, with the tiles of the table."""
    head_dim = int(head_dim)
    tiles, kernel = bwd.TILES[head_dim], bwd._bwd_kernel
    d_1, d_2 = split_width(head_dim)
    signature = dict(
        rows_desc=descriptor("fp32", [tiles.block_m]), sum_desc=descriptor("fp32", [bwd.SUM_BLOCK, bwd.SUM_BLOCK]),
        tiles_ptr="*i32", query_start_ptr="*i32", query_end_ptr="*i32", spoiled_ptr="*i32",
        softmax_scale="fp32", softcap="fp32",
    )  # fmt: skip
    constants = dict(
        HAS_SOFTCAP=softcap == "1", GROUP=int(group), BLOCK_M=tiles.block_m, BLOCK_N=bwd.BLOCK_N, D_1=d_1, D_2=d_2,
        STAGES=tiles.stages, ALIGNMENT=ROW_ALIGNMENT, CONSUMER_REGISTERS=bwd.CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=bwd.PRODUCER_REGISTERS,
    )  # fmt: skip
    if marks == "0":
        constants["spoiled_ptr"] = None
    for part, width in (("", d_1), ("_2", d_2)):
        for name, rows in (
            ("q", tiles.block_m), ("do", tiles.block_m), ("k", bwd.BLOCK_N), ("v", bwd.BLOCK_N),
            ("dk", bwd.BLOCK_N), ("dv", bwd.BLOCK_N),
        ):  # fmt: skip
            if width:
                signature[f"{name}{part}_desc"] = descriptor(dtype, [rows, width])
            else:
                constants[f"{name}{part}_desc"] = None
    if d_2:
        signature["sum_2_desc"] = descriptor("fp32", [bwd.SUM_BLOCK, d_2])
    else:
        constants["sum_2_desc"] = None
    return compile_source(kernel, signature, constants, bwd.REGISTERS)


def compile_wide(dtype, part, group, softcap, marks):
    """The compiled kernel of one case at head_dim 256; part is dkdv or dq."""
    blocks = [bwd_wide.BLOCK, bwd_wide.HEAD_DIM]
    kernel = bwd_wide._dq_kernel if part == "dq" else bwd_wide._dkdv_kernel
    constants = dict(HAS_SOFTCAP=softcap == "1", GROUP=int(group), REGISTERS=bwd_wide.REGISTERS)
    if part == "dq":
        constants |= dict(K_STAGES=bwd_wide.K_STAGES, V_STAGES=bwd_wide.V_STAGES)
    else:
        constants |= dict(STAGES=bwd_wide.STAGES, PARTS=bwd_wide.PARTS)
    if marks == "0":
        constants["spoiled_ptr"] = None
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict(softmax_scale="fp32", softcap="fp32")
    signature |= {name: descriptor(dtype, blocks) for name in kernel.arg_names if name.endswith("_desc")}
    signature |= dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32")
    pointers = ("tiles_ptr", "key_start_ptr", "key_end_ptr", "query_start_ptr", "query_end_ptr", "spoiled_ptr")
    signature |= dict.fromkeys(pointers, "*i32") | dict(rows_desc=descriptor("fp32", blocks[:1]))
    return compile_source(kernel, signature, constants, bwd_wide.THREAD_REGISTERS)


def compile_source(kernel, signature, constants, registers):
    """The compiled kernel; what has no type in the signature is i32."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, constexprs=places, attrs=attributes)
    options = {"num_warps": 4, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(dtype, head_dim, *features):
    """What ptxas says of one case, and the bytes of shared memory."""
    if head_dim.startswith("256"):
        compiled = compile_wide(dtype, head_dim.removeprefix("256"), *features)
    else:
        compiled = compile_kernel(dtype, head_dim, *features)
    return {"shared": compiled.metadata.shared, **ptxas(compiled.asm["ptx"], 90)}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(report(*case.split("-"))), flush=True)
