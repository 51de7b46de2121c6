"""Runs a test's body in N processes that form one group, on this machine, with a deadline.

The parent is not in the group: a rank that dies, hangs or raises costs one message, and no process outlives the call. Processes
take about a second to start, so give one call many cases.
"""
from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

GRACE_S = 10.0                                              # after the first failure, for the others to say what they saw


@dataclass(frozen=True)
class Outcome:
    """What became of one rank. exitcode: None when it had to be killed at the deadline, negative for a signal."""

    exitcode: int | None
    result: Any
    error: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f"exit code {self.exitcode} after {self.seconds:.1f} s: {self.error or self.stderr[-2000:]}"


def run_ranks(body: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 60.0, backend: str = "gloo",
              group_timeout_s: float = 60.0) -> list[Outcome]:
    """body(rank, world_size, *arguments) on each rank; body must be importable (a module's function), arguments picklable.

    backend "nccl" puts all ranks on one card when there are fewer cards than ranks: NCCL takes that when each rank has a host
    id of its own.
    """
    # Forks of a server that has imported torch, rather than interpreters of their own, save three seconds of a core for each rank.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "ringflash"])
    with tempfile.TemporaryDirectory(prefix="ringflash-ranks-") as folder:
        processes = [context.Process(target=_main, args=(body, rank, world_size, backend, group_timeout_s, folder, arguments),
                                     daemon=True)
                     for rank in range(world_size)]
        start = time.monotonic()
        deadline = start + timeout_s
        ended: dict[int, float] = {}
        for process in processes:
            process.start()
        try:
            while len(ended) < world_size and time.monotonic() < deadline:
                wait([p.sentinel for p in processes if p.is_alive()], timeout=min(1.0, max(0.0, deadline - time.monotonic())))
                for rank, process in enumerate(processes):
                    if rank not in ended and not process.is_alive():
                        ended[rank] = time.monotonic() - start
                        if process.exitcode:
                            deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [_outcome(Path(folder), rank, process.exitcode if rank in ended else None,
                         ended.get(rank, time.monotonic() - start))
                for rank, process in enumerate(processes)]


def check_ranks(body: Callable[..., Any], world_size: int, *arguments: Any, **options: Any) -> list[Any]:
    """run_ranks, and AssertionError with every rank's error unless all ended well; returns their results."""
    outcomes = run_ranks(body, world_size, *arguments, **options)
    assert all(outcome.exitcode == 0 for outcome in outcomes), "\n".join(f"rank {rank}: {o}" for rank, o in enumerate(outcomes))
    return [outcome.result for outcome in outcomes]


def _outcome(folder: Path, rank: int, exitcode: int | None, seconds: float) -> Outcome:
    result, error = folder / f"{rank}.result", folder / f"{rank}.error"
    return Outcome(exitcode, torch.load(result, weights_only=False) if result.exists() else None,
                   error.read_text() if error.exists() else "", (folder / f"{rank}.stderr").read_text(errors="replace"), seconds)


def _main(body: Callable[..., Any], rank: int, world_size: int, backend: str, group_timeout_s: float, folder: str,
          arguments: tuple) -> None:
    # Also what C++ writes: the watchdog's last words and NCCL's come on the file descriptor.
    descriptor = os.open(f"{folder}/{rank}.stderr", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 2)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable()                                   # a rank that dies of a signal shows where
    try:
        _join_group(rank, world_size, backend, group_timeout_s, folder)
        result = body(rank, world_size, *arguments)
        torch.save(result, f"{folder}/{rank}.result.part")
        os.replace(f"{folder}/{rank}.result.part", f"{folder}/{rank}.result")
        torch.distributed.destroy_process_group()
    except BaseException as error:  # reported to the parent; the destructors of a broken group may wait for peers
        Path(f"{folder}/{rank}.error").write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os._exit(1)


def _join_group(rank: int, world_size: int, backend: str, group_timeout_s: float, folder: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        cards = torch.cuda.device_count()
        if cards < world_size:
            os.environ.update(NCCL_HOSTID=f"ringflash-test-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(rank % cards)
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
                                         timeout=datetime.timedelta(seconds=group_timeout_s))
