"""Where copied blocks land, and the counts that say who may write and who may read: the copy-engine carrier without its engine.

Pure bookkeeping: a function of the plan, the same on every rank, so that a sender knows an address without being told
(Note [Copy engines] in DESIGN.md). copy_engine.py carries it out on CUDA streams, signal_simulator.py in random order.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ringflash.ring.cache import BoundedCache
from ringflash.ring.message import Message
from ringflash.ring.plan import Plan

# (kind, lane, parity of the step): the blocks under way. (kind, "home", n): the n-th gradient that comes home in a step.
Slot = tuple
ALIGNMENT = 512                                             # bytes; what allocations of CUDA are aligned to
COUNTER_BYTES = 4
_landings = BoundedCache(max_weight=1 << 20)                # messages of all plans together


@dataclass(frozen=True)
class Landing:
    """The receive buffers of one pass. slot_of: where a message lands at its dst. rows: of each slot, the most that any rank
    needs, so that all ranks have the same buffers at the same places."""

    slot_of: Mapping[Message, Slot]
    rows: Mapping[Slot, int]

    def offsets(self, first: int, row_bytes: Mapping[str, int]) -> tuple[dict[Slot, int], int]:
        """Byte offset of each slot behind `first` bytes that are taken, and where the last one ends.

        row_bytes: of a row, by kind of message.
        """
        found: dict[Slot, int] = {}
        end = first
        for slot in sorted(self.rows, key=repr):
            found[slot] = end = -(-end // ALIGNMENT) * ALIGNMENT
            end += self.rows[slot] * row_bytes[slot[0]]
        return found, end


def landing_of(plan: Plan, pass_: str) -> Landing:
    """The buffers that the messages of a pass ("forward" or "backward") land in. Cached.

    A buffer takes its next message two steps later (homes: one step). It is free then, as its receiver says so only behind
    everything that its stream held when it came to that step. Raises AssertionError if two messages of a step met in a slot.
    """
    return _landings.get_or_make((plan.key, pass_), lambda: _landing(plan, pass_), lambda made: 1 + len(made.slot_of))


def _landing(plan: Plan, pass_: str) -> Landing:
    slot_of: dict[Message, Slot] = {}
    rows: dict[Slot, int] = {}
    taken: set[tuple[int, int, Slot]] = set()
    homes: Counter[tuple[int, int]] = Counter()
    for message in plan.messages(pass_):
        at = (message.dst, message.step)
        if message.is_home:
            slot: Slot = (message.kind, "home", homes[at])
            homes[at] += 1
        else:
            slot = (message.kind, message.lane, message.step % 2)
        if (*at, slot) in taken:
            raise AssertionError(f"two messages of step {message.step} land in slot {slot} of rank {message.dst}")
        taken.add((*at, slot))
        slot_of[message] = slot
        rows[slot] = max(message.num_rows, rows.get(slot, 0))
    return Landing(slot_of, rows)


@dataclass(frozen=True)
class Push:
    """Messages of one step to one peer: written when the peer's count of free buffers has come to `value`, whereupon `value`
    is the count of arrived ones."""

    peer: int
    value: int
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Booking:
    """The signals of one step's batch of one rank, in the order in which they are queued.

    free: (peer, value): tell the peer that all it may send in this step, `value` messages in all, has room here.
    pushes: what is sent. arrivals: (peer, value): all is there when the peer's count of arrived messages has come to `value`.
    """

    free: tuple[tuple[int, int], ...]
    pushes: tuple[Push, ...]
    arrivals: tuple[tuple[int, int], ...]


class Ledger:
    """One rank's counts of messages per peer since its buffers were made. Both ends count the same plan, so they agree.

    Counts only grow, which makes a signal idempotent and a late reader harmless: nothing is ever reset, so nothing can be reset
    too early. They live in 32-bit words that wrap; waiting for "at least" is cyclic (a difference of less than 2^31).
    """

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def book(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Booking:
        """The signals of the next batch: all messages that this rank sends and receives in one step, in the plan's order."""
        by_dst = _by_peer((m.dst, m) for m in sends)
        by_src = _by_peer((m.src, m) for m in recvs)
        pushes = []
        for peer, messages in by_dst.items():
            self._sent[peer] += len(messages)
            pushes.append(Push(peer, self._sent[peer], tuple(messages)))
        for peer, messages in by_src.items():
            self._received[peer] += len(messages)
        awaited = tuple((peer, self._received[peer]) for peer in by_src)
        return Booking(awaited, tuple(pushes), awaited)


def _by_peer(messages: Iterable[tuple[int, Message]]) -> dict[int, list[Message]]:
    found: dict[int, list[Message]] = {}
    for peer, message in messages:
        found.setdefault(peer, []).append(message)
    return found


def arrived_offset(peer: int) -> int:
    """Byte offset, in this rank's words, of the count of messages that arrived here from `peer` (which writes it)."""
    return COUNTER_BYTES * 2 * peer


def free_offset(peer: int) -> int:
    """Byte offset, in this rank's words, of the count of messages that `peer` has room for (which writes it)."""
    return COUNTER_BYTES * (2 * peer + 1)


def words_bytes(cp_size: int) -> int:
    """Room for all counters of a rank."""
    return -(-COUNTER_BYTES * 2 * cp_size // ALIGNMENT) * ALIGNMENT
