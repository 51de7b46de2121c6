"""Random plans together with the truth about them, pair by pair."""
from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ringflash.layout import KINDS, Layout
from ringflash.mask import Mask
from ringflash.ring.plan import Plan, build_plan
from ringflash.tests.support.masks import allowed_pairs

SIZES = (1, 2, 3, 4, 8)
MASKS = ("causal", "full", "window", "two-sided", "left 0", "documents", "documents + window", "full documents")
CROSS_MASKS = MASKS[:5]  # documents need equal lengths


@dataclass(frozen=True)
class PlanCase:
    """A mask (as keywords), the layouts of q and of k."""

    options: tuple[tuple[str, object], ...]
    layout: Layout
    layout_k: Layout

    @cached_property
    def mask(self) -> Mask:
        return Mask(**dict(self.options))

    @cached_property
    def plan(self) -> Plan:
        return build_plan(self.mask, self.layout, self.layout_k)

    @cached_property
    def allowed(self) -> np.ndarray:
        """bool [Sq, Sk], from the definition."""
        q, k = (torch.arange(layout.seq_len) for layout in (self.layout, self.layout_k))
        options = {"causal": True, **dict(self.options)}
        return allowed_pairs(q, k, seq_len_q=len(q), seq_len_k=len(k), **options).numpy()

    def pairs_of(self, rank: int, owner: int) -> np.ndarray:
        """int64 [queries of rank, key rows of owner]: the allowed pairs between two shards, in local rows."""
        return self.allowed[np.ix_(self.layout.positions(rank), self.layout_k.positions(owner))].astype(np.int64)


def cases(kind: str, cp_size: int, seed: int = 0, lengths: int = 3) -> Iterator[PlanCase]:
    """All masks over a few random lengths of one layout and ring, short ones (empty shards) too, then some with other keys."""
    draw = random.Random(f"{kind} {cp_size} {seed}")
    for name in MASKS:
        for seq_len in (draw.randint(1, 2 * cp_size), *(draw.randint(3, 60) for _ in range(lengths - 1))):
            layout = Layout(kind, seq_len, cp_size)
            yield PlanCase(_options(name, seq_len, draw), layout, layout)
    for name in CROSS_MASKS:
        seq_len, seq_len_k = draw.randint(1, 40), draw.randint(1, 40)
        options = _options(name, min(seq_len, seq_len_k), draw)
        yield PlanCase(options, Layout(kind, seq_len, cp_size), Layout(draw.choice(KINDS), seq_len_k, cp_size))


def _options(name: str, seq_len: int, draw: random.Random) -> tuple[tuple[str, object], ...]:
    options: dict[str, object] = {"causal": name not in ("full", "two-sided", "full documents")}
    if name in ("window", "documents + window"):
        options["window_size"] = (draw.randint(0, seq_len), draw.choice((-1, 0)))
    elif name == "two-sided":
        options["window_size"] = (draw.randint(-1, seq_len // 2), draw.randint(-1, seq_len // 2))
    elif name == "left 0":
        options["window_size"] = (0, 0)
    if "documents" in name:
        last = draw.choice((seq_len, draw.randint(0, seq_len)))  # rows past the last document are dead
        inner = sorted(draw.randint(0, last) for _ in range(draw.randint(0, 5)))
        options["cu_seqlens"] = tuple([0] * draw.randint(1, 2) + inner + [last] * draw.randint(1, 2))  # with empty documents
    return tuple(options.items())
