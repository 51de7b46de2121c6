"""A training step to be planned: a configuration, how many GPUs it has, and how they are divided. No torch."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ringflash.config import Config, ModelConfig
from ringflash.degrees import divisors, nearest
from ringflash.mask import Mask
from ringflash.ring.rotate import Heads

POLICIES = ("none", "block", "block_save_attention", "offload")


@dataclass(frozen=True)
class Sizes:
    """Parameters of a decoder by part. matmul: those that a token is multiplied with, norms and the embedding are not among them;
    layer_before: of these in a layer, what stands before attention."""

    layer_matmul: int
    layer_before: int
    layer: int
    head: int
    root: int  # embedding, last norm, head: what belongs to no layer
    num_layers: int

    @property
    def matmul(self) -> int:
        return self.num_layers * self.layer_matmul + self.head

    @property
    def total(self) -> int:
        return self.num_layers * self.layer + self.root


def head_dim_of(model: ModelConfig) -> int:
    return model.dim // model.num_heads if model.head_dim is None else model.head_dim


def sizes_of(model: ModelConfig) -> Sizes:
    head_dim = head_dim_of(model)
    queries, keys = model.num_heads * head_dim, model.num_kv_heads * head_dim
    matmul = model.dim * (2 * queries + 2 * keys + 3 * model.ffn_dim)
    small = 2 * model.dim + (2 * head_dim if model.qk_norm else 0) + (model.num_heads if model.sinks else 0)
    head = model.vocab_size * model.dim
    root = head * (1 if model.tie_embeddings else 2) + model.dim
    return Sizes(matmul, model.dim * (queries + 2 * keys), matmul + small, head, root, model.num_layers)


@dataclass(frozen=True, eq=False)
class Job:
    """cfg: validated, of which model, data.seq_len, data.batch_size, attention, train and optim count. kinds: a mask per kind of
    layer, repeated over the layers, without documents. shard: ranks that share one copy of the weights. documents: cu_seqlens."""

    cfg: Config
    kinds: tuple[Mask, ...]
    num_gpus: int
    gpus_per_host: int
    dp: int
    ring: int
    ulysses: int
    shard: int
    activations: str
    documents: tuple[int, ...] | None = None

    @cached_property
    def masks(self) -> tuple[Mask, ...]:
        return self.kinds if self.documents is None else tuple(mask.with_documents(self.documents) for mask in self.kinds)

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def seq_len(self) -> int:
        return self.cfg.data.seq_len

    @property
    def batch(self) -> int:
        return self.cfg.data.batch_size

    @property
    def rows(self) -> int:
        """Rows of the longest shard of a rank, outside attention."""
        return -(-self.seq_len // self.cp)

    @property
    def tokens(self) -> int:
        """Of a rank in a micro-batch."""
        return self.rows * self.batch

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an activation in a product: bf16 but where train.dtype=fp32."""
        return 4 if self.cfg.train.dtype == "fp32" else 2

    @property
    def residual_itemsize(self) -> int:
        return 2 if self.cfg.train.residual_dtype == "bf16" and self.compute_itemsize == 2 else 4

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.cfg.model)

    @property
    def heads(self) -> Heads:
        """Of a layer, and what a row of it weighs on the wire."""
        model = self.cfg.model
        return Heads(self.batch, model.num_heads, model.num_kv_heads, head_dim_of(model), itemsize=self.compute_itemsize)

    @property
    def layers_by_mask(self) -> tuple[tuple[Mask, int], ...]:
        """Each kind of layer with the number of layers of its kind."""
        count, kinds = self.cfg.model.num_layers, len(self.masks)
        return tuple((mask, len(range(kind, count, kinds))) for kind, mask in enumerate(self.masks))

    @property
    def name(self) -> str:
        return f"dp {self.dp}, ring {self.ring}, ulysses {self.ulysses}, shard {self.shard}, {self.activations}"

    def with_seq_len(self, seq_len: int) -> Job:
        """The same of another length, without documents."""
        return replace(self, cfg=replace(self.cfg, data=replace(self.cfg.data, seq_len=seq_len)), documents=None)


def resolved_shard(cfg: Config, num_gpus: int, shard: int | None = None) -> int:
    """parallel.shard with -1 resolved."""
    shard = cfg.parallel.shard if shard is None else shard
    return num_gpus if shard == -1 else shard


def check_counts(num_gpus: int, gpus_per_host: int) -> None:
    """ValueError naming the option, the rule and the nearest valid values, unless hosts are full ones (or there is one)."""
    for option, value in (("--gpus", num_gpus), ("--gpus-per-host", gpus_per_host)):
        if value < 1:
            raise ValueError(f"{option} {value}: must be at least 1; nearest: 1")
    if num_gpus > gpus_per_host and num_gpus % gpus_per_host:
        valid = [gpus_per_host * (num_gpus // gpus_per_host + more) for more in (0, 1)]
        raise ValueError(f"--gpus {num_gpus}: more than one host, so a multiple of --gpus-per-host {gpus_per_host}; nearest: "
                         f"{nearest(num_gpus, valid)}")


def divisions(cfg: Config, kinds: Sequence[Mask], num_gpus: int, gpus_per_host: int, *, dp: int = -1, cp: int = -1,
              ulysses: int = -1, activations: str = "auto", shard: int | None = None,
              documents: tuple[int, ...] | None = None) -> list[Job]:
    """Every (dp, ring, Ulysses, policy) that these GPUs allow; -1 and "auto" mean all. ValueError where there is none."""
    check_counts(num_gpus, gpus_per_host)
    heads = cfg.model.num_heads
    degree_of = resolved_shard(cfg, num_gpus, shard)
    if degree_of < 1 or num_gpus % degree_of:
        raise ValueError(f"parallel.shard={degree_of}: must divide the {num_gpus} GPUs; nearest: "
                         f"{nearest(degree_of, divisors(num_gpus))}")
    for key, value in (("dp", dp), ("cp", cp)):
        if value != -1 and (value < 1 or num_gpus % value):
            raise ValueError(f"parallel.{key}={value}: must divide the {num_gpus} GPUs; nearest: "
                             f"{nearest(value, divisors(num_gpus))}")
    if dp != -1 and cp != -1 and dp * cp != num_gpus:
        raise ValueError(f"parallel.dp={dp} parallel.cp={cp}: dp * cp must be the {num_gpus} GPUs; nearest: parallel.dp={dp} "
                         f"parallel.cp={num_gpus // dp} or parallel.dp={num_gpus // cp} parallel.cp={cp}")
    cps = [num_gpus // dp if dp != -1 else cp] if (dp, cp) != (-1, -1) else divisors(num_gpus)
    found = []
    for size in cps:
        for degree in divisors(size) if ulysses == -1 else [ulysses]:
            if size % degree == 0 and heads % degree == 0:
                for policy in POLICIES if activations == "auto" else (activations,):
                    found.append(Job(cfg, tuple(kinds), num_gpus, gpus_per_host, num_gpus // size, size // degree, degree,
                                     degree_of, policy, documents))
    if not found:
        valid = [degree for degree in divisors(max(cps)) if heads % degree == 0]
        raise ValueError(f"parallel.ulysses={ulysses}: must divide the ranks of a sequence and model.num_heads={heads}; nearest: "
                         f"{nearest(ulysses, valid)}")
    return found
