"""What the ranks settle through the store before any process group exists: one configuration, one run folder, or one error.

A rank that finds its configuration or its data wrong says so here; all ranks then stop with the same message, in seconds,
instead of waiting in a collective for one that has gone.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

_NAMESPACE = "ringflash/start"
_FAREWELL_S = 10.0  # rank 0 may host the store: after a failure it stays until the others have read the verdict


class StartError(ValueError):
    """The ranks cannot start together. The same message on every rank; rank 0 has spoken it already."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """ValueError unless the variables of a launcher are all there and make sense: RANK alone is a leftover of a shell."""
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(f"RANK={environment['RANK']} is set, so this process is one rank, but {', '.join(missing)} are not: "
                         "start it under torchrun, or unset RANK for a plain start")
    numbers = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    wrong = [f"{name}={value}" for name, value in numbers.items() if not value.isdecimal()]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: must be a number; a launcher such as torchrun sets it")
    if int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        raise ValueError(f"RANK={numbers['RANK']}: must be below WORLD_SIZE={numbers['WORLD_SIZE']}")


def rendezvous(timeout_s: float) -> tuple[dist.Store, int, int]:
    """(store, rank, world_size) of the launcher's environment (torchrun's, or any that sets the same variables)."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    # torchrun starts ranks again on the store that the dead ones used, with their addresses and their last words still in it.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), rank, world_size


def agree(store: dist.Store, rank: int, world_size: int, *, error: str | None, config: dict | None,
          make_folder: Callable[[], Path], timeout_s: float, speak: Callable[[str], None]) -> Path:
    """The run folder that rank 0 made, once every rank has come with the same `config` and without an `error`.

    Every rank calls this once, unconditionally. Raises StartError with the same message on all ranks otherwise; rank 0 calls
    `speak(message)` before any rank is let go, so that a launcher that kills the rest at the first exit cannot swallow it.
    """
    store.set(f"{_NAMESPACE}/{rank}", json.dumps({"error": error, "config": config}))
    if rank == 0:
        try:
            verdict = _verdict(store, world_size, make_folder, timeout_s)
        except OSError as failure:
            verdict = {"error": f"the run folder cannot be made: {failure}"}
        if verdict.get("error"):
            speak(verdict["error"])
        store.set(f"{_NAMESPACE}/verdict", json.dumps(verdict))
    else:
        store.wait([f"{_NAMESPACE}/verdict"], timedelta(seconds=timeout_s + _FAREWELL_S))
        verdict = json.loads(store.get(f"{_NAMESPACE}/verdict"))
    if verdict.get("error"):
        _part(store, rank, verdict.get("present", world_size))
        raise StartError(verdict["error"])
    return Path(verdict["folder"])


def _verdict(store: dist.Store, world_size: int, make_folder: Callable[[], Path], timeout_s: float) -> dict:
    deadline = time.monotonic() + timeout_s
    said = []
    for rank in range(world_size):
        try:
            store.wait([f"{_NAMESPACE}/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
        except RuntimeError as failure:
            return {"error": f"rank {rank} of {world_size} did not start within {timeout_s:g} s ({type(failure).__name__})",
                    "present": rank}
        said.append(json.loads(store.get(f"{_NAMESPACE}/{rank}")))
    errors: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        if words["error"]:
            errors.setdefault(words["error"], []).append(rank)
    if errors:
        if list(errors.values()) == [list(range(world_size))]:
            return {"error": next(iter(errors))}
        return {"error": "\n".join(f"{_ranks(ranks)}: {message}" for message, ranks in errors.items())}
    for rank, words in enumerate(said):
        different = _difference(said[0]["config"], words["config"])
        if different:
            return {"error": f"rank {rank} was started with another configuration than rank 0: {'; '.join(different)}"}
    try:
        return {"folder": str(make_folder().resolve())}
    except ValueError as failure:
        return {"error": str(failure)}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _difference(first: dict, other: dict, prefix: str = "") -> list[str]:
    found = []
    for key in sorted(first.keys() | other.keys()):
        a, b = first.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _difference(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}={b} there, {a} on rank 0")
    return found


def _part(store: dist.Store, rank: int, present: int) -> None:
    store.add(f"{_NAMESPACE}/read", 1)
    deadline = time.monotonic() + _FAREWELL_S
    while rank == 0 and store.add(f"{_NAMESPACE}/read", 0) < present and time.monotonic() < deadline:
        time.sleep(0.05)
