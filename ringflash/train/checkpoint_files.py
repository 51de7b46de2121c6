"""Checkpoints as files: their names, what makes one whole, how an unfinished or damaged one is told. Note [Checkpoints].

    <run folder>/checkpoints/step-00000300/           whole: it was renamed to this name last of all
        manifest.json                                 step, position in the data, configuration, size and digest of each other file
        .metadata, __0_0.distcp, ...                  torch.distributed.checkpoint's own
    <run folder>/checkpoints/step-00000400.part/      being written, or never finished
    <run folder>/checkpoints/step-00000200.bad/       passed over by a resume, kept for whoever wants to look

Without torch: the launcher looks here too.
"""
from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TextIO

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
FORMAT = 1
_FIELDS = {"step": int, "sample": int, "progress": dict, "data": object, "ranks": dict, "config": dict, "files": dict}
_WHOLE = re.compile(r"step-(\d{8,})")
_BLOCK = 4 * 2**20


class DamagedError(ValueError):
    """A checkpoint that cannot be used, and why."""


def step_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def part_folder(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}.part"


def whole(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint that was finished, the newest first. Their contents are not looked at."""
    if not root.is_dir():
        return []
    found = ((_WHOLE.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def candidates(path: Path) -> list[Path]:
    """The checkpoints that a path names, the newest first: one step's folder, a run folder, or its folder of checkpoints."""
    if (path / MANIFEST).exists() or _WHOLE.fullmatch(path.name):
        return [path] if path.is_dir() else []
    return [folder for root in (path / FOLDER, path) for _, folder in whole(root)]


def digest(path: Path) -> dict:
    """{"bytes", "blake2b"} of a file's content."""
    found, size = hashlib.blake2b(digest_size=16), 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found.update(block)
            size += len(block)
    return {"bytes": size, "blake2b": found.hexdigest()}


def problem_of(folder: Path, name: str, expected: dict) -> str | None:
    """What is wrong with one file of a checkpoint, or None."""
    try:
        found = digest(folder / name)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if found["bytes"] != expected["bytes"]:
        return f"{name} has {found['bytes']} bytes, {expected['bytes']} were written"
    return None if found == expected else f"{name} holds other bytes than were written"


def write_manifest(folder: Path, content: dict) -> None:
    """The marker: written under another name, flushed to the disk, renamed."""
    document = {"blake2b": _digest_of(content), "content": content}
    part = folder / f"{MANIFEST}.part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / MANIFEST)
    sync_folder(folder)


def read_manifest(folder: Path) -> dict:
    """Raises DamagedError for one that is missing, is not what was written, or is of another format."""
    try:
        document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        content, said = document["content"], document["blake2b"]
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{MANIFEST} is not what was written ({type(error).__name__})") from error
    if _digest_of(content) != said:
        raise DamagedError(f"{MANIFEST} holds other bytes than were written")
    found = content.get("format", "none") if isinstance(content, dict) else "none"
    if found != FORMAT:
        raise DamagedError(f"{MANIFEST} has format {found}, this version reads {FORMAT}")
    wrong = [name for name, kind in _FIELDS.items() if name not in content or not isinstance(content[name], kind)]
    wrong += [f"ranks.{name}" for name in ("dp", "cp", "device") if not wrong and name not in content["ranks"]]
    wrong += [name for name, file in content["files"].items() if not isinstance(file, dict) or "bytes" not in file] if not wrong else []
    if wrong:
        raise DamagedError(f"{MANIFEST} lacks {', '.join(wrong)}, or has them as something else")
    return content


def _digest_of(content: dict) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def publish(root: Path, step: int) -> None:
    """The step that makes a checkpoint exist: everything in the .part folder is on the disk before."""
    sync_folder(part_folder(root, step))
    os.rename(part_folder(root, step), step_folder(root, step))
    sync_folder(root)


def prune(root: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and damaged ones older than these."""
    found = whole(root)
    for _, folder in found[keep:]:
        remove(folder)
    oldest = min(step for step, _ in found[:keep])
    for folder in root.glob("step-*.bad"):
        if (match := _WHOLE.fullmatch(folder.stem)) and int(match[1]) < oldest:
            remove(folder)


def remove(folder: Path) -> None:
    """Renamed first: a kill in the middle never leaves half a checkpoint under a good name."""
    doomed = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def clear_leftovers(root: Path) -> list[str]:
    """Removes what a killed run left unfinished; returns the names of checkpoints that were being written."""
    for folder in root.glob("step-*.old"):
        shutil.rmtree(folder, ignore_errors=True)
    unfinished = sorted(root.glob("step-*.part"))
    for folder in unfinished:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in unfinished]


def set_aside(folder: Path) -> Path:
    """Renames a checkpoint to .bad, so that its step can be saved anew."""
    aside = folder.with_name(f"{folder.name}.bad")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(folder, aside)
    sync_folder(folder.parent)
    return aside


def open_root(root: Path, needed_bytes: int, *, must_fit: bool) -> tuple[TextIO, list[str]]:
    """Makes the folder where it is missing; (the lock, ours as long as the file is open; what the user should know).

    needed_bytes: of a checkpoint, about. Raises OSError where the folder cannot be written, another process holds the lock, or
    with must_fit the disk has no room for one.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock, known = open(root / "lock", "a", encoding="utf-8"), []
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OSError(error.errno, "another process is training in this run folder") from error
    except OSError as error:
        known.append(f"{root} has no locks ({error.strerror}): nothing keeps a second run out of it")
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        problem = f"a checkpoint takes about {needed_bytes / 2**20:,.1f} MiB, the disk has {free / 2**20:,.1f} MiB left"
        if must_fit:
            raise OSError(errno.ENOSPC, problem)
        known.append(f"{root}: {problem}: none can be saved until there is room")
    return lock, known


def sync_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
