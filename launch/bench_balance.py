"""What uneven masks cost on a ring: the kernel time of each rank over all its steps, against its share of the allowed pairs at
the speed that the same kernel has on a dense causal problem, measured in the same run, turn by turn.

Kernels alone, on one device: every visit of every rank with the blocks and intervals that a ring gives it, no copies, no network.
The backward is delta and all visits, gradients in fp32, without their downcast (in the dense problem too).
A GPU at its power limit lowers its clock within milliseconds, and raises it in pauses: so a rank's pass is repeated, one behind the
other, until that takes as long as the dense problem once, and all is measured at the clocks of steady work. As many passes before
them are not timed: the host, which queues them faster than they run, is then ahead of the GPU. Who follows whom changes from turn
to turn.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.launch.bench_kernels import BACKWARD_FLOPS
from ringflash.launch.check_cells import DTYPES
from ringflash.launch.check_table import environment, grid
from ringflash.launch.counts import count
from ringflash.ring.documents import lognormal_documents
from ringflash.ring.gathered import GatheredVisit, OwnVisit, positions_of, visits_of
from ringflash.ring.loop import intervals_of, turns_of
from ringflash.ring.plan import Plan, Visit, build_plan

MOST_TIMES = 32  # that a pass is repeated in one sample
CYCLES_PER_MS, LEAD_MS = 2_000_000, 4.0     # of torch.cuda._sleep: the host queues a rank's visits while the GPU sleeps
GPU, CPU = (dict(seq_len=131072, dense_rows=32768, heads=(32, 8, 128), dtype="bf16"),
            dict(seq_len=512, dense_rows=256, heads=(4, 2, 16), dtype="fp32"))
PASSES = ("forward", "backward")


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask (arguments of Mask, as pairs) over seq_len tokens on cp_size ranks. group: cases whose times are to be compared."""
    name: str
    seq_len: int
    cp_size: int
    layout: str
    options: tuple[tuple[str, Any], ...]
    group: str = ""

    def plan(self) -> Plan:
        mask = Mask(**dict(self.options))
        return build_plan(mask, Layout(self.layout, self.seq_len, self.cp_size, mask))


def mixed_documents(seq_len: int, count: int, seed: int) -> tuple[int, ...]:
    """cu_seqlens of `count` documents that fill seq_len tokens, lengths lognormal with sigma 1."""
    shares = np.random.default_rng(seed).lognormal(0.0, 1.0, count)
    return (0, *np.maximum.accumulate(np.round(np.cumsum(shares) / shares.sum() * seq_len)).astype(int).tolist())


def cases(seq_len: int, cp_size: int, seeds: Sequence[int]) -> list[Case]:
    """Sizes of long documents and windows are those at 131,072 tokens; other lengths keep their share of it."""
    unit = seq_len / 131072

    def size(tokens: int) -> int:
        return max(1, round(tokens * unit))

    def documents(name: str, ends: Sequence[int], ranks: int = cp_size, layout: str = "balanced", group: str = "") -> Case:
        return Case(name, seq_len, ranks, layout, (("cu_seqlens", tuple(ends)),), group)

    found = []
    for sigma in (1.0, 1.5):
        for seed in seeds:
            for first in (None, 65536):
                ends = lognormal_documents(seq_len, sigma, seed, mean=size(2048), longest=size(65536),
                                           first=first and size(first))
                found.append(documents(f"lognormal {sigma} seed {seed}" + (" + one of 64k" if first else ""), ends))
    found.append(documents("64 mixed", mixed_documents(seq_len, 64, seeds[0])))
    for ranks in sorted({1, cp_size}):
        window = (("window_size", (size(4096) - 1, 0)),)
        found.append(Case("window 4,096", seq_len, ranks, "contiguous", window))
    for length in (128, 32):
        found.append(documents(f"documents of {length}", range(0, seq_len + 1, length), 1, "contiguous", "short"))
    return found


class Clock:
    """Marks on the device's time line; milliseconds between them are asked for after a synchronisation."""

    def __init__(self, device: torch.device):
        self.device, self.marks = device, []

    def mark(self, step: int) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((step, event))
        else:
            self.marks.append((step, time.perf_counter()))

    def ms_by_step(self) -> dict[int, float]:
        """Time up to each mark, since the one before it, added up by step."""
        found: dict[int, float] = {}
        for (_, before), (step, mark) in zip(self.marks, self.marks[1:]):
            ms = before.elapsed_time(mark) if self.device.type == "cuda" else (mark - before) * 1e3
            found[step] = found.get(step, 0.0) + ms
        return found


class RankKernels:
    """All visits of one rank: what loop.py launches, with every block there already."""

    def __init__(self, plan: Plan, rank: int, tensors: Sequence[torch.Tensor], backend: dispatch.Backend):
        self.backend, self.scale = backend, tensors[0].shape[3] ** -0.5
        rows, device = torch.from_numpy(plan.layout.positions(rank)), tensors[0].device
        self.q, self.dout = (x.index_select(1, rows.to(device)) for x in (tensors[0], tensors[3]))
        self.visits: dict[str, list[tuple[Visit | OwnVisit | GatheredVisit, torch.Tensor, torch.Tensor, Any]]] = {}
        for pass_ in PASSES:
            self.visits[pass_] = found = []
            for visit in (v for step in range(plan.num_steps) for v in visits_of(plan, rank, step, pass_)):
                index = torch.from_numpy(positions_of(plan, visit)).to(device)
                # As it arrives: rows first, K and V side by side.
                block = torch.cat([x.index_select(1, index) for x in tensors[1:3]], dim=-1).transpose(0, 1).contiguous()
                k, v = block.transpose(0, 1).split(tensors[1].shape[3], dim=-1)
                found.append((visit, k, v, intervals_of(plan, visit, device)))
        takes_turns = len(self.visits["forward"]) > 1 and getattr(backend, "takes_turns", False)
        self.turns = turns_of(plan, rank, False) if takes_turns else None
        acc = dispatch.accumulate_dtype(self.q.dtype)
        self.out, self.state = torch.empty_like(self.q), torch.empty(self.q.shape, dtype=acc, device=device)
        self.lse = torch.empty(self.q.shape[0], self.q.shape[2], self.q.shape[1], dtype=acc, device=device)
        self.dq = torch.empty(self.q.shape, dtype=acc, device=device)
        longest = max(k.shape[1] for _, k, _, _ in self.visits["backward"])
        shape = (tensors[1].shape[0], longest, *tensors[1].shape[2:])
        self.dk, self.dv = (torch.empty(shape, dtype=acc, device=device) for _ in range(2))

    def forward(self, mark: Callable[[int], None]) -> None:
        last = len(self.visits["forward"]) - 1
        for index, (visit, k, v, intervals) in enumerate(self.visits["forward"]):
            turn = {} if self.turns is None else {"turn": self.turns[index]}
            self.backend.forward(self.q, k, v, intervals, softmax_scale=self.scale, state=self.state if last else None,
                                 lse=self.lse, out=self.out if turn or index == last else None, first=index == 0, **turn)
            mark(visit.step)

    def backward(self, mark: Callable[[int], None]) -> None:
        delta = self.backend.delta(self.dout, self.out)
        before = None
        for index, (visit, k, v, intervals) in enumerate(self.visits["backward"]):
            dk, dv = (x[:, : k.shape[1]] for x in (self.dk, self.dv))
            again = before is not None and before.key[:-1] == visit.key[:-1]
            self.backend.backward(self.dout, self.q, k, v, self.lse, delta, intervals, softmax_scale=self.scale, dq=self.dq,
                                  dk=dk, dv=dv, accumulate_dq=index > 0, accumulate_dkv=again, deterministic=False)
            before = visit
            mark(visit.step)


def draw(seq_len: int, heads: Sequence[int], dtype: str, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q [1, S, Hq, D], k, v [1, S, Hkv, D], dout [1, S, Hq, D]: random, never zeros (zeros run faster)."""
    generator = torch.Generator(device).manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    return tuple(torch.randn(1, seq_len, n, head_dim, generator=generator, device=device, dtype=torch.float32).to(DTYPES[dtype])
                 for n in (num_heads, num_kv_heads, num_kv_heads, num_heads))


def timed(kernels: RankKernels, pass_: str, device: torch.device, times: int = 1) -> dict[int, float]:
    """Milliseconds by step of one pass of one rank: on average over `times`, one behind the other and, on a GPU, behind as many that only
    lead."""
    clock = Clock(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(int(LEAD_MS * CYCLES_PER_MS))
        for _ in range(times):
            getattr(kernels, pass_)(lambda step: None)
    clock.mark(-1)
    for _ in range(times):
        getattr(kernels, pass_)(clock.mark)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return {step: ms / times for step, ms in clock.ms_by_step().items()}


def bench_case(case: Case, tensors: Sequence[torch.Tensor], dense: RankKernels, dense_pairs: int, backend: dispatch.Backend, *,
               repeats: int, warmup: int) -> dict:
    """One record: per pass the slowest rank's milliseconds, and what its share of the pairs takes at the dense kernel's speed."""
    plan, device = case.plan(), tensors[0].device
    tensors = [x[:, : case.seq_len] for x in tensors]
    ranks = [RankKernels(plan, rank, tensors, backend) for rank in range(case.cp_size)]
    pairs = [[plan.num_pairs(rank, step) for step in range(plan.num_steps)] for rank in range(case.cp_size)]
    total = sum(map(sum, pairs))
    record: dict[str, Any] = {
        "case": case.name, "group": case.group, "tokens": case.seq_len, "cp_size": case.cp_size, "layout": case.layout,
        "pairs": total, "pairs_busiest": max(map(sum, pairs)) * case.cp_size / total, "failure": None}
    for pass_ in PASSES:
        samples: list[list[dict[int, float]]] = [[] for _ in ranks]
        of_dense = []
        first = [sum(timed(kernels, pass_, device).values()) for kernels in (dense, *ranks)]
        times = [1 if device.type == "cpu" else min(MOST_TIMES, max(1, round(first[0] / ms))) for ms in first]
        for turn in range(warmup + repeats):
            measured: list[dict[int, float]] = [{} for _ in times]
            for i in random.Random(turn).sample(range(len(times)), len(times)):
                measured[i] = timed((dense, *ranks)[i], pass_, device, times[i])
            if turn >= warmup:
                of_dense.append(sum(measured[0].values()))
                for found, of_rank in zip(samples, measured[1:]):
                    found.append(of_rank)
        dense_ms = statistics.median(of_dense)
        share_ms = total / case.cp_size * dense_ms / dense_pairs
        by_rank = [statistics.median(sum(found.values()) for found in of_rank) for of_rank in samples]
        steps = [max(statistics.median(found.get(step, 0.0) for found in of_rank) for of_rank in samples)
                 for step in range(plan.num_steps)]
        slowest = max(by_rank)
        record[pass_] = {"dense_ms": dense_ms, "share_ms": share_ms, "slowest_ms": slowest, "slowest": slowest / share_ms,
                         "step_by_step": sum(steps) / share_ms, "of_dense_speed": case.cp_size * share_ms / sum(by_rank),
                         "rank_ms": by_rank}
    record["difference"] = difference(ranks, plan, tensors, backend)
    return record


def difference(ranks: Sequence[RankKernels], plan: Plan, tensors: Sequence[torch.Tensor], backend: dispatch.Backend) -> float:
    """Largest difference of out and dq from one rank's, over their largest value: it was this problem that was timed."""
    whole = build_plan(plan.mask, Layout("contiguous", plan.layout.seq_len, 1, plan.mask))
    one = RankKernels(whole, 0, tensors, backend)
    one.forward(lambda step: None)
    one.backward(lambda step: None)
    worst = 0.0
    for name in ("out", "dq"):
        largest = float(getattr(one, name).abs().max())
        for rank, kernels in enumerate(ranks):
            rows = torch.from_numpy(plan.layout.positions(rank)).to(tensors[0].device)
            off = (getattr(kernels, name).float() - getattr(one, name)[:, rows].float()).abs()
            worst = max(worst, float(off.max()) / largest if off.numel() else 0.0)
    return worst


def table(records: Sequence[dict], dense_pairs: int, heads: Sequence[int]) -> str:
    rows = []
    for record in records:
        if record["failure"] is not None:
            rows.append([record["case"], record["layout"], record["cp_size"], *["-"] * 9])
            continue
        shown = [record["case"], record["layout"], record["cp_size"], f"{record['pairs'] / 1e6:.1f}",
                 f"{record['pairs_busiest']:.3f}"]
        for found in (record[pass_] for pass_ in PASSES):
            shown += [f"{found['slowest_ms']:.3f}", f"{found['slowest']:.2f}", f"{found['of_dense_speed']:.2f}"]
        rows.append([*shown, f"{record['difference']:.0e}"])
    header = ["case", "layout", "W", "M pairs", "busiest", "fwd ms", "x share", "of dense", "bwd ms", "x share", "of dense",
              "differs"]
    lines = [grid(header, rows)]
    good = [record for record in records if record["failure"] is None]
    for pass_, factor in zip(PASSES, (1.0, BACKWARD_FLOPS)):
        speeds = [4.0 * dense_pairs * heads[0] * heads[2] * factor / record[pass_]["dense_ms"] / 1e9 for record in good]
        if speeds:
            lines.append(f"dense causal {pass_}: {min(speeds):.1f} to {max(speeds):.1f} TFLOP/s")
    short = [record for record in good if record["group"] == "short"]
    for other in short[1:]:
        ratios = " / ".join(f"{other[pass_]['slowest_ms'] / short[0][pass_]['slowest_ms']:.2f}" for pass_ in PASSES)
        lines.append(f"{other['case']} over {short[0]['case']}, as many tokens, time forward / backward: {ratios}")
    return "\n".join(lines)


def add_parser(commands: Any) -> None:
    sub = commands.add_parser("balance", help="each rank's kernel time against its share of the pairs", description=__doc__,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    sub.add_argument("--kernel", default="auto", help=f"of {', '.join(dispatch.KERNELS)}")
    sub.add_argument("--cp-size", type=count(1), default=8)
    sub.add_argument("--seq-len", type=count(1), default=None, help="tokens (default 131072; without a GPU 512)")
    sub.add_argument("--dense-rows", type=count(1), default=None, help="tokens of the dense causal problem (32768; 256)")
    sub.add_argument("--heads", type=int, nargs=3, default=None, metavar=("HQ", "HKV", "D"), help="default 32 8 128")
    sub.add_argument("--dtype", default=None, choices=tuple(DTYPES))
    sub.add_argument("--seeds", type=count(0), nargs="+", default=(0,), help="of the lognormal documents")
    sub.add_argument("--cases", default=None, help="comma-separated beginnings of names: only those cases")
    sub.add_argument("--repeats", type=count(1), default=5)
    sub.add_argument("--warmup", type=count(0), default=1)
    sub.add_argument("--json", default=None, metavar="PATH")


def main(options: argparse.Namespace) -> int:
    """0 when every case ran, and on the ring gave what one rank gives; 1 otherwise. ValueError: options that make no sense."""
    device = torch.device(options.device)
    defaults = GPU if device.type == "cuda" else CPU
    seq_len, dense_rows, heads, dtype = (defaults[name] if getattr(options, name) is None else getattr(options, name)
                                         for name in ("seq_len", "dense_rows", "heads", "dtype"))
    if min(heads) < 1 or heads[0] % heads[1]:
        raise ValueError(f"--heads={' '.join(map(str, heads))}: HQ must be a multiple of HKV, and all at least 1")
    found = cases(seq_len, options.cp_size, options.seeds)
    wanted = None if options.cases is None else [text.strip() for text in options.cases.split(",")]
    chosen = [case for case in found if wanted is None or any(case.name.startswith(text) for text in wanted)]
    if not chosen:
        raise ValueError(f"--cases={options.cases}: none begins so; there are {', '.join(dict.fromkeys(c.name for c in found))}")
    try:
        backend = dispatch.select(options.kernel, device=device, dtype=DTYPES[dtype], head_dim=heads[2])
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    print(", ".join(f"{key} {value}" for key, value in environment().items()) + f", kernel {backend.name}")
    if device.type != "cuda":
        print("no GPU: a smoke test of the benchmark, not a measurement")
    tensors = draw(max(seq_len, dense_rows), heads, dtype, device)
    mask = Mask()
    dense = RankKernels(build_plan(mask, Layout("contiguous", dense_rows, 1)), 0, [x[:, :dense_rows] for x in tensors], backend)
    dense_pairs, records = dense_rows * (dense_rows + 1) // 2, []
    for case in chosen:
        try:
            records.append(bench_case(case, tensors, dense, dense_pairs, backend, repeats=options.repeats, warmup=options.warmup))
        except Exception as error:  # a case that cannot run says why, and the others go on
            what = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            records.append({"case": case.name, "layout": case.layout, "cp_size": case.cp_size, "group": case.group,
                            "failure": what})
        done = records[-1]
        print(f"{done['case']}, W={done['cp_size']}: " + (done["failure"] or f"slowest rank {done['forward']['slowest']:.2f} / "
              f"{done['backward']['slowest']:.2f} of its share"), flush=True)
    print(f"\n{heads[0]} query heads, {heads[1]} key/value heads, D={heads[2]}, {dtype}, {seq_len} tokens, W ranks on one "
          "device\n"
          "ms: the slowest rank's kernels; x share: over (allowed pairs / W) at the dense kernel's speed;\n"
          "of dense: TFLOP/s of all ranks over the dense kernel's, counting allowed pairs alone\n\n"
          f"{table(records, dense_pairs, heads)}", flush=True)
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        whole = {"environment": environment(), "what": "balance", "kernel": backend.name, "heads": list(heads), "dtype": dtype,
                 "dense_rows": dense_rows, "records": records}
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if all(r["failure"] is None and r["difference"] <= 0.05 for r in records) else 1
