"""A head's columns in one part or in two, each with descriptors, buffers and accumulators of its own.

Triton's blocks are powers of two. So a head_dim of 96 is worked as 64 columns and 32: padded to 128 it paid for a third
more of every product (forward, 16k tokens, TFLOP/s of an H200: 503, in parts 608; FlashAttention-3 555 beside the one
and 561 beside the other). What is of a head's columns is a tuple of parts in the forward kernel, and these functions
are what it does with them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.flash_attention.hopper.forward import softmax
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows


@gluon.jit
def one_or_two(first, rest):
    """One part, or two where the rest is not None."""
    both = (first,)
    if rest is not None:
        both += (rest,)
    return both


@gluon.jit
def at(buffers, place):
    """Each part's buffer at `place`."""
    there = ()
    for part in gl.static_range(len(buffers)):
        there += (buffers[part].index(place),)
    return there


@gluon.jit
def new_buffers(descs, places):
    """Shared memory [places, rows, columns] for each part that the descriptors load or store."""
    buffers = ()
    for part in gl.static_range(len(descs)):
        buffers += (_new_buffer(descs[part], places),)
    return buffers


@gluon.jit
def _new_buffer(desc, PLACES: gl.constexpr):
    block: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [PLACES, block[0], block[1]], desc.layout)


@gluon.jit
def start_load(descs, row, column, full, buffers, place):
    """Starts to load rows of a head, in all its parts of columns, into buffers [places, rows, columns]."""
    nbytes: gl.constexpr = descs[0].block_type.nbytes + (descs[1].block_type.nbytes if len(descs) == 2 else 0)
    mbarrier.expect(full, nbytes)
    for part in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[part], [row, column], full, buffers[part].index(place))


@gluon.jit
def no_output(q):
    """What o is before the first block, of q's rows and columns."""
    o = ()
    for part in gl.static_range(len(q)):
        o += (_zeros_like(q[part]),)
    return o


@gluon.jit
def _zeros_like(q):
    ROWS_EACH: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = q.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS_EACH, COLUMNS], gl.float32, layout=layout)


@gluon.jit
def begin_scores(q, k_buffers, stage, zeros):
    """Q K^T of a stage, begun."""
    scores = warpgroup_mma(q[0], k_buffers[0].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    for part in gl.static_range(1, len(q)):
        scores = warpgroup_mma(q[part], k_buffers[part].index(stage).permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def operands(p, o, q):
    """p as the product of each part of o takes it, in the same registers, and in q's dtype."""
    of_parts = ()
    for part in gl.static_range(len(o)):
        of_parts += (softmax.operand(p, q[0].dtype, o[part]),)
    return of_parts


@gluon.jit
def begin_values(operands, v_buffers, stage, o):
    """o + P V of a stage, begun."""
    tokens = ()
    for part in gl.static_range(len(o)):
        tokens += (warpgroup_mma(operands[part], v_buffers[part].index(stage), o[part], is_async=True),)
    return tokens


@gluon.jit
def wait_for(tokens):
    """All products that have begun; the values of those of `tokens`."""
    values = warpgroup_mma_wait(0, deps=tokens)
    if len(tokens) == 1:
        values = (values,)
    return values


@gluon.jit
def rescale(o, factor):
    scaled = ()
    for part in gl.static_range(len(o)):
        scaled += (softmax.rescale(o[part], factor),)
    return scaled


@gluon.jit
def _normalised(o, row_sum, sees):
    """o [M, D] over the sums of its rows, and 0 where a row sees nothing."""
    ROW: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    # where, not a product with 0: the values of keys that nobody sees may be infinite
    o_sees = gl.expand_dims(gl.convert_layout(sees.to(gl.int32), ROW), 1) != 0
    return gl.where(o_sees, o * gl.expand_dims(gl.convert_layout(1.0 / row_sum, ROW), 1), 0.0)


@gluon.jit
def store(o, row_sum, sees, first, head, total_q, out, consumer):
    """Starts to store what o's rows come to."""
    descs, buffers, spoiled_ptr = out
    done, width = (), 0
    for part in gl.static_range(len(o)):
        done += (_normalised(o[part], row_sum, sees),)
        width += o[part].shape[1]
    if spoiled_ptr is not None:
        rest = done[len(done) - 1] if len(done) == 2 else None
        mark_rows(done[0], rest, first, head, total_q, spoiled_ptr, consumer)  # type: ignore[misc]
    tma.store_wait(0)  # the item before has left the buffers
    for part in gl.static_range(len(o)):
        buffers[part].index(consumer).store(done[part].to(descs[part].dtype))
    fence_async_shared()
    for part in gl.static_range(len(o)):
        tma.async_copy_shared_to_global(descs[part], [first, head * width], buffers[part].index(consumer))
