"""The `hopper` backend: Gluon kernels for compute capability 9.0 behind the interval contract (Notes [Hopper forward] and [Hopper
backward]). fp16 and bf16, head_dim 64, 128 and 256 with v's the same.

Shapes and semantics are those of `reference`. At head_dim 256 the backward is that of the `triton` backend. Bitwise the same from
run to run: out, lse, and with deterministic=True dq, dk, dv.

Operands that the copy engine cannot address (a last stride other than 1, a base or strides that are no multiples of 16 bytes,
expanded dims) are copied to contiguous ones; such an `out` is written by way of a contiguous one.
"""
from __future__ import annotations

import sys

import torch
from torch import Tensor

from .intervals import Intervals, Turn
from .reference import check_softcap
from .visits import check_forward, loadable, with_positive_scale, write_nothing_seen
from .warming import warm

name = "hopper"
HEAD_DIMS = (64, 128, 256)
BACKWARD_HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
CAPABILITY = (9, 0)  # wgmma is of this one alone: neither 8.x nor 10.x has it
OLDEST_TRITON = (3, 6)
takes_turns = True

# By device and stream (see `_counter`).
_counters: dict[tuple[int, int], Tensor] = {}


def unavailable(
    device: torch.device, dtype: torch.dtype, head_dim: int, deterministic: bool, head_dim_v: int | None = None
) -> str | None:
    """Why these kernels cannot run on this device, dtype and head dims, or None. Every case has a deterministic variant."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return f"device {device.type}{' (ROCm)' if torch.version.hip else ''}: needs an NVIDIA GPU of compute capability 9.0"
    if dtype not in DTYPES:
        return f"dtype {dtype}: supported are float16 and bfloat16"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}: supported are {', '.join(map(str, HEAD_DIMS))}"
    if head_dim_v not in (None, head_dim):
        return f"head_dim_v {head_dim_v}: supported is that of q and k, {head_dim}"
    if not torch.cuda.is_available():
        return "no GPU is available"
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        return f"needs compute capability 9.0 (H100, H200), this GPU has {'.'.join(map(str, capability))}"
    return missing_software()


def missing_software() -> str | None:
    """What the installed triton lacks for these kernels, or None."""
    try:
        import triton
    except ModuleNotFoundError:
        return "the triton package is not installed (pip install 'ringflash[triton]')"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"needs triton 3.6 or later for Gluon, this is {triton.__version__}"
    if triton.knobs.runtime.interpret:
        return "Gluon has no interpreter: unset TRITON_INTERPRET"
    try:
        from . import gluon_shim  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"the Gluon of triton {triton.__version__} lacks what these kernels use ({error})"
    return None


@torch.no_grad()
def forward(
    q: Tensor,  # IN    [B, Sq, Hq, D], any strides
    k: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    v: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    state: Tensor | None,  # INOUT [B, Sq, Hq, D] fp32, last stride 1
    lse: Tensor,  # INOUT [B, Hq, Sq] fp32, natural log, last stride 1
    out: Tensor | None,  # OUT   [B, Sq, Hq, D] input dtype, last stride 1
    first: bool,
    turn: Turn | None = None,
    spare_sms: int = 0,  # multiprocessors that the persistent grid leaves to others (at least one stays in use)
) -> None:
    """Fold one visit into (state, lse), or on the last visit into out. Rows that saw nothing give 0 and -inf.

    first: state and lse are written, never read. out given: the last visit; state is then left as it was. turn: out is given at
    every visit; a query tile goes from state to out with the last visit that any of its rows has.
    """
    check_softcap(softcap)
    check_forward(state, lse, out, first)
    if 0 in q.shape:
        return
    if 0 in k.shape or intervals.is_empty:
        write_nothing_seen(state, lse, out, first, turn)
        return
    from .hopper_forward import forward_kernel, forward_launch
    from .launching import launch

    q, softmax_scale = with_positive_scale(q, softmax_scale)
    written = None if out is None else loadable(out)
    with torch.cuda.device(q.device):
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count
        grid, arguments, options = forward_launch(
            loadable(q), loadable(k), loadable(v), intervals, _counter(q.device), state, lse, written, softmax_scale, softcap,
            first, sms - spare_sms, turn)
        launch(forward_kernel, grid, arguments, options)
    if written is not out:
        out.copy_(written)


def _counter(device: torch.device) -> Tensor:
    """What a grid draws its tiles from: int32 [1], 0, and 0 again when the grid is done.

    One per stream: kernels of one stream run one after the other, those of two may draw at the same time. A captured graph may be
    replayed on any stream, so there the counter is a new one, zeroed by the graph itself. A launch that raises has drawn nothing.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter


@torch.no_grad()
def backward(
    dout: Tensor,  # IN    [B, Sq, Hq, D], any strides
    q: Tensor,  # IN    [B, Sq, Hq, D], any strides
    k: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    v: Tensor,  # IN    [B, Sk, Hkv, D], any strides
    lse: Tensor,  # IN    [B, Hq, Sq] fp32, merged, natural log
    delta: Tensor,  # IN    [B, Hq, Sq] fp32
    intervals: Intervals,
    *,
    softmax_scale: float,
    softcap: float = 0.0,
    dq: Tensor,  # OUT / INOUT [B, Sq, Hq, D] fp32, last stride 1
    dk: Tensor,  # OUT / INOUT [B, Sk, Hkv, D] fp32, last stride 1
    dv: Tensor,  # OUT / INOUT [B, Sk, Hkv, D] fp32, last stride 1
    accumulate_dq: bool,
    accumulate_dkv: bool,
    deterministic: bool,
    spare_sms: int = 0,
) -> None:
    """This visit's share of dq, dk, dv. Not accumulating: every row is written and nothing is read. Rows whose lse is -inf give
    nothing. The kernels are those of hopper_backward.py, at head_dim 256 those of the triton backend."""
    check_softcap(softcap)
    _gradients(q.shape[-1]).backward(
        dout, q, k, v, lse, delta, intervals, softmax_scale=softmax_scale, softcap=softcap, dq=dq, dk=dk, dv=dv,
        accumulate_dq=accumulate_dq, accumulate_dkv=accumulate_dkv, deterministic=deterministic, spare_sms=spare_sms)


@torch.no_grad()
def delta(dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor:
    """rowsum(dout * out) - dlse: fp32 [B, Hq, Sq]. dout, out: [B, Sq, Hq, D], dlse [B, Hq, Sq], any strides."""
    return _gradients(out.shape[-1]).delta(dout, out, dlse)


def _gradients(head_dim: int):
    """The module whose backward and delta serve that head_dim."""
    if head_dim in BACKWARD_HEAD_DIMS:
        from . import hopper_backward as module
    else:
        from . import triton_backend as module
    return module


def warmup(
    dtype: torch.dtype, head_dim: int, device: torch.device | str, *,
    batch: int = 1, num_heads: int = 2, num_kv_heads: int = 1, deterministic: bool = False,
    head_dim_v: int | None = None, softcap: float = 0.0,
) -> None:
    """Compile every variant of a run by launching it on a few rows, on every rank before the first collective (see `warm`).

    Raises ValueError for a head_dim_v other than head_dim: these kernels take none.
    """
    if head_dim_v not in (None, head_dim):
        raise ValueError(f"head_dim_v={head_dim_v}: these kernels take only that of q and k, {head_dim}")
    warm(sys.modules[__name__], dtype, head_dim, head_dim, device, batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads,
         deterministic=deterministic, softcap=softcap)
