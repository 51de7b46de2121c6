"""The ring as two functional custom ops, one per direction: traced code sees shapes, names and spec tensors, never what a
mask holds.

Layouts and masks enter as their CPU spec tensors, which describe them completely: a new batch of documents is new data to a
compiled graph, not a new constant, and nothing has to outlive the call. A group enters by its name.
"""
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ringflash import ulysses
from ringflash.agreement import REFUSALS, agree, layout_fields, mask_field, rows_field
from ringflash.arguments import Call, check_scale, check_softcap, check_tensors, make_layout, make_layout_k
from ringflash.kernels.dispatch import Backend, accumulate_dtype, select
from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.mesh import Ranks, ranks_by_name
from ringflash.ring import loop
from ringflash.ring.carriers import make_carrier
from ringflash.ring.exchange import check_carrier, check_exchange
from ringflash.ring.head_exchange import DistributedHeadExchange
from ringflash.ring.heads import check_degree
from ringflash.ring.plan import Plan, build_plan
from ringflash.ring.rotate import Heads, choose

# mask, layout, layout_k: specs, or None. causal, left, right: a mask in place of a spec (causal -1: none, 0, 1). (An int[] would
# be taken for a list of tensors by torch's autograd wrapper when it is empty.) masks: specs of the masks that the layout allows.
# layout_kind, layout_k_kind: a layout by its name where there is no spec; layout_k_kind "" is the layout of q.
_RING_ARGUMENTS = (
    "Tensor? mask, int causal, int left, int right, Tensor? layout, str layout_kind, Tensor[] masks, Tensor? layout_k, "
    "str layout_k_kind, "
    "float softmax_scale, float softcap, str group_name, str ulysses_name, str kernel, str exchange, str rotate, str routing, "
    "bool deterministic, bool is_agreed, bool needs_gradients")


@dataclass(frozen=True)
class RingArguments:
    """Everything of a call but tensors that need gradients, as the ops take it, in their order."""

    mask: Tensor | None
    causal: int
    left: int
    right: int
    layout: Tensor | None
    layout_kind: str
    masks: Sequence[Tensor]
    layout_k: Tensor | None
    layout_k_kind: str
    softmax_scale: float
    softcap: float
    group_name: str
    ulysses_name: str
    kernel: str
    exchange: str
    rotate: str
    routing: str
    deterministic: bool
    is_agreed: bool
    needs_gradients: bool

    def flatten(self) -> tuple:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass(frozen=True)
class _Ring:
    plan: Plan
    layout: Layout
    layout_k: Layout
    mask: Mask
    backend: Backend
    heads: Heads  # that take part in this rank's ring
    member: ulysses.Member | None


@lru_cache(maxsize=256)
def _mask_of(spec: bytes) -> Mask:
    return Mask.from_spec(torch.frombuffer(bytearray(spec), dtype=torch.int64))


def _decode(spec: Tensor) -> Mask:
    return _mask_of(spec.numpy().tobytes())


@lru_cache(maxsize=256)
def _layout_of(spec: bytes, masks: tuple[Mask, ...] | None) -> Layout:
    return Layout.from_spec(torch.frombuffer(bytearray(spec), dtype=torch.int64), masks)


def _resolve(call: Call, a: RingArguments, ranks: Ranks) -> _Ring:
    """Validate everything; the one place where the arguments of ring_attention become a plan and a kernel."""
    check_exchange(a.exchange)
    check_tensors(call)
    check_scale(a.softmax_scale)
    check_softcap(a.softcap)
    check_degree(ranks.ulysses_size, call.q.shape[2])
    q, k, size, rank = call.q, call.k, ranks.ring_size, ranks.rank
    by_name = a.layout is None
    if by_name:
        layout = make_layout(a.layout_kind, ranks.size * q.shape[1], size, "layout", ranks.ulysses_size)
    else:
        given = _layout_of(a.layout.numpy().tobytes(), tuple(_decode(m) for m in a.masks))
        layout = make_layout(given, 0, size, "layout", ranks.ulysses_size)
    given_k = None if a.layout_k is None else _layout_of(a.layout_k.numpy().tobytes(), None)
    layout_k = make_layout_k(given_k or a.layout_k_kind or None, layout, ranks.size * k.shape[1], by_name)
    for name, x, value in (("q", q, layout), ("k", k, layout_k)):
        if x.shape[1] != value.shard_len(rank):
            lengths = [value.shard_len(r) for r in range(ranks.size)]
            raise ValueError(f"{name}: {x.shape[1]} local rows on cp rank {rank}, but its layout ({value.kind}, "
                             f"seq_len={value.seq_len}, cp_size={size}{_times(ranks)}) gives it {value.shard_len(rank)} "
                             f"(all ranks: {_brief(lengths)})")
    given = _decode(a.mask) if a.mask is not None else None
    if a.causal >= 0:
        given = Mask(causal=bool(a.causal), window_size=(a.left, a.right))
    mask = call.choose_mask(given, None if by_name else layout)
    backend = select(a.kernel, device=q.device, dtype=q.dtype, head_dim=q.shape[3], deterministic=a.deterministic,
                     head_dim_v=call.v.shape[3])
    if size > 1:
        check_carrier(a.exchange, ranks.ring, q.device)
    if ranks.ulysses_size > 1:
        check_carrier("auto", ranks.ulysses, q.device)
    heads, member = heads_of(q, k, call.v), ulysses.member_of(layout, layout_k, rank, q.shape[2], k.shape[2])
    return _Ring(build_plan(mask, layout, layout_k, routing=a.routing), layout, layout_k, mask, backend,
                 heads if member is None else member.split.local(heads), member)


def _times(ranks: Ranks) -> str:
    return "" if ranks.ulysses_size == 1 else f" x ulysses_size={ranks.ulysses_size}"


def _brief(lengths: list[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return shown if len(lengths) <= 8 else f"{shown}, ..."


def _fields(call: Call, a: RingArguments, ring: _Ring) -> dict[str, object]:
    """What all ranks must share. Local rows are implied by the layouts."""
    q, k, v, sinks = call.q, call.k, call.v, call.sinks
    return {
        "q.dtype": q.dtype, "q.device": q.device.type, "q [B, Hq, D]": (q.shape[0], q.shape[2], q.shape[3]),
        "k [B, Hkv, D]": (k.shape[0], k.shape[2], k.shape[3]), "v [Dv]": v.shape[3],
        "sinks": "none" if sinks is None else f"{tuple(sinks.shape)} {sinks.dtype}",
        "mask": mask_field(ring.mask), **layout_fields(ring.layout),
        "layout_k": rows_field(ring.layout_k), "softmax_scale": a.softmax_scale, "softcap": a.softcap,
        "kernel": ring.backend.name, "exchange": a.exchange, "rotate": a.rotate, "routing": a.routing,
        "deterministic": a.deterministic, "needs gradients": a.needs_gradients,
    }


# Groups whose ranks have compared dtype, heads and options once: a token speaks of rows and masks only, and gloo completes a
# receive of fewer bytes than it awaits without a word.
# By the last of Ranks.groups, with the names of both axes: a ring may also be an axis of a mesh, and then not all its ranks know.
_compared: "weakref.WeakKeyDictionary[Any, set[tuple[str, str]]]" = weakref.WeakKeyDictionary()


def must_compare(ranks: Ranks, is_agreed: bool) -> bool:
    """Do these ranks compare their arguments in this call? Unconditional, as a check that some rank may skip is a hang. (The first
    call on a group is the first on all its ranks.)"""
    return ranks.size > 1 and (not is_agreed or ranks.names not in _compared.get(ranks.groups[-1], ()))


@torch.library.custom_op(
    "ringflash::attention_forward", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_RING_ARGUMENTS}) -> (Tensor, Tensor)")
def attention_forward(q, k, v, sinks, *arguments):
    """q [B, S_local, Hq, D], k [B, Sk_local, Hkv, D], v [B, Sk_local, Hkv, Dv], sinks [Hq] or None -> out [B, S_local, Hq, Dv]
    (contiguous) in q's dtype, lse [B, Hq, S_local] acc dtype."""
    a = RingArguments(*arguments)
    ranks, call = ranks_by_name(a.group_name, a.ulysses_name), Call(q, k, v, sinks)
    ring = problem = None
    try:
        ring = _resolve(call, a, ranks)
    except REFUSALS as error:
        problem = error
    if must_compare(ranks, a.is_agreed):
        agree(ranks, "ring_attention", {} if ring is None else _fields(call, a, ring), problem=problem)
        _compared.setdefault(ranks.groups[-1], set()).add(ranks.names)
    elif problem is not None:
        raise problem
    out, lse = empty_outputs(q, v)
    carrier = _carrier(a, ranks, ring, (ring.plan, "forward"), q.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> loop.Waits:
        return loop.forward(ring.plan, ranks.ring_rank, q, k, v, ring.backend, carrier, softmax_scale=a.softmax_scale,
                            softcap=a.softcap, **more)

    if ring.member is None:
        loop.drive(attend(q, k, v, sinks=sinks, out=out, lse=lse))
    else:
        exchange = DistributedHeadExchange(ranks.ulysses, "forward")
        loop.drive(ulysses.forward(ring.member, exchange, attend, q, k, v, sinks, out, lse))
    return out, lse


@torch.library.custom_op(
    "ringflash::attention_backward", mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, "
           f"{_RING_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)")
def attention_backward(dout, dlse, q, k, v, sinks, out, lse, *arguments):
    """dout, out [B, S_local, Hq, Dv], lse and dlse [B, Hq, S_local] -> dq, dk, dv like q, k, v (contiguous), dsinks like sinks,
    [0] without. The forward agreed on everything."""
    a = RingArguments(*arguments)
    ranks = ranks_by_name(a.group_name, a.ulysses_name)
    ring = _resolve(Call(q, k, v, sinks), a, ranks)
    gradients: list[Tensor] = []
    plan = choose(ring.plan, ring.heads, a.rotate).plan
    carrier = _carrier(a, ranks, ring, (plan, "backward"), q.device)

    def differentiate(dout: Tensor, dlse: Tensor | None, *saved: Tensor, **more: Any) -> loop.Waits:
        return loop.backward(plan, ranks.ring_rank, dout, dlse, *saved, ring.backend, carrier, softmax_scale=a.softmax_scale,
                             softcap=a.softcap, deterministic=a.deterministic, **more)

    if ring.member is None:
        loop.drive(differentiate(dout, dlse, q, k, v, out, lse, sinks=sinks, gradients=gradients))
    else:
        exchange = DistributedHeadExchange(ranks.ulysses, "backward")
        loop.drive(ulysses.backward(ring.member, exchange, differentiate, dout, dlse, q, k, v, out, lse, sinks, gradients))
    dq, dk, dv, *dsinks = gradients
    # An op cannot return an optional tensor.
    return dq, dk, dv, _empty_sinks(q, sinks) if sinks is None else dsinks[0].to(sinks.dtype)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out [B, S, Hq, Dv] in q's dtype, contiguous, lse [B, Hq, S] in the accumulator dtype; contents undefined."""
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, rows, heads, v.shape[3])), q.new_empty((batch, heads, rows), dtype=accumulate_dtype(q.dtype))


def heads_of(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], of any number of rows: what these weigh on the wire."""
    return Heads(batch=q.shape[0], num_heads=q.shape[2], num_kv_heads=k.shape[2], head_dim=q.shape[3], head_dim_v=v.shape[3],
                 itemsize=q.dtype.itemsize, grad_itemsize=accumulate_dtype(q.dtype).itemsize)


def _empty_sinks(q: Tensor, sinks: Tensor | None) -> Tensor:
    return q.new_empty((0,)) if sinks is None else sinks.new_empty(sinks.shape)


class _NoExchange:
    """One rank: nothing to post."""

    def post(self, step, sends, recvs):
        return None


def _carrier(a: RingArguments, ranks: Ranks, ring: _Ring, planned: tuple[Plan, str], device: torch.device) -> Any:
    """planned: plan and pass."""
    plan, pass_ = planned
    if plan.cp_size == 1:
        return _NoExchange()
    return make_carrier(a.exchange, ranks.ring, plan, pass_, ring.heads.row_bytes, device)


@attention_forward.register_fake
def _(q, k, v, sinks, *arguments):
    return empty_outputs(q, v)


@attention_backward.register_fake
def _(dout, dlse, q, k, v, sinks, out, lse, *arguments):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), _empty_sinks(q, sinks)


_TENSORS = ("mask", "layout", "layout_k")


def _setup_context(ctx, inputs, output):
    q, k, v, sinks, *arguments = inputs
    a = RingArguments(*arguments)
    # Tensors have to be saved as such: those of a traced call live in its graph.
    ctx.save_for_backward(q, k, v, sinks, *output, *(getattr(a, name) for name in _TENSORS), *a.masks)
    ctx.plain = {name: getattr(a, name) for name in a.__dataclass_fields__ if name not in (*_TENSORS, "masks")}
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    q, k, v, sinks, out, lse, mask, layout, layout_k, *masks = ctx.saved_tensors
    if dout is None and dlse is not None:
        dout = torch.zeros_like(out)
    a = RingArguments(mask=mask, layout=layout, layout_k=layout_k, masks=masks, **ctx.plain)
    # No gradient for a list of tensors is a list of Nones; for an empty list, an empty one.
    nothing = tuple([None] * len(masks) if name == "masks" else None for name in a.__dataclass_fields__)
    if dout is None and dlse is None:
        return None, None, None, None, *nothing
    dq, dk, dv, dsinks = attention_backward(dout, dlse, q, k, v, sinks, out, lse, *a.flatten())
    return dq, dk, dv, None if sinks is None else dsinks, *nothing


attention_forward.register_autograd(_backward, setup_context=_setup_context)
