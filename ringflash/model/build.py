"""The model of a run, from its configuration."""
from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from ringflash.config import Config

from .activation_memory import LayerSizes, choose_activations
from .transformer import Attention, ModelConfig, Transformer

_log = logging.getLogger("ringflash")


def model_config(cfg: Config) -> ModelConfig:
    # Not asdict: that would make a dict of rope_scaling.
    return ModelConfig(**{f.name: getattr(cfg.model, f.name) for f in dataclasses.fields(ModelConfig)})


def build_model(cfg: Config, attention: Attention, *, tokens: int = 0, shards: int = 1,
                device_bytes: int | None = None) -> nn.Module:
    """The model that cfg names, on the CPU: called as model(tokens, positions, labels, *, layout), see Transformer.forward.

    attention: what its layers call. Weights are a function of (train.seed, name, shape), equal on all ranks without a broadcast.
    For train.activations=auto: tokens, of a rank in one micro-batch; shards of the weights; device_bytes of memory (None: enough).
    """
    model, train = model_config(cfg), cfg.train
    if cfg.model.hf is not None:
        from ringflash.hf_config import read_config

        from .hf_model import HuggingFaceModel

        return HuggingFaceModel(read_config(cfg.model.hf), model, attention, seed=train.seed, activations=train.activations,
                                loss=train.loss)
    activations = train.activations
    if activations == "auto":
        activations = _choose(cfg, model, tokens, shards, device_bytes)
        _log.info("train.activations=auto: %s, for %d layers of %d tokens on a device of %s bytes", activations, model.num_layers,
                  tokens, device_bytes)
    return Transformer(model, attention, seed=train.seed, deterministic=cfg.attention.deterministic, activations=activations,
                       tile_rows=train.tile_rows, residual_dtype=torch.bfloat16 if train.residual_dtype == "bf16" else None,
                       loss=train.loss)


def _choose(cfg: Config, model: ModelConfig, tokens: int, shards: int, device_bytes: int | None) -> str:
    if device_bytes is None:
        return "none"
    sizes = LayerSizes(model.dim, model.ffn_dim, model.num_heads, model.num_kv_heads, model.resolved_head_dim,
                       itemsize=4 if cfg.train.dtype == "fp32" else 2,
                       residual_itemsize=2 if cfg.train.residual_dtype == "bf16" else 4)
    of_layer = model.dim * (2 * sizes.queries + sizes.keys + 3 * model.ffn_dim)
    weights = model.num_layers * of_layer + (1 if model.tie_embeddings else 2) * model.vocab_size * model.dim
    # fp32 weights and gradients, and two moments; a layer in 16 bit, its gradient, and what the optimizer makes of one.
    state_bytes = (8 if cfg.optim.offload else 16) * weights // shards + 16 * of_layer
    return choose_activations(sizes, num_layers=model.num_layers, tokens=tokens, tile_rows=cfg.train.tile_rows,
                              state_bytes=state_bytes, device_bytes=device_bytes)
