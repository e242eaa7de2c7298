"""The consumer warpgroups of the fused backward kernel (fused.py). A consumer computes dK and dV of 64 keys.

A step processes one block of queries: it computes S^T = K Q^T, dP^T = V dO^T and dS^T. A step also writes dS^T for the
dQ warpgroup, adds P^T dO to dV, and adds dS^T Q to dK. The function `_step` computes S of the step that it processes.
The function `_step_ahead` receives the S that the previous step has computed, and computes S of the next step. In
`_step_ahead`, the tensor cores work while the consumer computes the exponentials and dS.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fa_kernels.device import LOG2_E
from fa_kernels.flash_attention.hopper.backward.items import (
    Barriers,
    Buffers,
    Visible,
    first_step,
    hide,
    locate_item,
    next_step,
    posted_item,
    visible_queries,
)
from fa_kernels.flash_attention.hopper.primitives import tma
from fa_kernels.flash_attention.hopper.primitives.barriers import (
    CONSUMERS_BARRIER,
    hand_back,
    hand_over,
    meet,
    named_barrier,
)
from fa_kernels.flash_attention.hopper.primitives.columns import (
    begin_scores,
    begin_scores_at,
    both_at,
    rows_at,
    width_of,
    with_rest_at,
)
from fa_kernels.flash_attention.hopper.primitives.nan_marks import mark_rows
from fa_kernels.flash_attention.hopper.primitives.queue import field, read
from fa_kernels.flash_attention.hopper.primitives.registers import accumulator_layout, operand_layout
from fa_kernels.flash_attention.hopper.primitives.ring import Ring, place_of, wait_full
from fa_kernels.flash_attention.hopper.primitives.work import Ranges, Scale
from fa_kernels.flash_attention.scores import cap
from fa_kernels.flash_attention.structure import structure


@structure
class Work:
    """The values that both consumers of a program share."""

    buffers: Buffers
    barriers: Barriers
    ds: Ring  # buffers [DS_STAGES, keys, queries]
    ranges: Ranges
    marks: gl.tensor  # pointer to NaN marks (nan_marks.py), or None
    scale: Scale


@structure
class Keys:
    """K and V of a consumer's 64 keys, and the queries that see each key. All steps of an item use the same `Keys`."""

    k: tuple  # one tile [64, columns] per column block, in registers or in shared memory
    v: tuple
    visible: Visible  # the queries that see each key


@structure
class Step:
    """One step (one block of queries of one head), and its places in the ring buffers."""

    number: gl.tensor  # the index of the step, counted over all items of the program
    m: gl.tensor  # the first query
    stage: gl.tensor  # the place of Q and dO in their ring buffers
    phase: gl.tensor  # the phase of the mbarriers of Q and dO
    ds_stage: gl.tensor  # the place of dS in its ring buffer
    ds_phase: gl.tensor


@structure
class Gradients:
    """The accumulators of dK and dV, [64, columns] each, for one column block."""

    dk: gl.tensor
    dv: gl.tensor


@structure
class Probabilities:
    """P^T [64, M] of one step, in the two forms that the gradients dV and dS need."""

    low: gl.tensor  # P^T in 16 bits, the operand of the matmul dV
    factor: gl.tensor  # P^T times the derivative of the soft cap (1 without a soft cap); dS^T = factor * (dP - delta)^T


@gluon.jit
def _no_gradients(buffers, KEYS: gl.constexpr):
    """Returns a tuple with one `Gradients` of zeros for each column block."""
    gradients = ()
    for i in gl.static_range(len(buffers.k)):
        gradients += (_zero_gradients(KEYS, buffers.k[i].shape[2]),)
    return gradients


@gluon.jit
def _zero_gradients(KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    dk = gl.zeros([KEYS, COLUMNS], gl.float32, layout=accumulator_layout(COLUMNS))
    dv = gl.zeros([KEYS, COLUMNS], gl.float32, layout=accumulator_layout(COLUMNS))
    return Gradients(dk, dv)


@gluon.jit
def _read_rows(rows, stage, SCORES_LAYOUT: gl.constexpr):
    """Loads lse or delta of one step from shared memory, one value for each column (query) of S^T."""
    return rows.index(stage).load(gl.SliceLayout(0, SCORES_LAYOUT))


@gluon.jit
def _probabilities(
    scores, lse, m, visible, scale, dtype: gl.constexpr, BF16_PRODUCTS: gl.constexpr, HAS_SOFTCAP: gl.constexpr
):  # fmt: skip
    """Computes `Probabilities` from S^T [64, M]. `m` is the first query of the step."""
    lse = gl.expand_dims(lse, 0)
    if HAS_SOFTCAP:
        scores, t = cap(scores, scale.softmax, scale.softcap, dtype)
        p = gl.exp2(scores - lse)
    else:
        p = gl.exp2(scores * (scale.softmax * LOG2_E) - lse)
    p = hide(p, visible, m)
    p_low = p.to(dtype)
    factor = p_low if BF16_PRODUCTS else p
    if HAS_SOFTCAP:
        slope = 1.0 - t * t
        factor = _product(p_low, slope.to(dtype)) if BF16_PRODUCTS else p * slope
    return Probabilities(p_low, factor)


@gluon.jit
def _product(a, b):
    """Multiplies two bf16 tensors, two elements per instruction.

    Triton's operator `*` would compute the product in fp32 and then round it.
    """
    gl.static_assert(a.dtype == gl.bfloat16 and b.dtype == gl.bfloat16)
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.bfloat16, True, 2)


@gluon.jit
def _begin_dv(gradients, p_low, do):
    """Starts the matmuls dV += P^T dO."""
    begun = ()
    for i in gl.static_range(len(gradients)):
        dv = gradients[i].dv
        p = gl.convert_layout(p_low, operand_layout(dv.shape[1]))
        begun += (Gradients(gradients[i].dk, warpgroup_mma(p, do[i], dv, is_async=True)),)
    return begun


@gluon.jit
def _begin_dk(gradients, ds, q):
    """Starts the matmuls dK += dS^T Q."""
    begun = ()
    for i in gl.static_range(len(gradients)):
        dk = gradients[i].dk
        ds_operand = gl.convert_layout(ds, operand_layout(dk.shape[1]))
        begun += (Gradients(warpgroup_mma(ds_operand, q[i], dk, is_async=True), gradients[i].dv),)
    return begun


@gluon.jit
def _wait_for_gradients(gradients, others):
    """Waits until all matmuls are complete, and returns their accumulators as (gradients, others).

    The argument `others` is a tuple of the accumulators of all matmuls except the matmuls for dK and dV.
    """
    deps = others
    for i in gl.static_range(len(gradients)):
        deps += (gradients[i].dv,)
    for i in gl.static_range(len(gradients)):
        deps += (gradients[i].dk,)
    done = warpgroup_mma_wait(0, deps=deps)
    N_OTHERS: gl.constexpr = len(others)
    N_COLUMNS: gl.constexpr = len(gradients)
    waited = ()
    for i in gl.static_range(N_COLUMNS):
        waited += (Gradients(done[N_OTHERS + N_COLUMNS + i], done[N_OTHERS + i]),)
    return waited, done[:N_OTHERS]


@gluon.jit
def _write_ds(p, dp, delta, ds, stage, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Computes dS^T [64, M] of this consumer's keys, writes it to the ring buffer, and returns it in 16 bits."""
    KEYS: gl.constexpr = dp.shape[0]
    difference = dp - gl.expand_dims(delta, 0)
    if CONFIG.bf16_products:
        values = _product(p.factor, difference.to(p.low.dtype))
    else:
        values = (p.factor * difference).to(p.low.dtype)
    ds.buffers.index(stage).slice(CONSUMER * KEYS, KEYS, dim=0).store(values)
    if CONFIG.each_hands_over:
        hand_over(ds.full.index(stage))
    else:
        fence_async_shared()
        mbarrier.arrive(ds.full.index(stage), count=1)
    return values


@gluon.jit
def _step(gradients, step, keys, work, CONSUMER: gl.constexpr, CONFIG: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """Processes one step.

    Returns (gradients, next_stage, next_phase). The stage and the phase of Q and dO are explained in `Step`.
    The matmul dP starts when P has replaced S in the registers, because the registers cannot hold both S and dP.
    """
    buffers, barriers = work.buffers, work.barriers
    stage = step.stage
    q, do = both_at(buffers.q, buffers.do, stage)  # [M, columns]
    KEYS: gl.constexpr = keys.k[0].shape[0]
    BLOCK_M: gl.constexpr = q[0].shape[0]
    SCORES_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    N_COLUMNS: gl.constexpr = len(q)
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES_LAYOUT)
    mbarrier.wait(barriers.q_full.index(stage), step.phase)
    scores = begin_scores(keys.k, q, no_scores)  # [64, M]
    if CONFIG.lse_early:
        lse = _read_rows(buffers.lse, stage, SCORES_LAYOUT)
    mbarrier.wait(barriers.do_full.index(stage), step.phase)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if not CONFIG.lse_early:
        lse = _read_rows(buffers.lse, stage, SCORES_LAYOUT)
    p = _probabilities(scores, lse, step.m, keys.visible, work.scale, q[0].dtype, CONFIG.bf16_products, HAS_SOFTCAP)
    next_stage, next_phase = _next_place(step, step.number + 1, buffers.lse.shape[0])
    dp = begin_scores(keys.v, do, no_scores)
    if CONFIG.bf16_products:
        gradients = _begin_dv(gradients, p.low, do)
    if CONFIG.delta_early:
        delta = _read_rows(buffers.delta, stage, SCORES_LAYOUT)
    dp = warpgroup_mma_wait(N_COLUMNS if CONFIG.bf16_products else 0, deps=[dp])
    work.ds.wait_empty(step.ds_stage, step.ds_phase)
    if not CONFIG.delta_early:
        delta = _read_rows(buffers.delta, stage, SCORES_LAYOUT)
    ds = _write_ds(p, dp, delta, work.ds, step.ds_stage, CONSUMER, CONFIG)
    if not CONFIG.bf16_products:  # dV starts only now: registers cannot hold P in fp32 and in 16 bits
        gradients = _begin_dv(gradients, p.low, do)
    gradients = _wait_for_gradients(_begin_dk(gradients, ds, q), ())[0]
    hand_back(barriers.empty.index(stage))
    return gradients, next_stage, next_phase


@gluon.jit
def _step_ahead(
    scores, gradients, step, stop, keys, work, CONSUMER: gl.constexpr, CONFIG: gl.constexpr, HAS_SOFTCAP: gl.constexpr
):  # fmt: skip
    """Processes one step whose S is complete, and computes S of the next step at the same time.

    Returns (next_scores, gradients, next_stage, next_phase). The stage and the phase of Q and dO are explained in
    `Step`. In the last step of an item, the returned S is computed from arbitrary data, and the caller does not use
    this S.
    """
    buffers, barriers = work.buffers, work.barriers
    stage = step.stage
    q, do = both_at(buffers.q, buffers.do, stage)  # [M, columns]
    SCORES_LAYOUT: gl.constexpr = scores.type.layout
    N_COLUMNS: gl.constexpr = len(q)
    no_scores = gl.zeros_like(scores)
    if CONFIG.lse_early:
        lse = _read_rows(buffers.lse, stage, SCORES_LAYOUT)
    mbarrier.wait(barriers.do_full.index(stage), step.phase)
    dp = begin_scores(keys.v, do, no_scores)  # [64, M]
    if not CONFIG.lse_early:
        lse = _read_rows(buffers.lse, stage, SCORES_LAYOUT)
    p = _probabilities(scores, lse, step.m, keys.visible, work.scale, q[0].dtype, CONFIG.bf16_products, HAS_SOFTCAP)
    following = step.number + 1
    next_stage, next_phase = _next_place(step, following, buffers.lse.shape[0])
    q_next = buffers.q[0].index(next_stage)
    mbarrier.wait(barriers.q_full.index(next_stage), next_phase, pred=following < stop)
    if CONFIG.after_dp:  # ptxas interleaves the matmul S of the next step with dS, because no wait separates them
        gradients = _begin_dv(gradients, p.low, do)
        work.ds.wait_empty(step.ds_stage, step.ds_phase)
        dp = warpgroup_mma_wait(N_COLUMNS, deps=[dp])
        scores = begin_scores_at(keys.k, q_next, buffers.q, next_stage, no_scores)
    else:
        scores = begin_scores_at(keys.k, q_next, buffers.q, next_stage, no_scores)
        gradients = _begin_dv(gradients, p.low, do)
        dp = warpgroup_mma_wait(2 * N_COLUMNS, deps=[dp])
        work.ds.wait_empty(step.ds_stage, step.ds_phase)
    delta = _read_rows(buffers.delta, stage, SCORES_LAYOUT)
    ds = _write_ds(p, dp, delta, work.ds, step.ds_stage, CONSUMER, CONFIG)
    gradients, others = _wait_for_gradients(_begin_dk(gradients, ds, q), (scores,))
    hand_back(barriers.empty.index(stage))
    return others[0], gradients, next_stage, next_phase


@gluon.jit
def _next_place(step, following, STAGES: gl.constexpr):
    """Returns the fields `stage` and `phase` of the `Step` that follows `step`. `following` is `step.number + 1`."""
    if STAGES & (STAGES - 1) == 0:
        stage, phase = place_of(following, STAGES)
    else:
        is_last = step.stage == STAGES - 1
        stage, phase = gl.where(is_last, 0, step.stage + 1), gl.where(is_last, step.phase ^ 1, step.phase)
    return stage, phase


@gluon.jit
def _as_operands(tiles, LAYOUT: gl.constexpr):
    """Loads the tiles from shared memory into registers, as first operands of matmuls."""
    values = ()
    for i in gl.static_range(len(tiles)):
        values += (tiles[i].load(LAYOUT),)
    return values


@gluon.jit
def _consume_item(
    item, item_number, done, CONSUMER: gl.constexpr, out_descs, work, CONFIG: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    GROUP: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """Computes dK, dV and dS^T for half of an item's keys.

    Consumer 0 stores dK of all keys of the item, and consumer 1 stores dV of all keys of the item.
    item_number: the number of items that this program has already processed.
    done: the number of steps of all earlier items of this program.
    Returns `done` plus the number of steps of this item.
    """
    buffers, barriers = work.buffers, work.barriers
    STAGES: gl.constexpr = buffers.q[0].shape[0]
    DS_STAGES: gl.constexpr = work.ds.buffers.shape[0]
    ITEMS: gl.constexpr = buffers.k[0].shape[0]
    BLOCK_M: gl.constexpr = buffers.q[0].shape[1]
    KEYS: gl.constexpr = buffers.k[0].shape[1] // 2
    SCORES_LAYOUT: gl.constexpr = accumulator_layout(BLOCK_M)
    # If `STAGES` is not a power of two, each step increments `stage`. A division by `STAGES` would need more registers.
    COUNTED: gl.constexpr = STAGES & (STAGES - 1) != 0
    KEYS_FIT: gl.constexpr = CONFIG.ahead and len(buffers.k) == 1  # whether K and V are kept in registers
    m, head = first_step(item, GROUP, BLOCK_M, DESCENDING)
    stop = done + item.n_steps
    place = item_number % ITEMS
    k_first, v_first = buffers.k[0].index(place), buffers.v[0].index(place)
    first = item.first + CONSUMER * KEYS  # the first of this consumer's keys
    visible = visible_queries(work.ranges, first, KEYS, gl.SliceLayout(1, SCORES_LAYOUT))
    k_tiles, v_tiles = with_rest_at((k_first,), buffers.k, place), with_rest_at((v_first,), buffers.v, place)
    k, v = rows_at(k_tiles, CONSUMER * KEYS, KEYS), rows_at(v_tiles, CONSUMER * KEYS, KEYS)  # [64, columns]
    gradients = _no_gradients(buffers, KEYS)
    stage, phase = place_of(done, STAGES)
    wait_full(barriers.kv_full, item_number)
    keys = Keys(k, v, visible)
    if KEYS_FIT:
        keys = Keys(_as_operands(k, operand_layout(BLOCK_M)), _as_operands(v, operand_layout(BLOCK_M)), visible)
    if CONFIG.ahead:
        mbarrier.wait(barriers.q_full.index(stage), phase, pred=item.n_steps > 0)
        no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES_LAYOUT)
        scores = begin_scores_at(keys.k, buffers.q[0].index(stage), buffers.q, stage, no_scores)
        scores = warpgroup_mma_wait(0, deps=[scores])
    if ITEMS > 1:
        if item_number > 0:  # frees the previous item's buffers of K and V, after TMA has read dK and dV from them
            tma.store_wait(0)
            hand_back(barriers.kv_empty.index((item_number - 1) % ITEMS))
    meet()  # without this call, the waits above would make Triton insert a barrier in every step
    for number in range(done, stop):
        if not COUNTED:
            stage, phase = place_of(number, STAGES)
        ds_stage, ds_phase = stage, phase
        if DS_STAGES != STAGES:
            ds_stage, ds_phase = place_of(number, DS_STAGES)
        step = Step(number, m, stage, phase, ds_stage, ds_phase)
        if CONFIG.ahead:
            scores, gradients, next_stage, next_phase = _step_ahead(
                scores, gradients, step, stop, keys, work, CONSUMER, CONFIG, HAS_SOFTCAP
            )
        else:
            gradients, next_stage, next_phase = _step(gradients, step, keys, work, CONSUMER, CONFIG, HAS_SOFTCAP)
        m, head = next_step(m, head, item, GROUP, BLOCK_M, DESCENDING)
        if COUNTED:
            stage, phase = next_stage, next_phase
    if work.marks is not None:
        mark_rows(_sums_of(gradients), first, item.kv_head, work.ranges.total, work.marks, CONSUMER)
    _store_gradients(item, gradients, k, v, k_tiles, v_tiles, stop, CONSUMER, out_descs, work)
    return stop


@gluon.jit
def _sums_of(gradients):
    """Computes the elementwise sum dK + dV for each column block, and returns a tuple of these sums.

    The sums are used only to find NaN: a sum is NaN if dK or dV is NaN.
    """
    sums = ()
    for i in gl.static_range(len(gradients) - 1, -1, -1):
        sums = (gradients[i].dk + gradients[i].dv,) + sums  # noqa: RUF005  Gluon knows no stars
    return sums


@gluon.jit
def _store_gradients(item, gradients, k, v, k_tiles, v_tiles, stop, CONSUMER: gl.constexpr, out_descs, work):
    """Starts to store dK and dV in global memory by TMA, through the shared-memory buffers of K and V.

    k_tiles and v_tiles: all 128 rows of each buffer of K and V. k and v: this consumer's 64 rows of each buffer.
    """
    dtype: gl.constexpr = k[0].dtype
    HEAD_DIM: gl.constexpr = width_of(k)
    meet()  # waits until all warps of this consumer have read the consumer's half of K and V
    for i in gl.static_range(len(gradients)):
        v[i].store(gradients[i].dv.to(dtype))
    final = stop - 1
    wait_full(work.ds.empty, final, pred=item.n_steps > 0)  # waits until the dQ warpgroup has read K
    for i in gl.static_range(len(gradients)):
        k[i].store((gradients[i].dk * work.scale.softmax).to(dtype))
    fence_async_shared()
    named_barrier(CONSUMERS_BARRIER, 256)  # waits until both consumers have written dK and dV to shared memory
    tiles = k_tiles if CONSUMER == 0 else v_tiles
    for i in gl.static_range(len(tiles)):
        tma.async_copy_shared_to_global(out_descs[i], [item.first, item.kv_head * HEAD_DIM], tiles[i])


@gluon.jit
def consume(
    CONSUMER: gl.constexpr, out_descs, work, tile_order, queue, CONFIG: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    GROUP: gl.constexpr, ALIGNMENT: gl.constexpr, DESCENDING: gl.constexpr,
):  # fmt: skip
    """Runs a consumer warpgroup over all items of the queue, or over the program's only item if there is no queue."""
    BLOCK_M: gl.constexpr = work.buffers.q[0].shape[1]
    BLOCK_N: gl.constexpr = work.buffers.k[0].shape[1]
    if queue is None:
        item = locate_item(gl.program_id(0), tile_order, work.ranges, GROUP, BLOCK_M, BLOCK_N, ALIGNMENT)
        _consume_item(item, 0, 0, CONSUMER, out_descs, work, CONFIG, HAS_SOFTCAP, GROUP, DESCENDING)
    else:
        item_number, done = 0, 0
        fields = read(queue, item_number)
        while field(fields, 0) >= 0:
            item = posted_item(fields)
            done = _consume_item(
                item, item_number, done, CONSUMER, out_descs, work, CONFIG, HAS_SOFTCAP, GROUP, DESCENDING
            )
            item_number += 1
            fields = read(queue, item_number)
    tma.store_wait(0)
