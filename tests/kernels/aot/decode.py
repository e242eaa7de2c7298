"""Compiles the decoding kernels without a GPU and prints the report of ptxas as JSON.

The name of a case is GPU-head_dim-rows-cache, for example sm90-128-1-paged. `rows` is the number of queries per KV
head. The kernels for a paged cache are compiled with every feature.
"""

import json
import sys

from triton.compiler import ASTSource

from fa_kernels.flash_attention.portable.decode import _decode_kernel, decode_tiles, padded_width
from fa_kernels.flash_attention.tiles import SHARED_LIMIT
from tests.kernels.aot.portable import capability_of, compile_to_ptx, ptxas, table_of

INDEX_POINTERS = ("seqlens_ptr", "leftpad_ptr", "table_ptr")
FP32_POINTERS = ("o_ptr", "lse_ptr", "slopes_ptr")
FEATURE_POINTERS = ("cos_ptr", "sin_ptr", "leftpad_ptr", "slopes_ptr", "table_ptr")


def case_source(arch, head_dim, n_rows, cache):
    """Returns (source, capability, options) of one case."""
    head_dim, n_rows, paged = int(head_dim), int(n_rows), cache == "paged"
    table = table_of(arch)
    tiles = decode_tiles(table, head_dim, head_dim, 2, n_rows, paged, SHARED_LIMIT[table])
    block_d = padded_width(head_dim)
    constants = dict(
        PAGED=paged, HAS_SOFTCAP=paged, ROTARY=head_dim if paged else 0, INTERLEAVED=False, ROTARY_BY_TOKEN=True,
        GROUP=4, D=head_dim, BLOCK_D=block_d, DV=head_dim, BLOCK_DV=block_d,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PRECISION="ieee",
    )  # fmt: skip
    constants |= {} if paged else {name: None for name in FEATURE_POINTERS}
    names = _decode_kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INDEX_POINTERS:
            signature[name] = "*i32"
        elif name.endswith("_ptr"):
            signature[name] = "*fp32" if name in FP32_POINTERS else "*bf16"
        else:
            signature[name] = "fp32" if name in ("softmax_scale", "softcap") else "i32"
        # the strides of contiguous tensors are multiples of head_dim
        of_rows = name.startswith("stride") and head_dim % 16 == 0
        if name not in constants and (name.endswith("_ptr") or of_rows):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(_decode_kernel, signature, constexprs=places, attrs=attributes)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    return source, capability_of(arch), options


def report(case):
    """Returns the report of ptxas on one case."""
    compiled = compile_to_ptx(*case_source(*case.split("-")))
    limits = ptxas(compiled.asm["ptx"], capability_of(case.partition("-")[0]))
    return {"case": case, "shared": compiled.metadata.shared, **limits}


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(report(case)), flush=True)
