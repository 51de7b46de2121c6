"""A ring's computation without its network: all visits of W ranks on one device against one kernel call over the whole sequence.

Both do the same floating-point operations, so the ratio is what cutting a call into W * (visits per rank) pieces and folding them
costs: the part of a ring's overhead that no faster link can hide.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ringflash import Mask, simulate
from ringflash.launch.bench_kernels import BACKWARD_FLOPS, Shape, interleaved


def _mask(shape: Shape) -> Mask:
    if shape.mask.startswith("window"):
        return Mask(causal=True, window_size=(int(shape.mask[6:]), 0))
    return Mask(causal=shape.mask == "causal")


class _Run:
    """Forward and backward of one cp_size, through the public op (so that copies and dtype casts of a ring are in it)."""

    def __init__(self, shape: Shape, inputs: Sequence[torch.Tensor], cp_size: int, layout: str, kernel: str):
        self.q, self.k, self.v = (x.detach().requires_grad_() for x in inputs[:3])
        self.dout = inputs[3]
        self.options = dict(cp_size=cp_size, layout=layout, kernel=kernel, mask=_mask(shape))
        self.out: torch.Tensor | None = None
        self.grads: tuple[torch.Tensor, ...] = ()

    def forward(self) -> None:
        self.out = simulate(self.q, self.k, self.v, **self.options)

    def backward(self) -> None:
        self.grads = torch.autograd.grad(self.out, (self.q, self.k, self.v), self.dout, retain_graph=True)


def bench_ring(shape: Shape, device: torch.device, *, kernel: str, cp_size: int, layouts: Sequence[str], repeats: int,
               warmup: int) -> list[dict]:
    """Records as bench_kernels.bench_shape makes them: one rank first (the baseline), then a loopback ring per layout."""
    inputs = shape.inputs(device)
    runs = {"one rank": _Run(shape, inputs, 1, layouts[0], kernel)}
    runs |= {f"{layout} W={cp_size}": _Run(shape, inputs, cp_size, layout, kernel) for layout in layouts}
    records, alive = [], []
    for name, run in runs.items():
        record = {"candidate": name, **dataclasses.asdict(shape), "kernel": kernel, "failure": None}
        records.append(record)
        try:
            run.forward()
            run.backward()
            alive.append((record, run))
        except Exception as error:  # one layout that cannot run says why, and the others go on
            record["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if not alive:
        return records
    forward = interleaved([run.forward for _, run in alive], device, repeats=repeats, warmup=warmup)
    backward = interleaved([run.backward for _, run in alive], device, repeats=repeats, warmup=warmup)
    flops, base = shape.flops(), alive[0][1]
    for (record, run), forward_ms, backward_ms in zip(alive, forward, backward):
        pairs = [(a.detach().float(), b.detach().float()) for a, b in zip((run.out, *run.grads), (base.out, *base.grads))]
        record.update(
            forward_ms=forward_ms, backward_ms=backward_ms, forward_tflops=flops / forward_ms / 1e9,
            backward_tflops=BACKWARD_FLOPS * flops / backward_ms / 1e9, forward_ratio=forward[0] / forward_ms,
            backward_ratio=backward[0] / backward_ms, baseline=alive[0][0]["candidate"],
            difference=max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return records
