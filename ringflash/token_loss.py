"""The cross-entropy of each row of a linear head, and whether its label was the model's first choice; without gradients."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .loss import CHUNK_ROWS, IGNORE_INDEX, _chunk, _operand_dtype


class TokenLoss(NamedTuple):
    """Of every row, in the shape of labels. Rows without a label: 0 and False."""

    loss: Tensor  # fp32 (fp64 if hidden or weight is fp64), -log softmax(logits)[label] in nats
    is_first: Tensor  # bool, whether the label has the largest logit; of equal ones the lowest id counts as the largest


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_rows: int = CHUNK_ROWS,
                 ignore_index: int = IGNORE_INDEX) -> TokenLoss:
    """The terms of chunked_cross_entropy's sum, with the same logits, chunk_rows rows of them at a time.

    hidden  [..., D]  fp16, bf16, fp32 or fp64
    weight  [V, D]
    labels  [...]     int64, ignore_index where a row has no label; leading dims as in hidden

    Only rows with a label have logits, so a task with few answers costs few. Waits for the device once, to count those rows.
    """
    labels_flat, hidden_flat = labels.reshape(-1), hidden.reshape(-1, hidden.shape[-1])
    operand = _operand_dtype(hidden, weight)
    dtype = torch.float64 if operand == torch.float64 else torch.float32
    loss = torch.zeros(labels_flat.shape, dtype=dtype, device=hidden.device)
    is_first = torch.zeros(labels_flat.shape, dtype=torch.bool, device=hidden.device)
    labelled = (labels_flat != ignore_index).nonzero()[:, 0]
    with torch.autocast(hidden.device.type, enabled=False):
        w = weight.to(operand)
        for rows in labelled.split(chunk_rows):
            _, target, _, logits, lse = _chunk(hidden_flat[rows], w, labels_flat[rows], slice(None), ignore_index, dtype)
            loss[rows] = lse - logits.gather(1, target[:, None])[:, 0]
            is_first[rows] = logits.argmax(1) == target
    return TokenLoss(loss.view(labels.shape), is_first.view(labels.shape))
