"""Packed documents of random lengths, to show and to measure plans with."""
from __future__ import annotations

import numpy as np


def lognormal_documents(
    seq_len: int, sigma: float, seed: int, *, mean: int = 2048, longest: int = 65536, first: int | None = None
) -> tuple[int, ...]:
    """cu_seqlens of documents that fill seq_len tokens, in random order: lengths are lognormal with this mean and sigma, clipped to
    1 .. longest; the last one drawn is cut to fit. first: one document has this length, whatever is drawn."""
    draw = np.random.default_rng(seed)
    lengths = [] if first is None else [min(first, seq_len)]
    while sum(lengths) < seq_len:
        drawn = int(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma))
        lengths.append(min(max(drawn, 1), longest, seq_len - sum(lengths)))
    return (0, *np.cumsum(draw.permutation(lengths)).tolist())
