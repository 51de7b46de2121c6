"""Small real worlds for the tests of training: processes joined by gloo, a synthetic text, a tiny model."""
import dataclasses
import multiprocessing
import os
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ringflash.config import AttentionConfig, Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from ringflash.data import PackedDataset
from ringflash.train.text import Data

DEADLINE_S = 100.0


def tiny(*, dp: int = 1, cp: int = -1, accumulation: int = 1, seq_len: int = 45, **train) -> Config:
    """SGD without clipping: a gradient that is wrong by a factor shows."""
    return Config(
        model=ModelConfig(vocab_size=257, dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40, head_dim=8,
                          loss_chunk_rows=7),
        data=DataConfig(seq_len=seq_len),
        attention=AttentionConfig(layout="zigzag", kernel="reference"),
        parallel=ParallelConfig(dp=dp, cp=cp, timeout_s=60.0),
        optim=OptimConfig(name="sgd", lr=0.5, warmup_steps=0, weight_decay=0.0, grad_clip=0.0),
        train=TrainConfig(accumulation=accumulation, dtype="fp32", **train),
    )


def text(cfg: Config, num_tokens: int = 4000) -> Data:
    """Documents of 1 to 60 tokens, so that the micro-batches and the ranks have unequal numbers of valid labels."""
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 60, num_tokens)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.append(starts[starts < num_tokens], num_tokens).astype(np.int64)
    tokens = (rng.integers(0, 40, num_tokens) + np.arange(num_tokens) % 3).astype(np.uint16)
    train, heldout = (PackedDataset(tokens, starts, cfg.data.seq_len, seed=seed, content="synthetic") for seed in (1, 2))
    return Data(train, heldout, 3.0)


def with_train(cfg: Config, **values) -> Config:
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **values))


def run_ranks(body, world_size: int, folder: Path) -> list:
    """body(rank) -> anything torch.save takes, on world_size processes joined by gloo; what each returned."""
    # A fork of a server that has imported torch already costs less than an interpreter of its own for each rank.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    results = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [context.Process(target=_rank, args=(body, rank, world_size, folder / "store", results[rank][1]), daemon=True)
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    outcomes = []
    try:
        for rank, (receiver, sender) in enumerate(results):
            sender.close()
            try:
                ready = receiver.poll(max(deadline - time.monotonic(), 0.1))
                outcomes.append(receiver.recv() if ready else ("error", f"rank {rank}: nothing within {DEADLINE_S} s"))
            except EOFError:
                outcomes.append(("error", f"rank {rank}: died"))
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
    errors = [value for kind, value in outcomes if kind == "error"]
    assert not errors, "\n".join(errors)
    return [torch.load(path, weights_only=False) for _, path in outcomes]


def _rank(body, rank: int, world_size: int, store: Path, sender) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
        # Through a file: tensors in a pipe are handles into a process that may be gone.
        torch.save(body(rank), store.with_name(f"rank{rank}.pt"))
        sender.send(("value", str(store.with_name(f"rank{rank}.pt"))))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        sender.send(("error", f"rank {rank}: {traceback.format_exc()}"))
