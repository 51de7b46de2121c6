"""The producer of the `hopper` forward: one warp that asks the copy engine (TMA) for q, k and v, as far ahead as room goes."""
from __future__ import annotations

from .gluon_shim import gl, gluon, mbarrier, reinterpret, tma_load
from .hopper_forward_scheduler import first_key, next_tile


@gluon.jit
def producer(
    q_desc,  # IN [B, Sq, Hq, D], blocks of BLOCK_M rows
    k_desc,  # IN [B, Sk, Hkv, D], blocks of BLOCK_N rows
    v_desc,  # IN likewise
    memory, barriers,
    group,  # Hq / Hkv
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
):
    q_s, k_s, v_s, info_s, failed_s = memory
    info_full, info_empty, q_full, q_empty, k_full, v_full, kv_empty = barriers
    it = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    item = gl.to_tensor(0)
    row0, rows, head, batch, steps, high, masked, top, low, mode, item = next_tile(memory, barriers, item, 1)
    while row0 >= 0:
        qs = turn % Q_STAGES
        mbarrier.wait(q_empty.index(qs), ((turn // Q_STAGES) & 1) ^ 1)
        for w in gl.static_range(CONSUMERS):
            mbarrier.expect(q_full.index(qs * CONSUMERS + w), q_desc.block_type.nbytes)
            tma_load(q_desc, [batch, row0 + w * BLOCK_M, head, 0], q_full.index(qs * CONSUMERS + w),
                     reinterpret(q_s.index(qs * CONSUMERS + w), q_desc.dtype, [1, BLOCK_M, 1, D], q_desc.layout))
        kv_head = head // group
        for j in range(steps):
            s = it % STAGES
            row = first_key(j, high, masked, top, low, BLOCK_N)
            mbarrier.wait(kv_empty.index(s), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(k_full.index(s), k_desc.block_type.nbytes)
            tma_load(k_desc, [batch, row, kv_head, 0], k_full.index(s),
                     reinterpret(k_s.index(s), k_desc.dtype, [1, BLOCK_N, 1, D], k_desc.layout))
            it += 1
            # signal number i frees k of step i and v of step i - 1: half as many barriers as one each
            mbarrier.wait(kv_empty.index(it % STAGES), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
            tma_load(v_desc, [batch, row, kv_head, 0], v_full.index(s),
                     reinterpret(v_s.index(s), v_desc.dtype, [1, BLOCK_N, 1, D], v_desc.layout))
        turn += 1
        row0, rows, head, batch, steps, high, masked, top, low, mode, item = next_tile(memory, barriers, item, 1)
