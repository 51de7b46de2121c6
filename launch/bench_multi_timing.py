"""Times of work that several ranks share: samples taken turn by turn, queued ahead, the slowest rank counts."""
from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

CYCLES_PER_MS = 2_000_000                   # of torch.cuda._sleep; more than any clock here, so never too short a lead
MAX_LEAD_MS, LONG_MS = 400.0, 400.0


@dataclasses.dataclass(frozen=True)
class Task:
    """run(): queues one repetition on the current stream. around: entered before a sample and left after it, untimed. lead():
    queues what a GPU works at before a sample, untimed: what is compared shall begin at the same clocks, which fall within
    milliseconds of heavy work and rise again as soon."""
    run: Callable[[], None]
    around: Callable[[], contextlib.AbstractContextManager] | None = None
    lead: Callable[[], None] | None = None

    def entered(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.around is None else self.around()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: on the GPU, and of the host that queues it (which counts where the GPU waits for the host)."""
    gpu_ms: float
    host_ms: float
    samples: int = 1


def sample(task: Task, times: int, lead_ms: float, device: torch.device) -> Timing:
    """One of `times` runs that are queued behind each other. The GPU sleeps for lead_ms while the first ones are queued; where
    there is a lead, the task's own lead and one run stand before the clock starts; in the run the ranks meet. Of the slowest
    rank. On a CPU the host's clock counts, and nothing is queued."""
    if device.type != "cuda":
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            task.run()
        return _slowest([(time.perf_counter() - start) * 1e3 / times] * 2, device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    dist.barrier(device_ids=[device.index])
    if lead_ms:
        torch.cuda._sleep(int(lead_ms * CYCLES_PER_MS))
        if task.lead is not None:
            task.lead()
    start, before = time.perf_counter(), 1 if lead_ms else 0
    if lead_ms:
        task.run()
    begin.record()
    for _ in range(times):
        task.run()
    end.record()
    host_ms = (time.perf_counter() - start) * 1e3 / (times + before)
    torch.cuda.synchronize(device)
    return _slowest([begin.elapsed_time(end) / times, host_ms], device)


def _slowest(figures: list[float], device: torch.device) -> Timing:
    both = torch.tensor(figures, dtype=torch.float64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return Timing(*both.tolist())


def interleaved(tasks: Mapping, device: torch.device, *, repeats: int, at_least_ms: float, most: int = 40,
                limit_s: float = math.inf) -> dict:
    """Medians over `repeats` samples of each task, every round one sample of each, in an order drawn anew (what stands behind a
    hot or an idle card shall not always be the same). {name: Timing}. limit_s: as many rounds fewer as it takes to be done in
    about that time, but one.

    A sample has as many runs as take at_least_ms, at most `most`, and a lead that keeps the host ahead of the GPU to its end.
    Of a task that takes longer than LONG_MS one run is enough, after the one that warms up, and it needs no lead.
    Every rank must call this with the same tasks.
    """
    if device.type != "cuda":
        at_least_ms = 0.0                                                   # no measurement
    shapes, samples, round_ms = {}, {name: [] for name in tasks}, 1e-3
    for name, task in tasks.items():
        with task.entered():
            sample(task, 1, 0.0, device)                                    # compiles, allocates
            if (first := sample(task, 1, 0.0, device)).gpu_ms > LONG_MS:
                samples[name].append(first)
                continue
            first = sample(task, 2, 30.0, device)
        times = max(1, min(most, round(at_least_ms / max(first.gpu_ms, 1e-3))))
        behind_ms = (times + 2) * first.host_ms - times * first.gpu_ms      # how far the host would fall behind
        shapes[name] = times, min(MAX_LEAD_MS, 1.0 + max(3 * first.host_ms, 1.5 * behind_ms))
        round_ms += shapes[name][1] + (times + 1) * max(first.gpu_ms, first.host_ms)
    # All ranks have the same figures, so they count the same rounds.
    for turn in range(max(1, int(min(repeats, limit_s * 1e3 / round_ms)))):
        for name in random.Random(turn).sample(list(shapes), len(shapes)):
            with tasks[name].entered():
                samples[name].append(sample(tasks[name], *shapes[name], device))
    return {name: Timing(*(statistics.median(getattr(one, which) for one in found) for which in ("gpu_ms", "host_ms")),
                         samples=len(found)) for name, found in samples.items()}
