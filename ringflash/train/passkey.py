"""How often a key that was said once in a long text is found again at its end, by length of the text and depth of the key."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ringflash.train.evaluation import scored
from ringflash.train.plots import draw

if TYPE_CHECKING:
    from ringflash.train.trainer import Trainer


@dataclass(frozen=True)
class Recall:
    """keys[i][j]: of the keys at depths[j] of texts of lengths[i] tokens, the share of which every token was the model's first
    choice; tokens[i][j]: the share of their tokens. Under teacher forcing: after a wrong token the right one is given."""

    lengths: list[int]
    depths: list[float]  # 0 the start of the text, 1 right before the question
    keys: list[list[float]]
    tokens: list[list[float]]
    samples: int  # per length and depth

    def mean(self) -> float:
        return float(np.mean(self.keys))

    def row(self) -> dict:
        """As metrics.jsonl has it."""
        return {"lengths": self.lengths, "depths": self.depths, "keys": self.keys, "tokens": self.tokens, "samples": self.samples}

    def table(self) -> str:
        """A line per length, the share of keys found at each depth in per cent."""
        lines = ["passkey: keys found (%), by tokens of text and depth of the key",
                 " " * 12 + "".join(f"{depth:>8.2f}" for depth in self.depths)]
        return "\n".join(lines + [f"  {length:>10,}" + "".join(f"{100 * share:>8.0f}" for share in shares)
                                  for length, shares in zip(self.lengths, self.keys)])


@torch.no_grad()
def recall(trainer: Trainer) -> Recall | None:
    """Of trainer.data.passkey, spread over dp, each text over its ring; the same on every rank. None where nothing is asked.

    Only the rows before the answers' tokens have logits: a few per text."""
    options, world = trainer.cfg.eval.passkey, trainer.world
    if not trainer.data.passkey:
        return None
    count = options.depths * options.samples
    found = np.zeros((len(trainer.data.passkey), count))  # tokens of each key that came first
    for index, dataset in enumerate(trainer.data.passkey):
        for _, scores, sample in scored(trainer, dataset, count):
            found[index, sample] = float(scores.is_first.sum())
    # Each rank of a ring has seen some of a key's tokens.
    found = np.array(world.sum(*found.ravel().tolist())).reshape(-1, options.samples, options.depths)
    first = trainer.data.passkey[0]
    return Recall([dataset.seq_len for dataset in trainer.data.passkey], list(first.depths),
                  (found == options.key_tokens).mean(1).tolist(), (found / options.key_tokens).mean(1).tolist(), options.samples)


def plot_recall(path: Path, recall: Recall) -> None:
    """A heat map as a PNG: lengths across, depths down."""
    def paint(axes) -> None:
        shares = np.array(recall.keys).T
        axes.grid(False)
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(shares.shape[1]), [f"{length:,}" for length in recall.lengths])
        axes.set_yticks(range(shares.shape[0]), [f"{depth:.2f}" for depth in recall.depths])
        axes.set_xlabel("tokens of text")
        axes.set_ylabel("depth of the key\n(0 start, 1 end)")
        for (row, column), share in np.ndenumerate(shares):
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=8)
        axes.set_title(f"keys found (%), {recall.samples} per cell", fontsize=9)
        axes.figure.colorbar(image, ax=axes, fraction=0.08)

    draw(path, paint, size=(2.5 + 0.9 * len(recall.lengths), 1.8 + 0.45 * len(recall.depths)))
