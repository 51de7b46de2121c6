"""All that a rank reads of others as one visit, where it arrives in one step (routing="allgather").

Rows of several owners, sorted by position, are to a query what rows of one are: an interval (Note [Intervals] in DESIGN.md). So one
kernel does what would be one for each block, and a tile of queries folds once. Each message is a run of rows that no other owner's
interrupt; so messages are received side by side where the visit reads them, and its gradients leave from where it wrote them.

In the forward, queries that read such rows read those of their own rank there too, which are copied between them: no query is then
visited twice, and nothing is folded. They are few, and see many keys: on a GPU the last of their tiles would leave multiprocessors
idle, so documents that need nothing of others are visited with them. In the backward visits add up, and own keys are all in the first.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ringflash.ring.cache import BoundedCache
from ringflash.ring.ranges import RowRanges, row_index, union_of_intervals

if TYPE_CHECKING:
    from ringflash.ring.plan import Intervals, Plan, Visit

Chunks = Sequence[tuple[int, int, int]]  # of a shard: positions (start, stop, stride), in order
Run = tuple[int, int, int]  # owner, first and stop row of its block
_RUNS_PER_BLOCK = 16  # more, on average, and each block travels as one message, and is one visit
# What must be left to step 0 when own keys move to step 1, to hide the exchange: half of a rank's pairs; or less, down to _LEAST_ALONE,
# where that is so many for each row that arrives (4 query heads per KV head: 620 TFLOP/s on documents, 350 GB/s by copies, on H200s).
_ALONE, _LEAST_ALONE, _PAIRS_PER_ROW = 0.5, 0.4, 450
_FILL, _MOST_FILLERS = 0.25, 16  # of the pairs of such a visit: what is added of queries that read own keys alone; each run is a copy

_gathered = BoundedCache(max_weight=256)


def position_runs(blocks: Sequence[tuple[int, RowRanges]], chunks: Sequence[Chunks], reader: int) -> list[Run] | None:
    """Rows of some owners' blocks in order of position, in as few runs as can be: between the rows of one lie none of another's nor
    of the reader's shard. chunks: of every owner's shard.

    None where rows are strided, or would be in too many runs.
    """
    found: list[tuple[int, int, int, int]] = []  # position, owner, start, stop
    for owner, rows in blocks:
        base = 0
        for first, stop, stride in chunks[owner]:
            if stride != 1:
                return None
            for start, end in rows:
                low, high = max(start, base), min(end, base + stop - first)
                if low < high:
                    found.append((first + low - base, owner, low, high))
            base += stop - first
    own = np.array([first for first, *_ in chunks[reader]])
    runs: list[Run] = []
    parted = 0  # chunks of the reader's that begin before the end of the last run
    for position, owner, low, high in sorted(found):
        before = int(np.searchsorted(own, position))
        if runs and runs[-1][0] == owner and runs[-1][2] == low and before == parted:
            runs[-1] = (owner, runs[-1][1], high)
        else:
            runs.append((owner, low, high))
        parted = before
    return runs if len(runs) <= _RUNS_PER_BLOCK * len(blocks) else None


@dataclass(frozen=True)
class GatheredVisit:
    """The visits of one rank in one step as one (of each part): it stands in for a Visit where kernels are launched.

    places: of each block that arrived, by (owner, lane): its rows, and where they lie among all, (first, stop).
    own: runs (start, stop) of the rank's own key rows between those, and where each begins among all. queries: which are visited,
    None: all that see anything of it.
    """

    plan: Plan = field(repr=False, compare=False)
    rank: int
    step: int
    part: int
    places: dict[tuple[int, int], tuple[RowRanges, int, int]] = field(repr=False, compare=False)
    positions: np.ndarray = field(repr=False, compare=False)  # int64 [num_rows], sorted
    own: tuple[tuple[int, int, int], ...] = ()
    queries: np.ndarray | None = field(default=None, repr=False, compare=False)  # bool [queries of rank]
    owner: str = "several ranks"
    is_own: bool = False

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def num_own_rows(self) -> int:
        return sum(stop - start for start, stop, _ in self.own)

    @property
    def key(self) -> tuple:
        return (self.plan.key, self.rank, self.step, "gathered, own keys too" if self.own else "gathered", self.part)

    @cached_property
    def num_pairs(self) -> int:
        k_lo, k_hi = self._query_side()
        return int((k_hi - k_lo).sum())

    def intervals(self) -> Intervals:
        """As Visit.intervals, over all rows."""
        return _both_sides(*self._query_side(), self.num_rows)

    def _query_side(self) -> tuple[np.ndarray, np.ndarray]:
        ends = (np.searchsorted(self.positions, end) for end in self.plan.bounds(self.rank, self.part))
        return _only(self.queries, *ends)


@dataclass(frozen=True)
class OwnVisit:
    """The visit of a rank's own block for only those `queries` (bool, [queries of rank]) that no later visit sees."""

    visit: Visit
    queries: np.ndarray = field(repr=False, compare=False)
    is_own: bool = True

    def __getattr__(self, name: str):
        """step, rank, owner, lane, rows, num_rows, part and plan: those of the block's visit."""
        if name.startswith("__") or name == "visit":
            raise AttributeError(name)
        return getattr(self.visit, name)

    @property
    def key(self) -> tuple:
        return (*self.visit.key[:-1], "alone", self.visit.part)

    @cached_property
    def num_pairs(self) -> int:
        k_lo, k_hi, *_ = self.intervals()
        return int((k_hi - k_lo).sum(dtype=np.int64))

    def intervals(self) -> Intervals:
        return _both_sides(*_only(self.queries, *self.visit.intervals()[:2]), self.visit.num_rows)


def visits_of(plan: Plan, rank: int, step: int, pass_: str) -> tuple[Visit | OwnVisit | GatheredVisit, ...]:
    """What a rank launches kernels for in a step, in their order. pass_: "forward" or "backward"."""
    if step >= plan.num_steps:
        return ()
    if plan.routing != "allgather":
        return plan.visits(rank, step)
    by_step = _gathered.get_or_make((plan.key, rank, pass_), lambda: _of_pass(plan, rank, pass_), lambda _: 1)
    return by_step[step]


def pairs_of(plan: Plan, rank: int, step: int, pass_: str) -> int:
    """Allowed (query, key) pairs that a rank computes in a step of a pass."""
    return sum(visit.num_pairs for visit in visits_of(plan, rank, step, pass_))


def own_keys_of(plan: Plan, rank: int, step: int, pass_: str) -> tuple[RowRanges, int]:
    """The rank's own key rows among what it reads in a step after the first, and the pairs that it computes with them."""
    visits = visits_of(plan, rank, step, pass_)
    if not (visits and isinstance(visits[0], GatheredVisit) and visits[0].own):
        return (), 0
    arrived = sum(visit.num_pairs for visit in plan.visits(rank, step))
    return tuple((start, stop) for start, stop, _ in visits[0].own), visits[0].num_pairs - arrived


def positions_of(plan: Plan, visit: Visit | OwnVisit | GatheredVisit) -> np.ndarray:
    """int64 [num_rows]: the positions of a visit's key rows."""
    if isinstance(visit, GatheredVisit):
        return visit.positions
    return plan.layout_k.positions(visit.owner)[row_index(visit.rows)]


def _of_pass(plan: Plan, rank: int, pass_: str) -> tuple[tuple[Visit | OwnVisit | GatheredVisit, ...], ...]:
    """By step."""
    own, *rest = by_step = [plan.visits(rank, step) for step in range(plan.num_steps)]
    if not rest or not rest[0]:
        return tuple(by_step)
    gathered = _gather(plan, rest[0])
    if gathered is not None and own and pass_ == "forward" and plan.rotates == "kv" and plan.mask.num_parts == 1:
        both = _with_own_keys(plan, own[0], gathered[0])
        if both is not None:
            return (both[0],), (both[1],)
    return own, rest[0] if gathered is None or len(rest[0]) == 1 else gathered


def _gather(plan: Plan, visits: Sequence[Visit]) -> tuple[GatheredVisit, ...] | None:
    """None where the rows of one block lie between those of another."""
    owned = {visit.owner: plan.layout_k.positions(visit.owner) for visit in visits}
    blocks = {(visit.owner, visit.lane): visit.rows for visit in visits}
    if any(len(rows) != 1 for rows in blocks.values()):
        return None
    found = sorted(((owned[key[0]][slice(*rows[0])], key) for key, rows in blocks.items()), key=lambda block: block[0][0])
    positions = np.concatenate([of_block for of_block, _ in found])
    if (np.diff(positions) < 0).any():
        return None
    places, first = {}, 0
    for of_block, key in found:
        places[key] = (blocks[key], first, first + of_block.shape[0])
        first += of_block.shape[0]
    rank, step = visits[0].rank, visits[0].step
    return tuple(GatheredVisit(plan, rank, step, part, places, positions) for part in sorted({visit.part for visit in visits}))


def _with_own_keys(plan: Plan, own: Visit, gathered: GatheredVisit) -> tuple[OwnVisit, GatheredVisit] | None:
    """Both visits, so that each query is in one. None where that is not worth it, or own rows would lie inside a block."""
    k_lo, k_hi, *_ = gathered.intervals()
    ends = plan.bounds(own.rank, own.part)
    taken = _closed(k_lo < k_hi, *ends)
    num_pairs = own.num_pairs + gathered.num_pairs
    least = min(_ALONE * num_pairs, max(_LEAST_ALONE * num_pairs, _PAIRS_PER_ROW * gathered.num_rows))
    spare = OwnVisit(own, ~taken).num_pairs - least
    if spare < 0:
        return None
    own_lo, own_hi, *_ = own.intervals()
    seen = gathered.num_pairs + int((own_hi - own_lo)[taken].sum(dtype=np.int64))
    for first, stop in _of_own_keys(taken, *ends, own_hi - own_lo, min(spare, _FILL * seen)):
        taken[first:stop] = True
    alone = OwnVisit(own, ~taken)
    rows = row_index(tuple(map(tuple, union_of_intervals(own_lo[taken], own_hi[taken]).tolist())))
    positions = plan.layout_k.positions(own.rank)[rows]
    before = np.searchsorted(gathered.positions, positions)  # rows that arrive and lie before an own one
    if not rows.size or not np.isin(before, [*(first for _, first, _ in gathered.places.values()), gathered.num_rows]).all():
        return None
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(before) != 0)) + 1
    runs = tuple((int(run[0]), int(run[-1]) + 1, int(at[0]) + offset) for run, at, offset in zip(
        np.split(rows, cuts), np.split(before, cuts), [0, *cuts.tolist()]))
    if len(runs) > _RUNS_PER_BLOCK * len(gathered.places):
        return None
    places = {}
    for key, (block, first, stop) in gathered.places.items():
        shift = int(np.searchsorted(before, first, side="right"))
        places[key] = (block, first + shift, stop + shift)
    together = GatheredVisit(plan, own.rank, gathered.step, own.part, places, np.insert(gathered.positions, before, positions),
                             runs, taken)
    return alone, together


def _closed(sees: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """bool [queries]: those that see anything that arrived, and any between two of them whose keys overlap: an empty interval there
    could not keep the ends in order. (The same cannot happen on the other side: where the keys of two queries overlap, one between
    them sees nothing that neither sees.) first, stop: of all their keys, in positions."""
    taken, where = sees.copy(), np.flatnonzero(sees)
    last, following = where[:-1], where[1:]
    overlap = (following - last > 1) & (stop[last] > first[following])
    for a, b in zip(last[overlap], following[overlap]):
        taken[a:b] = True
    return taken


def _of_own_keys(taken: np.ndarray, first: np.ndarray, stop: np.ndarray, num_keys: np.ndarray, most: float) -> list[tuple[int, int]]:
    """Queries (first, stop) that share keys with no other query of this rank, nor with any that is taken: whole documents, or all that
    is here of one that goes on elsewhere, the largest first, of which all together have at most so many pairs. num_keys: of each query."""
    cuts = [0, *(np.flatnonzero(first[1:] >= stop[:-1]) + 1).tolist(), taken.shape[0]]
    alone = [(int(num_keys[a:b].sum(dtype=np.int64)), a, b) for a, b in zip(cuts, cuts[1:]) if not taken[a:b].any()]
    found = []
    for pairs, a, b in sorted(alone, key=lambda run: (-run[0], run[1])):
        if 0 < pairs <= most and len(found) < _MOST_FILLERS:
            found.append((a, b))
            most -= pairs
    return found


def _only(queries: np.ndarray | None, k_lo: np.ndarray, k_hi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The intervals of these queries; those of all others are empty, and lie where the keys of the last one before them end."""
    if queries is None:
        return k_lo, k_hi
    k_hi = np.maximum.accumulate(np.where(queries, k_hi, 0))
    return np.where(queries, k_lo, k_hi), k_hi


def _both_sides(k_lo: np.ndarray, k_hi: np.ndarray, num_rows: int) -> Intervals:
    q_lo, q_hi = (np.cumsum(np.bincount(end, minlength=num_rows + 1))[:num_rows] for end in (k_hi, k_lo))
    return tuple(end.astype(np.int32) for end in (k_lo, k_hi, q_lo, q_hi))
