"""Ring attention over several GPUs: forward and backward by layout and carrier, against one GPU's kernel at equal FLOPs, the
visits with nothing sent, torch's own context parallelism and the package ring-flash-attn.

Layouts: `zigzag` is one causal sequence; `balanced` is 64 packed documents of mixed lengths (lognormal, sigma 1).
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ringflash import Layout, Mask
from ringflash.launch.bench_balance import mixed_documents
from ringflash.launch.bench_kernels import BACKWARD_FLOPS
from ringflash.launch.bench_multi_candidates import HEADS, RING_FLASH_ATTN, Ours, Visits, peer
from ringflash.launch.bench_multi_links import Say, carrier_of
from ringflash.launch.bench_multi_timing import Task, Timing, interleaved
from ringflash.work import Work

NUM_DOCUMENTS = 64
LAYOUTS = ("zigzag", "balanced")
ONE_GPU, SAME_MASK, VISITS = "one GPU", "one GPU, all documents", "visits"


@dataclasses.dataclass(frozen=True)
class Problem:
    """A layout of rows * cp_size tokens with one mask. pairs: allowed (query, key) pairs, all ranks."""
    layout: Layout
    rows: int
    pairs: int

    @property
    def mask(self) -> Mask:
        return self.layout.masks[0]

    @property
    def equal_rows(self) -> int:
        """Rows of the causal sequence that has as many pairs as each rank here on average, to a multiple of 128."""
        return max(128, round(math.sqrt(2 * self.pairs / self.layout.cp_size) / 128) * 128)


def problem(kind: str, rows: int, cp_size: int) -> Problem:
    """kind: of LAYOUTS."""
    seq_len = rows * cp_size
    if kind == "zigzag":
        return Problem(Layout(kind, seq_len, cp_size), rows, seq_len * (seq_len + 1) // 2)
    mask = Mask(cu_seqlens=mixed_documents(seq_len, NUM_DOCUMENTS, 0))
    return Problem(Layout(kind, seq_len, cp_size, mask), rows, Work((mask,), seq_len).total)


def bench(exchanges: Sequence[str], rows_list: Sequence[int], kernel: str, device: torch.device, say: Say, *, repeats: int,
          layouts: Sequence[str], peers: Sequence[str], peers_up_to: int, limit_s: float,
          at_least_ms: float = 50.0) -> list[dict]:
    """One record per rows, layout and candidate: milliseconds, TFLOP/s per GPU, and the share of one GPU's kernel at equal FLOPs.

    limit_s: about so many seconds for the samples of one layout and number of rows, but at least one of each candidate.
    """
    records = []
    for rows in rows_list:
        for kind in layouts:
            chosen = peers if kind == "zigzag" and rows <= peers_up_to else ()
            records += _bench(problem(kind, rows, dist.get_world_size()), exchanges, kernel, device, say, chosen, repeats=repeats,
                              limit_s=limit_s, at_least_ms=at_least_ms)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return records


def _bench(given: Problem, exchanges: Sequence[str], kernel: str, device: torch.device, say: Say, peers: Sequence[str],
           **timed) -> list[dict]:
    layout, size = given.layout, given.layout.cp_size
    runs: dict = {ONE_GPU: Ours(Layout("contiguous", given.equal_rows, 1), device, kernel)}
    if layout.kind != "zigzag":
        runs[SAME_MASK] = Ours(Layout("contiguous", layout.seq_len, 1, given.mask), device, kernel)
    runs[VISITS] = Visits(layout, device, kernel)
    for name in exchanges:
        exchange, group = carrier_of(name)
        runs[name] = Ours(layout, device, kernel, exchange, group)
    failures, differs = {}, {}
    for name in peers:
        label = name if name == RING_FLASH_ATTN else f"torch {name}"
        try:
            found = peer(name, layout.seq_len, device, runs[exchanges[0]])
            differs[label] = found.difference(runs[exchanges[0]])
            runs[label] = found
        except Exception as error:  # what is not installed, or refuses a combination; all ranks alike
            failures[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    tasks = {(name, which): Task(getattr(run, which), getattr(run, "around", None))
             for name, run in runs.items() for which in ("forward", "both")}
    times = interleaved(tasks, device, **timed)
    pairs = {ONE_GPU: given.equal_rows * (given.equal_rows + 1) / 2, SAME_MASK: given.pairs}
    rates = {name: figures(times[name, "forward"], times[name, "both"], pairs.get(name, given.pairs / size)) for name in runs}
    records = []
    for name in (*runs, *failures):
        record = {"section": "ring", "layout": layout.kind, "candidate": name, "rows": given.rows, "cp_size": size,
                  "failure": failures.get(name)}
        if name not in failures:
            record |= rates[name] | shares(rates[name], rates[ONE_GPU], "of_one_gpu")
            record |= shares(rates[name], rates[SAME_MASK], "of_same_mask") if SAME_MASK in runs else {}
            record["kernel"] = name.partition("-")[2] if name in differs else runs[VISITS].backend.name
            record |= {"difference": differs.get(name), "samples": times[name, "both"].samples,
                       "host_ms": times[name, "both"].host_ms}
        records.append(record)
        say(record)
    return records


def figures(forward: Timing, both: Timing, pairs: float, heads: tuple[int, int, int] = HEADS) -> dict[str, float]:
    """Milliseconds and TFLOP/s of a pass over `pairs` pairs; the backward is what both take longer than a forward."""
    flops = 4.0 * pairs * heads[0] * heads[2]
    ms = {"forward": forward.gpu_ms, "backward": both.gpu_ms - forward.gpu_ms, "both": both.gpu_ms}
    work = {"forward": 1.0, "backward": BACKWARD_FLOPS, "both": 1.0 + BACKWARD_FLOPS}
    return {f"{which}_ms": ms[which] for which in ms} | {f"{which}_tflops": work[which] * flops / ms[which] / 1e9 for which in ms}


def shares(rates: Mapping[str, float], base: Mapping[str, float], name: str) -> dict[str, float]:
    return {f"{which}_{name}": rates[f"{which}_tflops"] / base[f"{which}_tflops"] for which in ("forward", "backward", "both")}


def trace(exchanges: Sequence[str], rows: int, kernel: str, device: torch.device, prefix: str) -> None:
    """PREFIX-CARRIER.json of rank 0: a Chrome trace of three forwards and backwards in a row, with kernels, copies and ranges."""
    for name in exchanges:
        run = Ours(problem("zigzag", rows, dist.get_world_size()).layout, device, kernel, *carrier_of(name))
        run.both()
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            for call in range(3):
                with torch.profiler.record_function(f"ring {name} call {call}"):
                    run.both()
            torch.cuda.synchronize(device)
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(f"{prefix}-{name}.json")
