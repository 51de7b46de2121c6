"""Runs: who owns which positions; and Work: how even any runs make the pairs of some masks, without listing rows. numpy alone."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ringflash.mask import Mask


@dataclass(frozen=True, eq=False)
class Runs:
    """Who owns what: positions starts[i] .. starts[i + 1] - 1 (the last: to the end) belong to rank owners[i].

    starts, owners: int64 [n], read-only; starts sorted from 0; neighbours have different owners. reason: what was decided.
    """

    starts: np.ndarray
    owners: np.ndarray
    reason: str = field(default="")

    @classmethod
    def read_only(cls, starts: np.ndarray, owners: np.ndarray, reason: str = "") -> Runs:
        """From copies of starts and owners."""
        copies = [np.array(values, dtype=np.int64) for values in (starts, owners)]
        for values in copies:
            values.flags.writeable = False
        return cls(*copies, reason)

    @cached_property
    def key(self) -> bytes:
        """Equal for equal runs."""
        return self.starts.tobytes() + self.owners.tobytes()

    def __reduce__(self) -> tuple:
        return Runs.read_only, (self.starts, self.owners, self.reason)  # an unpickled array would be writeable

    def check(self, seq_len: int, cp_size: int) -> None:
        """Raises ValueError unless these are runs of seq_len positions that give every rank its share of rows."""
        starts, owners = self.starts, self.owners
        is_sound = starts[0] == 0 and (np.diff(starts) > 0).all() and starts[-1] < seq_len and (owners >= 0).all()
        rows = np.bincount(owners, weights=np.diff(starts, append=seq_len)).tolist() if is_sound else []
        if rows != [quota for quota in quota_of(seq_len, cp_size) if quota]:
            raise ValueError(f"{starts.shape[0]} runs do not give {seq_len} positions evenly to {cp_size} ranks")

    def of(self, rank: int, seq_len: int) -> tuple[tuple[int, int, int], ...]:
        """The runs of a rank as (start, stop, 1)."""
        mine = self.owners == rank
        return tuple((start, stop, 1) for start, stop in zip(self.starts[mine].tolist(), self.stops(seq_len)[mine].tolist()))

    def stops(self, seq_len: int) -> np.ndarray:
        """int64 [n]: where each run ends."""
        return np.append(self.starts[1:], seq_len)


@dataclass(frozen=True)
class Cost:
    """busiest: allowed pairs of the busiest rank over those of the mean rank. waiting: the same when, hop by hop of a rotation,
    all wait for the busiest. reads: rows that ranks read of each other, over those of a full rotation; counted from the first to
    the last key of each run and part, so too many where a second part has gaps. No pairs: 1, 1, 0."""

    busiest: float
    waiting: float
    reads: float

    def __str__(self) -> str:
        return f"busiest rank {self.busiest:.2f}x the mean, {self.waiting:.2f}x hop by hop of a full rotation, of which {self.reads:.2f} is read"


class Work:
    """The allowed pairs of masks, added up: sums over any rows and keys from prefix sums, O(log S) each.

    Keys with documents of their own (cu_seqlens_k) have a layout of their own, of which nothing is known here: of such a mask the
    rows' pairs count, not where the keys lie.
    """

    def __init__(self, masks: Sequence[Mask], seq_len: int):
        self.seq_len = seq_len
        self._positions = np.arange(seq_len, dtype=np.int64)
        self._parts = []
        for mask in masks:
            is_elsewhere = mask.cu_seqlens_k is not None
            seq_len_k = int(mask.cu_seqlens_k[-1]) if is_elsewhere else seq_len
            for part in range(mask.num_parts):
                self._parts.append(_Interval(*mask.bounds(self._positions, seq_len, seq_len_k, part), is_elsewhere))
        self.prefix = sum(part.stop_sums - part.first_sums for part in self._parts)  # int64 [S + 1]: pairs of the rows before
        self.total = int(self.prefix[-1])

    def components(self) -> np.ndarray:
        """int64 [m + 1]: from 0 to S, the boundaries that no interval crosses: of documents, or of whatever else is closed."""
        inner = self._positions[1:]
        is_cut = np.ones(inner.shape, dtype=np.bool_)
        for part in self._parts:
            between = part.first[1:] if part.is_elsewhere else inner
            is_cut &= (part.stop[:-1] <= between) & (part.first[1:] >= between)
        return np.concatenate(([0], inner[is_cut], [self.seq_len]))

    def cost(self, runs: Runs, cp_size: int) -> Cost:
        if not self.total:
            return Cost(1.0, 1.0, 0.0)
        starts, stops, owners = runs.starts, runs.stops(self.seq_len), runs.owners
        pairs = np.zeros((cp_size, cp_size), dtype=np.int64)  # [reader, owner]
        spans = []
        for part in self._parts:
            if part.is_elsewhere:
                sums = part.stop_sums - part.first_sums
                np.add.at(pairs, (owners, owners), sums[stops] - sums[starts])
                continue
            low, high = part.first[starts], part.stop[stops - 1]
            spans.append((low, high))
            # Key runs first_run .. first_run + count - 1 hold what a run reads; all (run, key run) pairs, flat.
            first_run = np.searchsorted(starts, low, side="right") - 1
            count = np.where(low < high, np.searchsorted(starts, high) - first_run, 0)
            run = np.repeat(np.arange(starts.shape[0]), count)
            key_run = np.arange(run.shape[0]) + np.repeat(first_run - (np.cumsum(count) - count), count)
            found = part.pairs(starts[run], stops[run], starts[key_run], stops[key_run])
            np.add.at(pairs, (owners[run], owners[key_run]), found)
        mean = self.total / cp_size
        ranks = np.arange(cp_size)
        waiting = sum(int(pairs[ranks, (ranks + hops) % cp_size].max()) for hops in range(cp_size))
        low, high = (np.stack(ends) for ends in zip(*spans)) if spans else (np.empty((0, starts.shape[0]), dtype=np.int64),) * 2
        reads = sum(self._reads_of_others(low[:, owners == rank], high[:, owners == rank], starts[owners == rank],
                                          stops[owners == rank]) for rank in range(cp_size))
        return Cost(int(pairs.sum(axis=1).max()) / mean, waiting / mean, reads / max(self.seq_len * (cp_size - 1), 1))

    @staticmethod
    def _reads_of_others(low: np.ndarray, high: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> int:
        """Positions in the union of [low, high) (any shape) outside the runs [starts, stops)."""
        edges = np.concatenate((low.ravel(), high.ravel(), starts, stops))
        reads, owned = np.ones(low.size, dtype=np.int64), np.ones(starts.shape, dtype=np.int64)
        order = np.argsort(edges, kind="stable")
        lengths = np.diff(edges[order])
        depth = np.cumsum(np.concatenate((reads, -reads, 0 * owned, 0 * owned))[order])[:-1]
        own = np.cumsum(np.concatenate((0 * reads, 0 * reads, owned, -owned))[order])[:-1]
        return int(lengths[(depth > 0) & (own == 0)].sum())


class _Interval:
    """Row i sees keys first[i] .. stop[i] - 1: int64 [S] each, non-decreasing; *_sums: int64 [S + 1], their prefix sums."""

    def __init__(self, first: np.ndarray, stop: np.ndarray, is_elsewhere: bool):
        self.first, self.stop, self.is_elsewhere = first, stop, is_elsewhere
        self.first_sums, self.stop_sums = prefix_sums(first), prefix_sums(stop)

    def pairs(self, row_start: np.ndarray, row_stop: np.ndarray, key_start: np.ndarray, key_stop: np.ndarray) -> np.ndarray:
        """int64 [n]: allowed pairs between rows row_start .. row_stop - 1 and keys key_start .. key_stop - 1."""
        rows, keys = (row_start, row_stop), (key_start, key_stop)
        return self._clipped(self.stop, self.stop_sums, rows, keys) - self._clipped(self.first, self.first_sums, rows, keys)

    @staticmethod
    def _clipped(ends: np.ndarray, sums: np.ndarray, rows: tuple, keys: tuple) -> np.ndarray:
        # The sum over rows of ends clipped to [low, high]: ends do not decrease, so the clipped rows are a head and a tail.
        (start, stop), (low, high) = rows, keys
        head, tail = (np.clip(np.searchsorted(ends, key), start, stop) for key in (low, high))
        return (head - start) * low + sums[tail] - sums[head] + (stop - tail) * high


def quota_of(seq_len: int, cp_size: int) -> list[int]:
    return [seq_len // cp_size + (rank < seq_len % cp_size) for rank in range(cp_size)]


def runs_of(segments: Iterable[tuple[int, int]], reason: str = "") -> Runs:
    """Runs from (start, rank) in any order; neighbours of one rank become one run."""
    starts, owners = np.array(sorted(segments), dtype=np.int64).reshape(-1, 2).T
    turns = np.flatnonzero(np.concatenate(([True], owners[1:] != owners[:-1])))
    return Runs.read_only(starts[turns], owners[turns], reason)


def prefix_sums(values: np.ndarray) -> np.ndarray:
    sums = np.zeros(values.shape[0] + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return sums
