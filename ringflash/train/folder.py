"""The folder of a run: made once, by one process, never shared by two runs; taken again by a run that goes on."""
from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from ringflash.train import checkpoint_files

STOPPED = "stopped.json"  # left after SIGTERM: the run was saved, and is not finished


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
        except OSError as error:
            raise OSError(f"run.root={root}: no folder can be made there ({error.strerror})") from error


def claim_run_folder(folder: str | Path, *, resume: bool = False) -> Path:
    """Creates `folder` as it was named by the user. Raises ValueError where a run has already left its results, unless with `resume`
    it is one that keeps checkpoints."""
    folder = Path(folder)
    if resume and (folder / checkpoint_files.FOLDER).is_dir():
        return folder
    for leftover in ("metrics.jsonl", ".hydra"):
        if (folder / leftover).exists():
            raise ValueError(f"run.dir={folder}: holds a run already ({leftover}); name another folder, or leave run.dir=null")
    _make(folder, f"run.dir={folder}")
    return folder


def write_description(folder: Path, texts: dict[str, str]) -> None:
    """<folder>/.hydra/{config,overrides,...}.yaml, the names Hydra itself uses, from {name: text}. A resumed run's earlier one is
    kept as .hydra-1, ..., where its configuration was another.

    For whoever holds the folder: --resume reads what stands here. A kill on the way leaves each file old or new, never none.
    """
    target = folder / ".hydra"
    if (target / "config.yaml").exists() and (target / "config.yaml").read_text() == texts["config.yaml"]:
        return
    if (target / "overrides.yaml").exists():
        number = 1
        while (folder / f".hydra-{number}").exists():
            number += 1
        part = folder / ".hydra.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(target, part)
        part.rename(folder / f".hydra-{number}")
    target.mkdir(exist_ok=True)
    # config.yaml last: it says above that all were written.
    for name in sorted(texts, key=lambda name: name == "config.yaml"):
        part = target / f"{name}.part"
        part.write_text(texts[name])
        os.replace(part, target / name)
    for path in target.iterdir():
        if path.name not in texts:
            path.unlink()


def stop_mark(folder: Path) -> tuple[int, int] | None:
    """Which stopped.json is there: every one has another mark. None without one."""
    try:
        found = (folder / STOPPED).stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _make(folder: Path, key: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{key}: the folder cannot be made ({error.strerror}: {error.filename})") from error


def read_description(path: Path, kind: type) -> list | dict:
    """What write_description wrote: a list or a dict, whichever `kind` says. ValueError for a file that is damaged."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: cannot be read; is it damaged? ({' '.join(str(error).split())})") from error
    if not isinstance(found, kind):
        raise ValueError(f"{path}: holds a {type(found).__name__} and not the {kind.__name__} that was written; is it damaged?")
    return found
