"""One rank's side of what goes round the ring: blocks of rows, and their gradients on the way home.

The same for K and V, which every forward sends round, and for the Q side (Note [What rotates in the backward] in DESIGN.md): a wire
(wires.py) says which tensors a row is made of.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.ring.buffers import Block, BufferPool, Rows, count_rows
from ringflash.ring.exchange import Exchange
from ringflash.ring.gathered import GatheredVisit, OwnVisit, visits_of
from ringflash.ring.ranges import union_of_ranges
from ringflash.ring.wires import Tensors, Wire

if TYPE_CHECKING:
    from ringflash.ring.plan import Message, Plan, Visit


class Blocks:
    """The rotation of rows: what this rank holds at this step, and what it sends and receives.

    own: the tensors of the rank's own rows, as `wire` packs them.
    """

    def __init__(self, plan: Plan, pass_: str, rank: int, own: Tensors, wire: Wire, exchange: Exchange):
        self._rank, self._own, self._wire, self._exchange = rank, own, wire, exchange
        self._resident: dict[tuple[int, int], Block] = {}   # (owner, lane) -> block
        self._arriving: dict[tuple[int, int], Block] = {}
        self._pool = BufferPool(wire.row_shape, wire.dtype, wire.device)
        self._gathered = gathered_visit(plan, rank, pass_)
        self._own_runs: list[tuple[int, Tensor]] = []       # where they lie in the gathered visit, and they
        self._receives_in_place = False
        # Where all readers are sent theirs at once, what several read is packed once.
        self._sent = own_rows_sent(plan, pass_, rank) if plan.routing == "allgather" else None
        self._packed: Block | None = None
        for step in range(num_steps(plan, pass_) if self._gathered is None else 0):
            for message in plan.recvs(rank, step, pass_):
                if not message.is_gradient:
                    self._pool.reserve(("recv", message.lane, step % 2), count_rows(message.rows))

    def outgoing(self, message: Message) -> Tensor:
        slot = ("send", message.lane)
        if message.owner == self._rank and self._sent is None:
            return self._wire.pack(self._own, message.rows, self._pool.take(slot, count_rows(message.rows)))
        if message.owner == self._rank:
            if self._packed is None:
                self._packed = Block(self._sent, self._wire.pack(
                    self._own, self._sent, self._pool.take(("send",), count_rows(self._sent))))
            return self._packed.part(message.rows, self._pool, slot).data
        return self._resident[message.owner, message.lane].part(message.rows, self._pool, slot).data

    def incoming(self, message: Message) -> Tensor:
        if self._gathered is None:
            # Two receive buffers per lane: one is read by this step's kernels while the other fills.
            data = _receive_buffer(self._exchange, message, self._pool, ("recv", message.lane, message.step % 2))
        else:
            data = self._exchange.receive_buffer(message, self._pool.row_shape, self._pool.dtype)
            if data is None:
                self._receives_in_place = True
                _, first, stop = self._gathered.places[message.owner, message.lane]
                data = self._pool.take(("gathered",), self._gathered.num_rows)[first:stop]
        self._arriving[message.owner, message.lane] = Block(message.rows, data)
        return data

    def of(self, visit: Visit | OwnVisit | GatheredVisit) -> Tensors:
        """The tensors of a visit's rows."""
        if visit.is_own:
            # Now, when the exchange has been posted and before it is waited for.
            self._place_own_runs()
            return self._own
        if isinstance(visit, GatheredVisit):
            runs = [(first, self._resident[place].data) for place, (_, first, _) in visit.places.items()] + self._own_runs
            return self._wire.split(self._side_by_side([data for _, data in sorted(runs, key=lambda run: run[0])]))
        block = self._resident[visit.owner, visit.lane].part(visit.rows, self._pool, ("visit", visit.lane))
        return self._wire.split(block.data)

    def _place_own_runs(self) -> None:
        """Copies own rows that the gathered visit reads between those that arrive, or where these come in elsewhere, to one buffer."""
        if self._gathered is None or self._own_runs:
            return
        offset = 0
        for start, stop, first in self._gathered.own:
            rows = stop - start
            if self._receives_in_place:
                target = self._pool.take(("gathered",), self._gathered.num_rows)[first:first + rows]
            else:
                target = self._pool.take(("own runs",), self._gathered.num_own_rows)[offset:offset + rows]
            self._own_runs.append((first, self._wire.pack(self._own, ((start, stop),), target)))
            offset += rows

    def _side_by_side(self, blocks: Sequence[Tensor]) -> Tensor:
        """One buffer of all these rows: theirs, where they lie in one in this order."""
        first, end = blocks[0], blocks[0].data_ptr()
        for block in blocks:
            if block.data_ptr() != end:
                return torch.cat(list(blocks), out=self._pool.take(("joined",), sum(block.shape[0] for block in blocks)))
            end += block.numel() * block.element_size()
        return first.as_strided((sum(block.shape[0] for block in blocks), *first.shape[1:]), first.stride())

    def rows_of(self, owner: int, lane: int) -> Rows:
        return self._resident[owner, lane].rows

    @property
    def resident(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._resident)

    def advance(self) -> None:
        self._resident, self._arriving = self._arriving, {}


class Gradients:
    """The rotation of the gradients of what rotates (Note [dK and dV travel one step late]).

    home: acc dtype, [B, rows, H, D_i] each, the gradients of the rank's own rows; undefined before, complete after the last fold().
        They never travel, what others computed is added.
    """

    def __init__(self, plan: Plan, rank: int, home: Sequence[Tensor], wire: Wire, exchange: Exchange):
        self._rank, self._home, self._wire, self._exchange = rank, tuple(home), wire, exchange
        self._own_written = False
        self._pool = BufferPool(wire.row_shape, wire.dtype, wire.device)
        self._partial: dict[tuple[int, int], Block] = {}    # this step's visits
        self._sum: dict[tuple[int, int], Block] = {}        # last step's visits plus what arrived during that step: leaves now
        self._arriving: list[tuple[tuple[int, int], Block]] = []
        self._homing: list[Block] = []
        for step in range(plan.num_steps if gathered_visit(plan, rank, "backward") is None else 0):
            for visit in plan.visits(rank, step):
                if not visit.is_own:
                    self._pool.reserve(("partial", visit.lane, step % 2), visit.num_rows)

    def outgoing(self, message: Message) -> Tensor:
        slot = ("send", message.dst == message.owner, message.lane)
        held = self._sum.get((message.owner, message.lane))
        if held is None:                                    # passed on unread, and nobody upstream read it either
            return self._pool.take(slot, count_rows(message.rows)).zero_()
        return held.part(message.rows, self._pool, slot).data

    def incoming(self, message: Message) -> Tensor:
        is_home = message.owner == self._rank
        slot = ("home", len(self._homing)) if is_home else ("recv", message.lane, message.step % 2)
        block = Block(message.rows, _receive_buffer(self._exchange, message, self._pool, slot))
        if is_home:
            self._homing.append(block)
        else:
            self._arriving.append(((message.owner, message.lane), block))
        return block.data

    def target(self, visit: Visit | GatheredVisit) -> tuple[Tensors, bool]:
        """The tensors that a visit writes its gradients into, and whether it must add to what is there."""
        if visit.is_own:
            add, self._own_written = self._own_written, True
            return self._home, add
        if isinstance(visit, GatheredVisit):
            add = bool(self._partial)
            data = self._pool.take(("partial", "gathered"), visit.num_rows)
            for place, (rows, first, stop) in visit.places.items():
                self._partial[place] = Block(rows, data[first:stop])
            return self._wire.split(data), add
        key = (visit.owner, visit.lane)
        add = key in self._partial
        if not add:
            data = self._pool.take(("partial", visit.lane, visit.step % 2), visit.num_rows)
            self._partial[key] = Block(visit.rows, data)
        return self._wire.split(self._partial[key].data), add

    def fold(self, step: int, blocks: Blocks) -> None:
        """After a step's wait: add what arrived, so that the sums can leave with the next batch."""
        if step == 0 and not self._own_written:
            for x in self._home:
                x.zero_()
        for block in self._homing:
            offset = 0
            arrived = self._wire.split(block.data)
            for start, stop in block.rows:
                rows = stop - start
                for own, x in zip(self._home, arrived):
                    own[:, start:stop].add_(x[:, offset:offset + rows])
                offset += rows
        self._sum = {}
        for key in blocks.resident:
            rows = blocks.rows_of(*key)
            summands = [block for arrived, block in self._arriving if arrived == key]
            if key in self._partial:
                summands.insert(0, self._partial[key])
            if not summands:
                continue
            if summands[0].rows != rows:                    # a sum over the whole block, as its first part does not span it
                whole = Block(rows, self._pool.take(("whole", key[1], step % 2), count_rows(rows)).zero_())
                summands.insert(0, whole)
            for block in summands[1:]:
                summands[0].add(block)
            self._sum[key] = summands[0]
        stray = {key for key, _ in self._arriving} - set(blocks.resident)
        if stray:
            raise RuntimeError(f"ring plan: at step {step} rank {self._rank} received gradients of blocks it does not hold: "
                               f"{stray}")
        self._partial, self._arriving, self._homing = {}, [], []


def own_rows_sent(plan: Plan, pass_: str, rank: int) -> Rows:
    """The rank's own rows that it sends to anybody."""
    return union_of_ranges(message.rows for step in range(num_steps(plan, pass_)) for message in plan.sends(rank, step, pass_)
                           if message.owner == rank and not message.is_gradient)


def gathered_visit(plan: Plan, rank: int, pass_: str) -> GatheredVisit | None:
    """One of those that stand for all blocks that a rank receives (the others are of the same rows), or None."""
    for visit in visits_of(plan, rank, 1, pass_)[:1]:
        return visit if isinstance(visit, GatheredVisit) else None
    return None


def num_steps(plan: Plan, pass_: str) -> int:
    return plan.num_steps if pass_ == "forward" else plan.num_backward_steps


def _receive_buffer(exchange: Exchange, message: Message, pool: BufferPool, slot: tuple) -> Tensor:
    """Where a message is received: the carrier's place for it, or a buffer of the pool."""
    buffer = exchange.receive_buffer(message, pool.row_shape, pool.dtype)
    return pool.take(slot, count_rows(message.rows)) if buffer is None else buffer
