"""Planted defects: each is built into one computation of the loopback ring, and the check must catch it.

A check that never fails proves nothing. The defects are the ones that have gone wrong elsewhere while the loss looked healthy.
They are put into the objects that a ring is made of (plan, kernel, carrier); the product has no hooks for them.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringflash import Layout
from ringflash.kernels import dispatch
from ringflash.launch.check_problem import DTYPES, Cell, call_options, make_dlse, make_inputs
from ringflash.launch.check_judge import Judge, Tensors
from ringflash.launch.check_scale import GROWTH_LIMIT, Problem
from ringflash.launch.check_table import grid
from ringflash.mask import Mask
from ringflash.ring.loopback import Loopback
from ringflash.ring.plan import Plan, Visit, build_plan
from ringflash.simulation import SimulatedRing
from ringflash.tests.support import oracle

LOG2_E = 1.4426950408889634


class Changed:
    """An object with some attributes replaced; all others are those of the original."""

    def __init__(self, original: object, **replaced: object):
        self.__dict__.update(replaced, _original=original)

    def __getattr__(self, name: str):
        return getattr(self._original, name)


class WrongNeighbour(Loopback):
    """Every rank receives keys and values from the neighbour on its other side. With two ranks that is the same one."""

    cp_size = 3

    def post(self, sends, recvs) -> None:
        if self.pass_ != "forward":
            return super().post(sends, recvs)
        self._sends.update(sends)
        self._recvs.update(recvs)
        taken, filled = self.__dict__.setdefault("taken", set()), self.__dict__.setdefault("filled", set())
        for message, target in self._recvs.items():
            wrong = (2 * message.dst - message.src) % self.cp_size
            for other, source in self._sends.items():
                if (other.step, other.lane, other.src) == (message.step, message.lane, wrong) and message not in filled:
                    target.zero_()
                    rows = min(len(source), len(target))
                    target[:rows].copy_(source[:rows])
                    taken.add(other)
                    filled.add(message)
        self._done = taken & filled


class RoundedHops(Loopback):
    """Partial dk, dv are rounded to bf16 at every hop."""

    def deliver(self, message, source, target) -> None:
        super().deliver(message, source.bfloat16().to(source.dtype) if message.kind == "dkv" else source, target)


class LostGradient(Loopback):
    """One rank's share of dk, dv (of dq, where the Q side rotates) never comes home."""

    def deliver(self, message, source, target) -> None:
        super().deliver(message, torch.zeros_like(source) if message.is_home and message.owner == 0 else source, target)


def skipped_visit(plan: Plan) -> Changed:
    """The last rank leaves its last visit out, forward and backward."""
    rank = plan.cp_size - 1
    step = max(s for s in range(plan.num_steps) if plan.visits(rank, s))
    return Changed(plan, visits=lambda r, s: plan.visits(r, s)[:-1] if (r, s) == (rank, step) else plan.visits(r, s))


def skipped_second_visit(plan: Plan) -> Changed:
    """Where a block is read through two intervals, the last rank leaves the second one out, forward and backward."""
    rank = plan.cp_size - 1
    return Changed(plan, visits=lambda r, s: tuple(v for v in plan.visits(r, s) if r != rank or v.part == 0))


def pair_twice(plan: Plan) -> Changed:
    """The last row that its window has not left yet sees the first key of the sequence in its second interval too."""
    def second(visit: Visit) -> Changed:
        k_lo, k_hi = (ends.copy() for ends in visit.intervals()[:2])
        row = int((k_lo < k_hi).argmax()) - 1
        k_hi[row] = k_lo[row] + 1
        return with_intervals(visit, k_lo, k_hi)

    visits = tuple(second(v) if v.part else v for v in plan.visits(0, 0))
    return Changed(plan, key=("twice", plan.key), visits=lambda r, s: visits if (r, s) == (0, 0) else plan.visits(r, s))


def with_intervals(visit: Visit, k_lo: np.ndarray, k_hi: np.ndarray) -> Changed:
    """The visit with other ends, and what follows from them for its keys."""
    keys = np.arange(visit.num_rows, dtype=np.int32)
    transposed = (np.searchsorted(k_hi, keys, side="right"), np.searchsorted(k_lo, keys, side="right"))
    return Changed(visit, intervals=lambda: (k_lo, k_hi, *(x.astype(np.int32) for x in transposed)))


def leaking_visit(visit: Visit) -> Changed:
    """One query row of this visit sees the last key of the document before its own."""
    k_lo, k_hi, _, _ = (ends.copy() for ends in visit.intervals())
    row = next(i for i in range(1, len(k_lo)) if k_lo[i - 1] < k_lo[i] < k_hi[i])
    k_lo[row] -= 1
    return with_intervals(visit, k_lo, k_hi)


def document_leak(plan: Plan) -> Changed:
    visits = tuple(leaking_visit(v) for v in plan.visits(0, 0))
    # Intervals on the device are kept by the plan's key: the sound plan must not find the leaking ones, nor the other way round.
    return Changed(plan, key=("leaking", plan.key), visits=lambda r, s: visits if (r, s) == (0, 0) else plan.visits(r, s))


def base_2_lse(backend) -> Changed:
    """The backward takes the natural logarithm that the forward left for one of base 2."""
    def backward(dout, q, k, v, lse, *rest, **options):
        return backend.backward(dout, q, k, v, lse / LOG2_E, *rest, **options)

    return Changed(backend, backward=backward)


def hop_0_keys(backend) -> Changed:
    """The backward uses the k and v of each rank's first visit, which are its own, at every step (over again where a later visit
    has more rows)."""
    own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def backward(dout, q, k, v, *rest, **options):
        k, v = (first.repeat(1, -(-x.shape[1] // first.shape[1]), 1, 1)[:, : x.shape[1]]
                for first, x in zip(own.setdefault(q.data_ptr(), (k, v)), (k, v)))
        return backend.backward(dout, q, k, v, *rest, **options)

    return Changed(backend, backward=backward)


def hop_0_queries(backend) -> Changed:
    """The Q side rotates, and the backward uses the queries of each rank's first visit, which are its own, at every step."""
    own: dict[int, tuple[torch.Tensor, ...]] = {}

    def backward(dout, q, k, v, lse, delta, intervals, *, dq, **options):
        first = own.setdefault(k.data_ptr(), (dout, q, lse, delta))
        dout, q, lse, delta = (x.repeat_interleave(-(-dq.shape[1] // x.shape[dim]), dim).narrow(dim, 0, dq.shape[1])
                               for x, dim in zip(first, (1, 1, 2, 2)))
        return backend.backward(dout, q, k, v, lse, delta, intervals, dq=dq, **options)

    return Changed(backend, backward=backward)


def sink_each_visit(backend) -> Changed:
    """Every visit folds the sink in again: it is counted as often as the row is visited."""
    started: dict[int, torch.Tensor] = {}

    def forward(q, *rest, state, lse, **options):
        # A row's state is (0, sink) before its rank's first visit.
        if (sink := started.get(lse.data_ptr())) is None:
            started[lse.data_ptr()] = lse.clone()
        else:
            folded = torch.logaddexp(lse, sink)
            state.mul_(torch.exp(lse - folded).nan_to_num(0.0).transpose(1, 2)[..., None])
            lse.copy_(folded)
        return backend.forward(q, *rest, state=state, lse=lse, **options)

    return Changed(backend, forward=forward)


class SinksWithoutDlse(SimulatedRing):
    """What arrives at lse does not reach the gradient of the sinks."""

    def backward(self, dout, dlse, *rest):
        *gradients, _ = super().backward(dout, dlse, *rest)
        return [*gradients, super().backward(dout, None, *rest)[3]]


def cap_without_slope(backend) -> Changed:
    """The backward caps the scores and forgets to damp their gradient by 1 - tanh^2. Dense: a kernel has no switch for that."""
    def backward(dout, q, k, v, lse, delta, intervals, *, softmax_scale, softcap, dq, dk, dv, accumulate_dq, accumulate_dkv,
                 deterministic):
        group = q.shape[2] // k.shape[2]
        q_heads, dout_heads = (x.float().unflatten(2, (-1, group)) for x in (q, dout))           # [B, Sq, Hkv, G, D]
        scores = softcap * torch.tanh(torch.einsum("bqhgd,bkhd->bhgqk", q_heads, k.float()) * softmax_scale / softcap)
        keys = torch.arange(k.shape[1], device=q.device)
        allowed = (intervals.k_lo[:, None] <= keys) & (keys < intervals.k_hi[:, None])
        lse_rows, delta_rows = (x.unflatten(1, (-1, group))[..., None] for x in (lse, delta))
        p = torch.exp(scores - lse_rows).masked_fill(~allowed, 0.0)
        ds = p * (torch.einsum("bqhgd,bkhd->bhgqk", dout_heads, v.float()) - delta_rows) * softmax_scale
        found = ((dq, torch.einsum("bhgqk,bkhd->bqhgd", ds, k.float()).flatten(2, 3), accumulate_dq),
                 (dk, torch.einsum("bhgqk,bqhgd->bkhd", ds, q_heads), accumulate_dkv),
                 (dv, torch.einsum("bhgqk,bqhgd->bkhd", p, dout_heads), accumulate_dkv))
        for target, gradient, accumulate in found:
            target.copy_(target + gradient if accumulate else gradient)

    return Changed(backend, backward=backward)


def run_ring(cell: Cell, device: torch.device, *, plan: Callable[[Plan], object] = lambda plan: plan,
             backend: Callable = lambda backend: backend, loopback: type[Loopback] = Loopback,
             backward_mask: Mask | None = None, simulated: type[SimulatedRing] = SimulatedRing) -> Tensors:
    """What check_judge.loopback_cell computes, with parts of the ring exchanged for defective ones."""
    q, k, v, dout = make_inputs(cell, device)
    options, dlse = call_options(cell, device), make_dlse(cell, device)
    sinks = options.get("sinks")
    mask, layout = cell.make_mask(), cell.layouts()["layout"]
    kernel = dispatch.select(cell.kernel, device=device, dtype=q.dtype, head_dim=cell.head_dim, head_dim_v=cell.head_dim_v)

    def ring(mask: Mask) -> SimulatedRing:
        rotation = (lambda: plan(build_plan(mask, layout, layout, rotates="q"))) if cell.rotate == "q" else None
        return simulated(plan(build_plan(mask, layout, layout)), layout, layout, backend(kernel), cell.head_dim ** -0.5,
                         loopback=loopback, softcap=cell.softcap, rotation=rotation)

    out, lse = ring(mask).forward(q, k, v, sinks)
    gradients = ring(backward_mask or mask).backward(dout, dlse, q, k, v, out, lse, sinks)
    return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsinks"), gradients))}


@dataclasses.dataclass(frozen=True)
class Defect:
    text: str
    mask: str
    layout: str
    cp_size: int
    parts: dict
    variant: str = "plain"
    rotate: str = "auto"


DEFECTS = {
    "skipped-visit": Defect("one rank leaves its last visit out", "causal", "zigzag", 3, {"plan": skipped_visit}),
    "lse-base": Defect("backward takes a natural lse for one of base 2", "causal", "zigzag", 3, {"backend": base_2_lse}),
    "wrong-neighbour": Defect("keys come from the other neighbour", "causal", "striped", 3, {"loopback": WrongNeighbour}),
    "hop-0-keys": Defect("backward reuses k, v of hop 0", "causal", "zigzag", 3, {"backend": hop_0_keys}),
    "lost-gradient": Defect("one dk, dv message home is empty", "full", "contiguous", 3, {"loopback": LostGradient}),
    "document-leak": Defect("one row sees one key of another document", "documents", "contiguous", 3, {"plan": document_leak}),
    "mask-differs": Defect("backward with another mask than forward", "causal", "zigzag", 3,
                           {"backward_mask": Mask(causal=False)}),
    "skipped-second-visit": Defect("one rank leaves second intervals out", "first+window", "contiguous", 3,
                                   {"plan": skipped_second_visit}),
    "pair-twice": Defect("one pair lies in both intervals of its row", "first+window", "contiguous", 3, {"plan": pair_twice}),
    "hop-0-queries": Defect("backward reuses the Q side of hop 0", "causal", "zigzag", 3, {"backend": hop_0_queries}, rotate="q"),
    "lost-query-gradient": Defect("one dq message home is empty", "full", "contiguous", 3, {"loopback": LostGradient},
                                  rotate="q"),
    "sink-each-visit": Defect("a sink is counted once per visit", "causal", "zigzag", 3, {"backend": sink_each_visit}, "sinks"),
    "sinks-without-dlse": Defect("dsinks without what arrives at lse", "documents", "zigzag", 3, {"simulated": SinksWithoutDlse},
                                 "sinks"),
    "cap-without-slope": Defect("backward forgets the slope of softcap", "causal", "zigzag", 3, {"backend": cap_without_slope},
                                "softcap"),
    "rounded-hops": Defect("partial dk, dv rounded to bf16 each hop", "causal", "zigzag", 8, {"loopback": RoundedHops}),
}


def sharpest_dtype(kernel: str, device: torch.device, head_dim: int) -> str:
    """fp32, whose budgets are the tightest, where the kernel takes it; else bf16."""
    return "bf16" if dispatch.unavailable(kernel, device=device, dtype=torch.float32, head_dim=head_dim) else "fp32"


def catches(name: str, kernel: str, device: torch.device, *, dtype: str | None = None, head_dim: int = 32) -> tuple[bool, str]:
    """Is the defect seen, and by what. The same ring without it must pass, else nothing was caught (RuntimeError). dtype: None for
    the one with the tightest budgets that the kernel takes."""
    defect, dtype = DEFECTS[name], dtype or sharpest_dtype(kernel, device, head_dim)
    if name == "rounded-hops":
        return _catches_growth(kernel, device, head_dim)
    cell = Cell(kernel, dtype, defect.mask, defect.layout, defect.cp_size, 2, 48, head_dim, variant=defect.variant,
                rotate=defect.rotate)
    judge = Judge(device)
    sound = judge.judge(cell, lambda: run_ring(cell, device))
    if not sound.ok:
        raise RuntimeError(f"planted {name}: the ring fails without the defect: {sound.why()}")
    planted = judge.judge(cell, lambda: run_ring(cell, device, **defect.parts))
    if planted.failure is not None:
        raise RuntimeError(f"planted {name}: the defective ring did not finish, so nothing was judged: {planted.failure}")
    return not planted.ok, planted.why() or "every tensor within its budget"


def _catches_growth(kernel: str, device: torch.device, head_dim: int, seq_len: int = 256) -> tuple[bool, str]:
    """bf16 hops stay inside the error budgets of bf16: the rule that errors do not grow with the ring must see them."""
    defect = DEFECTS["rounded-hops"]
    problem = Problem.random(seq_len, 4, 2, head_dim, DTYPES["bf16"], device)
    truth = oracle.attention_oracle(problem.q, problem.k, problem.v, dout=problem.dout)
    backend = dispatch.select(kernel, device=device, dtype=torch.bfloat16, head_dim=head_dim)

    def errors(cp_size: int, loopback: type[Loopback]) -> dict[str, float]:
        mask = Mask(causal=True)
        layout = Layout(defect.layout, seq_len, cp_size, mask)
        ring = SimulatedRing(build_plan(mask, layout, layout), layout, layout, backend, head_dim ** -0.5, loopback=loopback)
        out, lse = ring.forward(problem.q, problem.k, problem.v)
        _, dk, dv = ring.backward(problem.dout, None, problem.q, problem.k, problem.v, out, lse)
        return {name: float((mine.double() - theirs).square().mean().sqrt())
                for name, mine, theirs in (("dk", dk, truth.dk), ("dv", dv, truth.dv))}

    one, sound, planted = errors(1, Loopback), errors(defect.cp_size, Loopback), errors(defect.cp_size, defect.parts["loopback"])
    if any(sound[name] > GROWTH_LIMIT * one[name] for name in one):
        raise RuntimeError(f"planted rounded-hops: errors grow without the defect: {sound} against {one}")
    grown = [f"rms error of {name} at W={defect.cp_size} is {planted[name] / one[name]:.2f}x that of one rank" for name in one
             if planted[name] > GROWTH_LIMIT * one[name]]
    return bool(grown), ", ".join(grown) or "no growth of the error seen"


def planted(names: Sequence[str], kernel: str, device: torch.device, *, dtype: str | None = None, head_dim: int = 32
            ) -> tuple[bool, list[dict]]:
    """Plants each defect; prints CAUGHT or MISSED. True when all are caught. dtype: as of catches()."""
    dtype, records = dtype or sharpest_dtype(kernel, device, head_dim), []
    for name in names:
        try:
            caught, evidence = catches(name, kernel, device, dtype=dtype, head_dim=head_dim)
        except RuntimeError as error:
            caught, evidence = False, str(error)
        records.append({"defect": name, "kernel": kernel, "caught": caught, "evidence": evidence})
    print(f"\nPlanted defects ({kernel}, {dtype}, loopback ring)\n")
    rows = [[r["defect"], DEFECTS[r["defect"]].text, "CAUGHT" if r["caught"] else "MISSED", r["evidence"][:70]] for r in records]
    print(grid(["defect", "what", "", "seen by"], rows), flush=True)
    return all(r["caught"] for r in records), records
