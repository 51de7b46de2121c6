"""Attention in float64, dense, from a per-pair predicate, with gradients by autograd: what everything else is judged by.

`attention_oracle` is the truth; `eager_attention` is the same in the inputs' dtype with float32 softmax and accumulation: how
well plain PyTorch does, which sets the budgets (budgets.py). Neither shares code with ringflash. Both work in chunks of query
rows, on whatever device the tensors are, and for long sequences on sampled rows.

Shapes: q, dout [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; lse, dlse [B, Hq, Sq], natural log.
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
    """out, dq [B, rows, Hq, D]; lse [B, Hq, rows]; dk, dv [B, key_rows, Hkv, D]; gradients are None where not asked for.

    A row without keys has out 0, lse -inf and dq 0. dtype: of the inputs. key_is_read: bool [key_rows], by any query at all
    (None without gradients). magnitude: name -> the size of the terms whose sum the tensor is, where they may cancel.
    through_out: name -> (largest, RMS) of what a relative error of 1 in each element of out, at random, does to it through delta.
    """

    dtype: torch.dtype
    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    key_is_read: Tensor | None
    magnitude: dict[str, float]
    through_out: dict[str, tuple[float, float]]


def attention_oracle(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None, softmax_scale: float | None = None, dout: Tensor | None = None,
    dlse: Tensor | None = None, allowed: Tensor | None = None, rows: Tensor | None = None, key_rows: Tensor | None = None,
) -> Result:
    """Everything in float64, rounded nowhere.

    Sq != Sk is bottom-right aligned. allowed: a bool [Sq, Sk] mask in place of causal, window_size and cu_seqlens. Gradients
    are computed when dout is given (dlse: what arrives at lse, optional). rows (int64, sorted): compute out, lse and dq for these
    query rows only, and then dk and dv, which need a pass over all rows, only for key_rows and only if those are given. Keys
    and queries that the mask leaves out are never touched: they may hold NaN.
    """
    mask = _mask(q, k, causal, window_size, cu_seqlens, allowed)
    return _run(q, k, v, mask, softmax_scale, dout, dlse, rows, key_rows, compute=torch.float64, rounded=None)


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1),
    cu_seqlens: Sequence[int] | Tensor | None = None, softmax_scale: float | None = None, dout: Tensor | None = None,
    dlse: Tensor | None = None, allowed: Tensor | None = None, rows: Tensor | None = None, key_rows: Tensor | None = None,
) -> Result:
    """As `attention_oracle` (same arguments), in the inputs' dtype: scores, softmax and sums in float32, but the probabilities
    (and their gradient) are rounded to the inputs' dtype, as are out, dq, dk and dv, once. lse is float32."""
    mask = _mask(q, k, causal, window_size, cu_seqlens, allowed)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    with _ieee_float32():
        return _run(q, k, v, mask, softmax_scale, dout, dlse, rows, key_rows, compute=compute, rounded=q.dtype)


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


def _run(q, k, v, mask, softmax_scale, dout, dlse, rows, key_rows, *, compute, rounded) -> Result:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    all_rows = torch.arange(q.shape[1], device=q.device)
    wanted = all_rows if rows is None else rows.to(q.device)
    run = _Pass(q, k, v, mask, scale, dout, dlse, compute, rounded)
    out, lse, dq, dk, dv, is_read = run(wanted)
    if rows is not None and dout is not None:
        _, _, _, dk, dv, is_read = run(all_rows) if key_rows is not None else (None,) * 6
    if key_rows is not None and dk is not None:
        dk, dv, is_read = dk[:, key_rows], dv[:, key_rows], is_read[key_rows]
    if rounded is not None:
        out, dq, dk, dv = (x if x is None else x.to(rounded) for x in (out, dq, dk, dv))
    magnitude, through_out = _magnitudes(q, k, out, lse, dout, dv, scale, wanted)
    return Result(q.dtype, out, lse, dq, dk, dv, is_read if dout is not None else None, magnitude, through_out)


@dataclass(frozen=True)
class _Pass:
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Callable[[Tensor], Tensor]
    scale: float
    dout: Tensor | None
    dlse: Tensor | None
    compute: torch.dtype
    rounded: torch.dtype | None

    def __call__(self, rows: Tensor) -> tuple[Tensor | None, ...]:
        """out, lse, dq of these rows; dk, dv summed over them; which keys they read."""
        B, _, Hq, D = self.q.shape
        new = dict(dtype=self.compute, device=self.q.device)
        out = torch.zeros(B, len(rows), Hq, D, **new)
        lse = torch.full((B, Hq, len(rows)), -torch.inf, **new)
        is_read = torch.zeros(self.k.shape[1], dtype=torch.bool, device=self.q.device)
        grads = None
        if self.dout is not None:
            grads = torch.zeros_like(out), torch.zeros(self.k.shape, **new), torch.zeros(self.v.shape, **new)
        per_row = max(1, B * Hq * self.k.shape[1])
        chunk = max(1, _CHUNK_ELEMENTS.get(self.q.device.type, 2**22) // per_row)
        for start in range(0, len(rows), chunk):
            self._chunk(start, rows[start : start + chunk], out, lse, is_read, grads)
        return out, lse, *(grads or (None, None, None)), is_read

    def _chunk(self, start, rows, out, lse, is_read, grads) -> None:
        allowed = self.mask(rows)
        live, keys = allowed.any(1).nonzero().flatten(), allowed.any(0).nonzero().flatten()
        if len(live) == 0:
            return
        # Only what the mask lets through takes part, so that no -inf row and no NaN of a masked row enters autograd.
        q, k, v = (x.detach()[:, index].to(self.compute).requires_grad_(grads is not None)
                   for x, index in ((self.q, rows[live]), (self.k, keys), (self.v, keys)))
        chunk_out, chunk_lse = self._attend(q, k, v, allowed[live][:, keys])
        at = start + live
        out[:, at], lse[:, :, at] = chunk_out.detach(), chunk_lse.detach()
        is_read[keys] = True
        if grads is None:
            return
        outputs, arriving = [chunk_out], [self.dout[:, rows[live]].to(self.compute)]
        if self.dlse is not None:
            outputs, arriving = [chunk_out, chunk_lse], [arriving[0], self.dlse[:, :, rows[live]].to(self.compute)]
        chunk_dq, chunk_dk, chunk_dv = torch.autograd.grad(outputs, (q, k, v), arriving)
        dq, dk, dv = grads
        dq[:, at] = chunk_dq
        dk[:, keys] += chunk_dk
        dv[:, keys] += chunk_dv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Every row of allowed has a key. Query head h = kv head * (heads per group) + g."""
        q = q.unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, k) * self.scale
        scores = scores.masked_fill(~allowed, -torch.inf)
        p = torch.softmax(scores, dim=-1)
        if self.rounded is not None:
            p = p.to(self.rounded).to(self.compute)
        out = torch.einsum("bhgqk,bkhd->bqhgd", p, v)
        return out.flatten(2, 3), torch.logsumexp(scores, dim=-1).flatten(1, 2)


def _magnitudes(q, k, out, lse, dout, dv, scale: float, rows: Tensor) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Sizes of summands, from above. lse: a score by Cauchy and Schwarz. dq, dk: score gradients p * (dp - delta) times k, q:
    with one key in a row dp = delta and the exact value is 0, but each of the two is rounded. dv: a flash backward has p as
    exp(score - lse), where the rounding of lse, eps * |lse|, is a relative error of p. Through out: delta = rowsum(dout * out) is
    taken from the out that was stored, whose roundings add up as the root of a sum of squares."""
    q_rows = q.detach()[:, rows].double()
    k_all = k.detach().double()
    sizes = {"lse": scale * _largest(q_rows.norm(dim=-1)) * _largest(k_all.norm(dim=-1))}
    through_out = {}
    if dout is not None:
        products = dout.detach()[:, rows].double() * out.double()
        terms, deviation = scale * _largest(products.abs().sum(-1)), scale * products.norm(dim=-1)
        sizes["dq"], sizes["dk"] = terms * _largest(k_all), terms * _largest(q_rows)
        through_out = {name: (_largest(deviation) * _largest(x), _rms(deviation) * _rms(x))
                       for name, x in (("dq", k_all), ("dk", q_rows))}
    if dv is not None:
        sizes["dv"] = _largest(lse) * _largest(dv)
    return sizes, through_out


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
