"""Sorted sets of rows as ranges, and the arithmetic that takes intervals of positions to rows of a block.

A set of rows is `RowRanges`: a tuple of (start, stop), sorted, disjoint, none empty, none touching the next.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

RowRanges = tuple[tuple[int, int], ...]


def num_rows(ranges: RowRanges) -> int:
    return sum(stop - start for start, stop in ranges)


def row_index(ranges: RowRanges) -> np.ndarray:
    """int64 [num_rows]: the rows of `ranges`, one by one, sorted."""
    if not ranges:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in ranges])


def true_runs(flags: np.ndarray, edges: np.ndarray | None = None) -> RowRanges:
    """The runs of True in `flags` (bool [n]) as ranges of indices, or of edges (int64 [n + 1]): flag i spans edges i, i + 1."""
    if not flags.any():
        return ()
    padded = np.zeros(flags.shape[0] + 2, dtype=np.bool_)
    padded[1:-1] = flags
    turns = np.flatnonzero(padded[1:] != padded[:-1])
    if edges is not None:
        turns = edges[turns]
    turns = turns.tolist()
    return tuple(zip(turns[::2], turns[1::2]))


def union_of_intervals(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """The union of [first[i], stop[i]), both non-decreasing [n]: int64 [m, 2], sorted and disjoint."""
    filled = first < stop
    if not filled.all():
        first, stop = first[filled], stop[filled]
    if not first.shape[0]:
        return np.empty((0, 2), dtype=np.int64)
    gaps = np.flatnonzero(first[1:] > stop[:-1])
    starts = first[np.concatenate(([0], gaps + 1))]
    stops = stop[np.concatenate((gaps, [first.shape[0] - 1]))]
    return np.stack((starts, stops), axis=1)


def union_of_sets(*sets: np.ndarray) -> np.ndarray:
    """The union of sets of ranges, int64 [m, 2] each, sorted and disjoint: one such set."""
    table = np.concatenate(sets)
    table = table[np.argsort(table[:, 0], kind="stable")]
    return union_of_intervals(table[:, 0], np.maximum.accumulate(table[:, 1]))


def union_of_ranges(sets: Iterable[RowRanges]) -> RowRanges:
    """All rows of these sets."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(pair for ranges in sets for pair in ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


class Runs:
    """Sorted values made of runs (start, stop, stride): the positions of a shard, or the rows that arrived of a block."""

    def __init__(self, runs: Iterable[tuple[int, int, int]]):
        table = np.array(list(runs), dtype=np.int64).reshape(-1, 3)
        self.start, self.stride = table[:, 0], table[:, 2]
        self.count = -(-(table[:, 1] - table[:, 0]) // table[:, 2])
        ends = np.cumsum(self.count)
        self.base = ends - self.count
        self.total = int(ends[-1]) if ends.shape[0] else 0

    def count_below(self, values: np.ndarray) -> np.ndarray:
        """int64 [n]: how many of these values lie below each of `values`: searchsorted, without listing them."""
        if not self.total:
            return np.zeros(values.shape, dtype=np.int64)
        if self.start.shape[0] == 1:
            return np.clip(_steps_to(values, self.start[0], self.stride[0]), 0, self.count[0])
        run = np.maximum(np.searchsorted(self.start, values, side="right") - 1, 0)
        within = np.clip(_steps_to(values, self.start[run], self.stride[run]), 0, self.count[run])
        return self.base[run] + within


class ShardTable:
    """The runs of all ranks in one table, so that reads meet every owner at once."""

    def __init__(self, shards: list[Runs]):
        self.owner = np.repeat(np.arange(len(shards)), [s.start.shape[0] for s in shards])
        self.start, self.stride, self.count, self.base = (
            np.concatenate([getattr(s, name) for s in shards]) for name in ("start", "stride", "count", "base")
        )

    def rows_of_owners(self, reads: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """reads: int64 [m, 2], sorted disjoint position ranges. Returns owner, start, stop: int64 [n] each, ranges of local rows
        of each owner's block, sorted by owner and row; ranges of one owner neither overlap nor touch."""
        # The reads that meet a run are neighbours: all pairs of run and read, flat, so that the cost is what meets, not m * runs.
        first_read = np.searchsorted(reads[:, 1], self.start, side="right")
        meets = np.searchsorted(reads[:, 0], self.start + (self.count - 1) * self.stride, side="right") - first_read
        run = np.repeat(np.arange(meets.shape[0]), meets)
        read = np.arange(run.shape[0]) + np.repeat(first_read - (np.cumsum(meets) - meets), meets)
        start, stride, count, base = self.start[run], self.stride[run], self.count[run], self.base[run]
        low = np.clip(_steps_to(reads[read, 0], start, stride), 0, count) + base
        high = np.clip(_steps_to(reads[read, 1], start, stride), 0, count) + base
        is_read = low < high  # a stride may step over a read
        owner, low, high = self.owner[run[is_read]], low[is_read], high[is_read]
        if owner.shape[0] < 2:
            return owner, low, high
        parted = np.flatnonzero((owner[1:] != owner[:-1]) | (low[1:] != high[:-1]))
        opens, closes = np.concatenate(([0], parted + 1)), np.concatenate((parted, [owner.shape[0] - 1]))
        return owner[opens], low[opens], high[closes]


def _steps_to(values: np.ndarray, start: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """How many members of start, start + stride, ... lie below each value (negative before the start)."""
    return -((start - values) // stride)
