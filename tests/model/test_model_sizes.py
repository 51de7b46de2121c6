"""The shapes of configs/model: how many parameters each has, counted on the meta device, where none takes memory."""
import dataclasses

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from ringflash.launch.train import register_schema
from ringflash.model import ModelConfig, Transformer
from ringflash.train.trainer import model_config

# The last three as their authors' files have them.
COUNTS = {"llama_10m": 9_639_552, "llama_100m": 97_145_088, "llama3_1b": 1_235_814_400, "llama3_8b": 8_030_261_248,
          "qwen3_32b": 32_762_123_264}


def model(name: str) -> ModelConfig:
    register_schema()
    with initialize_config_module("ringflash.configs", version_base="1.3"):
        return model_config(OmegaConf.to_object(compose("train", overrides=[f"model={name}"])))


def by_formula(c: ModelConfig) -> int:
    d = c.resolved_head_dim
    attention = c.dim * d * (2 * c.num_heads + 2 * c.num_kv_heads) + (2 * d if c.qk_norm else 0)
    layer = attention + 3 * c.dim * c.ffn_dim + 2 * c.dim
    return c.vocab_size * c.dim * (1 if c.tie_embeddings else 2) + c.num_layers * layer + c.dim


@pytest.mark.parametrize("name", COUNTS)
def test_a_shape_has_the_parameters_its_name_promises(name):
    with torch.device("meta"):
        made = Transformer(model(name), lambda q, k, v, *, layout, mask=None: q)
    assert sum(p.numel() for p in made.parameters()) == by_formula(model(name)) == COUNTS[name]


def test_qwen3_normalises_q_and_k_per_head_with_head_dim_128():
    config = model("qwen3_32b")
    assert config.qk_norm and config.resolved_head_dim == 128 != config.dim // config.num_heads
    with torch.device("meta"):
        made = Transformer(dataclasses.replace(config, num_layers=1), lambda q, k, v, *, layout, mask=None: q)
    shapes = {name: tuple(p.shape) for name, p in made.named_parameters()}
    assert shapes["layers.0.attention.q_norm.weight"] == shapes["layers.0.attention.k_norm.weight"] == (128,)
    assert shapes["layers.0.attention.wq.weight"] == (8192, 5120) and shapes["layers.0.attention.wk.weight"] == (1024, 5120)


def test_heads_are_normalised_one_by_one_before_they_are_turned():
    seen = []
    config = ModelConfig(vocab_size=31, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=16, head_dim=8, init_std=0.5,
                         qk_norm=True)
    made = Transformer(config, lambda q, k, v, *, layout, mask=None: seen.append((q, k)) or q)
    with torch.no_grad():
        made.layers[0].attention.k_norm.weight.fill_(3.0)
        made(torch.arange(9)[None], torch.arange(9))
    # A turn changes no length: sqrt(head_dim) times the norm's weight, whatever came in.
    for x, length in zip(seen[0], (8**0.5, 3 * 8**0.5)):
        torch.testing.assert_close(x.norm(dim=-1), torch.full(x.shape[:-1], length), rtol=1e-3, atol=0)
