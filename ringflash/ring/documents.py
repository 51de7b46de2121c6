"""Packed documents of random lengths, to show and to measure plans with."""
from __future__ import annotations

import numpy as np


def lognormal_documents(
    seq_len: int, sigma: float, seed: int, *, mean: int = 2048, longest: int = 65536, first: int | None = None
) -> tuple[int, ...]:
    """cu_seqlens of documents that fill seq_len tokens, in random order: lengths are lognormal with this mean and sigma, clipped
    to 1 .. longest; the last one drawn is cut to fit. first: one document has this length, whatever is drawn.

    Raises ValueError for a sigma outside [0, 10], a negative seed, or a length below 1 (or any from 2**62 on).
    """
    if not 0 <= sigma <= 10:
        raise ValueError(f"documents: sigma={sigma}: must lie in [0, 10]")
    for name, value, least in (("seed", seed, 0), ("mean", mean, 1), ("longest", longest, 1), ("first", first, 1)):
        if value is not None and not least <= value < 2**62:
            raise ValueError(f"documents: {name}={value}: must be >= {least} and below 2**62")
    draw = np.random.default_rng(seed)
    lengths = [] if first is None else [min(first, seq_len)]
    rest = seq_len - sum(lengths)
    while rest > 0:
        drawn = int(draw.lognormal(np.log(mean) - sigma**2 / 2, sigma))
        lengths.append(min(max(drawn, 1), longest, rest))
        rest -= lengths[-1]
    return (0, *np.cumsum(draw.permutation(lengths)).tolist())


def parse_documents(text: str, seq_len: int) -> tuple[int, ...]:
    """cu_seqlens of "lognormal:sigma=1.0,seed=0": after the colon, arguments of lognormal_documents; sigma and seed are needed.

    Raises ValueError for anything else.
    """
    name, _, rest = text.partition(":")
    kinds = {"sigma": float, "seed": int, "mean": int, "longest": int, "first": int}
    try:
        values = {key: kinds[key](value) for key, _, value in (part.partition("=") for part in rest.split(","))}
    except (KeyError, ValueError):
        values = {}
    if name != "lognormal" or not {"sigma", "seed"} <= set(values):
        raise ValueError(f"documents {text!r}: must be like lognormal:sigma=1.0,seed=0, with any of {', '.join(kinds)}")
    return lognormal_documents(seq_len, values.pop("sigma"), values.pop("seed"), **values)
