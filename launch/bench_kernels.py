"""What is timed and how: our kernels and torch's own attention, on the same random inputs, interleaved in one process.

A GPU at its power cap drifts by 5% and more between runs; the ratio of two medians that were taken turn by turn does not. So
every repetition runs each candidate once, and the figure to read is the ratio.
"""
from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash.kernels import dispatch
from ringflash.launch.bench_tiles import TilePatch
from ringflash.launch.check_cells import DTYPES

SDPA = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "flash2": [SDPBackend.FLASH_ATTENTION], "sdpa-math": [SDPBackend.MATH],
        "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]}
CANDIDATES = {"cuda": ("cudnn", "flash2", "triton", "hopper"), "cpu": ("sdpa", "cpu", "reference")}
FLAGS = ("det", "fold")
BACKWARD_FLOPS = 2.5                        # five matrix products against the forward's two


@dataclasses.dataclass(frozen=True)
class Shape:
    head_dim: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    mask: str                               # causal, full, or windowN (itself and N keys before)
    dtype: str
    batch: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """D:Hq:Hkv:S:mask:dtype, as in 128:32:8:32768:causal:bf16. Raises ValueError on anything else."""
        parts = text.split(":")
        if len(parts) != 6:
            raise ValueError(f"shape {text!r}: want D:Hq:Hkv:S:mask:dtype, as in 128:32:8:32768:causal:bf16")
        shape = cls(*map(int, parts[:4]), *parts[4:])
        if shape.dtype not in DTYPES:
            raise ValueError(f"shape {text!r}: dtype {shape.dtype!r} unknown; valid: {', '.join(DTYPES)}")
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"shape {text!r}: Hq={shape.num_heads} must be a multiple of Hkv={shape.num_kv_heads}")
        shape.rows()
        return shape

    def __str__(self) -> str:
        heads = f"{self.num_heads}" if self.num_heads == self.num_kv_heads else f"{self.num_heads}/{self.num_kv_heads}"
        return f"D={self.head_dim} {heads} heads x {self.seq_len} {self.mask} {self.dtype}"

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k_lo, k_hi: int32 [S]."""
        row = torch.arange(self.seq_len, dtype=torch.int32)
        if self.mask == "full":
            return torch.zeros_like(row), torch.full_like(row, self.seq_len)
        if self.mask == "causal":
            return torch.zeros_like(row), row + 1
        if self.mask.startswith("window") and self.mask[6:].isdigit():
            return (row - int(self.mask[6:])).clamp(min=0), row + 1
        raise ValueError(f"mask {self.mask!r}: unknown; valid: causal, full, windowN")

    def flops(self) -> float:
        """Of the forward: two products of 2 * D per allowed pair and query head (so causal counts half)."""
        k_lo, k_hi = self.rows()
        pairs = int((k_hi.long() - k_lo.long()).sum())
        return 4.0 * pairs * self.head_dim * self.num_heads * self.batch

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """q [B, S, Hq, D], k, v [B, S, Hkv, D], dout [B, S, Hq, D]: random, never zeros (zeros run faster)."""
        generator = torch.Generator(device).manual_seed(0)
        return tuple(torch.randn(self.batch, self.seq_len, heads, self.head_dim, generator=generator, device=device,
                                 dtype=torch.float32).to(DTYPES[self.dtype])
                     for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads, self.num_heads))


@dataclasses.dataclass
class Candidate:
    """Something to time on one shape. result(): what there is to compare of out [B, S, Hq, D], dq, dk, dv of the last runs."""
    name: str
    forward: Callable[[], None]
    backward: Callable[[], None]
    result: Callable[[], dict[str, torch.Tensor]]


def default_candidates(device: torch.device) -> list[str]:
    """CANDIDATES without `hopper` on a GPU that is none: what cannot run there by its nature is no failure."""
    names = list(CANDIDATES[device.type])
    if "hopper" in names and dispatch.unavailable("hopper", device=device, dtype=torch.bfloat16, head_dim=128):
        names.remove("hopper")
    return names


def ours(
    name: str, kernel: str, shape: Shape, inputs: Sequence[torch.Tensor], *, deterministic: bool = False, fold: bool = False
) -> Candidate:
    """One visit, first and last: what a rank without a ring runs. The backward is delta, dq, dk, dv in fp32, and their downcast.

    fold: a visit in the middle of a ring instead. The forward folds into an fp32 state (here the same keys again, which leaves
    out as it was), the backward adds to dq, dk and dv and rounds nothing.
    """
    q, k, v, dout = inputs
    backend = dispatch.select(kernel, device=q.device, dtype=q.dtype, head_dim=shape.head_dim, deterministic=deterministic)
    intervals = dispatch.Intervals.from_rows(*shape.rows(), shape.seq_len, q.device)
    acc = dispatch.accumulate_dtype(q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(shape.batch, shape.num_heads, shape.seq_len, dtype=acc, device=q.device)
    dq, dk, dv = (torch.empty(x.shape, dtype=acc, device=q.device) for x in (q, k, v))
    scale = shape.head_dim ** -0.5
    kept = {"out": out}
    if fold:
        backend.forward(q, k, v, intervals, softmax_scale=scale, state=None, lse=lse, out=out, first=True)
        kept["out"] = state = out.to(acc)
        row_sums, merged = backend.delta(dout, out), lse.clone()
        for x in (dq, dk, dv):
            x.zero_()

    def fold_forward() -> None:
        backend.forward(q, k, v, intervals, softmax_scale=scale, state=state, lse=lse, out=None, first=False)

    def fold_backward() -> None:
        backend.backward(dout, q, k, v, merged, row_sums, intervals, softmax_scale=scale, dq=dq, dk=dk, dv=dv,
                         accumulate_dq=True, accumulate_dkv=True, deterministic=deterministic)

    def forward() -> None:
        backend.forward(q, k, v, intervals, softmax_scale=scale, state=None, lse=lse, out=out, first=True)

    def backward() -> None:
        delta = backend.delta(dout, out)
        backend.backward(dout, q, k, v, lse, delta, intervals, softmax_scale=scale, dq=dq, dk=dk, dv=dv,
                         accumulate_dq=False, accumulate_dkv=False, deterministic=deterministic)
        kept.update(dq=dq.to(q.dtype), dk=dk.to(k.dtype), dv=dv.to(v.dtype))

    return Candidate(name, *((fold_forward, fold_backward) if fold else (forward, backward)), lambda: kept)


def formula(name: str, shape: Shape, inputs: Sequence[torch.Tensor]) -> Candidate:
    """Attention as the formula says it, in the inputs' dtype with the softmax in it too: all scores in memory, several times."""
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in inputs[:3])
    dout = inputs[3].transpose(1, 2)
    k_lo, k_hi = (x.to(q.device) for x in shape.rows())
    keys = torch.arange(shape.seq_len, device=q.device)
    hidden = None if shape.mask == "full" else ~((k_lo[:, None] <= keys) & (keys < k_hi[:, None]))
    group = shape.num_heads // shape.num_kv_heads
    kept: dict[str, torch.Tensor] = {}

    def forward() -> None:
        kept.clear()
        k_all, v_all = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        scores = q @ k_all.transpose(-1, -2) * shape.head_dim**-0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        kept["out"] = torch.softmax(scores, -1) @ v_all

    def backward() -> None:
        kept["dq"], kept["dk"], kept["dv"] = torch.autograd.grad(kept["out"], (q, k, v), dout, retain_graph=True)

    return Candidate(name, forward, backward, lambda: {n: t.detach().transpose(1, 2) for n, t in kept.items()})


def sdpa(name: str, shape: Shape, inputs: Sequence[torch.Tensor]) -> Candidate:
    """torch's scaled_dot_product_attention held to one of its backends; forward with what its backward will need."""
    if shape.mask not in ("causal", "full"):
        raise RuntimeError(f"SDPA takes a {shape.mask} mask only as a dense tensor")
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in inputs[:3])
    dout = inputs[3].transpose(1, 2)
    kept: dict[str, torch.Tensor] = {}

    def forward() -> None:
        with sdpa_kernel(SDPA[name]):
            kept["out"] = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=shape.mask == "causal", enable_gqa=shape.num_heads != shape.num_kv_heads)

    def backward() -> None:
        kept["dq"], kept["dk"], kept["dv"] = torch.autograd.grad(kept["out"], (q, k, v), dout, retain_graph=True)

    return Candidate(name, forward, backward, lambda: {n: t.detach().transpose(1, 2) for n, t in kept.items()})


def build(name: str | TilePatch, shape: Shape, inputs: Sequence[torch.Tensor]) -> Candidate:
    """By name: cudnn, flash2, sdpa, sdpa-math, plain, a kernel of ours (kernel+det: its deterministic backward, kernel+fold: a
    visit in the middle of a ring); or triton's with other tiles. ValueError for an unknown flag."""
    if isinstance(name, TilePatch):
        plain, device = ours(str(name), "triton", shape, inputs), inputs[0].device

        def patched(run: Callable[[], None]) -> Callable[[], None]:
            def call() -> None:
                with name.applied(device):
                    run()
            return call

        return dataclasses.replace(plain, forward=patched(plain.forward), backward=patched(plain.backward))
    if name in SDPA:
        return sdpa(name, shape, inputs)
    if name == "plain":
        return formula(name, shape, inputs)
    kernel, *flags = name.split("+")
    if not set(flags) <= set(FLAGS):
        raise ValueError(f"candidate {name!r}: unknown flag; valid: {', '.join('+' + flag for flag in FLAGS)}")
    return ours(name, kernel, shape, inputs, deterministic="det" in flags, fold="fold" in flags)


def timed(run: Callable[[], None], device: torch.device) -> Callable[[], float]:
    """Runs once; the returned function gives the milliseconds, after a synchronisation on CUDA."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        elapsed = (time.perf_counter() - start) * 1e3
        return lambda: elapsed
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    return lambda: begin.elapsed_time(end)


def interleaved(runs: Sequence[Callable[[], None]], device: torch.device, *, repeats: int, warmup: int) -> list[float]:
    """Median milliseconds of each run; every repetition runs each of them once, in turn."""
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warmup):
        for run in runs:
            run()
    synchronize()
    times: list[list[Callable[[], float]]] = [[] for _ in runs]
    for _ in range(repeats):
        for i, run in enumerate(runs):
            times[i].append(timed(run, device))
    synchronize()
    return [statistics.median(t() for t in column) for column in times]


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], float | None]]:
    """Yields a function that gives, after the block, the MiB allocated in it at most beyond what was there before (None on CPU)."""
    if device.type != "cuda":
        yield lambda: None
        return
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    yield lambda: (torch.cuda.max_memory_allocated(device) - before) / 2**20
    torch.cuda.synchronize(device)


def difference(candidate: Candidate, reference: Candidate) -> float:
    """Largest difference of any of out, dq, dk, dv that both have, over the largest value of the reference's tensor."""
    mine, theirs = candidate.result(), reference.result()
    return max(float((mine[n].float() - theirs[n].float()).abs().max() / theirs[n].float().abs().max())
               for n in theirs if n in mine)


def bench_shape(names: Sequence[str | TilePatch], shape: Shape, device: torch.device, *, repeats: int, warmup: int) -> list[dict]:
    """One record per candidate: milliseconds, TFLOP/s, and ratios over the first candidate that runs; or the reason why not."""
    inputs = shape.inputs(device)
    records, alive = [], []
    for name in names:
        record = {"candidate": str(name), **dataclasses.asdict(shape), "failure": None, "peak_mib": None}
        records.append(record)
        try:
            with peak_memory(device) as peak:
                candidate = build(name, shape, inputs)
                candidate.forward()
                candidate.backward()
            record["peak_mib"] = peak()
            alive.append((record, candidate))
        except Exception as error:  # one that cannot run here says why, and the others go on
            record["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if not alive:
        return records
    forward = interleaved([c.forward for _, c in alive], device, repeats=repeats, warmup=warmup)
    backward = interleaved([c.backward for _, c in alive], device, repeats=repeats, warmup=warmup)
    flops = shape.flops()
    for (record, candidate), forward_ms, backward_ms in zip(alive, forward, backward):
        record.update(
            forward_ms=forward_ms, backward_ms=backward_ms, forward_tflops=flops / forward_ms / 1e9,
            backward_tflops=BACKWARD_FLOPS * flops / backward_ms / 1e9, forward_ratio=forward[0] / forward_ms,
            backward_ratio=backward[0] / backward_ms, baseline=alive[0][1].name,
            difference=difference(candidate, alive[0][1]))
    return records
