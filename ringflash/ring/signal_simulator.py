"""Runs a plan's copies and signals in random order, and finds blocks that are overwritten, stale or torn, and deadlocks.

Each rank has two queues, as it has two CUDA streams: its kernels, and its copies with the signals. Queues of all ranks advance in
any order, and a copy or a kernel takes time: others run between its begin and its end. merged=True gives each rank a single queue
in the order of submission, which is what happens when streams share a hardware channel. No torch, no GPU.
"""
from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringflash.ring.message import Message
from ringflash.ring.plan import PASSES, Plan
from ringflash.ring.signals import Landing, Ledger, Slot, landing_of

# What the protocol may be run without, to show that each part is needed: the wait for "free" before a push, the wait for
# "arrived" before a read, and the order of "free" behind the kernels that were queued before it.
PARTS = ("free", "arrived", "order")


class SignalError(RuntimeError):
    """A buffer was written while it was in use, or read while it held something else; or no queue can go on."""


@dataclass
class _Buffer:
    message: tuple | None = None                            # (call, message) that lies in it
    writing: bool = False
    reading: int = 0
    readers: int = 0                                        # reads of what lies in it that are still to come


@dataclass
class _World:
    counts: dict[tuple[int, str, int], int] = field(default_factory=dict)   # (rank, "free" | "arrived", peer) -> count
    marks: set[tuple] = field(default_factory=set)
    buffers: dict[tuple[int, Slot], _Buffer] = field(default_factory=dict)

    def buffer(self, rank: int, slot: Slot) -> _Buffer:
        return self.buffers.setdefault((rank, slot), _Buffer())


# An operation: (verb, ...) as _Rank queues them; see _advance.
Operation = tuple


class _Rank:
    """Queues what one rank's loop submits, call after call."""

    def __init__(self, plan: Plan, rank: int, without: str | None):
        self._plan, self._rank, self._without = plan, rank, without
        self._ledger = Ledger()

    def submit(self, passes: Sequence[str]) -> Iterator[tuple[str, Operation]]:
        """(queue, operation) in the order of submission. Every call of `passes` uses the same buffers."""
        for call, pass_ in enumerate(passes):
            landing = landing_of(self._plan, pass_)
            steps = self._plan.num_steps if pass_ == "forward" else self._plan.num_backward_steps
            for step in range(steps):
                yield from self._step(call, pass_, step, landing)

    def _step(self, call: int, pass_: str, step: int, landing: Landing) -> Iterator[tuple[str, Operation]]:
        sends, recvs = (tuple(of(self._rank, step, pass_)) for of in (self._plan.sends, self._plan.recvs))
        here = self._plan.recvs(self._rank, step - 1, pass_) if step else ()
        at = (self._rank, call, step)
        booking = self._ledger.book(sends, recvs)
        if sends or recvs:
            yield "kernels", ("mark", ("posted", *at))
            if self._without != "order":
                yield "copies", ("after", ("posted", *at))
            for peer, value in booking.free:
                yield "copies", ("signal", peer, "free", value)
            for push in booking.pushes:
                if self._without != "free":
                    yield "copies", ("await", "free", push.peer, push.value)
                for message in push.messages:
                    source = self._source(message, here, landing)
                    yield "copies", ("push", (call, message), landing.slot_of[message], source and (call, source),
                                     source and landing.slot_of[source], self._num_reads(message, pass_))
                yield "copies", ("signal", push.peer, "arrived", push.value)
            for peer, value in booking.arrivals:
                if self._without != "arrived":
                    yield "copies", ("await", "arrived", peer, value)
            yield "copies", ("mark", ("done", *at))
        for message in here:
            if not message.is_gradient:
                yield "kernels", ("read", (call, message), landing.slot_of[message])
        if sends or recvs:
            yield "kernels", ("after", ("done", *at))
        for message in recvs:
            if message.is_gradient:
                yield "kernels", ("read", (call, message), landing.slot_of[message])

    def _source(self, message: Message, here: Sequence[Message], landing: Landing) -> Message | None:
        """The message whose buffer is the source of a push: a block is passed on from where it arrived."""
        return next((m for m in here if (m.kind, m.owner, m.lane) == (message.kind, message.owner, message.lane)
                     and not m.is_home), None)

    def _num_reads(self, message: Message, pass_: str) -> int:
        """How often the receiver will read a message: its kernels or its sum once, and every push that passes it on."""
        if message.is_home:
            return 1
        onward = self._plan.sends(message.dst, message.step + 1, pass_)
        return 1 + sum((m.kind, m.owner, m.lane) == (message.kind, message.owner, message.lane) for m in onward)


def run(plan: Plan, passes: Sequence[str] = PASSES, *, seed: int = 0, merged: bool = False, without: str | None = None) -> int:
    """Runs the calls `passes` ("forward", "backward"), one after the other on the same buffers, in an order drawn from `seed`.
    Returns how many blocks were pushed.

    without: leaves a part of the protocol out (PARTS). Raises SignalError when a push finds its buffer in use or its source gone,
    a read does not find the block that it expects, a block is still to be read at the end, or nothing can go on.
    """
    if without is not None and without not in PARTS:
        raise ValueError(f"without={without!r}: valid are {', '.join(PARTS)}")
    draw, world, pushed = random.Random(seed), _World(), 0
    queues: dict[tuple[int, str], deque[Operation]] = {}
    for rank in range(plan.cp_size):
        for queue, operation in _Rank(plan, rank, without).submit(passes):
            queues.setdefault((rank, "one" if merged else queue), deque()).append(operation)
    while queues:
        ready = [at for at, queue in queues.items() if _is_ready(world, at[0], queue[0])]
        if not ready:
            where = "; ".join(f"rank {rank}, {name}: {queue[0]}" for (rank, name), queue in queues.items())
            raise SignalError(f"deadlock: {where}")
        at = draw.choice(ready)
        operation = queues[at].popleft()
        rest = _advance(world, at[0], operation)
        pushed += operation[0] == "push"
        if rest is not None:
            queues[at].appendleft(rest)
        elif not queues[at]:
            del queues[at]
    unread = [(at, buffer.message) for at, buffer in world.buffers.items() if buffer.readers]
    if unread:
        raise SignalError(f"never read: {unread[0]}")
    return pushed


def _is_ready(world: _World, rank: int, operation: Operation) -> bool:
    if operation[0] == "await":
        _, what, peer, value = operation
        return world.counts.get((rank, what, peer), 0) >= value
    return operation[0] != "after" or operation[1] in world.marks


def _advance(world: _World, rank: int, operation: Operation) -> Operation | None:
    """Begins or ends an operation; returns what is left of it."""
    verb, *rest = operation
    if verb == "mark":
        world.marks.add(rest[0])
    elif verb == "signal":
        peer, what, value = rest
        if value <= world.counts.get((peer, what, rank), 0):
            raise SignalError(f"rank {rank} sets {what} of rank {peer} to {value}, which it had reached")
        world.counts[peer, what, rank] = value
    elif verb == "push":
        tag, slot, source_tag, source_slot, num_reads = rest
        target = world.buffer(tag[1].dst, slot)
        if target.writing or target.reading or target.readers:
            raise SignalError(f"{tag[1]} overwrites {target.message} in slot {slot}, which is in use")
        target.writing, target.message = True, None
        if source_tag is not None:
            _begin_read(world, rank, source_tag, source_slot)
        return ("pushed", *rest)
    elif verb == "pushed":
        tag, slot, source_tag, source_slot, num_reads = rest
        target = world.buffer(tag[1].dst, slot)
        target.writing, target.message, target.readers = False, tag, num_reads
        if source_tag is not None:
            _end_read(world, rank, source_tag, source_slot)
    elif verb == "read":
        _begin_read(world, rank, *rest)
        return ("read on", *rest)
    elif verb == "read on":
        _end_read(world, rank, *rest)
    return None


def _begin_read(world: _World, rank: int, tag: tuple, slot: Slot) -> None:
    buffer = world.buffer(rank, slot)
    if buffer.writing or buffer.message != tag:
        found = "a block that is being written" if buffer.writing else buffer.message
        raise SignalError(f"rank {rank} reads {tag} in slot {slot} and finds {found}")
    buffer.reading += 1


def _end_read(world: _World, rank: int, tag: tuple, slot: Slot) -> None:
    buffer = world.buffer(rank, slot)
    if buffer.writing or buffer.message != tag:
        raise SignalError(f"rank {rank} read {tag} in slot {slot} while it was overwritten")
    buffer.reading -= 1
    buffer.readers -= 1
