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
        table = tile_table(intervals.host_k_lo, intervals.host_k_hi, rows, block_n, by_sums)
        if skip_empty:
            table = table[_sees_something(intervals.host_k_lo, intervals.host_k_hi, rows)[table[:, 0].long() // rows]]
        intervals.cache[key] = table.to(intervals.device)
    return intervals.cache[key]


def tile_table(k_lo: Tensor, k_hi: Tensor, rows: int, block_n: int, by_sums: bool) -> Tensor:
    """int32 [ceil(Sq / rows), RECORD] on the host, most steps first. k_lo, k_hi [Sq] int32."""
    num_q = k_lo.shape[0]
    row0 = torch.arange(0, num_q, rows)
    last = (row0 + rows).clamp(max=num_q) - 1
    lo, hi, sees = k_lo.long(), k_hi.long(), k_lo < k_hi
    # Rows that see nothing have a place among the keys all the same: what is walked is what the others see.
    far = int(hi[-1])
    tile_lo = by_tile(torch.where(sees, lo, far), rows, far).amin(1) // block_n
    tile_hi = -(-by_tile(torch.where(sees, hi, 0), rows, 0).amax(1) // block_n)
    empty = tile_hi <= tile_lo
    # Both ends are non-decreasing: the first and the last row bound what all see.
    full_lo, full_hi = -(-lo[last] // block_n), hi[row0] // block_n
    if by_sums:
        # A row whose keys end where the partial tiles start, or start where they end, sees its first key in a full one: that goes
        # by maxima as if it were partial.
        at_hi = hi[row0] == full_hi * block_n
        unseen = (at_hi & (hi[last] > hi[row0])) | (at_hi & (lo[last] == full_lo * block_n) & (lo[row0] < lo[last]))
        full_hi = full_hi - unseen.long()
    no_full = full_hi <= full_lo
    gap_lo, gap_hi = _gaps(lo, hi, sees, rows, block_n, row0.shape[0])
    full_lo, full_hi = (torch.where(no_full, gap, end) for gap, end in ((gap_lo, full_lo), (gap_hi, full_hi)))
    full = torch.where(no_full, 0, full_hi - full_lo)
    # Without full tiles and without a gap all partial ones are at the upper end.
    none = no_full & (gap_hi <= gap_lo)
    high = tile_hi - torch.where(none, tile_lo, full_hi)
    masked = high + torch.where(none, 0, full_lo - tile_lo)
    steps = masked + full
    final = (full == 0).long() if by_sums else torch.ones_like(steps)
    # One that sees nothing is one key tile, masked out whole.
    record = [row0, final, torch.zeros_like(row0), *(torch.where(empty, one, x) for one, x in (
        (1, steps), (1, high), (1, masked), (1, tile_hi), (0, tile_lo)))]
    table = torch.stack(record, 1)
    order = torch.argsort(torch.where(empty, 0, steps), descending=True, stable=True)
    return table[order].to(torch.int32)


def by_tile(x: Tensor, rows: int, fill: int) -> Tensor:
    """[Sq] -> [ceil(Sq / rows), rows], filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[0] % rows), value=fill).view(-1, rows)


def _sees_something(k_lo: Tensor, k_hi: Tensor, rows: int) -> Tensor:
    """bool [ceil(Sq / rows)]."""
    return by_tile(k_lo < k_hi, rows, 0).any(1)


def _gaps(lo: Tensor, hi: Tensor, sees: Tensor, rows: int, block_n: int, num_tiles: int) -> tuple[Tensor, Tensor]:
    """(first, stop) [num_tiles] of the widest run of key tiles between those that a query tile's rows see; 0, 0: none."""
    at = sees.nonzero()[:, 0]
    found = torch.zeros(2, num_tiles, dtype=torch.long)
    if at.shape[0] > 1:
        first, stop = -(-hi[at[:-1]] // block_n), lo[at[1:]] // block_n
        tile = at[1:] // rows
        inside = ((stop > first) & (tile == at[:-1] // rows)).nonzero()[:, 0]
        # Few: a narrower one is overwritten by a wider.
        for a, b, t in sorted(zip(*(x[inside].tolist() for x in (first, stop, tile))), key=lambda gap: gap[1] - gap[0]):
            found[0, t], found[1, t] = a, b
    return found[0], found[1]
