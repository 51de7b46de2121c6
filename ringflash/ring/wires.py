"""How the rows of a block lie on the wire, and the tensors that a kernel sees in it.

    kind   travels when       row                                                        dtype
    kv     forward, kv        [B, Hkv, D + Dv]: K, then V                                that of the inputs
    dkv    K and V rotate     [B, Hkv, D + Dv]: dK, then dV                              accumulator
    q      the Q side rotates bytes: q [B, Hq, D], dout [B, Hq, Dv], lse, delta [B, Hq]  mixed, see QueryWire
    dq     the Q side rotates [B, Hq, D]                                                 accumulator

A buffer is [rows, *row_shape]; rows come first, so that ranges of rows are views of it.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ringflash.ring.buffers import Rows
from ringflash.ring.rotate import query_sections

Tensors = tuple[Tensor, ...]
_WORD_BYTES = 8


class Wire(Protocol):
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def pack(self, tensors: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        """Copies `rows` of a rank's own tensors into out [count_rows(rows), *row_shape]; returns out."""
        ...

    def split(self, data: Tensor) -> Tensors:
        """The tensors of a buffer [rows, *row_shape], rows in dim 1 (lse and delta: in dim 2)."""
        ...


class HeadWire:
    """Tensors of equal heads, [B, S, H, D_i] each, side by side in the last dim of [rows, B, H, sum of D_i]: kv, dkv and dq."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None):
        """tensors: of which shapes; dtype: on the wire, None for theirs."""
        first = tensors[0]
        self._widths = [x.shape[3] for x in tensors]
        self.row_shape = (first.shape[0], first.shape[2], sum(self._widths))
        self.dtype, self.device = first.dtype if dtype is None else dtype, first.device

    def pack(self, tensors: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        offset = 0
        for start, stop in rows:
            targets = out[offset:offset + stop - start].split(self._widths, dim=3)
            for target, x in zip(targets, tensors):
                copy_bits(target, x[:, start:stop].transpose(0, 1))
            offset += stop - start
        return out

    def split(self, data: Tensor) -> Tensors:
        """Views [B, rows, H, D_i]."""
        return data.transpose(0, 1).split(self._widths, dim=3)


class QueryWire:
    """q [B, S, Hq, D] and dout [B, S, Hq, Dv] in the input dtype, lse and delta [B, Hq, S] in the accumulator dtype, in one buffer
    of bytes [rows, row_bytes], so that a message is one transfer. Each begins at a multiple of 16 bytes in every row: kernels load
    q and dout as views."""

    dtype = torch.uint8

    def __init__(self, q: Tensor, dout: Tensor, lse: Tensor):
        self.device = q.device
        batch, _, heads, head_dim = q.shape
        tails = ((batch, heads, head_dim), (batch, heads, dout.shape[3]), (batch, heads), (batch, heads))
        dtypes = (q.dtype, q.dtype, lse.dtype, lse.dtype)
        offsets, row_bytes = query_sections(batch, heads, head_dim, dout.shape[3], q.dtype.itemsize, lse.dtype.itemsize)
        self._sections = tuple(zip(offsets, tails, dtypes))
        self.row_shape = (row_bytes,)

    def _views(self, data: Tensor) -> list[Tensor]:
        """q [rows, B, Hq, D], dout [rows, B, Hq, Dv], lse, delta [rows, B, Hq]."""
        views = []
        for offset, tail, dtype in self._sections:
            num_bytes = torch.Size(tail).numel() * dtype.itemsize
            views.append(data[:, offset:offset + num_bytes].view(dtype).unflatten(1, tail))
        return views

    def pack(self, tensors: Sequence[Tensor], rows: Rows, out: Tensor) -> Tensor:
        """tensors: q, dout, lse, delta."""
        q, dout, lse, delta = tensors
        offset, views = 0, self._views(out)
        for start, stop in rows:
            parts = (q[:, start:stop].transpose(0, 1), dout[:, start:stop].transpose(0, 1),
                     lse[:, :, start:stop].permute(2, 0, 1), delta[:, :, start:stop].permute(2, 0, 1))
            for view, part in zip(views, parts):
                copy_bits(view[offset:offset + stop - start], part)
            offset += stop - start
        return out

    def split(self, data: Tensor) -> Tensors:
        """q, dout: views [B, rows, Hq, D or Dv]. lse, delta: copies [B, Hq, rows], contiguous, which kernels may rely on."""
        q, dout, lse, delta = self._views(data)
        return q.transpose(0, 1), dout.transpose(0, 1), *(x.permute(1, 2, 0).contiguous() for x in (lse, delta))


def copy_bits(target: Tensor, source: Tensor) -> None:
    """target[:] = source, of one shape and dtype: eight bytes at a time where both allow it, as torch copies strided tensors
    element by element."""
    words = [_as_words(x) for x in (target, source)]
    if all(x is not None for x in words):
        target, source = words
    target.copy_(source)


def _as_words(x: Tensor) -> Tensor | None:
    """x [..., n] as int64 [..., n * itemsize / 8], a view; None where its rows do not consist of aligned words."""
    per_word = _WORD_BYTES // x.element_size()
    odd = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) != 1 or x.data_ptr() % _WORD_BYTES or any(n % per_word for n in odd):
        return None
    return x.view(torch.int64)
