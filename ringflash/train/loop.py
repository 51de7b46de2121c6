"""A run from its first step to its summary, and the life of a rank around it."""
from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ringflash.config import Config, parallel_degrees
from ringflash.ring import watchdog
from ringflash.ring.heads import HeadSplit
from ringflash.train.record import Recorder, save_weights
from ringflash.train.text import Data, open_data
from ringflash.train.trainer import NonFiniteError, Trainer, activation_dtype, model_config, select_kernel
from ringflash.train.world import World, connect, pick_device

_LAST_STEPS = 10  # over which the summary averages the training loss
# The group gives up later than the watchdog, which knows step, hop and peer.
_GROUP_GRACE_S = 30.0


def train(cfg: Config, world: World, data: Data, folder: Path | None) -> dict:
    """All steps and evaluations of cfg; returns the summary. `folder` is where rank 0 writes (None: nowhere)."""
    trainer = Trainer(cfg, world, data)
    recorder = Recorder(folder if world.rank == 0 else None, cfg)
    start = time.perf_counter()
    tokens = 0
    trained_s = 0.0
    losses: list[float] = []
    try:
        for step in range(cfg.train.steps):
            began = time.perf_counter()
            result = trainer.train_step(step)
            step_s = time.perf_counter() - began
            trained_s += step_s
            tokens += result.tokens
            losses.append(result.loss)
            recorder.step({"step": step + 1, "loss": result.loss, "lr": result.lr, "grad_norm": result.grad_norm,
                           "tokens": tokens, "valid_tokens": result.valid_tokens, "tokens_per_s": result.tokens / step_s,
                           "time_s": time.perf_counter() - start})
            last = step + 1 == cfg.train.steps
            if last or (cfg.train.eval_every and (step + 1) % cfg.train.eval_every == 0):
                heldout_loss, heldout_tokens = trainer.evaluate()
                recorder.evaluation({"step": step + 1, "heldout_loss": heldout_loss, "valid_tokens": heldout_tokens,
                                     "time_s": time.perf_counter() - start})
    finally:
        recorder.close()
    summary = {
        "steps": cfg.train.steps,
        "parameters": sum(p.numel() for p in trainer.parameters),
        "ranks": f"dp {world.dp} x cp {world.cp}{_shared(world)} on {world.device.type}",
        "kernel": select_kernel(cfg, world.device).name,
        "tokens": tokens,
        "tokens_per_s": tokens / trained_s,
        "time_s": time.perf_counter() - start,
        "first_loss": losses[0],
        f"train_loss_last_{_LAST_STEPS}": sum(losses[-_LAST_STEPS:]) / len(losses[-_LAST_STEPS:]),
        "heldout_loss": heldout_loss,
        "unigram_entropy": data.unigram_nats,
    }
    if world.device.type == "cuda":
        summary["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if world.rank == 0 and folder is not None:
        if cfg.run.save_weights:
            save_weights(folder / "weights.pt", trainer.model)
        recorder.finish(summary, plot=cfg.run.plot, unigram_nats=data.unigram_nats)
    return summary


def run(cfg: Config, *, store: dist.Store, rank: int, world_size: int, folder: Path) -> int:
    """A rank's whole life after the start was agreed on. Returns the exit code, 0 only if this rank did all its work."""
    dp, cp = parallel_degrees(cfg, world_size)
    device = pick_device(cfg.run.device, int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    data = open_data(cfg)
    # Before the first collective: a compile that one rank is still busy with looks like a hang to the others.
    model = model_config(cfg)
    heads = HeadSplit(model.num_heads, model.num_kv_heads, cfg.parallel.ulysses)
    select_kernel(cfg, device).warmup(
        activation_dtype(cfg, device), model.resolved_head_dim, device, batch=cfg.data.batch_size, num_heads=heads.per_rank,
        num_kv_heads=heads.local_kv_heads, deterministic=cfg.attention.deterministic, softcap=model.softcap)
    try:
        world = connect(dp, cp, device, timeout_s=cfg.parallel.timeout_s + _GROUP_GRACE_S, store=store, rank=rank,
                        ulysses=cfg.parallel.ulysses)
        watchdog.start(cfg.parallel.timeout_s, store.clone() if world_size > 1 else None)
        train(cfg, world, data, folder)
    except NonFiniteError as error:
        if rank == 0:
            print(f"ringflash train: {error}", file=sys.stderr, flush=True)
        if dist.is_initialized():
            # All ranks are here. Nobody leaves before rank 0 has spoken: the launcher kills the rest at the first exit.
            dist.barrier()
        return _leave(1)
    except Exception:
        # With its traceback, from every rank that has one: a ring that breaks looks different from each side.
        print(f"rank {rank}: {traceback.format_exc()}{watchdog.describe()}", file=sys.stderr, flush=True)
        return _leave(1)
    watchdog.stop()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


def _leave(code: int) -> int:
    """Ends the process without destructors: those of a group whose peer is gone may wait for ever."""
    sys.stdout.flush()
    os._exit(code)


def _shared(world: World) -> str:
    return "" if world.ulysses == 1 else f" (ring {world.cp // world.ulysses} x ulysses {world.ulysses})"
