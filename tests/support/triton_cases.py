"""One body for the triton kernels, on the interpreter and on a GPU: a case is run in visits and judged against dense fp64.

The oracle here takes its mask from the per-pair predicate lo[i] <= j < hi[i] and shares no code with the kernels.
"""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ringflash.kernels.intervals import Intervals


@dataclass(frozen=True)
class Case:
    """visits: into how many blocks of keys the rows are cut. bounds: a key of BOUNDS. strided: all tensors are views."""

    num_q: int
    num_k: int
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float16
    bounds: str = "causal"
    visits: int = 1
    deterministic: bool = False
    accumulate: bool = False  # dq, dk, dv hold something already
    strided: bool = False
    scale: float = 0.25


def causal(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """Bottom-right aligned; leading rows are empty where num_q > num_k."""
    hi = (torch.arange(num_q) + 1 + num_k - num_q).clamp(0, num_k)
    return torch.zeros_like(hi), hi


def full(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_q, dtype=torch.int64), torch.full((num_q,), num_k)


def window(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """A quarter of the keys, ending at the diagonal."""
    _, hi = causal(num_q, num_k)
    return (hi - max(1, num_k // 4)).clamp(min=0), hi


def documents(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """Causal inside documents of 1, 5, 9, ... rows, a repeated end, and a dead tail (clamped to the last end)."""
    ends = [0]
    while ends[-1] < min(num_q, num_k) * 7 // 8:
        ends.append(min(ends[-1] + 4 * (len(ends) - 1) + 1, min(num_q, num_k)))
    ends.insert(2, ends[1])
    rows = torch.arange(num_q)
    cuts = torch.tensor(ends)
    document = torch.searchsorted(cuts, rows, right=True) - 1
    lo = cuts[document]
    hi = torch.where(rows < ends[-1], rows + 1, ends[-1])
    return torch.where(rows < ends[-1], lo, ends[-1]), hi


def gaps(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """Stretches of six rows over their own keys; the last row of each stretch is empty, in the middle of tiles."""
    rows = torch.arange(num_q)
    start, stop = ((rows // 6 + i) * 6 * num_k // max(1, num_q) for i in (0, 1))
    start, stop = start.clamp(max=num_k), stop.clamp(max=num_k)
    lo = torch.where(rows % 6 == 5, stop, start)
    return lo, start + (rows % 6 + 1) * (stop - start) // 6


def nothing(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    return torch.full((num_q,), num_k // 2), torch.full((num_q,), num_k // 2)


BOUNDS = {f.__name__: f for f in (causal, full, window, documents, gaps, nothing)}


def seen_pairs(lo: Tensor, hi: Tensor, num_k: int) -> Tensor:
    """Boolean [Sq, Sk]."""
    keys = torch.arange(num_k, device=lo.device)
    return (lo[:, None] <= keys) & (keys < hi[:, None])


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, seen: Tensor, scale: float, dtype: torch.dtype | None):
    """Dense out, lse, dq, dk, dv, in the precision of q. With a dtype: as an eager implementation with 16-bit operands, fp32
    softmax and fp32 accumulation would round them. [B, S, H, D]; lse, dlse [B, H, S]."""

    def round_(x: Tensor) -> Tensor:
        return x if dtype is None else x.to(dtype).to(x.dtype)

    group = q.shape[2] // k.shape[2]
    q, dout = (x.transpose(1, 2) for x in (q, dout))
    k, v = (x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -float("inf"))
    top = scores.max(-1, keepdim=True).values if seen.shape[1] else torch.full_like(q[..., :1], -float("inf"))
    top = torch.where(top == -float("inf"), 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    lse = (top + total.log())[..., 0]
    p = weights / torch.where(total == 0, 1.0, total)
    out = round_(round_(p) @ v)
    delta = (out * dout).sum(-1) - dlse
    ds = round_(p * (dout @ v.mT - delta[..., None]))
    dq = ds @ k * scale

    def over_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2).transpose(1, 2)

    dk, dv = over_group(ds.mT @ q * scale), over_group(round_(p).mT @ dout)
    return dict(out=out.transpose(1, 2), lse=lse, dq=dq.transpose(1, 2), dk=dk, dv=dv)


def _inputs(case: Case, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout; as views of wider buffers when strided. k, v: always views of one [rows, B, Hkv, 2 D] buffer."""
    c = case

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(device, c.dtype)

    kv = normal(c.num_k, c.batch, c.kv_heads, 2 * c.head_dim)
    k, v = (x.transpose(0, 1) for x in (kv[..., : c.head_dim], kv[..., c.head_dim:]))
    if not c.strided:
        return normal(c.batch, c.num_q, c.heads, c.head_dim), k, v, normal(c.batch, c.num_q, c.heads, c.head_dim)
    q = normal(c.batch, c.num_q, 3, c.heads, c.head_dim)[:, :, 1]
    dout = normal(c.batch, c.heads, c.head_dim, c.num_q).permute(0, 3, 1, 2)  # last stride is not 1
    return q, k, v, dout


def run(backend: ModuleType, case: Case, device: torch.device, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(ours, oracle inputs): out, lse, dq, dk, dv after all visits, starting from NaN-poisoned buffers."""
    c = case
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = _inputs(c, device, generator)
    lo, hi = BOUNDS[c.bounds](c.num_q, c.num_k)
    dlse = torch.randn((c.batch, c.heads, c.num_q), generator=generator).to(device)
    dlse = torch.where((lo < hi).to(device), dlse, 0.0)
    cuts = [i * c.num_k // c.visits for i in range(c.visits + 1)]
    nan = float("nan")
    state = torch.full((c.batch, c.num_q, c.heads, c.head_dim), nan, device=device)
    lse = torch.full((c.batch, c.heads, c.num_q), nan, device=device)
    out = torch.full((c.batch, c.num_q, c.heads, 2 * c.head_dim), nan, device=device, dtype=c.dtype)[..., c.head_dim:]
    visits = []
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        local_lo, local_hi = ((x - a).clamp(0, b - a).to(torch.int32) for x in (lo, hi))
        visits.append((a, b, Intervals.from_rows(local_lo, local_hi, b - a, device)))
        last = i == c.visits - 1
        backend.forward(q, k[:, a:b], v[:, a:b], visits[-1][2], softmax_scale=c.scale, state=None if c.visits == 1 else state,
                        lse=lse, out=out if last else None, first=i == 0)
    delta = backend.delta(dout, out, dlse)
    fill = 0.5 if c.accumulate else nan
    dq = torch.full((c.batch, c.num_q, c.heads, c.head_dim), fill, device=device)
    dkv = torch.full((c.num_k, c.batch, c.kv_heads, 2 * c.head_dim), fill, device=device)
    dk, dv = (x.transpose(0, 1) for x in (dkv[..., : c.head_dim], dkv[..., c.head_dim:]))
    for i, (a, b, intervals) in enumerate(visits):
        backend.backward(dout, q, k[:, a:b], v[:, a:b], lse, delta, intervals, softmax_scale=c.scale, dq=dq, dk=dk[:, a:b],
                         dv=dv[:, a:b], accumulate_dq=c.accumulate or i > 0, accumulate_dkv=c.accumulate,
                         deterministic=c.deterministic)
    ours = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    if c.accumulate:
        ours.update({name: ours[name] - 0.5 for name in ("dq", "dk", "dv")})
    return ours, dict(q=q, k=k, v=v, dout=dout, dlse=dlse, seen=seen_pairs(lo, hi, c.num_k).to(device), scale=c.scale)


def errors(ours: dict[str, Tensor], inputs: dict, dtype: torch.dtype) -> dict[str, tuple[float, float, float, float]]:
    """Per tensor: max-abs error, its budget, RMS error, its budget."""
    seen, scale = inputs["seen"], inputs["scale"]
    names = ("q", "k", "v", "dout", "dlse")
    exact = attention(*(inputs[n].double() for n in names), seen, scale, None)
    eager = attention(*(inputs[n].float() for n in names), seen, scale, dtype)
    table = {}
    for name, want in exact.items():
        eps = torch.finfo(torch.float32 if name == "lse" else dtype).eps
        dead = want == -float("inf")
        got, plain = ours[name].double(), eager[name].double()
        assert torch.equal(got == -float("inf"), dead), f"{name}: -inf in the wrong places"
        miss, allowed, size = (torch.where(dead, 0.0, x) for x in (got - want, plain - want, want))
        assert torch.isfinite(miss).all(), f"{name}: not finite"
        if miss.numel() == 0:
            continue
        slack = 2 * eps * float(size.abs().max())
        table[name] = (float(miss.abs().max()), 2 * float(allowed.abs().max()) + slack,
                       float(miss.square().mean().sqrt()), 2 * float(allowed.square().mean().sqrt()) + slack)
    return table


def check(backend: ModuleType, case: Case, device: torch.device | str, seed: int = 0) -> dict:
    """Run a case and assert each tensor's budget, that rows without a pair are exactly 0, and that lse is -inf there."""
    ours, inputs = run(backend, case, torch.device(device), seed)
    table = errors(ours, inputs, case.dtype)
    for name, (worst, budget, rms, rms_budget) in table.items():
        assert worst <= budget, f"{case}: {name} max error {worst:.3e} > {budget:.3e}"
        assert rms <= rms_budget, f"{case}: {name} RMS error {rms:.3e} > {rms_budget:.3e}"
    seen = inputs["seen"]
    empty_q, empty_k = ~seen.any(1), ~seen.any(0)
    for name, rows in (("out", empty_q), ("dq", empty_q), ("dk", empty_k), ("dv", empty_k)):
        assert not ours[name][:, rows].any(), f"{case}: {name} of rows without a pair is not 0"
    return table
