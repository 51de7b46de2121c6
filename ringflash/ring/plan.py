"""Plan: per rank and step, what is computed and what is sent. Pure: a function of mask and layouts; numpy alone.

Every rank derives the same plan, so every rank knows all messages (Note [Messages are posted in one step by both ends] in
DESIGN.md). Forward steps are 0 .. num_steps - 1, backward steps 0 .. num_backward_steps - 1. In step s a rank posts one batch,
its sends and its receives of that step, then computes its visits of step s; what was received is there from step s + 1 on.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.ring import ranges, routes
from ringflash.ring.cache import BoundedCache
from ringflash.ring.message import KINDS, Message
from ringflash.ring.ranges import RowRanges, Runs
from ringflash.ring.transposed import TransposedMask, transpose

PASSES = ("forward", "backward")
Intervals = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Reads = tuple[np.ndarray, np.ndarray, np.ndarray]  # owner, start, stop: ranges of local rows, sorted

_plans = BoundedCache(max_weight=64)
_arrays = BoundedCache(max_weight=64 * 2**20)  # bytes of intervals and bounds, of all plans together


@dataclass(frozen=True)
class Visit:
    """What `rank` computes against rows of one owner's block in `step`: all its queries against these key rows.

    rows: local rows of the owner's block; they lie compacted, in this order, in the buffer that arrived (is_own: all the rank's
        own k, v, as they lie). num_rows: how many. lane: the direction they travelled in (0: they did not).
    part: which of the mask's intervals per row it computes. A block that both intervals of a mask read has two visits over the
        same rows, which arrived once; their gradients of k and v add up.
    Every rank has a visit to its own block in step 0, also when nothing in it is allowed or it has no rows, so that the first
    visit can initialise out, lse and the gradients; all other visits hold at least one allowed pair.
    """

    step: int
    rank: int
    owner: int
    lane: int
    rows: RowRanges
    num_rows: int
    part: int
    plan: Plan = field(repr=False, compare=False)

    @property
    def is_own(self) -> bool:
        return self.step == 0

    def intervals(self) -> Intervals:
        """k_lo, k_hi: int32 [queries of rank]: query i attends to the compacted rows k_lo[i] .. k_hi[i] - 1. q_lo, q_hi: int32
        [num_rows], the transpose. All non-decreasing; read-only. Computed when asked for; a bounded cache keeps the latest."""
        return _arrays.get_or_make(("intervals", self.key), self._intervals, _weigh)

    @property
    def key(self) -> tuple:
        """Hashable, equal for equal visits of equal plans."""
        return (self.plan.key, self.rank, self.step, self.owner, self.lane, self.part)

    @cached_property
    def num_pairs(self) -> int:
        """Allowed (query, key) pairs."""
        k_lo, k_hi = self._query_side()
        return int((k_hi - k_lo).sum())

    def _query_side(self) -> tuple[np.ndarray, np.ndarray]:
        shard = Runs(self.plan.layout_k.chunks(self.owner))
        arrived = Runs((start, stop, 1) for start, stop in self.rows)
        k_lo, k_hi = (arrived.count_below(shard.count_below(end)) for end in self.plan.bounds(self.rank, self.part))
        return k_lo, k_hi

    def _intervals(self) -> Intervals:
        k_lo, k_hi = self._query_side()
        # Row i reads key j when k_lo[i] <= j < k_hi[i], and both are monotone in i: so q_lo[j] is the number of rows with
        # k_hi <= j, and q_hi[j] of those with k_lo <= j.
        q_lo, q_hi = (np.cumsum(np.bincount(end, minlength=self.num_rows + 1))[: self.num_rows] for end in (k_hi, k_lo))
        return _read_only(*(end.astype(np.int32) for end in (k_lo, k_hi, q_lo, q_hi)))


class Plan:
    """Made by build_plan; immutable. key: hashable, equal for equal plans.

    routing: "ring" (neighbour to neighbour), "direct" (owner to reader) or "allgather" (owner to reader, all in one
    step). rows_by_routing: what the first two would send in a forward (the third: as the second). reason: why it is
    no ring; "as demanded" where the routing was the caller's choice, which asked_routing is.

    rotates: "kv", or "q": a plan for a backward in which the rows of q travel, with all that belongs to them. It is the plan of
    the transposed mask, so that everything here holds of it with the roles exchanged: `layout` is that of the keys, which stay,
    `layout_k` that of the queries, dead_k are queries, and what is said of dkv holds of dq.

    dkv messages: the partial that the visit of step s wrote leaves in step s + 1, added to what the rank received in step s for
    the same rows: rows that are read further on go on with the block, rows whose last reader this rank was go to their owner.
    A rank that forwards rows it does not read forwards what it received, and zeros where nothing was received yet.
    """

    def __init__(self, key: tuple, mask: Mask | TransposedMask, layout: Layout, layout_k: Layout, lanes: tuple[int, ...]):
        self.key = key
        self.reason = ""
        self.asked_routing = "auto"
        self.rotates = "q" if isinstance(mask, TransposedMask) else "kv"
        self.kinds = KINDS[self.rotates]
        self.routing = "ring"
        self.rows_by_routing: dict[str, int] = {}
        self.mask, self.layout, self.layout_k, self.lanes = mask, layout, layout_k, lanes
        self.cp_size = layout.cp_size
        self.num_steps = self.num_backward_steps = 1
        self._visits: dict[tuple[int, int], tuple[Visit, ...]] = {}
        self._messages: dict[str, tuple[Message, ...]] = {}
        self._sends: dict[tuple[str, int, int], tuple[Message, ...]] = {}
        self._recvs: dict[tuple[str, int, int], tuple[Message, ...]] = {}
        self._dead_q: list[RowRanges] = []
        self._dead_k: list[RowRanges] = []

    def visits(self, rank: int, step: int) -> tuple[Visit, ...]:
        """What the rank reads, in the order of folding; the same in forward and backward, but for own keys that the forward reads
        with those that arrive (gathered.visits_of: what kernels are launched for)."""
        return self._visits.get((rank, step), ())

    def sends(self, rank: int, step: int, pass_: str) -> tuple[Message, ...]:
        """What `rank` posts as sends in `step`, in the sorted order that both ends share. pass_: "forward" or "backward"."""
        return self._of(self._sends, rank, step, pass_)

    def recvs(self, rank: int, step: int, pass_: str) -> tuple[Message, ...]:
        """What `rank` posts as receives in `step`, in the sorted order that both ends share."""
        return self._of(self._recvs, rank, step, pass_)

    def messages(self, pass_: str) -> tuple[Message, ...]:
        """All messages of all ranks, sorted."""
        return self._messages[_check_pass(pass_)]

    def dead_q(self, rank: int) -> RowRanges:
        """Local rows of q that see no key at all."""
        return self._dead_q[rank]

    def dead_k(self, rank: int) -> RowRanges:
        """Local rows of k that no query of any rank sees."""
        return self._dead_k[rank]

    def bounds(self, rank: int, part: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """first, stop: int64 [queries of rank], one of the mask's intervals in global positions; read-only."""
        def make() -> tuple[np.ndarray, ...]:
            return _read_only(*_bounds(self.mask, self.layout, self.layout_k, rank, part))

        return _arrays.get_or_make(("bounds", self.key, rank, part), make, _weigh)

    def num_pairs(self, rank: int, step: int) -> int:
        """Allowed (query, key) pairs of what `rank` reads in `step` (gathered.pairs_of: of its kernels)."""
        return sum(visit.num_pairs for visit in self.visits(rank, step))

    def rows_sent(self, pass_: str, kind: str | None = None, rank: int | None = None) -> int:
        """Rows on the wire, in all or by one kind ("kv", "dkv"; "q", "dq") or sender, each counted once per hop."""
        chosen = self.messages(pass_)
        return sum(m.num_rows for m in chosen if kind in (None, m.kind) and rank in (None, m.src))

    def bytes_sent(
        self, pass_: str, *, batch: int, num_kv_heads: int, head_dim: int, itemsize: int, grad_itemsize: int = 4,
        rank: int | None = None, head_dim_v: int | None = None,
    ) -> int:
        """Bytes on the wire: K and V (or their gradients, of grad_itemsize) of each row, per KV head, not per query head.

        head_dim_v: of V, None for that of K."""
        per_row = batch * num_kv_heads * (head_dim + (head_dim if head_dim_v is None else head_dim_v))
        kv, dkv = (self.rows_sent(pass_, kind, rank) for kind in ("kv", "dkv"))
        return per_row * (kv * itemsize + dkv * grad_itemsize)

    @property
    def rotation_fraction(self) -> float:
        """Forward rows on the wire as a fraction of the full rotation, where every row visits every other rank."""
        full = self.layout_k.seq_len * (self.cp_size - 1)
        return self.rows_sent("forward") / full if full else 0.0

    def _of(self, table: dict, rank: int, step: int, pass_: str) -> tuple[Message, ...]:
        return table.get((_check_pass(pass_), rank, step), ())

    def _file(self, reads: list[list[Reads]], route: routes.Route) -> None:
        """reads: per part and rank, what its intervals read."""
        visits: dict[tuple[int, int], list[Visit]] = {}
        lengths = [self.layout_k.shard_len(rank) for rank in range(self.cp_size)]
        stops = [(rank, 0, rank, 0, ((0, rows),) if rows else ()) for rank, rows in enumerate(lengths)]
        for rank, step, owner, lane, rows in stops + route.stops:
            parts = [part for part, of_part in enumerate(reads) if len(reads) == 1 or _meets(of_part[rank], owner, rows)]
            visits.setdefault((rank, step), []).extend(
                Visit(step, rank, owner, lane, rows, ranges.num_rows(rows), part, self) for part in parts or (0,))
        # The order of folding: it decides the bits of out, so it is fixed here and nowhere else.
        in_order = attrgetter(*(("lane",) if self.routing == "allgather" else ("owner", "lane")), "part")
        self._visits = {at: tuple(sorted(of_step, key=in_order)) for at, of_step in visits.items()}
        messages = sorted(route.messages)
        self._messages = {"forward": tuple(m for m in messages if not m.is_gradient), "backward": tuple(messages)}
        for pass_ in PASSES:
            for table, end in ((self._sends, "src"), (self._recvs, "dst")):
                batches: dict[tuple[str, int, int], list[Message]] = {}
                for message in self._messages[pass_]:
                    batches.setdefault((pass_, getattr(message, end), message.step), []).append(message)
                table.update({at: tuple(batch) for at, batch in batches.items()})
        self.num_steps = 1 + max(step for _, step in self._visits)
        self.num_backward_steps = max([self.num_steps] + [m.step + 1 for m in messages[-1:]])


def build_plan(
    mask: Mask, layout: Layout, layout_k: Layout | None = None, *, lanes: tuple[int, ...] = routes.LANES, routing: str = "auto",
    rotates: str = "kv",
) -> Plan:
    """The plan of `mask` over q laid out by `layout` and k, v by `layout_k` (None: the same); of whole ring shards.

    routing: "ring", "direct", "allgather", or "auto": allgather where little is read, direct where that sends clearly fewer
    rows, else ring (Note [Ring or direct] in DESIGN.md).
    lanes: the directions that a ring may use, +1 towards higher ranks, -1 towards lower ones (one alone demands a ring). The plan
    chooses per range of rows.
    rotates: "kv", or "q" for a backward in which the Q side travels (Note [What rotates in the backward]; see Plan).
    Plans are cached by content (the latest 64). Cost: O(S) for the mask, and then by ranges and ranks, not by rows.
    Raises ValueError when the layouts have different cp_size, or the mask does not fit their lengths.
    """
    layout, layout_k = layout.ring, (layout if layout_k is None else layout_k).ring
    if layout.cp_size != layout_k.cp_size:
        sizes = f"layout has cp_size={layout.cp_size} but layout_k has cp_size={layout_k.cp_size}"
        raise ValueError(f"{sizes}: q and k share one ring")
    if lanes not in ((1, -1), (-1, 1), (1,), (-1,)):
        raise ValueError(f"lanes={lanes!r}: valid are (1, -1), (-1, 1), (1,) and (-1,)")
    if routing not in ("auto", *routes.ROUTINGS):
        raise ValueError(f"routing={routing!r}: valid are auto, {', '.join(routes.ROUTINGS)}")
    if len(lanes) == 1:
        if routing not in ("auto", "ring"):
            raise ValueError(f"routing={routing!r} with lanes={lanes!r}: only a ring has lanes; leave them out")
        routing = "ring"
    if rotates not in KINDS:
        raise ValueError(f"rotates={rotates!r}: valid are {', '.join(KINDS)}")
    mask.check_lengths(layout.seq_len, layout_k.seq_len)
    if rotates == "q":
        mask, layout, layout_k = transpose(mask, layout, layout_k)
    key = (mask, layout.geometry, layout_k.geometry, lanes, routing)
    return _plans.get_or_make(key, lambda: _build(key, mask, layout, layout_k, lanes, routing))


def _build(
    key: tuple, mask: Mask | TransposedMask, layout: Layout, layout_k: Layout, lanes: tuple[int, ...], routing: str
) -> Plan:
    size = layout.cp_size
    plan = Plan(key, mask, layout, layout_k, lanes)
    plan.reason = "" if routing == "auto" else "as demanded"
    plan.asked_routing = routing
    table = ranges.ShardTable([Runs(layout_k.chunks(rank)) for rank in range(size)])
    reads: list[list[Reads]] = [[] for _ in range(mask.num_parts)]  # per part and rank
    needs = []
    for rank in range(size):
        ends = [_bounds(mask, layout, layout_k, rank, part) for part in range(mask.num_parts)]
        is_dead = ends[0][0] == ends[0][1]
        for first, stop in ends[1:]:
            is_dead &= first == stop
        plan._dead_q.append(ranges.true_runs(is_dead))
        unions = [ranges.union_of_intervals(first, stop) for first, stop in ends]
        for of_part, union in zip(reads, unions):
            of_part.append(table.rows_of_owners(union))
        # What both intervals read travels once.
        owner, start, end = reads[0][rank] if len(unions) == 1 else table.rows_of_owners(ranges.union_of_sets(*unions))
        needs.append((np.full(owner.shape, rank), owner, start, end))
    reader, owner, start, end = (np.concatenate(parts) for parts in zip(*needs))
    by_owner = np.argsort(owner, kind="stable")
    cuts = np.searchsorted(owner[by_owner], np.arange(1, size))
    demands = [
        routes.demand_of(rank, size, reader[chosen], start[chosen], end[chosen])
        for rank, chosen in enumerate(np.split(by_owner, cuts))
    ]
    plan._dead_k = [demand.unread(layout_k.shard_len(demand.owner)) for demand in demands]
    chosen = routes.choose_lanes(demands, lanes)
    plan.rows_by_routing = {
        "ring": routes.rows_rotated(demands, chosen), "direct": sum(demand.rows_read_elsewhere for demand in demands)}
    route = routes.Route(kinds=plan.kinds)
    chunks = [layout_k.chunks(rank) for rank in range(size)]
    if routing == "auto":
        plan.reason = routes.why_allgather(demands, chunks)
        routing = "allgather" if plan.reason else "auto"
    if routing in ("auto", "ring"):
        for demand, lane_of_segment in zip(demands, chosen):
            for lane in routes.LANES:
                routes.add_rotation(route, demand, lane_of_segment, lane, size)
    if routing == "auto":
        plan.reason = routes.why_direct(plan.rows_by_routing, route)
        routing = "direct" if plan.reason else "ring"
    plan.routing = routing
    if routing == "direct":
        route = routes.Route(kinds=plan.kinds)
        routes.add_direct(route, demands, size)
    elif routing == "allgather":
        routes.add_allgather(route, demands, chunks, size)
    plan._file(reads, route)
    return plan


def _meets(reads: Reads, owner: int, rows: RowRanges) -> bool:
    """Does any of `reads` lie in these rows of the owner's block?"""
    owners, starts, stops = reads
    low, high = np.searchsorted(owners, (owner, owner + 1))
    table = np.array(rows, dtype=np.int64).reshape(-1, 2)
    after = low + np.searchsorted(stops[low:high], table[:, 0], side="right")  # the first read that ends behind a range's start
    inside = after < high
    return bool((starts[after[inside]] < table[inside, 1]).any())


def _bounds(mask: Mask | TransposedMask, layout: Layout, layout_k: Layout, rank: int, part: int) -> tuple[np.ndarray, np.ndarray]:
    first, stop = mask.bounds(layout.positions(rank), layout.seq_len, layout_k.seq_len, part)
    # Intervals, their transposes and the tile walk of the kernels all rest on this (Note [Intervals] in DESIGN.md).
    if (first > stop).any() or (first[1:] < first[:-1]).any() or (stop[1:] < stop[:-1]).any():
        raise AssertionError(f"{mask!r}: the ends of its intervals must be ordered and must not decrease (rows of rank {rank})")
    return first, stop


def _check_pass(pass_: str) -> str:
    if pass_ not in PASSES:
        raise ValueError(f"pass {pass_!r}: valid are {', '.join(PASSES)}")
    return pass_


def _read_only(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _weigh(arrays: tuple[np.ndarray, ...]) -> int:
    return sum(array.nbytes for array in arrays)
