"""Which query tiles a program meets, and the two warps that move data for them: the producer (loads) and the reducer (dq).

See Note [Hopper backward]. Row numbers and tensor map coordinates are 32 bit; addresses are the hardware's own, 64 bit.
"""
from __future__ import annotations

from .gluon_shim import gl, gluon, mbarrier, reinterpret, tma_load, tma_reduce_add, tma_store_wait


@gluon.jit
def section_of(index, num_items, num_heads, section):
    """(item, head) of a launch index: sections of kv heads in turn, in each the first item of all its heads first. num_heads counts
    batches too."""
    first = index // (section * num_items) * section
    heads = gl.minimum(section, num_heads - first)
    within = index - first * num_items
    return within // heads, first + within % heads


@gluon.jit
def walk_of(record, group, BM: gl.constexpr):
    """The walk of a program over its query tiles, from its record in the table (see `key_items`), and its number of steps.

    (a, b, c, d, s, n): query rows [a, b) and [c, d) lie in partial tiles, [b, c) in tiles that all its keys see, which are walked
    from s round; the n partial steps, over all heads of the group, come first.
    """
    a = gl.load(record + 1)
    b = gl.load(record + 2)
    c = gl.load(record + 3)
    d = gl.load(record + 4)
    partial = ((b - a) + (d - c)) // BM * group
    return (a, b, c, d, gl.load(record + 5), partial), partial + (c - b) // BM * group


@gluon.jit
def tile_at(step, walk, group, BM: gl.constexpr):
    """(first row, head within the group, whether it is partial) of the program's step-th query tile."""
    a, b, c, d, s, n = walk
    partial = step < n
    index = gl.where(partial, step, step - n)
    per_head = gl.maximum(gl.where(partial, ((b - a) + (d - c)) // BM, (c - b) // BM), 1)
    head = index // per_head
    row = (index - head * per_head) * BM
    row_partial = gl.where(row < b - a, a + row, c + row - (b - a))
    row_full = s + row
    row_full = gl.where(row_full >= c, row_full - (c - b), row_full)
    return gl.where(partial, row_partial, row_full), head, partial


@gluon.jit
def producer(
    q, k, v, dout, row_lse, row_delta,  # descriptors
    k_s, v_s, q_s, dout_s, lse_s, delta_s, first_row_s,
    kv_full, q_full, q_empty,
    batch, kv_head, group, num_heads, num_kv_total, col0, walk, num_steps,
    D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, COPIES: gl.constexpr,
):
    """One warp. Leaves each step's first row in shared memory for who masks, or -1: no mask."""
    if num_steps > 0:
        mbarrier.expect(kv_full.index(0), k.block_type.nbytes + v.block_type.nbytes)
        tma_load(k, [batch, col0, kv_head, 0], kv_full.index(0), reinterpret(k_s, k.dtype, [1, BN, 1, D], k.layout))
        tma_load(v, [batch, col0, kv_head, 0], kv_full.index(0), reinterpret(v_s, v.dtype, [1, BN, 1, D], v.layout))
    for step in range(num_steps):
        i = step % 2
        row, head, partial = tile_at(step, walk, group, BM)
        head += kv_head * group
        mbarrier.wait(q_empty.index(i), ((step // 2) & 1) ^ 1)
        warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        first_row_s.index(i).store(gl.full([32], gl.where(partial, row, -1), gl.int32, warp))
        full = q_full.index(i)
        mbarrier.expect(
            full, q.block_type.nbytes + dout.block_type.nbytes + row_lse.block_type.nbytes + row_delta.block_type.nbytes)
        copy = row % COPIES
        row_of_heads = copy * num_kv_total * group + batch * num_heads + head
        tma_load(q, [batch, row, head, 0], full, reinterpret(q_s.index(i), q.dtype, [1, BM, 1, D], q.layout))
        tma_load(row_lse, [row_of_heads, row - copy], full, lse_s.index(i))
        tma_load(dout, [batch, row, head, 0], full, reinterpret(dout_s.index(i), dout.dtype, [1, BM, 1, D], dout.layout))
        tma_load(row_delta, [row_of_heads, row - copy], full, delta_s.index(i))


@gluon.jit
def reducer(
    dq, dq_s, dq_full, dq_empty, batch, kv_head, group, walk, num_steps,
    D: gl.constexpr, BM: gl.constexpr, BY_ROWS: gl.constexpr, WITH_DQ: gl.constexpr,
):
    """One warp, which adds both consumers' parts of dq to global memory, so that no consumer waits for a store.

    dq is one step late: what the consumers hand over in step i belongs to the tile of step i - 1, and that of step 0 to none.
    """
    if WITH_DQ:
        ROWS: gl.constexpr = BM // 2 if BY_ROWS else BM
        COLS: gl.constexpr = D if BY_ROWS else D // 2
        if num_steps > 0:
            for c in gl.static_range(2):
                mbarrier.wait(dq_full.index(c), 0)
            mbarrier.arrive(dq_empty.index(0), count=1)
        for step in range(1, num_steps + 1):
            row, head, partial = tile_at(step - 1, walk, group, BM)
            head += kv_head * group
            for c in gl.static_range(2):
                mbarrier.wait(dq_full.index(c), step & 1)
                share = reinterpret(dq_s.index(c), gl.float32, [1, ROWS, 1, COLS], dq.layout)
                if BY_ROWS:
                    tma_reduce_add(dq, [batch, row + c * ROWS, head, 0], share)
                else:
                    tma_reduce_add(dq, [batch, row, head, c * COLS], share)
            tma_store_wait(0)
            mbarrier.arrive(dq_empty.index(0), count=1)
