"""Compiles the portable kernels without a GPU and prints the report of ptxas as JSON.

The name of a case is GPU-head_dim-v_head_dim-pass-itemsize, for example sm90-128-128-fwd-2. An item size of 1 byte
means fp8, 2 bytes mean bf16, and 4 bytes mean fp32. Each GPU uses the tile sizes of one tile table: sm89 and sm120 use
the table of sm80. The kernels are for one document, without sinks, ALiBi or fp8 scales. `contain_fwd` is the forward
kernel for several documents, which isolates NaN. `repair_fwd` is the kernel that recomputes tiles marked as containing
NaN.
"""

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from fa_kernels.columns_of_head import columns_of
from fa_kernels.device import _ARCHITECTURES
from fa_kernels.flash_attention.portable.backward import _dkdv_kernel, _dq_kernel
from fa_kernels.flash_attention.portable.forward import _fwd_kernel
from fa_kernels.flash_attention.portable.repair import _repair_bwd_kernel, _repair_fwd_kernel
from fa_kernels.flash_attention.tiles import precision_of, shared_bytes, tile_config
from tests.kernels.aot.descriptors import misplaced_descriptors

KERNELS = {
    "fwd": _fwd_kernel,
    "dkdv": _dkdv_kernel,
    "dk": _dkdv_kernel,
    "dv": _dkdv_kernel,
    "dq": _dq_kernel,
    "repair_fwd": _repair_fwd_kernel,
    "repair_bwd": _repair_bwd_kernel,
}
# {repair kernel: pass whose kernel has the same number of warps}
PASS_OF_REPAIR = {"repair_fwd": "fwd", "repair_bwd": "dkdv"}
INDEX_POINTERS = {
    *("key_start_ptr", "key_end_ptr", "query_start_ptr", "query_end_ptr", "tiles_ptr"),
    *("marks_ptr", "marks_q_ptr", "marks_k_ptr"),
}
FEATURE_POINTERS = ("sinks_ptr", "slopes_ptr", "aligned_ptr", "document_ptr", "descale_ptr")
ELEMENT = {1: "*fp8e4nv", 2: "*bf16", 4: "*fp32"}
# {name of a tensor-core instruction in PTX: its name in machine code}, from the newest to the oldest instruction. Tests
# search the PTX instead of the machine code, because cuobjdump is slow.
TENSOR_CORES = {"tcgen05.mma.": "UTCHMMA", "wgmma.mma_async.": "HGMMA", "mma.sync.": "HMMA"}


def compile_case(*case):
    """Compiles one entry of the tile table and returns its report."""
    source, capability, options = case_source(*case)
    log = io.StringIO()
    # Let Triton run ptxas, because each version of Triton passes different options to ptxas. Always compile, because a
    # kernel from Triton's cache has no ptxas log.
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {
        **resources(log.getvalue()),
        "tensor_core": tensor_core(compiled.asm["ptx"]),
        "shared": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size,
        "misplaced_descriptors": misplaced_descriptors_of(compiled.asm["cubin"]) if capability == 90 else [],
    }


def capability_of(arch):
    """Converts an architecture to a number: sm90 becomes 90."""
    return int(arch.removeprefix("sm"))


def table_of(arch):
    """Returns the architecture whose tile table a GPU uses: sm89 uses the table of sm80."""
    return _ARCHITECTURES[divmod(capability_of(arch), 10)]


def pass_of(direction):
    """Returns the pass under which the tile table lists a kernel, for example dkdv for contain_dkdv and repair_bwd."""
    direction = direction.removeprefix("contain_")
    return PASS_OF_REPAIR.get(direction, direction)


def computed_shared_bytes(case):
    """Returns the shared memory that tiles.shared_bytes computes for a case."""
    arch, head_dim, v_head_dim, direction, itemsize = case.split("-")
    direction, d, d_v, itemsize = pass_of(direction), int(head_dim), int(v_head_dim), int(itemsize)
    tiles = tile_config(table_of(arch), max(d, d_v), direction, itemsize)
    return shared_bytes(table_of(arch), tiles, d, d_v, direction, itemsize)


def case_source(arch, head_dim, v_head_dim, direction, itemsize):
    """Returns the kernel source of one case, its compute capability and its compile options."""
    head_dim, v_head_dim, itemsize = int(head_dim), int(v_head_dim), int(itemsize)
    kernel, contain = KERNELS[direction.removeprefix("contain_")], direction.startswith("contain_")
    direction = pass_of(direction)
    tiles = tile_config(table_of(arch), max(head_dim, v_head_dim), direction, itemsize)
    of_queries = tile_config(table_of(arch), max(head_dim, v_head_dim), "dq", itemsize)
    if "LOOK" in kernel.arg_names:
        tiles = replace(tiles, num_stages=1)
    precision = precision_of(torch.empty(0, dtype=torch.float32 if itemsize == 4 else torch.bfloat16))
    source = source_of(kernel, tiles, of_queries, head_dim, v_head_dim, direction, itemsize, contain, precision)
    return source, capability_of(arch), {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def source_of(kernel, tiles, of_queries, head_dim, v_head_dim, direction, itemsize, contain, precision):
    """Returns the source of `kernel`, specialised for a launch with all features off.

    `of_queries` are the tile sizes of the dQ kernel.
    """
    rows = tiles.block_n if direction in ("dkdv", "dk", "dv") else tiles.block_m
    constants = dict(
        HAS_SINKS=False, HAS_SOFTCAP=False, HAS_ALIBI=False, GROUP=4,
        D=head_dim, D_COLUMNS=columns_of(head_dim, itemsize),
        DV=v_head_dim, DV_COLUMNS=columns_of(v_head_dim, itemsize),
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, DKDV_M=tiles.block_m, DKDV_N=tiles.block_n,
        DQ_M=of_queries.block_m, DQ_N=of_queries.block_n, TILES_PER_WORK_TILE=128 // rows, LOOK=256,
        PRECISION=precision,
        ISOLATE_NAN=contain, HAS_DK="dk" in direction, HAS_DV="dv" in direction,
    )  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    # launches pass None for the pointers of features that are off
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
            signature[name] = "*bf16" if itemsize == 1 and name == "o_ptr" else ELEMENT[itemsize]
        else:
            signature[name] = "fp32" if name in ("softmax_scale", "softcap") else "i32"
        of_rows = name.startswith("stride") and head_dim % 16 == 0  # the strides of contiguous rows are multiples of 16
        if name not in constants and (name.endswith("_ptr") or of_rows):
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return ASTSource(kernel, signature, constexprs=places, attrs=attributes)


def misplaced_descriptors_of(cubin):
    """Applies `misplaced_descriptors` to the bytes of a cubin."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(cubin)
        file.flush()
        return misplaced_descriptors(Path(file.name))


def compile_to_ptx(source, capability, options):
    """Compiles to PTX and keeps Triton from running ptxas."""

    def hook(*arguments):
        if not arguments:  # to get a cache key, Triton calls `hook` without arguments
            return "without cubin", "without cubin"
        stages = arguments[1]
        stages["cubin"] = lambda ptx, metadata: b""

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = hook
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def ptxas(ptx, capability):
    """Runs ptxas, and returns what is known about the compiled kernel.

    The result has the number of registers, the bytes of spills, ptxas's C75xx warnings, the tensor-core instruction,
    and the findings of `misplaced_descriptors`.
    """
    tool = get_ptxas(capability)
    suffix = "a" if capability >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name=sm_{capability}{suffix}", source, "-o", cubin]
        run = subprocess.run([*map(str, command)], capture_output=True, text=True)
        assert run.returncode == 0, f"{command} ended with {run.returncode}: {run.stdout}{run.stderr}"
        misplaced = misplaced_descriptors(cubin) if capability == 90 else []
        return {**resources(run.stderr), "tensor_core": tensor_core(ptx), "misplaced_descriptors": misplaced}


def resources(log):
    """Extracts registers, spills and warnings from what `ptxas -v` printed for one kernel."""
    return {
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "spill_bytes": int(re.findall(r"(\d+) bytes spill stores", log)[0]),
        "warnings": re.findall(r"C75\d\d", log),
    }


def idle_barriers(ttgir):
    """Returns the mbarriers that a Gluon kernel allocates but passes to no warp group.

    If an mbarrier is passed to no warp group, Triton can give the mbarrier's memory to another buffer.
    """
    barriers = re.findall(r"(%\S+) = ttg\.local_alloc\b.*-> !ttg\.memdesc<\S*xi64,", ttgir)
    assert barriers, "the pattern finds no barrier"
    (handed,) = re.findall(r"ttg\.warp_specialize\((.*?)\)", ttgir)
    return sorted(set(barriers) - set(handed.split(", ")))


def tensor_core(ptx):
    """Returns the newest kind of tensor-core instruction that a kernel contains."""
    return next((name for text, name in TENSOR_CORES.items() if text in ptx), "none")


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps({"case": case, **compile_case(*case.split("-"))}), flush=True)
