"""Compiles the kernel that builds attention schedules, without a GPU, and prints the report of ptxas as JSON.

A case is an architecture, for example sm90.
"""

import json
import sys

from triton.compiler import ASTSource

from fa_kernels.flash_attention.schedule import WIDE_TILE, WORK_TILE
from fa_kernels.flash_attention.schedule_kernel import ALIGNMENT, OTHERS, TILES, TOKENS, WARPS, _schedule_kernel
from tests.kernels.aot.portable import capability_of, compile_to_ptx, ptxas

CONSTANTS = dict(
    WORK_TILE=WORK_TILE, WIDE_TILE=WIDE_TILE, TOKENS=TOKENS, TILES=TILES, OTHERS=OTHERS, ALIGNMENT=ALIGNMENT
)  # fmt: skip


def case_source(arch):
    """Returns the source of the schedule kernel, the compute capability and the compile options.

    The argument types are those of a launch in an attention call. cu_seqlens can have any alignment, but the address of
    the output is a multiple of 16 bytes.
    """
    names = _schedule_kernel.arg_names
    signature = {
        name: "constexpr" if name in CONSTANTS else "*i32" if name.endswith("_ptr") else "i32" for name in names
    }
    places = {(names.index(name),): value for name, value in CONSTANTS.items()}
    aligned = {(names.index("out_ptr"),): [["tt.divisibility", 16]]}
    source = ASTSource(_schedule_kernel, signature, constexprs=places, attrs=aligned)
    return source, capability_of(arch), {"num_warps": WARPS}


def report(case):
    """Returns the report of ptxas on one case."""
    compiled = compile_to_ptx(*case_source(case))
    limits = ptxas(compiled.asm["ptx"], capability_of(case))
    return {"case": case, "shared": compiled.metadata.shared, **limits}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(report(case)), flush=True)
