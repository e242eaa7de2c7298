"""NaN marks: the Hopper kernels mark rows whose results contain NaN, and the portable kernels compute these rows again.

A tile of the Hopper kernels may contain several documents. If a query does not see a key, P of the query and the key is
0. But 0 * NaN is NaN, so NaN in one document reaches all rows of the tile. Isolating NaN in each matmul would cost
registers and time. The Hopper kernels therefore only mark rows whose results are NaN. portable/repair.py then computes
the tiles of marked rows again.

Each mark (0 or 1) covers 64 rows. Marks need no initial value, because every mark is written.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa_kernels.flash_attention.hopper.primitives.barriers import MARKS_BARRIER
from fa_kernels.flash_attention.nan_isolation import ROWS_PER_MARK


@gluon.jit
def mark_rows(columns, first, head, total, marks_ptr, WARPGROUP: gl.constexpr, THREADS: gl.constexpr = 128):
    """Writes the NaN mark of 64 rows of a head, beginning with row `first`.

    The mark is 1 if any element of the 64 rows is NaN or infinite, else 0.
    columns: this warpgroup's results for the rows, as one tensor [64, width] per column block. marks_ptr: points to
    the result of nan_isolation.new_marks. THREADS: the number of threads that hold results for the 64 rows. All
    `THREADS` threads wait for each other in this function. WARPGROUP: a number from 0 to 4 that chooses the barrier.
    Warpgroups that hold different rows need different values of `WARPGROUP`.
    """
    if first < total:
        zeros = gl.sum(columns[0] * 0.0, 1)  # NaN for each row that contains infinity or NaN
        for i in gl.static_range(1, len(columns)):
            zeros += gl.convert_layout(gl.sum(columns[i] * 0.0, 1), zeros.type.layout, assert_trivial=True)
        marks_ptr += head.to(gl.int64) * gl.cdiv(total, ROWS_PER_MARK) + first // ROWS_PER_MARK
        # A thread holds values of two rows. The barrier tells each thread whether any row of any thread contains NaN,
        # so that all threads store the same mark.
        asm: gl.constexpr = f"""{{ .reg .pred p; .reg .b32 mark; setp.nan.f32 p, $2, $3;
            barrier.cta.red.or.aligned.pred p, {MARKS_BARRIER + WARPGROUP}, {THREADS}, p;
            selp.b32 mark, 1, 0, p; st.global.b32 [$4], mark; mov.b32 $0, 0; mov.b32 $1, 0; }}"""
        ptr = marks_ptr.to(gl.int64)
        gl.inline_asm_elementwise(asm, "=r,=r,f,f,l,l,~{memory}", [zeros, ptr], gl.int32, False, 2)
