"""The ring: one forward and one backward loop for every layout, mask, kernel and carrier.

Both are generators that yield each Pending where its data is needed. One process per rank drives its own with drive(); loopback
steps those of all ranks in one process.
"""
from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ringflash.kernels.dispatch import Backend
from ringflash.kernels.intervals import Intervals, Turn, accumulate_dtype, turns
from ringflash.ring import tracing
from ringflash.ring.buffers import Rows
from ringflash.ring.cache import BoundedCache
from ringflash.ring.exchange import Exchange, Parcels, Pending
from ringflash.ring.gathered import GatheredVisit, OwnVisit, visits_of
from ringflash.ring.travel import Blocks, Gradients
from ringflash.ring.wires import HeadWire, QueryWire, Tensors

if TYPE_CHECKING:
    from ringflash.ring.plan import Plan, Visit

Waits = Generator[Pending, None, None]

_ENTRY_BYTES = 16 << 10  # an Intervals of few rows: objects, not data (measured 12 KiB); and what a kernel derives from it
_intervals = BoundedCache(max_weight=256 << 20)
_turns = BoundedCache(max_weight=64 << 20)


def drive(waits: Waits) -> None:
    for pending in waits:
        pending.wait()


def intervals_of(
    plan: Plan, visit: Visit | OwnVisit | GatheredVisit, device: torch.device, rows: tuple[int, int] | None = None,
) -> Intervals:
    """The visit's intervals on `device`; kept (least recently used first out) up to 256 MiB, as every layer asks for the same.

    rows: of the visit's key rows only those from the first to before the second number.
    """
    def make() -> Intervals:
        # Copied: the plan's arrays are read-only, which torch cannot express.
        ends = [torch.from_numpy(end.copy()) for end in visit.intervals()]
        if rows is not None:
            ends = [*(end.clamp(*rows) - rows[0] for end in ends[:2]), *(end[slice(*rows)].clone() for end in ends[2:])]
        # Where the Q side travels the plan is that of the transposed mask: its "queries" are keys.
        return Intervals.from_host(*(ends if plan.rotates == "kv" else ends[2:] + ends[:2]), device)

    key = (plan.key, visit.key[1:], rows, device)
    return _intervals.get_or_make(key, make, lambda made: _ENTRY_BYTES + 16 * (made.num_q + made.num_k))


def turns_of(plan: Plan, rank: int, has_sinks: bool) -> Sequence[Turn]:
    """The place of each visit of a rank among those of a forward, in their order; kept like intervals. has_sinks: every row's state
    holds something from the start."""
    def make() -> list[Turn]:
        visits = [visit for step in range(plan.num_steps) for visit in visits_of(plan, rank, step, "forward")]
        # Copied: the plan's arrays are read-only, which torch cannot express.
        return turns([tuple(torch.from_numpy(end.copy()) for end in visit.intervals()[:2]) for visit in visits], has_sinks)

    return _turns.get_or_make((plan.key, rank, has_sinks), make,
                              lambda made: sum(_ENTRY_BYTES + 10 * turn.before.shape[0] for turn in made))


def without_rows(x: Tensor, rows: Rows, dim: int = 1) -> Tensor:
    """x, or when `rows` names any a copy with those rows zeroed (Note [Dead rows])."""
    if not rows:
        return x
    x = x.clone()
    for start, stop in rows:
        x.narrow(dim, start, stop - start).zero_()
    return x


def _post(exchange: Exchange, pass_: str, step: int, sends: Parcels, recvs: Parcels) -> Pending | None:
    with tracing.posting(pass_, step, sends, recvs):
        pending = exchange.post(step, sends, recvs)
    return tracing.awaited(pending, pass_, step, sends, recvs)


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
    remaining = sum(len(visits_of(plan, rank, step, "forward")) for step in range(plan.num_steps))
    first = sinks is None
    places = turns_of(plan, rank, not first) if remaining > 1 and getattr(backend, "takes_turns", False) else None
    if remaining == 0:
        out.zero_()
    if not first:
        lse.copy_(sinks[:, None])
    elif remaining == 0:
        lse.fill_(float("-inf"))
    # The running out is acc dtype; a single visit that has nothing to fold into writes `out` directly and needs none. Where no row
    # is visited twice, tiles of a kernel may still have rows of both visits.
    state = None
    if remaining > 1 or (remaining == 1 and not first):
        state = torch.empty(out.shape, dtype=lse.dtype, device=q.device)
        if not first:
            state.zero_()
    keys = Blocks(plan, "forward", rank, (k, v), HeadWire((k, v)), exchange)
    for step in range(plan.num_steps):
        pending = _post(
            exchange, "forward", step,
            [(message, keys.outgoing(message)) for message in plan.sends(rank, step, "forward")],
            [(message, keys.incoming(message)) for message in plan.recvs(rank, step, "forward")])
        for visit in visits_of(plan, rank, step, "forward"):
            remaining -= 1
            turn = {} if places is None else {"turn": places[-1 - remaining]}
            with tracing.span("ring forward step {}: kernel, block of {}", step, visit.owner):
                backend.forward(
                    q, *keys.of(visit), intervals_of(plan, visit, q.device), softmax_scale=softmax_scale, softcap=softcap,
                    state=state, lse=lse, out=out if turn or remaining == 0 else None, first=first, **turn)
            first = False
        if pending is not None:
            yield pending
        keys.advance()


def backward(
    plan: Plan, rank: int, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    backend: Backend, exchange: Exchange, *, softmax_scale: float, deterministic: bool, gradients: list[Tensor],
    softcap: float = 0.0, sinks: Tensor | None = None, kv_dtype: torch.dtype | None = None,
) -> Waits:
    """Gradients of this rank's q, k and v, and its rows' share of that of sinks.

    plan: of the forward, or where the Q side is to rotate that with rotates="q" of the same mask and layouts.
    dout, out [B, Sq, Hq, Dv], q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], lse (merged) and dlse [B, Hq, Sq] or None,
    sinks [Hq] or None. Appends dq, dk, dv, in the dtype of q and contiguous, to `gradients` at its end, and with sinks dsinks
    [Hq] in acc dtype. What belongs to the rows that stay (dq, or dk and dv where the Q side rotates) is one acc dtype buffer here
    for all visits; what others computed for the rows that travel comes home. All are rounded once, at home. kv_dtype: of dk and dv
    instead, for who has more to add to them.
    """
    rotates_q = plan.rotates == "q"
    dead_q, dead_k = plan.dead_q(rank), plan.dead_k(rank)
    if rotates_q:
        dead_q, dead_k = dead_k, dead_q
    q, dout = without_rows(q, dead_q), without_rows(dout, dead_q)
    k, v = (without_rows(x, dead_k) for x in (k, v))
    live_dlse = dlse if dlse is None else without_rows(dlse, dead_q, dim=2)
    dtype = accumulate_dtype(q.dtype)
    delta = backend.delta(dout, out, live_dlse)
    dq, dk, dv = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    queries, keys = (q, dout, lse, delta), (k, v)
    stay, home = ((dk, dv), (dq,)) if rotates_q else ((dq,), (dk, dv))
    blocks = Blocks(plan, "backward", rank, queries if rotates_q else keys,
                    QueryWire(q, dout, lse) if rotates_q else HeadWire(keys), exchange)
    grads = Gradients(plan, rank, home, HeadWire(home), exchange)
    deferred = deferred_rows(plan, rank)
    holds = deferred is not None and comes_home_early(plan, rank)   # something in those rows before this rank's own gradients
    for x in home if holds else ():
        x[:, slice(*deferred)].zero_()
    first = True
    for step in range(plan.num_backward_steps):
        pending = _post(
            exchange, "backward", step,
            [(m, (grads if m.is_gradient else blocks).outgoing(m)) for m in plan.sends(rank, step, "backward")],
            [(m, (grads if m.is_gradient else blocks).incoming(m)) for m in plan.recvs(rank, step, "backward")])
        for visit, rows in _backward_work(plan, rank, step):
            arrived, (target, add) = blocks.of(visit), grads.target(visit)
            if rows is not None:
                arrived, target = (tuple(x[:, slice(*rows)] for x in tensors) for tensors in (arrived, target))
            if rows is not None and rows == deferred:
                add, holds = holds, True
            if rotates_q:
                queries, written, add_dq, add_dkv = arrived, (*target, *stay), add, not first
            else:
                keys, written, add_dq, add_dkv = arrived, (*stay, *target), not first, add
            with tracing.span("ring backward step {}: kernel, block of {}", step, visit.owner):
                _visit_backward(backend, queries, keys, intervals_of(plan, visit, q.device, rows), written, accumulate_dq=add_dq,
                                accumulate_dkv=add_dkv, softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic)
            first = False
        if pending is not None:
            yield pending
        grads.fold(step, blocks)
        blocks.advance()
    for x in stay if first else ():
        x.zero_()
    kv_dtype = q.dtype if kv_dtype is None else kv_dtype
    gradients.extend(x.to(wanted) for x, wanted in ((dq, q.dtype), (dk, kv_dtype), (dv, kv_dtype)))
    if sinks is not None:
        gradients.append(sink_gradient(sinks, lse, delta, dlse, dead_q))


def deferred_rows(plan: Plan, rank: int) -> tuple[int, int] | None:
    """The rank's own key rows whose visit waits for the last step of the backward (Note [A kernel for the last hop]): the later
    half, where K and V rotate and a gradient travels in that step, else None."""
    last, rows = plan.num_backward_steps - 1, sum(visit.num_rows for visit in visits_of(plan, rank, 0, "backward")[:1])
    if plan.rotates != "kv" or last < plan.num_steps or rows < 2:
        return None
    if not plan.sends(rank, last, "backward") and not plan.recvs(rank, last, "backward"):
        return None
    return rows // 2, rows


def comes_home_early(plan: Plan, rank: int) -> bool:
    """Whether gradients come home to `rank` before the last step of the backward."""
    return any(m.is_home for step in range(plan.num_backward_steps - 1) for m in plan.recvs(rank, step, "backward"))


def _backward_work(plan: Plan, rank: int, step: int) -> Iterator[tuple[Visit | GatheredVisit, tuple[int, int] | None]]:
    """The visits of a step of the backward in their order, with the key rows that are done now (None: all)."""
    deferred = deferred_rows(plan, rank)
    for visit in visits_of(plan, rank, step, "backward"):
        yield visit, (0, deferred[0]) if visit.is_own and deferred else None
    if deferred and step == plan.num_backward_steps - 1:
        for visit in visits_of(plan, rank, 0, "backward"):
            yield visit, deferred


def _visit_backward(
    backend: Backend, queries: Tensors, keys: Tensors, intervals: Intervals, gradients: Tensors, **options: Any,
) -> None:
    """queries: q, dout, lse, delta; keys: k, v; gradients: dq, dk, dv."""
    q, dout, lse, delta = queries
    dq, dk, dv = gradients
    backend.backward(dout, q, *keys, lse, delta, intervals, dq=dq, dk=dk, dv=dv, **options)


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
