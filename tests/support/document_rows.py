"""Rows of packed documents, drawn at random, as intervals of keys."""
from __future__ import annotations

import random

import torch
from torch import Tensor


def documents(rng: random.Random, num_q: int, num_k: int) -> tuple[Tensor, Tensor]:
    """k_lo, k_hi int32 [num_q]: documents of which rows, keys or both are missing, causal, full or with a window."""
    cuts = sorted(rng.randint(0, num_q) for _ in range(rng.randint(0, 5)))
    lo, hi, key = [], [], 0
    for first, stop in zip([0, *cuts], [*cuts, num_q]):
        start, key = key, min(num_k, key + rng.choice((0, stop - first, rng.randint(0, num_k))))
        kind = rng.choice(("full", "causal", "window"))
        for i in range(stop - first):
            end = key if kind == "full" else min(key, start + i + 1)
            lo.append(min(max(start, end - 150) if kind == "window" else start, end))
            hi.append(end)
        key = min(num_k, key + rng.choice((0, 0, rng.randint(0, num_k // 4))))
    return torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32)
