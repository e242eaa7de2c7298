"""Marks of NaN for the portable kernels to repair: the Hopper kernels multiply across the edges of documents.

An invisible pair has a P of 0 (a dS of 0 or NaN), but 0 times the NaN of a neighbour is NaN, in every row of the tile.
To keep NaN out of each product, as masks.contain does, would cost registers and time in every loop over masked blocks.
Instead, rows that end as NaN are marked, and the portable kernels, which contain NaN, compute their tiles again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.flash_attention.portable.launch import SPOILED_ROWS


@gluon.jit
def mark_spoiled(x, first, head, total, spoiled_ptr):
    """Marks (portable.launch.new_marks) the 64 rows [M, D] of a head from `first` on, if one has NaN or infinity."""
    if first < total:
        zeros = gl.sum(x * 0.0, 1)  # NaN where a row is not finite
        spoiled_ptr += head.to(gl.int64) * gl.cdiv(total, SPOILED_ROWS) + first // SPOILED_ROWS
        # by every thread that holds such a row: gl.store would pick one of each four by its number, and ptxas would
        # hold what that is made of through the loop over blocks (120 bytes of spills more at head_dim 64)
        asm: gl.constexpr = "{ .reg .pred p; setp.nan.f32 p, $1, $1; @p st.global.u32 [$2], 1; mov.u32 $0, 0; }"
        gl.inline_asm_elementwise(asm, "=r,f,l,~{memory}", [zeros, spoiled_ptr.to(gl.int64)], gl.int32, False, 1)
