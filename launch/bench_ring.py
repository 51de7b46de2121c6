"""A ring's computation without its network: the kernels of all visits of W ranks on one device against one call over the whole.

Both do the same floating-point operations, so the ratio is what cutting a call into W * (visits per rank) pieces and folding them
costs: the part of a ring's overhead that no faster link can hide. Kernels alone, as in bench_balance: every visit with the block and
intervals that a ring gives it, the backward with delta and fp32 gradients, no copies, no downcast, and no waiting for the host. And
at the clocks of steady work, as there: a pass of one rank is repeated until that takes as long as one rank's of the whole.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.launch.bench_balance import MOST_TIMES, PASSES, RankKernels, difference, timed
from ringflash.launch.bench_kernels import BACKWARD_FLOPS, Shape
from ringflash.ring.plan import build_plan


def _mask(shape: Shape) -> Mask:
    if shape.mask.startswith("window"):
        return Mask(causal=True, window_size=(int(shape.mask[6:]), 0))
    return Mask(causal=shape.mask == "causal")


def bench_ring(shape: Shape, device: torch.device, *, kernel: str, cp_size: int, layouts: Sequence[str], repeats: int,
               warmup: int) -> list[dict]:
    """Records as bench_kernels.bench_shape makes them: one rank first (the baseline), then a ring per layout, whose milliseconds are
    those of all ranks together."""
    tensors, mask = shape.inputs(device), _mask(shape)
    backend = dispatch.select(kernel, device=device, dtype=tensors[0].dtype, head_dim=shape.head_dim)
    plans = {"one rank": build_plan(mask, Layout("contiguous", shape.seq_len, 1, mask))}
    plans |= {f"{name} W={cp_size}": build_plan(mask, Layout(name, shape.seq_len, cp_size, mask)) for name in layouts}
    records, alive = [], []
    for name, plan in plans.items():
        record = {"candidate": name, **dataclasses.asdict(shape), "kernel": backend.name, "failure": None}
        records.append(record)
        try:
            ranks = [RankKernels(plan, rank, tensors, backend) for rank in range(plan.cp_size)]
            record["difference"] = difference(ranks_after_a_run(ranks), plan, tensors, backend)
            alive.append((record, ranks))
        except Exception as error:  # one layout that cannot run says why, and the others go on
            record["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    samples: dict[tuple[int, str], list[float]] = {}
    whole = {pass_: sum(timed(alive[0][1][0], pass_, device).values()) for pass_ in PASSES} if alive else {}
    times = {(index, pass_): _times(whole[pass_], ranks[0], pass_, device)
             for index, (_, ranks) in enumerate(alive) for pass_ in PASSES}
    for turn in range(warmup + repeats):
        for index, (_, ranks) in enumerate(alive):
            for pass_ in PASSES:
                ms = sum(sum(timed(kernels, pass_, device, times[index, pass_]).values()) for kernels in ranks)
                if turn >= warmup:
                    samples.setdefault((index, pass_), []).append(ms)
    median = {key: statistics.median(values) for key, values in samples.items()}
    for index, (record, _) in enumerate(alive):
        record["baseline"] = alive[0][0]["candidate"]
        for pass_, factor in zip(PASSES, (1.0, BACKWARD_FLOPS)):
            ms = median[index, pass_]
            record |= {f"{pass_}_ms": ms, f"{pass_}_tflops": factor * shape.flops() / ms / 1e9,
                       f"{pass_}_ratio": median[0, pass_] / ms}
    return records


def _times(whole_ms: float, kernels: RankKernels, pass_: str, device: torch.device) -> int:
    """How often a pass is repeated in a sample."""
    if device.type == "cpu":
        return 1
    return min(MOST_TIMES, max(1, round(whole_ms / sum(timed(kernels, pass_, device).values()))))


def ranks_after_a_run(ranks: Sequence[RankKernels]) -> Sequence[RankKernels]:
    """The same, with their results in place."""
    for kernels in ranks:
        for pass_ in PASSES:
            getattr(kernels, pass_)(lambda step: None)
    return ranks
