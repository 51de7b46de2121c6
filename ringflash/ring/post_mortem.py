"""What a rank that no longer moves leaves behind: the stacks of its threads, and what torch's flight recorder has of collectives.

    <folder>/stacks_rank_3.txt               why, then the Python stack of each thread
    <folder>/flight_recorder_nccl_rank_3     the newest collectives and point-to-point batches, as torch pickles them (CPU: gloo)

`python -m torch.distributed.flight_recorder.fr_trace -j FOLDER -p flight_recorder_nccl_rank_` prints the ranks' recordings side by
side. Without -j it looks for the culprit itself, and gives up on batches of sends and receives of which one rank has no end
(torch 2.11); the watchdog's report names the peer.
"""
from __future__ import annotations

import faulthandler
import os
import pickle
from pathlib import Path

import torch

_ENTRIES = 2000  # of the flight recorder, the newest
_LIMIT_S = 30.0
# Of torch 2.11 and later. The one of NCCL is missing where torch has no CUDA.
_RECORDERS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
_folder: Path | None = None
_rank = 0


def keep_in(folder: Path | None, rank: int) -> None:
    """From now on write() leaves its files in `folder` (None: it writes none), and torch's flight recorder is on, also for NCCL's
    own dump when it gives up. To be called before the first process group exists: the recorder reads the environment then. What is
    set there already, under the names of this torch or the older ones, stays."""
    global _folder, _rank
    _folder, _rank = folder, rank
    if folder is None:
        return
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), str(_ENTRIES)),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), f"{folder}/flight_recorder_nccl_rank_"),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = value


def write(reason: str) -> Path | None:
    """Writes both into the folder and returns the file of the stacks; None where there is no folder, or it takes no file.

    For a process that is about to end: should a recorder wait for ever as well, the process is ended after 30 s.
    """
    if _folder is None:
        return None
    # A timer in C, which needs no Python: a recorder that hangs may do so with the interpreter's lock.
    faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
    try:
        path = _folder / f"stacks_rank_{_rank}.txt"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"rank {_rank}, process {os.getpid()}: {reason}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        for kind, name in _RECORDERS.items():
            _record(kind, getattr(torch._C._distributed_c10d, name, None))
        return path
    except (OSError, RuntimeError):
        return None
    finally:
        faulthandler.cancel_dump_traceback_later()


def _record(kind: str, dump) -> None:
    if dump is None:
        return
    recorded = dump()
    if b"entries" in recorded and not pickle.loads(recorded)["entries"]:
        return
    (_folder / f"flight_recorder_{kind}_rank_{_rank}").write_bytes(recorded)
