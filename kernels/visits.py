"""What the GPU backends do with a visit before they launch anything: rules, visits in which nothing is seen, signs of the scale,
what the copy engine can address."""
from __future__ import annotations

import torch
from torch import Tensor

from .intervals import Turn

ALIGNMENT_BYTES = 16  # of a tensor map's base and strides, in the hardware


def require_rows_last(name: str, x: Tensor) -> None:
    """Raises ValueError for an output whose last stride is not 1 (it is written in place: no copy can stand in)."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name}: strides {x.stride()}, the last one must be 1")


def check_forward(state: Tensor | None, lse: Tensor, out: Tensor | None, first: bool) -> None:
    """state, out [B, Sq, Hq, Dv], lse [B, Hq, Sq]. Raises ValueError for strides that the kernels cannot write, or without a state
    that is needed."""
    require_rows_last("lse", lse)
    for name, x in (("state", state), ("out", out)):
        if x is not None:
            require_rows_last(name, x)
    if state is None and (out is None or not first):
        raise ValueError("forward: state may be None only when this visit is both the first and the last")


def write_nothing_seen(state: Tensor | None, lse: Tensor, out: Tensor | None, first: bool, turn: Turn | None = None) -> None:
    """The forward of a visit in which no row sees a key. With a turn, rows that are seen later are not read before."""
    if first:
        lse.fill_(-torch.inf)
        (state if out is None else out).zero_()
    elif turn is not None:
        if turn.opens:
            out.zero_()
    elif out is not None:
        out.copy_(state)


def write_no_gradient(dq: Tensor, dk: Tensor, dv: Tensor, accumulate_dq: bool, accumulate_dkv: bool) -> None:
    """The backward of a visit in which no row sees a key."""
    if not accumulate_dq:
        dq.zero_()
    if not accumulate_dkv:
        dk.zero_()
        dv.zero_()


def with_positive_scale(q: Tensor, softmax_scale: float) -> tuple[Tensor, float]:
    """q and a scale above 0 that give the same scores: the forward kernels scale after they have taken a maximum."""
    if softmax_scale > 0:
        return q, softmax_scale
    return (-q, -softmax_scale) if softmax_scale < 0 else (torch.zeros_like(q), 1.0)


def loadable(x: Tensor) -> Tensor:
    """x [B, S, H, D] itself where the copy engine can address it (contiguous last dim, 16-byte aligned base and strides, no
    expanded dim), else a contiguous copy."""
    return x if describable(x) else x.clone(memory_format=torch.contiguous_format)


def describable(x: Tensor) -> bool:
    """Whether a tensor map may describe x (any number of dims up to 5): contiguous last dim, base and strides in 16 bytes,
    rising addresses (an expanded dim has stride 0)."""
    shape, strides, size = x.shape, x.stride(), x.element_size()
    if 0 in shape or strides[-1] != 1 or x.data_ptr() % ALIGNMENT_BYTES:
        return False
    for n, step in zip(shape[:-1], strides):
        if n > 1 and not (0 < step * size < 1 << 40 and step * size % ALIGNMENT_BYTES == 0):
            return False
    return True
