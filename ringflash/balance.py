"""Which runs a "balanced" layout has, and which layout "auto" takes: Note [Balanced] in DESIGN.md.

numpy alone; pure functions of masks and sizes, so that all ranks come to the same.
"""
from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from ringflash.mask import Mask
from ringflash.work import Runs, Work, prefix_sums, quota_of, runs_of

TILE = 128  # rows of a kernel's tile
TOLERANCE = 0.04  # of the busiest rank's pairs over the mean rank's: good enough to stop
_PIECE_TILES = 2  # a piece of a cut document has at least so many tiles, of fewer rows if need be
_MAX_PLACED = 20_000  # documents placed over all attempts: bounds the time, equally on every rank


@lru_cache(maxsize=64)
def balance(masks: tuple[Mask, ...], seq_len: int, cp_size: int) -> Runs:
    """Runs that give every rank seq_len / cp_size rows (within one) and an even share of the pairs of all masks together."""
    return _balance(Work(masks, seq_len), cp_size)


@lru_cache(maxsize=64)
def choose(masks: tuple[Mask, ...], seq_len: int, cp_size: int, zigzag: tuple[tuple[int, int], ...]) -> tuple[str, Runs, str]:
    """What "auto" means: kind ("contiguous", "zigzag" or "balanced"), runs, and why, as text. zigzag: its (start, rank) segments.

    The kind that waits least for the busiest rank, hop by hop; among those nearly as good, the one that reads fewest rows of
    other ranks, and among equals the simplest.
    """
    work = Work(masks, seq_len)
    found = {"contiguous": contiguous(seq_len, cp_size), "zigzag": runs_of(zigzag), "balanced": _balance(work, cp_size)}
    costs = {kind: work.cost(runs, cp_size) for kind, runs in found.items()}
    enough = min(cost.waiting for cost in costs.values()) * (1 + TOLERANCE)
    kind = min((kind for kind in costs if costs[kind].waiting <= enough), key=lambda kind: round(costs[kind].reads, 3))
    others = "; ".join(f"{name} {cost}" for name, cost in costs.items() if name != kind)
    return kind, found[kind], f"{kind}: {costs[kind]} ({others})"


def contiguous(seq_len: int, cp_size: int) -> Runs:
    quota = quota_of(seq_len, cp_size)
    return runs_of([(sum(quota[:rank]), rank) for rank in range(cp_size) if quota[rank]])


def _balance(work: Work, cp_size: int) -> Runs:
    in_order = contiguous(work.seq_len, cp_size)
    in_order_cost = work.cost(in_order, cp_size)
    in_order = Runs(in_order.starts, in_order.owners, f"nothing rearranged: {in_order_cost}")
    if in_order_cost.waiting <= 1 + TOLERANCE:
        return in_order
    pieces = _Pieces(work, cp_size)
    best, placed = None, 0
    for num_cut in range(pieces.num_live + 1):
        if not pieces.may_balance(num_cut):
            continue
        attempt = _Attempt(pieces, num_cut)
        if best is None or attempt.busiest < best.busiest:
            best = attempt
        placed += pieces.num_live
        if best.busiest <= 1 + TOLERANCE or placed > _MAX_PLACED:
            break
    runs = runs_of(best.segments)
    cost = work.cost(runs, cp_size)
    # Wide windows over one document: runs in order are uneven too, but each waits for its neighbour only.
    return in_order if in_order_cost.waiting <= cost.waiting else Runs(runs.starts, runs.owners, f"{best.describe()}: {cost}")


class _Pieces:
    """What is placed as a whole or cut: documents, most pairs first, short neighbours taken together; then rows without pairs."""

    def __init__(self, work: Work, cp_size: int):
        self.work, self.cp_size = work, cp_size
        bounds = work.components()
        self.num_documents = bounds.shape[0] - 1
        cell = max(1, min(TILE, work.seq_len // (16 * cp_size)))
        if cell > 1:
            # Of neighbours shorter than a cell, one boundary per cell stays: their number is bounded by rows, not documents.
            is_short, at = np.diff(bounds) < cell, bounds // cell
            stays = np.ones(bounds.shape, dtype=np.bool_)
            stays[1:-1] = (at[1:-1] != at[:-2]) | ~is_short[:-1] | ~is_short[1:]
            bounds = bounds[stays]
        pairs, rows = np.diff(work.prefix[bounds]), np.diff(bounds)
        order = np.lexsort((bounds[:-1], -rows, -pairs))
        self.num_live = int((pairs > 0).sum())
        self.start, self.rows, self.pairs = (x[order].tolist() for x in (bounds[:-1], rows, pairs))
        self.pairs_before, self.rows_before = (prefix_sums(x[order]).tolist() for x in (pairs, rows))

    def may_balance(self, num_cut: int) -> bool:
        """False where the longest document that stays whole is too much for one rank on top of its share of the cut ones."""
        if num_cut == self.num_live:
            return True
        load = self.pairs[num_cut] + self.pairs_before[num_cut] / self.cp_size
        return load <= (1 + TOLERANCE) * self.work.total / self.cp_size


class _Attempt:
    """The num_cut documents with most pairs cut for all ranks, the others whole, what fits nowhere split over the gaps."""

    def __init__(self, pieces: _Pieces, num_cut: int):
        self.pieces, self.num_cut = pieces, num_cut
        self.left = quota_of(pieces.work.seq_len, pieces.cp_size)  # rows that each rank may still take
        self.load = [0] * pieces.cp_size  # its pairs so far
        self.segments: list[tuple[int, int]] = []  # (start, rank)
        for index in range(num_cut):
            self._cut(index)
        leftovers = self._place(num_cut)
        for index in (*leftovers, *range(pieces.num_live, len(pieces.rows))):
            self._split(pieces.start[index], pieces.rows[index])

    @property
    def busiest(self) -> float:
        return max(self.load) * len(self.load) / max(self.pieces.work.total, 1)

    def describe(self) -> str:
        share = self.pieces.rows_before[self.num_cut] / self.pieces.work.seq_len
        return f"{self.num_cut:,} of {self.pieces.num_documents:,} documents cut over all ranks, {share:.2f} of the rows"

    def _give(self, start: int, rows: int, rank: int) -> int:
        if rows:
            self.segments.append((start, rank))
            prefix = self.pieces.work.prefix
            self.load[rank] += int(prefix[start + rows] - prefix[start])
            self.left[rank] -= rows
        return start + rows

    def _cut(self, index: int) -> None:
        """Zigzag pieces, two per rank, on multiples of a tile; or where its rows have equal work, one run per rank."""
        ranks = range(len(self.left))
        start, rows = self.pieces.start[index], self.pieces.rows[index]
        is_flat = self._is_flat(start, rows)
        tile = TILE
        while tile > 1 and rows < 2 * len(ranks) * _PIECE_TILES * tile:
            tile //= 2
        tiles, rest = divmod(rows, tile)
        share, more = divmod(tiles, len(ranks))
        with_more = sorted(ranks, key=lambda rank: (-self.left[rank], rank))[:more]
        parts = [tile * (share + (rank in with_more)) for rank in ranks]
        parts[0] += rest  # rank 0 has the last piece
        over = sum(max(part - left, 0) for part, left in zip(parts, self.left))
        parts = [min(part, left) for part, left in zip(parts, self.left)]
        for rank in sorted(ranks, key=lambda rank: (parts[rank] - self.left[rank], rank)):
            more = min(over, self.left[rank] - parts[rank])
            parts[rank] += more
            over -= more
        fronts = parts if is_flat else [(part + tile) // (2 * tile) * tile for part in parts]
        for rank in ranks:
            start = self._give(start, fronts[rank], rank)
        for rank in reversed(ranks):
            start = self._give(start, parts[rank] - fronts[rank], rank)

    def _is_flat(self, start: int, rows: int) -> bool:
        size = len(self.left)
        edges = self.pieces.work.prefix[start + rows * np.arange(size + 1) // size]
        return int(np.diff(edges).max()) * size <= (1 + TOLERANCE) * int(edges[-1] - edges[0])

    def _place(self, begin: int) -> list[int]:
        """Documents from `begin` on, whole, each to the rank with fewest pairs that has rows left; returns what fits nowhere."""
        pieces, left, load = self.pieces, self.left, self.load
        ranks = [(pairs, rank) for rank, pairs in enumerate(load) if left[rank]]
        heapq.heapify(ranks)
        most_left, leftovers = max(left), []
        for index in range(begin, pieces.num_live):
            rows = pieces.rows[index]
            passed = []
            while ranks and rows <= most_left and left[ranks[0][1]] < rows:
                passed.append(heapq.heappop(ranks))
            if rows > most_left:
                leftovers.append(index)
                continue
            rank = ranks[0][1]
            self.segments.append((pieces.start[index], rank))
            load[rank] += pieces.pairs[index]
            left[rank] -= rows
            heapq.heapreplace(ranks, (load[rank], rank))
            for entry in passed:
                heapq.heappush(ranks, entry)
            most_left = max(left)
        return leftovers

    def _split(self, start: int, rows: int) -> None:
        """Over the largest gaps, in order of falling ranks: what later rows read of earlier ones travels as in a zigzag."""
        parts = []
        for rank in sorted(range(len(self.left)), key=lambda rank: (-self.left[rank], rank)):
            parts.append((rank, min(self.left[rank], rows)))
            rows -= parts[-1][1]
            if not rows:
                break
        for rank, part in sorted(parts, reverse=True):
            start = self._give(start, part, rank)
