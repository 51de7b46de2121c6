"""Which samples of an optimizer step each data-parallel replica takes: consecutive ones, or where documents are packed, dealt so
that all have about the same attention to compute. Either way a step has the same samples, and so the same loss and gradient."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringflash.data.balanced_replicas import deal, imbalance
from ringflash.data.packing import Samples
from ringflash.mask import Mask
from ringflash.work import Work


@dataclass(frozen=True)
class Dealt:
    """micro_batches[micro][dp_rank]: the numbers of the samples. imbalance: of the allowed pairs, what the costliest replica of
    each micro-batch has over what the mean one has; in_order: the same if consecutive samples had been dealt."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    imbalance: float = 1.0
    in_order: float = 1.0


class Replicas:
    """Deals the samples of `train` to dp replicas with num_micro_batches micro-batches each; masks: of the layers, causal."""

    def __init__(self, train: Samples, masks: Sequence[Mask], dp: int, num_micro_batches: int):
        self.train, self.dp, self.num_micro_batches = train, dp, num_micro_batches
        # Pairs of a document by its length. Masks are causal and count positions within documents: the first rows of a long
        # document see what those of a short one see.
        self._pairs = Work(masks, train.seq_len).prefix if dp > 1 and train.document_mask else None

    def deal(self, first: int) -> Dealt:
        """A step that begins with sample number `first`. All ranks find the same, without asking."""
        size = self.train.batch_size
        order = np.arange(self.num_micro_batches * self.dp).reshape(self.num_micro_batches, self.dp)
        figures = ()
        if self._pairs is not None:
            costs = np.array([self.pairs(first + i) for i in range(order.size)])
            dealt = deal(costs, self.dp)
            figures = imbalance(costs, dealt), imbalance(costs, order)
            order = dealt
        numbers = (first + order * size).tolist()
        return Dealt(tuple(tuple(tuple(range(n, n + size)) for n in micro) for micro in numbers), *figures)

    def pairs(self, sample: int) -> int:
        """Allowed (query, key) pairs of a sample, over all kinds of layer."""
        return int(self._pairs[np.diff(self.train.cu_seqlens(sample))].sum())
