"""What a user may write in a call of ring_attention or simulate, and what each mistake is told."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringflash.layout import KINDS, Layout, check_kind
from ringflash.mask import Mask
from ringflash.ring.rotate import ROTATES
from ringflash.ring.routes import ROUTINGS

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# The scores are capped in fp32: beyond these, or between 0 and the smaller one, its exponents end.
_SOFTCAP_RANGE = (1e-30, 1e30)


def check_rotate(rotate: Any) -> None:
    """ValueError for an unknown name."""
    if rotate not in ROTATES:
        raise ValueError(f"rotate={rotate!r}: unknown; valid: {', '.join(ROTATES)}")


def check_routing(routing: Any) -> None:
    """ValueError for an unknown name."""
    if routing not in ("auto", *ROUTINGS):
        raise ValueError(f"routing={routing!r}: unknown; valid: auto, {', '.join(ROUTINGS)}")


def read_softcap(softcap: Any) -> float:
    """ValueError for what is no number; its size is for check_softcap."""
    try:
        return float(softcap)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"softcap={softcap!r}: must be a finite number >= 0, where 0.0 means none") from None


def check_softcap(softcap: float) -> None:
    """Apart from read_softcap: while a graph is traced, it may not be a number yet."""
    low, high = _SOFTCAP_RANGE
    if softcap == 0.0 or low <= softcap <= high:
        return
    nearest = "0.0" if not softcap > 0.0 else f"0.0, {low}" if softcap < low else f"{high}, 0.0"
    raise ValueError(f"softcap={softcap}: must be a finite number >= 0, where 0.0 means none, and else from {low} to {high}; "
                     f"nearest valid: {nearest}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """ValueError unless sinks is None or one number per query head of q [B, S, Hq, D]. Its values are not looked at: on a GPU
    that would be a host sync per call."""
    if sinks is None:
        return
    num_heads = q.shape[2]
    if not isinstance(sinks, Tensor):
        raise ValueError(f"sinks: must be a torch.Tensor [Hq] = [{num_heads}], or None, got {type(sinks).__name__}")
    if sinks.is_nested or sinks.layout != torch.strided:
        raise ValueError(f"sinks: must be a dense tensor, not nested or sparse ({sinks.layout})")
    if sinks.ndim != 1 or sinks.shape[0] != num_heads:
        raise ValueError(f"sinks: shape {tuple(sinks.shape)}; must be one logit per query head of q, [Hq] = ({num_heads},)")
    if sinks.dtype not in _DTYPES:
        raise ValueError(f"sinks.dtype={sinks.dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: on {sinks.device}, but q is on {q.device}; move it there")


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """NotImplementedError for a tensor with a tangent: torch drops it at a custom op without a word, and the derivative would be 0.

    In a traced call nobody can see whether there is one; there any dual level is refused (a guard of torch's own: no other graph).
    """
    if forward_ad._current_level < 0:
        return
    if torch.compiler.is_compiling() or any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("forward-mode AD (torch.func.jvp, jacfwd, forward_ad.make_dual) is not implemented for ring "
                                  "attention: it has a backward only; use torch.autograd.grad or .backward()")


def refuse_meta(q: Tensor, num_ranks: int) -> None:
    """ValueError in a ring of several ranks, where the others' data would be waited for; one rank gets shapes."""
    if num_ranks > 1 and q.device.type == "meta" and not torch.compiler.is_compiling():
        raise ValueError(f"q, k and v are on the meta device, but the group has {num_ranks} ranks: nothing can be sent from there; "
                         "for shapes alone call it without group")


def read_options(softmax_scale: Any, head_dim: int, kernel: Any, exchange: Any, deterministic: Any, return_lse: Any) -> float:
    """The scale of the scores. ValueError for options of a wrong type, which the op's schema would refuse on this rank alone."""
    for name, value, kind in (("kernel", kernel, str), ("exchange", exchange, str), ("deterministic", deterministic, bool),
                              ("return_lse", return_lse, bool)):
        if not isinstance(value, kind):
            raise ValueError(f"{name}={value!r}: must be a {kind.__name__}")
    if softmax_scale is None:
        return head_dim ** -0.5
    try:
        return float(softmax_scale)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"softmax_scale={softmax_scale!r}: must be a finite number, or None for head_dim ** -0.5") from None


def check_scale(scale: float) -> None:
    """Apart from read_options: while a graph is traced, the scale may not be a number yet."""
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale={scale}: must be a finite number, or None for head_dim ** -0.5")


def make_mask(mask: Mask | None, causal: bool | None, window_size: Any, cu_seqlens: Any) -> Mask | None:
    """The mask that the arguments name, or None when they name none. ValueError for a mask together with sugar."""
    sugar = {"causal": causal, "window_size": window_size, "cu_seqlens": cu_seqlens}
    named = [name for name, value in sugar.items() if value is not None]
    if mask is not None:
        if not isinstance(mask, Mask):
            raise ValueError(f"mask={mask!r}: must be a ringflash.Mask, or None")
        if named:
            raise ValueError(f"mask together with {', '.join(named)}: these are parts of a Mask; "
                             "give either the mask or its parts")
        return mask
    if not named:
        return None
    return Mask(causal=True if causal is None else causal, window_size=(-1, -1) if window_size is None else window_size,
                cu_seqlens=cu_seqlens)


def check_layout_argument(layout: Layout | str, key: str) -> None:
    """Type and name of a layout. `key` names the argument in errors."""
    if isinstance(layout, str):
        check_kind(layout)
    elif not isinstance(layout, Layout):
        raise ValueError(f"{key}={layout!r}: must be a ringflash.Layout or one of {', '.join(KINDS)}")


def make_layout(layout: Layout | str, seq_len: int, cp_size: int, key: str, ulysses_size: int = 1) -> Layout:
    """A layout by name for seq_len rows, or the value itself once it fits the ranks. `key` names the argument in errors."""
    check_layout_argument(layout, key)
    if isinstance(layout, str):
        if seq_len == 0:
            raise ValueError(f"{key}={layout!r}: the sequence has no rows; a layout by name needs at least 1 row on each rank")
        return Layout(layout, seq_len, cp_size, ulysses_size=ulysses_size)
    if layout.ulysses_size != ulysses_size:
        ring, ulysses = layout.cp_size, layout.ulysses_size
        how = f"make the Layout with ulysses_size={ulysses_size}"
        if ulysses > 1:
            how = (f"give group the mesh init_device_mesh(device_type, ({ring}, {ulysses}), mesh_dim_names=('ring', 'ulysses')) "
                   f"of its ranks")
        raise ValueError(f"{key}.ulysses_size={ulysses}: the group has ulysses_size={ulysses_size}; {how}")
    if layout.cp_size != cp_size:
        raise ValueError(f"{key}.cp_size={layout.cp_size}: the ring has cp_size={cp_size}; make the Layout with that")
    return layout


def make_layout_k(layout_k: Layout | str | None, layout: Layout, seq_len_k: int, by_name: bool) -> Layout:
    """The layout of k and v: None means the layout of q, by name for k's own length."""
    if layout_k is not None:
        return make_layout(layout_k, seq_len_k, layout.cp_size, "layout_k", layout.ulysses_size)
    if by_name and seq_len_k != layout.seq_len:
        return make_layout(layout.kind, seq_len_k, layout.cp_size, "layout", layout.ulysses_size)
    return layout


@dataclass(frozen=True)
class Call:
    """The tensors of one call: q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], local (ring_attention) or global
    (simulate); sinks [Hq] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None

    def choose_mask(self, given: Mask | None, layout: Layout | None) -> Mask:
        """The given mask, or else the first of the Layout value (None: a layout by name, which allows any), or else causal."""
        mask = given if given is not None else layout.masks[0] if layout is not None else Mask()
        if layout is not None and mask not in layout.masks:
            raise ValueError(f"mask={mask!r}: not among layout.masks={layout.masks!r}; "
                             "make the Layout with masks=(..., this mask)")
        if mask.cu_seqlens is not None and self.q.shape[0] != 1:
            raise ValueError(f"cu_seqlens with batch size {self.q.shape[0]}: packed documents need B == 1; "
                             "pack the batch into one row")
        return mask


def check_tensors(call: Call) -> None:
    """ValueError unless q, k, v and sinks fit each other."""
    named = {"q": call.q, "k": call.k, "v": call.v}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name}: must be a torch.Tensor [B, S, H, D], got {type(x).__name__}")
        if x.is_nested or x.layout != torch.strided:
            raise ValueError(f"{name}: must be a dense tensor, not nested or sparse ({x.layout})")
        if x.ndim != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)} has {x.ndim} dims; must be [B, S, H, D]")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name}.dtype={x.dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    for what in ("dtype", "device"):
        values = {name: getattr(x, what) for name, x in named.items()}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{name} {value}" for name, value in values.items())
            raise ValueError(f"{what}: q, k and v must share it, got {shown}")
    q, k, v = call.q, call.k, call.v
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: shape {tuple(v.shape)} differs from k's {tuple(k.shape)} before the head_dim")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: batch size {k.shape[0]}, but q has {q.shape[0]}")
    if k.shape[3] != q.shape[3] or q.shape[3] == 0:
        raise ValueError(f"k: head_dim {k.shape[3]}, but q has {q.shape[3]}; they must be equal and > 0")
    if v.shape[3] == 0:
        raise ValueError("v: head_dim 0; must be > 0 (it may differ from that of q and k)")
    num_heads, num_kv_heads = q.shape[2], k.shape[2]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        valid = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        nearest = sorted(sorted(valid, key=lambda n: abs(n - num_kv_heads))[:3])
        raise ValueError(f"k: num_kv_heads={num_kv_heads} must divide num_heads={num_heads} of q; nearest valid: {nearest}")
    check_sinks(call.sinks, q)
