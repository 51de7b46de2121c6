"""The backward kernel itself: shared memory, barriers, and who does what. See Note [Hopper backward]."""
from __future__ import annotations

from .gluon_shim import fence_async_shared, gl, gluon, mbarrier
from .hopper_backward_consumer import consumer
from .hopper_backward_prepare import COPIES as ROW_COPIES
from .hopper_backward_walk import producer, reducer, section_of, walk_of

COPIES = gl.constexpr(ROW_COPIES)
_COUNTS = ["num_heads", "group", "num_kv_total", "section", "num_items"]


@gluon.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["q_lo", "q_hi"])
def backward_kernel(
    q,  # IN    descriptor of [B, Sq, Hq, D], blocks of BM rows
    k,  # IN    descriptor of [B, Sk, Hkv, D], blocks of 2 * HALF rows
    v,  # IN    descriptor of [B, Sk, Hkv, D], blocks of 2 * HALF rows
    dout,  # IN    descriptor of [B, Sq, Hq, D], blocks of BM rows
    row_lse,  # IN    descriptor of [copies * B * Hq, rows] fp32, what the exponent starts from (`prepare_kernel`), blocks of BM
    row_delta,  # IN    descriptor of [copies * B * Hq, rows] fp32, likewise
    dq,  # INOUT descriptor of [B, Sq, Hq, D] fp32, added to; blocks of half a tile. Without WITH_DQ anything
    dk,  # OUT / INOUT descriptor of [B, Sk, Hkv, D] fp32, blocks of HALF rows
    dv,  # OUT / INOUT descriptor of [B, Sk, Hkv, D] fp32, blocks of HALF rows
    q_lo,  # IN    [Sk] int32, non-decreasing
    q_hi,  # IN    [Sk] int32, non-decreasing
    items,  # IN    [num_items, 8] int32, see `key_items`
    exponent_scale,  # softmax_scale * log2(e); CAPPED: softmax_scale / softcap
    dq_scale, dk_scale, dv_scale,  # what remains to be multiplied; dq's is 1 when FOLDED
    softcap,
    num_heads,  # Hq
    group,  # Hq / Hkv
    num_kv_total,  # B * Hkv
    section,  # kv heads walked together
    num_items,  # per kv head
    D: gl.constexpr, BM: gl.constexpr, HALF: gl.constexpr,
    BY_ROWS: gl.constexpr,  # dq of a step: each consumer takes half its rows, else half its columns
    PACKED: gl.constexpr,  # ds is made from p in 16 bits
    INIT_DP: gl.constexpr,  # the sum of dp starts from -delta
    CAPPED: gl.constexpr,  # softcap > 0
    FOLDED: gl.constexpr,  # softmax_scale is part of p
    WITH_DQ: gl.constexpr,  # False: dq is left to another kernel
    LATE: gl.constexpr,  # dp is started after p
    CONSUMER_REGS: gl.constexpr, OTHER_REGS: gl.constexpr,
):
    BN: gl.constexpr = 2 * HALF
    STAGES: gl.constexpr = 2
    rank, head_b = section_of(gl.program_id(0), num_items, num_kv_total, section)
    record = items + rank * 8
    adds = gl.load(record + 6)
    num_kv_heads = num_heads // group
    batch = head_b // num_kv_heads
    kv_head = head_b - batch * num_kv_heads
    col0 = gl.load(record)
    stop = gl.load(record + 7)
    walk, num_steps = walk_of(record, group, BM)

    DQ_ROWS: gl.constexpr = BM // 2 if BY_ROWS else BM
    DQ_COLS: gl.constexpr = D if BY_ROWS else D // 2
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide_32: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_s = gl.allocate_shared_memory(k.dtype, [BN, D], wide)
    v_s = gl.allocate_shared_memory(v.dtype, [BN, D], wide)
    q_s = gl.allocate_shared_memory(q.dtype, [STAGES, BM, D], wide)
    dout_s = gl.allocate_shared_memory(q.dtype, [STAGES, BM, D], wide)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], row_lse.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BM], row_delta.layout)
    ds_s = gl.allocate_shared_memory(q.dtype, [2, BN, BM], wide)
    dq_s = gl.allocate_shared_memory(gl.float32, [2, DQ_ROWS, DQ_COLS], wide_32)
    column_s = gl.allocate_shared_memory(gl.int16, [1, BM], plain)
    bound_s = gl.allocate_shared_memory(gl.int32, [4, HALF], plain)
    first_row_s = gl.allocate_shared_memory(gl.int32, [STAGES, 32], plain)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    dq_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    done = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(kv_full.index(0), count=1)
    mbarrier.init(done.index(0), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    if WITH_DQ:  # else Triton gives what is not used later to the partitions' arguments, which are written right behind
        mbarrier.init(dq_empty.index(0), count=1)
        for i in gl.static_range(2):
            mbarrier.init(ds_full.index(i), count=2)
            mbarrier.init(ds_empty.index(i), count=2)
            mbarrier.init(dq_full.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (consumer, (
            dk, dv, q_lo, q_hi, k_s, v_s, q_s, dout_s, lse_s, delta_s, ds_s, dq_s, column_s, bound_s, first_row_s,
            kv_full, q_full, q_empty, ds_full, ds_empty, dq_full, dq_empty, done,
            batch, kv_head, col0, stop, adds, num_steps, exponent_scale, dq_scale, dk_scale, dv_scale, softcap,
            gl.constexpr(0), D, BM, HALF, BY_ROWS, PACKED, INIT_DP, CAPPED, FOLDED, WITH_DQ, LATE)),
        (consumer, (
            dk, dv, q_lo, q_hi, k_s, v_s, q_s, dout_s, lse_s, delta_s, ds_s, dq_s, column_s, bound_s, first_row_s,
            kv_full, q_full, q_empty, ds_full, ds_empty, dq_full, dq_empty, done,
            batch, kv_head, col0, stop, adds, num_steps, exponent_scale, dq_scale, dk_scale, dv_scale, softcap,
            gl.constexpr(1), D, BM, HALF, BY_ROWS, PACKED, INIT_DP, CAPPED, FOLDED, WITH_DQ, LATE)),
        (producer, (
            q, k, v, dout, row_lse, row_delta, k_s, v_s, q_s, dout_s, lse_s, delta_s, first_row_s, kv_full, q_full, q_empty,
            batch, kv_head, group, num_heads, num_kv_total, col0, walk, num_steps, D, BM, BN, COPIES)),
        (reducer, (dq, dq_s, dq_full, dq_empty, batch, kv_head, group, walk, num_steps, D, BM, BY_ROWS, WITH_DQ)),
    ], [4, 1, 1], [CONSUMER_REGS, OTHER_REGS, OTHER_REGS])
