"""Inputs, masks and verdicts for tests of the ring."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .budgets import Verdict, budgets
from .oracle import attention_oracle, eager_attention

LAYOUTS = ("contiguous", "zigzag", "striped")


def masks(seq_len: int) -> dict[str, dict[str, Any]]:
    """Kinds of mask as keyword arguments; documents have empty and one-token segments, and end before the sequence does."""
    third = seq_len // 3
    ends = [0, 0, min(1, seq_len), third, third, max(third, seq_len // 2 + 1), max(third, seq_len - 2)]
    ends = sorted(min(end, seq_len) for end in ends)
    return {
        "causal": {}, "full": {"causal": False}, "window": {"window_size": (seq_len // 4, 0)},
        "two-sided window": {"causal": False, "window_size": (2, 3)}, "documents": {"cu_seqlens": ends},
        "documents + window": {"cu_seqlens": ends, "window_size": (max(1, seq_len // 5), 0)},
        "full documents": {"cu_seqlens": ends, "causal": False},
    }


@dataclass(frozen=True)
class Inputs:
    """q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv], dout [B, Sq, Hq, Dv], dlse [B, Hq, Sq], sinks [Hq] or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor | None = None

    def to(self, device: torch.device | str) -> Inputs:
        return Inputs(*(x if x is None else x.to(device) for x in dataclasses.astuple(self)))

    def fresh(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v))


def make_inputs(
    seq_len: int, *, seq_len_k: int | None = None, batch: int = 1, heads: int = 4, kv_heads: int = 2, head_dim: int = 8,
    dtype: torch.dtype = torch.float32, seed: int = 0, head_dim_v: int | None = None, sinks: torch.dtype | None = None,
) -> Inputs:
    """sinks: their dtype, None for none. The first head's is -inf, which is none in that head."""
    generator = torch.Generator().manual_seed(seed)
    keys = seq_len if seq_len_k is None else seq_len_k

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    sum_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    wide = head_dim if head_dim_v is None else head_dim_v
    made = Inputs(draw(batch, seq_len, heads, head_dim), draw(batch, keys, kv_heads, head_dim),
                  draw(batch, keys, kv_heads, wide), draw(batch, seq_len, heads, wide),
                  draw(batch, heads, seq_len, dtype=sum_dtype))
    if sinks is None:
        return made
    drawn = draw(heads, dtype=sinks) * 2
    drawn[:heads // 4] = -torch.inf
    return dataclasses.replace(made, sinks=drawn)


def run(
    attend: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, *, with_dlse: bool = True, **options: Any
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of attend(q, k, v, return_lse=True, **options), and dsinks if the inputs have sinks."""
    q, k, v = inputs.fresh()
    sinks = None
    if inputs.sinks is not None:
        options["sinks"] = sinks = inputs.sinks.detach().clone().requires_grad_()
    out, lse = attend(q, k, v, return_lse=True, **options)
    if with_dlse:
        # A row that sees nothing has lse -inf; its dlse must be ignored, so it is given all the same.
        torch.autograd.backward([out, lse], [inputs.dout, inputs.dlse])
    else:
        out.backward(inputs.dout)
    for x in (q, k, v, *(() if sinks is None else (sinks,))):
        assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
    found = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return found if sinks is None else {**found, "dsinks": sinks.grad}


def judge(ours: Mapping[str, Tensor], inputs: Inputs, *, with_dlse: bool = True, **options: Any) -> list[Verdict]:
    """Verdicts that failed (none: within budget). options: of the mask, softmax_scale, softcap."""
    arguments = dict(dout=inputs.dout, dlse=inputs.dlse if with_dlse else None, sinks=inputs.sinks, **options)
    oracle = attention_oracle(inputs.q, inputs.k, inputs.v, **arguments)
    eager = eager_attention(inputs.q, inputs.k, inputs.v, **arguments)
    return [verdict for verdict in budgets(ours, oracle, eager) if not verdict.ok]


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal (NaN equals nothing)."""
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
