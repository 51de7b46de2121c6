"""Which tiles the `hopper` forward computes, and in which order: one warp draws query tiles and describes them to the others.

The grid is persistent. Query tiles are drawn from a counter in global memory, in the order of their table (`tiles`, made on the
host from the intervals: hopper_forward_tiles.py): the last wave is made of short ones. Heads go in sections whose k and v fit in L2
together.
"""
from __future__ import annotations

from . import hopper_forward_tiles as tiles
from .gluon_shim import gl, gluon, mbarrier

# Of a tile's mode: which consumers write their rows, and the marks of the table: FINAL: even if a sum is not finite.
ALL, MARKS = gl.constexpr(7), gl.constexpr(8)  # MARKS: the lowest of their bits
FINAL, STARTS, ENDS = (gl.constexpr(8 * mark) for mark in (tiles.FINAL, tiles.STARTS, tiles.ENDS))
HEAD_BITS = gl.constexpr(20)  # mode and head share a number
HEAD_MASK = gl.constexpr((1 << 20) - 1)
ROW_BITS = gl.constexpr(tiles.ROW_BITS)  # rows and batch share another
BATCH_MASK = gl.constexpr((1 << tiles.ROW_BITS) - 1)
TILE_INFO = gl.constexpr(8)  # row0 (-1: no more, -2: nothing yet), head and mode, rows and batch, and the five numbers of `first_key`


@gluon.jit
def scheduler(
    given,  # see the kernel: tiles, counter and scalars
    memory, barriers,
    ROWS: gl.constexpr, CONSUMERS: gl.constexpr, BY_SUMS: gl.constexpr,
):
    tiles, counter, num_heads, num_heads_total, section, num_tiles, total = given
    info_s, failed_s = memory[3], memory[4]
    info_full, info_empty = barriers[0], barriers[1]
    layout: gl.constexpr = gl.BlockedLayout([TILE_INFO], [32], [1], [0])
    i = gl.arange(0, TILE_INFO, layout)
    tile = gl.program_id(0)
    sent = gl.to_tensor(0)
    redo = gl.to_tensor(0)  # which consumers failed at the item before the last
    judged = gl.to_tensor(1)  # 0: the last item may have failed, which is not known yet
    more = gl.to_tensor(1)
    while more != 0:
        v = gl.full([TILE_INFO], -2, gl.int32, layout)
        final = gl.to_tensor(1)
        if redo != 0:
            # its record is still in the slot whose turn it is; all steps by maxima
            v = info_s.index(sent & 1).load(layout)
            steps = gl.sum(gl.where(i == 3, v, 0), 0)
            v = gl.where(i == 5, steps, v)
            kept = v & (HEAD_MASK | ((STARTS | ENDS) << HEAD_BITS))
            v = gl.where(i == 1, kept | ((FINAL | redo) << HEAD_BITS), v)
        elif tile < total:
            which = tile // (section * num_tiles)
            within = tile - which * (section * num_tiles)
            heads = gl.minimum(section, num_heads_total - which * section)
            rank = within // heads
            head_b = which * section + within - rank * heads
            batch = head_b // num_heads
            v = gl.load(tiles + rank * TILE_INFO + i)
            if BY_SUMS:
                final = gl.sum(gl.where(i == 1, v, 0), 0) & (FINAL // MARKS)
            v = gl.where(i == 1, (head_b - batch * num_heads) | ((ALL + MARKS * v) << HEAD_BITS), v)
            v = gl.where(i == 2, v | batch, v)
        elif judged != 0:
            v = gl.full([TILE_INFO], -1, gl.int32, layout)
            more = gl.to_tensor(0)
        info_s.index(sent & 1).store(v)
        mbarrier.arrive(info_full.index(0), count=1)
        sent += 1
        drew = redo == 0
        redo = gl.to_tensor(0)
        if more != 0:
            mbarrier.wait(info_empty.index(0), (sent & 1) ^ 1)
            if BY_SUMS:
                if judged == 0:
                    for w in gl.static_range(CONSUMERS):
                        redo = redo | (any_failed(failed_s, (sent & 1) * CONSUMERS + w, ROWS // CONSUMERS, 1) << w)
                judged = final
        # Drawn only now, when the last tile has been taken up: one ahead. `total` draws are made in all, and the last of them
        # leaves the counter as it was for the next launch on this stream.
        if drew & (tile < total):
            drawn = gl.atomic_add(counter, 1)
            tile = gl.num_programs(0) + drawn
            if drawn == total - 1:
                gl.store(counter, 0)


@gluon.jit
def any_failed(failed_s, slot, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """1 when a row in that slot has no finite sum, else 0. There is one per consumer and parity of the item: a consumer may be a
    tile ahead of another."""
    # each warp holds all rows: a reduction between warps would take shared memory of its own
    return gl.max(failed_s.index(slot).load(gl.BlockedLayout([ROWS // 32], [32], [WARPS], [0])), 0)


@gluon.jit
def next_tile(memory, barriers, item, WARPS: gl.constexpr):
    """(row0 or -1, rows, head, batch, steps, high, masked, top, low, mode, next item) of the CTA's next query tile."""
    info_s = memory[3]
    info_full, info_empty = barriers[0], barriers[1]
    # every thread holds all eight, so that the sums below cost nothing
    layout: gl.constexpr = gl.BlockedLayout([TILE_INFO], [32], [WARPS], [0])
    i = gl.arange(0, TILE_INFO, layout)
    mbarrier.wait(info_full.index(0), item & 1)
    v = info_s.index(item & 1).load(layout)
    mbarrier.arrive(info_empty.index(0), count=1)
    item += 1
    row0 = gl.sum(gl.where(i == 0, v, 0), 0)
    while row0 == -2:
        mbarrier.wait(info_full.index(0), item & 1)
        v = info_s.index(item & 1).load(layout)
        mbarrier.arrive(info_empty.index(0), count=1)
        item += 1
        row0 = gl.sum(gl.where(i == 0, v, 0), 0)
    head = gl.sum(gl.where(i == 1, v, 0), 0)
    batch = gl.sum(gl.where(i == 2, v, 0), 0)
    steps = gl.sum(gl.where(i == 3, v, 0), 0)
    high = gl.sum(gl.where(i == 4, v, 0), 0)
    masked = gl.sum(gl.where(i == 5, v, 0), 0)
    top = gl.sum(gl.where(i == 6, v, 0), 0)
    low = gl.sum(gl.where(i == 7, v, 0), 0)
    return row0, batch >> ROW_BITS, head & HEAD_MASK, batch & BATCH_MASK, steps, high, masked, top, low, head >> HEAD_BITS, item


@gluon.jit
def first_key(step, high, masked, top, low, BLOCK_N: gl.constexpr):
    """The first key of a step's tile: the `high` partial ones at the upper end, the other masked ones at the lower end, then the full
    ones downwards. So each loop body is either masked or not, and the diagonal, which all heads need, comes first."""
    key = gl.where(step >= high, low + (step - high) * BLOCK_N, top - (step + 1) * BLOCK_N)
    return gl.where(step >= masked, top - (step + 1 + high - masked) * BLOCK_N, key)
