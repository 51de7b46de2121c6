"""The portable `triton` backend: plain `tl` kernels behind the interval contract, for any GPU that Triton supports and, for
tests, its interpreter on CPU (TRITON_INTERPRET=1 before the first import).

Shapes and semantics are those of `reference`. Not deterministic: dq with deterministic=False (fp32 atomics). Everything else
is bitwise the same from run to run.
"""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import triton_dq
from .intervals import Intervals
from .reference import check_softcap
from .triton_backward import backward_kernel, backward_launch, exponent
from .triton_forward import forward as _forward
from .triton_support import INTERPRETED, interpreter_problem, require_rows_last, rows_last
from .triton_tiles import Tile, arch_of, tile_for

name = "triton"
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unavailable(
    device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool, head_dim_v: int | None = None
) -> str | None:
    """Why these kernels cannot run on this device, dtype and head dims, or None. Every case has a deterministic variant."""
    device = torch.device(device)
    if dtype not in DTYPES:
        return f"dtype {dtype}: supported are float16, bfloat16 and float32"
    for label, dim in (("head_dim", head_dim), ("head_dim_v", head_dim if head_dim_v is None else head_dim_v)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            return f"{label} {dim}: supported are 1 to {MAX_HEAD_DIM}"
    if device.type == "cpu":
        return interpreter_problem() if INTERPRETED else "needs a GPU (on CPU only its interpreter: TRITON_INTERPRET=1)"
    if device.type != "cuda":
        return f"device {device.type}: needs a CUDA or ROCm GPU"
    if not torch.cuda.is_available():
        return "no GPU is available"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or later"
    return None


def _on(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, whatever the tensors' own."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


def _tile(q: Tensor, v: Tensor, kind: str) -> Tile:
    return tile_for("interpreter" if INTERPRETED else arch_of(q.device), q.shape[-1], kind, q.dtype, v.shape[-1])


@torch.no_grad()
def forward(
    q: Tensor,  # IN    [B, Sq, Hq, D], any strides
    k: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    v: Tensor,  # IN    [B, Sk, Hkv, Dv], any strides
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    state: Tensor | None,  # INOUT [B, Sq, Hq, Dv] fp32, last stride 1
    lse: Tensor,  # INOUT [B, Hq, Sq] fp32, natural log, last stride 1
    out: Tensor | None,  # OUT   [B, Sq, Hq, Dv] input dtype, last stride 1
    first: bool,
    spare_sms: int = 0,  # nothing here to spare: no persistent grid
) -> None:
    """Fold one visit into (state, lse), or on the last visit into out. Rows that saw nothing give 0 and -inf.

    first: state and lse are written, never read. out given: the last visit; state is then left as it was.
    """
    check_softcap(softcap)
    with _on(q):
        _forward(q, k, v, intervals, softmax_scale=softmax_scale, softcap=softcap, state=state, lse=lse, out=out, first=first,
                 tile=_tile(q, v, "forward"))


@torch.no_grad()
def backward(
    dout: Tensor,  # IN    [B, Sq, Hq, Dv], any strides
    q: Tensor,  # IN    [B, Sq, Hq, D], any strides
    k: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    v: Tensor,  # IN    [B, Sk, Hkv, Dv], any strides
    lse: Tensor,  # IN    [B, Hq, Sq] fp32, merged, natural log
    delta: Tensor,  # IN    [B, Hq, Sq] fp32
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    dq: Tensor,  # OUT / INOUT [B, Sq, Hq, D] fp32, last stride 1
    dk: Tensor,  # OUT / INOUT [B, Sk, Hkv, D] fp32, last stride 1
    dv: Tensor,  # OUT / INOUT [B, Sk, Hkv, Dv] fp32, last stride 1
    accumulate_dq: bool,
    accumulate_dkv: bool,
    deterministic: bool,
    spare_sms: int = 0,  # nothing here to spare: no persistent grid
) -> None:
    """This visit's share of dq, dk, dv. Not accumulating: every row is written and nothing is read. Rows whose lse is -inf give
    nothing. deterministic: no atomics, two kernels."""
    check_softcap(softcap)
    for label, x in (("dq", dq), ("dk", dk), ("dv", dv)):
        require_rows_last(label, x)
    if 0 in q.shape or 0 in v.shape or intervals.is_empty:
        _write_zeros(dq, dk, dv, accumulate_dq, accumulate_dkv)
        return
    dout, q, k, v = (rows_last(x) for x in (dout, q, k, v))
    tile = _tile(q, v, "backward")
    separate = deterministic or tile.dq == "separate"
    if separate:
        tile = _tile(q, v, "dkv")
    elif not accumulate_dq:
        dq.zero_()  # the kernel adds
    with _on(q):
        lse_log2, delta = exponent(rows_last(lse)), delta.contiguous()
        grid, arguments, options = backward_launch(
            dout, q, k, v, lse_log2, delta, intervals.q_lo, intervals.q_hi, None if separate else dq, dk, dv, softmax_scale,
            softcap, accumulate_dkv, tile)
        backward_kernel[grid](**arguments, **options)
        if separate:
            grid, arguments, options = triton_dq.dq_launch(
                dout, q, k, v, lse_log2, delta, intervals.k_lo, intervals.k_hi, dq, softmax_scale, softcap, accumulate_dq,
                _tile(q, v, "dq"))
            triton_dq.dq_kernel[grid](**arguments, **options)


def _write_zeros(dq: Tensor, dk: Tensor, dv: Tensor, accumulate_dq: bool, accumulate_dkv: bool) -> None:
    if not accumulate_dq:
        dq.zero_()
    if not accumulate_dkv:
        dk.zero_()
        dv.zero_()


@torch.no_grad()
def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse: fp32 [B, Hq, Sq]. dout, out: [B, Sq, Hq, Dv], dlse [B, Hq, Sq], any strides."""
    with _on(out):
        return triton_dq.delta(dout, out, dlse)


def warmup(
    dtype: torch.dtype, head_dim: int, device: torch.device | str, *,
    batch: int = 1, num_heads: int = 2, num_kv_heads: int = 1, deterministic: bool = False,
    head_dim_v: int | None = None, softcap: float = 0.0,
) -> None:
    """Compile every variant of a run by launching it on a few rows: first / fold / last visits, and the backward with and without
    accumulating. Before the first collective, on every rank: a compile in mid-run looks like a hang to the peers.

    The heads and batch are the run's own: what a kernel is specialised on is whether strides are multiples of 16, which may
    differ between a rank's own keys and those that arrive packed. (With batch > 1 and heads * head_dim no multiple of 16
    the batch stride depends on the number of rows too, and a variant may be left for later; so may that of a visit of one row.)
    """
    device = torch.device(device)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    rows = 16
    q = torch.zeros((batch, rows, num_heads, head_dim), dtype=dtype, device=device)
    bounds = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), rows, dtype=torch.int32)
    intervals = Intervals.from_host(*bounds, *bounds, device)
    dq, state = (torch.zeros((batch, rows, num_heads, d), dtype=torch.float32, device=device) for d in (head_dim, head_dim_v))
    lse = torch.zeros((batch, num_heads, rows), dtype=torch.float32, device=device)
    out = torch.zeros((batch, rows, num_heads, head_dim_v), dtype=dtype, device=device)
    for dlse in (None, lse):
        row_sums = delta(out, out, dlse)

    def keys(dtype: torch.dtype, packed: bool) -> tuple[Tensor, Tensor]:
        """A rank's own k, v (or dk, dv), or views of one buffer as they arrive from another."""
        if not packed:
            return tuple(torch.zeros((batch, rows, num_kv_heads, d), dtype=dtype, device=device) for d in (head_dim, head_dim_v))
        both = torch.zeros((rows, batch, num_kv_heads, head_dim + head_dim_v), dtype=dtype, device=device)
        return tuple(x.transpose(0, 1) for x in both.split((head_dim, head_dim_v), -1))

    for packed in (False, True):
        k, v = keys(dtype, packed)
        for first in (True, False):
            for result in (None, out):
                forward(q, k, v, intervals, softmax_scale=1.0, softcap=softcap, state=state, lse=lse, out=result, first=first)
        dk, dv = keys(torch.float32, packed)
        # Own queries meet keys that arrived, or, where the Q side rotates, the other way round.
        for arrived in (False, True)[: 1 if packed else 2]:
            visit_q, visit_dout, visit_dq = _arrived_queries(q, out, lse, dq) if arrived else (q, out, dq)
            for accumulate in (False, True):
                backward(visit_dout, visit_q, k, v, lse, row_sums, intervals, softmax_scale=1.0, softcap=softcap, dq=visit_dq,
                         dk=dk, dv=dv, accumulate_dq=accumulate, accumulate_dkv=accumulate, deterministic=deterministic)


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
