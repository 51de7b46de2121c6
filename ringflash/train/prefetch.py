"""The next step's rows, read by a thread while this step computes."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ringflash import Layout, Mask
from ringflash.batch_rows import sorted_union
from ringflash.data import LazyTokens
from ringflash.data.packing import Samples

Read = dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]


def wanted_rows(name: str, seq_len: int, cp: int, ulysses: int, cp_rank: int, masks: Sequence[Mask],
                cu_seqlens: np.ndarray | None) -> np.ndarray:
    """int64, rising: the rows that a rank has of a sample, and their successors (the labels)."""
    if cu_seqlens is not None:
        masks = [mask.with_documents(cu_seqlens) for mask in masks]
    own = Layout(name, seq_len, cp // ulysses, tuple(masks), ulysses).positions(cp_rank)
    return sorted_union(own, own[own + 1 < seq_len] + 1)


class Prefetcher:
    """Reads ahead for one rank; what it has not read, or not yet been asked for, is read by the step as ever: it changes times only.

    rows(samples) -> int64 [n], rising: what this rank will want of a micro-batch of these samples.
    """

    def __init__(self, dataset: Samples, rows: Callable[[tuple[int, ...]], np.ndarray]):
        self.dataset, self.rows = dataset, rows
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ringflash-prefetch")
        self._pending: Future[Read] | None = None

    def start(self, micro_batches: Sequence[tuple[int, ...]]) -> None:
        """Begins to read these micro-batches' rows, each named by its samples."""
        self._pending = self._thread.submit(self._read, list(micro_batches))

    def give(self, batches: Sequence[LazyTokens]) -> None:
        """Waits for what was started, and hands it to those that it was read for."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.exception() is not None:
            # The step reads it again and fails in shard_batch, where the other ranks of the ring hear of it.
            return
        read = pending.result()
        for tokens in batches:
            if tokens.samples in read:
                tokens.take(*read[tokens.samples])

    def _read(self, micro_batches: list[tuple[int, ...]]) -> Read:
        read = {}
        for samples in micro_batches:
            rows = self.rows(samples)
            read[samples] = rows, LazyTokens(self.dataset, samples)[..., rows]
        return read
