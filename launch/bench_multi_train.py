"""A training step on all GPUs of this host, through the Trainer that `launch/train.py` runs: seconds, memory, tokens/s, MFU,
beside what ringflash.planning predicts; and at a length that one GPU can run, the ring's first loss and gradient norm against
that GPU's.

Tokens are drawn at random: a step's time does not depend on them.
"""
from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ringflash.config import Config, ParallelConfig, validate
from ringflash.data.packing import Samples
from ringflash.degrees import shard_size
from ringflash.launch.bench_multi_links import Say
from ringflash.planning.hardware import GPUS, Hardware
from ringflash.planning.job import divisions
from ringflash.planning.search import predict
from ringflash.train.loop import warm_up_kernel
from ringflash.train.mfu import Meter, most
from ringflash.train.replicas import Replicas
from ringflash.train.text import Data
from ringflash.train.trainer import Trainer, layer_masks
from ringflash.train.world import World, connect, single

BUDGET_EPS = 2.0  # roundings of the compute dtype, of a loss and of a norm (Note [Training equivalence])


@dataclasses.dataclass(frozen=True)
class Job:
    """cfg: of the long step. same_tokens: the length of the comparison with one GPU; 0: none."""
    name: str
    cfg: Config
    steps: int
    same_tokens: int


class RandomTokens(Samples):
    """Sample n: seq_len tokens drawn evenly from the vocabulary, by n alone."""

    document_mask, batch_size, num_samples = False, 1, 2**31

    def __init__(self, seq_len: int, vocab_size: int):
        self.seq_len, self.vocab_size = seq_len, vocab_size

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        return np.random.default_rng(sample).integers(self.vocab_size, size=self.seq_len)[np.asarray(positions, np.int64)]

    def batch_hash(self, samples: Sequence[int]) -> int:
        return hash((self.seq_len, self.vocab_size, *map(int, samples))) & (2**62 - 1)


def configuration(model: str, tokens: int, overrides: Sequence[str], num_ranks: int) -> Config:
    """The configuration of configs/train.yaml with this model and length, all ranks in one ring, the weights sharded over them.

    overrides: as of launch/train.py. ValueError for one that cannot be.
    """
    try:
        from omegaconf.errors import OmegaConfBaseException

        from hydra.errors import HydraException

        from ringflash.launch.train import compose, register_schema, to_config
    except ImportError as error:
        raise ValueError(f"--sections=train: reads configs/, which needs hydra-core ({error}); nearest: no train") from error
    words = [f"model={model}", f"data.seq_len={tokens}", "data.document_mask=false", "parallel=fsdp", "train.activations=auto",
             "train.tile_rows=8192", *overrides]
    register_schema()
    try:
        cfg = to_config(compose(words))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"--train-model={model} --train-overrides={' '.join(overrides)!r}: {error}") from error
    validate(cfg, num_ranks)
    if cfg.data.seq_len != tokens or cfg.data.document_mask or cfg.data.batch_size != 1:
        raise ValueError(f"--train-overrides={' '.join(overrides)!r}: one causal sequence of --train-tokens={tokens} is what is "
                         "timed; nearest: leave data.seq_len, data.document_mask and data.batch_size")
    return cfg


def bench(job: Job, device: torch.device, say: Say) -> list[dict]:
    """The comparison's record, if there is one, and one of each step."""
    cfg, records = job.cfg, []
    common = {"section": "train", "model": job.name, "cp_size": dist.get_world_size(), "failure": None}
    warm_up_kernel(cfg, device)
    alone = one_gpu(cfg, job.same_tokens, device) if job.same_tokens else None
    p = cfg.parallel
    world = connect(1, dist.get_world_size(), device, timeout_s=p.timeout_s, ulysses=p.ulysses,
                    shard=shard_size(p, dist.get_world_size()))
    trainer = Trainer(cfg, world, data_of(cfg, cfg.data.seq_len))
    activations = trainer.model.blocks[0].activations if cfg.train.activations == "auto" else cfg.train.activations
    if alone is not None:
        ring = first_step(trainer, job.same_tokens)
        eps = torch.finfo(trainer.dtype).eps
        found = {name: {"ring": ring[name], "one_gpu": alone[name], "of_budget":
                        abs(ring[name] - alone[name]) / (BUDGET_EPS * eps * abs(alone[name]))} for name in ring}
        records.append({**common, "what": "same", "tokens": job.same_tokens, **found,
                        "ok": all(one["of_budget"] <= 1.0 for one in found.values())})
        say(records[-1])
    meter, expected = Meter(trainer), prediction(cfg, world, activations)
    meter.memory()
    for step in range(job.steps):
        _synchronize(device)
        most(0.0, world)                    # all ranks begin together
        start = time.perf_counter()
        result = trainer.train_step(step)
        _synchronize(device)
        seconds = most(time.perf_counter() - start, world)
        row = meter.row(step, seconds)
        records.append({**common, "what": "step", "tokens": result.tokens, "step": step, "seconds": seconds,
                        "tokens_per_s": result.tokens / seconds, "mfu": row.get("mfu"), "tflops_per_gpu": row["tflops_per_rank"],
                        "peak_gib": most(row["peak_memory_gib"], world), "loss": result.loss, "grad_norm": result.grad_norm,
                        "activations": activations, "shard": world.shard, "predicted": expected})
        say(records[-1])
    del trainer, meter
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return records


def one_gpu(cfg: Config, tokens: int, device: torch.device) -> dict[str, float]:
    """Loss and gradient norm of the first step on this device alone, every rank by itself."""
    data = dataclasses.replace(cfg.data, seq_len=tokens)
    alone = dataclasses.replace(cfg, data=data, parallel=ParallelConfig(dp=1, cp=1))
    trainer = Trainer(alone, single(device), data_of(cfg, tokens))
    result = first_step(trainer, tokens)
    del trainer
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def first_step(trainer: Trainer, tokens: int) -> dict[str, float]:
    """Of a sample of another length, with the weights as they are: the model need not be made again."""
    own = trainer.data, trainer.replicas, trainer.prefetcher
    trainer.data, trainer.prefetcher = data_of(trainer.cfg, tokens), None
    trainer.replicas = Replicas(trainer.data.train, layer_masks(trainer.cfg.attention), 1, trainer.cfg.train.accumulation)
    result = trainer.gradients(0)
    trainer.data, trainer.replicas, trainer.prefetcher = own
    trainer.optimizer.zero_grad(set_to_none=True)
    return {"loss": result.loss, "grad_norm": result.grad_norm}


def data_of(cfg: Config, tokens: int) -> Data:
    samples = RandomTokens(tokens, cfg.model.vocab_size)
    return Data(samples, samples, math.log(cfg.model.vocab_size))


def prediction(cfg: Config, world: World, activations: str) -> dict | None:
    """What ringflash.planning says of this step on these GPUs; None where it does not know them."""
    hardware = known_hardware(world.device)
    if hardware is None:
        return None
    size = world.world_size
    job, = divisions(cfg, layer_masks(cfg.attention), size, size, dp=1, cp=size, ulysses=world.ulysses, activations=activations)
    found = predict(job, hardware)
    return {"seconds": found.time.seconds, "peak_gib": found.memory.live_gib, "mfu": found.time.mfu,
            "parts": dict(found.time.parts)}


def known_hardware(device: torch.device) -> Hardware | None:
    name = torch.cuda.get_device_name(device).lower() if device.type == "cuda" else ""
    return next((found for kind, found in GPUS.items() if kind in name), None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
