"""Which kernel computes a visit. Backends are modules of one shape:

    name                                                      the name a user gives
    unavailable(device, dtype, head_dim, deterministic, head_dim_v=None)  -> why it cannot run that here, or None
    forward(q, k, v, intervals, *, softmax_scale, softcap=0.0, state, lse, out, first, spare_sms=0), and turn=None where the
        module says takes_turns = True: then a ring gives `out` at every visit, with what the other visits see (intervals.Turn)
    backward(dout, q, k, v, lse, delta, intervals, *, softmax_scale, softcap=0.0, dq, dk, dv, accumulate_dq, accumulate_dkv,
             deterministic, spare_sms=0)
    delta(dout, out, dlse=None)
    warmup(dtype, head_dim, device, ..., head_dim_v=None, softcap=0.0)     compile what a run needs, before the first collective

head_dim is that of q and k; head_dim_v, that of v and out, may differ (None: the same). softcap c > 0: scores become
c * tanh(score / c), before the mask. spare_sms: how many multiprocessors a persistent grid leaves free for communication; a
backend whose grids are not persistent has none to leave. Attention sinks are no kernel matter: the state starts at (0, sink).

`reference.py` is their specification. A kernel that was asked for by name runs or raises; nothing falls back.
"""
from __future__ import annotations

import logging
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from .intervals import Intervals, accumulate_dtype, transpose

__all__ = ["Backend", "Intervals", "KERNELS", "accumulate_dtype", "select", "transpose", "unavailable"]

_log = logging.getLogger("ringflash")
_logged: set[tuple] = set()

# Fastest first. None: known by name, module not written yet.
_MODULES: dict[str, str | None] = {"hopper": "hopper", "triton": "triton_backend", "cpu": "cpu", "reference": "reference"}
# What "auto" may choose from, per kind of device. `reference` is dense: on CPU only for what `cpu` does not take (float64).
_AUTO = {"cuda": ("hopper", "triton"), "cpu": ("cpu", "reference")}

KERNELS = ("auto", *_MODULES)


class Backend(Protocol):
    """What `select` returns: a module (shapes and semantics in reference.py)."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, *, softmax_scale: float,
        softcap: float = 0.0, state: Tensor | None, lse: Tensor, out: Tensor | None, first: bool, spare_sms: int = 0,
    ) -> None: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, intervals: Intervals, *,
        softmax_scale: float, softcap: float = 0.0, dq: Tensor, dk: Tensor, dv: Tensor, accumulate_dq: bool,
        accumulate_dkv: bool, deterministic: bool, spare_sms: int = 0,
    ) -> None: ...

    def delta(self, dout: Tensor, out: Tensor, dlse: Tensor | None = None) -> Tensor: ...


def select(
    kernel: str, *, device: torch.device | str, dtype: torch.dtype, head_dim: int, deterministic: bool = False,
    head_dim_v: int | None = None,
) -> Backend:
    """The backend called `kernel`, or for "auto" the fastest that can run here (its choice is logged once).

    Raises ValueError for an unknown name, RuntimeError for a known one that cannot run on this device, dtype or head dims.
    """
    device = torch.device(device)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    request = dict(device=device, dtype=dtype, head_dim=head_dim, deterministic=deterministic, head_dim_v=head_dim_v)
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r}: unknown; valid: {', '.join(KERNELS)}")
    if kernel != "auto":
        reason = unavailable(kernel, **request)
        if reason is not None:
            wanted = _request(device, dtype, head_dim, head_dim_v)
            raise RuntimeError(f"kernel={kernel!r} is not available for {wanted}: {reason}")
        return _load(kernel)
    reasons = []
    for name in _AUTO.get(device.type, ()):
        reason = unavailable(name, **request)
        if reason is None:
            _log_choice(name, device, dtype, head_dim, head_dim_v, reasons)
            return _load(name)
        reasons.append(f"{name}: {reason}")
    why = "; ".join(reasons) or f"no kernel is chosen by itself on {device.type} devices"
    raise RuntimeError(f"kernel='auto': none is available for {_request(device, dtype, head_dim, head_dim_v)}: {why}. "
                       "kernel='reference' takes any floating dtype on any device (dense: small lengths only)")


def unavailable(
    kernel: str, *, device: torch.device | str, dtype: torch.dtype, head_dim: int, deterministic: bool = False,
    head_dim_v: int | None = None,
) -> str | None:
    """Why the kernel of that name (not "auto") cannot run here, or None. Never raises for a known name."""
    module = _MODULES[kernel]
    if module is None:
        return "not built yet"
    try:
        backend = _load(kernel)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return "the triton package is not installed (pip install 'ringflash[triton]')"
    return backend.unavailable(torch.device(device), dtype, head_dim, deterministic, head_dim_v)


def _load(kernel: str) -> Backend:
    # Imported when chosen: triton must not be needed, nor its interpreter switch read, by who never uses it.
    return import_module(f".{_MODULES[kernel]}", __package__)


def _request(device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int) -> str:
    dims = f"head_dim {head_dim}" + (f", head_dim_v {head_dim_v}" if head_dim_v != head_dim else "")
    return f"{str(dtype).removeprefix('torch.')}, {dims}, on {device.type}"


def _log_choice(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, head_dim_v: int, reasons: list[str]) -> None:
    key = (name, device.type, dtype, head_dim, head_dim_v)
    if key not in _logged:
        _logged.add(key)
        because = f" ({'; '.join(reasons)})" if reasons else ""
        _log.info("kernel='auto' chose %r for %s%s", name, _request(device, dtype, head_dim, head_dim_v), because)
