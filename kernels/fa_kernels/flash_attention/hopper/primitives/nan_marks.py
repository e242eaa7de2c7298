"""Marks of NaN for the portable kernels to repair.

The Hopper kernels multiply across the edges of documents. P of an invisible pair is 0, but 0 times NaN is NaN, so NaN
of one document reaches each row of a tile that holds it too. To isolate NaN in each product would cost registers and
time. Instead the kernels mark rows that end as NaN, and the portable kernels compute the tiles of those rows again.

The owner of 64 rows writes their mark, 0 or 1, so marks need no initial value.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_kernels.flash_attention.hopper.primitives.barriers import MARKS_BARRIER
from fa_kernels.flash_attention.nan_isolation import ROWS_PER_MARK


@gluon.jit
def mark_rows(columns, first, head, total, marks_ptr, WARPGROUP: gl.constexpr, THREADS: gl.constexpr = 128):
    """Marks (nan_isolation.new_marks) the 64 rows of a head from `first` on: 1 if one has NaN or infinity, else 0.

    columns: what the warpgroup holds of those rows, a tuple of [64, D] for the columns of a head. THREADS: those of all
    warpgroups that hold a part of the rows; they meet here. WARPGROUP: a number below 5 that no others use.
    """
    if first < total:
        zeros = gl.sum(columns[0] * 0.0, 1)  # NaN where a row is not finite
        for i in gl.static_range(1, len(columns)):
            zeros += gl.convert_layout(gl.sum(columns[i] * 0.0, 1), zeros.type.layout, assert_trivial=True)
        marks_ptr += head.to(gl.int64) * gl.cdiv(total, ROWS_PER_MARK) + first // ROWS_PER_MARK
        # A thread holds two rows. The barrier tells each thread whether any has NaN, and all store the same mark.
        asm: gl.constexpr = f"""{{ .reg .pred p; .reg .b32 mark; setp.nan.f32 p, $2, $3;
            barrier.cta.red.or.aligned.pred p, {MARKS_BARRIER + WARPGROUP}, {THREADS}, p;
            selp.b32 mark, 1, 0, p; st.global.b32 [$4], mark; mov.b32 $0, 0; mov.b32 $1, 0; }}"""
        ptr = marks_ptr.to(gl.int64)
        gl.inline_asm_elementwise(asm, "=r,=r,f,f,l,l,~{memory}", [zeros, ptr], gl.int32, False, 2)
