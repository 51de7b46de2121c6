"""The transpose of a mask: which queries see each key. With it, a plan of K and V that travel to queries is one of queries that
travel to K and V (Note [What rotates in the backward] in DESIGN.md). numpy alone.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringflash.layout import Layout
from ringflash.mask import Mask
from ringflash.ring.cache import BoundedCache

_ends = BoundedCache(max_weight=128 * 2**20)  # bytes


@dataclass(frozen=True)
class TransposedMask:
    """`mask` over seq_len_q queries and seq_len_k keys, seen from the keys: it serves a plan as a Mask does, and gives each key an
    interval of queries in global positions (or two, as the mask gives each query)."""

    mask: Mask
    seq_len_q: int
    seq_len_k: int

    @property
    def num_parts(self) -> int:
        return self.mask.num_parts

    def check_lengths(self, num_rows: int, num_columns: int | None) -> None:
        """num_rows: of keys, num_columns: of queries. Raises ValueError as Mask.check_lengths does."""
        self.mask.check_lengths(self.seq_len_q if num_columns is None else num_columns, num_rows)

    def bounds(self, positions: np.ndarray, num_rows: int, num_columns: int, part: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """first, stop: int64 [n], the queries first <= i < stop that see each key of `positions` (int64 [n], sorted, global) by
        the mask's part-th interval. Both are non-decreasing, since those of the mask are."""
        def make() -> tuple[np.ndarray, np.ndarray]:
            queries = np.arange(self.seq_len_q, dtype=np.int64)
            first, stop = self.mask.bounds(queries, self.seq_len_q, self.seq_len_k, part)
            if (first > stop).any() or (first[1:] < first[:-1]).any() or (stop[1:] < stop[:-1]).any():
                raise AssertionError(f"{self.mask!r}: the ends of its intervals must be ordered and must not decrease")
            # Query i sees key j when first[i] <= j < stop[i], and both conditions are monotone in i: so the first such i is the
            # number of queries with stop <= j, and the last + 1 that of those with first <= j.
            return tuple(np.cumsum(np.bincount(end, minlength=self.seq_len_k + 1))[: self.seq_len_k] for end in (stop, first))

        whole = _ends.get_or_make((self, part), make, lambda made: sum(end.nbytes for end in made))
        return whole[0][positions], whole[1][positions]

    def __repr__(self) -> str:
        return f"transpose of {self.mask!r}"


def transpose(mask: Mask, layout: Layout, layout_k: Layout) -> tuple[TransposedMask, Layout, Layout]:
    """What a plan in which queries travel is made of: the transposed mask, the layout of what stays, that of what travels."""
    return TransposedMask(mask, layout.seq_len, layout_k.seq_len), layout_k, layout
