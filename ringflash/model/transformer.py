"""Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU; the attention op is an argument.

Every row but those that attention reads is computed from that row alone, so a rank runs the same module on its own rows, with
their global positions. A rank without rows runs it too, on zero rows: same graph, loss 0, gradients 0.
"""
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..loss import CHUNK_ROWS, chunked_cross_entropy
from ..rotary import RopeScaling, rope_problems
from ..token_loss import TokenLoss, token_losses
from .activations import recomputed
from .embedding import deterministic_embedding
from .host_store import HostStore
from .liger_loss import liger_cross_entropy, require_liger
from .rope import rope_cos_sin, rope_rotate
from .rowwise import linear, rms_norm
from .tiled import tiled

# attention(q [B, S, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, D], *, layout, mask=None) -> [B, S, Hq, D]; a model that has
# them gives it softcap= (a float) and sinks= ([Hq]) too
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Transformer. `validate` says what does not fit; head_dim=None means dim / num_heads."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    head_dim: int | None = None
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    loss_chunk_rows: int = CHUNK_ROWS  # rows of fp32 logits that exist at a time
    softcap: float = 0.0  # attention scores are c * tanh(score / c); 0: as they are
    sinks: bool = False  # a learnt logit per head and layer that takes its share of each row's softmax
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qk_norm: bool = False  # q and k of every head through an RMSNorm of their own, before they are turned
    z_loss: float = 0.0  # in training the loss has z_loss * logsumexp(logits) ** 2 per token added; 0: off

    @property
    def resolved_head_dim(self) -> int:
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def validate(self) -> None:
        """Raises ValueError naming the dotted key, the rule and the nearest valid values."""
        for key in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "loss_chunk_rows"):
            if getattr(self, key) < 1:
                raise ValueError(f"model.{key}={getattr(self, key)}: must be at least 1")
        for key in ("rope_base", "norm_eps", "init_std"):
            if not getattr(self, key) > 0:
                raise ValueError(f"model.{key}={getattr(self, key)}: must be greater than 0")
        if not 0 <= self.softcap < math.inf:
            raise ValueError(f"model.softcap={self.softcap}: must be a finite number >= 0; nearest: 0 (none)")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"model.z_loss={self.z_loss}: must be a finite number >= 0; nearest: 0 (off)")
        for problem in rope_problems(self.rope_scaling, self.rope_base):
            raise ValueError(problem)
        if self.num_heads % self.num_kv_heads:
            valid = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(f"model.num_kv_heads={self.num_kv_heads}: must divide model.num_heads={self.num_heads}; "
                             f"nearest: {_nearest(valid, self.num_kv_heads)}")
        if self.head_dim is None and self.dim % self.num_heads:
            valid = [n for n in range(1, self.dim + 1) if self.dim % n == 0]
            raise ValueError(f"model.num_heads={self.num_heads}: must divide model.dim={self.dim} when model.head_dim is null; "
                             f"nearest: {_nearest(valid, self.num_heads)}; or set model.head_dim")
        head_dim = self.resolved_head_dim
        if head_dim < 2 or head_dim % 2:
            origin = " (model.dim / model.num_heads)" if self.head_dim is None else ""
            valid = range(2, head_dim + 3, 2)
            raise ValueError(f"model.head_dim={head_dim}{origin}: rotary embedding needs an even number >= 2; "
                             f"nearest: {_nearest(valid, head_dim)}")


def _nearest(valid, value: int) -> str:
    """The closest one below and above value, as text."""
    below, above = [n for n in valid if n < value], [n for n in valid if n > value]
    return " or ".join(str(n) for n in below[-1:] + above[:1])


class Linear(nn.Linear):
    """nn.Linear without bias whose weights come from Transformer.init_weights, not from the global generator."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Embedding(nn.Embedding):
    """nn.Embedding whose weights come from Transformer.init_weights, not from the global generator. deterministic: see
    embedding.py."""

    def __init__(self, num_embeddings: int, dim: int, deterministic: bool):
        super().__init__(num_embeddings, dim)
        self.deterministic = deterministic

    def reset_parameters(self) -> None:
        pass

    def forward(self, tokens: Tensor) -> Tensor:
        return deterministic_embedding(tokens, self.weight) if self.deterministic else super().forward(tokens)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim: fp32 inside, one rounding at the end, to autocast's dtype or x's."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, attention: Attention):
        super().__init__()
        self.attention = attention
        self.head_dim = config.resolved_head_dim
        self.wq = Linear(config.dim, config.num_heads * self.head_dim)
        self.wk = Linear(config.dim, config.num_kv_heads * self.head_dim)
        self.wv = Linear(config.dim, config.num_kv_heads * self.head_dim)
        self.wo = Linear(config.num_heads * self.head_dim, config.dim)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None for _ in range(2))
        # Passed on only where the model has them: an attention for plain models need not know of them.
        self.options = {"softcap": config.softcap} if config.softcap else {}
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, dim], cos, sin fp32 [S, D // 2] -> q [B, S, Hq, D], k, v [B, S, Hkv, D], q and k turned."""
        # The head count is read from the weights, so that x with zero rows has a shape too.
        q, k, v = (w(x).unflatten(-1, (w.out_features // self.head_dim, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rope_rotate(q, cos, sin), rope_rotate(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout, mask=None) -> Tensor:
        """-> out [B, S, Hq, D], for self.wo."""
        options = self.options if self.sinks is None else {**self.options, "sinks": self.sinks}
        return self.attention(q, k, v, layout=layout, mask=mask, **options)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Linear(config.dim, config.ffn_dim)
        self.up = Linear(config.dim, config.ffn_dim)
        self.down = Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Three parts: before attention and after it each row for itself, in tiles of tile_rows (0: at once), and attention."""

    def __init__(self, config: ModelConfig, attention: Attention, activations: str = "none", tile_rows: int = 0,
                 store: HostStore | None = None):
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = SelfAttention(config, attention)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)
        self.activations, self.tile_rows, self.store = activations, tile_rows, store

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout, mask=None) -> Tensor:
        """x [B, S, dim], cos, sin fp32 [S, D // 2] -> [B, S, dim]."""
        if self.activations != "none" and torch.is_grad_enabled():
            return recomputed(self, self.activations, self.store, x, cos, sin, layout, mask)
        return self.after(x, self.attend(*self.before(x, cos, sin), layout, mask))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> q, k, v."""
        def project(rows: slice, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.attention.project(self.attention_norm(x), cos[rows], sin[rows])
        return tiled(project, self.tile_rows, (x,), self.weights()[0])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout, mask=None) -> Tensor:
        return self.attention.attend(q, k, v, layout, mask)

    def after(self, x: Tensor, out: Tensor) -> Tensor:
        return tiled(self.after_rows, self.tile_rows, (x, out), self.weights()[2])

    def after_rows(self, rows: slice, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.attention.wo(out.flatten(-2))
        return x + self.ffn(self.ffn_norm(x))

    def weights(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Those of before, of attend and of after."""
        a = self.attention
        before = [self.attention_norm, a.wq, a.wk, a.wv, *(norm for norm in (a.q_norm, a.k_norm) if norm is not None)]
        sinks = [] if a.sinks is None else [a.sinks]
        return [module.weight for module in before], sinks, [a.wo.weight, self.ffn_norm.weight, *self.ffn.parameters()]


class LossHead(nn.Module):
    """Output projection and loss in one forward: a sharded weight must not be read outside the module that gathers it."""

    def __init__(self, config: ModelConfig, loss: str = "chunked"):
        super().__init__()
        self.chunk_rows, self.z_loss, self.loss = config.loss_chunk_rows, config.z_loss, loss
        if loss == "liger":
            require_liger()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))

    def forward(self, hidden: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor | TokenLoss:
        """hidden [B, S, dim], labels int64 [B, S] -> sum of the losses of valid rows, fp32 scalar. In eval mode without z-loss:
        what is reported there is the cross-entropy. reduction="none": that of every row by itself, without gradient."""
        if reduction == "none":
            return token_losses(hidden, self.weight, labels, chunk_rows=self.chunk_rows)
        z_loss = self.z_loss if self.training else 0.0
        if self.loss == "liger" and hidden.shape[1]:
            return liger_cross_entropy(hidden, self.weight, labels, z_loss=z_loss)
        return chunked_cross_entropy(hidden, self.weight, labels, chunk_rows=self.chunk_rows, z_loss=z_loss)[0]


class Transformer(nn.Module):
    """Decoder over the rows of one rank.

    config     ModelConfig, validated here
    attention  attention(q, k, v, *, layout, mask=None) -> out; q, out [B, S, Hq, D], k, v [B, S, Hkv, D]
    activations  what a layer keeps for its backward: none, block, block_save_attention or offload (activations.py)
    tile_rows  norms and MLP so many rows at a time; 0: all at once
    residual_dtype  of the sum that runs through the layers; None: the weights'. 16 bit under autocast only
    loss       chunked, or liger
    deterministic  the embedding's gradient has the same bits from run to run on a GPU too (attention's is attention's matter)
    seed       weights are a function of (seed, parameter name, shape): the same on every rank, device and number of ranks
    """

    def __init__(self, config: ModelConfig, attention: Attention, *, seed: int = 0, deterministic: bool = False,
                 activations: str = "none", tile_rows: int = 0, residual_dtype: torch.dtype | None = None, loss: str = "chunked"):
        super().__init__()
        config.validate()
        self.config, self.tile_rows, self.residual_dtype = config, tile_rows, residual_dtype
        self.embedding = Embedding(config.vocab_size, config.dim, deterministic)
        self.store = HostStore()
        self.layers = nn.ModuleList(Layer(config, attention, activations, tile_rows, self.store)
                                    for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = LossHead(config, loss)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.init_weights(seed)

    @property
    def blocks(self) -> list[nn.Module]:
        """Its layers: what is sharded as one unit each."""
        return list(self.layers)

    def reserve_host(self, tokens: int, itemsize: int, device: torch.device) -> None:
        """Where layers offload: pins the host memory that a step of so many tokens of a rank will take, before the step."""
        if any(layer.activations == "offload" for layer in self.layers):
            config, residual = self.config, 4 if self.residual_dtype is None else self.residual_dtype.itemsize
            sizes = (tokens * config.dim * residual, tokens * config.num_heads * config.resolved_head_dim * itemsize,
                     4 * tokens * config.num_heads)                              # x, attention's out and lse
            chunks = sum(-(-size // self.store.chunk_bytes) for size in sizes)
            self.store.reserve(len(self.layers) * chunks, device)

    @torch.no_grad()
    def init_weights(self, seed: int, write: Callable[[Tensor, Tensor], None] = Tensor.copy_) -> None:
        """Normal(0, init_std), projections into the residual stream / sqrt(2 num_layers), norms 1, sinks 0. On the meta device:
        nothing (call it again after to_empty). write(parameter, its value, whole and on the CPU) may keep a part of it. Leaves
        torch's global generator alone."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("attention.sinks") else 1.0)
                continue
            into_residual = name.endswith(("attention.wo.weight", "ffn.down.weight"))
            std = self.config.init_std / (2 * self.config.num_layers) ** 0.5 if into_residual else self.config.init_std
            # One generator per name, on the CPU: independent of the order of parameters and of the device.
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            write(parameter, torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor | None = None, *, layout=None,
                reduction: str = "sum") -> Tensor | TokenLoss:
        """tokens int64 [B, S] and their positions int64 [S] (S = 0 is legal) -> hidden [B, S, dim] after the last norm, or with
        labels int64 [B, S] (-100: no label) the sum of the losses of valid rows, an fp32 scalar; with reduction="none" the loss of
        each row (TokenLoss [B, S]), for evaluation.

        layout goes to attention as is. Where it has several masks, they repeat over the layers: layer i has layout.masks[i % n],
        so that all kinds of layer share one layout and one batch. With one mask (or none) attention takes the layout's own.

        Raises ValueError for tokens, positions and labels whose shapes do not fit.
        """
        if tokens.ndim != 2 or positions.shape != tokens.shape[1:]:
            raise ValueError(f"tokens [B, S] and positions [S] must share S, got {tuple(tokens.shape)}, {tuple(positions.shape)}")
        if labels is not None and labels.shape != tokens.shape:
            raise ValueError(f"labels must have the shape of tokens {tuple(tokens.shape)}, got {tuple(labels.shape)}")
        # Once per forward, for all layers.
        cos, sin = rope_cos_sin(positions, self.config.resolved_head_dim, self.config.rope_base, self.config.rope_scaling)
        x = self.embedding(tokens)
        if self.residual_dtype is not None:
            if self.residual_dtype.itemsize == 2 and not torch.is_autocast_enabled(x.device.type):
                raise ValueError("train.residual_dtype=bf16: activations are fp32 here (train.dtype); nearest: fp32")
            x = x.to(self.residual_dtype)
        masks = getattr(layout, "masks", ())
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, layout, masks[index % len(masks)] if len(masks) > 1 else None)
        hidden = tiled(lambda rows, x: self.norm(x), self.tile_rows, (x,), [self.norm.weight])
        return hidden if labels is None else self.head(hidden, labels, reduction)
