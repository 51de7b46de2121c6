"""What the `hopper` forward computes of a visit, query tile by query tile, decided on the host from its intervals.

A tile walks key tiles, laid downwards from the last key that it sees: the partial ones at its upper end, those at its lower end, then
the full ones, which all its rows see whole. Keys that none of its rows sees are not walked, nor are query tiles in which no row sees
anything (unless they have to be written: what nobody sees is finished by the first visit). Where rows of two documents lie in one
tile and their keys apart, the keys between are left out too (the gap that saves most).
"""
from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from .intervals import Intervals, Turn

# A record of the table, as the scheduler hands it on: row0; marks, to which the kernel adds the head; rows in the tile, shifted by
# ROW_BITS: below them it adds the batch; steps; high: partial tiles at the upper end; masked: steps that are not full; top: where the
# uppermost key tile ends; low: where the lowest one begins (both rows of k; it may begin before the first).
RECORD = 8
# Marks: no full tile can fail; there is nothing to fold into; nothing comes after, so the result goes to `out`.
FINAL, STARTS, ENDS = 1, 2, 4
ROW_BITS = 20
COST = 3  # what a query tile costs beside its steps, in steps
LAST = 1 / 16  # see `in_order`
GAIN, MOST_TRIED = 1 / 32, 4096  # see `in_drawn_order`: of the time; items of all heads

Bounds = tuple[Tensor, Tensor]  # k_lo, k_hi: int32 [Sq] on the host


def query_tiles(
    intervals: Intervals, rows: int, block_n: int, by_sums: bool, first: bool, last: bool, num_ctas: int, num_heads: int,
    turn: Turn | None = None, any_rows: bool = True,
) -> tuple[Tensor, int]:
    """(int32 [tiles, RECORD] on the device, as `in_drawn_order`; keys that a tile walks at most); kept with the intervals, or with
    the turn. rows: of a query tile, at most; block_n: of a key tile. by_sums: full tiles are done without maxima. first, last:
    without a turn, of all rows. num_heads: of all batches, each of which has these tiles. any_rows: tiles may begin at any row."""
    bounds = intervals.host_k_lo, intervals.host_k_hi
    kept, shared, visits = (intervals, intervals.cache, [bounds]) if turn is None else (turn, turn.shared, turn.visits)
    key = ("hopper", "query tiles", rows, block_n, by_sums, first, last, num_ctas, num_heads)
    if key not in kept.cache:
        # Where visits finish tiles, these have to be the same in all of them.
        of_rows = ("hopper", "rows of tiles", rows, block_n)
        if of_rows not in shared:
            shared[of_rows] = tile_rows(visits, rows, block_n, any_rows)
        table = tile_table(*bounds, *shared[of_rows], block_n, by_sums, first, last, turn)
        table = table.flip(0)  # under a causal mask a document's last tile is the longest
        table = table[in_drawn_order(table[:, 3] + COST, num_ctas, num_heads)]
        longest = int(table[:, 3].max()) * block_n if len(table) else 0
        kept.cache[key] = table.to(intervals.device), longest
    return kept.cache[key]


def tile_rows(
    visits: Sequence[Bounds], rows: int, block_n: int, any_rows: bool = True, cost: int = COST,
) -> tuple[Tensor, Tensor]:
    """First and stop row of each query tile, int64 [tiles]: `rows` at a time, or, where fewer steps result, of tiles that begin with a
    document (a tile with the end of one document and the start of another walks the keys of both, and the later tiles of the other
    are not aligned with its keys). cost: of a tile beside its steps, in steps."""
    num_q = visits[0][0].shape[0]
    plain = _to_stop(range(0, num_q, rows), num_q)
    runs = torch.cat([_runs(*bounds) for bounds in visits]).unique().tolist() if any_rows else []
    ends = [(lo.tolist(), hi.tolist()) for lo, hi in visits] if runs else []
    starts, at, is_plain = [], 0, True
    for begin, stop in zip(runs, [*runs[1:], num_q]):
        if stop - begin < rows // 2:
            continue
        whole = range(at, begin - rows + 1, rows)
        starts += whole
        at += rows * len(whole)
        apart, together = (_cost(ends, row0, begin, stop, rows, block_n, cost) for row0 in (begin, at))
        if at < begin and cost + apart < together:
            starts.append(at)
            at, is_plain = begin, False
    if is_plain:
        return plain
    # Each was decided for one document alone: a tile with the ends of two short ones also serves both.
    tiles = _to_stop([*starts, *range(at, num_q, rows)], num_q)
    return min(tiles, plain, key=lambda found: sum(_whole_cost(*bounds, *found, block_n, cost) for bounds in visits))


def _to_stop(starts: Sequence[int], num_q: int) -> tuple[Tensor, Tensor]:
    row0 = torch.tensor(list(starts))
    return row0, torch.cat((row0[1:], torch.tensor([num_q])))


def _whole_cost(k_lo: Tensor, k_hi: Tensor, row0: Tensor, stop: Tensor, block_n: int, cost: int) -> int:
    """What all tiles of a visit cost, in steps."""
    table = tile_table(k_lo, k_hi, row0, stop, block_n, False, False, False)
    return cost * len(table) + int(table[:, 3].sum())


def _runs(lo: Tensor, hi: Tensor) -> Tensor:
    """int64 [n]: the rows after the first whose keys lie apart from those of the row before."""
    at = (lo < hi).nonzero()[:, 0]
    apart = (lo[at[1:]] >= hi[at[:-1]]) | (at[1:] > at[:-1] + 1)
    return torch.cat((at[:1][at[:1] > 0], at[1:][apart]))


def _cost(ends: Sequence[tuple[list[int], list[int]]], start: int, begin: int, stop: int, rows: int, block_n: int, cost: int) -> int:
    """What the rows begin .. stop - 1 cost, in steps, in tiles from `start` on."""
    total = 0
    for lo, hi in ends:
        for row0 in range(start, stop, rows):
            keys = hi[min(row0 + rows, stop) - 1] - lo[max(row0, begin)]
            total += cost - -keys // block_n if keys > 0 else 0
    return total


def tile_table(
    k_lo: Tensor, k_hi: Tensor, row0: Tensor, stop: Tensor, block_n: int, by_sums: bool, first: bool, last: bool,
    turn: Turn | None = None,
) -> Tensor:
    """int32 [tiles, RECORD] on the host, in the order of rows, of all tiles that have something to write. k_lo, k_hi [Sq] int32;
    row0, stop: of tile_rows."""
    lo, hi, empty, gaps = spans(k_lo, k_hi, row0, stop, 1)
    end = stop - 1
    lo_first, lo_last, hi_first, hi_last = k_lo[row0].long(), k_lo[end].long(), k_hi[row0].long(), k_hi[end].long()
    steps = -(-(hi - lo) // block_n)
    # Both ends are non-decreasing: the first and the last row bound what all see. Counted downwards from hi.
    full, partial = -(-(hi - hi_first) // block_n), (hi - lo_last) // block_n
    if by_sums:
        # A row whose keys end where the partial tiles start, or start where they end, sees its first key in a full one: that goes
        # by maxima as if it were partial.
        at_hi = hi_first == hi - full * block_n
        unseen = at_hi & ((hi_last > hi_first) | ((lo_last == hi - partial * block_n) & (lo_first < lo_last)))
        full = full + unseen.long()
    no_full = partial <= full
    # Without full tiles all partial ones are at the upper end, but for those before a gap.
    high, masked = (torch.where(no_full, steps, x) for x in (full, steps - (partial - full)))
    low = hi - steps * block_n
    for tile, start, after in gaps:
        below, above = -(-(start - int(lo[tile])) // block_n), -(-(int(hi[tile]) - after) // block_n)
        if below + above < int(steps[tile]):
            high[tile], low[tile] = above, start - below * block_n
            steps[tile] = masked[tile] = below + above
    marks = FINAL * (((masked == steps) | empty).long() if by_sums else torch.ones_like(steps))
    starts, ends, written = (torch.full_like(empty, x) for x in (first, last, first or last))
    if turn is not None:
        starts, ends = (~_any(x, row0, stop) for x in (turn.before, turn.later))
        written = ends & turn.opens
    marks += STARTS * starts + ENDS * ends
    # One that sees nothing is one key tile, masked out whole.
    record = [row0, marks, stop - row0 << ROW_BITS, *(torch.where(empty, one, x) for one, x in (
        (1, steps), (1, high), (1, masked), (block_n, hi), (0, low)))]
    return torch.stack(record, 1)[~empty | written].to(torch.int32)


def in_order(costs: Tensor, together: float, ahead: bool = False) -> Tensor:
    """int64 [n]: in which order items run. costs [n]: of the items, which are given in the order of what they read; together: how many
    run at a time.

    Neighbours share what they read, and find it in L2 when they run at about the same time, so they follow each other. But the
    shortest, LAST of all costs, come at the end, and those that would not end in time (but for as much again) come first, both most
    costs first: so all multiprocessors end together. ahead: each waits for one that was drawn shortly before.
    """
    by_cost = torch.argsort(costs, descending=True, stable=True)
    total = int(costs.sum())
    stop = int((costs[by_cost].cumsum(0) <= (1.0 - LAST) * total).sum())
    first, between = by_cost[:0], by_cost[:stop].sort().values
    while True:
        of_between = costs[between]
        end = (int(costs[first].sum()) + of_between.cumsum(0) - of_between) / together + of_between
        if ahead and len(between):
            width = max(1, round(together))
            end = end + torch.cat((of_between.new_zeros(width), of_between))[:-1].unfold(0, width, 1).max(1).values
        late = end > (1.0 + LAST) * total / together
        if not late.any():
            break
        first, between = torch.cat((first, between[late])), between[~late]
    first = first[torch.argsort(costs[first], descending=True, stable=True)]
    return torch.cat((first, between, by_cost[stop:]))


def in_drawn_order(costs: Tensor, num_ctas: int, num_heads: int) -> Tensor:
    """`in_order` of the persistent grid, where each CTA draws an item when it takes up the one before. Of few items, some of them
    long, one may so wait behind another while CTAs have nothing to do: then the order that reckons with it, if it ends earlier
    by GAIN. (It breaks up neighbours more.)"""
    order = in_order(costs, num_ctas / num_heads)
    if not num_ctas < len(costs) * num_heads <= MOST_TRIED:
        return order
    other = in_order(costs, num_ctas / num_heads, ahead=True)
    ends = [_last_end(costs[found].tolist(), num_ctas, num_heads) for found in (order, other)]
    return other if ends[1] < (1.0 - GAIN) * ends[0] else order


def _last_end(costs: Sequence[int], num_ctas: int, num_heads: int) -> int:
    """When the last of so many heads' items is done, each CTA one ahead."""
    items = iter([cost for cost in costs for _ in range(num_heads)])
    taken = [(0, next(items)) for _ in range(num_ctas)]  # when a CTA takes up which cost
    end = 0
    while taken:
        time, cost = taken[0]
        end = max(end, time + cost)
        drawn = next(items, None)
        if drawn is None:
            heapq.heappop(taken)
        else:
            heapq.heapreplace(taken, (time + cost, drawn))
    return end


def _any(of_rows: Tensor, row0: Tensor, stop: Tensor) -> Tensor:
    """bool [S] -> bool [tiles]: whether it holds for any row of the tile."""
    count = torch.cat((torch.zeros(1, dtype=torch.int64), of_rows.cumsum(0)))
    return count[stop] > count[row0]


def spans(lo: Tensor, hi: Tensor, row0: Tensor, stop: Tensor, least: int) -> tuple[Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
    """What the rows row0 .. stop - 1 of each tile see together: (lo, hi, whether it is nothing) [tiles], and the gaps between what two
    neighbours of one tile see: (tile, start, stop), at least `least` long.

    lo, hi: int32 [S], both non-decreasing. Rows that see nothing have a place among the others all the same: they do not count.
    """
    at = (lo < hi).nonzero()[:, 0]
    seeing_lo, seeing_hi = (lo, hi) if len(at) == lo.shape[0] else (lo[at], hi[at])
    first, after = torch.searchsorted(at, row0), torch.searchsorted(at, stop)
    empty = first == after
    if not len(at):
        zero = torch.zeros_like(row0)
        return zero, zero, empty, []
    span_lo, span_hi = seeing_lo[first.clamp(max=len(at) - 1)].long(), seeing_hi[(after - 1).clamp(min=0)].long()
    jumps = (seeing_lo[1:] - seeing_hi[:-1] >= least).nonzero()[:, 0]
    tiles, before = (torch.searchsorted(row0, at[jumps + i], right=True) - 1 for i in (1, 0))
    inside = jumps[tiles == before]
    gaps = zip(*(x.tolist() for x in (tiles[tiles == before], seeing_hi[inside], seeing_lo[inside + 1])))
    return span_lo, torch.where(empty, span_lo, span_hi), empty, list(gaps)
