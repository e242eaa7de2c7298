"""The accumulators of the forward kernel's output o, one for each column block of a head, and operations on them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from fa_kernels.flash_attention.hopper.forward import softmax
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout
from fa_kernels.flash_attention.structure import structure


@structure
class Output:
    """The destination of o. Tuples have one entry for each column block of a head."""

    descs: tuple
    buffers: tuple
    marks: gl.tensor  # pointer to NaN marks (nan_marks.py), or None


@gluon.jit
def no_output(q):
    """Returns a tuple of accumulators of zeros, one for each column block of q."""
    o = ()
    for i in gl.static_range(len(q)):
        o += (_zeros_like(q[i]),)
    return o


@gluon.jit
def _zeros_like(q):
    ROWS_EACH: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = q.shape[1]
    return gl.zeros([ROWS_EACH, COLUMNS], gl.float32, layout=accumulator_layout(COLUMNS))


@gluon.jit
def operands(p, o, q):
    """Returns p as the first operand of the matmul P V, once for each column block of o, in a tuple.

    p has the dtype of q. The function moves no data between threads.
    """
    converted = ()
    for i in gl.static_range(len(o)):
        converted += (softmax.operand(p, q[0].dtype, o[i]),)
    return converted


@gluon.jit
def begin_values(operands, v_buffers, stage, o):
    """Starts the matmuls that add P V to o. `stage` is the place of V in its ring buffer."""
    tokens = ()
    for i in gl.static_range(len(o)):
        tokens += (warpgroup_mma(operands[i], v_buffers[i].index(stage), o[i], is_async=True),)
    return tokens


@gluon.jit
def wait_for(tokens):
    """Waits for all matmuls, and returns a tuple of their results. `tokens` is the tuple returned by `begin_values`."""
    values = warpgroup_mma_wait(0, deps=tokens)
    if len(tokens) == 1:
        values = (values,)
    return values


@gluon.jit
def rescale(o, factor):
    """Multiplies the rows of o by `factor`."""
    scaled = ()
    for i in gl.static_range(len(o)):
        scaled += (softmax.rescale(o[i], factor),)
    return scaled


@gluon.jit
def _normalised(o, row_sum, sees):
    """Divides each row of o [M, D] by the row's softmax sum, and sets rows that see no key to 0."""
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    # For a row that sees no key, o may be infinite, and o multiplied by 0 would be NaN. gl.where gives 0.
    o_sees = gl.expand_dims(gl.convert_layout(sees.to(gl.int32), ROW_LAYOUT), 1) != 0
    return gl.where(o_sees, o * gl.expand_dims(gl.convert_layout(1.0 / row_sum, ROW_LAYOUT), 1), 0.0)


@gluon.jit
def store(o, row_sum, sees, first, head, total_q, out, consumer):
    """Normalises o, marks rows that contain NaN, and starts to store o by TMA. `out` is an `Output`."""
    done, width = (), 0
    for i in gl.static_range(len(o)):
        done += (_normalised(o[i], row_sum, sees),)
        width += o[i].shape[1]
    if out.marks is not None:
        mark_rows(done, first, head, total_q, out.marks, consumer)
    tma.store_wait(0)  # waits until TMA has read the o of the previous work item from the buffers
    for i in gl.static_range(len(o)):
        out.buffers[i].index(consumer).store(done[i].to(out.descs[i].dtype))
    fence_async_shared()
    for i in gl.static_range(len(o)):
        tma.async_copy_shared_to_global(out.descs[i], [first, head * width], out.buffers[i].index(consumer))
