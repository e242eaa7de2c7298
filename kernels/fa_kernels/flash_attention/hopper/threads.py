"""Functions of all values of an accumulator that a thread holds, and numbers that it keeps of each of its rows.

Of a warpgroup's accumulator [64, N] a thread holds N / 2 values: of row i and of row i + 8 in turns a pair of adjacent
columns, the next pair eight columns on. PER_ROW [64, 8] is such an accumulator too, of which it holds four values. A
number of each row fills it, twice in each of four threads, or is the sum of all eight columns.

Rows of fp32 are written to shared memory 8 bytes at a time, by threads of which two and two use the same banks. Where
it does not matter how an accumulator lies there, `in_order_of_threads` takes half the cycles: 16 bytes of a thread side
by side.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import core

PER_ROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


class _OneTuple:
    """A code generator that calls a function with one tuple, and constants, for the arguments it is given."""

    def __init__(self, generator, constants):
        self.generator, self.constants = generator, constants

    def call_JitFunction(self, function, values, kwargs):
        return self.generator.call_JitFunction(function, [core.tuple(values), *self.constants], kwargs)


@core.builtin
def map_threads(function, tensors, constants, _semantic=None, _generator=None):
    """Calls `function` in each thread with a tuple of all its values of `tensors`, one tensor after another.

    It is called with `constants` too, and returns as many values for each tensor of the result. It must be free of side
    effects; a whole warp may vote and shuffle where all of it goes the same way. Gluon's map_elementwise, of Triton 3.6
    and 3.7, has an argument for each value in place of the tuple.
    """
    pack = tensors[0].numel.value // 128
    generator = _OneTuple(_generator, [core.constexpr(x) for x in constants])
    return core.map_elementwise(function, *tensors, pack=pack, _semantic=_semantic, _generator=generator)


@gluon.jit
def along_rows(x, like):
    """x [64, 8] over and over, in the shape and the layout of `like` [64, N]; moves nothing."""
    for _ in gl.static_range(_doublings(like.shape[1])):
        x = gl.reshape(gl.permute(gl.join(x, x), [0, 2, 1]), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)


@gluon.jit
def first_columns(x):
    """The inverse: the first eight columns of x [64, N]."""
    for _ in gl.static_range(_doublings(x.shape[1])):
        x, _ = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    return gl.convert_layout(x, PER_ROW, assert_trivial=True)


@gluon.jit
def in_order_of_threads(x):
    """An accumulator x [64, N] as [2 N, 32] with eight threads' four numbers in a row; moves nothing.

    Of the bits of a number's place there, the lowest is that of its column, then come bit 3 of its row, bits 1 and 2 of
    the column, 0 to 2, 4 and 5 of the row, and the rest of the column.
    """
    x = gl.reshape(x, [4, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(x, [3, 0, 2, 4, 1, 5]), [x.shape[3] * 16, 32])


@gluon.constexpr_function
def _doublings(n):
    return (n // 8).bit_length() - 1
