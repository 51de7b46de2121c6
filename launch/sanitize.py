"""Kernels at small shapes, every kind of step once, to be watched by a sanitizer; also judged against `reference`.

    compute-sanitizer --tool memcheck --error-exitcode 9 python launch/sanitize.py   # the hopper kernels (needs such a GPU)
    compute-sanitizer --tool memcheck --error-exitcode 9 python launch/sanitize.py --kernel triton
    compute-sanitizer --tool racecheck --error-exitcode 9 python launch/sanitize.py --for-racecheck
    python launch/sanitize.py --device cpu --kernel cpu                              # the script itself

One visit and two (the second folds), forward and backward, causal, window, full with softcap, rows that see nothing; heads of
64, 128 and 256; bf16 and fp16; deterministic and not; and the forward on two multiprocessors, so that a program goes from tile to
tile, uses its buffers again and, where queries are large, does tiles again by maxima.

--for-racecheck: the same kernels with two orders written out that racecheck does not follow (sanitize_racecheck.py). Without it,
it reports correct ones, as it does `--probe ordered`, which hands records from warp to warp; `--probe reader-early` and
`--probe writer-early` are races, which it must report in either case.
"""
from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor

from ringflash.kernels import dispatch, reference
from ringflash.kernels.intervals import Intervals
from ringflash.launch import sanitize_racecheck
from ringflash.tests.support.triton_cases import BOUNDS

ALLOWED = 3e-2  # of the largest element: a smoke test, the budgets are check.py's
DTYPES = (torch.bfloat16, torch.float16)
PROBES = ("ordered", "reader-early", "writer-early")  # who does not wait for the other: the last two are races


@dataclass(frozen=True)
class Problem:
    """size: queries are as many times as large as usual. few: on two multiprocessors."""

    rows: int
    keys: int
    heads: int
    kv_heads: int
    bounds: str
    visits: int
    softcap: float = 0.0
    deterministic: bool = False
    size: float = 1.0
    few: bool = False

    def tensors(self, head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """q, k, v, dout [1, rows, heads, D]."""
        sizes = ((self.rows, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads), (self.rows, self.heads))
        q, *others = (torch.randn(1, n, h, head_dim, generator=generator) for n, h in sizes)
        return [x.to(dtype) for x in (q * self.size, *others)]

    def __str__(self) -> str:
        more = f", q times {self.size:.0f}" * (self.size != 1.0) + ", two multiprocessors" * self.few
        return (f"{self.rows}x{self.keys} {self.heads}/{self.kv_heads} {self.bounds}, {self.visits} visits, softcap {self.softcap}"
                + more)


PROBLEMS = (
    Problem(300, 300, 2, 1, "causal", 1),
    Problem(300, 300, 2, 1, "causal", 2, deterministic=True),
    Problem(200, 333, 2, 2, "window", 2),
    Problem(129, 257, 2, 1, "full", 2, softcap=20.0),
    Problem(260, 131, 2, 1, "gaps", 1),
    Problem(700, 700, 4, 2, "causal", 2, few=True),
    Problem(700, 700, 4, 2, "causal", 1, size=60.0, few=True),
    Problem(500, 700, 4, 2, "window", 2, few=True),
)


def both_passes(backend, device: torch.device, tensors: Sequence[Tensor], problem: Problem) -> list[Tensor]:
    """(out, lse, dq, dk, dv) in fp64 on the CPU, of q, k, v, dout [1, rows, heads, D] in `visits` blocks of keys."""
    q, k, v, dout = (x.to(device) for x in tensors)
    options = {"softmax_scale": q.shape[3] ** -0.5, "softcap": problem.softcap}
    spare_sms = torch.cuda.get_device_properties(device).multi_processor_count - 2 if problem.few and device.type == "cuda" else 0
    state, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=device) for x in (q, q, k, v))
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=device)
    out = torch.zeros_like(q)
    cuts = [i * k.shape[1] // problem.visits for i in range(problem.visits + 1)]
    bounds, blocks = BOUNDS[problem.bounds](problem.rows, problem.keys), []
    for start, stop in zip(cuts, cuts[1:]):
        rows = ((bound - start).clamp(0, stop - start).to(torch.int32) for bound in bounds)
        blocks.append((slice(start, stop), Intervals.from_rows(*rows, stop - start, device)))
    for i, (keys, intervals) in enumerate(blocks):
        backend.forward(q, k[:, keys].contiguous(), v[:, keys].contiguous(), intervals, **options, lse=lse,
                        state=None if problem.visits == 1 else state, out=out if i == problem.visits - 1 else None, first=i == 0,
                        spare_sms=spare_sms)
    delta = backend.delta(dout, out)
    for i, (keys, intervals) in enumerate(blocks):
        backend.backward(dout, q, k[:, keys].contiguous(), v[:, keys].contiguous(), lse, delta, intervals, **options, dq=dq,
                         dk=dk[:, keys], dv=dv[:, keys], accumulate_dq=i > 0, accumulate_dkv=False,
                         deterministic=problem.deterministic)
    return [x.cpu().double() for x in (out, lse, dq, dk, dv)]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every result is near the reference's, else 1; 2 where the kernel cannot run. The sanitizer has an exit code of its
    own."""
    parser = argparse.ArgumentParser("sanitize.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="hopper")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--for-racecheck", action="store_true")
    parser.add_argument("--probe", choices=PROBES)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    try:
        head_dims = [int(word) for word in options.head_dims.split(",")]
        if min(head_dims) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--head-dims {options.head_dims}: positive numbers with commas between them")
    # A probe needs what hopper needs. On a CPU no kernel is compiled, so there is nothing to write out for racecheck.
    kernel = "hopper" if options.probe else options.kernel
    try:
        backends = [dispatch.select(kernel, device=device, dtype=dtype, head_dim=head_dim) for head_dim in head_dims
                    for dtype in DTYPES]
        if device.type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("no GPU is available")
        if options.for_racecheck and (device.type != "cuda" or importlib.util.find_spec("triton") is None):
            raise ValueError("--for-racecheck needs --device cuda and the triton package")
    except (ValueError, RuntimeError) as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    if options.for_racecheck:
        sanitize_racecheck.install()
    if options.probe:
        from ringflash.launch import sanitize_probes

        right = sanitize_probes.run(options.probe, device)
        print(f"sanitize: probe {options.probe}, {'as it should be' if right else 'WRONG'}")
        return _verdict(right, options.for_racecheck)
    generator, worst = torch.Generator().manual_seed(0), 0.0
    cases = [(head_dim, dtype) for head_dim in head_dims for dtype in DTYPES]
    for (head_dim, dtype), backend in zip(cases, backends):
        for problem in PROBLEMS:
            tensors = problem.tensors(head_dim, dtype, generator)
            found = both_passes(backend, device, tensors, problem)
            exact = both_passes(reference, torch.device("cpu"), [x.float() for x in tensors], problem)
            error = max(relative(a, b) for a, b in zip(found, exact))
            worst = max(worst, error)
            print(f"D={head_dim} {str(dtype)[6:]} {problem}: {error:.1e}", flush=True)
    print(f"sanitize: {options.kernel}, largest error {worst:.1e} of the largest element, allowed {ALLOWED:.0e}")
    return _verdict(worst < ALLOWED, options.for_racecheck)


def _verdict(right: bool, for_racecheck: bool) -> int:
    if for_racecheck:
        print(f"sanitize: {sanitize_racecheck.rewritten} kernels compiled for racecheck now, others came from the cache")
    return 0 if right else 1


def relative(found: Tensor, exact: Tensor) -> float:
    live = exact.isfinite()
    if not torch.equal(found.isfinite(), live):
        return float("inf")
    return float((found[live] - exact[live]).abs().max() / exact[live].abs().max().clamp(min=1e-9)) if live.any() else 0.0


if __name__ == "__main__":
    sys.exit(main())
