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
OPTION_MASKS = (
    "prefix", "prefix + window", "chunk", "full chunk", "chunk + window", "first tokens", "first tokens two-sided",
    "prefix + first tokens", "documents + prefix", "documents + prefix + window", "documents + chunk", "documents + first tokens",
    "full documents + chunk", "documents + prefix + first tokens")
CROSS_MASKS = (*MASKS[:5], *OPTION_MASKS[:8])  # documents of queries alone need equal lengths
CROSS_DOCUMENTS = tuple(name for name in (*MASKS, *OPTION_MASKS) if "documents" in name)


@dataclass(frozen=True)
class PlanCase:
    """A mask (as keywords), the layouts of q and of k, and how the plan is to route."""

    options: tuple[tuple[str, object], ...]
    layout: Layout
    layout_k: Layout
    routing: str = "auto"

    @cached_property
    def mask(self) -> Mask:
        return Mask(**dict(self.options))

    @cached_property
    def plan(self) -> Plan:
        return build_plan(self.mask, self.layout, self.layout_k, routing=self.routing)

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
    """All masks over a few random lengths of one layout and ring, short ones (empty shards) too, some of the masks with more
    options, and some with other keys; each with one of the routings, at random."""
    draw = random.Random(f"{kind} {cp_size} {seed}")

    def route() -> str:
        return draw.choice(("auto", "ring", "direct"))

    for name in MASKS:
        for seq_len in (draw.randint(1, 2 * cp_size), *(draw.randint(3, 60) for _ in range(lengths - 1))):
            layout = Layout(kind, seq_len, cp_size)
            yield PlanCase(mask_options(name, seq_len, draw), layout, layout, route())
    for name in draw.sample(OPTION_MASKS, 7):
        layout = Layout(kind, draw.choice((draw.randint(1, 2 * cp_size), draw.randint(3, 60))), cp_size)
        yield PlanCase(mask_options(name, layout.seq_len, draw), layout, layout, route())
    for name in draw.sample(CROSS_MASKS + CROSS_DOCUMENTS, 9):
        seq_len, seq_len_k = draw.randint(1, 40), draw.randint(1, 40)
        if name in CROSS_MASKS:
            options = mask_options(name, min(seq_len, seq_len_k), draw)
        else:
            options = mask_options(name, seq_len, draw, seq_len_k)
        yield PlanCase(options, Layout(kind, seq_len, cp_size), Layout(draw.choice(KINDS), seq_len_k, cp_size), route())


def mask_options(name: str, seq_len: int, draw: random.Random, seq_len_k: int | None = None) -> tuple[tuple[str, object], ...]:
    """Keywords of a Mask of this name, drawn at random; seq_len_k: with documents of the keys of their own, some empty."""
    options: dict[str, object] = {"causal": "full" not in name and "two-sided" not in name}
    if name.endswith("window"):
        options["window_size"] = (draw.randint(0, seq_len), draw.choice((-1, 0)))
    elif "two-sided" in name:
        options["window_size"] = (draw.randint(-1, seq_len // 2), draw.randint(-1, seq_len // 2))
    elif name == "left 0":
        options["window_size"] = (0, 0)
    documents = 1
    if "documents" in name:
        options["cu_seqlens"] = _boundaries(seq_len, draw)
        documents = len(options["cu_seqlens"]) - 1
        if seq_len_k is not None:
            options["cu_seqlens_k"] = _boundaries(seq_len_k, draw, documents)
    if "prefix" in name:
        prefixes = [draw.choice((0, 1, draw.randint(0, seq_len + 3), draw.randint(0, 4))) for _ in range(documents)]
        options["prefix_lens"] = tuple(prefixes) if "documents" in name else prefixes[0]
    if "chunk" in name:
        options["chunk_size"] = draw.choice((1, 2, draw.randint(1, seq_len + 2), draw.randint(1, 9)))
    if "first tokens" in name:
        options["first_tokens"] = draw.choice((1, draw.randint(1, seq_len + 2), draw.randint(1, 4)))
        options.setdefault("window_size", (draw.randint(0, max(seq_len // 3, 1)), -1))
    return tuple(options.items())


def _boundaries(seq_len: int, draw: random.Random, documents: int | None = None) -> tuple[int, ...]:
    """With empty documents; rows past the last document are dead. documents: how many (None: as it comes)."""
    last = draw.choice((seq_len, draw.randint(0, seq_len)))
    if documents is not None:
        return tuple(sorted([0] + [draw.randint(0, last) for _ in range(documents)]))
    inner = sorted(draw.randint(0, last) for _ in range(draw.randint(0, 5)))
    return tuple([0] * draw.randint(1, 2) + inner + [last] * draw.randint(1, 2))
