"""Mask: which keys each query sees, as a value in global positions.

Every mask gives each query row one interval of keys (Note [Intervals] in DESIGN.md). numpy alone, but for `.spec`.
"""
from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_SPEC_VERSION = 1
_MAX_WINDOW = 2**62  # a position plus this is still an int64
_SPEC_HEADER = 4  # version, left, right, number of boundaries (-1: no documents)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Mask:
    """What a query may attend to.

    causal: key position <= query position. False: no such bound.
    window_size: (left, right) in flash-attention's sense: a query at position p sees keys p - left .. p + right, -1 meaning
        unlimited. (63, 0) is itself and 63 before. With causal=True, right must be -1 or 0, which mean the same.
    cu_seqlens: document boundaries [N+1], ints (list, tuple, numpy or torch, any device: read here, once): starts at 0, does not
        decrease; repeats are empty documents. Queries see their own document only. Rows from cu_seqlens[-1] on see nothing.
    cu_seqlens_k, prefix_lens, chunk_size, first_tokens: not available yet.

    When the lengths of q and k differ, the last query sits at the last key: query i at key position i + (Sk - Sq).
    A row that sees nothing has out 0, lse -inf and gradient 0. Masks are equal when they allow the same pairs by the same
    description: causal=True equals window_size right 0; they are hashable.

    Raises ValueError for what no mask can mean, NotImplementedError naming an option that is not available yet.
    """

    causal: bool
    window_size: tuple[int, int]
    cu_seqlens: np.ndarray | None  # int64 [N+1], read-only
    _key: tuple[int, int, bytes | None]
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
        for name, value in (("cu_seqlens_k", cu_seqlens_k), ("prefix_lens", prefix_lens), ("chunk_size", chunk_size)):
            if value is not None:
                raise NotImplementedError(f"Mask({name}=...) is not available yet")
        if first_tokens != 0:
            raise NotImplementedError("Mask(first_tokens=...) is not available yet")
        if not isinstance(causal, (bool, np.bool_)):
            raise ValueError(f"causal={causal!r}: must be True or False")
        left, right = _check_window(window_size, bool(causal))
        boundaries = None if cu_seqlens is None else _read_boundaries(cu_seqlens)

        put = object.__setattr__
        put(self, "causal", bool(causal))
        put(self, "window_size", (left, right))
        put(self, "cu_seqlens", boundaries)
        put(self, "_key", (left, 0 if causal else right, None if boundaries is None else boundaries.tobytes()))
        put(self, "_hash", hash(self._key))
        if "torch" in sys.modules:
            # Made here and not when it is first asked for: a compiled graph must find a tensor, whose length it can leave open.
            # Numpy arrays that it met while tracing would recompile for every number of documents.
            _ = self.spec

    def check_lengths(self, seq_len_q: int, seq_len_k: int) -> None:
        """Raises ValueError when this mask cannot describe seq_len_q queries over seq_len_k keys."""
        if self.cu_seqlens is None:
            return
        if seq_len_q != seq_len_k:
            raise ValueError(
                f"cu_seqlens with seq_len_q={seq_len_q} and seq_len_k={seq_len_k}: packed documents of different query and key "
                "lengths need cu_seqlens_k, which is not available yet"
            )
        if self.cu_seqlens[-1] > seq_len_k:
            raise ValueError(f"cu_seqlens[-1]={self.cu_seqlens[-1]}: documents must end within seq_len={seq_len_k}")

    def bounds(self, positions: np.ndarray, seq_len_q: int, seq_len_k: int) -> tuple[np.ndarray, np.ndarray]:
        """The interval of keys of each query, in global positions.

        positions: int64 [n], global query positions, sorted. Returns first, stop: int64 [n] each; the query sees the keys
        first <= j < stop. Both are non-decreasing and first <= stop; a row that sees nothing has first == stop, clamped into its
        own document (rows after the last document: to its end), so that both ends stay monotone.
        """
        self.check_lengths(seq_len_q, seq_len_k)
        diagonal = np.asarray(positions, dtype=np.int64)
        if seq_len_k != seq_len_q:
            diagonal = diagonal + (seq_len_k - seq_len_q)
        left, right, _ = self._key
        if self.cu_seqlens is None:
            low, high = np.int64(0), np.int64(seq_len_k)
        else:
            # side="right" takes the last of repeated boundaries, which is where the document that holds the row starts.
            document = np.searchsorted(self.cu_seqlens, diagonal, side="right")
            low = self.cu_seqlens[document - 1]
            high = self.cu_seqlens[np.minimum(document, self.cu_seqlens.shape[0] - 1)]
        first = np.clip(diagonal - left, low, high) if left >= 0 else np.broadcast_to(low, diagonal.shape)
        stop = np.clip(diagonal + (right + 1), low, high) if right >= 0 else np.broadcast_to(high, diagonal.shape)
        return first, stop

    @property
    def spec(self) -> torch.Tensor:
        """int64 CPU tensor [4 + boundaries] that `from_spec` turns into an equal mask; equal masks have equal specs."""
        cached = self.__dict__.get("_spec")
        if cached is None:
            import torch

            left, right, _ = self._key
            boundaries = self.cu_seqlens if self.cu_seqlens is not None else np.empty(0, dtype=np.int64)
            count = -1 if self.cu_seqlens is None else boundaries.shape[0]
            header = np.array([_SPEC_VERSION, left, right, count], dtype=np.int64)
            cached = torch.from_numpy(np.concatenate([header, boundaries]))
            object.__setattr__(self, "_spec", cached)
        return cached

    @classmethod
    def from_spec(cls, spec: torch.Tensor) -> Mask:
        """The mask that `spec` (int64 CPU [4 + boundaries]) describes. Raises ValueError when it describes none."""
        values = spec.numpy()
        if values.ndim != 1 or values.shape[0] < _SPEC_HEADER or values[0] != _SPEC_VERSION:
            raise ValueError(f"not a mask spec of version {_SPEC_VERSION}: {values[:_SPEC_HEADER]}")
        _, left, right, count = (int(x) for x in values[:_SPEC_HEADER])
        if values.shape[0] != _SPEC_HEADER + max(count, 0):
            raise ValueError(f"mask spec of length {values.shape[0]}: its header promises {_SPEC_HEADER + max(count, 0)}")
        boundaries = None if count < 0 else values[_SPEC_HEADER:]
        return cls(causal=right == 0, window_size=(left, right), cu_seqlens=boundaries)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        # Made anew: a hash of bytes differs between processes, and an unpickled array would be writeable.
        return Mask, (self.causal, self.window_size, self.cu_seqlens)

    def __repr__(self) -> str:
        # Equal masks print alike, whichever way they were written: ranks compare this text.
        left, right, _ = self._key
        causal = right == 0
        parts = [f"causal={causal}"]
        if left >= 0 or right > 0:
            parts.append(f"window_size={(left, right)}")
        if self.cu_seqlens is not None:
            shown = self.cu_seqlens.tolist()
            long = f"<{len(shown) - 1} documents, {shown[-1]} tokens>"
            parts.append(f"cu_seqlens={shown if len(shown) <= 12 else long}")
        return f"Mask({', '.join(parts)})"


def _check_window(window_size: Any, causal: bool) -> tuple[int, int]:
    try:
        left, right = (operator.index(x) for x in window_size)
    except (TypeError, ValueError):
        raise ValueError(f"window_size={window_size!r}: must be two ints (left, right), each >= 0, or -1 for unlimited") from None
    for name, value in (("left", left), ("right", right)):
        if value < -1:
            raise ValueError(f"window_size={(left, right)}: {name}={value} must be >= 0, or -1 for unlimited")
        if value > _MAX_WINDOW:
            raise ValueError(f"window_size={(left, right)}: {name}={value} must be <= {_MAX_WINDOW}; -1 is unlimited")
    if causal and right > 0:
        raise ValueError(
            f"window_size={(left, right)} with causal=True: a causal query sees no later key: right must be 0 or -1, not {right}"
        )
    return left, right


def _read_boundaries(cu_seqlens: Any) -> np.ndarray:
    """cu_seqlens as a read-only int64 array; a tensor on a device is copied to the host here, once."""
    if hasattr(cu_seqlens, "detach"):  # a torch tensor, without importing torch
        if cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
            raise ValueError(f"cu_seqlens: must be ints, got dtype {cu_seqlens.dtype}")
        cu_seqlens = cu_seqlens.detach().cpu().numpy()
    values = np.asarray(cu_seqlens)
    if values.dtype.kind not in "iu":
        raise ValueError(f"cu_seqlens: must be ints, got dtype {values.dtype}")
    if values.ndim != 1 or values.shape[0] == 0:
        raise ValueError(f"cu_seqlens: must be 1-D with at least the boundary 0, got shape {values.shape}")
    boundaries = values.astype(np.int64)  # a copy: what the caller changes later does not reach the mask
    if boundaries[0] != 0:
        raise ValueError(f"cu_seqlens: must start at 0, starts at {boundaries[0]}")
    falls = np.flatnonzero(np.diff(boundaries) < 0)
    if falls.size:
        i = int(falls[0])
        fall = f"cu_seqlens[{i + 1}]={boundaries[i + 1]} < cu_seqlens[{i}]={boundaries[i]}"
        raise ValueError(f"cu_seqlens: must not decrease, but {fall}")
    boundaries.flags.writeable = False
    return boundaries
