"""The ring: one forward and one backward loop for every layout, mask, kernel and carrier.

Both are generators that yield each Pending where its data is needed. One process per rank drives its own with drive(); loopback
steps those of all ranks in one process.
"""
from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.kernels.dispatch import Backend
from ringflash.kernels.intervals import Intervals, accumulate_dtype
from ringflash.ring.buffers import Block, BufferPool, Rows, count_rows, pack
from ringflash.ring.cache import BoundedCache
from ringflash.ring.exchange import Exchange, Pending

if TYPE_CHECKING:
    from ringflash.ring.plan import Message, Plan, Visit

Waits = Generator[Pending, None, None]

_ENTRY_BYTES = 16 << 10  # an Intervals of few rows: objects, not data (measured 12 KiB); and what a kernel derives from it
_intervals = BoundedCache(max_weight=256 << 20)


def drive(waits: Waits) -> None:
    for pending in waits:
        pending.wait()


def intervals_of(plan: Plan, visit: Visit, device: torch.device) -> Intervals:
    """The visit's intervals on `device`; kept (least recently used first out) up to 256 MiB, as every layer asks for the same."""
    def make() -> Intervals:
        # Copied: the plan's arrays are read-only, which torch cannot express.
        return Intervals.from_host(*(torch.from_numpy(ends.copy()) for ends in visit.intervals()), device)

    key = (plan.key, visit.rank, visit.step, visit.owner, visit.lane, visit.part, device)
    return _intervals.get_or_make(key, make, lambda made: _ENTRY_BYTES + 16 * (made.num_q + made.num_k))


def without_rows(x: Tensor, rows: Rows, dim: int = 1) -> Tensor:
    """x, or when `rows` names any a copy with those rows zeroed (Note [Dead rows])."""
    if not rows:
        return x
    x = x.clone()
    for start, stop in rows:
        x.narrow(dim, start, stop - start).zero_()
    return x


class _Keys:
    """One rank's side of the rotation of K and V: what it holds at this step, and what it sends and receives."""

    def __init__(self, plan: Plan, pass_: str, rank: int, k: Tensor, v: Tensor, exchange: Exchange):
        self._rank, self._k, self._v, self._exchange = rank, k, v, exchange
        self._resident: dict[tuple[int, int], Block] = {}   # (owner, lane) -> block
        self._arriving: dict[tuple[int, int], Block] = {}
        self._pool = BufferPool(_row_shape(k, v), k.dtype, k.device)
        for step in range(_num_steps(plan, pass_)):
            for message in plan.recvs(rank, step, pass_):
                if message.kind == "kv":
                    self._pool.reserve(("recv", message.lane, step % 2), count_rows(message.rows))

    def outgoing(self, message: Message) -> Tensor:
        slot = ("send", message.lane)
        if message.owner == self._rank:
            return pack(self._k, self._v, message.rows, self._pool.take(slot, count_rows(message.rows))).data
        return self._resident[message.owner, message.lane].part(message.rows, self._pool, slot).data

    def incoming(self, message: Message) -> Tensor:
        # Two receive buffers per lane: one is read by this step's kernels while the other fills.
        data = _receive_buffer(self._exchange, message, self._pool, ("recv", message.lane, message.step % 2))
        self._arriving[message.owner, message.lane] = Block(message.rows, data)
        return data

    def of(self, visit: Visit) -> tuple[Tensor, Tensor]:
        """k [B, rows, Hkv, D], v [B, rows, Hkv, Dv] of a visit."""
        if visit.is_own:
            return self._k, self._v
        block = self._resident[visit.owner, visit.lane].part(visit.rows, self._pool, ("visit", visit.lane))
        return block.split(self._k.shape[3])

    def rows_of(self, owner: int, lane: int) -> Rows:
        return self._resident[owner, lane].rows

    @property
    def resident(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._resident)

    def advance(self) -> None:
        self._resident, self._arriving = self._arriving, {}


class _KeyGradients:
    """One rank's side of the rotation of dK and dV (Note [dK and dV travel one step late]).

    dk, dv: acc dtype, of the shapes of k and v, the gradients of the rank's own keys; they never travel, what others computed is
    added.
    """

    def __init__(self, plan: Plan, rank: int, k: Tensor, v: Tensor, dtype: torch.dtype, exchange: Exchange):
        self._rank, self._exchange = rank, exchange
        self.dk, self.dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v))
        self._own_written = False
        self._pool = BufferPool(_row_shape(k, v), dtype, k.device)
        self._partial: dict[tuple[int, int], Block] = {}    # this step's visits
        self._sum: dict[tuple[int, int], Block] = {}        # last step's visits plus what arrived during that step: leaves now
        self._arriving: list[tuple[tuple[int, int], Block]] = []
        self._homing: list[Block] = []
        for step in range(plan.num_backward_steps):
            for visit in plan.visits(rank, step) if step < plan.num_steps else ():
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

    def target(self, visit: Visit) -> tuple[Tensor, Tensor, bool]:
        """dk [B, rows, Hkv, D], dv [B, rows, Hkv, Dv] that a visit writes, and whether it must add to what is there."""
        if visit.is_own:
            add, self._own_written = self._own_written, True
            return self.dk, self.dv, add
        key = (visit.owner, visit.lane)
        add = key in self._partial
        if not add:
            data = self._pool.take(("partial", visit.lane, visit.step % 2), visit.num_rows)
            self._partial[key] = Block(visit.rows, data)
        return *self._partial[key].split(self.dk.shape[3]), add

    def fold(self, step: int, keys: _Keys) -> None:
        """After a step's wait: add what arrived, so that the sums can leave with the next batch."""
        if step == 0 and not self._own_written:
            self.dk.zero_()
            self.dv.zero_()
        for block in self._homing:
            offset = 0
            dk, dv = block.split(self.dk.shape[3])
            for start, stop in block.rows:
                rows = stop - start
                self.dk[:, start:stop].add_(dk[:, offset:offset + rows])
                self.dv[:, start:stop].add_(dv[:, offset:offset + rows])
                offset += rows
        self._sum = {}
        for key in keys.resident:
            rows = keys.rows_of(*key)
            blocks = [block for arrived, block in self._arriving if arrived == key]
            if key in self._partial:
                blocks.insert(0, self._partial[key])
            if not blocks:
                continue
            if blocks[0].rows != rows:                      # a sum over the whole block, as its first part does not span it
                whole = Block(rows, self._pool.take(("whole", key[1], step % 2), count_rows(rows)).zero_())
                blocks.insert(0, whole)
            for block in blocks[1:]:
                blocks[0].add(block)
            self._sum[key] = blocks[0]
        stray = {key for key, _ in self._arriving} - set(keys.resident)
        if stray:
            raise RuntimeError(f"ring plan: at step {step} rank {self._rank} received gradients of blocks it does not hold: "
                               f"{stray}")
        self._partial, self._arriving, self._homing = {}, [], []


def _row_shape(k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Of a row on the wire: (B, Hkv, D + Dv)."""
    return k.shape[0], k.shape[2], k.shape[3] + v.shape[3]


def _receive_buffer(exchange: Exchange, message: Message, pool: BufferPool, slot: tuple) -> Tensor:
    """Where a message is received: the carrier's place for it, or a buffer of the pool."""
    buffer = exchange.receive_buffer(message, pool.row_shape, pool.dtype)
    return pool.take(slot, count_rows(message.rows)) if buffer is None else buffer


def _num_steps(plan: Plan, pass_: str) -> int:
    return plan.num_steps if pass_ == "forward" else plan.num_backward_steps


def _visits(plan: Plan, rank: int, step: int) -> tuple[Visit, ...]:
    return plan.visits(rank, step) if step < plan.num_steps else ()


def forward(
    plan: Plan, rank: int, q: Tensor, k: Tensor, v: Tensor, backend: Backend, exchange: Exchange, *, softmax_scale: float,
    out: Tensor, lse: Tensor, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Waits:
    """Attention of this rank's queries over all keys that they may see.

    q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]: this rank's shards; sinks [Hq] (Note [Sinks]). OUT: out
    [B, Sq, Hq, Dv] input dtype, lse [B, Hq, Sq] acc dtype, natural log; both are complete when the generator is exhausted. Rows
    that see nothing: out 0, lse -inf, or with sinks their head's sink.
    """
    q = without_rows(q, plan.dead_q(rank))
    k, v = (without_rows(x, plan.dead_k(rank)) for x in (k, v))
    remaining = sum(len(_visits(plan, rank, step)) for step in range(plan.num_steps))
    first = sinks is None
    if remaining == 0:
        out.zero_()
    if not first:
        lse.copy_(sinks[:, None])
    elif remaining == 0:
        lse.fill_(float("-inf"))
    # The running out is acc dtype; a single visit that has nothing to fold into writes `out` directly and needs none.
    state = None
    if remaining > 1 or (remaining == 1 and not first):
        state = torch.empty(out.shape, dtype=lse.dtype, device=q.device)
        if not first:
            state.zero_()
    keys = _Keys(plan, "forward", rank, k, v, exchange)
    for step in range(plan.num_steps):
        pending = exchange.post(
            step,
            [(message, keys.outgoing(message)) for message in plan.sends(rank, step, "forward")],
            [(message, keys.incoming(message)) for message in plan.recvs(rank, step, "forward")])
        for visit in _visits(plan, rank, step):
            remaining -= 1
            backend.forward(
                q, *keys.of(visit), intervals_of(plan, visit, q.device), softmax_scale=softmax_scale, softcap=softcap,
                state=state, lse=lse, out=out if remaining == 0 else None, first=first)
            first = False
        if pending is not None:
            yield pending
        keys.advance()


def backward(
    plan: Plan, rank: int, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    backend: Backend, exchange: Exchange, *, softmax_scale: float, deterministic: bool, gradients: list[Tensor],
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Waits:
    """Gradients of this rank's q, k and v, and its rows' share of that of sinks.

    dout, out [B, Sq, Hq, Dv], q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], lse (merged) and dlse [B, Hq, Sq] or None,
    sinks [Hq] or None. Appends dq, dk, dv, in the dtype of q and contiguous, to `gradients` at its end, and with sinks dsinks
    [Hq] in acc dtype. dq stays here in one acc dtype buffer; dk and dv are rounded once, at home.
    """
    dead_q, dead_k = plan.dead_q(rank), plan.dead_k(rank)
    q, dout = without_rows(q, dead_q), without_rows(dout, dead_q)
    k, v = (without_rows(x, dead_k) for x in (k, v))
    live_dlse = dlse if dlse is None else without_rows(dlse, dead_q, dim=2)
    dtype = accumulate_dtype(q.dtype)
    delta = backend.delta(dout, out, live_dlse)
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    keys = _Keys(plan, "backward", rank, k, v, exchange)
    grads = _KeyGradients(plan, rank, k, v, dtype, exchange)
    first = True
    for step in range(plan.num_backward_steps):
        pending = exchange.post(
            step,
            [(m, (keys if m.kind == "kv" else grads).outgoing(m)) for m in plan.sends(rank, step, "backward")],
            [(m, (keys if m.kind == "kv" else grads).incoming(m)) for m in plan.recvs(rank, step, "backward")])
        for visit in _visits(plan, rank, step):
            dk, dv, add = grads.target(visit)
            backend.backward(
                dout, q, *keys.of(visit), lse, delta, intervals_of(plan, visit, q.device), softmax_scale=softmax_scale,
                softcap=softcap, dq=dq, dk=dk, dv=dv, accumulate_dq=not first, accumulate_dkv=add, deterministic=deterministic)
            first = False
        if pending is not None:
            yield pending
        grads.fold(step, keys)
        keys.advance()
    if first:
        dq.zero_()
    gradients.extend(x.to(q.dtype) for x in (dq, grads.dk, grads.dv))
    if sinks is not None:
        gradients.append(sink_gradient(sinks, lse, delta, dlse, dead_q))


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor, dlse: Tensor | None, dead_q: Rows) -> Tensor:
    """dsinks [Hq] in acc dtype: the share of this rank's rows (Note [Sinks]).

    sinks [Hq]; lse (merged) and delta [B, Hq, Sq], delta 0 in dead rows; dlse [B, Hq, Sq] or None counts in dead rows only, whose
    lse is the sink itself: what it brings to live rows is in delta.
    """
    sink = sinks.to(lse.dtype)[:, None]
    # By selection: no sink (-inf) has no share, also in rows whose lse is -inf.
    is_none = sink == -torch.inf
    share = torch.exp(sink - lse).masked_fill(is_none, 0.0)
    gradient = -(share * delta).sum((0, 2))
    for start, stop in dead_q if dlse is not None else ():
        gradient += dlse[:, :, start:stop].to(lse.dtype).masked_fill(is_none, 0.0).sum((0, 2))
    return gradient
