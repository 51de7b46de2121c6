"""Evaluation on the training path: the held-out loss, the same for every dp and cp."""
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ringflash.train.trainer import Trainer


@torch.no_grad()
def evaluate(trainer: Trainer) -> tuple[float, int]:
    """(mean held-out loss, valid tokens) over the first eval_sequences held-out samples, spread over dp; the same path as
    training, and the same loss for every dp and cp."""
    world, heldout = trainer.world, trainer.data.heldout
    trainer.model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    valid = 0
    for sample in range(world.dp_rank, min(trainer.cfg.train.eval_sequences, heldout.num_samples), world.dp):
        sharded = trainer.shard(heldout.batch(sample, 0, 0, num_micro_batches=1, dp_size=1))
        loss_sum += trainer.loss_sum(sharded).double()
        valid += sharded.num_valid
    # Every rank of a ring has the ring's count.
    total, count = world.sum(float(loss_sum), valid)
    return total / max(count / world.cp, 1), round(count / world.cp)
