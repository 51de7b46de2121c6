"""Compiling what a run needs before it needs it: every kind of visit, on a few rows, with the strides that a ring gives its tensors."""
from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Backend
from .intervals import Intervals

ROWS = 16


def warm(
    backend: Backend, dtype: torch.dtype, head_dim: int, head_dim_v: int, device: torch.device | str, *,
    batch: int, num_heads: int, num_kv_heads: int, deterministic: bool, softcap: float,
) -> None:
    """Launch every variant of a run once: first / fold / last visits, and the backward with and without accumulating. Before the
    first collective, on every rank: a compile in mid-run looks like a hang to the peers.

    The heads and batch are the run's own: what a kernel is specialised on is whether strides are multiples of 16, which may
    differ between a rank's own keys and those that arrive packed. (With batch > 1 and heads * head_dim no multiple of 16
    the batch stride depends on the number of rows too, and a variant may be left for later; so may that of a visit of one row.)
    """
    device = torch.device(device)

    def zeros(heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros((batch, ROWS, heads, dim), dtype=dtype, device=device)

    bounds = torch.zeros(ROWS, dtype=torch.int32), torch.full((ROWS,), ROWS, dtype=torch.int32)
    intervals = Intervals.from_host(*bounds, *bounds, device)
    q, out = (zeros(num_heads, d, dtype) for d in (head_dim, head_dim_v))
    dq, state = (zeros(num_heads, d, torch.float32) for d in (head_dim, head_dim_v))
    lse = torch.zeros((batch, num_heads, ROWS), device=device)
    row_sums = [backend.delta(out, out, dlse) for dlse in (None, lse)][0]

    def keys(dtype: torch.dtype, packed: bool) -> tuple[Tensor, ...]:
        """A rank's own k, v (or dk, dv), or views of one buffer as they arrive from another."""
        if not packed:
            return tuple(zeros(num_kv_heads, d, dtype) for d in (head_dim, head_dim_v))
        both = torch.zeros((ROWS, batch, num_kv_heads, head_dim + head_dim_v), dtype=dtype, device=device)
        return tuple(x.transpose(0, 1) for x in both.split((head_dim, head_dim_v), -1))

    for packed in (False, True):
        k, v = keys(dtype, packed)
        for first in (True, False):
            for result in (None, out):
                backend.forward(q, k, v, intervals, softmax_scale=1.0, softcap=softcap, state=state, lse=lse, out=result,
                                first=first)
        dk, dv = keys(torch.float32, packed)
        # Own queries meet keys that arrived, or, where the Q side rotates, the other way round.
        for arrived in (False, True)[: 1 if packed else 2]:
            visit_q, visit_dout, visit_dq = _arrived_queries(q, out, lse, dq) if arrived else (q, out, dq)
            for accumulate in (False, True):
                backend.backward(visit_dout, visit_q, k, v, lse, row_sums, intervals, softmax_scale=1.0, softcap=softcap,
                                 dq=visit_dq, dk=dk, dv=dv, accumulate_dq=accumulate, accumulate_dkv=accumulate,
                                 deterministic=deterministic)


def _arrived_queries(q: Tensor, dout: Tensor, lse: Tensor, dq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, dout, dq with the strides that they have where the Q side rotates: q and dout lie in rows of bytes with lse and delta,
    each section at a multiple of 16 bytes, a row of 64, and dq in [rows, B, Hq, D]."""
    sections = [x.numel() // q.shape[1] * x.element_size() for x in (q, dout, lse, lse)]
    starts = [sum(-(-size // 16) * 16 for size in sections[:i]) for i in range(5)]
    rows = torch.zeros((q.shape[1], -(-starts[4] // 64) * 64), dtype=torch.uint8, device=q.device)
    q_view, dout_view = (
        rows[:, start:start + size].view(x.dtype).unflatten(1, (x.shape[0], *x.shape[2:])).transpose(0, 1)
        for x, start, size in zip((q, dout), starts, sections))
    return q_view, dout_view, torch.zeros_like(dq.transpose(0, 1), memory_format=torch.contiguous_format).transpose(0, 1)
