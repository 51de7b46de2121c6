"""Columns of a batch's sources (torch, numpy, memory-mapped, lazy), and no others: host memory is that of the rows asked for."""
from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

IGNORE = -100                                               # a label that takes no part in the loss
_SAMPLED = 4096                                             # elements of a memory-mapped source that its hash reads
_PIECE_ROWS = 1 << 16


def batch_hash(source: Any) -> int:
    """A number that tells batches apart: a source's own batch_hash, else a crc of an array in memory, of a strided sample of a
    memory-mapped one (which must not be read whole). Dtype and device do not matter."""
    named = getattr(source, "batch_hash", None)
    if named is not None:
        return int(named)
    if isinstance(source, np.memmap):
        columns = np.unique(np.linspace(0, source.shape[-1] - 1, min(_SAMPLED, source.shape[-1])).astype(np.int64))
        return zlib.crc32(rows_of(source, columns).tobytes())
    return zlib.crc32(rows_of(source, slice(None)).tobytes())


def rows_of(source: Any, index: np.ndarray | slice) -> np.ndarray:
    """Columns of a [B, S] source as int64 [B, n], reading no others. ValueError for what holds no integers."""
    if isinstance(source, Tensor):
        _check_integers(source.dtype, not (source.is_floating_point() or source.is_complex() or source.dtype == torch.bool))
        picked = source[..., torch.from_numpy(index).to(source.device) if isinstance(index, np.ndarray) else index]
        return np.ascontiguousarray(picked.detach().cpu().numpy().astype(np.int64))
    picked = np.asarray(source[..., index])
    _check_integers(picked.dtype, picked.dtype.kind in "iu")
    return np.ascontiguousarray(picked.astype(np.int64))


def _check_integers(dtype: Any, are_integers: bool) -> None:
    if not are_integers:
        raise ValueError(f"batch: tokens and labels must be integers, got {dtype}")


def has_successor(rows: np.ndarray, seq_len: int, boundaries: np.ndarray | None) -> np.ndarray:
    """bool [n]: does the row have a successor in its own document?"""
    if boundaries is None:
        return rows + 1 < seq_len
    document = np.searchsorted(boundaries, rows, side="right")
    return (rows + 1 < boundaries[-1]) & (document == np.searchsorted(boundaries, rows + 1, side="right"))


def num_successors(seq_len: int, boundaries: np.ndarray | None) -> int:
    """How many of all rows have a successor in their own document."""
    return seq_len - 1 if boundaries is None else int(np.maximum(np.diff(boundaries) - 1, 0).sum())


def num_labels(source: Any, seq_len: int, boundaries: np.ndarray | None) -> int:
    """Labels of a whole [B, S] source that count, read a piece at a time."""
    pieces = (np.arange(start, min(start + _PIECE_ROWS, seq_len), dtype=np.int64) for start in range(0, seq_len, _PIECE_ROWS))
    return sum(int((rows_of(source, rows[has_successor(rows, seq_len, boundaries)] + 1) != IGNORE).sum()) for rows in pieces)


def sorted_union(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """np.union1d of two arrays [n], [m] that are sorted and without repeats. (That one hashes: seconds at a million rows.)"""
    merged = np.concatenate((a, b))
    merged.sort(kind="stable")                              # two sorted runs: one merge
    return merged[np.flatnonzero(np.diff(merged, prepend=merged[:1] - 1))]
