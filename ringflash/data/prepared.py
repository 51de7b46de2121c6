"""Documents of tokens as a folder that training maps into memory: tokens.bin, index.npy (a row per document), meta.json.

The folder is built under another name and renamed when it is whole, so it is there or it is not. Two passes over the disk and none
over memory: documents are written as they come, then put in order, training ones first, once it is known which are held out.
"""
from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .corpus import MIN_DOCUMENTS_TO_SPLIT, Corpus, corpus_of
from .formats import CHUNK_TOKENS, Reading, bin_documents, format_of, jsonl_documents, open_bin, text_document
from .parquet import parquet_documents
from .sources import Source
from .tokenizer import BYTES, load_tokenizer

META, TOKENS, INDEX = "meta.json", "tokens.bin", "index.npy"
_FORMAT = "ringflash tokens 1"
_ROW = np.dtype([("start", "<i8"), ("key", "<u8"), ("heldout", "?")])


@dataclass(frozen=True)
class Prepared:
    """num_ids: the vocabulary that a model needs; unigram_nats: of the held-out tokens under the training tokens' frequencies."""

    corpus: Corpus
    num_ids: int
    unigram_nats: float


def is_prepared(path: str | os.PathLike | None) -> bool:
    return path is not None and (Path(path) / META).is_file()


def open_prepared(path: str | os.PathLike) -> Prepared:
    """A prepared folder. Raises ValueError where a file is missing or does not have the size that meta.json says."""
    folder = Path(path)
    try:
        meta = json.loads((folder / META).read_text())
        if meta["format"] != _FORMAT:
            raise ValueError(f"its format is {meta['format']!r}, this version reads {_FORMAT!r}")
        dtype, num_tokens = np.dtype(meta["dtype"]), int(meta["num_tokens"])
        size = (folder / TOKENS).stat().st_size
        if size != num_tokens * dtype.itemsize:
            raise ValueError(f"{TOKENS} is cut short or damaged: {size} bytes, not {num_tokens} tokens of {dtype.itemsize}")
        index = np.load(folder / INDEX)
        if index.dtype != _ROW or len(index) != meta["num_documents"] + 1 or int(index["start"][-1]) != num_tokens:
            raise ValueError(f"{INDEX} does not fit {TOKENS}")
        corpus = corpus_of(meta["name"], np.memmap(folder / TOKENS, dtype=dtype, mode="r"), index)
        return Prepared(corpus, int(meta["num_ids"]), float(meta["unigram_nats"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"data.path={path}: no whole prepared folder: {error}") from error


def prepare(source: Source, target: str | os.PathLike, reading: Reading) -> Path:
    """Writes a source as a prepared folder; one that is there already stays as it is. Every rank may call this at the same time.

    Raises ValueError or OSError naming the file for what cannot be read, and ValueError for too little to hold anything out.
    """
    target = Path(target)
    if is_prepared(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target}: exists and is no prepared folder; name another")
    work = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"{target.parent}: no folder can be made there ({error.strerror})") from error
    try:
        try:
            _build(source, work, reading)
        except OSError as error:
            if error.errno is not None and error.filename is None:  # what a write that fails leaves unsaid
                error.filename = str(target)
            raise
        try:
            os.replace(work, target)
        except OSError:
            if not is_prepared(target):  # else another process was faster, with the same bytes
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def cached(source: Source, cache_dir: str | os.PathLike, reading: Reading) -> Prepared:
    """The source prepared under a name in cache_dir that stands for its files (names, sizes, times) and how they are read."""
    text = f"{_FORMAT} {asdict(reading)}"
    if reading.tokenizer != BYTES:
        text += load_tokenizer(reading.tokenizer, reading.document_start).name
    for name, path in source.files:
        stat = path.stat()
        text += f"\n{name}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return open_prepared(prepare(source, Path(cache_dir) / f"{digest}.tokens", reading))


class _Documents:
    """The documents of a source as arrays of tokens. num_ids, start: known once the first document has come."""

    def __init__(self, source: Source, reading: Reading):
        self.source, self.reading = source, reading
        kinds = {format_of(path, reading.format) for _, path in source.files}
        self.tokenizer = load_tokenizer(reading.tokenizer, reading.document_start) if kinds != {"bin"} else None
        self.num_ids = self.tokenizer.size if self.tokenizer else 0
        self.start = self.tokenizer.start if self.tokenizer else reading.bin_document_start

    def __iter__(self) -> Iterator[np.ndarray]:
        left = self.reading.max_bytes
        for _, path in self.source.files:
            if format_of(path, self.reading.format) == "bin":
                tokens = open_bin(path, self.reading.bin_dtype)
                if left is not None:
                    tokens = tokens[:left // tokens.dtype.itemsize]
                    left -= tokens.nbytes
                yield from bin_documents(tokens, self.reading.bin_document_start)
                continue
            for text in self._texts(path):
                if left is not None and len(text) > left:
                    if left == self.reading.max_bytes:
                        raise ValueError(f"data.max_bytes={left}: the first document, in {path}, has {len(text)} bytes, and documents "
                                         f"of this kind are read whole; nearest: {len(text)}, or null")
                    return
                left = None if left is None else left - len(text)
                if text:
                    yield self.tokenizer.encode(text)

    def _texts(self, path: Path) -> Iterator[bytes]:
        kind = format_of(path, self.reading.format)
        if kind == "jsonl":
            yield from jsonl_documents(path, self.reading.text_field)
        elif kind == "parquet":
            yield from parquet_documents(path, self.reading.text_field)
        else:
            yield text_document(path)


def _build(source: Source, work: Path, reading: Reading) -> None:
    documents = _Documents(source, reading)
    lengths, keys, top = array("q"), array("Q"), -1
    with open(work / "raw", "wb") as file:
        for document in documents:
            key = hashlib.blake2b(digest_size=8)
            for part in _chunks(document):
                file.write(part.tobytes())
                key.update(part.tobytes())
                top = max(top, int(part.max()))
            lengths.append(len(document))
            keys.append(int.from_bytes(key.digest(), "little"))
    pieces = _split(np.array(lengths, np.int64), np.array(keys, np.uint64), reading.heldout_fraction, source.name)
    if documents.start is not None:
        top = max(top, documents.start)  # no token of a .bin may be it, and the tail of a document still begins with it
    dtype = np.dtype("<u2" if top < 1 << 16 else "<u4")
    num_ids = max(documents.num_ids, top + 1)
    raw = np.memmap(work / "raw", dtype="<u4", mode="r")
    index = np.zeros(len(pieces) + 1, _ROW)
    counts = np.zeros((2, num_ids), np.int64)
    with open(work / TOKENS, "wb") as file:
        for row, (start, stop, heldout, is_tail) in enumerate(pieces):
            # The tail of a document is one of its own, and begins like one.
            lead = np.array([documents.start] if is_tail and documents.start is not None else [], "<u4")
            key = hashlib.blake2b(digest_size=8)
            for part in (lead, *_chunks(raw[start:stop])):
                key.update(part.tobytes())
                counts[int(heldout)] += np.bincount(part, minlength=num_ids)
                file.write(part.astype(dtype).tobytes())
            index[row + 1]["start"] = index[row]["start"] + len(lead) + stop - start
            index[row]["key"] = int.from_bytes(key.digest(), "little")
            index[row]["heldout"] = heldout
        _to_disk(file)
    del raw
    (work / "raw").unlink()
    if documents.start is not None:
        counts[:, documents.start] = 0  # nothing ever predicts it
    meta = {"format": _FORMAT, "name": source.name, "dtype": dtype.str, "num_tokens": int(index["start"][-1]),
            "num_documents": len(pieces), "num_ids": num_ids, "document_start": documents.start,
            "unigram_nats": _nats(*counts), "reading": asdict(reading)}
    with open(work / INDEX, "wb") as file:
        np.save(file, index)
        _to_disk(file)
    with open(work / META, "wb") as file:
        file.write(json.dumps(meta, indent=1).encode())
        _to_disk(file)


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _chunks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """uint32 copies of at most CHUNK_TOKENS."""
    for start in range(0, len(tokens), CHUNK_TOKENS):
        yield np.asarray(tokens[start:start + CHUNK_TOKENS]).astype("<u4")


def _split(lengths: np.ndarray, keys: np.ndarray, fraction: float, name: str) -> list[tuple[int, int, bool, bool]]:
    """(start, stop, held out, is a tail) of each piece, training ones first: the rule of load_corpus, on tokens."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    if len(lengths) >= MIN_DOCUMENTS_TO_SPLIT:
        threshold = np.sort(keys)[max(1, round(fraction * len(keys))) - 1]
        pieces = [(int(a), int(b), bool(k <= threshold), False) for a, b, k in zip(starts[:-1], starts[1:], keys)]
    else:
        pieces = []
        for a, b in zip(starts[:-1].tolist(), starts[1:].tolist()):
            cut = b - max(1, round(fraction * (b - a)))
            pieces += [(a, b, False, False)] if cut <= a else [(a, cut, False, False), (cut, b, True, True)]
    pieces.sort(key=lambda piece: piece[2])  # stable
    if not pieces or pieces[0][2] or not pieces[-1][2]:
        raise ValueError(f"data.path={name}: {int(starts[-1])} tokens in {len(lengths)} documents are too few to hold out "
                         f"data.heldout_fraction={fraction}")
    return pieces


def _nats(train: np.ndarray, heldout: np.ndarray) -> float:
    """Of the tokens counted in heldout under the frequencies of train, each count + 1. 0 where nothing is counted."""
    seen, model = heldout > 0, train + 1
    return float(-(heldout[seen] * np.log(model[seen] / model.sum())).sum() / max(heldout.sum(), 1))
