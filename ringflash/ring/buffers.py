"""Packed blocks of rows on the wire, and the buffers that they live in. What a row is made of: wires.py.

`rows` is a tuple of (start, stop) ranges of local rows of the owner's shard, compacted in order.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Rows = tuple[tuple[int, int], ...]


def count_rows(rows: Rows) -> int:
    return sum(stop - start for start, stop in rows)


def locate(held: Rows, wanted: Rows) -> Rows | None:
    """Where the rows `wanted` lie in a buffer that holds the rows `held` compacted: merged (start, stop) ranges of that buffer.

    None when `wanted` names a row that is not held. Both are ascending and disjoint.
    """
    found: list[tuple[int, int]] = []
    offset, index = 0, 0
    for start, stop in wanted:
        while start < stop:
            while index < len(held) and held[index][1] <= start:
                offset += held[index][1] - held[index][0]
                index += 1
            if index == len(held) or held[index][0] > start:
                return None
            end = min(stop, held[index][1])
            first = offset + start - held[index][0]
            if found and found[-1][1] == first:
                found[-1] = (found[-1][0], first + end - start)
            else:
                found.append((first, first + end - start))
            start = end
    return tuple(found)


@dataclass(frozen=True)
class Block:
    """Rows of one owner's shard, packed: data [count_rows(rows), *row_shape]."""

    rows: Rows
    data: Tensor

    def find(self, rows: Rows) -> Rows:
        found = locate(self.rows, rows)
        if found is None:
            raise RuntimeError(f"ring plan: rows {rows} are wanted from a block that holds rows {self.rows}")
        return found

    def part(self, rows: Rows, pool: "BufferPool", slot: tuple) -> "Block":
        """The rows `rows` of this block: a view where they lie together (a prefix is the rule), else a copy into a buffer of
        `pool`."""
        found = self.find(rows)
        if len(found) <= 1:
            start, stop = found[0] if found else (0, 0)
            return Block(rows, self.data[start:stop])
        copy = pool.take(slot, count_rows(rows))
        torch.cat([self.data[start:stop] for start, stop in found], out=copy)
        return Block(rows, copy)

    def add(self, other: "Block") -> None:
        """Add a block that holds a subset of these rows, in place."""
        offset = 0
        for start, stop in self.find(other.rows):
            self.data[start:stop].add_(other.data[offset:offset + stop - start])
            offset += stop - start


class BufferPool:
    """Buffers of one call, by slot: each is allocated once, at the largest size its slot needs, and reused across steps.

    Reuse is safe without any host sync. A slot that alternates with the step's parity is read by kernels of step s and written by
    a receive of step s+1 at the earliest, which is posted after those kernels were launched; carriers order a transfer behind
    everything that the current stream holds when it is posted. References last as long as the pool, so longer than any transfer.
    """

    def __init__(self, row_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.row_shape, self.dtype, self._device = row_shape, dtype, device
        self._capacity: dict[tuple, int] = {}
        self._buffers: dict[tuple, Tensor] = {}

    def reserve(self, slot: tuple, rows: int) -> None:
        """Announce that `slot` will need room for `rows` rows, before its first take()."""
        self._capacity[slot] = max(rows, self._capacity.get(slot, 0))

    def take(self, slot: tuple, rows: int) -> Tensor:
        """A buffer [rows, *row_shape] with undefined contents; it ends the life of what the slot held before."""
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.shape[0] < rows:
            capacity = max(rows, self._capacity.get(slot, 0))
            buffer = torch.empty((capacity, *self.row_shape), dtype=self.dtype, device=self._device)
            self._buffers[slot] = buffer
        return buffer[:rows]
