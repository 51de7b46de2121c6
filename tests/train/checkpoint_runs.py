"""Runs with checkpoints for the tests: what they leave behind, and a stop at a chosen step."""
import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import torch
from train_ranks import text, tiny

from ringflash.config import OptimConfig
from ringflash.ring import watchdog
from ringflash.train.loop import train
from ringflash.train.stopping import StopRequest

ADAMW = OptimConfig(name="adamw", lr=0.01, warmup_steps=2, grad_clip=0.5)


def kept(cfg=None, *, optim=ADAMW, model=None, steps=6, **checkpoint):
    """A configuration whose learning rate changes in every step, with a checkpoint every 3."""
    cfg = tiny(cp=-1, accumulation=2) if cfg is None else cfg
    return dataclasses.replace(
        cfg, optim=optim, model=dataclasses.replace(cfg.model, **(model or {})),
        train=dataclasses.replace(cfg.train, steps=steps, eval_every=2, eval_sequences=2),
        checkpoint=dataclasses.replace(cfg.checkpoint, **{"every": 3, "keep": 9} | checkpoint),
        run=dataclasses.replace(cfg.run, progress=False, plot=False))


class StopAfter(StopRequest):
    """Is asked once in every step and after every sample of an evaluation: says yes in the given step, or after the given number of
    samples of all evaluations. Draws random numbers when it counts, as a user's own code might."""

    def __init__(self, steps: int | None = None, *, samples: int | None = None):
        super().__init__()
        self.left, self.drawn = steps if samples is None else samples, []
        self.stage = "optimizer step " if samples is None else "evaluation after step "

    def asked(self) -> bool:
        if not watchdog._record.stage.startswith(self.stage):
            return False
        self.drawn.append((torch.rand(1).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()))
        if self.left is not None:
            self.left -= 1
        return self.left == 0


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def rows(folder: Path, kind: str = "train") -> list[dict]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


def figures(folder: Path) -> list[tuple]:
    """What a run has measured that depends on no clock; evaluations too."""
    keys = ("loss", "lr", "grad_norm", "tokens", "valid_tokens", "pairs_imbalance", "heldout_loss", "by_position")
    return sorted((kind, row["step"], *((key, row[key]) for key in keys if key in row))
                  for kind in ("train", "eval") for row in rows(folder, kind))


def go(cfg, world, folder: Path, *, stop: StopRequest | None = None, num_tokens: int = 4000):
    """(summary or None, numbers of the samples that this rank's dp rank was served) of train() on a synthetic text."""
    data, served = text(cfg, num_tokens), []
    batch_of = data.train.batch_of

    def spy(samples):
        served.append(samples)
        return batch_of(samples)

    data.train.batch_of = spy
    folder.mkdir(parents=True, exist_ok=True)
    return train(cfg, world, data, folder, stop), served


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "weights.pt")


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def whole(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir() if path.name != "lock")
