"""Forward of a backend in visits, judged by the fp64 oracle: the cases of triton_cases.py without their backward, and with NaN
behind the last row of every operand."""
from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ringflash.kernels.intervals import Intervals
from ringflash.kernels.intervals import turns as all_turns

from .budgets import Verdict, budgets
from .oracle import attention_oracle, eager_attention
from .triton_cases import BOUNDS, Case, seen_pairs


def poisoned_rows(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, generator: torch.Generator | None
) -> Tensor:
    """[rows, ...]: standard normal (generator None: NaN), a view of a buffer that goes on with NaN."""
    buffer = torch.full((shape[0] + 9, *shape[1:]), float("nan"), dtype=dtype, device=device)
    if generator is not None:
        buffer[: shape[0]] = torch.randn(shape, generator=generator, device=generator.device).to(device, dtype)
    return buffer[: shape[0]]


def run_forward(
    backend: ModuleType, case: Case, device: torch.device | str, seed: int = 0, turns: bool = False, **options
) -> tuple[dict[str, Tensor], dict]:
    """(out and lse after all visits, inputs of the oracle). turns: each visit is told which rows the others see. options: further
    arguments of backend.forward."""
    c, generator = case, torch.Generator(device).manual_seed(seed)
    D = c.head_dim
    q = poisoned_rows((c.num_q, c.batch, 3 if c.strided else 1, c.heads, D), c.dtype, device, generator)[:, :, -1].transpose(0, 1)
    k, v = poisoned_rows((c.num_k, c.batch, c.kv_heads, 2 * D), c.dtype, device, generator).transpose(0, 1).split(D, -1)
    lo, hi = BOUNDS[c.bounds](c.num_q, c.num_k)
    cuts = [i * c.num_k // c.visits for i in range(c.visits + 1)]
    state = poisoned_rows((c.num_q, c.batch, c.heads, D), torch.float32, device, None).transpose(0, 1)
    out = poisoned_rows((c.num_q, c.batch, c.heads, (2 if c.strided else 1) * D), c.dtype, device, None).transpose(0, 1)[..., -D:]
    lse = torch.full((c.batch, c.heads, c.num_q), float("nan"), device=device)
    sinks = torch.randn(c.heads, generator=generator, device=device) if c.sinks else None
    if c.sinks:
        state.zero_()
        lse.copy_(sinks[:, None])
    scores = dict(softmax_scale=c.scale, softcap=c.softcap)
    places = all_turns([tuple((x - a).clamp(0, b - a).to(torch.int32).cpu() for x in (lo, hi)) for a, b in zip(cuts, cuts[1:])], c.sinks)
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        intervals = Intervals.from_rows(*((x - a).clamp(0, b - a).to(torch.int32) for x in (lo, hi)), b - a, device)
        # what the next block holds is not this visit's: NaN there must not be seen
        k_rows, v_rows = (poison_after(x[:, a:b]) for x in (k, v))
        if turns:
            options["turn"] = places[i]
        backend.forward(q, k_rows, v_rows, intervals, **scores, state=None if c.visits == 1 and not c.sinks else state, lse=lse,
                        out=out if turns or i == c.visits - 1 else None, first=i == 0 and not c.sinks, **options)
    inputs = dict(q=q, k=k, v=v, allowed=seen_pairs(lo, hi, c.num_k).to(device), sinks=sinks, **scores)
    return dict(out=out, lse=lse), inputs


def poison_after(x: Tensor) -> Tensor:
    """A copy of x [B, rows, H, D] whose memory goes on with NaN after the last row."""
    copy = poisoned_rows((x.shape[1], x.shape[0], *x.shape[2:]), x.dtype, x.device, None).transpose(0, 1)
    return copy.copy_(x)


def judge(ours: dict[str, Tensor], inputs: dict) -> dict[str, Verdict]:
    inputs = dict(inputs)
    tensors = [inputs.pop(name) for name in ("q", "k", "v")]
    return {v.name: v for v in budgets(ours, attention_oracle(*tensors, **inputs), eager_attention(*tensors, **inputs))}


def check_forward(backend: ModuleType, case: Case, device: torch.device | str, seed: int = 0, **options) -> dict[str, Verdict]:
    """Run a case and assert the budgets of out and lse."""
    verdicts = judge(*run_forward(backend, case, device, seed, **options))
    assert set(verdicts) == {"out", "lse"}
    for verdict in verdicts.values():
        assert verdict.ok, f"{case}: {verdict}"
    return verdicts
