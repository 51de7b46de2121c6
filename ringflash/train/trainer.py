"""One model on a dp x cp world: optimizer steps and evaluation, with the same meaning for every number of ranks.

The loss of a step is the sum over its valid tokens divided once by their number, counted over all micro-batches and all ranks
before the first backward. So each rank's backward gives its share of the true gradient, and the shares only have to be added.
"""
from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ringflash import Mask, ring_attention, shard_batch
from ringflash.config import AttentionConfig, Config
from ringflash.kernels import dispatch
from ringflash.model.build import build_model, model_config
from ringflash.model.transformer import Transformer
from ringflash.model.weights import load_weights
from ringflash.sharding import ShardedBatch
from ringflash.train.evaluation import Evaluation, evaluate
from ringflash.train.gradients import clip_gradients, gradient_norm, sum_gradients
from ringflash.train.optim import build_optimizer, learning_rate
from ringflash.train.prefetch import Prefetcher, wanted_rows
from ringflash.train.replicas import Replicas
from ringflash.train.sharded import build_sharded, set_reduction, write_shard
from ringflash.train.text import Data
from ringflash.train.world import World


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over the valid tokens of all ranks and micro-batches
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of all ranks
    valid_tokens: int
    data_wait_ms: float = 0.0  # of this rank, for its rows
    stop: bool = False  # some rank was told to stop: all of them do, after this step
    pairs_imbalance: float = 1.0  # of the replicas' attention, costliest over mean; 1: even
    pairs_imbalance_in_order: float = 1.0  # the same if samples were not dealt by their pairs


class NonFiniteError(RuntimeError):
    """The loss or the gradient norm of a step is inf or NaN. Every rank raises it in the same step, before the weights change.

    result: the step as far as it came; found: which of the two it is, and its value."""

    def __init__(self, message: str, result: StepResult, found: str = ""):
        super().__init__(message)
        self.result, self.found = result, found


def activation_dtype(cfg: Config, device: torch.device) -> torch.dtype:
    """train.dtype; auto is fp32 on CPU and bf16 on GPU. Weights, gradients and optimizer state are fp32 either way."""
    name = cfg.train.dtype
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def select_kernel(cfg: Config, device: torch.device) -> dispatch.Backend:
    """The attention kernel of the run. Raises ValueError naming attention.kernel if it cannot run here."""
    try:
        return dispatch.select(cfg.attention.kernel, device=device, dtype=activation_dtype(cfg, device),
                               head_dim=model_config(cfg).resolved_head_dim, deterministic=cfg.attention.deterministic)
    except RuntimeError as error:
        raise ValueError(f"attention.{error}") from error


def layer_masks(attention: AttentionConfig) -> tuple[Mask, ...]:
    """One mask per kind in attention.layers, in that order, as they repeat over the layers of the model; without documents."""
    window = Mask(window_size=tuple(attention.window_size), first_tokens=attention.first_tokens)
    kinds = {"global": Mask(), "window": window}
    if attention.chunk_size is not None:
        kinds["chunk"] = Mask(chunk_size=attention.chunk_size)
    return tuple(kinds[kind] for kind in attention.layers or ["window"])


def document_positions(positions: Tensor, cu_seqlens: np.ndarray) -> Tensor:
    """Of tokens at these positions of a sample (int64 [n], below cu_seqlens[-1]): how many tokens of their document (or of what is
    left of it) precede each."""
    starts = torch.from_numpy(cu_seqlens.astype(np.int64)).to(positions.device)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


class Trainer:
    """Model, optimizer and the ring they run on. The same cfg and data give the same steps on every dp x cp, within rounding."""

    def __init__(self, cfg: Config, world: World, data: Data, asked_to_stop: Callable[[], bool] = lambda: False):
        self.world, self.asked_to_stop = world, asked_to_stop
        self.read(cfg, data)
        attention = functools.partial(ring_attention, group=world.cp_group, kernel=cfg.attention.kernel,
                                      exchange=cfg.attention.exchange, rotate=cfg.attention.rotate, routing=cfg.attention.routing,
                                      deterministic=cfg.attention.deterministic)
        self.dtype = activation_dtype(cfg, world.device)
        on_gpu = world.device.type == "cuda"
        build = functools.partial(
            build_model, cfg, attention, tokens=-(-cfg.data.seq_len // world.cp) * cfg.data.batch_size, shards=world.shard,
            device_bytes=torch.cuda.get_device_properties(world.device).total_memory if on_gpu else None)
        self.model = build().to(world.device) if world.shard_mesh is None else \
            build_sharded(build, world.shard_mesh, world.device, self.dtype, cfg.train.seed)
        if cfg.model.weights is not None:
            load_weights(cfg, self.model, write_shard)
        self.parameters = list(self.model.parameters())
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters)
        self.optimizer = build_optimizer(cfg.optim, self.parameters)
        self.reserve_host()

    def reserve_host(self) -> None:
        """Pins the host memory that steps will need, so that the first of them takes no longer than the others."""
        if isinstance(self.model, Transformer):
            tokens = -(-self.cfg.data.seq_len // self.world.cp) * self.cfg.data.batch_size
            self.model.reserve_host(tokens, self.dtype.itemsize, self.world.device)

    def read(self, cfg: Config, data: Data) -> None:
        """Steps from here on are those of cfg and data, of another length say; model and optimizer stay what they are."""
        self.cfg, self.data = cfg, data
        self.replicas = Replicas(data.train, layer_masks(cfg.attention), self.world.dp, cfg.train.accumulation)
        self.samples_per_step = self.world.dp * cfg.train.accumulation * cfg.data.batch_size
        self.origin = 0  # the number of the sample that step 0 would begin with
        self.prefetcher = Prefetcher(data.train, self.rows) if cfg.data.prefetch else None

    def rows(self, samples: tuple[int, ...]) -> np.ndarray:
        """The rows of a micro-batch of these samples that this rank will read."""
        cfg, world, train = self.cfg, self.world, self.data.train
        cu_seqlens = train.cu_seqlens(samples[0]) if train.document_mask else None
        return wanted_rows(cfg.attention.layout, train.seq_len, world.cp, world.ulysses, world.cp_rank, layer_masks(cfg.attention),
                           cu_seqlens)

    def next_samples(self, step: int) -> list[tuple[int, ...]]:
        """The samples of each of this rank's micro-batches of a step that is still to come."""
        return [micro[self.world.dp_rank] for micro in self.replicas.deal(self.first_sample(step)).micro_batches]

    def first_sample(self, step: int) -> int:
        """The position in the data before step `step`, one number for all ranks."""
        return self.origin + step * self.samples_per_step

    def start_at(self, step: int, sample: int) -> None:
        """Step `step` begins with sample number `sample`."""
        self.origin = sample - step * self.samples_per_step

    def train_step(self, step: int) -> StepResult:
        """Optimizer step `step` (from 0). Raises NonFiniteError on all ranks, leaving the weights as they were."""
        result = self.gradients(step)
        clip_gradients(self.parameters, result.grad_norm, self.cfg.optim.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = result.lr
        self.optimizer.step()
        return result

    def gradients(self, step: int) -> StepResult:
        """Forward and backward of step `step`: leaves in .grad the gradient of the step's mean loss, summed over all ranks."""
        cfg, world = self.cfg, self.world
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        began = time.perf_counter()
        dealt = self.replicas.deal(self.first_sample(step))
        batches = [self.data.train.batch_of(micro[world.dp_rank]) for micro in dealt.micro_batches]
        if self.prefetcher is not None:
            self.prefetcher.give([batch["tokens"] for batch in batches])
        wait_s = time.perf_counter() - began
        shards = [self.shard(batch) for batch in batches]
        wait_s += sum(batch["tokens"].read_s for batch in batches)
        if self.prefetcher is not None and step + 1 < cfg.train.steps:
            self.prefetcher.start(self.next_samples(step + 1))
        # Known before the first backward: micro-batches and ranks may hold very different numbers of valid tokens.
        valid = self.count_valid(shards)
        loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
        for index, sharded in enumerate(shards):
            set_reduction(self.model, is_last=index + 1 == len(shards), each=cfg.parallel.reduce == "each")
            loss = self.loss_sum(sharded)
            # A step without any valid token has loss 0 and gradient 0.
            (loss / max(valid, 1)).backward()
            loss_sum += loss.detach().double()
        sum_gradients(self.parameters, world.group)
        # Whether to stop travels with the loss: all ranks learn of it in the same step.
        total, stop = world.sum(float(loss_sum), float(self.asked_to_stop()))
        loss = total / max(valid, 1)
        norm = gradient_norm(self.parameters, world)
        tokens = self.samples_per_step * cfg.data.seq_len
        result = StepResult(loss, norm, learning_rate(cfg.optim, step, cfg.train.steps), tokens, valid, wait_s * 1e3, stop > 0,
                            dealt.imbalance, dealt.in_order)
        # Loss and norm are the same numbers on every rank, so all of them stop here or none does.
        for name, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise NonFiniteError(f"step {step + 1}: the {name} is {value}; the weights are those of step {step}. A lower "
                                     f"optim.lr={cfg.optim.lr:g} or longer optim.warmup_steps={cfg.optim.warmup_steps} may help",
                                     result, f"the {name} is {value}")
        return result

    def evaluate(self) -> Evaluation:
        """See ringflash.train.evaluation."""
        return evaluate(self)

    def shard(self, batch: dict) -> ShardedBatch:
        """This rank's rows of a micro-batch of its ring; all ranks of the ring agree on mask, layout and batch here."""
        attention, world = self.cfg.attention, self.world
        sharded = shard_batch(batch, attention.layout, group=world.cp_group, masks=layer_masks(attention), device=world.device)
        if self.cfg.data.positions == "document":
            # From the rank's own rows: no array of all positions on any host.
            sharded = dataclasses.replace(sharded, positions=document_positions(sharded.positions, batch["cu_seqlens"]))
        return sharded

    def count_valid(self, shards: list[ShardedBatch]) -> int:
        """Valid tokens of all micro-batches of all rings."""
        # Each of the cp ranks of a ring reports the ring's count.
        return round(self.world.sum(sum(sharded.num_valid for sharded in shards))[0]) // self.world.cp

    def loss_sum(self, sharded: ShardedBatch) -> Tensor:
        """Sum of the losses of this rank's valid tokens, a scalar; 0 (with gradient 0) where it has none."""
        with torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.model(sharded.tokens, sharded.positions, sharded.labels, layout=sharded.layout)
