"""Optimizer and learning rate. Both depend on the step alone: never on how many ranks share the work."""
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ringflash.config import OptimConfig
from ringflash.train.optimizer_offload import OffloadedAdamW


def learning_rate(cfg: OptimConfig, step: int, steps: int) -> float:
    """The rate of optimizer step `step` (from 0) out of `steps`: linear warm-up, then a cosine down to lr * min_lr_ratio."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    # The last step reaches the end of the cosine.
    progress = (step - cfg.warmup_steps) / max(steps - 1 - cfg.warmup_steps, 1)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * cosine)


def build_optimizer(cfg: OptimConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD over fp32 weights; weight decay on matrices only (norm scales are left out)."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # torch takes its many-tensors-in-one-kernel form on a GPU by itself, but not for shards, whose type it does not know.
    foreach = True if any(p.is_cuda and isinstance(p, DTensor) for p in parameters) else None
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, foreach=foreach)
    kind = OffloadedAdamW if cfg.offload else torch.optim.AdamW
    return kind(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), eps=cfg.eps, foreach=foreach)
