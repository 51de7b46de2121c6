"""`plan.py measure`: one training step of each length and policy, on real text, in one process: seconds, memory, TFLOP/s, loss.

    python launch/plan.py measure experiment=one_million data.seq_len=262144 --policies none,block --json measured.json
    python launch/plan.py measure experiment=one_million --runs 1048576:block,1048576:offload --json measured.json
    python launch/plan.py measure experiment=one_million --processes 1,2,4 --rows 32768,65536 --json measured.json

A step is that of launch/train.py (its Trainer, data and optimizer). Before each, a short one of the same model and policy compiles
kernels and makes the optimizer's state, and host memory is pinned: neither is in the seconds. --processes starts rings of so many
ranks on this machine. Ranks of a ring that share a card take turns on it: their seconds say nothing and are not compared. The
file is what `plan.py compare --measured` reads; it also lists what was asked for, so that what is missing shows.
"""
from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ringflash.config import Config, validate
from ringflash.launch.check_spawn import Rank, RingFailure, run_ranks
from ringflash.launch.counts import counts
from ringflash.launch.files import check_writable
from ringflash.launch.plan_calibrate import device_at_hand, environment_of
from ringflash.memory_options import ACTIVATIONS
from ringflash.model.host_store import HostStore
from ringflash.train.loop import warm_up_kernel
from ringflash.train.mfu import Meter, most
from ringflash.train.text import open_data
from ringflash.train.trainer import Trainer
from ringflash.train.world import World, connect, single

POLICIES = tuple(policy for policy in ACTIVATIONS if policy != "auto")
WARM_UP_TILES = 2  # of train.tile_rows: a step with more than one tile
WARM_UP_TOKENS = 16384  # where there are no tiles
Run = tuple[int, str]  # tokens of the whole sequence, policy


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", required=True, help="what was measured, written after every step")
    parser.add_argument("--policies", help=f"comma-separated, of {', '.join(POLICIES)} (default: train.activations)")
    parser.add_argument("--runs", metavar="TOKENS:POLICY,...", help="instead of data.seq_len and --policies, in this order")
    parser.add_argument("--processes", type=functools.partial(counts, 1), metavar="N,...",
                        help="rings of so many processes, over NCCL (several on a card, too) or gloo")
    parser.add_argument("--rows", type=functools.partial(counts, 2), metavar="N,...",
                        help="of each rank of such a ring (default: by data.seq_len)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="of a ring of processes (default 600)")


def run(options: argparse.Namespace, read_config: Callable[..., Config]) -> int:
    """0; 1 where a step did not fit the memory."""
    check_writable("--json", options.json)
    cfg = read_config(options.overrides, 1)
    device = device_at_hand(cfg)
    asked = [{"tokens": tokens, "activations": policy, "gpus": size, "layers": cfg.model.num_layers}
             for size in options.processes or (1,) for tokens, policy in runs_of(options, cfg, size)]
    written: dict = {"environment": environment_of(device), "excluded": __doc__.split("\n\n")[2].replace("\n", " "),
                     "asked": asked, "records": []}

    def write() -> None:
        Path(options.json).write_text(json.dumps(written, indent=1) + "\n")

    def note(record: dict) -> None:
        written["records"].append(record)
        print(shown(record), flush=True)
        write()

    write()

    if options.processes is None:
        world = single(device)
        words = [*options.overrides, "parallel.cp=1"]
        measure(cfg, world, runs_of(options, cfg), lambda record: note({"overrides": words + record.pop("more"), **record}))
    for size in options.processes or ():
        ring = replace(cfg, parallel=replace(cfg.parallel, dp=1, cp=size))
        runs = runs_of(options, ring, size)
        for length, _ in runs:
            validate(at(ring, length), size)
            open_data(at(ring, length))     # what is wrong is said here, once; and the ranks find the text prepared
        try:
            ranks = run_ranks(ring_work, size, ring, runs, device_type=device.type, timeout_s=options.timeout,
                              name_of=lambda index, runs=runs: "{:,} tokens, {}".format(*(*runs, runs[-1])[index]))
        except RingFailure as failure:
            print(f"ringflash plan measure: {failure}", file=sys.stderr, flush=True)
            return 1
        for of_ranks in zip(*ranks):
            record = of_all(of_ranks)
            words = [*options.overrides, f"parallel.cp={size}", *record.pop("more")]
            if "seconds" in record and device.type == "cuda" and torch.cuda.device_count() < size:
                record["shared_card_seconds"] = record.pop("seconds")
                words.append("attention.exchange=nccl")  # what auto takes there; copies, with other buffers, need a card per rank
            note({"overrides": words, **record})
    return 1 if any("out_of_memory" in record for record in written["records"]) else 0


def of_all(records: Sequence[dict]) -> dict:
    """One record of those of all ranks: the first's, with the most memory of any; out of memory where a rank was."""
    if failed := [f"rank {rank}: {record['out_of_memory']}" for rank, record in enumerate(records) if "out_of_memory" in record]:
        return {key: records[0][key] for key in ("name", "gpus", "tokens", "more")} | {"out_of_memory": "; ".join(failed)}
    peaks = [record["peak_gib"] for record in records]
    return records[0] | {"peak_gib": max(peaks), "peak_gib_of_ranks": peaks}


def runs_of(options: argparse.Namespace, cfg: Config, ranks: int = 1) -> list[Run]:
    """What was asked for. ValueError for what is no run."""
    if options.runs is not None:
        found = []
        for word in options.runs.split(","):
            tokens, _, policy = word.partition(":")
            if not tokens.isdigit() or int(tokens) < 2 or policy not in POLICIES:
                raise ValueError(f"--runs {word}: must be TOKENS:POLICY, of {', '.join(POLICIES)}")
            found.append((int(tokens), policy))
        return found
    policies = options.policies.split(",") if options.policies else [cfg.train.activations]
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"--policies {policy}: must be of {', '.join(POLICIES)}")
    return [(rows * ranks if options.rows else rows, policy) for rows in options.rows or [cfg.data.seq_len] for policy in policies]


def at(cfg: Config, seq_len: int, **train: object) -> Config:
    """cfg of another length, with other options of train."""
    return replace(cfg, data=replace(cfg.data, seq_len=seq_len), train=replace(cfg.train, **train))


def ring_work(rank: Rank, cfg: Config, runs: Sequence[Run]) -> list[dict]:
    """The work of one rank: its records."""
    world = connect(1, rank.num_processes, rank.device, timeout_s=cfg.parallel.timeout_s, ulysses=cfg.parallel.ulysses)
    found: list[dict] = []

    def note(record: dict) -> None:
        found.append(record)
        rank.at(len(found))

    rank.at(0)
    measure(cfg, world, runs, note)
    return found


def measure(cfg: Config, world: World, runs: Sequence[Run], note: Callable[[dict], None]) -> None:
    """A step of each run on this rank; note() gets {name, gpus, more (overrides), seconds, peak_gib, reserved_gib, host_gib
    (pinned; None without a GPU), tflops_per_gpu, allowed_pairs, loss, grad_norm, data_wait_ms}, or of one that did not fit
    out_of_memory instead of figures."""
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(world.device)
    warm_up_kernel(cfg, world.device)
    short = WARM_UP_TILES * cfg.train.tile_rows * world.cp or WARM_UP_TOKENS
    trainer = None
    for length, policy in runs:
        full, brief = at(cfg, length, activations=policy), at(cfg, min(length, short), activations=policy)
        if trainer is None:
            trainer = Trainer(brief, world, open_data(brief))
        trainer.model.store = HostStore()   # each run's own: a longer one's host memory is not counted with a shorter one's
        for layer in trainer.model.blocks:
            layer.activations, layer.store = policy, trainer.model.store
        record = {"name": f"{length:,} tokens, {policy}", "gpus": world.world_size, "tokens": length,
                  "more": [f"data.seq_len={length}", f"train.activations={policy}"]}
        try:
            trainer.read(brief, open_data(brief))
            trainer.train_step(0)
            trainer.read(full, open_data(full))
            trainer.reserve_host()
            note(record | step(trainer))
        except torch.cuda.OutOfMemoryError as error:
            note(record | {"out_of_memory": str(error)})
        trainer.optimizer.zero_grad(set_to_none=True)


def step(trainer: Trainer) -> dict:
    """One step, timed, with its peak of memory."""
    world, device = trainer.world, trainer.world.device
    gc.collect()
    if device.type == "cuda":
        trainer.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    meter = Meter(trainer)
    meter.memory()
    began = time.perf_counter()
    result = trainer.train_step(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = most(time.perf_counter() - began, world)
    reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0
    flops = meter.step_flops(0)
    return {"seconds": seconds, "peak_gib": meter.memory() / 2**30, "reserved_gib": reserved / 2**30,
            "host_gib": host_bytes(trainer) / 2**30 if device.type == "cuda" else None,
            "tflops_per_gpu": flops / seconds / world.world_size / 1e12,
            "model_flops": flops, "layers": trainer.cfg.model.num_layers, "parameters": trainer.num_parameters,
            "allowed_pairs": allowed_pairs(trainer), "loss": result.loss, "grad_norm": result.grad_norm,
            "data_wait_ms": result.data_wait_ms}


def host_bytes(trainer: Trainer) -> int:
    """Pinned host memory: what layers wait with (in whole chunks), and the optimizer's moments (optim.offload)."""
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    moments = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.is_pinned())
    return trainer.model.store.host_bytes + moments


def allowed_pairs(trainer: Trainer) -> int:
    """(query, key) pairs that the masks of all layers let see each other, of step 0."""
    plain = copy.copy(Meter(trainer))
    plain.matmul_parameters = 0
    return plain.step_flops(0) // (12 * plain.heads["num_heads"] * plain.heads["head_dim"])


def shown(record: dict) -> str:
    if "out_of_memory" in record:
        return f"{record['name']}, {record['gpus']} ranks: out of memory: {record['out_of_memory']}"
    ranks = f"{record['gpus']} rank{'s' if record['gpus'] > 1 else ''}"
    speed = f"{record['seconds']:.2f} s, {record['tflops_per_gpu']:.0f} model-TFLOP/s" if "seconds" in record else "(one card for all)"
    return (f"{record['name']}, {record['layers']} layers, {ranks}: {speed}, peak {record['peak_gib']:.2f} GiB (reserved "
            f"{record['reserved_gib']:.2f}, host {record['host_gib'] or 0:.1f}), loss {record['loss']:.4f}, allowed pairs "
            f"{record['allowed_pairs']:,}")
