"""Which heads each of the Ulysses ranks computes that hold one place of the ring (Note [Ulysses] in DESIGN.md). No torch."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ringflash.ring.rotate import Heads


def valid_degrees(num_heads: int) -> list[int]:
    return [n for n in range(1, num_heads + 1) if num_heads % n == 0]


def check_degree(degree: int, num_heads: int) -> None:
    """ValueError unless `degree` ranks can share num_heads query heads evenly."""
    valid = valid_degrees(num_heads)
    if degree not in valid:
        nearest = [max((n for n in valid if n < degree), default=1), *[n for n in valid if n > degree][:1]]
        raise ValueError(f"group: {degree} Ulysses ranks must divide num_heads={num_heads} of q; nearest valid: "
                         f"{', '.join(map(str, nearest))}")


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each of `size` Ulysses ranks computes.

    Query heads are cut into equal runs. Each rank needs the KV heads that its query heads read: where `size` divides
    num_kv_heads, a run of its own; else a KV head goes to all ranks that read it, and where a run of query heads ends
    inside a group of GQA it stands several times on a rank, once for each `per_kv_head` of its query heads: kernels want groups of one size.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    @property
    def per_rank(self) -> int:
        return self.num_heads // self.size

    @property
    def _per_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def per_kv_head(self) -> int:
        """Query heads per KV head on a rank."""
        return math.gcd(self._per_group, self.per_rank)

    @property
    def local_kv_heads(self) -> int:
        return self.per_rank // self.per_kv_head

    @property
    def is_replicated(self) -> bool:
        """Does a KV head stand more than once, on one rank or on several?"""
        return self.local_kv_heads * self.size > self.num_kv_heads

    def queries(self, rank: int) -> tuple[int, int]:
        """First and past-the-last query head of a rank."""
        return rank * self.per_rank, (rank + 1) * self.per_rank

    def keys(self, rank: int) -> tuple[int, int]:
        """First and past-the-last KV head that a rank reads."""
        start, stop = self.queries(rank)
        return start // self._per_group, (stop - 1) // self._per_group + 1

    def copies(self, rank: int) -> list[int]:
        """Which of keys(rank), counted from 0, each of its local_kv_heads is."""
        start, stop = self.queries(rank)
        first = self.keys(rank)[0]
        return [head // self._per_group - first for head in range(start, stop, self.per_kv_head)]

    def local(self, heads: Heads) -> Heads:
        """What a row weighs on the ring of one rank's heads."""
        return replace(heads, num_heads=self.per_rank, num_kv_heads=self.local_kv_heads)
