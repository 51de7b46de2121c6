"""One body for the triton kernels, on the interpreter and on a GPU: a case is run in visits and judged by the fp64 oracle, whose
mask here is the per-pair predicate lo[i] <= j < hi[i]."""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ringflash.kernels.intervals import Intervals

from .budgets import Verdict, budgets
from .oracle import attention_oracle, eager_attention


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
    softcap: float = 0.0
    head_dim_v: int | None = None  # None: head_dim
    sinks: bool = False  # the state starts at (0, sink)

    @property
    def dims(self) -> tuple[int, int]:
        """D, Dv."""
        return self.head_dim, self.head_dim if self.head_dim_v is None else self.head_dim_v


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


def apart(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """Documents of a block in which some have rows and no keys, others keys and no rows: what lies between two neighbours' keys, or
    queries, is seen by neither."""
    rows, keys = (0.03, 0.45, 0.0, 0.03, 0.43, 0.02, 0.0, 0.04), (0.2, 0.0, 0.3, 0.1, 0.0, 0.1, 0.25, 0.05)
    row_ends, key_ends = (torch.tensor([0.0, *part]).cumsum(0).mul(n).round().long().clamp(max=n)
                          for part, n in ((rows, num_q), (keys, num_k)))
    document = torch.searchsorted(row_ends[1:-1], torch.arange(num_q), right=True)
    return key_ends[document], key_ends[document + 1]


def nothing(num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    return torch.full((num_q,), num_k // 2), torch.full((num_q,), num_k // 2)


BOUNDS = {f.__name__: f for f in (causal, full, window, documents, gaps, apart, nothing)}


def seen_pairs(lo: Tensor, hi: Tensor, num_k: int) -> Tensor:
    """Boolean [Sq, Sk]."""
    keys = torch.arange(num_k, device=lo.device)
    return (lo[:, None] <= keys) & (keys < hi[:, None])


def _inputs(case: Case, device: torch.device, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout; as views of wider buffers when strided. k, v: always views of one [rows, B, Hkv, D + Dv]
    buffer."""
    c = case
    D, Dv = c.dims

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(device, c.dtype)

    k, v = normal(c.num_k, c.batch, c.kv_heads, D + Dv).transpose(0, 1).split((D, Dv), -1)
    if not c.strided:
        return normal(c.batch, c.num_q, c.heads, D), k, v, normal(c.batch, c.num_q, c.heads, Dv)
    q = normal(c.batch, c.num_q, 3, c.heads, D)[:, :, 1]
    dout = normal(c.batch, c.heads, Dv, c.num_q).permute(0, 3, 1, 2)  # last stride is not 1
    return q, k, v, dout


def run(backend: ModuleType, case: Case, device: torch.device, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(ours, oracle inputs): out, lse, dq, dk, dv after all visits, starting from NaN-poisoned buffers."""
    c = case
    D, Dv = c.dims
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = _inputs(c, device, generator)
    lo, hi = BOUNDS[c.bounds](c.num_q, c.num_k)
    dlse = torch.randn((c.batch, c.heads, c.num_q), generator=generator).to(device)
    dlse = torch.where((lo < hi).to(device), dlse, 0.0)
    cuts = [i * c.num_k // c.visits for i in range(c.visits + 1)]
    nan = float("nan")
    state = torch.full((c.batch, c.num_q, c.heads, Dv), nan, device=device)
    lse = torch.full((c.batch, c.heads, c.num_q), nan, device=device)
    out = torch.full((c.batch, c.num_q, c.heads, 2 * Dv), nan, device=device, dtype=c.dtype)[..., Dv:]
    sinks = torch.randn(c.heads, generator=generator).to(device) if c.sinks else None
    if c.sinks:
        state.zero_()
        lse.copy_(sinks[:, None])
    scores = dict(softmax_scale=c.scale, softcap=c.softcap)
    visits = []
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        local_lo, local_hi = ((x - a).clamp(0, b - a).to(torch.int32) for x in (lo, hi))
        visits.append((a, b, Intervals.from_rows(local_lo, local_hi, b - a, device)))
        last = i == c.visits - 1
        backend.forward(q, k[:, a:b], v[:, a:b], visits[-1][2], **scores, state=None if c.visits == 1 and not c.sinks else state,
                        lse=lse, out=out if last else None, first=i == 0 and not c.sinks)
    delta = backend.delta(dout, out, dlse)
    fill = 0.5 if c.accumulate else nan
    dq = torch.full((c.batch, c.num_q, c.heads, D), fill, device=device)
    dk, dv = torch.full((c.num_k, c.batch, c.kv_heads, D + Dv), fill, device=device).transpose(0, 1).split((D, Dv), -1)
    for i, (a, b, intervals) in enumerate(visits):
        backend.backward(dout, q, k[:, a:b], v[:, a:b], lse, delta, intervals, **scores, dq=dq, dk=dk[:, a:b],
                         dv=dv[:, a:b], accumulate_dq=c.accumulate or i > 0, accumulate_dkv=c.accumulate,
                         deterministic=c.deterministic)
    ours = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    if c.accumulate:
        ours.update({name: ours[name] - 0.5 for name in ("dq", "dk", "dv")})
    seen = seen_pairs(lo, hi, c.num_k).to(device)
    return ours, dict(q=q, k=k, v=v, dout=dout, dlse=dlse, seen=seen, sinks=sinks, **scores)


def errors(ours: dict[str, Tensor], inputs: dict) -> dict[str, Verdict]:
    """The verdict on each tensor, by name (budgets.py)."""
    tensors = [inputs[name] for name in ("q", "k", "v")]
    others = {name: inputs[name] for name in ("softmax_scale", "softcap", "sinks", "dout", "dlse")} | {"allowed": inputs["seen"]}
    verdicts = budgets(ours, attention_oracle(*tensors, **others), eager_attention(*tensors, **others))
    return {verdict.name: verdict for verdict in verdicts}


def check(backend: ModuleType, case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Verdict]:
    """Run a case and assert each tensor's budget; rows and keys without a pair must be exact (0 and -inf)."""
    verdicts = errors(*run(backend, case, torch.device(device), seed))
    assert set(verdicts) == {"out", "lse", "dq", "dk", "dv"}
    for verdict in verdicts.values():
        assert verdict.ok, f"{case}: {verdict}"
    return verdicts
