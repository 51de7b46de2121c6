"""A ring of N processes on this machine, over gloo (CPU) or NCCL (also several ranks on one card), that cannot hang its parent.

The parent starts the ranks, waits with a deadline, and reads their results from files. It never joins the group itself, so a rank
that dies or hangs costs one message and a non-zero exit.
"""
from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from ringflash.ring import watchdog

STEP_TIMEOUT_S = 120.0                      # one batch of the ring: a cold compile on one rank fits in, a hang ends
GRACE_S = 5.0                               # after the first rank failed the others may still say what they saw


class RingFailure(RuntimeError):
    """The ring of processes did not finish: a rank raised, died, or the deadline passed. The message names rank and place."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """What the work of a rank gets: itself, its device (current already; the default group exists), a way to say where it is."""
    rank: int
    num_processes: int
    device: torch.device
    progress: Any

    def at(self, index: int) -> None:
        """Notes which of its items this rank works on; it stands in the message should the ring fail."""
        self.progress[self.rank] = index


@dataclasses.dataclass(frozen=True)
class _Job:
    work: Callable[..., Any]
    arguments: tuple
    num_processes: int
    device_type: str
    timeout_s: float
    folder: str

    @property
    def shares_card(self) -> bool:
        return self.device_type == "cuda" and torch.cuda.device_count() < self.num_processes


def run_ranks(work: Callable[..., Any], num_processes: int, *arguments: Any, device_type: str, timeout_s: float,
              name_of: Callable[[int], str] = lambda index: f"item {index}",
              say: Callable[[str], None] = lambda text: None) -> list:
    """work(Rank, *arguments) in every process; what each returned (saved by torch.save), by rank.

    work: a function of a module, as it is found again by name. name_of: an item's name in messages. Raises RingFailure when a
    rank fails or the ranks are not done within timeout_s; no process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="ringflash-check-") as folder:
        job = _Job(work, arguments, num_processes, device_type, timeout_s, folder)
        _supervise(job, name_of, say)
        return [torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _supervise(job: _Job, name_of: Callable[[int], str], say: Callable[[str], None]) -> None:
    context = multiprocessing.get_context("spawn")
    progress = context.Array("i", [-1] * job.num_processes, lock=False)
    ranks = [context.Process(target=_rank_main, args=(rank, job, progress), name=f"rank{rank}", daemon=True)
             for rank in range(job.num_processes)]
    deadline = time.monotonic() + job.timeout_s

    def place(rank: int) -> str:
        return name_of(progress[rank]) if progress[rank] >= 0 else "its start"

    failed = None
    try:
        for process in ranks:
            process.start()
        while pending := [p for p in ranks if p.is_alive()]:
            wait([p.sentinel for p in pending], timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            say(f"ring: item {min(progress) + 1}")
            if failed is None and any(p.exitcode for p in ranks):
                failed = _cause(job, {r: p.exitcode for r, p in enumerate(ranks) if p.exitcode})
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() >= deadline:
                break
        if failed is None and any(p.exitcode for p in ranks):
            failed = _cause(job, {r: p.exitcode for r, p in enumerate(ranks) if p.exitcode})
        if failed is not None:
            said = _last_words(job, failed, ranks[failed].exitcode)
            raise RingFailure(f"rank {failed} of {job.num_processes}, at {place(failed)}: {said}")
        if late := [r for r, p in enumerate(ranks) if p.is_alive()]:
            where = ", ".join(f"rank {r} at {place(r)}" for r in late)
            raise RingFailure(f"the ring of {job.num_processes} processes was not done after {job.timeout_s:g} s: {where}")
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _cause(job: _Job, exit_codes: dict[int, int]) -> int:
    """Of the ranks seen to have failed together, the one that the others fell over.

    Who dies without a word was killed or left; else it is who wrote its error first: the peers' errors come of the connection that
    it dropped. Aborts (of gloo or NCCL) and the watchdog follow from others.
    """
    def order(rank: int) -> tuple[int, int, int]:
        written = Path(job.folder) / f"rank{rank}.error"
        if written.exists():
            return 1, written.stat().st_mtime_ns, rank
        return (2 if exit_codes[rank] in (-signal.SIGABRT, watchdog.EXIT_CODE) else 0), 0, rank

    return min(exit_codes, key=order)


def _last_words(job: _Job, rank: int, exitcode: int) -> str:
    written = Path(job.folder) / f"rank{rank}.error"
    if written.exists():
        return written.read_text().strip()
    if exitcode == watchdog.EXIT_CODE:
        return "ended by the ring's watchdog, whose message stands above"
    return f"died with exit code {exitcode} and no message"


def _rank_main(rank: int, job: _Job, progress) -> None:
    try:
        result = _run_rank(rank, job, progress)
        torch.save(result, Path(job.folder) / f"rank{rank}.pt")
    except Exception as error:  # reported to the parent, which ends the whole ring with this one message
        (Path(job.folder) / f"rank{rank}.error").write_text(
            f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__)[-3:]))
        # At once: with peers gone, leaving through the group's destructors can wait for them.
        os._exit(1)


def _run_rank(rank: int, job: _Job, progress):
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(job.device_type)
    if job.device_type == "cuda":
        device = torch.device("cuda", 0 if job.shares_card else rank)
        torch.cuda.set_device(device)
        if job.shares_card:
            # NCCL refuses two ranks on one device unless it believes that they sit on different hosts.
            os.environ.update(NCCL_HOSTID=f"ringflash-check-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.init_process_group(
        "nccl" if job.device_type == "cuda" else "gloo", init_method=f"file://{job.folder}/store", rank=rank,
        world_size=job.num_processes, timeout=datetime.timedelta(seconds=job.timeout_s))
    watchdog.start(min(job.timeout_s, STEP_TIMEOUT_S))
    result = job.work(Rank(rank, job.num_processes, device, progress), *job.arguments)
    watchdog.stop()
    dist.destroy_process_group()
    return result
