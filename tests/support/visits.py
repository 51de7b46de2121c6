"""Runs a kernel as the ring would: several visits, packed and poisoned buffers. Knows the kernel contract, not its code."""
from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ringflash.kernels.dispatch import Intervals, accumulate_dtype

from .masks import visit_rows


def attend_in_visits(
    backend: ModuleType, q: Tensor, k: Tensor, v: Tensor, k_lo: Tensor, k_hi: Tensor, key_blocks: list[Tensor], *,
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None, dout: Tensor | None = None,
    dlse: Tensor | None = None, deterministic: bool = True,
) -> dict[str, Tensor]:
    """One visit per block of keys (sorted int64 indices; together all keys, once), folded in that order.

    q [B, Sq, Hq, D]; k [B, Sk, Hkv, D]; v [B, Sk, Hkv, Dv]; dout [B, Sq, Hq, Dv]; k_lo, k_hi CPU int32 [Sq]; sinks [Hq]: the
    state starts at (0, sink), and no visit is the first. Every other output starts as NaN, k and v come as views of one [rows, B,
    Hkv, D + Dv] buffer, dk and dv leave as such. Returns out, lse and, with dout, dq, dk, dv and dsinks (all in the dtypes of the
    inputs but lse).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    acc = accumulate_dtype(q.dtype)
    (B, Sq, Hq, D), Sk, Dv = q.shape, k.shape[1], v.shape[3]
    scores = dict(softmax_scale=scale, softcap=softcap)
    packed = torch.cat([k, v], dim=-1).transpose(0, 1)
    blocks = [_unpack(packed[keys.to(k.device)], D) for keys in key_blocks]
    visits = []
    for keys in key_blocks:
        visits.append(Intervals.from_rows(*visit_rows(k_lo, k_hi, keys), len(keys), q.device))
    state = _poisoned((B, Sq, Hq, Dv), acc, q) if len(visits) > 1 or sinks is not None else None
    lse, out = _poisoned((B, Hq, Sq), acc, q), _poisoned((B, Sq, Hq, Dv), q.dtype, q)
    if sinks is not None:
        state.zero_()
        lse.copy_(sinks[:, None])
    for index, (intervals, (k_rows, v_rows)) in enumerate(zip(visits, blocks)):
        backend.forward(q, k_rows, v_rows, intervals, **scores, state=state, lse=lse,
                        out=out if index == len(visits) - 1 else None, first=index == 0 and sinks is None)
    result = {"out": out, "lse": lse}
    if dout is None:
        return result
    delta = backend.delta(dout, out, dlse)
    dq = _poisoned((B, Sq, Hq, D), acc, q)
    dkv = _poisoned((Sk, B, k.shape[2], D + Dv), acc, q)
    for index, (intervals, keys, (k_rows, v_rows)) in enumerate(zip(visits, key_blocks, blocks)):
        visit_dkv = _poisoned((len(keys), *dkv.shape[1:]), acc, q)
        dk_rows, dv_rows = _unpack(visit_dkv, D)
        backend.backward(dout, q, k_rows, v_rows, lse, delta, intervals, **scores, dq=dq, dk=dk_rows, dv=dv_rows,
                         accumulate_dq=index > 0, accumulate_dkv=False, deterministic=deterministic)
        dkv[keys.to(q.device)] = visit_dkv
    dk, dv = _unpack(dkv, D)
    if sinks is not None:
        result["dsinks"] = -(torch.exp(sinks[:, None].to(acc) - lse) * delta).sum((0, 2)).to(sinks.dtype)
    return {**result, "dq": dq.to(q.dtype), "dk": dk.to(q.dtype), "dv": dv.to(q.dtype)}


def _unpack(packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """[rows, B, H, D + Dv] -> two views, [B, rows, H, D] and [B, rows, H, Dv]."""
    both = packed.transpose(0, 1)
    return both[..., :head_dim], both[..., head_dim:]


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=like.device)


def random_inputs(
    Sq: int, Sk: int, Hq: int, Hkv: int, D: int, dtype: torch.dtype, seed: int, B: int = 1, Dv: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout from a normal distribution, on the CPU. Dv: of v and dout, when it is not D."""
    Dv = D if Dv is None else Dv
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv), (B, Sq, Hq, Dv)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v, dout
