"""What is in a file: a text, a jsonl or parquet (parquet.py) of texts, or a .bin of tokens; read one document at a time.

A .bin holds little-endian uint16 or uint32 tokens, bare as nanoGPT writes them, or behind the 1024-byte header of llm.c (which
says the type and the number of tokens).
"""
from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

FORMATS = ("text", "jsonl", "parquet", "bin")
BIN_DTYPES = ("uint16", "uint32")
CHUNK_TOKENS = 1 << 20
_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".bin": "bin"}
_HEADER_BYTES = 1024
_HEADERS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version)


@dataclass(frozen=True)
class Reading:
    """How files become documents of tokens: the options of the `data` group that matter for that, by their names there."""

    format: str = "auto"
    text_field: str = "text"
    tokenizer: str = "bytes"
    document_start: str | None = None
    bin_dtype: str = "uint16"
    bin_document_start: int | None = None
    heldout_fraction: float = 0.05
    max_bytes: int | None = None


def format_of(path: Path, asked: str) -> str:
    """data.format, or with "auto" what the file's ending says: text unless .jsonl, .ndjson, .parquet or .bin."""
    return _ENDINGS.get(path.suffix.lower(), "text") if asked == "auto" else asked


def text_document(path: Path) -> bytes:
    """A whole file. Raises ValueError where it is not UTF-8."""
    with _open(path) as file:
        text = file.read()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {path} is not UTF-8 text: byte {error.start} is 0x{text[error.start]:02x}") from error
    return text


def jsonl_documents(path: Path, field: str) -> Iterator[bytes]:
    """The text of each line, UTF-8; blank lines are passed over. Raises ValueError with the line's number for what is no JSON object,
    has no such field (with the nearest that it has), or has something else than text there."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"data.path: {path}, line {number}: no JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"data.path: {path}, line {number}: a JSON {type(record).__name__}, not an object with fields")
            if field not in record:
                names = [str(name) for name in record]
                close = difflib.get_close_matches(field, names, n=3, cutoff=0.4) or names[:8]
                raise ValueError(f"data.text_field={field}: {path}, line {number}, has no such field; nearest: "
                                 f"{' or '.join(close) or 'none, the object is empty'}")
            text = record[field]
            if not isinstance(text, str):
                raise ValueError(f"data.text_field={field}: {path}, line {number}, holds a {type(text).__name__} there, not text")
            try:
                yield text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"data.path: {path}, line {number}: half a surrogate pair at character {error.start}") from error


def open_bin(path: Path, dtype: str) -> np.ndarray:
    """The tokens of a .bin, memory-mapped. dtype: of one without a header. Raises ValueError for one that is cut short."""
    size = path.stat().st_size
    with _open(path) as file:
        head = np.frombuffer(file.read(_HEADER_BYTES), np.uint8)
    kind, start = np.dtype(dtype).newbyteorder("<"), 0
    if len(head) == _HEADER_BYTES:
        numbers = head.view("<i4")
        known = _HEADERS.get((int(numbers[0]), int(numbers[1])))
        if known is not None and not numbers[3:].any():
            kind, start, count = np.dtype(known), _HEADER_BYTES, int(numbers[2])
            if size != start + count * kind.itemsize:
                raise ValueError(f"data.path: {path} is cut short or damaged: its header says {count} tokens of {kind.itemsize} bytes, "
                                 f"so {start + count * kind.itemsize} bytes, and it has {size}")
    if (size - start) % kind.itemsize:
        raise ValueError(f"data.path: {path} is cut short: {size} bytes are no whole number of data.bin_dtype={dtype} tokens "
                         f"({kind.itemsize} bytes each)")
    if size == start:
        return np.empty(0, kind)
    return np.memmap(path, dtype=kind, mode="r", offset=start)


def bin_documents(tokens: np.ndarray, document_start: int | None) -> Iterator[np.ndarray]:
    """tokens cut before each document_start (None: one document). Views: nothing is copied."""
    begin = 0
    if document_start is not None:
        for first in range(0, len(tokens), CHUNK_TOKENS):
            for place in first + np.flatnonzero(tokens[first:first + CHUNK_TOKENS] == document_start):
                if place > begin:
                    yield tokens[begin:place]
                begin = int(place)
    if begin < len(tokens):
        yield tokens[begin:]


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise OSError(f"data.path: {path} cannot be read ({error.strerror})") from error
