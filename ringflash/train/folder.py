"""The folder of a run: made once, by one process, never shared by two runs."""
from __future__ import annotations

import time
from pathlib import Path


def make_run_folder(root: str | Path, name: str, now: float | None = None) -> Path:
    """Creates and returns <root>/<name>-<YYYYmmdd-HHMMSS>, with -2, -3, ... appended when that exists already.

    Creation is the reservation: two launches in one second get two folders. OSError names run.root where it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    _make(Path(root), f"run.root={root}")
    number = 1
    while True:
        folder = Path(root) / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def claim_run_folder(folder: str | Path) -> Path:
    """Creates `folder` as it was named by the user. Raises ValueError where a run has already left its results."""
    folder = Path(folder)
    for leftover in ("metrics.jsonl", ".hydra"):
        if (folder / leftover).exists():
            raise ValueError(f"run.dir={folder}: holds a run already ({leftover}); name another folder, or leave run.dir=null")
    _make(folder, f"run.dir={folder}")
    return folder


def _make(folder: Path, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{key}: the folder cannot be made ({error.strerror}: {error.filename})") from error
