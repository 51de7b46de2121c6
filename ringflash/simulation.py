"""simulate(): every rank of a ring in this process, on global tensors. The same plan, loop and kernels as over a network."""
from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringflash.arguments import (
    Call, check_rotate, check_routing, check_scale, check_softcap, check_tensors, make_layout, make_layout_k, make_mask,
    read_options, read_softcap, refuse_forward_mode)
from ringflash import ulysses
from ringflash.kernels.dispatch import Backend, select
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.ops import empty_outputs, heads_of
from ringflash.ring import loop
from ringflash.ring.exchange import Exchange, check_exchange
from ringflash.ring.head_exchange import HeadExchange, LoopbackHeads
from ringflash.ring.heads import HeadSplit, check_degree
from ringflash.ring.loopback import Loopback, drive_all
from ringflash.ring.plan import Plan, build_plan
from ringflash.ring.rotate import choose


@torch.compiler.disable  # generators and numpy plans: a compiled caller breaks its graph here, as tracing would fail inside
def simulate(
    q: Tensor, k: Tensor, v: Tensor, *, cp_size: int, mask: Mask | None = None, layout: Layout | str = "zigzag",
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None, kernel: str = "auto",
    exchange: str = "auto", deterministic: bool = False, return_lse: bool = False, rotate: str = "auto",
    layout_k: Layout | str | None = None, causal: bool | None = None, window_size: tuple[int, int] | None = None,
    cu_seqlens: Any = None, routing: str = "auto", order: random.Random | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Ring attention over cp_size ranks that all live in this process: same plan, loop and kernels, and the same bits, as a real
    ring.

    q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]: global tensors. Returns out [B, Sq, Hq, Dv], and with return_lse
    also lse [B, Hq, Sq] (fp32, natural log), both differentiable, as one autograd node. A layout by name means
    Layout(name, S, cp_size), for any S; layout_k=None is the layout of q, for the length of k. The gradient of sinks [Hq] is
    that of all rows. With a Layout of ulysses_size u there are cp_size * u ranks (Note [Ulysses] in DESIGN.md). All other options
    are those of ring_attention; exchange is "auto", as nothing leaves the process. order:
    steps the ranks in random order, which must not change a bit (for tests).

    Raises ValueError, NotImplementedError or RuntimeError as ring_attention does.
    """
    check_rotate(rotate)
    check_routing(routing)
    check_exchange(exchange)
    if exchange != "auto":
        raise ValueError(f"exchange={exchange!r}: simulate() runs in one process and uses no network; only 'auto' is valid")
    call = Call(q, k, v, sinks)
    check_tensors(call)
    refuse_forward_mode(q, k, v, sinks)
    scale = read_options(softmax_scale, q.shape[3], kernel, exchange, deterministic, return_lse)
    cap = read_softcap(softcap)
    check_scale(scale)
    check_softcap(cap)
    given = make_mask(mask, causal, window_size, cu_seqlens)
    ulysses_size = layout.ulysses_size if isinstance(layout, Layout) else 1
    check_degree(ulysses_size, q.shape[2])
    full = make_layout(layout, q.shape[1], cp_size, "layout", ulysses_size)
    keys = make_layout_k(layout_k, full, k.shape[1], by_name=isinstance(layout, str))
    for name, tensor, value in (("q", q, full), ("k", k, keys)):
        if tensor.shape[1] != value.seq_len:
            raise ValueError(f"{name} has {tensor.shape[1]} rows, but its layout has seq_len={value.seq_len}")
    chosen = call.choose_mask(given, None if isinstance(layout, str) else full)
    backend = select(kernel, device=q.device, dtype=q.dtype, head_dim=q.shape[3], deterministic=deterministic,
                     head_dim_v=v.shape[3])
    plan, heads = build_plan(chosen, full, keys, routing=routing), heads_of(q, k, v)
    if ulysses_size > 1:
        heads = HeadSplit(heads.num_heads, heads.num_kv_heads, ulysses_size).local(heads)
    ring = SimulatedRing(plan, full, keys, backend, scale, deterministic, order, softcap=cap,
                         rotation=lambda: choose(plan, heads, rotate).plan)
    out, lse = _Simulate.apply(q, k, v, sinks, ring)
    return (out, lse) if return_lse else out


@dataclass
class SimulatedRing:
    """One call of simulate(). loopback: what carries the messages of a pass (tests put a defective one here). rotation: the plan of
    a backward, asked for when there is one (None: `plan`)."""

    plan: Plan
    layout: Layout
    layout_k: Layout
    backend: Backend
    softmax_scale: float
    deterministic: bool = False
    order: random.Random | None = None
    loopback: type[Loopback] = Loopback
    softcap: float = 0.0
    rotation: Callable[[], Plan] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Global q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], sinks [Hq] -> out [B, Sq, Hq, Dv] input dtype, lse
        [B, Hq, Sq] acc dtype."""
        shards, loops = [], []
        for rank, carrier, heads in self._ranks("forward"):
            q_local = _take(q, self.layout, rank)
            k_local, v_local = (_take(x, self.layout_k, rank) for x in (k, v))
            out, lse = empty_outputs(q_local, v)
            shards.append((out, lse))
            attend = partial(self._attend, rank // self.layout.ulysses_size, carrier)
            member = ulysses.member_of(self.layout, self.layout_k, rank, q.shape[2], k.shape[2])
            loops.append(attend(q_local, k_local, v_local, sinks=sinks, out=out, lse=lse) if member is None else
                         ulysses.forward(member, heads, attend, q_local, k_local, v_local, sinks, out, lse))
        drive_all(loops, self.order)
        return self._join([out for out, _ in shards], self.layout), self._join([lse for _, lse in shards], self.layout, dim=2)

    def backward(self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                 lse: Tensor, sinks: Tensor | None = None) -> list[Tensor]:
        """Global dq, dk, dv in the input dtype, and with sinks dsinks in theirs."""
        plan = self.plan if self.rotation is None else self.rotation()
        shards: list[list[Tensor]] = []
        loops = []
        for rank, carrier, heads in self._ranks("backward"):
            dout_local, q_local, out_local = (_take(x, self.layout, rank) for x in (dout, q, out))
            k_local, v_local = (_take(x, self.layout_k, rank) for x in (k, v))
            lse_local, dlse_local = (None if x is None else _take(x, self.layout, rank, dim=2) for x in (lse, dlse))
            shards.append([])
            tensors = (dout_local, dlse_local, q_local, k_local, v_local, out_local, lse_local)
            differentiate = partial(self._differentiate, plan, rank // self.layout.ulysses_size, carrier)
            member = ulysses.member_of(self.layout, self.layout_k, rank, q.shape[2], k.shape[2])
            loops.append(differentiate(*tensors, sinks=sinks, gradients=shards[rank]) if member is None else
                         ulysses.backward(member, heads, differentiate, *tensors, sinks, shards[rank]))
        drive_all(loops, self.order)
        whole = [self._join([shard[index] for shard in shards], self.layout if index == 0 else self.layout_k)
                 for index in range(3)]
        if sinks is not None:
            whole.append(sum(shard[3] for shard in shards).to(sinks.dtype))
        return whole

    def _attend(self, ring_rank: int, carrier: Exchange, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> loop.Waits:
        return loop.forward(self.plan, ring_rank, q, k, v, self.backend, carrier, softmax_scale=self.softmax_scale,
                            softcap=self.softcap, **more)

    def _differentiate(self, plan: Plan, ring_rank: int, carrier: Exchange, dout: Tensor, dlse: Tensor | None, *saved: Tensor,
                       **more: Any) -> loop.Waits:
        return loop.backward(plan, ring_rank, dout, dlse, *saved, self.backend, carrier, softmax_scale=self.softmax_scale,
                             softcap=self.softcap, deterministic=self.deterministic, **more)

    def _ranks(self, pass_: str) -> Iterator[tuple[int, Exchange, HeadExchange]]:
        """Every rank with its carriers: of its ring (one for each Ulysses rank), and of its place's all-to-all."""
        size = self.layout.ulysses_size
        rings = [self.loopback(pass_) for _ in range(size)]
        places = [LoopbackHeads(size) for _ in range(self.layout.cp_size)]
        for rank in range(self.layout.num_ranks):
            place, part = divmod(rank, size)
            yield rank, rings[part].carrier(place), places[place].carrier(part, rank)

    def _join(self, parts: list[Tensor], layout: Layout, dim: int = 1) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[dim] = layout.seq_len
        whole = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
        for rank, part in enumerate(parts):
            offset = 0
            for start, stop, stride in layout.chunks(rank):
                rows = len(range(start, stop, stride))
                whole[(slice(None),) * dim + (slice(start, stop, stride),)] = part.narrow(dim, offset, rows)
                offset += rows
        return whole


def _take(x: Tensor, layout: Layout, rank: int, dim: int = 1) -> Tensor:
    """The rows of a rank: a view where they are one range of positions, else a copy."""
    prefix = (slice(None),) * dim
    parts = [x[prefix + (slice(start, stop, stride),)] for start, stop, stride in layout.chunks(rank)]
    if not parts:
        return x[prefix + (slice(0, 0),)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class _Simulate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, ring: SimulatedRing) -> tuple[Tensor, Tensor]:
        out, lse = ring.forward(q, k, v, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None, None, None
        if dout is None:
            dout = torch.zeros_like(out)
        dq, dk, dv, *dsinks = ctx.ring.backward(dout, dlse, q, k, v, out, lse, sinks)
        return dq, dk, dv, dsinks[0] if dsinks else None, None
