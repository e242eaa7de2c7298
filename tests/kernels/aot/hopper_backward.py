"""Compiles the Hopper backward kernels without a GPU and prints the report of ptxas as JSON.

The name of a case is dtype-head_dim-group-softcap-marks, for example bf16-128-4-0-1. head_dim can have a suffix that
selects another kernel, for example `dkdv` in fp16-128dkdv-1-1-0. The suffix `ordered` means the kernel that sums dQ in
a fixed order. The suffixes `dkdv` and `dq` mean the two kernels of the two-pass backward. For head_dim 256, only the
two kernels of the two-pass backward exist.
"""

import json
import re
import sys

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fa_kernels.columns_of_head import split_columns
from fa_kernels.flash_attention.hopper.backward import fused, keys, queries, wide
from fa_kernels.flash_attention.hopper.backward.dq_sum import ROW_ALIGNMENT
from fa_kernels.flash_attention.hopper.backward.fused_config import config_of
from fa_kernels.flash_attention.hopper.backward.items import BLOCK_N, SUM_BLOCK
from tests.kernels.aot.portable import compile_to_ptx, idle_barriers, ptxas

DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def descriptor(dtype, block):
    """Returns the type of a host-side tensor descriptor, as the launcher writes it."""
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[dtype])
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}],{layout!r}>"


def source_of_keys(dtype, group, softcap, marks):
    """Returns the source of keys._dkdv_kernel, which computes dK and dV, but not dQ, for head_dim 128.

    Attention launches keys._dkdv_kernel only in fp16 calls with a soft cap.
    """
    assert softcap == "1"
    signature = dict(lse_delta_desc=descriptor("fp32", [keys.BLOCK_M]), softmax_scale="fp32", softcap="fp32")
    signature |= dict.fromkeys(("tiles_ptr", "query_start_ptr", "query_end_ptr", "marks_ptr"), "*i32")
    for name in ("q", "do", "k", "v", "dk", "dv"):
        rows = keys.BLOCK_M if name in ("q", "do") else keys.BLOCK_N
        signature[f"{name}_desc"] = descriptor(dtype, [rows, 128])
    constants = dict(
        GROUP=int(group), STAGES=keys.STAGES, ALIGNMENT=ROW_ALIGNMENT,
        WORKER_REGISTERS=keys.WORKER_REGISTERS,
    )  # fmt: skip
    return kernel_source(keys._dkdv_kernel, signature, constants | without(marks), keys.START_REGISTERS)


def source_of_three_groups(dtype, head_dim, group, softcap, marks, ordered=False):
    """Returns the source of the fused kernel, which computes dQ, dK and dV."""
    head_dim = int(head_dim)
    config = config_of(head_dim, TORCH_DTYPES[dtype], float(softcap), ordered, int(group))
    kernel = fused._bwd_kernel
    d_1, d_2 = split_columns(head_dim)
    signature = dict(lse_delta_desc=descriptor("fp32", [config.block_m]), softmax_scale="fp32", softcap="fp32")
    signature |= dict.fromkeys(("counter_ptr", "tiles_ptr", "query_start_ptr", "query_end_ptr"), "*i32")
    signature["marks_ptr"] = "*i32"
    rest = {}
    for part, width in (("", d_1), ("_2", d_2)):
        for name in ("q", "do", "k", "v", "dk", "dv", "sum"):
            rows = config.block_m if name in ("q", "do") else BLOCK_N
            block, kind = [rows, width], dtype
            if name == "sum":
                block, kind = [2 * min(width, SUM_BLOCK), 32], "fp32"
            (signature if width else rest)[f"{name}{part}_desc"] = descriptor(kind, block) if width else None
    constants = dict(
        CONFIG=config, HAS_SOFTCAP=softcap == "1", GROUP=int(group), ALIGNMENT=SUM_BLOCK,
        WORKER_REGISTERS=fused.WORKER_REGISTERS, **rest,
    )  # fmt: skip
    constants |= without(marks, config.dynamic)
    if ordered:
        constants |= {"tiles_ptr": None, "WORKER_REGISTERS": fused.ORDERED_REGISTERS}
        signature["semaphore_ptr"] = "*i32"
    else:
        constants["semaphore_ptr"] = None
    return kernel_source(kernel, signature, constants, fused.START_REGISTERS)


def source_of_wide(dtype, group, softcap, marks):
    """Returns the source of the kernel that computes dK and dV for head_dim 256."""
    blocks = [wide.BLOCK, wide.HEAD_DIM]
    kernel = wide._dkdv_kernel
    constants = dict(
        HAS_SOFTCAP=softcap == "1", GROUP=int(group), STAGES=wide.STAGES, TILES_PER_WORK_TILE=wide.TILES_PER_WORK_TILE,
        WORKER_REGISTERS=wide.WORKER_REGISTERS,
    )  # fmt: skip
    if marks == "0":
        constants["marks_ptr"] = None
    signature = dict(softmax_scale="fp32", softcap="fp32")
    signature |= {name: descriptor(dtype, blocks) for name in kernel.arg_names if name.endswith("_desc")}
    pointers = ("tiles_ptr", "query_start_ptr", "query_end_ptr", "marks_ptr")
    signature |= dict.fromkeys(pointers, "*i32") | dict(lse_delta_desc=descriptor("fp32", blocks[:1]))
    return kernel_source(kernel, signature, constants, wide.START_REGISTERS)


def source_of_queries(dtype, head_dim, group, softcap, marks):
    """Returns the source of the kernel that computes dQ alone."""
    tiles = queries.TILES[int(head_dim)]
    constants = dict(
        HAS_SOFTCAP=softcap == "1", GROUP=int(group), K_STAGES=queries.K_STAGES, V_STAGES=tiles.v_stages,
        ARRIVALS=tiles.arrivals, WORKER_REGISTERS=queries.WORKER_REGISTERS,
    )  # fmt: skip
    signature = dict(softmax_scale="fp32", softcap="fp32", lse_ptr="*fp32", delta_ptr="*fp32")
    signature |= dict.fromkeys(("tiles_ptr", "key_start_ptr", "key_end_ptr", "marks_ptr"), "*i32")
    for name in ("q", "k", "v", "do", "dq"):
        rows = tiles.block_n if name in "kv" else queries.BLOCK_M
        signature[f"{name}_desc"] = descriptor(dtype, [rows, int(head_dim)])
    return kernel_source(queries._dq_kernel, signature, constants | without(marks), queries.START_REGISTERS)


def without(marks, dynamic=True):
    """Returns the pointer arguments that are None when the kernel is launched."""
    return ({} if marks == "1" else {"marks_ptr": None}) | ({} if dynamic else {"counter_ptr": None})


def kernel_source(kernel, signature, constants, registers):
    """Returns the source, the compute capability and the compile options of a kernel."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in names}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in names if n.endswith("_ptr")}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, types, constexprs=places, attrs=attributes)
    options = {"num_warps": 4, "maxnreg": registers}
    return source, 90, options


def case_source(dtype, kernel, *features):
    """Returns the kernel source of one case, its compute capability and its compile options."""
    if kernel.endswith("dq"):
        return source_of_queries(dtype, kernel.removesuffix("dq"), *features)
    if kernel == f"{wide.HEAD_DIM}dkdv":
        return source_of_wide(dtype, *features)
    if kernel.endswith("dkdv"):
        return source_of_keys(dtype, *features)
    if kernel.endswith("ordered"):
        return source_of_three_groups(dtype, kernel.removesuffix("ordered"), *features, ordered=True)
    return source_of_three_groups(dtype, kernel, *features)


def report(*case):
    """Returns the report of ptxas on a case.

    The report also has the kernel's shared memory in bytes, the number of 16-byte stores to shared memory, and the list
    of mbarriers that the kernel passes to no warp group.
    """
    compiled = compile_to_ptx(*case_source(*case))
    ptx = compiled.asm["ptx"]
    return {
        "shared": compiled.metadata.shared,
        "stores_of_16": len(re.findall(r"st\.shared(?:::cta)?\.v4", ptx)),
        "idle_barriers": idle_barriers(compiled.asm["ttgir"]),
        **ptxas(ptx, 90),
    }


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(report(*case.split("-"))), flush=True)
