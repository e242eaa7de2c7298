"""The forward kernel's output o: an accumulator for each block of a head's columns, and what is done with them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from fa_kernels.flash_attention.hopper.forward import softmax
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.structure import structure


@structure
class Output:
    """Where o goes: descriptors and buffers, tuples for a head's columns, and a pointer to marks of NaN, or None."""

    descs: tuple
    buffers: tuple
    marks: gl.tensor


@gluon.jit
def no_output(q):
    """Zeros, for the rows and columns of q."""
    o = ()
    for i in gl.static_range(len(q)):
        o += (_zeros_like(q[i]),)
    return o


@gluon.jit
def _zeros_like(q):
    ROWS_EACH: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS_EACH, COLUMNS], gl.float32, layout=layout)


@gluon.jit
def operands(p, o, q):
    """p as the first operand of o + P V for each block of columns, in the same registers, in q's dtype."""
    converted = ()
    for i in gl.static_range(len(o)):
        converted += (softmax.operand(p, q[0].dtype, o[i]),)
    return converted


@gluon.jit
def begin_values(operands, v_buffers, stage, o):
    """Starts o + P V of a stage."""
    tokens = ()
    for i in gl.static_range(len(o)):
        tokens += (warpgroup_mma(operands[i], v_buffers[i].index(stage), o[i], is_async=True),)
    return tokens


@gluon.jit
def wait_for(tokens):
    """Waits for all matmuls. Returns a tuple of the accumulators `tokens`."""
    values = warpgroup_mma_wait(0, deps=tokens)
    if len(tokens) == 1:
        values = (values,)
    return values


@gluon.jit
def rescale(o, factor):
    """o times `factor` of its rows."""
    scaled = ()
    for i in gl.static_range(len(o)):
        scaled += (softmax.rescale(o[i], factor),)
    return scaled


@gluon.jit
def _normalised(o, row_sum, sees):
    """o [M, D] divided by the sums of its rows, and 0 where a row sees no key."""
    ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    # where, not a product with 0: values of keys that no row sees may be infinite
    o_sees = gl.expand_dims(gl.convert_layout(sees.to(gl.int32), ROW), 1) != 0
    return gl.where(o_sees, o * gl.expand_dims(gl.convert_layout(1.0 / row_sum, ROW), 1), 0.0)


@gluon.jit
def store(o, row_sum, sees, first, head, total_q, out, consumer):
    """Starts to store o, normalised, and marks its NaN. out: `Output`."""
    done, width = (), 0
    for i in gl.static_range(len(o)):
        done += (_normalised(o[i], row_sum, sees),)
        width += o[i].shape[1]
    if out.marks is not None:
        mark_rows(done, first, head, total_q, out.marks, consumer)
    tma.store_wait(0)  # the item before has left the buffers
    for i in gl.static_range(len(o)):
        out.buffers[i].index(consumer).store(done[i].to(out.descs[i].dtype))
    fence_async_shared()
    for i in gl.static_range(len(o)):
        tma.async_copy_shared_to_global(out.descs[i], [first, head * width], out.buffers[i].index(consumer))
