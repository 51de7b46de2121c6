"""Several datasets served as one, by weight: which sample comes from which is decided by its number and the seed alone."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .packing import PackedDataset, Samples, permutation

SLOTS = 1024  # of a block: weights are kept to this precision
_MIXTURE = 2  # the shuffle of a block, beside the two of an epoch


class MixedDataset(Samples):
    """Samples of several datasets of the same seq_len.

    parts    the datasets; each goes through its own samples in order, over and over
    weights  shares of the samples (not of the text), any positive numbers

    Every block of 1024 samples holds each part's share, rounded to whole samples but at least one, in a shuffled order. So sample n
    is sample k of one part, both known without counting from the start. Raises ValueError for weights that do not fit the parts.
    """

    def __init__(self, parts: Sequence[PackedDataset], weights: Sequence[float], *, seed: int = 0):
        first = parts[0]
        if len({(part.seq_len, part.document_mask, part.batch_size) for part in parts}) != 1:
            raise ValueError("the parts of a mixture must have one seq_len, document_mask and batch_size")
        self.parts, self.seed, self.quotas = tuple(parts), seed, quotas(weights, len(parts))
        self.seq_len, self.document_mask, self.batch_size = first.seq_len, first.document_mask, first.batch_size
        self.num_samples = sum(part.num_samples for part in parts)
        self._slots = np.repeat(np.arange(len(parts)), self.quotas)
        self._block: tuple[int, np.ndarray] = (-1, self._slots)

    def place(self, sample: int) -> tuple[int, int]:
        """(part, number of the sample in it)."""
        if sample < 0:
            raise IndexError(f"sample={sample}: must be at least 0")
        block, slot = divmod(sample, SLOTS)
        known, order = self._block
        if known != block:
            order = self._slots[permutation(SLOTS, self.seed, block, _MIXTURE)]
            self._block = block, order  # one assignment: a thread that prefetches may be here too
        part = int(order[slot])
        return part, block * int(self.quotas[part]) + int(np.count_nonzero(order[:slot] == part))

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        """As PackedDataset.read."""
        part, number = self.place(sample)
        return self.parts[part].read(number, positions)

    def cu_seqlens(self, sample: int) -> np.ndarray:
        """As PackedDataset.cu_seqlens."""
        part, number = self.place(sample)
        return self.parts[part].cu_seqlens(number)

    def description(self) -> dict:
        """As PackedDataset.description."""
        return {"mixture": [part.description() for part in self.parts], "quotas": self.quotas.tolist(), "seed": self.seed}

    def batch_hash(self, samples: Sequence[int]) -> int:
        """As PackedDataset.batch_hash."""
        hashes = [self.parts[part].batch_hash([number]) for part, number in map(self.place, samples)]
        return int.from_bytes(hashlib.blake2b(repr(hashes).encode(), digest_size=8).digest(), "little") >> 1


def quotas(weights: Sequence[float], num_parts: int) -> np.ndarray:
    """int64 [num_parts], the samples of each part in a block of SLOTS: largest remainders, at least 1. Raises ValueError."""
    shares = np.asarray(weights, np.float64)
    if shares.shape != (num_parts,) or not np.isfinite(shares).all() or not (shares > 0).all() or num_parts > SLOTS:
        raise ValueError(f"data.weights={list(weights)}: must be {num_parts} finite numbers above 0, one for each source of "
                         f"data.mixture (at most {SLOTS})")
    exact = 1 + shares / shares.sum() * (SLOTS - num_parts) if (shares / shares.sum() * SLOTS < 1).any() else \
        shares / shares.sum() * SLOTS
    whole = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - whole), kind="stable")
    whole[order[:SLOTS - int(whole.sum())]] += 1
    return whole
