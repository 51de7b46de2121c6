"""The consumers of the `hopper` forward: a warpgroup owns 64 rows of a query tile and does both products and the softmax.

A step multiplies q with this step's k while the last step's probabilities are multiplied with the last step's v; the softmax runs
beside the second product. Where the waits stand is what makes it overlap: see Note [Hopper forward] before moving any of them.
"""
from __future__ import annotations

from .gluon_shim import (
    fence_async_shared, gl, gluon, mbarrier, reinterpret, tma_store, tma_store_wait, warpgroup_mma, warpgroup_mma_wait)
from .hopper_forward_scheduler import ENDS, FINAL, STARTS, any_failed, first_key, next_tile
from .hopper_forward_softmax import (
    LN_2, apply_mask, base_2, cap, pack, rescale, softmax, softmax_by_sums, softmax_of_first_tile, unpack)


@gluon.jit
def step(
    q, memory, barriers, it, more, packed, acc, ref, sums, shrink, lo, hi, col0, cols, scale_log2, pre, zero,
    MASKED: gl.constexpr, STAGES: gl.constexpr, CAPPED: gl.constexpr, dtype: gl.constexpr,
    p_layout: gl.constexpr, BY_SUMS: gl.constexpr,
):
    """One key tile. Enters with this step's k in shared memory and the last step's probabilities in `packed`. shrink: what all
    that came before this tile has still to be multiplied by."""
    q_s, k_s, v_s, info_s, failed_s = memory
    info_full, info_empty, q_full, q_empty, k_full, v_full, kv_empty = barriers
    this, last = it % STAGES, (it - 1) % STAGES
    s_running = warpgroup_mma(q, k_s.index(this).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(last), ((it - 1) // STAGES) & 1)
    acc_running = warpgroup_mma(unpack(packed, dtype, p_layout), v_s.index(last), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_running,))
    if CAPPED:
        s = cap(s, pre)
    if MASKED:
        s = apply_mask(s, lo, hi, col0, cols)
    if BY_SUMS:
        # The last tile's sums moved the reference: everything before this tile shrinks.
        sums = sums * shrink
        p, ref, sums, next_shrink = softmax_by_sums(s, ref, sums, scale_log2)
    else:
        p, ref, sums, shrink = softmax(s, ref, sums, scale_log2, MASKED)
        next_shrink = gl.full_like(shrink, 1.0)
    # Waiting for the next k exactly here also ends the basic block: without it ptxas moves the wait for the second product up to
    # before the exponentials, and nothing overlaps.
    mbarrier.wait(k_full.index((it + 1) % STAGES), ((it + 1) // STAGES) & 1, pred=more)
    acc = warpgroup_mma_wait(0, deps=(acc_running,))
    packed = pack(p, dtype)  # not earlier: writing the next product's operand while one runs serialises wgmma
    mbarrier.arrive(kv_empty.index(this), count=1)
    return packed, rescale(acc, shrink), ref, sums, next_shrink


@gluon.jit
def row_pointers(x, batch, head, rows, cols, stride_b, stride_s, stride_h):
    """[rows, D] pointers into the fp32 state, or out, [B, Sq, Hq, D]."""
    # 64 bit: row * stride passes 2^31 at 524,288 rows of 32 heads x 128
    base = x + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    return base + (rows.to(gl.int64) * stride_s)[:, None] + cols[None, :]


@gluon.jit
def store_block(memory, x, desc, batch, row, head):
    """Starts the copy of x [BLOCK_M, D] to rows of desc [B, S, H, D] by way of `memory`, in its dtype. Rows past the last stay out."""
    memory.store(x.to(memory.dtype))
    fence_async_shared()
    tma_store(desc, [batch, row, head, 0], reinterpret(memory, memory.dtype, [1, x.shape[0], 1, x.shape[1]], desc.layout))


@gluon.jit
def lse_pointers(lse, batch, head, rows, stride_b, stride_h):
    # 64 bit: lse has B * Hq * Sq elements
    return lse + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h + rows


@gluon.jit
def consumer(
    warpgroup: gl.constexpr,
    given,  # see the kernel: out_desc, state, lse, bounds and scalars
    memory, barriers,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr, Q_REGISTERS: gl.constexpr,
    FOLD: gl.constexpr, LAST: gl.constexpr, CAPPED: gl.constexpr, dtype: gl.constexpr, BY_SUMS: gl.constexpr,
    ANY_ROWS: gl.constexpr,
):
    q_s, k_s, v_s, info_s, failed_s = memory
    info_full, info_empty, q_full, q_empty, k_full, v_full, kv_empty = barriers
    (out_desc, out, state, lse, k_lo, k_hi, num_q, out_sb, out_ss, out_sh, state_sb, state_ss, state_sh, lse_sb, lse_sh, scale_log2,
     pre) = given
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    own_rows = warpgroup * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, s_layout))
    acc_rows = warpgroup * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, acc_layout))
    cols = gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
    acc_cols = gl.arange(0, D, gl.SliceLayout(0, acc_layout))
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, s_layout)
    it = gl.to_tensor(0)  # steps since the kernel's start: stage and phase of the k and v barriers
    turn = gl.to_tensor(0)  # query tiles since the kernel's start: the same for q
    item = gl.to_tensor(0)  # of the scheduler
    row0, rows, head, batch, steps, high, masked, top, low, mode, item = next_tile(memory, barriers, item, 4)
    while row0 >= 0:
        qs = turn % Q_STAGES
        q_own = q_s.index(qs * CONSUMERS + warpgroup)
        valid = own_rows < rows
        lo = gl.load(k_lo + row0 + own_rows, mask=valid, other=0)
        hi = gl.load(k_hi + row0 + own_rows, mask=valid, other=1 << 30)  # rows behind the tile's see all: finite
        if FOLD:  # the accumulator starts as the running state, with weight 1
            folds = (mode & STARTS) == 0
            acc = gl.load(row_pointers(state, batch, head, row0 + acc_rows, acc_cols, state_sb, state_ss, state_sh),
                          mask=(acc_rows < rows)[:, None] & folds, other=0.0)
            ref = base_2(gl.load(lse_pointers(lse, batch, head, row0 + own_rows, lse_sb, lse_sh), mask=valid & folds,
                                 other=-float("inf")))
        else:
            acc = gl.zeros([BLOCK_M, D], gl.float32, acc_layout)
            ref = gl.full([BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
        mbarrier.wait(q_full.index(qs * CONSUMERS + warpgroup), (turn // Q_STAGES) & 1)
        if Q_REGISTERS:
            q = q_own.load(gl.DotOperandLayout(0, s_layout, 2))
        else:
            q = q_own
        # first key tile: always masked, no second product beside it
        this = it % STAGES
        mbarrier.wait(k_full.index(this), (it // STAGES) & 1)
        s_running = warpgroup_mma(q, k_s.index(this).permute((1, 0)), zero, use_acc=False, is_async=True)
        if Q_STAGES > 1:
            if turn > 0:  # the last tile's output has left its q buffer by now
                tma_store_wait(0)
                mbarrier.arrive(q_empty.index((turn - 1) % Q_STAGES), count=1)
        s = warpgroup_mma_wait(0, deps=(s_running,))
        mbarrier.arrive(kv_empty.index(this), count=1)
        if CAPPED:
            s = cap(s, pre)
        s = apply_mask(s, lo, hi, first_key(0, high, masked, top, low, BLOCK_N), cols)
        p, ref, sums, shrink = softmax_of_first_tile(s, ref, scale_log2, FOLD)
        if FOLD:
            acc = rescale(acc, shrink)
        shrink = gl.full_like(shrink, 1.0)
        packed = pack(p, dtype)
        it += 1
        mbarrier.wait(k_full.index(it % STAGES), (it // STAGES) & 1, pred=steps > 1)
        for j in range(1, masked):
            col0 = first_key(j, high, masked, top, low, BLOCK_N)
            packed, acc, ref, sums, shrink = step(
                q, memory, barriers, it, j + 1 < steps, packed, acc, ref, sums, shrink, lo, hi, col0, cols, scale_log2, pre, zero,
                True, STAGES, CAPPED, dtype, p_layout, False)
            it += 1
        for j in range(gl.maximum(masked, 1), steps):
            packed, acc, ref, sums, shrink = step(
                q, memory, barriers, it, j + 1 < steps, packed, acc, ref, sums, shrink, lo, hi, 0, cols, scale_log2, pre, zero,
                False, STAGES, CAPPED, dtype, p_layout, BY_SUMS)
            it += 1
        last = (it - 1) % STAGES
        mbarrier.wait(v_full.index(last), ((it - 1) // STAGES) & 1)
        acc_running = warpgroup_mma(unpack(packed, dtype, p_layout), v_s.index(last), acc, is_async=True)
        # Beside the last product: lse, and what comes next (this v is freed by the next tile's first signal). What the reference
        # was moved by after the last tile cancels in out, not in lse.
        row_sum = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, s_layout))
        row_ref = gl.convert_layout(gl.max(ref, 1), gl.SliceLayout(1, s_layout))
        inverse = 1.0 / gl.where(row_sum == 0, 1.0, row_sum)
        write = ((mode >> warpgroup) & 1) != 0
        if BY_SUMS:
            row_sum = row_sum * gl.convert_layout(gl.max(shrink, 1), gl.SliceLayout(1, s_layout))
            slot = ((item - 1) & 1) * CONSUMERS + warpgroup
            failed_s.index(slot).store(gl.where((row_sum < float("inf")) | (own_rows >= rows), 0, 1))
            failed = any_failed(failed_s, slot, BLOCK_M, 4)
            write = write & ((failed == 0) | ((mode & FINAL) != 0))
        valid = (own_rows < rows) & write
        at = lse_pointers(lse, batch, head, row0 + own_rows, lse_sb, lse_sh)
        merged = gl.where(row_sum == 0, -float("inf"), (row_ref + gl.log2(row_sum)) * LN_2)
        if FOLD:  # the change alone is rounded: without one, lse stays as it was to the bit
            before = gl.load(at, mask=valid & folds, other=-float("inf"))
            grown = before + ((row_ref - base_2(before)) + gl.log2(row_sum)) * LN_2
            merged = gl.where(before == -float("inf"), merged, grown)
        gl.store(at, merged, mask=valid)
        turn += 1
        next_row0, next_rows, next_head, next_batch, steps, high, masked, top, low, next_mode, item = next_tile(
            memory, barriers, item, 4)
        acc = warpgroup_mma_wait(0, deps=(acc_running,))
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc_layout))[:, None]
        if LAST:
            ends = write
        else:
            ends = write & ((mode & ENDS) != 0)
            # whole 32-byte sectors straight from registers
            gl.store(row_pointers(state, batch, head, row0 + acc_rows, acc_cols, state_sb, state_ss, state_sh), acc,
                     mask=(acc_rows < rows)[:, None] & write & ((mode & ENDS) == 0))
        if ends:
            if ANY_ROWS:
                if (rows >= (warpgroup + 1) * BLOCK_M) | (row0 + rows >= num_q):
                    store_block(q_own, acc, out_desc, batch, row0 + warpgroup * BLOCK_M, head)
                else:  # the copy engine would write the next tile's rows too
                    gl.store(row_pointers(out, batch, head, row0 + acc_rows, acc_cols, out_sb, out_ss, out_sh), acc.to(dtype),
                             mask=(acc_rows < rows)[:, None])
            else:
                store_block(q_own, acc, out_desc, batch, row0 + warpgroup * BLOCK_M, head)
        if Q_STAGES == 1:
            tma_store_wait(0)
            mbarrier.arrive(q_empty.index(0), count=1)
        mode = next_mode
        row0 = next_row0
        rows = next_rows
        head = next_head
        batch = next_batch
    tma_store_wait(0)
