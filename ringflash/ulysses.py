"""Ulysses inside a ring: ranks that hold one place of the ring share its rows outside attention, and its heads inside.

Note [Ulysses] in DESIGN.md. The ring's loop (ring/loop.py) runs between two all-to-alls, on all rows of the ring shard and this
rank's heads. Generators like the loop's: one process per rank drives its own, simulate() those of all ranks.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ringflash.kernels.dispatch import accumulate_dtype
from ringflash.layout import Layout
from ringflash.ring.exchange import Pending
from ringflash.ring.head_exchange import HeadExchange
from ringflash.ring.heads import HeadSplit
from ringflash.ring.loop import Waits

_ALIGNMENT = 16  # bytes: each tensor of a parcel begins at a multiple, so that it can be viewed in its own dtype
_WORD = torch.int64  # what collectives count in: 16 GiB fit into 31 bits, and every backend takes it


@dataclass(frozen=True)
class Part:
    """A tensor whose rows or heads are exchanged. is_kv: it has KV heads and the rows of k."""

    x: Tensor
    is_kv: bool = False
    rows_dim: int = 1
    heads_dim: int = 2


@dataclass(frozen=True)
class Member:
    """One rank of the Ulysses ranks of a place of the ring. lengths, lengths_k: rows of q, and of k and v, of each of them."""

    split: HeadSplit
    rank: int
    lengths: tuple[int, ...]
    lengths_k: tuple[int, ...]

    def to_heads(self, exchange: HeadExchange, parts: Sequence[Part]) -> Generator[Pending, None, list[Tensor]]:
        """All rows of the ring shard and this rank's heads of each part (this rank's rows, all heads)."""
        size = self.split.size
        sends = [[part.x.narrow(part.heads_dim, *self._heads(part, peer)) for part in parts] for peer in range(size)]
        expected = [[self._shape(part, self._rows(part)[peer], self._heads(part, self.rank)[1]) for part in parts]
                    for peer in range(size)]
        found = yield from _all_to_all(exchange, sends, expected, [part.x.dtype for part in parts])
        whole = []
        for index, part in enumerate(parts):
            x = torch.cat([of_peer[index] for of_peer in found], dim=part.rows_dim)
            copies = self.split.copies(self.rank)
            if part.is_kv and copies != list(range(x.shape[part.heads_dim])):
                x = x.index_select(part.heads_dim, torch.tensor(copies, device=x.device))
            whole.append(x)
        return whole

    def to_rows(self, exchange: HeadExchange, parts: Sequence[Part]) -> Generator[Pending, None, list[Tensor]]:
        """This rank's rows and all heads of each part (all rows of the ring shard, this rank's heads).

        What several ranks, or several copies on one, hold for one KV head is added, in the order of ranks, in the parts' dtype.
        """
        size = self.split.size
        sent = [self._without_copies(part) for part in parts]
        starts = [[0, *accumulate(self._rows(part))] for part in parts]
        sends = [[x.narrow(part.rows_dim, start[peer], self._rows(part)[peer]) for x, part, start in zip(sent, parts, starts)]
                 for peer in range(size)]
        expected = [[self._shape(part, self._rows(part)[self.rank], self._heads(part, peer)[1]) for part in parts]
                    for peer in range(size)]
        found = yield from _all_to_all(exchange, sends, expected, [part.x.dtype for part in parts])
        whole = []
        for index, part in enumerate(parts):
            pieces = [of_peer[index] for of_peer in found]
            if part.is_kv and self.split.is_replicated:
                shape = self._shape(part, self._rows(part)[self.rank], self.split.num_kv_heads)
                total = torch.zeros(shape, dtype=part.x.dtype, device=part.x.device)
                for peer, piece in enumerate(pieces):
                    total.narrow(part.heads_dim, *self._heads(part, peer)).add_(piece)
                whole.append(total)
            else:
                whole.append(torch.cat(pieces, dim=part.heads_dim))
        return whole

    def _without_copies(self, part: Part) -> Tensor:
        copies, count = self.split.copies(self.rank), self._heads(part, self.rank)[1]
        if not part.is_kv or copies == list(range(count)):
            return part.x
        total = torch.zeros(self._shape(part, part.x.shape[part.rows_dim], count), dtype=part.x.dtype, device=part.x.device)
        for head, copy in enumerate(copies):
            total.select(part.heads_dim, copy).add_(part.x.select(part.heads_dim, head))
        return total

    def _rows(self, part: Part) -> tuple[int, ...]:
        return self.lengths_k if part.is_kv else self.lengths

    def _heads(self, part: Part, rank: int) -> tuple[int, int]:
        """First head, number of heads."""
        start, stop = self.split.keys(rank) if part.is_kv else self.split.queries(rank)
        return start, stop - start

    @staticmethod
    def _shape(part: Part, rows: int, heads: int) -> tuple[int, ...]:
        shape = list(part.x.shape)
        shape[part.rows_dim], shape[part.heads_dim] = rows, heads
        return tuple(shape)


def member_of(layout: Layout, layout_k: Layout, rank: int, num_heads: int, num_kv_heads: int) -> Member | None:
    """What `rank` (of all num_ranks) is among its Ulysses ranks; None where a place of the ring has one rank."""
    size = layout.ulysses_size
    if size == 1:
        return None
    place = range(rank - rank % size, rank - rank % size + size)
    lengths, lengths_k = (tuple(x.shard_len(peer) for peer in place) for x in (layout, layout_k))
    return Member(HeadSplit(num_heads, num_kv_heads, size), rank % size, lengths, lengths_k)


def forward(
    member: Member, exchange: HeadExchange, ring: Callable[..., Waits], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    out: Tensor, lse: Tensor,
) -> Waits:
    """q [B, S_local, Hq, D], k [B, Sk_local, Hkv, D], v [B, Sk_local, Hkv, Dv], sinks [Hq] or None: this rank's rows. OUT: out
    [B, S_local, Hq, Dv], lse [B, Hq, S_local].

    ring(q, k, v, sinks=, out=, lse=): the loop, on all rows of the ring shard and this rank's heads.
    """
    own_q, own_k, own_v = yield from member.to_heads(exchange, [Part(q), Part(k, is_kv=True), Part(v, is_kv=True)])
    batch, rows, heads, _ = own_q.shape
    own_out = q.new_empty((batch, rows, heads, v.shape[3]))
    own_lse = q.new_empty((batch, heads, rows), dtype=lse.dtype)
    yield from ring(own_q, own_k, own_v, sinks=_own_sinks(member, sinks), out=own_out, lse=own_lse)
    found = yield from member.to_rows(exchange, [Part(own_out), Part(own_lse, rows_dim=2, heads_dim=1)])
    for target, x in zip((out, lse), found):
        target.copy_(x)


def backward(
    member: Member, exchange: HeadExchange, ring: Callable[..., Waits], dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, gradients: list[Tensor],
) -> Waits:
    """Appends dq, dk, dv of this rank's rows, in the dtype of q, and with sinks dsinks [Hq] in acc dtype: of all rows of the ring
    shard in this rank's heads, 0 in the others.

    ring(dout, dlse, q, k, v, out, lse, sinks=, gradients=, kv_dtype=): the backward loop, on all rows and this rank's heads.
    """
    parts = [Part(q), Part(k, is_kv=True), Part(v, is_kv=True), Part(dout), Part(out)]
    parts += [Part(x, rows_dim=2, heads_dim=1) for x in (lse, dlse) if x is not None]
    own_q, own_k, own_v, own_dout, own_out, own_lse, *own_dlse = yield from member.to_heads(exchange, parts)
    own: list[Tensor] = []
    # Gradients of a KV head that stands on several ranks are rounded once, when they have been added.
    kv_dtype = accumulate_dtype(q.dtype) if member.split.is_replicated else None
    yield from ring(own_dout, own_dlse[0] if own_dlse else None, own_q, own_k, own_v, own_out, own_lse,
                    sinks=_own_sinks(member, sinks), gradients=own, kv_dtype=kv_dtype)
    dq, dk, dv, *dsinks = own
    found = yield from member.to_rows(exchange, [Part(dq), Part(dk, is_kv=True), Part(dv, is_kv=True)])
    gradients.extend(x.to(q.dtype) for x in found)
    if sinks is not None:
        whole = torch.zeros(sinks.shape, dtype=dsinks[0].dtype, device=sinks.device)
        start, stop = member.split.queries(member.rank)
        whole[start:stop] = dsinks[0]
        gradients.append(whole)


def _own_sinks(member: Member, sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks[slice(*member.split.queries(member.rank))]


def _all_to_all(
    exchange: HeadExchange, sends: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[tuple[int, ...]]],
    dtypes: Sequence[torch.dtype],
) -> Generator[Pending, None, list[list[Tensor]]]:
    """sends: per peer its tensors; expected: per peer the shapes of those that come, of `dtypes`. One collective for all."""
    device = sends[0][0].device
    shapes = [[tuple(x.shape) for x in of_peer] for of_peer in sends]
    buffers, words = [], []
    for of_shapes in (shapes, expected):
        words.append([sum(_num_words(shape, dtype) for shape, dtype in zip(of_peer, dtypes)) for of_peer in of_shapes])
        buffers.append(torch.empty(sum(words[-1]), dtype=_WORD, device=device))
    send, recv = buffers
    for views, tensors in zip(_views(send, shapes, dtypes), sends):
        for view, x in zip(views, tensors):
            view.copy_(x)
    yield exchange.post(send, words[0], recv, words[1])
    return _views(recv, expected, dtypes)


def _num_words(shape: Sequence[int], dtype: torch.dtype) -> int:
    num_bytes = math.prod(shape) * dtype.itemsize
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT // _WORD.itemsize


def _views(buffer: Tensor, shapes: Sequence[Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype]) -> list[list[Tensor]]:
    found, start = [], 0
    for of_peer in shapes:
        found.append([])
        for shape, dtype in zip(of_peer, dtypes):
            stop = start + _num_words(shape, dtype)
            found[-1].append(buffer[start:stop].view(dtype)[:math.prod(shape)].view(shape))
            start = stop
    return found
