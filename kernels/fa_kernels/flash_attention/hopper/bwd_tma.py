"""What Gluon has no name for and the backward kernel needs: a TMA store that adds, a barrier of two warpgroups."""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gl._core.builtin
def tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory: cp.reduce.async.bulk.tensor, waited for by tma.store_wait.

    Triton 3.6 and 3.7 build the operation but do not export it. Rows past the tensor's end are left out.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


@gluon.jit
def named_barrier(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Waits until THREADS threads stand at barrier INDEX. Triton itself uses 0, 1 and 2 + the warp group's index."""
    gl.inline_asm_elementwise(f"bar.sync {INDEX}, {THREADS}; mov.u32 $0, 0;", "=r,~{memory}", [], gl.int32, False, 1)
