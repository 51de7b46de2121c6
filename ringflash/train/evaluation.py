"""Evaluation on the training path: the held-out loss, whole and by position, the same for every dp and cp. Note [Evaluation].

Every loss is that of one token: a sum over ranks, in fp64, is all that the spread over them changes. No gradients are kept, and
logits exist a chunk of rows at a time, so it needs less memory than a training step.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ringflash.data.packing import Samples
from ringflash.layout import Layout
from ringflash.sharding import IGNORE, ShardedBatch
from ringflash.token_loss import TokenLoss
from ringflash.train.sharded import reshard

if TYPE_CHECKING:
    from ringflash.train.trainer import Trainer


@dataclass(frozen=True)
class PositionLoss:
    """Of the rows with start <= position < stop: their mean loss in nats and how many have a label."""

    start: int
    stop: int
    loss: float
    tokens: int


class Evaluation(NamedTuple):
    """by_position: a row's position is the number of tokens that it can look back on: those before it in its document (as far as
    the sample has it), or without document masks in the sample. From powers of two to powers of two; empty ones are left out."""

    loss: float  # mean over the valid tokens, nats
    tokens: int
    by_position: list[PositionLoss]

    def rows(self) -> list[dict]:
        """by_position as metrics.jsonl has it."""
        return [dataclasses.asdict(bucket) for bucket in self.by_position]


class Interrupted(Exception):
    """Some rank was told to stop: all of them raise it after the same sample, and what was measured so far is dropped."""


@torch.no_grad()
def evaluate(trainer: Trainer) -> Evaluation:
    """Of the first eval_sequences held-out samples, spread over dp. Raises Interrupted."""
    world, heldout = trainer.world, trainer.data.heldout
    num_buckets = int(bucket_of(np.array(heldout.seq_len - 1))) + 1
    sums, counts = (torch.zeros(num_buckets, dtype=torch.float64, device=world.device) for _ in range(2))
    for sharded, scores, _ in scored(trainer, heldout, min(trainer.cfg.train.eval_sequences, heldout.num_samples)):
        bucket = torch.from_numpy(bucket_of(look_back(sharded.layout, world.cp_rank))).to(world.device)
        # fp64: a million fp32 terms of the same sign would lose three digits of the mean.
        sums.index_add_(0, bucket, scores.loss.double().sum(0))
        counts.index_add_(0, bucket, (sharded.labels != IGNORE).double().sum(0))
    total = world.sum(*sums.tolist(), *counts.tolist())
    by_position = [PositionLoss(1 << index >> 1, 1 << index, loss / count, round(count))
                   for index, (loss, count) in enumerate(zip(total[:num_buckets], total[num_buckets:])) if count]
    tokens = round(sum(total[num_buckets:]))
    return Evaluation(sum(total[:num_buckets]) / max(tokens, 1), tokens, by_position)


def scored(trainer: Trainer, dataset: Samples, count: int) -> Iterator[tuple[ShardedBatch, TokenLoss, int]]:
    """(this rank's rows, their losses, the number of the sample) of those of samples 0 .. count - 1 that are this rank's ring's;
    under torch.no_grad. All ranks must come here, and go through to the end, or to Interrupted."""
    world = trainer.world
    trainer.model.eval()
    # The same number of forwards on every rank, as sharded weights want it: a ring without a sample of its own repeats the last.
    for first in range(0, count, world.dp):
        sample = min(first + world.dp_rank, count - 1)
        sharded = trainer.shard(dataset.batch(sample, 0, 0, num_micro_batches=1, dp_size=1))
        scores = token_losses(trainer, sharded)
        if sample == first + world.dp_rank:
            yield sharded, scores, sample
        if world.sum(float(trainer.asked_to_stop()))[0]:
            reshard(trainer.model)
            raise Interrupted
    reshard(trainer.model)


def token_losses(trainer: Trainer, sharded: ShardedBatch) -> TokenLoss:
    """Of this rank's rows [B, S_local]; their sum is what training's loss is made of."""
    with torch.autocast(trainer.world.device.type, dtype=torch.bfloat16, enabled=trainer.dtype == torch.bfloat16):
        return trainer.model(sharded.tokens, sharded.positions, sharded.labels, layout=sharded.layout, reduction="none")


def look_back(layout: Layout, rank: int) -> np.ndarray:
    """int64 [n]: how many tokens of its document precede each row of a rank; without documents, of the sequence."""
    rows = layout.positions(rank)
    boundaries = next((mask.cu_seqlens for mask in layout.masks if mask.cu_seqlens is not None), None)
    return rows if boundaries is None else rows - boundaries[np.searchsorted(boundaries, rows, side="right") - 1]


def bucket_of(positions: np.ndarray) -> np.ndarray:
    """int64 [n] of positions >= 0: 0 for 0, else 1 + floor(log2(position))."""
    return np.frexp(positions.astype(np.float64))[1].astype(np.int64)
