"""Sharded weights on a GPU: NCCL's reductions are sums, bf16 layers over fp32 masters, streams, checkpoints written by a thread.

Four ranks on one card or on four: NCCL takes ranks that share one when each has a host id of its own.
"""
import dataclasses
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringflash.config import AttentionConfig, Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from ringflash.data import PackedDataset
from ringflash.degrees import shard_size
from ringflash.tests.support.distributed import check_ranks
from ringflash.train import equivalence
from ringflash.train.checkpoint import Checkpoints
from ringflash.train.sharded import whole
from ringflash.train.text import Data
from ringflash.train.trainer import Trainer
from ringflash.train.world import connect

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
              pytest.mark.timeout(600)]
RANKS = 4
DEGREES = [(1, 4, -1), (4, 1, -1), (2, 2, 2)]
ADAMW = OptimConfig(name="adamw", lr=0.01, warmup_steps=0, grad_clip=0.5)


def config(dp, cp, shard, *, dtype="bf16", accumulation=2, **train) -> Config:
    return Config(
        model=ModelConfig(dim=256, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=512, loss_chunk_rows=100, sinks=True,
                          tie_embeddings=shard == 2),
        data=DataConfig(seq_len=509), attention=AttentionConfig(exchange="nccl", deterministic=True), optim=ADAMW,
        parallel=ParallelConfig(dp=dp, cp=cp, shard=shard, timeout_s=120.0),
        train=TrainConfig(dtype=dtype, accumulation=accumulation, steps=4, **train))


def data_of(cfg: Config) -> Data:
    random = np.random.default_rng(5)
    starts = np.append(np.cumsum(np.append(0, random.integers(1, 300, 400)))[:200], 40_000)
    starts = np.unique(np.minimum(starts, 40_000))
    tokens = (random.integers(0, 40, 40_000) + np.arange(40_000) % 3).astype(np.uint16)
    train, heldout = (PackedDataset(tokens, starts, cfg.data.seq_len, seed=seed, content="synthetic") for seed in (1, 2))
    return Data(train, heldout, 3.0)


def trainer_of(cfg: Config) -> Trainer:
    dp, cp = cfg.parallel.dp, cfg.parallel.cp
    device = torch.device("cuda", torch.cuda.current_device())
    return Trainer(cfg, connect(dp, cp, device, timeout_s=120.0, shard=shard_size(cfg.parallel, dp * cp)), data_of(cfg))


def all_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.detach()).cpu().clone() for name, parameter in trainer.model.named_parameters()}


def body(rank: int, world_size: int, folder: str) -> dict:
    device = torch.device("cuda", torch.cuda.current_device())
    found = {"reports": {}, "losses": {}}
    for degrees in DEGREES:
        for dtype in ("fp32", "bf16"):
            cfg = config(*degrees, dtype=dtype, activations="block_save_attention" if dtype == "bf16" else "none")
            report = equivalence.run(cfg, data_of(cfg), device=device, group=dist.group.WORLD)
            found["reports"][degrees, dtype] = (report.ok, report.table())
    for shard in (1, -1):
        cfg = config(2, 2, shard)
        found["losses"][shard] = trainer_of(cfg).train_step(0).loss
    found["bits"] = []
    for _ in range(2):
        made = trainer_of(config(2, 2, -1))
        found["bits"].append(([made.train_step(step).grad_norm for step in range(2)], all_weights(made)))

    cfg = config(2, 2, -1)
    cfg = dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, every=2, asynchronous=True))
    made = trainer_of(cfg)
    checkpoints = Checkpoints(cfg, made.world, made, Path(folder))
    checkpoints.restore()
    for step in range(4):
        made.train_step(step)
        if step == 1:
            checkpoints.save(2, {})  # goes on while steps 3 and 4 change the weights
    checkpoints.wait()
    checkpoints.close()
    again = trainer_of(cfg)
    checkpoints = Checkpoints(cfg, again.world, again, Path(folder))
    found["resumed at"] = checkpoints.restore()["step"]
    checkpoints.close()
    for step in (2, 3):
        again.train_step(step)
    found["resumed"] = all(torch.equal(weight, all_weights(made)[name]) for name, weight in all_weights(again).items())

    found["bytes"] = {}
    for shard in (1, -1):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = trainer_of(config(1, 4, shard))
        found["bytes"][shard] = (torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before,
                                 4 * made.num_parameters)
        del made
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sharded"))
    return check_ranks(body, RANKS, folder, backend="nccl", timeout_s=500.0, group_timeout_s=120.0)


def test_one_sgd_step_is_that_of_one_rank_in_fp32_and_bf16(ranks):
    for ok, table in ranks[0]["reports"].values():
        assert ok, table


def test_the_forward_has_the_bits_of_replicated_weights(ranks):
    assert ranks[0]["losses"][-1] == ranks[0]["losses"][1]


def test_two_deterministic_runs_have_the_same_bits(ranks):
    for rank in ranks:
        (norms, weights), (norms_again, weights_again) = rank["bits"]
        assert norms == norms_again == ranks[0]["bits"][0][0]
        assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


def test_a_checkpoint_written_while_training_goes_on_is_that_of_its_step(ranks):
    assert all(rank["resumed at"] == 2 and rank["resumed"] for rank in ranks)


def test_a_rank_allocates_its_share(ranks):
    for rank in ranks:
        (replicated, _, size), (sharded, peak, _) = rank["bytes"][1], rank["bytes"][-1]
        assert replicated >= size
        assert sharded <= peak < 0.35 * size, "a quarter, vectors, and what small blocks are rounded up to; also on the way there"
