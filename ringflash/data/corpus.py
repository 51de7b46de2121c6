"""A text source as one memory-mapped file of tokens, built once, split into training and held-out documents.

Cache: `<cache_dir>/<digest>.bin` (uint16 tokens, training documents first) and `<digest>.npy` (one row per document). Both are
written under another name and renamed, the .bin last: processes may race, and each of them ends with the same bytes.
"""
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .sources import Source
from .tokens import TOKEN_DTYPE, encode

HELDOUT_FRACTION = 0.05
# With fewer documents the held-out text is the end of each, since whole ones would make too rough a share.
MIN_DOCUMENTS_TO_SPLIT = 20
_FORMAT = "1"
_INDEX = np.dtype([("start", "<i8"), ("key", "<u8"), ("heldout", "?")])


@dataclass(frozen=True)
class Split:
    """Some documents of a corpus.

    tokens      uint16 (or uint32, where a vocabulary needs it) [T], memory-mapped
    doc_starts  int64 [N + 1]; document i is tokens[doc_starts[i]:doc_starts[i + 1]]
    content     digest of what the documents hold: equal on two machines exactly if their texts are
    """

    tokens: np.ndarray
    doc_starts: np.ndarray
    content: str

    @property
    def num_documents(self) -> int:
        return len(self.doc_starts) - 1


@dataclass(frozen=True)
class Corpus:
    name: str
    train: Split
    heldout: Split


@dataclass(frozen=True)
class _Piece:
    """Bytes start..stop of a file, one document."""

    path: Path
    start: int
    stop: int
    key: int
    heldout: bool


def load_corpus(source: Source, cache_dir: str | os.PathLike, *, heldout_fraction: float = HELDOUT_FRACTION,
                max_bytes: int | None = None) -> Corpus:
    """The corpus of a source, from the cache or built into it. Every rank may call this at the same time.

    heldout_fraction  share of the documents that is held out, chosen by a hash of their content (equal documents stay together,
                      so none is in both splits); with fewer than 20 documents, that share of each one's end
    max_bytes         reads no more text than this, in the order of the files

    Raises ValueError for a file that is not UTF-8 (path and offset), for a text too small to split, and for a fraction outside
    (0, 1); RuntimeError if a file changes while it is read.
    """
    if not 0 < heldout_fraction < 1:
        raise ValueError(f"data.heldout_fraction={heldout_fraction}: must lie between 0 and 1, e.g. {HELDOUT_FRACTION}")
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"data.max_bytes={max_bytes}: must be at least 1, or null for all of the text")
    cache_dir = Path(cache_dir)
    stem = cache_dir / _digest(source, heldout_fraction, max_bytes)
    index = _read_index(stem)
    if index is None:
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"data.cache_dir={cache_dir}: the folder cannot be made ({error.strerror})") from error
        _build(source, stem, heldout_fraction, max_bytes)
        index = _read_index(stem)
        if index is None:
            raise RuntimeError(f"{stem}.bin: does not have the size that was written; is the disk full?")
    tokens = np.memmap(f"{stem}.bin", dtype=TOKEN_DTYPE, mode="r")
    return corpus_of(source.name, tokens, index)


def corpus_of(name: str, tokens: np.ndarray, index: np.ndarray) -> Corpus:
    """Of tokens [T], training documents first, and their index [N + 1] (start, key, heldout)."""
    num_train = int(np.count_nonzero(~index["heldout"][:-1]))
    return Corpus(name, _split(tokens, index, 0, num_train), _split(tokens, index, num_train, len(index) - 1))


def _split(tokens: np.ndarray, index: np.ndarray, first: int, stop: int) -> Split:
    starts = index["start"][first:stop + 1].astype(np.int64)
    content = hashlib.blake2b(index["key"][first:stop].tobytes() + np.diff(starts).tobytes(), digest_size=16).hexdigest()
    return Split(tokens[starts[0]:starts[-1]], starts - starts[0], content)


def _digest(source: Source, heldout_fraction: float, max_bytes: int | None) -> str:
    """Names the cache by the files' names, sizes and times, so that a cached corpus is found without reading the text."""
    digest = hashlib.blake2b(f"{_FORMAT} {source.strict} {heldout_fraction!r} {max_bytes}".encode(), digest_size=16)
    for name, path in source.files:
        stat = path.stat()
        digest.update(f"\n{name}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _read_index(stem: Path) -> np.ndarray | None:
    """The index [N + 1] if both files are there and fit each other (the last row's start is the number of tokens)."""
    if not (stem.with_suffix(".npy").is_file() and stem.with_suffix(".bin").is_file()):
        return None
    try:
        index = np.load(stem.with_suffix(".npy"))
    except (ValueError, EOFError):  # cut short: built anew
        return None
    fits = index.dtype == _INDEX and stem.with_suffix(".bin").stat().st_size == int(index["start"][-1]) * TOKEN_DTYPE.itemsize
    return index if fits else None


def _build(source: Source, stem: Path, heldout_fraction: float, max_bytes: int | None) -> None:
    pieces = _pieces(source, heldout_fraction, max_bytes)
    index = np.zeros(len(pieces) + 1, _INDEX)
    index["start"][1:] = np.cumsum([piece.stop - piece.start + 1 for piece in pieces])
    index["key"][:-1] = [piece.key for piece in pieces]
    index["heldout"][:-1] = [piece.heldout for piece in pieces]

    def write_tokens(file) -> None:
        for piece in pieces:
            text = _read(piece.path, piece.stop)[piece.start:piece.stop]
            if len(text) != piece.stop - piece.start:
                raise RuntimeError(f"{piece.path}: changed while it was read")
            file.write(encode(text).tobytes())

    _publish(stem.with_suffix(".npy"), lambda file: np.save(file, index))
    _publish(stem.with_suffix(".bin"), write_tokens)


def _publish(path: Path, write) -> None:
    """write(file) under a name of its own, then renamed: nobody ever opens half a file."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read(path: Path, limit: int | None) -> bytes:
    with open(path, "rb") as file:
        return file.read() if limit is None else file.read(limit)


def _pieces(source: Source, heldout_fraction: float, max_bytes: int | None) -> list[_Piece]:
    """Every document, training ones first, each group in the order of the files."""
    documents = []
    left = max_bytes
    for _, path in source.files:
        if left == 0:
            break
        text = _read(path, left)
        if text and _is_text(text, path, source.strict, cut=left is not None and len(text) == left):
            documents.append(_Piece(path, 0, len(text), _key(text), False))
            left = None if left is None else left - len(text)
    if len(documents) >= MIN_DOCUMENTS_TO_SPLIT:
        keys = sorted(piece.key for piece in documents)
        threshold = keys[max(1, round(heldout_fraction * len(keys))) - 1]
        pieces = [_Piece(p.path, p.start, p.stop, p.key, p.key <= threshold) for p in documents]
    else:
        pieces = [piece for document in documents for piece in _cut_end(document, heldout_fraction)]
    pieces.sort(key=lambda piece: piece.heldout)  # stable
    if not pieces or pieces[0].heldout or not pieces[-1].heldout:
        size = sum(p.stop - p.start for p in documents)
        raise ValueError(f"data.path={source.name}: {size} bytes in {len(documents)} documents are too few to hold out "
                         f"data.heldout_fraction={heldout_fraction}")
    return pieces


def _cut_end(document: _Piece, heldout_fraction: float) -> list[_Piece]:
    cut = document.stop - max(1, round(heldout_fraction * document.stop))
    if cut < 1:
        return [document]
    text = _read(document.path, document.stop)
    return [_Piece(document.path, 0, cut, _key(text[:cut]), False),
            _Piece(document.path, cut, document.stop, _key(text[cut:]), True)]


def _key(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _is_text(text: bytes, path: Path, strict: bool, *, cut: bool) -> bool:
    """Whether text is UTF-8, the last character apart where max_bytes cut it. Raises ValueError instead of False if strict."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        if cut and error.reason == "unexpected end of data":
            return True
        if strict:
            raise ValueError(f"data.path: {path} is not UTF-8 text: byte {error.start} is 0x{text[error.start]:02x}") from error
        return False
    return True
