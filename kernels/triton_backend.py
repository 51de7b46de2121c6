"""The portable `triton` backend: plain `tl` kernels behind the interval contract, for any GPU that Triton supports and, for
tests, its interpreter on CPU (TRITON_INTERPRET=1 before the first import).

Shapes and semantics are those of `reference`. Not deterministic: dq with deterministic=False (fp32 atomics). Everything else
is bitwise the same from run to run.
"""
from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from . import triton_dq
from .intervals import Intervals
from .launching import launch
from .reference import check_softcap
from .triton_backward import backward_kernel, backward_launch, exponent
from .triton_forward import forward as _forward
from .triton_support import INTERPRETED, interpreter_problem, rows_last
from .triton_tiles import Tile, arch_of, tile_for
from .visits import require_rows_last, write_no_gradient
from .warming import warm

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
        write_no_gradient(dq, dk, dv, accumulate_dq, accumulate_dkv)
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
        launch(backward_kernel, grid, arguments, options)
        if separate:
            grid, arguments, options = triton_dq.dq_launch(
                dout, q, k, v, lse_log2, delta, intervals.k_lo, intervals.k_hi, dq, softmax_scale, softcap, accumulate_dq,
                _tile(q, v, "dq"))
            launch(triton_dq.dq_kernel, grid, arguments, options)


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
    """Compile every variant of a run by launching it on a few rows, on every rank before the first collective (see `warm`)."""
    warm(sys.modules[__name__], dtype, head_dim, head_dim if head_dim_v is None else head_dim_v, device, batch=batch,
         num_heads=num_heads, num_kv_heads=num_kv_heads, deterministic=deterministic, softcap=softcap)
