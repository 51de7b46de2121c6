"""Runs a plan's messages with the semantics of NCCL point-to-point and no buffering at all.

Each rank posts its batches one after the other; a batch is done when all its sends and receives are, and the next is posted only
then. A send and a receive meet when both are in the batch that their rank has posted, k-th send of a pair with k-th receive:
there are no tags, order alone decides. gloo and a loopback buffer, and so hide what this finds
(Note [Messages are posted in one step by both ends] in DESIGN.md).
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ringflash.ring.message import Message
from ringflash.ring.plan import Plan, Visit
from ringflash.ring.ranges import RowRanges


class RendezvousError(RuntimeError):
    """The messages of a plan do not fit together: a deadlock, a wrong pairing, or rows that a sender does not hold."""


@dataclass(frozen=True)
class Batch:
    """What one rank posts at once: in this order for each peer, sends and receives counted apart."""

    step: int
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


Schedule = list[list[Batch]]  # per rank, in the order of posting


def schedule_of(plan: Plan, pass_: str) -> Schedule:
    """The batches of each rank. A rank without messages in a step posts none in it."""
    steps = range(plan.num_steps if pass_ == "forward" else plan.num_backward_steps)
    batches = [[Batch(s, plan.sends(r, s, pass_), plan.recvs(r, s, pass_)) for s in steps] for r in range(plan.cp_size)]
    return [[batch for batch in of_rank if batch.sends or batch.recvs] for of_rank in batches]


def run(plan: Plan, pass_: str) -> None:
    """Simulates one pass. Raises RendezvousError when messages deadlock, pair wrongly, or name rows that are not there."""
    rendezvous(schedule_of(plan, pass_))
    check_rows(plan, pass_)


def rendezvous(schedule: Schedule) -> int:
    """Posts the batches of all ranks until all are done, and returns how many messages met.

    Raises RendezvousError when a send meets a receive of other rows, on a deadlock, or, when all goes through, for messages that
    their two ends posted in different steps (one such message may pass by luck; where every rank does it, nobody advances).
    """
    size = len(schedule)
    waiting = [deque(batches) for batches in schedule]
    # Per pair and rank, what is posted and not yet met. The sends of a pair meet its receives in order.
    sends: dict[tuple[int, int], deque[tuple[int, Message]]] = {}
    recvs: dict[tuple[int, int], deque[tuple[int, Message]]] = {}
    unmet = [0] * size
    met, late = 0, []
    ready = deque(range(size))
    while ready:
        rank = ready.popleft()
        if unmet[rank] or not waiting[rank]:
            continue
        batch = waiting[rank].popleft()
        if not batch.sends and not batch.recvs:
            raise RendezvousError(f"rank {rank} posts an empty batch in step {batch.step}")
        pairs = []
        for table, posted in ((sends, batch.sends), (recvs, batch.recvs)):
            for message in posted:
                pair = (message.src, message.dst)
                table.setdefault(pair, deque()).append((batch.step, message))
                unmet[rank] += 1
                pairs.append(pair)
        for pair in pairs:
            while sends.get(pair) and recvs.get(pair):
                (sent_in, sent), (received_in, received) = sends[pair].popleft(), recvs[pair].popleft()
                _check_match(sent, received)
                met += 1
                if sent_in != received_in:
                    late.append(f"{sent} is sent in step {sent_in}, received in step {received_in}")
                for end in pair:
                    unmet[end] -= 1
        ready.extend(end for end in {rank, *(end for pair in pairs for end in pair)} if not unmet[end])
    stuck = [_describe(rank, sends, recvs) for rank in range(size) if unmet[rank] or waiting[rank]]
    if stuck:
        raise RendezvousError("deadlock: " + "; ".join(stuck))
    if late:
        raise RendezvousError(f"posted in different steps: {late[0]}" + (f", and {len(late) - 1} more" if len(late) > 1 else ""))
    return met


def _check_match(sent: Message, received: Message) -> None:
    if sent.num_rows != received.num_rows:
        raise RendezvousError(f"sizes differ: {sent.num_rows} rows sent as {sent}, {received.num_rows} received as {received}")
    if sent != received:
        raise RendezvousError(f"wrong pairing: sent is {sent}, received is {received}")


def _describe(rank: int, sends: dict, recvs: dict) -> str:
    for verb, table, end in (("send", sends, 0), ("receive", recvs, 1)):
        for pair, posted in table.items():
            if posted and pair[end] == rank:
                step, message = posted[0]
                return f"rank {rank} waits in step {step} to {verb} {message}"
    return f"rank {rank} waits to post its next batch"


def check_rows(plan: Plan, pass_: str) -> None:
    """Follows the rows: all that is sent is held, all that a visit computes on is there, all that a kernel of the backward wrote
    comes home once. Raises RendezvousError."""
    size = plan.cp_size
    steps = plan.num_steps if pass_ == "forward" else plan.num_backward_steps
    resident: dict[tuple[int, int, int], RowRanges] = {}  # (rank, owner, lane) -> rows of k, v that arrived for this step
    owed: dict[tuple[int, int, int], set[int]] = {}       # likewise, rows whose gradients a rank has to pass on
    for step in range(steps):
        arriving: dict[tuple[int, int, int], RowRanges] = {}
        passed_on: dict[tuple[int, int, int], set[int]] = {}
        for message in (m for rank in range(size) for m in plan.sends(rank, step, pass_)):
            at, to = ((end, message.owner, message.lane) for end in (message.src, message.dst))
            rows = _rows(message.rows)
            if not message.is_gradient:
                held = plan.layout_k.shard_len(message.src) if message.src == message.owner else None
                if not rows <= (set(range(held)) if held is not None else _rows(resident.get(at, ()))):
                    raise RendezvousError(f"not held by its sender: {message}")
                arriving[to] = message.rows
                continue
            missing = rows - owed.get(at, set())
            if message.is_home and missing:
                raise RendezvousError(f"nothing to bring home for rows {sorted(missing)[:4]}: {message}")
            owed.get(at, set()).difference_update(rows)
            if not message.is_home:
                passed_on[to] = rows
        lost = {at: rows for at, rows in owed.items() if rows}
        if lost:
            (rank, owner, _), rows = next(iter(lost.items()))
            raise RendezvousError(f"rank {rank} keeps gradients of rank {owner}'s rows {sorted(rows)[:4]} after step {step}")
        for rank in range(size):
            for visit in plan.visits(rank, step):
                _check_visit(visit, resident)
        owed = passed_on
        if pass_ == "backward":
            for visit in (v for rank in range(size) for v in plan.visits(rank, step) if not v.is_own):
                owed.setdefault((visit.rank, visit.owner, visit.lane), set()).update(_rows(visit.rows))
        resident = arriving
    if any(owed.values()) or resident:
        raise RendezvousError(f"rows are still under way after the last step, {steps - 1}")


def _check_visit(visit: Visit, resident: dict[tuple[int, int, int], RowRanges]) -> None:
    if not visit.is_own and visit.rows != resident.get((visit.rank, visit.owner, visit.lane), ()):
        raise RendezvousError(f"{visit}: its rows are not those that arrived")


def _rows(ranges: RowRanges) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}
