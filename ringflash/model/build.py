"""The model of a run, from its configuration."""
from __future__ import annotations

import dataclasses

from torch import nn

from ringflash.config import Config

from .transformer import Attention, ModelConfig, Transformer


def model_config(cfg: Config) -> ModelConfig:
    # Not asdict: that would make a dict of rope_scaling.
    return ModelConfig(**{f.name: getattr(cfg.model, f.name) for f in dataclasses.fields(ModelConfig)})


def build_model(cfg: Config, attention: Attention) -> nn.Module:
    """The model that cfg names, on the CPU: called as model(tokens, positions, labels, *, layout), see Transformer.forward.

    attention: what its layers call. Weights are a function of (train.seed, name, shape), equal on all ranks without a broadcast.
    """
    return Transformer(model_config(cfg), attention, seed=cfg.train.seed, deterministic=cfg.attention.deterministic)
