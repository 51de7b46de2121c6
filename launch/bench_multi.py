"""bench multi: everything that needs several GPUs of one host, in one run: one JSON, one table, PNGs.

    python launch/bench.py multi                                       all sections on all GPUs of this host
    python launch/bench.py multi --sections ring --rows 8192,32768     one of them
    python launch/bench.py multi --sections train --train-model llama3_8b --train-tokens 1048576
    torchrun --nproc-per-node 8 launch/bench.py multi --json out.json  under your own torchrun
"""
from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringflash.launch import bench_multi_candidates, bench_multi_check, bench_multi_links, bench_multi_ring, bench_multi_ulysses
from ringflash.launch.bench_multi_show import draw, table
from ringflash.launch.check_spawn import Rank, RingFailure, run_ranks
from ringflash.launch.counts import count, counts, duration
from ringflash.launch.check_table import environment
from ringflash.ring import watchdog

SECTIONS = ("stress", "matrix", "link", "overlap", "nccl", "ring", "ulysses", "train", "trace")

EXCHANGES = ("nccl", "nccl-high", "copy")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run; picklable, for the ranks."""
    sections: tuple[str, ...]
    exchanges: tuple[str, ...]
    kernel: str
    rows: tuple[int, ...]
    layouts: tuple[str, ...]
    ulysses_rows: tuple[int, ...]
    hop_rows: tuple[int, ...]
    sizes_mib: tuple[int, ...]
    channels: tuple[int, ...]
    spare_sms: tuple[int, ...]
    peers: tuple[str, ...]
    peers_up_to: int
    steps: int
    kernels: tuple[str, ...]
    dtypes: tuple[str, ...]
    repeats: int
    limit_s: float
    json: str | None
    trace: str | None
    train: Any = None                       # bench_multi_train.Job


def add_parser(what: argparse._SubParsersAction) -> None:
    sub = what.add_parser("multi", help="several GPUs of one host", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.add_argument("--sections", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)} (default: all)")
    sub.add_argument("--exchanges", default=",".join(EXCHANGES), help="nccl-high: NCCL on a stream of high priority")
    sub.add_argument("--processes", type=count(1), default=None, help="ranks (default: one per GPU, or what torchrun started)")
    sub.add_argument("--kernel", default="auto", help="of the timed sections")
    sub.add_argument("--rows", default="2048,4096,8192,16384,32768,65536,131072", help="rows per GPU of the ring")
    sub.add_argument("--layouts", default=",".join(bench_multi_ring.LAYOUTS),
                     help="of the ring: zigzag (one causal sequence), balanced (64 packed documents of mixed lengths)")
    sub.add_argument("--ulysses-rows", default="4096,32768", help="rows per GPU of the factorisations ring x Ulysses")
    sub.add_argument("--hop-rows", default="2048,4096,8192,16384,32768", help="rows of a hop beside a kernel")
    sub.add_argument("--sizes-mib", default="1,4,16,64,256", help="messages of the bandwidth curve")
    sub.add_argument("--channels", default="0,4,8,16,32", help="NCCL channels to try; 0 is NCCL's choice")
    sub.add_argument("--spare-sms", default="0", help="SMs that the kernel leaves free beside NCCL (persistent kernels only)")
    sub.add_argument("--peers", default=",".join(bench_multi_candidates.PEERS),
                     help="of the causal ring (default: all): how torch's context_parallel sends K and V and which SDPA "
                          "kernel computes, or the package ring-flash-attn, where it is installed")
    sub.add_argument("--peers-up-to", type=count(0), default=32768, help="most rows per GPU for these")
    sub.add_argument("--steps", type=count(1), default=10_000, help="of the stress of the signals")
    sub.add_argument("--kernels", default="triton", help="kernels of the correctness matrix")
    sub.add_argument("--dtypes", default="bf16,fp32")
    sub.add_argument("--repeats", type=count(1), default=5)
    sub.add_argument("--limit", type=duration, default=30.0, dest="limit_s",
                     help="seconds for the samples of one problem of ring or ulysses: fewer repeats where they would take longer")
    sub.add_argument("--train-model", default="llama3_1b", help="of configs/model")
    sub.add_argument("--train-tokens", type=count(1), default=262_144, help="of the training step, all GPUs together")
    sub.add_argument("--train-steps", type=count(1), default=3)
    sub.add_argument("--train-same-tokens", type=count(0), default=16_384,
                     help="length at which the first step is compared with one GPU; 0: not")
    sub.add_argument("--train-overrides", default="", help="more of them, as of launch/train.py, with spaces between")
    sub.add_argument("--timeout", type=duration, default=3600.0, help="seconds for everything")
    sub.add_argument("--json", default=None, metavar="PATH", help="every record; written as they come")
    sub.add_argument("--trace", default=None, metavar="PREFIX", help="PREFIX-nccl.json, PREFIX-copy.json: traces at 8,192 rows")
    sub.add_argument("--png", default=None, metavar="PREFIX", help="PREFIX-links.png, PREFIX-overlap.png, PREFIX-ring.png")


def read(options: argparse.Namespace) -> Plan:
    """ValueError for options that make no sense."""
    def words(text: str) -> tuple[str, ...]:
        return tuple(filter(None, text.split(",")))

    def numbers(name: str, least: int) -> tuple[int, ...]:
        try:
            return counts(least, getattr(options, name.replace("-", "_")))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--{name}: {error}") from None

    sections = tuple(name for name in words(options.sections) if name != "trace" or options.trace)
    if unknown := [name for name in sections if name not in SECTIONS]:
        raise ValueError(f"--sections={unknown[0]}: unknown; valid: {', '.join(SECTIONS)}")
    exchanges = words(options.exchanges)
    if not exchanges or set(exchanges) - set(EXCHANGES):
        raise ValueError(f"--exchanges={options.exchanges}: valid are {', '.join(EXCHANGES)}")
    peers = words(options.peers)
    layouts = words(options.layouts)
    for option, chosen, valid in (("peers", peers, bench_multi_candidates.PEERS), ("layouts", layouts, bench_multi_ring.LAYOUTS)):
        if unknown := [name for name in chosen if name not in valid]:
            raise ValueError(f"--{option}={unknown[0]}: unknown; valid: {', '.join(valid)}")
    return Plan(
        sections, exchanges, options.kernel, numbers("rows", 1), layouts, numbers("ulysses-rows", 1), numbers("hop-rows", 1),
        numbers("sizes-mib", 1),
        numbers("channels", 0), numbers("spare-sms", 0), peers, options.peers_up_to, options.steps,
        words(options.kernels), words(options.dtypes), options.repeats, options.limit_s, options.json, options.trace)


def with_train(plan: Plan, options: argparse.Namespace, num_ranks: int) -> Plan:
    """The plan with the training step of the options on so many ranks, where it has that section. ValueError: it cannot be."""
    if "train" not in plan.sections:
        return plan
    from ringflash.launch import bench_multi_train

    cfg = bench_multi_train.configuration(options.train_model, options.train_tokens, options.train_overrides.split(), num_ranks)
    job = bench_multi_train.Job(options.train_model, cfg, options.train_steps, options.train_same_tokens)
    return dataclasses.replace(plan, train=job)


def run_rank(rank: Rank, plan: Plan) -> list[dict]:
    """All sections, on one rank; rank 0's records are complete."""
    records: list[dict] = []

    def say(record: dict) -> None:
        records.append(record)
        if rank.rank == 0:
            shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
            print(json.dumps(shown), flush=True)
            save(plan.json, records)

    def train() -> None:
        from ringflash.launch import bench_multi_train

        bench_multi_train.bench(plan.train, device, say)

    device, timed = rank.device, dict(repeats=plan.repeats)
    carriers = [name for name in plan.exchanges if name != "nccl-high"]
    cells = bench_multi_check.matrix_cells(plan.kernels, plan.dtypes, rank.num_processes)
    work: dict[str, Callable[[], object]] = {
        "stress": lambda: bench_multi_check.stress(rank, plan.steps, say),
        "matrix": lambda: bench_multi_check.matrix(rank, carriers, cells, say, delay_ms=1.0),
        "link": lambda: bench_multi_links.bandwidth(plan.exchanges, plan.sizes_mib, device, say, **timed),
        "overlap": lambda: bench_multi_links.overlap(plan.exchanges, plan.hop_rows, plan.kernel, device, say, **timed),
        "nccl": lambda: bench_multi_links.nccl_sweep(plan.channels, 8192, plan.kernel, device, say, spare_sms=plan.spare_sms,
                                                     **timed),
        "ring": lambda: bench_multi_ring.bench(plan.exchanges, plan.rows, plan.kernel, device, say, layouts=plan.layouts,
                                               peers=plan.peers, peers_up_to=plan.peers_up_to, limit_s=plan.limit_s, **timed),
        "ulysses": lambda: bench_multi_ulysses.bench(carriers, plan.ulysses_rows, plan.kernel, device, say, limit_s=plan.limit_s,
                                                     **timed),
        "train": train,
        "trace": lambda: bench_multi_ring.trace(plan.exchanges, 8192, plan.kernel, device, plan.trace),
    }
    for index, section in enumerate(plan.sections):
        rank.at(index)
        start = time.monotonic()
        try:
            work[section]()
        except RuntimeError as error:       # what all ranks find alike (no copy engines, a kernel that cannot run) ends a section
            say({"section": section, "failure": str(error).splitlines()[0][:300]})
        if rank.rank == 0:
            print(f"{section}: {time.monotonic() - start:.1f} s", flush=True)
    return records


def save(path: str | None, records: Sequence[dict]) -> None:
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        whole = {"environment": environment(), "what": "multi", "records": list(records)}
        Path(path).write_text(json.dumps(whole, indent=1) + "\n")


def main(options: argparse.Namespace) -> int:
    """0: all ran, and what was checked held. 1: something did not. ValueError for impossible options."""
    plan = read(options)
    if not torch.cuda.is_available():
        raise ValueError("bench multi: needs GPUs, and there is none here")
    if "RANK" in os.environ and "LOCAL_RANK" in os.environ:
        records = _under_torchrun(with_train(plan, options, int(os.environ["WORLD_SIZE"])), options.timeout)
    else:
        number = options.processes or torch.cuda.device_count()
        if not 2 <= number <= torch.cuda.device_count():
            raise ValueError(f"bench multi: {number} ranks on {torch.cuda.device_count()} GPUs: must be at least 2, one GPU each")
        plan = with_train(plan, options, number)
        try:
            records = run_ranks(run_rank, number, plan, device_type="cuda", timeout_s=options.timeout,
                                name_of=lambda index: plan.sections[index])[0]
        except RingFailure as error:
            print(f"bench multi: {error}", flush=True)
            return 1
    if records is None:
        return 0
    print(f"\n{', '.join(f'{key} {value}' for key, value in environment().items())}")
    print(table(records), flush=True)
    save(plan.json, records)
    if options.png:
        draw(records, options.png)
    return 0 if all(map(held, records)) else 1


def held(record: dict) -> bool:
    """Of a record that checks something: whether it held. One candidate among others may have failed, a section may not."""
    if "candidate" not in record and record.get("failure") is not None:
        return False
    if record.get("what") == "same":
        return record["ok"]
    if record["section"] == "matrix":
        return record["ok"] == record["cells"]
    return record["section"] != "stress" or record["ok"]


def _under_torchrun(plan: Plan, timeout_s: float) -> list[dict] | None:
    """This process is a rank already. Rank 0's records; None on the others."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=timeout_s))
    watchdog.start(min(timeout_s, 120.0))
    rank = dist.get_rank()
    records = run_rank(Rank(rank, dist.get_world_size(), device, [0] * dist.get_world_size()), plan)
    watchdog.stop()
    dist.destroy_process_group()
    return records if rank == 0 else None
