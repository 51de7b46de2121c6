"""Models of which the same step is run with every activation policy."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringflash import ring_attention
from ringflash.model import ModelConfig, Transformer

PLAIN = ModelConfig(vocab_size=61, dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, loss_chunk_rows=16,
                    init_std=0.2)
RICH = dataclasses.replace(PLAIN, sinks=True, softcap=5.0, qk_norm=True, num_kv_heads=1, tie_embeddings=True)
POLICIES = ("none", "block", "block_save_attention", "offload")


@dataclasses.dataclass(frozen=True)
class Step:
    """loss, and the gradient of every weight by name."""

    loss: Tensor
    gradients: dict[str, Tensor]

    def differs(self, other: Step) -> list[str]:
        """What has not the same bits."""
        names = [] if torch.equal(self.loss, other.loss) else ["loss"]
        return names + [name for name, g in self.gradients.items() if not torch.equal(g, other.gradients[name])]


def batch(seq_len: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """tokens and labels of the whole sequence, int64 [rows, seq_len]."""
    tokens = torch.randint(0, PLAIN.vocab_size, (rows, seq_len), generator=torch.Generator().manual_seed(3))
    return tokens, torch.cat((tokens[:, 1:], torch.full((rows, 1), -100)), 1)


def model(config: ModelConfig = PLAIN, attention: Callable | None = None, *, kernel: str = "reference", group: Any = None,
          **options: Any) -> Transformer:
    if attention is None:
        attention = functools.partial(ring_attention, kernel=kernel, group=group, deterministic=True)
    made = Transformer(config, attention, **options)
    if config.sinks:
        with torch.no_grad():
            for layer in made.layers:
                layer.attention.sinks.copy_(torch.linspace(-1, 1, config.num_heads))
    return made


def step(made: Transformer, tokens: Tensor, positions: Tensor, labels: Tensor, layout: Any, *, bf16: bool = False) -> Step:
    """Forward and backward of the mean loss of 100 tokens."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
        loss = made(tokens, positions, labels, layout=layout)
    (loss / 100).backward()
    return Step(loss.detach(), {name: parameter.grad for name, parameter in made.named_parameters()})
