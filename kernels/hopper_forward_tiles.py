"""What the `hopper` forward computes of a visit, query tile by query tile, decided on the host from its intervals.

A tile walks key tiles, laid downwards from the last key that it sees: the partial ones at its upper end, those at its lower end, then
the full ones, which all its rows see whole. Keys that none of its rows sees are not walked, nor are query tiles in which no row sees
anything (unless they have to be written: what nobody sees is finished by the first visit). Where rows of two documents lie in one
tile and their keys apart, the keys between are left out too (the gap that saves most).
"""
from __future__ import annotations

import torch
from torch import Tensor

from .intervals import Intervals, Turn

# A record of the table, as the scheduler hands it on: row0; marks, to which the kernel adds the head; room for the batch; steps;
# high: partial tiles at the upper end; masked: steps that are not full; top: where the uppermost key tile ends; low: where the
# lowest one begins (both rows of k; it may begin before the first).
RECORD = 8
# Marks: no full tile can fail; there is nothing to fold into; nothing comes after, so the result goes to `out`.
FINAL, STARTS, ENDS = 1, 2, 4


def query_tiles(
    intervals: Intervals, rows: int, block_n: int, by_sums: bool, first: bool, last: bool, turn: Turn | None = None,
) -> Tensor:
    """int32 [tiles, RECORD] on the device, most steps first; kept with the intervals, or with the turn. rows: of a query tile;
    block_n: of a key tile. by_sums: full tiles are done without maxima. first, last: without a turn, of all rows."""
    kept = intervals if turn is None else turn
    key = ("hopper", "query tiles", rows, block_n, by_sums, first, last)
    if key not in kept.cache:
        table = tile_table(intervals.host_k_lo, intervals.host_k_hi, rows, block_n, by_sums, first, last, turn)
        kept.cache[key] = table.to(intervals.device)
    return kept.cache[key]


def tile_table(
    k_lo: Tensor, k_hi: Tensor, rows: int, block_n: int, by_sums: bool, first: bool, last: bool, turn: Turn | None = None,
) -> Tensor:
    """int32 [tiles, RECORD] on the host, most steps first, of all tiles that have something to write. k_lo, k_hi [Sq] int32."""
    row0, lo, hi, empty, gaps = spans(k_lo, k_hi, rows, 1)
    end = (row0 + rows).clamp(max=k_lo.shape[0]) - 1
    lo_first, lo_last, hi_first, hi_last = k_lo[row0].long(), k_lo[end].long(), k_hi[row0].long(), k_hi[end].long()
    steps = -(-(hi - lo) // block_n)
    # Both ends are non-decreasing: the first and the last row bound what all see. Counted downwards from hi.
    full, stop = -(-(hi - hi_first) // block_n), (hi - lo_last) // block_n
    if by_sums:
        # A row whose keys end where the partial tiles start, or start where they end, sees its first key in a full one: that goes
        # by maxima as if it were partial.
        at_hi = hi_first == hi - full * block_n
        unseen = at_hi & ((hi_last > hi_first) | ((lo_last == hi - stop * block_n) & (lo_first < lo_last)))
        full = full + unseen.long()
    no_full = stop <= full
    # Without full tiles all partial ones are at the upper end, but for those before a gap.
    high, masked = (torch.where(no_full, steps, x) for x in (full, steps - (stop - full)))
    low = hi - steps * block_n
    for tile, start, after in gaps:
        below, above = -(-(start - int(lo[tile])) // block_n), -(-(int(hi[tile]) - after) // block_n)
        if below + above < int(steps[tile]):
            high[tile], low[tile] = above, start - below * block_n
            steps[tile] = masked[tile] = below + above
    marks = FINAL * (((masked == steps) | empty).long() if by_sums else torch.ones_like(steps))
    starts, ends, written = (torch.full_like(empty, x) for x in (first, last, first or last))
    if turn is not None:
        starts, ends = (~_any(x, rows) for x in (turn.before, turn.later))
        written = ends & turn.opens
    marks += STARTS * starts + ENDS * ends
    # One that sees nothing is one key tile, masked out whole.
    record = [row0, marks, torch.zeros_like(row0), *(torch.where(empty, one, x) for one, x in (
        (1, steps), (1, high), (1, masked), (block_n, hi), (0, low)))]
    order = torch.argsort(torch.where(empty, 0, steps), descending=True, stable=True)
    return torch.stack(record, 1)[order[(~empty | written)[order]]].to(torch.int32)


def _any(of_rows: Tensor, rows: int) -> Tensor:
    """bool [S] -> bool [tiles]: whether it holds for any row of the tile."""
    whole = torch.zeros(-(-of_rows.shape[0] // rows) * rows, dtype=torch.bool)
    whole[: of_rows.shape[0]] = of_rows
    return whole.view(-1, rows).any(1)


def spans(lo: Tensor, hi: Tensor, rows: int, least: int) -> tuple[Tensor, Tensor, Tensor, Tensor, list[tuple[int, int, int]]]:
    """What the rows of each tile see together: (first row, lo, hi, whether it is nothing) [tiles], and the gaps between what two
    neighbours of one tile see: (tile, start, stop), at least `least` long.

    lo, hi: int32 [S], both non-decreasing. Rows that see nothing have a place among the others all the same: they do not count.
    """
    row0, at = torch.arange(0, lo.shape[0], rows), (lo < hi).nonzero()[:, 0]
    seeing_lo, seeing_hi = (lo, hi) if len(at) == lo.shape[0] else (lo[at], hi[at])
    first, stop = torch.searchsorted(at, row0), torch.searchsorted(at, row0 + rows)
    empty = first == stop
    if not len(at):
        zero = torch.zeros_like(row0)
        return row0, zero, zero, empty, []
    span_lo, span_hi = seeing_lo[first.clamp(max=len(at) - 1)].long(), seeing_hi[(stop - 1).clamp(min=0)].long()
    jumps = (seeing_lo[1:] - seeing_hi[:-1] >= least).nonzero()[:, 0]
    tiles, before = at[jumps + 1] // rows, at[jumps] // rows
    inside = jumps[tiles == before]
    gaps = zip(*(x.tolist() for x in (tiles[tiles == before], seeing_hi[inside], seeing_lo[inside + 1])))
    return row0, span_lo, torch.where(empty, span_lo, span_hi), empty, list(gaps)
