"""What the ranks of a ring compute and send in each step of one attention layer, and how long each step takes.

From the plans themselves (ringflash/ring/plan.py), for large rings of a dense causal mask from their closed form. numpy alone.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.planning.hardware import Hardware
from ringflash.ring.gathered import own_keys_of, pairs_of, visits_of
from ringflash.ring.heads import HeadSplit
from ringflash.ring.plan import Plan, build_plan
from ringflash.ring.ranges import num_rows, union_of_ranges
from ringflash.ring.rotate import Heads, choose
from ringflash.ring.signals import landing_of

MAX_PLANNED_RING = 64  # plans of larger rings take seconds to minutes
_CLOSED_FROM = 17  # places from which the closed form of a dense causal zigzag ring stands in for its plan
_SCALED_ROWS = 1024  # per place, of the plan that stands for longer ones of a dense causal mask: pairs within a thousandth
_SELDOM = 1e-9
PASSES = ("forward", "backward")
WORK = {"forward": 1.0, "backward": 2.5}  # FLOPs, in units of a forward's


@dataclass(frozen=True)
class Buffers:
    """Rows by kind of message, of the rank that has most. own: what a call sends from and writes partial gradients into;
    received: what it receives into, where the carrier has no place of its own; landing: those places, of `copy`, as large as any
    rank needs them."""

    own: Mapping[str, float]
    received: Mapping[str, float]
    landing: Mapping[str, float]

    def scaled(self, factor: float) -> Buffers:
        return Buffers(*({kind: rows * factor for kind, rows in each.items()}
                         for each in (self.own, self.received, self.landing)))

    @staticmethod
    def bytes_of(rows: Mapping[str, float], heads: Heads) -> float:
        row_bytes = heads.row_bytes
        return sum(count * row_bytes[kind] for kind, count in rows.items())


@dataclass(frozen=True)
class Loads:
    """One pass of one layer. pairs, visits: [steps, ranks]. sent: by kind of message, rows [steps, ranks] that a rank sends or
    receives, whichever is more, to its own host (first) and to others. rotates: "kv" or "q". ranks: all, or those that stand for
    all."""

    pairs: np.ndarray
    visits: np.ndarray
    sent: dict[str, tuple[np.ndarray, np.ndarray]]
    rotates: str
    buffers: Buffers

    def scaled(self, factor: float) -> Loads:
        """Of `factor` times as many rows."""
        sent = {kind: (inside * factor, across * factor) for kind, (inside, across) in self.sent.items()}
        return replace(self, pairs=self.pairs * factor**2, sent=sent, buffers=self.buffers.scaled(factor))


@dataclass(frozen=True)
class StepTime:
    kernel_ms: float  # of the busiest rank
    hop_ms: float
    whole_ms: float  # the longer of the two, of the slowest rank

    @property
    def hidden(self) -> float:
        """The share of the hop that kernels cover; 1 where nothing travels."""
        return 1.0 - (self.whole_ms - self.kernel_ms) / self.hop_ms if self.hop_ms else 1.0


@dataclass(frozen=True)
class PassTime:
    """One pass of one layer. sent_gb, hop_gb: by the busiest rank, in all and in its largest step."""

    steps: tuple[StepTime, ...]
    alltoall_ms: float
    sent_gb: float
    hop_gb: float
    alltoall_gb: float

    @property
    def kernels_ms(self) -> float:
        return sum(step.kernel_ms for step in self.steps)

    @property
    def exposed_ms(self) -> float:
        return sum(step.whole_ms - step.kernel_ms for step in self.steps)

    @property
    def hops_ms(self) -> float:
        return sum(step.hop_ms for step in self.steps)

    @property
    def total_ms(self) -> float:
        return sum(step.whole_ms for step in self.steps) + self.alltoall_ms

    @property
    def hidden(self) -> float:
        """The share of the hops' time that kernels cover, 1 where nothing travels."""
        return 1.0 - self.exposed_ms / self.hops_ms if self.hops_ms else 1.0


def is_dense_causal(mask: Mask) -> bool:
    return mask == Mask()


def ring_loads(mask: Mask, masks: Sequence[Mask], layout: str, seq_len: int, ring: int, heads: Heads, *, degree: int = 1,
               ranks_per_host: int = 8, routing: str = "auto", rotate: str = "auto") -> dict[str, Loads]:
    """Both passes of a layer that sees `mask`, of a batch that is laid out for `masks`. heads: those on this ring.

    Raises ValueError for a ring of more than 64 places whose mask or layout has no closed form.
    """
    is_dense = is_dense_causal(mask) and len(set(masks)) == 1
    if is_dense and layout in ("zigzag", "auto") and routing in ("auto", "ring") and ring >= _CLOSED_FROM:
        return _closed(seq_len, ring, heads, degree, ranks_per_host, rotate)
    if is_dense and ring <= MAX_PLANNED_RING and seq_len > _SCALED_ROWS * ring:
        factor = seq_len / (_SCALED_ROWS * ring)
        found = _planned(mask, layout, _SCALED_ROWS * ring, ring, heads, degree, ranks_per_host, routing, rotate)
        return {pass_: loads.scaled(factor) for pass_, loads in found.items()}
    if ring > MAX_PLANNED_RING:
        raise ValueError(f"a ring of {ring}: with this mask and layout it is planned up to {MAX_PLANNED_RING} places; nearest: "
                         f"{MAX_PLANNED_RING} (with parallel.ulysses), or a dense causal mask on zigzag")
    return _made(mask, tuple(masks), layout, seq_len, ring, heads, degree, ranks_per_host, routing, rotate)


@lru_cache(maxsize=1024)
def _planned(mask: Mask, layout: str, seq_len: int, ring: int, heads: Heads, degree: int, ranks_per_host: int, routing: str,
             rotate: str) -> dict[str, Loads]:
    return _made(mask, (mask,), layout, seq_len, ring, heads, degree, ranks_per_host, routing, rotate)


def _made(mask: Mask, masks: tuple[Mask, ...], layout: str, seq_len: int, ring: int, heads: Heads, degree: int,
          ranks_per_host: int, routing: str, rotate: str) -> dict[str, Loads]:
    plan = build_plan(mask, Layout(layout, seq_len, ring, masks, degree), routing=routing)
    back = choose(plan, heads, rotate).plan
    return {"forward": _loads(plan, "forward", degree, ranks_per_host),
            "backward": _loads(back, "backward", degree, ranks_per_host)}


def _loads(plan: Plan, pass_: str, degree: int, ranks_per_host: int) -> Loads:
    num_steps = plan.num_steps if pass_ == "forward" else plan.num_backward_steps
    shape = (num_steps, plan.cp_size)
    pairs, visits = np.zeros(shape), np.zeros(shape)
    for step in range(plan.num_steps):
        for rank in range(plan.cp_size):
            pairs[step, rank], visits[step, rank] = pairs_of(plan, rank, step, pass_), len(visits_of(plan, rank, step, pass_))
    if pass_ == "backward" and num_steps > plan.num_steps and plan.rotates == "kv":
        # Note [A kernel for the last hop]: the visit of the later half of the own keys waits for the last step.
        share = 0.25 if plan.mask.causal else 0.5
        pairs[-1], visits[-1] = pairs[0] * share, visits[0]
        pairs[0] *= 1 - share
    sent = {}
    for kind in plan.kinds if pass_ == "backward" else plan.kinds[:1]:
        ends = np.zeros((2, 2, *shape))  # src or dst, inside or across
        for message in plan.messages(pass_):
            if message.kind == kind:
                hosts = ([(place * degree + part) // ranks_per_host for part in range(degree)]
                         for place in (message.src, message.dst))
                crossings = {a != b for a, b in zip(*hosts)}
                for is_across in crossings:
                    ends[0, int(is_across), message.step, message.src] += message.num_rows
                    ends[1, int(is_across), message.step, message.dst] += message.num_rows
        sent[kind] = tuple(ends.max(axis=0))
    return Loads(pairs, visits, sent, plan.rotates, _buffers(plan, pass_))


def _buffers(plan: Plan, pass_: str) -> Buffers:
    """ring/travel.py, slot by slot."""
    block, gradient = plan.kinds
    best, most = Buffers({}, {}, {}), -1.0
    for rank in range(plan.cp_size):
        own: dict[tuple, int] = {}
        received: dict[tuple, int] = {}
        homes: dict[int, int] = {}
        if plan.routing == "allgather":  # what several ranks read is packed once
            sent = (message.rows for message in plan.messages(pass_) if message.src == rank and message.kind == block)
            _need(own, (block, "send"), num_rows(union_of_ranges(sent)))
            _need(own, (block, "own runs"), num_rows(own_keys_of(plan, rank, 1, pass_)[0]))
        for message in plan.messages(pass_):
            if message.src == rank and message.owner == rank and message.kind == block and plan.routing != "allgather":
                _need(own, (block, "send", message.lane), message.num_rows)
            if message.dst != rank:
                continue
            if message.is_home:
                _need(received, (message.kind, "home", homes.get(message.step, 0)), message.num_rows)
                homes[message.step] = homes.get(message.step, 0) + 1
            else:
                _need(received, (message.kind, message.lane, message.step % 2), message.num_rows)
        for step in range(plan.num_steps if pass_ == "backward" else 0):
            for visit in visits_of(plan, rank, step, pass_):
                if not visit.is_own:
                    _need(own, (gradient, "partial", getattr(visit, "lane", None), step % 2), visit.num_rows)
        sums = [_by_kind(slots, plan.kinds) for slots in (own, received)]
        weight = sum(rows[block] + 2 * rows[gradient] for rows in sums)
        if weight > most:
            best, most = Buffers(sums[0], sums[1], {}), weight
    return Buffers(best.own, best.received, _by_kind(landing_of(plan, pass_).rows, plan.kinds))


def _need(slots: dict[tuple, int], slot: tuple, rows: int) -> None:
    slots[slot] = max(rows, slots.get(slot, 0))


def _by_kind(slots: Mapping[tuple, int], kinds: Sequence[str]) -> dict[str, float]:
    return {kind: float(sum(rows for slot, rows in slots.items() if slot[0] == kind)) for kind in kinds}


@lru_cache(maxsize=4096)
def _closed(seq_len: int, ring: int, heads: Heads, degree: int, ranks_per_host: int, rotate: str) -> dict[str, Loads]:
    """Dense causal on zigzag: every visit has n * n / 2 pairs, and some rank sends all its n rows in every hop."""
    rows = seq_len / ring
    row_bytes = heads.row_bytes
    rotates = rotate if rotate != "auto" else min(("kv", "q"), key=lambda side: row_bytes[side] + row_bytes["d" + side])
    found = {}
    for pass_ in PASSES:
        is_late = pass_ == "backward"  # Note [A kernel for the last hop]
        num_steps = ring + is_late
        pairs, visits = np.full((num_steps, 2), rows * rows / 2), np.ones((num_steps, 2))
        if is_late:
            share = 0.25 if rotates == "kv" else 0.0
            pairs[-1], visits[-1] = pairs[0] * share, float(share > 0)
            pairs[0] *= 1 - share
        sides = ("kv",) if pass_ == "forward" else (rotates, "d" + rotates)
        # The first of the two ranks has both neighbours on its host, the second has one on another (where there are others).
        is_apart = ring * degree > ranks_per_host
        within, between = (0.0 if ranks_per_host <= degree else 1.0, 1.0 if is_apart else 0.0)
        sent = {}
        for kind in sides:
            hops = np.zeros(num_steps)
            if kind.startswith("d"):
                hops[2:ring + 1] = rows
                hops[2:ring // 2 + 1] *= 1.5  # what passes, and what comes home
            else:
                hops[:ring - 1] = rows
            sent[kind] = (np.stack((hops * within, hops * within * (1 - between)), axis=1),
                          np.stack((hops * (1 - within), hops * between), axis=1))
        own, received, landing = ({side: each * rows for side, each in zip(sides, counts)}
                                  for counts in ((1.0, 2.0), (2.0, 2.5), (2.0, 3.0)))
        found[pass_] = Loads(pairs, visits, sent, rotates if is_late else "kv", Buffers(own, received, landing))
    return found


def pass_time(loads: Loads, pass_: str, heads: Heads, hardware: Hardware, *, degree: int, seq_rows: float, whole: Heads,
              ranks_per_host: int) -> PassTime:
    """heads: on this ring; whole: of the layer. seq_rows: rows of a rank outside attention."""
    flops_per_pair = 4 * heads.head_dim * heads.batch * heads.num_heads * WORK[pass_]
    mean = loads.pairs / np.maximum(loads.visits, 1)
    sizes, where = np.unique(mean, return_inverse=True)
    rates = np.array([max(hardware.attention_tflops(pass_, (2 * size) ** 0.5), _SELDOM) for size in sizes])
    rates = rates[where].reshape(mean.shape)
    kernel = loads.pairs * flops_per_pair / (rates * 1e9) + loads.visits * hardware.visit_us / 1e3
    row_bytes = heads.row_bytes
    inside, across = (sum(loads.sent[kind][side] * row_bytes[kind] for kind in loads.sent) for side in (0, 1))
    hop = np.maximum(inside / hardware.inside_gb_s, across / hardware.across_gb_s) / 1e6
    hop = np.where(inside + across > 0, hop + hardware.exchange_us / 1e3, 0.0)
    steps = tuple(StepTime(float(k.max()), float(h.max()), float(np.maximum(k, h).max())) for k, h in zip(kernel, hop))
    sent = (inside + across).sum(axis=0).max() if len(kernel) else 0.0
    moved = alltoall_bytes(HeadSplit(whole.num_heads, whole.num_kv_heads, degree), whole)[pass_] if degree > 1 else (0.0, 0.0)
    return PassTime(steps, _alltoall_ms(seq_rows, moved, degree, ranks_per_host, hardware), float(sent) / 1e9,
                    float((inside + across).max(initial=0.0)) / 1e9, seq_rows * sum(moved) / 1e9)


def alltoall_bytes(split: HeadSplit, heads: Heads) -> dict[str, tuple[float, float]]:
    """By pass, bytes per row that a Ulysses rank sends to the others before the ring and after it."""
    from ringflash.ring.cost import _alltoall_bytes

    before, after = _alltoall_bytes(split, heads)
    return {pass_: (before[pass_], after[pass_]) for pass_ in PASSES}


def _alltoall_ms(rows: float, bytes_per_row: tuple[float, float], degree: int, ranks_per_host: int, hardware: Hardware) -> float:
    if degree == 1:
        return 0.0
    far = max(0.0, 1 - (min(degree, ranks_per_host) - 1) / (degree - 1))  # the share of a rank's peers on other hosts
    rate_ms = max((1 - far) / hardware.collective_gb_s, far / hardware.across_gb_s) / 1e6
    return sum(rows * each * rate_ms + hardware.exchange_us / 1e3 for each in bytes_per_row)
