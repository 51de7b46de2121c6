"""Files that a command will write: whether it can is found out before its work, not after it."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PICTURES = (".png", ".pdf", ".svg")


def check_writable(option: str, path: str | Path | None, suffixes: Sequence[str] = ()) -> None:
    """ValueError naming the option and the nearest folder that exists, where `path` (None: nothing is to be written) cannot be
    written, or ends in none of `suffixes`. Leaves nothing behind, and what is there as it is."""
    if path is None:
        return
    file = Path(path)
    if suffixes and file.suffix.lower() not in suffixes:
        raise ValueError(f"{option} {path}: must end in {', '.join(suffixes)}; nearest: {path}{suffixes[0]}")
    is_there = file.exists()
    try:
        with open(file, "ab"):
            pass
    except OSError as error:
        folder = next((each for each in file.absolute().parents if each.is_dir()), Path("/"))
        raise ValueError(f"{option} {path}: must be a file that can be written ({error.strerror}); nearest folder that is there: "
                         f"{folder}") from error
    if not is_there:
        file.unlink()
