"""How the rows of a block reach their readers: round the ring or straight, and the messages and stops that follow.

Note [Only needed rows travel], Note [Ring or direct] and Note [dK and dV travel one step late] in DESIGN.md. Whatever the way of
routing, its result is a `Route`: the stops at which rows are read and the messages that bring them there.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ringflash.ring.gathered import Chunks, position_runs
from ringflash.ring.message import KINDS, Message
from ringflash.ring.ranges import RowRanges, num_rows, true_runs

UP, DOWN = 1, -1
LANES = (UP, DOWN)
DIRECT = 0  # the lane of what goes straight from its owner to a reader
ROUTINGS = ("ring", "direct", "allgather")
_FEW = 1 / 3  # of a full rotation's rows
_MOST_HELD = 3  # times a rank's own rows, which a rank may have to hold at once
_CLEAR_SAVING = 0.1  # of the ring's rows: less is not worth messages between any two ranks, of which more cross from host to host


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

    @property
    def rows_read_elsewhere(self) -> int:
        """Rows that others than the owner read, once for each reader: no routing sends fewer."""
        return int((self.lengths * (self.readers.sum(axis=0) - self.readers[self.owner])).sum())

    def rows_of(self, reader: int) -> RowRanges:
        """The rows that one rank reads."""
        return true_runs(self.readers[reader], self.edges)

    def unread(self, num_rows: int) -> RowRanges:
        """Rows of the block, num_rows in all, that no rank reads."""
        read = true_runs(self.readers.any(axis=0), self.edges)
        edges = [0, *(edge for run in read for edge in run), num_rows]
        return tuple((start, stop) for start, stop in zip(edges[::2], edges[1::2]) if start < stop)


@dataclass
class Route:
    """stops: (rank, step, owner, lane, rows) wherever a rank reads rows that arrived; messages: all, unsorted.

    kinds: of messages with rows of a block, and of those with their gradients."""

    stops: list[tuple[int, int, int, int, RowRanges]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    kinds: tuple[str, str] = KINDS["kv"]


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


def rows_rotated(demands: list[Demand], lanes: list[np.ndarray]) -> int:
    """Rows that the ring sends, each counted once per hop; lanes: what choose_lanes chose."""
    return sum(int((d.lengths * np.where(lane == UP, d.last[UP], d.last[DOWN])).sum()) for d, lane in zip(demands, lanes))


def why_direct(rows: dict[str, int], ring: Route) -> str:
    """Why owner to reader directly is better than the ring whose route this is; "" where it is not."""
    if rows["direct"] < (1 - _CLEAR_SAVING) * rows["ring"]:
        return "fewer bytes"
    steps = {step for _, step, *_ in ring.stops}
    return "a ring has steps without work" if len(steps) < max(steps, default=0) else ""


def why_allgather(demands: list[Demand], chunks: Sequence[Chunks]) -> str:
    """Why all that is read should be there at once, as one visit; "" where it should not.

    Several blocks of which little is read: each would be a small kernel, and all together hide behind the visit of step 0.
    """
    cp_size, lengths = len(chunks), [sum(-(-(stop - start) // stride) for start, stop, stride in shard) for shard in chunks]
    rows = sum(d.readers @ d.lengths * (np.arange(cp_size) != d.owner) for d in demands)
    owners = sum(d.readers.any(axis=1) & (np.arange(cp_size) != d.owner) for d in demands)
    if max(owners) < 3 or max(rows) > _MOST_HELD * max(lengths) or sum(rows) > _FEW * (cp_size - 1) * sum(lengths):
        return ""
    return "little is read" if all(position_runs(blocks_read(demands, rank), chunks, rank) for rank in np.flatnonzero(rows)) else ""


def blocks_read(demands: list[Demand], reader: int) -> list[tuple[int, RowRanges]]:
    """(owner, rows) of all blocks of others of which a rank reads anything."""
    return [(d.owner, d.rows_of(reader)) for d in demands if d.owner != reader and d.readers[reader].any()]


def add_direct(route: Route, demands: list[Demand], cp_size: int) -> None:
    """Adds all messages of owners to readers, and home again, each rank sending to one and receiving from one in a step."""
    found = [(d.owner, int(reader), d.rows_of(reader)) for d in demands
             for reader in np.flatnonzero(d.readers.any(axis=1)) if reader != d.owner]
    block, gradient = route.kinds
    steps = _steps_of([(owner, reader, num_rows(rows)) for owner, reader, rows in found], cp_size)
    for (owner, reader, rows), step in zip(found, steps):
        route.messages.append(Message(step - 1, block, owner, reader, owner, DIRECT, rows))
        route.stops.append((reader, step, owner, DIRECT, rows))
        route.messages.append(Message(step + 1, gradient, reader, owner, owner, DIRECT, rows))


def add_allgather(route: Route, demands: list[Demand], chunks: Sequence[Chunks], cp_size: int) -> None:
    """Adds all messages of owners to readers in one step, and all gradients home in another: fewest exchanges, all rows at once.

    chunks: of every owner's shard. A message is a run of rows between which, in order of position, lie neither rows of another owner
    that the reader reads nor its own (or a whole block, where there are too many such runs). The lane of the n-th message between two ranks is
    1 + their distance + n * cp_size, so it is neither a ring's nor DIRECT, and no rank has two blocks of one lane.
    """
    block, gradient = route.kinds
    for reader in range(cp_size):
        blocks = blocks_read(demands, reader)
        runs = position_runs(blocks, chunks, reader)
        parcels = blocks if runs is None else [(owner, ((start, stop),)) for owner, start, stop in runs]
        number: Counter[int] = Counter()
        for owner, rows in parcels:
            lane = 1 + (reader - owner) % cp_size + number[owner] * cp_size
            number[owner] += 1
            route.messages.append(Message(0, block, owner, reader, owner, lane, rows))
            route.stops.append((reader, 1, owner, lane, rows))
            route.messages.append(Message(2, gradient, reader, owner, owner, lane, rows))


def _steps_of(transfers: list[tuple[int, int, int]], cp_size: int) -> list[int]:
    """A step >= 1 for each transfer (owner, reader, rows): no two of an owner, nor two of a reader, in one step.

    By the distance from owner to reader, leaving out distances that nobody needs; or, where that takes fewer steps, the largest
    transfer first, each in the first step in which both its ends are free, so that a rank's first block comes during step 0.
    """
    distances = [(reader - owner) % cp_size for owner, reader, _ in transfers]
    number = {distance: step for step, distance in enumerate(sorted(set(distances)), start=1)}
    busy_sending, busy_receiving = [0] * cp_size, [0] * cp_size  # bit i: in step i + 1
    early = [0] * len(transfers)
    for i in sorted(range(len(transfers)), key=lambda i: (-transfers[i][2], distances[i], transfers[i][0])):
        owner, reader, _ = transfers[i]
        busy = busy_sending[owner] | busy_receiving[reader]
        free = ~busy & (busy + 1)                           # the lowest bit that neither has set
        busy_sending[owner] |= free
        busy_receiving[reader] |= free
        early[i] = free.bit_length()
    return early if max(early, default=0) < len(number) else [number[distance] for distance in distances]


def add_rotation(route: Route, demand: Demand, lane_of_segment: np.ndarray, lane: int, cp_size: int) -> None:
    """Adds what `lane` carries of one block: hop by hop, each row as far as its last reader, its gradient home from there."""
    owner = demand.owner
    last = np.where(lane_of_segment == lane, demand.last[lane], 0)
    farthest = int(last.max(initial=0))
    if not farthest:
        return
    block, gradient = route.kinds
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
        route.messages.append(Message(step, block, src, dst, owner, lane, rows))
        if step:  # the owner's own partial stays at home
            route.messages.append(Message(step + 1, gradient, src, dst, owner, lane, rows))
        if step + 1 in reads_at_hop:
            route.stops.append((dst, step + 1, owner, lane, rows))
        if ends_at[step + 1]:
            home = true_runs(last == step + 1, demand.edges)
            route.messages.append(Message(step + 2, gradient, dst, owner, owner, lane, home))
