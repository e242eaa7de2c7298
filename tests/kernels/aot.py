"""Compiles the kernels for a GPU that is not there and prints, as JSON, what ptxas says of each. Run as a module.

The kernels are compiled with the tiles of the table, in bf16; ptxas runs once more with -v on the PTX, because Triton
keeps only its errors.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.flash_attention.portable.bwd import _dkdv_kernel, _dq_kernel
from kernels.flash_attention.portable.fwd import _fwd_kernel
from kernels.flash_attention.portable.load import split_width
from kernels.flash_attention.tiles import tile_config

KERNELS = {"fwd": _fwd_kernel, "dkdv": _dkdv_kernel, "dq": _dq_kernel}
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
INDEX_POINTERS = {"key_start_ptr", "key_end_ptr", "query_start_ptr", "query_end_ptr", "tiles_ptr"}
FEATURE_POINTERS = ("sinks_ptr", "slopes_ptr", "beside_ptr", "document_ptr")


def compile_case(arch, head_dim, direction):
    """The report on one entry of the table, such as sm90, 128, fwd."""
    head_dim = int(head_dim)
    kernel = KERNELS[direction]
    tiles = tile_config(arch, head_dim, direction, itemsize=2)
    rows = tiles.block_n if direction == "dkdv" else tiles.block_m
    d_1, d_2 = split_width(head_dim)
    constants = dict(
        HAS_SINKS=False, HAS_SOFTCAP=False, HAS_ALIBI=False, GROUP=4,
        D=head_dim, D_1=d_1, D_2=d_2, DV=head_dim, DV_1=d_1, DV_2=d_2,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, PARTS=128 // rows, PRECISION="ieee",
    )  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    # pointers of features that are off are None, as they are at a launch
    constants |= {name: None for name in FEATURE_POINTERS if name in kernel.arg_names}
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in INDEX_POINTERS:
            signature[name] = "*i32"
        elif name in ("lse_ptr", "delta_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*bf16"
        else:
            signature[name] = "fp32" if name in ("softmax_scale", "softcap") else "i32"
        if name not in constants and (name.endswith("_ptr") or name.startswith("stride")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places, attrs=attributes)
    capability = int(arch.removeprefix("sm"))
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"shared": compiled.metadata.shared, **ptxas(compiled.asm["ptx"], capability)}


def ptxas(ptx, capability):
    """Registers, spills, C75xx warnings and the kind of tensor-core instruction of one kernel."""
    suffix = "a" if capability == 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [BINARIES / "ptxas", "-v", f"--gpu-name=sm_{capability}{suffix}", source, "-o", cubin]
        log = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stderr
        disassemble = [str(BINARIES / "cuobjdump"), "-sass", str(cubin)]
        sass = subprocess.run(disassemble, check=True, capture_output=True, text=True)
    return {
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "spill_bytes": int(re.findall(r"(\d+) bytes spill stores", log)[0]),
        "warnings": re.findall(r"C75\d\d", log),
        "tensor_core": "HGMMA" if "HGMMA" in sass.stdout else "HMMA" if "HMMA" in sass.stdout else "none",
    }


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(compile_case(*case.split("-"))), flush=True)
