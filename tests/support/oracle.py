"""Attention in float64, dense, from a per-pair predicate, with gradients by autograd: what everything else is judged by.

`attention_oracle` is the truth; `eager_attention` is the same in the inputs' dtype with float32 softmax and accumulation: how
well plain PyTorch does, which sets the budgets (budgets.py). Neither shares code with ringflash. Both work in chunks of query
rows, on whatever device the tensors are, and for long sequences on sampled rows.

Shapes: q [B, Sq, Hq, D]; k [B, Sk, Hkv, D]; v [B, Sk, Hkv, Dv]; dout [B, Sq, Hq, Dv]; lse, dlse [B, Hq, Sq], natural log; sinks
[Hq].
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .masks import allowed_pairs

# Elements of one [B, Hq, chunk, keys] tensor; autograd keeps about five.
_CHUNK_ELEMENTS = {"cuda": 2**27, "cpu": 2**22}


@dataclass(frozen=True)
class Result:
    """out [B, rows, Hq, Dv]; dq [B, rows, Hq, D]; lse [B, Hq, rows]; dk [B, key_rows, Hkv, D]; dv [B, key_rows, Hkv, Dv];
    dsinks [Hq]; gradients are None where not asked for.

    A row without keys has out 0, dq 0, and lse -inf or the sink of the head. dtype: of the inputs. row_is_empty: bool [rows].
    key_is_read: bool [key_rows], by any query at all (None without gradients). magnitude: name -> the size of the terms whose sum
    the tensor is, where they may cancel.
    through_out: name -> (largest, RMS) of what a relative error of 1 in each element of out, at random, does to it through delta.
    absolute: "out", "dv" (float32 alone) -> the largest sum of |p * v|, |p * dout|: what the roundings of a plain sum scale with.
    """

    dtype: torch.dtype
    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None
    row_is_empty: Tensor
    key_is_read: Tensor | None
    magnitude: dict[str, float]
    through_out: dict[str, tuple[float, float]]
    absolute: dict[str, float]


def attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, dout: Tensor | None = None, dlse: Tensor | None = None, allowed: Tensor | None = None,
    rows: Tensor | None = None, key_rows: Tensor | None = None,
) -> Result:
    """Everything in float64, rounded nowhere.

    softcap c > 0: scores are c * tanh(score / c). sinks: a further score per head, without a value, in any dtype. Sq != Sk is
    bottom-right aligned. allowed: a bool [Sq, Sk] mask in place of causal, window_size and cu_seqlens. Gradients are computed
    when dout is given (dlse: what arrives at lse, optional). rows (int64, sorted): compute out, lse and dq for these query rows
    only, and then dk, dv and dsinks, which need a pass over all rows, only if key_rows are given (dk and dv for those). Keys and
    queries that the mask leaves out are never touched: they may hold NaN.
    """
    mask = _mask(q, k, causal, window_size, cu_seqlens, allowed)
    return _run(q, k, v, mask, softmax_scale, softcap, sinks, dout, dlse, rows, key_rows, compute=torch.float64, rounded=None)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None, softmax_scale: float | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, dout: Tensor | None = None, dlse: Tensor | None = None, allowed: Tensor | None = None,
    rows: Tensor | None = None, key_rows: Tensor | None = None,
) -> Result:
    """As `attention_oracle` (same arguments), in the inputs' dtype: scores, softmax and sums in float32, but the probabilities
    (and their gradient) are rounded to the inputs' dtype, as are out, dq, dk and dv, once. lse is float32."""
    mask = _mask(q, k, causal, window_size, cu_seqlens, allowed)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    with _ieee_float32():
        return _run(q, k, v, mask, softmax_scale, softcap, sinks, dout, dlse, rows, key_rows, compute=compute, rounded=q.dtype)


def sample_rows(seq_len: int, count: int, seed: int = 0) -> Tensor:
    """Sorted int64 positions: the first and the last 256, and about `count` random ones between (all, when there are few)."""
    if seq_len <= count + 512:
        return torch.arange(seq_len)
    middle = torch.randint(256, seq_len - 256, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.arange(256), torch.arange(seq_len - 256, seq_len), middle]).unique()


def _mask(q, k, causal, window_size, cu_seqlens, allowed) -> Callable[[Tensor], Tensor]:
    """rows -> bool [len(rows), Sk]."""
    seq_len_q, seq_len_k = q.shape[1], k.shape[1]
    if allowed is not None:
        if allowed.shape != (seq_len_q, seq_len_k):
            raise ValueError(f"allowed {tuple(allowed.shape)}, want {(seq_len_q, seq_len_k)}")
        return lambda rows: allowed.to(q.device)[rows]
    keys = torch.arange(seq_len_k, device=q.device)
    return lambda rows: allowed_pairs(rows, keys, seq_len_q=seq_len_q, seq_len_k=seq_len_k, causal=causal,
                                      window_size=window_size, cu_seqlens=cu_seqlens)


def _run(q, k, v, mask, softmax_scale, softcap, sinks, dout, dlse, rows, key_rows, *, compute, rounded) -> Result:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    all_rows = torch.arange(q.shape[1], device=q.device)
    wanted = all_rows if rows is None else rows.to(q.device)
    run = _Pass(q, k, v, mask, scale, softcap, sinks, dout, dlse, compute, rounded)
    made = everywhere = run(wanted)
    if rows is not None and dout is not None:
        everywhere = run(all_rows) if key_rows is not None else None
    out, lse, dq = made.out, made.lse, made.dq
    dk, dv, dsinks, is_read = (getattr(everywhere, name, None) for name in ("dk", "dv", "dsinks", "is_read"))
    if key_rows is not None and dk is not None:
        dk, dv, is_read = dk[:, key_rows], dv[:, key_rows], is_read[key_rows]
    if rounded is not None:
        out, dq, dk, dv = (x if x is None else x.to(rounded) for x in (out, dq, dk, dv))
        dsinks = dsinks if dsinks is None else dsinks.to(sinks.dtype)
    magnitude, through_out = _magnitudes(q, k, sinks, made, dout, dv, scale, softcap, wanted)
    if dsinks is not None:
        magnitude["dsinks"], through_out["dsinks"] = _magnitude_dsinks(
            sinks, everywhere, dout, dlse, wanted if everywhere is made else all_rows)
    absolute = {"out": made.absolute_out} | ({} if made.absolute_dv is None else {"dv": _largest(made.absolute_dv)})
    return Result(q.dtype, out, lse, dq, dk, dv, dsinks, made.is_empty, is_read if dout is not None else None, magnitude,
                  through_out, absolute)


@dataclass
class _Made:
    """What a pass over some rows adds up; gradients are None without dout. steepest: the largest d(capped score) / d(score)."""

    out: Tensor
    lse: Tensor
    is_empty: Tensor
    is_read: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    steepest: float = 0.0
    absolute_out: float = 0.0
    absolute_dv: Tensor | None = None


@dataclass(frozen=True)
class _Pass:
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Callable[[Tensor], Tensor]
    scale: float
    softcap: float
    sinks: Tensor | None
    dout: Tensor | None
    dlse: Tensor | None
    compute: torch.dtype
    rounded: torch.dtype | None

    def __call__(self, rows: Tensor) -> _Made:
        """out, lse, dq of these rows; dk, dv, dsinks summed over them; which keys they read."""
        B, _, Hq, D = self.q.shape
        new = dict(dtype=self.compute, device=self.q.device)
        lse = torch.full((B, Hq, len(rows)), -torch.inf, **new)
        if self.sinks is not None:
            lse[:] = self.sinks.detach().to(**new)[:, None]
        made = _Made(torch.zeros(B, len(rows), Hq, self.v.shape[-1], **new), lse,
                     torch.ones(len(rows), dtype=torch.bool, device=self.q.device),
                     torch.zeros(self.k.shape[1], dtype=torch.bool, device=self.q.device))
        if self.dout is not None:
            made.dq = torch.zeros(B, len(rows), Hq, D, **new)
            made.dk, made.dv = torch.zeros(self.k.shape, **new), torch.zeros(self.v.shape, **new)
            made.dsinks = None if self.sinks is None else torch.zeros(Hq, **new)
        per_row = max(1, B * Hq * self.k.shape[1])
        chunk = max(1, _CHUNK_ELEMENTS.get(self.q.device.type, 2**22) // per_row)
        for start in range(0, len(rows), chunk):
            self._chunk(start, rows[start : start + chunk], made)
        return made

    def _chunk(self, start: int, rows: Tensor, made: _Made) -> None:
        allowed = self.mask(rows)
        live, keys = allowed.any(1).nonzero().flatten(), allowed.any(0).nonzero().flatten()
        if made.dsinks is not None and self.dlse is not None:
            # the lse of a row without keys is its sink; one of -inf is none
            arriving = self.dlse[:, :, rows[~allowed.any(1)]].to(self.compute).sum((0, 2))
            made.dsinks += arriving.masked_fill(self.sinks.detach().to(arriving.device) == -torch.inf, 0.0)
        if len(live) == 0:
            return
        # Only what the mask lets through takes part, so that no -inf row and no NaN of a masked row enters autograd.
        with_grad = self.dout is not None
        leaves = [x.detach()[:, index].to(self.compute).requires_grad_(with_grad)
                  for x, index in ((self.q, rows[live]), (self.k, keys), (self.v, keys))]
        if self.sinks is not None:
            leaves.append(self.sinks.detach().to(self.q.device, self.compute).requires_grad_(with_grad))
        chunk_out, chunk_lse, steepest, p = self._attend(*leaves, allowed=allowed[live][:, keys])
        at = start + live
        made.out[:, at], made.lse[:, :, at] = chunk_out.detach(), chunk_lse.detach()
        made.is_read[keys] = True
        made.is_empty[at] = False
        made.steepest = max(made.steepest, steepest)
        if self.rounded is None and self.q.dtype == torch.float32:
            self._absolute(p.detach(), leaves[2].detach(), rows[live], keys, made)
        if not with_grad:
            return
        outputs, arriving = [chunk_out], [self.dout[:, rows[live]].to(self.compute)]
        if self.dlse is not None:
            outputs, arriving = [chunk_out, chunk_lse], [arriving[0], self.dlse[:, :, rows[live]].to(self.compute)]
        chunk_dq, chunk_dk, chunk_dv, *chunk_dsinks = torch.autograd.grad(outputs, leaves, arriving)
        made.dq[:, at] = chunk_dq
        made.dk[:, keys] += chunk_dk
        made.dv[:, keys] += chunk_dv
        if chunk_dsinks:
            made.dsinks += chunk_dsinks[0]

    def _absolute(self, p: Tensor, v: Tensor, rows: Tensor, keys: Tensor, made: _Made) -> None:
        made.absolute_out = max(made.absolute_out, _largest(torch.einsum("bhgqk,bkhd->bqhgd", p, v.abs())))
        if self.dout is not None:
            made.absolute_dv = torch.zeros_like(made.dv) if made.absolute_dv is None else made.absolute_dv
            dout = self.dout[:, rows].to(self.compute).unflatten(2, (v.shape[2], -1))
            made.absolute_dv[:, keys] += torch.einsum("bhgqk,bqhgd->bkhd", p, dout.abs())

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, allowed: Tensor
    ) -> tuple[Tensor, Tensor, float, Tensor]:
        """out, lse, the steepest slope of the cap, p [B, Hkv, group, rows, keys]. Every row of allowed has a
        key. Query head h = kv head * (heads per group) + g."""
        q = q.unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * self.scale
        steepest = 1.0
        if self.softcap:
            scores = scores / self.softcap
            steepest = _largest(_Tanh.slope(scores.detach())[..., allowed])
            scores = self.softcap * (torch.tanh(scores) if self.rounded is not None else _Tanh.apply(scores))
        scores = scores.masked_fill(~allowed, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        p = torch.softmax(scores, dim=-1)
        if self.rounded is not None:
            p = p.to(self.rounded).to(self.compute)
        p = p[..., : k.shape[1]]
        out = torch.einsum("bhgqk,bkhd->bqhgd", p, v)
        return out.flatten(2, 3), torch.logsumexp(scores, dim=-1).flatten(1, 2), steepest, p


class _Tanh(torch.autograd.Function):
    """tanh whose derivative keeps its digits where tanh is 1 in float64."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * _Tanh.slope(*ctx.saved_tensors)

    @staticmethod
    def slope(x: Tensor) -> Tensor:
        return 1.0 / torch.cosh(x) ** 2


def _magnitudes(
    q, k, sinks, made: _Made, dout, dv, scale: float, softcap: float, rows: Tensor
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Sizes of summands, from above. lse: a score by Cauchy and Schwarz, capped, or a sink. dq, dk: score gradients
    p * (dp - delta) times k, q, times the derivative of the cap: with one key in a row dp = delta and the exact value is 0, but
    each of the two is rounded. dv: a flash backward has p as exp(score - lse), where the rounding of lse, eps * |lse|, is a
    relative error of p. Through out: delta = rowsum(dout * out) is taken from the out
    that was stored, whose roundings add up as the root of a sum of squares."""
    q_rows = q.detach()[:, rows].double()
    k_all = k.detach().double()
    sizes = {"lse": scale * _largest(q_rows.norm(dim=-1)) * _largest(k_all.norm(dim=-1))}
    if softcap:
        # Where a dot product cancels, its rounding passes through the cap by the slope there, however small the cap.
        sizes["lse"] = max(min(sizes["lse"], softcap), made.steepest * sizes["lse"])
    if sinks is not None:
        sizes["lse"] = max(sizes["lse"], _largest(sinks.detach()))
    through_out = {}
    if dout is not None:
        products = dout.detach()[:, rows].double() * made.out.double()
        terms, deviation = products.abs().sum(-1), products.norm(dim=-1)  # [B, rows, Hq]
        slope = scale * made.steepest
        sizes["dq"], sizes["dk"] = (slope * _largest(terms) * _largest(x) for x in (k_all, q_rows))
        through_out = {name: (slope * _largest(deviation) * _largest(x), slope * _rms(deviation) * _rms(x))
                       for name, x in (("dq", k_all), ("dk", q_rows))}
    if dv is not None:
        sizes["dv"] = _largest(made.lse) * _largest(dv)
    return sizes, through_out


def _magnitude_dsinks(sinks, made: _Made, dout, dlse, rows: Tensor) -> tuple[float, tuple[float, float]]:
    """The same for dsinks, the sum of -p * delta over all rows, p the probability of the sink."""
    products = dout.detach()[:, rows].double() * made.out.double()
    terms = products.abs().sum(-1)  # [B, rows, Hq]
    if dlse is not None:
        terms = terms + dlse.detach()[:, :, rows].double().abs().transpose(1, 2)
    p = torch.exp(sinks.detach().double()[:, None] - made.lse.double()).transpose(1, 2)
    # Twice: it is the exact deviation of one number per head, where those of dq and dk are bounds. (A deviation of 0.21 eps a
    # rounding against the budget's eps / 2: without it a head in 60 is over it by chance.)
    spread = 2 * (p * products.norm(dim=-1)).square().nansum((0, 1)).sqrt()
    return _largest((p * terms).nansum((0, 1))), (_largest(spread), _rms(spread))


def _largest(x: Tensor) -> float:
    """max |x| over the finite entries (NaN may lie in rows that the mask leaves out), 0 for none."""
    x = x.abs()
    x = x[x.isfinite()]
    return float(x.max()) if x.numel() else 0.0


def _rms(x: Tensor) -> float:
    """Root mean square of the finite entries, 0 for none."""
    x = x[x.isfinite()]
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


@contextmanager
def _ieee_float32() -> Iterator[None]:
    """A program under test may have allowed TF32; it would soften the budgets."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
