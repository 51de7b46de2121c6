"""Mask: which keys each query sees, as a value in global positions.

Every mask gives each query row one interval of keys, or two (Note [Intervals] in DESIGN.md). numpy alone, but for `.spec`.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringflash.mask_options import (
    read_boundaries, read_count, read_key_boundaries, read_prefixes, read_window, refuse_combinations)

if TYPE_CHECKING:
    import torch

_SPEC_VERSION = 2
_SPEC_HEADER = 8  # version, left, right, chunk_size (0: none), first_tokens, then the lengths of three lists (-1: not given)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Mask:
    """What a query may attend to.

    causal: key position <= query position. False: no such bound.
    window_size: (left, right) in flash-attention's sense: a query at position p sees keys p - left .. p + right, -1 meaning
        unlimited. (63, 0) is itself and 63 before. With causal=True, right must be -1 or 0, which mean the same.
    cu_seqlens: document boundaries [N+1], ints (list, tuple, numpy or torch, any device: read here, once): starts at 0, does not
        decrease; repeats are empty documents. Queries see their own document only. Rows from cu_seqlens[-1] on see nothing.
    cu_seqlens_k: boundaries [N+1] of the keys, where they are not those of the queries (cross attention): queries of document i
        see keys of document i. Keys from cu_seqlens_k[-1] on are seen by nobody. Either side of a document may be empty.
    prefix_lens: prefix-LM: the first prefix_lens[i] keys of document i (all of them, if it is shorter) are seen by the whole
        document, whatever causal and window_size say. [N] ints, or one int for every document, or for the sequence.
    chunk_size: a query at position p of its document sees keys of its own chunk only, p // chunk_size == key // chunk_size.
    first_tokens: the first n keys of each document (or of the sequence) are exempt from the window's left bound (attention
        sinks that are tokens, Xiao et al. 2023). Where that bound excludes none of them it costs nothing.

    Bottom-right aligned: when a document (or the sequence) has other lengths of q and k, its last query sits at its last key:
    query i at key position i + (Sk - Sq). Positions of windows, chunks, prefixes and first tokens are key positions within
    the document.

    Together (every option also with documents, q and k lists of their own, and causal True or False):

        with            window_size               prefix_lens             chunk_size              first_tokens
        prefix_lens     window, and the prefix    -                       ValueError              window, prefix, and the
                                                                                                  first tokens up to the query
        chunk_size      what both allow           ValueError              -                       ValueError
        first_tokens    window, and the first     as above                ValueError              -
                        tokens up to p + right

    prefix_lens and first_tokens with a window on the left are masks of two intervals per row (num_parts == 2). prefix_lens with
    causal=False and no window is a ValueError, as it changes nothing; first_tokens without a left window is the mask without.

    A row that sees nothing has out 0, lse -inf and gradient 0. Masks are equal when they allow the same pairs by the same
    description: causal=True equals window_size right 0; they are hashable.

    Raises ValueError for what no mask can mean, naming the options.
    """

    causal: bool
    window_size: tuple[int, int]
    cu_seqlens: np.ndarray | None  # int64 [N+1], read-only, as the other arrays
    cu_seqlens_k: np.ndarray | None  # int64 [N+1]
    prefix_lens: np.ndarray | None  # int64 [N], without documents [1]
    chunk_size: int | None
    first_tokens: int
    _key: tuple[int, int, int, int, bytes | None, bytes | None, bytes | None]
    _hash: int

    def __init__(
        self,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        cu_seqlens: Any = None,
        cu_seqlens_k: Any = None,
        prefix_lens: Any = None,
        chunk_size: int | None = None,
        first_tokens: int = 0,
    ):
        if not isinstance(causal, (bool, np.bool_)):
            raise ValueError(f"causal={causal!r}: must be True or False")
        left, right = read_window(window_size, bool(causal))
        boundaries = None if cu_seqlens is None else read_boundaries("cu_seqlens", cu_seqlens)
        keys = None if cu_seqlens_k is None else read_key_boundaries(cu_seqlens_k, boundaries)
        prefixes = None if prefix_lens is None else read_prefixes(prefix_lens, boundaries)
        chunk = None if chunk_size is None else read_count("chunk_size", chunk_size, least=1)
        first = read_count("first_tokens", first_tokens, least=0)
        given = {"prefix_lens": prefix_lens, "chunk_size": chunk_size, "first_tokens": first or None}
        refuse_combinations({name: x for name, x in given.items() if x is not None}, bool(causal), (left, right))

        put = object.__setattr__
        put(self, "causal", bool(causal))
        put(self, "window_size", (left, right))
        put(self, "cu_seqlens", boundaries)
        put(self, "cu_seqlens_k", keys)
        put(self, "prefix_lens", prefixes)
        put(self, "chunk_size", chunk)
        put(self, "first_tokens", first)
        # What takes no effect is left out: masks that allow the same pairs for that reason are equal, and share plans.
        put(self, "_prefixes", prefixes if prefixes is not None and prefixes.any() else None)
        lists = (None if x is None else x.tobytes() for x in (boundaries, keys, self._prefixes))
        put(self, "_key", (left, 0 if causal else right, chunk or 0, first if left >= 0 else 0, *lists))
        put(self, "_hash", hash(self._key))
        if "torch" in sys.modules:
            # Made here and not when it is first asked for: a compiled graph must find a tensor, whose length it can leave open.
            # Numpy arrays that it met while tracing would recompile for every number of documents.
            _ = self.spec

    def check_lengths(self, seq_len_q: int, seq_len_k: int | None) -> None:
        """Raises ValueError when this mask cannot describe seq_len_q queries over seq_len_k keys (None: not known yet)."""
        if self.cu_seqlens is None:
            return
        if self.cu_seqlens_k is None and seq_len_k is not None and seq_len_q != seq_len_k:
            raise ValueError(
                f"cu_seqlens with seq_len_q={seq_len_q} and seq_len_k={seq_len_k}: packed documents of different query and key "
                "lengths need cu_seqlens_k too"
            )
        if self.cu_seqlens[-1] > seq_len_q:
            raise ValueError(f"cu_seqlens[-1]={self.cu_seqlens[-1]}: documents must end within seq_len={seq_len_q}")
        if self.cu_seqlens_k is not None and seq_len_k is not None and self.cu_seqlens_k[-1] > seq_len_k:
            raise ValueError(f"cu_seqlens_k[-1]={self.cu_seqlens_k[-1]}: documents of keys must end within seq_len_k={seq_len_k}")

    @property
    def num_parts(self) -> int:
        """Intervals per row: 1, or 2 where the first keys of a document are seen beside a window that has left them."""
        left, _, _, first_tokens, *_ = self._key
        return 2 if left >= 0 and (first_tokens or self._prefixes is not None) else 1

    def bounds(
        self, positions: np.ndarray, seq_len_q: int, seq_len_k: int, part: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The part-th interval of keys of each query, in global positions; a row sees those of all num_parts parts, which
        do not overlap. Part 1 is the first keys of the row's document, once its window has left them; until then they
        belong to part 0.

        positions: int64 [n], global query positions, sorted. Returns first, stop: int64 [n] each; the query sees the keys
        first <= j < stop. Both are non-decreasing and first <= stop; a row that sees nothing has first == stop, clamped into its
        own document (rows after the last document: to its end), so that both ends stay monotone.
        """
        self.check_lengths(seq_len_q, seq_len_k)
        if not 0 <= part < self.num_parts:
            raise ValueError(f"part={part}: this mask has {self.num_parts}")
        left, right, chunk, first_tokens, *_ = self._key
        at, low, high, prefix = self._place(np.asarray(positions, dtype=np.int64), seq_len_q, seq_len_k)
        if self.num_parts == 2:
            lead = low + np.maximum(prefix, first_tokens)
            has_left = at - left > lead
            if part == 1:
                stop = np.clip(np.where(has_left, lead, low), low, high)
                return np.broadcast_to(low, stop.shape), stop
        first, stop = low, high
        if chunk:
            first = low + (at - low) // chunk * chunk
            stop = first + chunk
        if right >= 0:
            ahead = at + (right + 1)
            ahead = ahead if self._prefixes is None else np.maximum(ahead, low + prefix)
            stop = np.minimum(ahead, stop) if chunk else ahead
        if left >= 0:
            behind = at - left
            if self.num_parts == 2:
                first = np.where(has_left, behind, low)
            else:
                first = np.maximum(behind, first) if chunk else behind
        first = np.clip(first, low, high) if first is not low else np.broadcast_to(low, at.shape)
        stop = np.clip(stop, low, high) if stop is not high else np.broadcast_to(high, at.shape)
        return first, stop

    def _place(self, positions: np.ndarray, seq_len_q: int, seq_len_k: int) -> tuple[np.ndarray, ...]:
        """Where each query stands among the keys: at, its position there, the range low .. high of its document, and how long
        a prefix that has."""
        prefix = np.int64(0)
        if self.cu_seqlens is None:
            at = positions if seq_len_k == seq_len_q else positions + (seq_len_k - seq_len_q)
            return at, np.int64(0), np.int64(seq_len_k), prefix if self._prefixes is None else self._prefixes[0]
        # side="right" takes the last of repeated boundaries, which is where the document that holds the row starts.
        document = np.searchsorted(self.cu_seqlens, positions, side="right")
        end = np.minimum(document, self.cu_seqlens.shape[0] - 1)
        keys = self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k
        low, high = keys[document - 1], keys[end]
        at = positions if self.cu_seqlens_k is None else positions + (high - self.cu_seqlens[end])
        if self._prefixes is not None:
            prefix = np.append(self._prefixes, 0)[document - 1]  # 0 for rows after the last document
        return at, low, high, prefix

    def with_documents(self, cu_seqlens: Any) -> Mask:
        """This mask over packed documents; prefix_lens becomes every document's. ValueError when it has other documents."""
        boundaries = read_boundaries("cu_seqlens", cu_seqlens)
        if self.cu_seqlens is not None:
            if not np.array_equal(self.cu_seqlens, boundaries):
                raise ValueError(f"cu_seqlens names other documents than those of {self!r}")
            return self
        prefixes = None if self.prefix_lens is None else self.prefix_lens[0]
        return Mask(self.causal, self.window_size, boundaries, None, prefixes, self.chunk_size, self.first_tokens)

    @property
    def spec(self) -> torch.Tensor:
        """int64 CPU tensor [8 + the lists] that `from_spec` turns into an equal mask; equal masks have equal specs."""
        cached = self.__dict__.get("_spec")
        if cached is None:
            import torch

            lists = (self.cu_seqlens, self.cu_seqlens_k, self._prefixes)
            counts = [-1 if x is None else x.shape[0] for x in lists]
            header = np.array([_SPEC_VERSION, *self._key[:4], *counts], dtype=np.int64)
            cached = torch.from_numpy(np.concatenate([header, *(x for x in lists if x is not None)]))
            object.__setattr__(self, "_spec", cached)
        return cached

    @classmethod
    def from_spec(cls, spec: torch.Tensor) -> Mask:
        """The mask that `spec` (int64 CPU [8 + the lists]) describes. Raises ValueError when it describes none."""
        values = spec.numpy()
        if values.ndim != 1 or values.shape[0] < _SPEC_HEADER or values[0] != _SPEC_VERSION:
            raise ValueError(f"not a mask spec of version {_SPEC_VERSION}: {values[:_SPEC_HEADER]}")
        left, right, chunk, first_tokens, *counts = (int(x) for x in values[1:_SPEC_HEADER])
        ends = _SPEC_HEADER + np.cumsum(np.maximum(counts, 0))
        if values.shape[0] != ends[-1]:
            raise ValueError(f"mask spec of length {values.shape[0]}: its header promises {ends[-1]}")
        lists = [None if count < 0 else values[end - count:end] for count, end in zip(counts, ends)]
        return cls(right == 0, (left, right), *lists, chunk or None, first_tokens)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        # Made anew: a hash of bytes differs between processes, and an unpickled array would be writeable.
        return Mask, (self.causal, self.window_size, self.cu_seqlens, self.cu_seqlens_k, self.prefix_lens, self.chunk_size,
                      self.first_tokens)

    def __repr__(self) -> str:
        # Equal masks print alike, whichever way they were written: ranks compare this text.
        left, right, chunk, first_tokens, *_ = self._key
        parts = [f"causal={right == 0}"]
        if left >= 0 or right > 0:
            parts.append(f"window_size={(left, right)}")
        for name, boundaries in (("cu_seqlens", self.cu_seqlens), ("cu_seqlens_k", self.cu_seqlens_k)):
            if boundaries is not None:
                long = f"<{len(boundaries) - 1} documents, {boundaries[-1]} tokens>"
                parts.append(f"{name}={boundaries.tolist() if len(boundaries) <= 12 else long}")
        if self._prefixes is not None:
            long = f"<{len(self._prefixes)} prefixes, {self._prefixes.sum()} tokens>"
            parts.append(f"prefix_lens={self._prefixes.tolist() if len(self._prefixes) <= 12 else long}")
        parts.extend(f"{name}={value}" for name, value in (("chunk_size", chunk), ("first_tokens", first_tokens)) if value)
        return f"Mask({', '.join(parts)})"
