"""Which tiles the `hopper` forward computes, and in which order: one warp draws query tiles and describes them to the others.

The grid is persistent. Query tiles are drawn from a counter in global memory, heaviest first (`order`, made on the host from the
intervals), so that the last wave is made of short ones. Heads go in sections whose k and v fit in L2 together.
"""
from __future__ import annotations

from .gluon_shim import gl, gluon, mbarrier

TILE_INFO = gl.constexpr(8)  # row0 (-1: no more), head, batch, and the five numbers of `key_tile`


@gluon.jit
def scheduler(
    given,  # see the kernel: k_lo, k_hi, order, counter and scalars
    memory, barriers,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr,
    SKIP_EMPTY: gl.constexpr,  # tiles that see nothing need no writing: the state is there already
):
    k_lo, k_hi, order, counter, num_q, num_heads, num_heads_total, section, num_tiles, total = given
    info_s = memory[3]
    info_full, info_empty = barriers[0], barriers[1]
    layout: gl.constexpr = gl.BlockedLayout([TILE_INFO], [32], [1], [0])
    i = gl.arange(0, TILE_INFO, layout)
    tile = gl.program_id(0)
    sent = gl.to_tensor(0)
    while tile < total:
        which = tile // (section * num_tiles)
        within = tile - which * (section * num_tiles)
        heads = gl.minimum(section, num_heads_total - which * section)
        rank = within // heads
        head_b = which * section + within - rank * heads
        batch = head_b // num_heads
        row0 = gl.load(order + rank) * ROWS
        # both ends are non-decreasing: the first and last row bound the tile
        last = gl.minimum(row0 + ROWS, num_q) - 1
        lo_first = gl.load(k_lo + row0)
        lo_last = gl.load(k_lo + last)
        hi_first = gl.load(k_hi + row0)
        hi_last = gl.load(k_hi + last)
        tile_lo = lo_first // BLOCK_N
        tile_hi = gl.where(hi_last > lo_first, (hi_last + BLOCK_N - 1) // BLOCK_N, tile_lo)
        full_lo = (lo_last + BLOCK_N - 1) // BLOCK_N  # every row of the tile sees all of [full_lo, full_hi)
        full_hi = hi_first // BLOCK_N
        no_full = full_hi <= full_lo
        full_lo = gl.where(no_full, tile_lo, full_lo)
        full_hi = gl.where(no_full, tile_lo, full_hi)
        steps = tile_hi - tile_lo
        high = tile_hi - full_hi
        masked = high + full_lo - tile_lo
        if steps > 0 or not SKIP_EMPTY:
            # one that sees nothing is one key tile, masked out whole
            empty = steps == 0
            v = gl.where(i == 0, row0, head_b - batch * num_heads)
            v = gl.where(i == 2, batch, v)
            v = gl.where(i == 3, gl.maximum(steps, 1), v)
            v = gl.where(i == 4, gl.where(empty, 1, high), v)
            v = gl.where(i == 5, gl.where(empty, 1, masked), v)
            v = gl.where(i == 6, gl.where(empty, 1, tile_hi), v)
            v = gl.where(i == 7, gl.where(empty, 0, tile_lo), v)
            info_s.index(0).store(v)
            mbarrier.arrive(info_full.index(0), count=1)
            sent += 1
            mbarrier.wait(info_empty.index(0), (sent & 1) ^ 1)
        # Drawn only now, when the last tile has been taken up: one ahead. `total` draws are made in all, and the last of them
        # leaves the counter as it was for the next launch on this stream.
        drawn = gl.atomic_add(counter, 1)
        tile = gl.num_programs(0) + drawn
        if drawn == total - 1:
            gl.store(counter, 0)
    info_s.index(0).store(gl.full([TILE_INFO], -1, gl.int32, layout))
    mbarrier.arrive(info_full.index(0), count=1)


@gluon.jit
def next_tile(memory, barriers, turn, WARPS: gl.constexpr):
    """(row0 or -1, head, batch, steps, high, masked, tile_hi, tile_lo) of this CTA's query tile number `turn`."""
    info_s = memory[3]
    info_full, info_empty = barriers[0], barriers[1]
    # every thread holds all eight, so that the sums below cost nothing
    layout: gl.constexpr = gl.BlockedLayout([TILE_INFO], [32], [WARPS], [0])
    mbarrier.wait(info_full.index(0), turn & 1)
    v = info_s.index(0).load(layout)
    i = gl.arange(0, TILE_INFO, layout)
    row0 = gl.sum(gl.where(i == 0, v, 0), 0)
    head = gl.sum(gl.where(i == 1, v, 0), 0)
    batch = gl.sum(gl.where(i == 2, v, 0), 0)
    steps = gl.sum(gl.where(i == 3, v, 0), 0)
    high = gl.sum(gl.where(i == 4, v, 0), 0)
    masked = gl.sum(gl.where(i == 5, v, 0), 0)
    tile_hi = gl.sum(gl.where(i == 6, v, 0), 0)
    tile_lo = gl.sum(gl.where(i == 7, v, 0), 0)
    mbarrier.arrive(info_empty.index(0), count=1)
    return row0, head, batch, steps, high, masked, tile_hi, tile_lo


@gluon.jit
def key_tile(step, high, masked, tile_hi, tile_lo):
    """The key tile of a step: the `high` partial ones at the upper end, the other masked ones at the lower end, then the full ones
    downwards. So each loop body is either masked or not, and the diagonal, which all heads need, comes first."""
    tile = gl.where(step >= high, tile_lo + step - high, tile_hi - 1 - step)
    return gl.where(step >= masked, tile_hi - 1 - step + masked - high, tile)
