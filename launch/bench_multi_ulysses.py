"""Every way to spread one attention layer over these ranks: ring x Ulysses of each shape, all of K and V gathered at once, each
timed and beside what `ringflash.ring.cost` says of it with one GPU's rates of this run."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringflash import Layout, Mask
from ringflash.launch.bench_multi_candidates import DTYPE, Ours
from ringflash.launch.bench_multi_links import Say
from ringflash.launch.bench_multi_ring import figures
from ringflash.launch.bench_multi_timing import Task, interleaved
from ringflash.ring.cost import Estimate, Machine, compare
from ringflash.ring.rotate import Heads

HEADS = ((32, 32, 128), (32, 8, 128))       # (Hq, Hkv, D): every query head its own keys, and four that share them
SAYS_NOTHING = 0.05                         # a smaller difference between two ways is none, of estimates and of times


def ways(rows: int, size: int, heads: tuple[int, int, int], machine: Machine) -> list[Estimate]:
    """Cheapest first, of a causal zigzag sequence of rows * size tokens."""
    return compare(Mask(), rows * size, size, Heads(1, *heads, itemsize=DTYPE.itemsize), machine=machine)


def bench(exchanges: Sequence[str], rows_list: Sequence[int], kernel: str, device: torch.device, say: Say, *, repeats: int,
          limit_s: float, heads_list: Sequence[tuple[int, int, int]] = HEADS, at_least_ms: float = 50.0) -> list[dict]:
    """One record per rows, heads, way and carrier of its ring: milliseconds, and those of the estimate."""
    records, size = [], dist.get_world_size()
    meshes: dict[int, dist.DeviceMesh] = {}
    for rows in rows_list:
        for heads in heads_list:
            alone = max(128, round(rows * size ** 0.5 / 128) * 128)
            runs = {"one GPU": Ours(Layout("contiguous", alone, 1), device, kernel, heads=heads)}
            of_run: dict[str, tuple[int, str, str]] = {}
            for way in ways(rows, size, heads, Machine()):
                layout = Layout("zigzag", rows * size, way.ring, Mask(), way.ulysses)
                if way.ulysses not in meshes:
                    shape = way.ring, way.ulysses
                    meshes[way.ulysses] = init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses"))
                group = meshes[way.ulysses] if way.ulysses > 1 else dist.group.WORLD
                for exchange in exchanges if way.ring > 1 else ("auto",):
                    name = f"{way.name}, {exchange}" if way.ring > 1 else way.name
                    runs[name] = Ours(layout, device, kernel, exchange, group, heads, way.routing)
                    of_run[name] = way.ulysses, way.routing, exchange
            tasks = {(name, which): Task(getattr(run, which)) for name, run in runs.items() for which in ("forward", "both")}
            times = interleaved(tasks, device, repeats=repeats, at_least_ms=at_least_ms, limit_s=limit_s)
            pairs = {"one GPU": alone * (alone + 1) / 2}
            mean = rows * (rows * size + 1) / 2
            rates = {name: figures(times[name, "forward"], times[name, "both"], pairs.get(name, mean), heads) for name in runs}
            machine = dataclasses.replace(Machine(), forward_tflops=rates["one GPU"]["forward_tflops"],
                                          backward_tflops=rates["one GPU"]["backward_tflops"])
            estimates = {(way.ulysses, way.routing): way for way in ways(rows, size, heads, machine)}
            fastest = min(rates[name]["both_ms"] for name in of_run)
            cheapest = min(way.total_ms for way in estimates.values())
            for name, (degree, routing, exchange) in of_run.items():
                way = estimates[degree, routing]
                records.append({
                    "section": "ulysses", "candidate": name, "rows": rows, "cp_size": size, "heads": list(heads), "failure": None,
                    "ring": way.ring, "ulysses": degree, "routing": routing, "exchange": exchange, **rates[name],
                    "over_fastest": rates[name]["both_ms"] / fastest, "estimate_forward_ms": way.forward.total_ms,
                    "estimate_both_ms": way.total_ms, "estimate_over_cheapest": way.total_ms / cheapest, "why": way.why,
                    "samples": times[name, "both"].samples, "host_ms": times[name, "both"].host_ms})
                say(records[-1])
            del runs, tasks
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return records


def verdict(records: Sequence[dict]) -> str:
    """Of one rows and heads: whether the way that the estimate calls cheapest is the fastest; a difference of 5% is none."""
    said, found = (min(records, key=lambda r: r[key]) for key in ("estimate_both_ms", "both_ms"))
    head = f"{said['rows']} rows, {said['heads'][0]} / {said['heads'][1]} heads: the estimate says {said['candidate']}"
    if said["both_ms"] <= (1 + SAYS_NOTHING) * found["both_ms"]:
        more = 100 * (said["both_ms"] / found["both_ms"] - 1)
        return f"{head}; so it is" if said is found else f"{head}; {found['candidate']} is {more:.1f}% faster, which says nothing"
    return (f"{head}; fastest is {found['candidate']}, {said['both_ms'] / found['both_ms']:.2f}x (estimated "
            f"{found['estimate_both_ms'] / said['estimate_both_ms']:.2f}x the time of that)")
