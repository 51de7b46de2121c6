"""Which files a corpus is made of: the Python standard library (the default), a file, a list, a glob or a folder."""
import glob
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Parts of a path inside the library that are no library code: tests with odd encodings, what was installed, generated data.
_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__"})
_GLOB = frozenset("*?[")


@dataclass(frozen=True)
class Source:
    """Files in a fixed order; a file is a document.

    name       for messages: what the user wrote, or "stdlib"
    files      (relative name, path) of each file, sorted by relative name
    strict     a file that is not UTF-8 raises (what a user named) or is left out (the standard library)
    """

    name: str
    files: tuple[tuple[str, Path], ...]
    strict: bool


def find_source(path: str | os.PathLike | Sequence[str | os.PathLike] | None = None, *, pattern: str = "**/*") -> Source:
    """Lists the files behind `data.path`, without reading them.

    path      None: the running Python's own library. Else a file, a glob, a folder, or a list of these; names that begin with a
              dot are left out of folders.
    pattern   which files under a folder

    Raises FileNotFoundError for what does not exist or matches nothing, ValueError where every file is empty; both name the path.
    """
    if path is None:
        return _standard_library()
    if path == "":
        raise ValueError("data.path='': names no file; null is the Python library")
    if isinstance(path, (str, os.PathLike)):
        name, files = str(path), _expand(os.fspath(path), pattern)
    else:
        if not path:
            raise ValueError("data.path=[]: names no file")
        name, files = ", ".join(str(p) for p in path), [f for p in path for f in _expand(os.fspath(p), pattern)]
    if all(file.stat().st_size == 0 for _, file in files):
        raise ValueError(f"data.path={name}: {'is empty' if len(files) == 1 else f'all {len(files)} files are empty'}")
    unique = {file.resolve(): (relative, file) for relative, file in reversed(files)}
    return Source(name, tuple(sorted(unique.values(), key=lambda item: (item[0], str(item[1])))), strict=True)


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise FileNotFoundError(f"data.path=null: the Python library {root} is no folder; name text files with data.path")
    files = [item for item in _folder(root, "**/*.py") if not _SKIPPED.intersection(item[0].split("/"))]
    if not files:
        raise FileNotFoundError(f"data.path=null: the Python library {root} holds no sources; name text files with data.path")
    return Source("stdlib", tuple(sorted(files)), strict=False)


def _expand(path: str, pattern: str) -> list[tuple[str, Path]]:
    """(relative name, file) of each file that path means."""
    found = Path(path)
    if found.is_file():
        return [(found.name, found)]
    if found.is_dir():
        files = _folder(found, pattern)
        if not files:
            raise FileNotFoundError(f"data.path={path}: the folder holds no file that matches {pattern!r}")
        return files
    if _GLOB.intersection(path):
        files = [(Path(name).as_posix(), Path(name)) for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        if not files:
            raise FileNotFoundError(f"data.path={path}: no file matches")
        return files
    raise FileNotFoundError(f"data.path={path}: no such file or folder")


def _folder(root: Path, pattern: str) -> list[tuple[str, Path]]:
    try:
        files = list(root.glob(pattern))
    except (ValueError, NotImplementedError, IndexError) as error:
        raise ValueError(f"data.pattern={pattern!r}: {error}; which files under a folder, e.g. '**/*.txt'") from error
    named = ((file.relative_to(root).as_posix(), file) for file in files)
    return [(name, file) for name, file in named if file.is_file() and not any(p.startswith(".") for p in name.split("/"))]
