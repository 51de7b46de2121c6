"""All that a rank reads of others as one visit, where it arrives in one step (routing="allgather").

Rows of several owners, sorted by position, are to a query what rows of one are: an interval (Note [Intervals] in DESIGN.md). So one
kernel does what would be one for each block, and a tile of queries folds once. Each message is a run of rows that no other owner's
interrupt; so messages are received side by side where the visit reads them, and its gradients leave from where it wrote them.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ringflash.ring.cache import BoundedCache
from ringflash.ring.ranges import RowRanges

if TYPE_CHECKING:
    from ringflash.ring.plan import Intervals, Plan, Visit

Chunks = Sequence[tuple[int, int, int]]  # of a shard: positions (start, stop, stride), in order
Run = tuple[int, int, int]  # owner, first and stop row of its block
_RUNS_PER_BLOCK = 16  # more, on average, and each block travels as one message, and is one visit

_gathered = BoundedCache(max_weight=256)


def position_runs(blocks: Sequence[tuple[int, RowRanges]], chunks: Sequence[Chunks]) -> list[Run] | None:
    """Rows of some owners' blocks in order of position, in as few runs as can be. chunks: of every owner's shard.

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
    runs: list[Run] = []
    for _, owner, low, high in sorted(found):
        if runs and runs[-1][0] == owner and runs[-1][2] == low:
            runs[-1] = (owner, runs[-1][1], high)
        else:
            runs.append((owner, low, high))
    return runs if len(runs) <= _RUNS_PER_BLOCK * len(blocks) else None


@dataclass(frozen=True)
class GatheredVisit:
    """The visits of one rank in one step as one (of each part): it stands in for a Visit where kernels are launched.

    places: of each block, by (owner, lane): its rows, and where they lie among all, (first, stop).
    """

    plan: Plan = field(repr=False, compare=False)
    rank: int
    step: int
    part: int
    places: dict[tuple[int, int], tuple[RowRanges, int, int]] = field(repr=False, compare=False)
    positions: np.ndarray = field(repr=False, compare=False)  # int64 [num_rows], sorted
    owner: str = "several ranks"
    is_own: bool = False

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]

    @property
    def key(self) -> tuple:
        return (self.plan.key, self.rank, self.step, "gathered", self.part)

    def intervals(self) -> Intervals:
        """As Visit.intervals, over all rows."""
        first, stop = self.plan.bounds(self.rank, self.part)
        k_lo, k_hi = (np.searchsorted(self.positions, end) for end in (first, stop))
        q_lo, q_hi = (np.cumsum(np.bincount(end, minlength=self.num_rows + 1))[: self.num_rows] for end in (k_hi, k_lo))
        return tuple(end.astype(np.int32) for end in (k_lo, k_hi, q_lo, q_hi))


def visits_of(plan: Plan, rank: int, step: int) -> tuple[Visit | GatheredVisit, ...]:
    """What a rank launches kernels for in a step, in their order."""
    if step >= plan.num_steps:
        return ()
    visits = plan.visits(rank, step)
    if step == 0 or plan.routing != "allgather" or len(visits) < 2:
        return visits
    return _gathered.get_or_make((plan.key, rank, step), lambda: _gather(plan, visits) or visits, lambda _: 1)


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
