"""What a GPU, its links and its host can do: numbers, and where each comes from. No torch.

A number that was measured names its command; one that nobody measured is called assumed. A calibration file
(`python launch/plan.py calibrate`) replaces what it measured.
"""
from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

GIB = 2**30
Curve = tuple[tuple[int, float], ...]  # (rows, TFLOP/s), by growing rows


@dataclass(frozen=True)
class Hardware:
    """Rates of one kind of GPU in its host, each at what a step really reaches; peak_tflops alone is a datasheet's, for MFU.

    forward_tflops, backward_tflops: of a visit of n rows to n / 2 keys' worth of pairs (causal counts half, the backward 2.5
        forwards), by n. kernel: which kernel they are of.
    rest_factor: measured over predicted time of all that is neither attention nor waiting; 1 until a calibration says otherwise.
    extra_gib: of tensors at the peak, measured, beyond what is counted. slack: what the allocator holds beyond them, a share.
    """

    name: str
    peak_tflops: float  # bf16, dense
    memory_gib: float  # that a process can have
    context_gib: float  # CUDA context, cuBLAS workspaces, NCCL buffers
    forward_tflops: Curve
    backward_tflops: Curve
    matmul_tflops: float
    memory_gb_s: float  # of elementwise passes, read and written
    optimizer_ns: float  # per parameter that a rank updates: norm, clipping, AdamW
    inside_gb_s: float  # to a neighbour inside the host, by the copy engines
    collective_gb_s: float  # bus bandwidth of all-gather, reduce-scatter, all-to-all inside the host
    across_gb_s: float  # per GPU between hosts
    host_gb_s: float  # between a GPU and pinned memory, one way, all GPUs of a host at once
    host_memory_gib: float  # per GPU
    exchange_us: float
    visit_us: float
    kernel: str = "hopper"
    rest_factor: float = 1.0
    extra_gib: float = 0.0
    slack: float = 0.03
    sources: tuple[tuple[str, str], ...] = ()

    def source(self, name: str) -> str:
        return dict(self.sources).get(name, "")

    def attention_tflops(self, pass_: str, rows: float) -> float:
        """pass_: "forward" or "backward"; rows of a visit."""
        return interpolate(getattr(self, f"{pass_}_tflops"), rows)

    def collective_rate(self, ranks: int, ranks_per_host: int) -> float:
        """GB/s per GPU of a collective over `ranks` neighbours: over several hosts all their cards' ports carry it together."""
        if ranks <= ranks_per_host:
            return self.collective_gb_s
        return min(self.collective_gb_s, ranks_per_host * self.across_gb_s)

    def given(self, values: Mapping[str, Any], source: str) -> Hardware:
        """With other values. ValueError for a name that is none, or a value that is no positive number (a curve: no list)."""
        known = {each.name for each in fields(self)} - {"name", "sources", "kernel"}
        made = {}
        for name, value in values.items():
            if name not in known:
                raise ValueError(f"{source}: {name}: no such rate; valid: {', '.join(sorted(known))}")
            made[name] = _curve(source, name, value) if name.endswith("ward_tflops") else _number(source, name, value)
        return replace(self, **made, sources=(*self.sources, *((name, source) for name in made)))


def _number(source: str, name: str, value: Any) -> float:
    least = 0.0 if name in ("slack", "exchange_us", "visit_us", "context_gib", "host_memory_gib", "extra_gib") else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (least is None and value == 0):
        raise ValueError(f"{source}: {name}={value}: must be a finite number {'above' if least is None else 'from'} 0")
    return float(value)


def _curve(source: str, name: str, value: Any) -> Curve:
    given = [[1, value]] if isinstance(value, (int, float)) else value
    pairs = given if isinstance(given, (list, tuple)) else ()
    if not pairs or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and _is_count(pair[0]) for pair in pairs):
        raise ValueError(f"{source}: {name}={value}: must be TFLOP/s, or a list of [rows, TFLOP/s] with rows from 1; nearest: "
                         "[[8192, 650.0], [65536, 680.0]]")
    return tuple(sorted((int(rows), _number(source, name, rate)) for rows, rate in pairs))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def interpolate(curve: Sequence[tuple[int, float]], rows: float) -> float:
    """TFLOP/s at `rows`. Between points linear in 1 / rows, as of a kernel that takes a fixed time and a share of the work more;
    beyond the last point its rate; below the first as of that fixed time alone."""
    first, last = curve[0], curve[-1]
    if rows >= last[0]:
        return last[1]
    if rows <= first[0]:
        return first[1] * rows / first[0]
    for (low, slow), (high, fast) in zip(curve, curve[1:]):
        if rows <= high:
            share = (1 / low - 1 / rows) / (1 / low - 1 / high)
            return slow + (fast - slow) * share
    return last[1]


_DATASHEET = "datasheet, SXM"
_ASSUMED = "assumed"
_OVERLAP = "one H200, 32 q / 8 kv heads, D=128: python launch/bench.py multi --sections overlap (README)"
_H200 = Hardware(
    name="h200", peak_tflops=989.0, memory_gib=139.8, context_gib=2.0,
    forward_tflops=((2048, 458.0), (4096, 598.0), (8192, 669.0), (16384, 696.0)),
    backward_tflops=((2048, 395.0), (4096, 515.0), (8192, 577.0), (16384, 600.0)),
    matmul_tflops=680.0, memory_gb_s=3800.0, optimizer_ns=0.035, inside_gb_s=355.0, collective_gb_s=200.0, across_gb_s=45.0,
    host_gb_s=50.0, host_memory_gib=200.0, exchange_us=30.0, visit_us=20.0,
    sources=(
        ("peak_tflops", f"{_DATASHEET}: 1,979 with sparsity, half of it"), ("memory_gib", "what CUDA reports of 141 GB"),
        ("context_gib", f"{_ASSUMED}: context, libraries, NCCL; torch does not count them"),
        ("forward_tflops", f"measured: {_OVERLAP} --kernel hopper"),
        ("backward_tflops", "measured at 16k rows: DESIGN.md, Note [Hopper backward]; fewer rows as of the forward, assumed"),
        ("matmul_tflops", f"{_ASSUMED}: of large bf16 products at the power cap"),
        ("memory_gb_s", f"{_ASSUMED}: 0.8 of the datasheet's 4,800"),
        ("optimizer_ns", f"{_ASSUMED}: about 130 bytes per parameter at memory_gb_s"),
        ("inside_gb_s", "measured on two H200s: python launch/bench.py multi --sections link (README)"),
        ("collective_gb_s", "of the same run's NCCL, 141 to 305 by size; of collectives assumed"),
        ("across_gb_s", f"{_ASSUMED}: one 400 Gb/s port per GPU"), ("host_gb_s", f"{_ASSUMED}: of PCIe 5.0 x16, 63 one way"),
        ("host_memory_gib", f"{_ASSUMED}"), ("exchange_us", f"{_ASSUMED}, as in ringflash.ring.cost"),
        ("visit_us", f"{_ASSUMED}, as in ringflash.ring.cost"),
        ("slack", f"{_ASSUMED}"), ("rest_factor", "1: nothing is known"), ("extra_gib", "0: nothing is known"),
    ))


def _scaled(name: str, peak: float, memory_gib: float, memory_gb_s: float, link: float, kernel: str = "hopper") -> Hardware:
    """A GPU that nobody measured: the H200's rates times the ratio of the datasheets. link: NVLink over an H200's."""
    compute, passes = peak / _H200.peak_tflops, memory_gb_s / 4800.0
    by_compute, by_memory, by_link = (f"{_ASSUMED}: the H200's times the datasheets' ratio, {ratio:.2f}"
                                      for ratio in (compute, passes, link))
    scaled: dict[str, Any] = {"matmul_tflops": _H200.matmul_tflops * compute, "memory_gb_s": _H200.memory_gb_s * passes,
                              "optimizer_ns": _H200.optimizer_ns / passes, "inside_gb_s": _H200.inside_gb_s * link,
                              "collective_gb_s": _H200.collective_gb_s * link}
    for name_of in ("forward_tflops", "backward_tflops"):
        scaled[name_of] = tuple((rows, rate * compute) for rows, rate in getattr(_H200, name_of))
    why = dict(_H200.sources)
    why |= {key: by_link if key in ("inside_gb_s", "collective_gb_s") else by_compute if "tflops" in key else by_memory
            for key in scaled}
    why |= {"peak_tflops": _DATASHEET, "memory_gib": f"{_DATASHEET}, less what the driver keeps (assumed)"}
    return replace(_H200, name=name, peak_tflops=peak, memory_gib=memory_gib, kernel=kernel, **scaled, sources=tuple(why.items()))


GPUS = {
    "h200": _H200,
    "h100": _scaled("h100", 989.0, 79.1, 3350.0, 1.0),
    "a100": _scaled("a100", 312.0, 79.1, 2039.0, 600 / 900, kernel="triton"),
    "b200": _scaled("b200", 2250.0, 178.0, 8000.0, 2.0, kernel="triton"),
}
DEFAULT = "h200"


def kind_of(device: str | None) -> str | None:
    """The table's key of a card, by the name that CUDA gives it ("NVIDIA H100 80GB HBM3"); None for what the table has not."""
    words = re.split("[^a-z0-9]+", (device or "").lower())
    return next((key for key in GPUS if key in words), None)


def hardware_of(name: str | None, calibration: str | Path | None = None) -> Hardware:
    """The table's entry, with what a calibration file measured in its place; without a name the calibration's kind, or an H200.
    ValueError for a name or a file that is none, and for a calibration of another kind of GPU or of a CPU."""
    if name is not None and name.lower() not in GPUS:
        raise ValueError(f"--gpu {name}: unknown kind; valid: {', '.join(GPUS)} (others: --gpu h200 --calibration FILE)")
    if calibration is None:
        return GPUS[(name or DEFAULT).lower()]
    measured = read_calibration(calibration)
    device = device_of(measured)
    kind = kind_of(device)
    key = (name or kind or DEFAULT).lower()
    if device == "cpu":
        raise ValueError(f"--calibration {calibration}: was measured on a CPU, and is no {key}'s; nearest: without --calibration")
    if kind not in (None, key):
        raise ValueError(f"--gpu {name}: --calibration {calibration} was measured on an {device}; nearest: --gpu {kind}, or "
                         f"--gpu {key} without --calibration")
    found = GPUS[key].given(measured["rates"], f"measured: {calibration}")
    return replace(found, name=f"{device} (what was not measured: as of {key})") if device and kind is None else found


def device_of(written: Mapping[str, Any]) -> str | None:
    """Of what was measured the card, "cpu", or None where the file does not say."""
    environment = written.get("environment")
    device = environment.get("device") if isinstance(environment, dict) else None
    return device if isinstance(device, str) else None


def read_calibration(path: str | Path) -> dict[str, Any]:
    """What `plan.py calibrate` wrote. ValueError naming the file if it is no such thing."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--calibration {path}: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("rates"), dict):
        raise ValueError(f"--calibration {path}: has no rates; python launch/plan.py calibrate --json FILE writes one")
    return found
