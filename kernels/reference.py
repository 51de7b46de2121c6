"""The specification of a kernel, in dense PyTorch: any floating dtype, any device, any head dim. Always deterministic.

A visit attends query rows to one block of keys and folds the result into the state (out, lse) that a row has from earlier
visits: DESIGN.md, Note [Folding]. The backward takes the merged lse, so that visits simply add up: DESIGN.md,
Note [Backward needs only the merged lse]. It makes [B, Hq, Sq, Sk] tensors: for tests, small lengths and float64. The other
backends promise the same contract.

Shapes: q [B, Sq, Hq, D]; k [B, Sk, Hkv, D]; v [B, Sk, Hkv, Dv]; out, dout [B, Sq, Hq, Dv]; any strides, any D and Dv; query head
h reads kv head h // (Hq // Hkv). acc = accumulate_dtype(q.dtype): float32, or float64 for float64. lse is the natural log. Sq = 0
and Sk = 0 are legal. softcap c > 0 bounds the scores: c * tanh(score / c), before the mask; 0.0 leaves them.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from .intervals import Intervals, Turn, accumulate_dtype

name = "reference"
takes_turns = True
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def unavailable(
    device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool, head_dim_v: int | None = None
) -> str | None:
    return None if dtype in _DTYPES else f"dtype {dtype}, takes float16, bfloat16, float32 and float64"


def warmup(*_args: object, **_kwargs: object) -> None:
    """Nothing to compile."""


@torch.no_grad()
def forward(
    q: Tensor,  # IN    [B, Sq, Hq, D]
    k: Tensor,  # IN    [B, Sk, Hkv, D]
    v: Tensor,  # IN    [B, Sk, Hkv, Dv]
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    state: Tensor | None,  # INOUT [B, Sq, Hq, Dv] acc; running output. None: first and last visit in one
    lse: Tensor,  # INOUT [B, Hq, Sq] acc
    out: Tensor | None,  # OUT   [B, Sq, Hq, Dv] q.dtype; given in the last visit, which then need not write state
    first: bool,  # state and lse are written, not read
    turn: Turn | None = None,  # out is given in every visit: the last that sees a row writes it
    spare_sms: int = 0,  # nothing here to spare: no persistent grid
) -> None:
    """Fold softmax(softmax_scale * q k^T) v over the visit's intervals into (state, lse). A row without keys adds nothing:
    in the first visit it gets output 0 and lse -inf. turn, which only backends with takes_turns are given: state and lse of rows
    that no visit saw yet hold nothing, out and lse of those that no later visit sees are complete (Note [Folding])."""
    check_shapes(q, k, v, intervals)
    check_softcap(softcap)
    acc = accumulate_dtype(q.dtype)
    with exact_matmul(q.device.type):
        scores, _, allowed = _scores(q, k, intervals, softmax_scale, softcap)
        visit_lse = _logsumexp(scores)  # [B, Hq, Sq]
        # Selection, not multiplication: in an empty row the exponent is -inf - -inf.
        p = torch.exp(scores - visit_lse[..., None]).masked_fill(~allowed, 0.0)
        # The rounding of lse is common to a row's p, and leaves with their sum.
        p = p / p.sum(-1, keepdim=True).masked_fill(visit_lse[..., None] == -torch.inf, 1.0)
        visit_out = torch.einsum("bhqk,bkhd->bqhd", p, _query_heads(v.to(acc), q.shape[2]))
    seen = intervals.k_lo < intervals.k_hi
    if turn is not None and not first:
        fresh = seen & ~turn.before.to(q.device)
        state[:, fresh], lse[:, :, fresh] = 0.0, -torch.inf
    if first:
        new_out, new_lse = visit_out, visit_lse
    else:
        new_out, new_lse = merge(state, lse, visit_out, visit_lse)
    lse.copy_(new_lse)
    if state is not None:
        state.copy_(new_out)
    if turn is not None:
        done = (seen | turn.opens) & ~turn.later.to(q.device)
        out[:, done] = new_out[:, done].to(out.dtype)
    elif out is not None:
        out.copy_(new_out)  # the one rounding to the input dtype


@torch.no_grad()
def backward(
    dout: Tensor,  # IN    [B, Sq, Hq, Dv] q.dtype
    q: Tensor,  # IN    [B, Sq, Hq, D]
    k: Tensor,  # IN    [B, Sk, Hkv, D]
    v: Tensor,  # IN    [B, Sk, Hkv, Dv]
    lse: Tensor,  # IN    [B, Hq, Sq] acc; merged over all visits. Rows with -inf contribute nothing
    delta: Tensor,  # IN    [B, Hq, Sq] acc
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    dq: Tensor,  # INOUT [B, Sq, Hq, D] acc
    dk: Tensor,  # INOUT [B, Sk, Hkv, D] acc
    dv: Tensor,  # INOUT [B, Sk, Hkv, Dv] acc
    accumulate_dq: bool,  # True: added to dq; False: every row is written
    accumulate_dkv: bool,  # the same for dk and dv
    deterministic: bool,
    spare_sms: int = 0,  # nothing here to spare: no persistent grid
) -> None:
    """The visit's part of dq, dk and dv. Bitwise the same from run to run, whatever `deterministic` says."""
    check_shapes(q, k, v, intervals)
    check_softcap(softcap)
    acc = accumulate_dtype(q.dtype)
    q_acc, k_acc, v_acc, dout_acc = q.to(acc), k.to(acc), v.to(acc), dout.to(acc)
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    with exact_matmul(q.device.type):
        scores, slope, allowed = _scores(q, k, intervals, softmax_scale, softcap)
        allowed = allowed & (lse != -torch.inf)[..., None]
        p = torch.exp(scores - lse[..., None]).masked_fill(~allowed, 0.0)
        dp = torch.einsum("bqhd,bkhd->bhqk", dout_acc, _query_heads(v_acc, num_heads))
        ds = (p * (dp - delta[..., None]) * slope).masked_fill(~allowed, 0.0) * softmax_scale
        visit_dq = torch.einsum("bhqk,bkhd->bqhd", ds, _query_heads(k_acc, num_heads))
        visit_dk = _sum_groups(torch.einsum("bhqk,bqhd->bkhd", ds, q_acc), num_kv_heads)
        visit_dv = _sum_groups(torch.einsum("bhqk,bqhd->bkhd", p, dout_acc), num_kv_heads)
    visits = (dq, visit_dq, accumulate_dq), (dk, visit_dk, accumulate_dkv), (dv, visit_dv, accumulate_dkv)
    for grad, visit, accumulate in visits:
        if accumulate:
            grad.add_(visit)
        else:
            grad.copy_(visit)


@torch.no_grad()
def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse: [B, Hq, Sq] acc, contiguous. dout, out [B, Sq, Hq, Dv], out merged over all visits; dlse
    [B, Hq, Sq] is the gradient that arrives at lse (d lse / d score = p, so it enters where delta is subtracted)."""
    acc = accumulate_dtype(dout.dtype)
    rows = (dout.to(acc) * out.to(acc)).sum(-1).transpose(1, 2)
    return rows.contiguous() if dlse is None else rows - dlse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from its results over each: out [B, S, H, Dv], lse [B, H, S], acc.

    No gap between the two overflows (both exponents are <= 0). -inf means "no key": (x, -inf) gives x bit for bit, and
    (-inf, -inf) gives (0, -inf). Differentiable, without NaN, in those cases too.
    """
    top = torch.maximum(lse_a, lse_b)
    empty = top == -torch.inf
    top = top.masked_fill(empty, 0.0).detach()  # any finite shift is right; its gradient cancels
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)  # [B, H, S], 0 where lse is -inf
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    # Divided by their own sum: exp(lse - merged lse) would carry the rounding of the merged lse, |lse| eps, into every row.
    out = _weighted(out_a, weight_a / total) + _weighted(out_b, weight_b / total)
    return out, (top + torch.log(total)).masked_fill(empty, -torch.inf)


def _weighted(out: Tensor, weight: Tensor) -> Tensor:
    return out * weight.transpose(1, 2)[..., None]


def _scores(
    q: Tensor, k: Tensor, intervals: Intervals, softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor | float, Tensor]:
    """scores [B, Hq, Sq, Sk] acc, capped, with -inf where a pair is not allowed; their derivative by the uncapped ones (the same
    shape, or 1.0); allowed [Sq, Sk] bool."""
    acc = accumulate_dtype(q.dtype)
    keys = torch.arange(k.shape[1], device=q.device)
    allowed = (keys >= intervals.k_lo[:, None]) & (keys < intervals.k_hi[:, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(acc), _query_heads(k.to(acc), q.shape[2])) * softmax_scale
    slope = 1.0
    if softcap:
        scores = scores / softcap
        slope = sech_squared(scores)
        scores = softcap * torch.tanh(scores)
    return scores.masked_fill(~allowed, -torch.inf), slope, allowed


def sech_squared(x: Tensor) -> Tensor:
    """1 - tanh(x)^2 without its cancellation where tanh is near 1 (cosh overflows to inf, which gives the 0 wanted)."""
    return torch.cosh(x).reciprocal_().square_()


def _logsumexp(scores: Tensor) -> Tensor:
    """Over the last dim; -inf for a row of -inf and for a row of no keys at all."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    return torch.logsumexp(scores, dim=-1)


def _query_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, S, Hkv, D] -> [B, S, Hq, D]: every kv head once per query head of its group."""
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)


def _sum_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, S, Hq, D] -> [B, S, Hkv, D]: the sum over the query heads of each group."""
    return x.unflatten(2, (num_kv_heads, -1)).sum(3)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, intervals: Intervals) -> None:
    """Raises ValueError when q, k, v and the intervals do not belong together."""
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: want [B, Sq, Hq, D], [B, Sk, Hkv, D] and "
                         "[B, Sk, Hkv, Dv], with Hq a multiple of Hkv")
    if (intervals.num_q, intervals.num_k) != (q.shape[1], k.shape[1]):
        raise ValueError(f"intervals of {intervals.num_q} x {intervals.num_k} rows for q of {q.shape[1]} and k of "
                         f"{k.shape[1]} rows")


def check_softcap(softcap: float) -> None:
    """Raises ValueError for what is neither 0 (no cap) nor a finite positive number."""
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap}: want a finite number >= 0 (0: none)")


@contextmanager
def exact_matmul(device_type: str) -> Iterator[None]:
    """Matrix products of float32 in IEEE float32, whatever the user allowed for the model around us.

    `torch.set_float32_matmul_precision("high")` would give TF32 (bfloat16 passes on some CPUs), and autocast, which stays
    active inside a custom op, would round the float32 operands to 16 bit.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    relaxed = [(b, b.fp32_precision) for b in backends if b.fp32_precision not in ("none", "ieee")]
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        for backend, precision in relaxed:
            backend.fp32_precision = "ieee"
            stack.callback(setattr, backend, "fp32_precision", precision)
        yield
