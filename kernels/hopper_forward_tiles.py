"""What the `hopper` forward computes of a visit, query tile by query tile, decided on the host from its intervals.

A tile walks key tiles: the partial ones at its upper end, those at its lower end, then the full ones, which all its rows see whole.
Key tiles that none of its rows sees are not walked, nor are query tiles in which no row sees anything (unless they have to be
written). Where rows of two documents lie in one tile and their keys apart, the keys between are left out too (the widest such gap).
"""
from __future__ import annotations

import torch
from torch import Tensor

from .intervals import Intervals

# A record of the table, as the scheduler hands it on: row0; 1 if no full tile can fail (`final`), to which the kernel adds the head;
# room for the batch; steps; high: partial tiles at the upper end; masked: steps that are not full; tile_hi; tile_lo.
RECORD = 8


def query_tiles(intervals: Intervals, rows: int, block_n: int, by_sums: bool, skip_empty: bool) -> Tensor:
    """int32 [tiles, RECORD] on the device, most steps first; kept with the intervals. rows: of a query tile; block_n: of a key tile.
    by_sums: full tiles are done without maxima. skip_empty: without tiles that see nothing."""
    key = ("hopper", "query tiles", rows, block_n, by_sums, skip_empty)
    if key not in intervals.cache:
        table = tile_table(intervals.host_k_lo, intervals.host_k_hi, rows, block_n, by_sums, skip_empty)
        intervals.cache[key] = table.to(intervals.device)
    return intervals.cache[key]


def tile_table(k_lo: Tensor, k_hi: Tensor, rows: int, block_n: int, by_sums: bool, skip_empty: bool = False) -> Tensor:
    """int32 [tiles, RECORD] on the host, most steps first. k_lo, k_hi [Sq] int32."""
    row0, lo, hi, empty, gaps = spans(k_lo, k_hi, rows, 1)
    last = (row0 + rows).clamp(max=k_lo.shape[0]) - 1
    lo_first, lo_last, hi_first, hi_last = k_lo[row0].long(), k_lo[last].long(), k_hi[row0].long(), k_hi[last].long()
    tile_lo, tile_hi = lo // block_n, -(-hi // block_n)
    # Both ends are non-decreasing: the first and the last row bound what all see.
    full_lo, full_hi = -(-lo_last // block_n), hi_first // block_n
    if by_sums:
        # A row whose keys end where the partial tiles start, or start where they end, sees its first key in a full one: that goes
        # by maxima as if it were partial.
        at_hi = hi_first == full_hi * block_n
        unseen = at_hi & ((hi_last > hi_first) | ((lo_last == full_lo * block_n) & (lo_first < lo_last)))
        full_hi = full_hi - unseen.long()
    no_full = full_hi <= full_lo
    # Without full tiles all partial ones are at the upper end, but for those before a gap.
    low, stop = (torch.where(no_full, tile_lo, full) for full in (full_lo, full_hi))
    full = stop - low
    for tile, start, end in gaps:
        first, after = -(-start // block_n), end // block_n
        if after - first > int(stop[tile] - low[tile]):
            low[tile], stop[tile] = first, after
    high = tile_hi - stop
    masked = high + low - tile_lo
    steps = masked + full
    final = (full == 0).long() if by_sums else torch.ones_like(steps)
    # One that sees nothing is one key tile, masked out whole.
    record = [row0, final, torch.zeros_like(row0), *(torch.where(empty, one, x) for one, x in (
        (1, steps), (1, high), (1, masked), (1, tile_hi), (0, tile_lo)))]
    order = torch.argsort(torch.where(empty, 0, steps), descending=True, stable=True)
    if skip_empty:
        order = order[: int((~empty).sum())]
    return torch.stack(record, 1)[order].to(torch.int32)


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
