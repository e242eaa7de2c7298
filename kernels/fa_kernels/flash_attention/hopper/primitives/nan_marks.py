"""Marks of NaN for the portable kernels to repair: the Hopper kernels multiply across the edges of documents.

An invisible pair has a P of 0 (a dS of 0 or NaN), but 0 times the NaN of a neighbour is NaN, in every row of the tile.
To keep NaN out of each product, as nan_isolation.contain does, would cost registers and time in every loop over masked
blocks. Instead, rows that end as NaN are marked, and the portable kernels, which contain NaN, compute their tiles
again.

Each mark is written once, by those that own its rows, whether they are spoiled or not: so nobody zeroes marks before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_kernels.flash_attention.hopper.primitives.barriers import MARKS_BARRIER
from fa_kernels.flash_attention.nan_isolation import ROWS_PER_MARK


@gluon.jit
def mark_rows(x, rest, first, head, total, spoiled_ptr, GROUP: gl.constexpr, THREADS: gl.constexpr = 128):
    """Marks (nan_isolation.new_marks) the 64 rows of a head from `first` on: 1 if one has NaN or infinity, else 0.

    x and rest: what the warpgroup holds of those rows, [64, D] and [64, D_2]; rest may be None. Waits until THREADS
    threads, the warpgroups that hold all that the mark is of, are here; others have another GROUP, below 5.
    """
    if first < total:
        zeros = gl.sum(x * 0.0, 1)  # NaN where a row is not finite
        if rest is not None:
            zeros += gl.convert_layout(gl.sum(rest * 0.0, 1), zeros.type.layout, assert_trivial=True)
        spoiled_ptr += head.to(gl.int64) * gl.cdiv(total, ROWS_PER_MARK) + first // ROWS_PER_MARK
        # a thread has two rows; the barrier tells every one whether any has NaN, and all store that
        asm: gl.constexpr = f"""{{ .reg .pred p; .reg .b32 mark; setp.nan.f32 p, $2, $3;
            barrier.cta.red.or.aligned.pred p, {MARKS_BARRIER + GROUP}, {THREADS}, p;
            selp.b32 mark, 1, 0, p; st.global.b32 [$4], mark; mov.b32 $0, 0; mov.b32 $1, 0; }}"""
        ptr = spoiled_ptr.to(gl.int64)
        gl.inline_asm_elementwise(asm, "=r,=r,f,f,l,l,~{memory}", [zeros, ptr], gl.int32, False, 2)
