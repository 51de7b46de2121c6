"""Times of work that several ranks share: samples taken turn by turn, queued ahead, the slowest rank counts."""
from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

LEAD_CYCLES = 4_000_000                     # about 2 ms of GPU time in which the host queues the first runs


@dataclasses.dataclass(frozen=True)
class Task:
    """run(): queues one repetition on the current stream. around: entered before a sample and left after it, untimed."""
    run: Callable[[], None]
    around: Callable[[], object] | None = None


def sample_ms(task: Task, times: int, device: torch.device) -> float:
    """Milliseconds of one of `times` runs that are queued behind each other, on this rank's stream.

    The GPU is kept busy while the first runs are queued, so the host's latency is not in it as long as it keeps ahead; one run
    stands before the clock starts, in which the ranks meet.
    """
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    dist.barrier()
    torch.cuda._sleep(LEAD_CYCLES)
    task.run()
    begin.record()
    for _ in range(times):
        task.run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / times


def interleaved_ms(tasks: Mapping[str, Task], device: torch.device, *, repeats: int, at_least_ms: float, most: int = 40
                   ) -> dict[str, float]:
    """Median over `repeats` samples of each task, every round one sample of each; a sample is the time of the slowest rank.

    A sample has as many runs as take at_least_ms, at most `most`. Every rank must call this with the same tasks.
    """
    times, samples = {}, {name: [] for name in tasks}
    for name, task in tasks.items():
        with _around(task):
            single = _slowest(sample_ms(task, 1, device), device)       # warms up, too
        times[name] = max(1, min(most, round(at_least_ms / max(single, 1e-3))))
    for _ in range(repeats):
        for name, task in tasks.items():
            with _around(task):
                samples[name].append(_slowest(sample_ms(task, times[name], device), device))
    return {name: statistics.median(found) for name, found in samples.items()}


def _around(task: Task):
    return contextlib.nullcontext() if task.around is None else task.around()


def _slowest(value: float, device: torch.device) -> float:
    slowest = torch.tensor([value], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)
