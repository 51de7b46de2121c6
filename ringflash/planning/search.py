"""The best way to divide GPUs for a step, and the longest sequence that fits them. No torch."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ringflash.planning.hardware import Hardware
from ringflash.planning.job import Job
from ringflash.planning.memory import Memory, step_memory
from ringflash.planning.step_time import StepTime, host_gib, step_time

_SAME = 0.99  # of the fastest's speed
_LONGEST = 2**31 - 1  # rows that a shard can index, as a bound of the search


@dataclass(frozen=True)
class Prediction:
    """A job, what it takes and whether it fits."""

    job: Job
    hardware: Hardware
    memory: Memory
    time: StepTime
    host_gib: float  # pinned, per rank

    @property
    def fits(self) -> bool:
        return self.memory.reserved_gib <= self.hardware.memory_gib and self.host_gib <= self.hardware.host_memory_gib

    @property
    def why_not(self) -> str:
        """"" where it fits."""
        if self.memory.reserved_gib > self.hardware.memory_gib:
            return f"{self.memory.reserved_gib:.0f} GiB of {self.hardware.memory_gib:.0f} at the {self.memory.when}"
        return "" if self.fits else f"{self.host_gib:.0f} GiB of host memory per GPU of {self.hardware.host_memory_gib:.0f}"


def predict(job: Job, hardware: Hardware) -> Prediction:
    """Raises ValueError for a ring that cannot be planned."""
    memory = step_memory(job, hardware)
    saved_gb = memory.host / 1e9
    return Prediction(job, hardware, memory, step_time(job, hardware, saved_gb), host_gib(job, saved_gb))


def ranked(jobs: Iterable[Job], hardware: Hardware) -> tuple[list[Prediction], list[str]]:
    """What fits, most tokens per second and GPU first (of those within 1%, the shortest step); then what does not, least memory
    first; and why some were not planned."""
    found, refused = [], []
    for job in jobs:
        try:
            found.append(predict(job, hardware))
        except ValueError as error:
            refused.append(f"{job.name}: {error}")
    fastest = max((each.time.tokens_per_s_per_gpu for each in found if each.fits), default=0.0)

    def rank(each: Prediction) -> tuple:
        if not each.fits:
            return 2, each.memory.reserved_gib
        speed = each.time.tokens_per_s_per_gpu
        if speed < _SAME * fastest:
            return 1, -speed
        # No prediction tells these apart: the shortest step, then the least on hosts.
        return 0, each.job.dp, each.job.ulysses, each.host_gib, each.memory.reserved_gib

    found.sort(key=rank)
    return found, refused


def longest_sequence(job: Job, hardware: Hardware, step: int = 1024) -> int:
    """The longest sequence, a multiple of `step`, with which this job fits; 0 where none does. Documents are left out of it."""
    def fits(count: int) -> bool:
        longer = job.with_seq_len(count * step)
        memory = step_memory(longer, hardware)
        return (memory.reserved_gib <= hardware.memory_gib
                and host_gib(longer, memory.host / 1e9) <= hardware.host_memory_gib)

    low, high = 0, 1
    while fits(high) and high * step < _LONGEST:
        low, high = high, 2 * high
    while high - low > max(1, low // 200):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step
