"""One of the two warpgroups that compute: 64 keys of the tile against every query tile of the walk. See Note [Hopper backward].

What looks roundabout was measured: what the compiler can hoist out of the masked branch it does hoist, and spills; a product in
flight across the end of the loop makes ptxas serialise all of them.
"""
from __future__ import annotations

from .gluon_shim import (
    fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_reduce_add, tma_store, tma_store_wait, warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def packed(x, dtype: gl.constexpr):
    """x rounded to 16 bits by one instruction per pair, which LLVM cannot take apart (`.to` costs about one per element more)."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def tanh(x):
    """tanh(x) with a small relative error everywhere (Note [Softcap]; the hardware's own is good to 11 bits): near 0 by a
    polynomial fitted on |x| < 0.6, since 1 - 2 e / (1 + e) cancels there."""
    size = gl.abs(x)
    e = gl.exp2(size * (-2.0 * LOG2_E))
    r = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=gl.float32, is_pure=True, pack=1)
    square = x * x
    series = (((-0.005895140580832958 * square + 0.020795956254005432) * square - 0.053783826529979706) * square
              + 0.13331924378871918) * square - 0.33333298563957214
    far = 1.0 - 2.0 * e * r
    return gl.where(size < 0.6, x + x * square * series, gl.where(x < 0.0, -far, far))


@gluon.jit
def dp_product(v, dout, row_delta, zero, by_query: gl.constexpr, BM: gl.constexpr, INIT_DP: gl.constexpr):
    """V dO^T [HALF, BM], started. With INIT_DP the sum starts from -delta, which then takes no registers later on."""
    if INIT_DP:
        start = gl.broadcast(gl.expand_dims(row_delta.reshape([BM]).load(by_query), 0), zero)[0]
        return warpgroup_mma(v, dout.permute((1, 0)), start, is_async=True)
    else:
        return warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def dq_product(ds, k, zero, C: gl.constexpr, ROWS: gl.constexpr, BY_ROWS: gl.constexpr):
    """This consumer's half (of the rows, or of the columns) of dq over all keys of the tile, started; transposed, K^T dS: so a
    warp's store to the row-major buffer meets every bank of shared memory once."""
    if BY_ROWS:
        return warpgroup_mma(k.permute((1, 0)), ds.slice(C * ROWS, ROWS, dim=1), zero, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(k.permute((1, 0)), ds, zero, use_acc=False, is_async=True)


@gluon.jit
def hand_over(dq, dq_s, dq_full, dq_empty, step, dq_scale, C: gl.constexpr, FOLDED: gl.constexpr):
    """dq of step - 1 to the reducer, by way of shared memory."""
    if not FOLDED:
        dq = dq * dq_scale
    mbarrier.wait(dq_empty.index(0), (step & 1) ^ 1)
    dq_s.index(C).permute((1, 0)).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_full.index(C), count=1)


@gluon.jit
def consumer(
    dk, dv, q_lo, q_hi,
    k_s, v_s, q_s, dout_s, lse_s, delta_s, ds_s, dq_s, column_s, bound_s, first_row_s,
    kv_full, q_full, q_empty, ds_full, ds_empty, dq_full, dq_empty, done,
    batch, kv_head, col0, stop, adds, num_steps, exponent_scale, dq_scale, dk_scale, dv_scale, softcap,
    C: gl.constexpr,  # which of the two
    D: gl.constexpr, BM: gl.constexpr, HALF: gl.constexpr, BY_ROWS: gl.constexpr,
    PACKED: gl.constexpr, INIT_DP: gl.constexpr, CAPPED: gl.constexpr, FOLDED: gl.constexpr,
    WITH_DQ: gl.constexpr, LATE: gl.constexpr,
):
    dtype: gl.constexpr = q_s.dtype
    ROWS: gl.constexpr = BM // 2 if BY_ROWS else BM
    COLS: gl.constexpr = D if BY_ROWS else D // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    by_query: gl.constexpr = gl.SliceLayout(0, score_layout)
    by_key: gl.constexpr = gl.SliceLayout(1, score_layout)
    k = k_s.slice(C * HALF, HALF, dim=0)
    v = v_s.slice(C * HALF, HALF, dim=0)
    if BY_ROWS:
        dq_k = k_s
    else:
        dq_k = k_s.slice(C * COLS, COLS, dim=1)
    dk_sum = gl.zeros([HALF, D], gl.float32, sum_layout)
    dv_sum = gl.zeros([HALF, D], gl.float32, sum_layout)
    zero = gl.zeros([HALF, BM], gl.float32, score_layout)
    zero_dq = gl.zeros([COLS, ROWS], gl.float32, dq_layout)
    # Query numbers and bounds wait in shared memory: as constants they would take registers through the whole loop.
    column_s.index(0).store(gl.arange(0, BM, layout=by_query).to(gl.int16))
    keys = col0 + C * HALF + gl.arange(0, HALF, layout=by_key)
    bound_s.index(C).store(gl.load(q_lo + keys, mask=keys < stop, other=2147483647))
    bound_s.index(2 + C).store(gl.load(q_hi + keys, mask=keys < stop, other=0))
    if num_steps > 0:
        mbarrier.wait(kv_full.index(0), 0)
        for step in range(num_steps):
            this = step % 2
            last = (step + 1) % 2
            q = q_s.index(this)
            dout = dout_s.index(this)
            mbarrier.wait(q_full.index(this), (step // 2) & 1)
            s_mma = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            if LATE:
                s = warpgroup_mma_wait(0, deps=[s_mma])
            else:
                dp_mma = dp_product(v, dout, delta_s.index(this), zero, by_query, BM, INIT_DP)
                s = warpgroup_mma_wait(1, deps=[s_mma])
            if CAPPED:
                t = tanh(s * exponent_scale)
                s = t * (softcap * LOG2_E)
            row0 = gl.max(first_row_s.index(this).slice(0, 1).load(gl.SliceLayout(0, score_layout)), 0)
            if row0 >= 0:
                lo = gl.expand_dims(bound_s.index(C).load(by_key) - row0, 1)
                hi = gl.expand_dims(bound_s.index(2 + C).load(by_key) - row0, 1)
                column = gl.expand_dims(column_s.index(0).load(by_query).to(gl.int32), 0)
                s = gl.where((column >= lo) & (column < hi), s, -float("inf"))
            exponent = gl.expand_dims(lse_s.index(this).reshape([BM]).load(by_query), 0)
            if CAPPED:
                p = gl.exp2(s - exponent)
            else:
                p = gl.exp2(s * exponent_scale - exponent)
            p_16 = packed(p, dtype)
            factor_16 = p_16
            if CAPPED:
                # What turns dp into ds holds the slope of the cap too. 1 - t^2 cancels where scores are cut off, as in PyTorch;
                # the slope by itself would take registers that are not there.
                p = p * (1.0 - t * t)
                if PACKED:
                    factor_16 = packed(p, dtype)
            if LATE:
                dp_mma = dp_product(v, dout, delta_s.index(this), zero, by_query, BM, INIT_DP)
            dv_mma = warpgroup_mma(gl.convert_layout(p_16, operand), dout, dv_sum, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp_mma])
            if not INIT_DP:
                dp = dp - gl.expand_dims(delta_s.index(this).reshape([BM]).load(by_query), 0)
            if PACKED:
                ds = (factor_16.to(gl.float32) * dp).to(dtype)
            else:
                ds = (p * dp).to(dtype)
            if WITH_DQ:
                # the dq product of the step before (at the first step of whatever the buffer holds: thrown away)
                mbarrier.wait(ds_full.index(last), (((step + 1) // 2) & 1) ^ 1)
                dq_mma = dq_product(ds_s.index(last), dq_k, zero_dq, C, ROWS, BY_ROWS)
                mbarrier.wait(ds_empty.index(this), (((step + 1) // 2) & 1) ^ 1)
                ds_s.index(this).slice(C * HALF, HALF, dim=0).store(ds)
                fence_async_shared()
                mbarrier.arrive(ds_full.index(this), count=1)
            dk_mma = warpgroup_mma(gl.convert_layout(ds, operand), q, dk_sum, is_async=True)
            if WITH_DQ:
                dv_sum, dq = warpgroup_mma_wait(1, deps=[dv_mma, dq_mma])
                mbarrier.arrive(ds_empty.index(last), count=1)
                hand_over(dq, dq_s, dq_full, dq_empty, step, dq_scale, C, FOLDED)
            else:
                dv_sum = warpgroup_mma_wait(1, deps=[dv_mma])
            dk_sum = warpgroup_mma_wait(0, deps=[dk_mma])
            mbarrier.arrive(q_empty.index(this), count=1)
        if WITH_DQ:
            last = (num_steps - 1) % 2
            mbarrier.wait(ds_full.index(last), ((num_steps - 1) // 2) & 1)
            dq = warpgroup_mma_wait(0, deps=[dq_product(ds_s.index(last), dq_k, zero_dq, C, ROWS, BY_ROWS)])
            hand_over(dq, dq_s, dq_full, dq_empty, num_steps, dq_scale, C, FOLDED)
        # the other consumer is done with q, k, v and dout too: their memory is free
        mbarrier.arrive(done.index(0), count=1)
        mbarrier.wait(done.index(0), 0)
    if (num_steps > 0) | (adds == 0):
        stage: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, D], gl.float32)
        # HALF rows of D fp32 numbers: as much as k or v, or both stages of q at D = 128, one at D = 64
        dk_free = q_s if C == 0 else dout_s
        if BM > HALF:
            dk_free = dk_free.index(0)
        dv_free = k_s if C == 0 else v_s
        reinterpret(dk_free, gl.float32, [HALF, D], stage).store(dk_sum * dk_scale)
        reinterpret(dv_free, gl.float32, [HALF, D], stage).store(dv_sum * dv_scale)
        fence_async_shared()
        dk_block = reinterpret(dk_free, gl.float32, [1, HALF, 1, D], dk.layout)
        dv_block = reinterpret(dv_free, gl.float32, [1, HALF, 1, D], dv.layout)
        if adds:
            tma_reduce_add(dk, [batch, col0 + C * HALF, kv_head, 0], dk_block)
            tma_reduce_add(dv, [batch, col0 + C * HALF, kv_head, 0], dv_block)
        else:
            tma_store(dk, [batch, col0 + C * HALF, kv_head, 0], dk_block)
            tma_store(dv, [batch, col0 + C * HALF, kv_head, 0], dv_block)
        tma_store_wait(0)
