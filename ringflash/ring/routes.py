"""How the rows of a block reach their readers: directions, hops, and the messages and stops that follow.

Note [Only needed rows travel] and Note [dK and dV travel one step late] in DESIGN.md. Whatever the way of routing, its result
is a `Route`: the stops at which rows are read and the messages that bring them there.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ringflash.ring.message import Message
from ringflash.ring.ranges import RowRanges, true_runs

UP, DOWN = 1, -1
LANES = (UP, DOWN)


@dataclass
class Demand:
    """Who reads which rows of one owner's block (the owner itself included).

    edges: int64 [segments + 1], local rows; between two edges all rows have the same readers.
    readers: bool [cp_size, segments]. last: per lane, int64 [segments]: hops to the last reader (0: nobody but the owner).
    """

    owner: int
    edges: np.ndarray
    readers: np.ndarray
    last: dict[int, np.ndarray]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.edges)

    def unread(self, num_rows: int) -> RowRanges:
        """Rows of the block, num_rows in all, that no rank reads."""
        read = true_runs(self.readers.any(axis=0), self.edges)
        edges = [0, *(edge for run in read for edge in run), num_rows]
        return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop)


@dataclass
class Route:
    """stops: (rank, step, owner, lane, rows) wherever a rank reads rows that arrived; messages: all, unsorted."""

    stops: list[tuple[int, int, int, int, RowRanges]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)


def hops(owner: int, cp_size: int, lane: int) -> np.ndarray:
    """int64 [cp_size]: hops from `owner` to each rank along `lane`."""
    return (np.arange(cp_size) - owner) * lane % cp_size


def demand_of(owner: int, cp_size: int, reader: np.ndarray, start: np.ndarray, stop: np.ndarray) -> Demand:
    """reader, start, stop: int64 [n]; the ranges of one reader neither overlap nor touch."""
    edges = np.unique(np.concatenate((start, stop)))
    turns = np.zeros((cp_size, max(edges.shape[0], 1)), dtype=np.int8)
    turns[reader, np.searchsorted(edges, start)] = 1
    turns[reader, np.searchsorted(edges, stop)] = -1
    readers = np.cumsum(turns, axis=1, dtype=np.int8)[:, :-1].astype(np.bool_)
    last = {lane: _last_hop(readers, hops(owner, cp_size, lane)) for lane in LANES}
    return Demand(owner, edges, readers, last)


def _last_hop(readers: np.ndarray, distance: np.ndarray) -> np.ndarray:
    far_first = np.argsort(-distance)
    farthest = distance[far_first][np.argmax(readers[far_first], axis=0)]  # argmax finds the first True
    return np.where(readers.any(axis=0), farthest, 0)


def choose_lanes(demands: list[Demand], lanes: tuple[int, ...]) -> list[np.ndarray]:
    """Per demand, int64 [segments]: the lane of each segment: the one with fewer hops to its last reader.

    One lane for the whole plan where that costs no more; ties follow the lane that most rows prefer, or else the first allowed.
    """
    if len(lanes) == 1:
        return [np.full(d.lengths.shape, lanes[0]) for d in demands]
    first, second = lanes
    prefer_first = sum(int(d.lengths[d.last[first] < d.last[second]].sum()) for d in demands)
    prefer_second = sum(int(d.lengths[d.last[second] < d.last[first]].sum()) for d in demands)
    if not prefer_second or not prefer_first:
        lane = second if prefer_second else first
        return [np.full(d.lengths.shape, lane) for d in demands]
    if prefer_first >= prefer_second:
        return [np.where(d.last[second] < d.last[first], second, first) for d in demands]
    return [np.where(d.last[first] < d.last[second], first, second) for d in demands]


def add_rotation(route: Route, demand: Demand, lane_of_segment: np.ndarray, lane: int, cp_size: int) -> None:
    """Adds what `lane` carries of one block: hop by hop, each row as far as its last reader, its gradient home from there."""
    owner = demand.owner
    last = np.where(lane_of_segment == lane, demand.last[lane], 0)
    farthest = int(last.max(initial=0))
    if not farthest:
        return
    distance = hops(owner, cp_size, lane)
    reads = (demand.readers & (last > 0)).any(axis=1)
    reads_at_hop = {int(distance[rank]) for rank in np.flatnonzero(reads)}

    ends_at = np.zeros(farthest + 1, dtype=np.bool_)
    ends_at[last] = True
    rows: RowRanges = ()
    for step in range(farthest):
        src, dst = (owner + lane * step) % cp_size, (owner + lane * (step + 1)) % cp_size
        if step == 0 or ends_at[step]:  # otherwise no row leaves the block here
            rows = true_runs(last > step, demand.edges)
        route.messages.append(Message(step, "kv", src, dst, owner, lane, rows))
        if step:  # the owner's own partial stays at home
            route.messages.append(Message(step + 1, "dkv", src, dst, owner, lane, rows))
        if step + 1 in reads_at_hop:
            route.stops.append((dst, step + 1, owner, lane, rows))
        if ends_at[step + 1]:
            home = true_runs(last == step + 1, demand.edges)
            route.messages.append(Message(step + 2, "dkv", dst, owner, owner, lane, home))
