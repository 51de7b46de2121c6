"""Times the kernels and the ring on this machine.

    python launch/bench.py kernels              ours against cuDNN and FlashAttention-2 (through SDPA), forward and backward
    python launch/bench.py kernels --candidates cudnn,plain,hopper,hopper+fold --shapes 128:16:16:8192:causal:bf16
    python launch/bench.py kernels --shapes 128:16:16:16384:causal:bf16 --json out.json --png out.png
    python launch/bench.py kernels --tiles 'fwd:128:bf16=128,128,8,3;bwd:...' --tiles ...      more candidates of the same run
    python launch/bench.py ring --cp-size 8     all visits of a ring of 8 on one device against one call of equal FLOPs
    python launch/bench.py balance              windows and packed documents: every rank's kernels against its share of the pairs
    python launch/bench.py multi                several GPUs: links, overlap, the ring by carrier (also under torchrun)

All candidates of a shape run in one process, turn by turn, on the same random inputs; figures are medians. TFLOP/s count causal
as half and the backward as 2.5 forwards. Without a GPU the default shapes are tiny (a smoke test, no measurement).
"""
from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)       # run as a file: the checkout, not launch/, is the import root

import torch

from ringflash.kernels import dispatch
from ringflash.launch import bench_balance, bench_multi
from ringflash.launch.bench_kernels import Shape, bench_shape, default_candidates
from ringflash.launch.bench_ring import bench_ring
from ringflash.launch.bench_tiles import parse_tiles
from ringflash.launch.check_cells import DTYPES
from ringflash.launch.check_table import environment, grid
from ringflash.launch.counts import count

GPU_SHAPES = ("128:16:16:16384:causal:bf16", "128:16:16:16384:full:bf16", "128:32:8:32768:causal:bf16",
              "64:16:16:16384:causal:bf16", "64:16:16:16384:full:bf16")
CPU_SHAPES = ("32:4:4:128:causal:fp32", "32:4:2:128:full:fp32", "32:4:4:128:causal:bf16")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = top.add_subparsers(dest="what", required=True, metavar="{kernels,ring,balance,multi}")
    bench_multi.add_parser(what)
    bench_balance.add_parser(what)
    for name, text in (("kernels", "one kernel call per candidate"), ("ring", "a ring's visits against one call")):
        sub = what.add_parser(name, help=text)
        sub.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
        sub.add_argument("--shapes", default=None, help="D:Hq:Hkv:S:mask:dtype, comma-separated (masks: causal, full, windowN)")
        sub.add_argument("--repeats", type=count(1), default=15, help="timed repetitions of each candidate")
        sub.add_argument("--warmup", type=count(0), default=3)
        sub.add_argument("--json", default=None, metavar="PATH", help="write every record")
        sub.add_argument("--png", default=None, metavar="PATH", help="draw the figures")
        if name == "kernels":
            sub.add_argument("--candidates", default=None,
                             help="comma-separated, the first one is the baseline: cudnn, flash2, sdpa, sdpa-math, plain (the "
                                  "formula), or a kernel of ours (hopper, triton, cpu, reference; hopper+det: its deterministic backward; "
                                  "hopper+fold: a visit in the middle of a ring)")
            sub.add_argument("--tiles", action="append", default=[], metavar="TABLE",
                             help="adds a candidate: triton with these entries of its tile table replaced")
        else:
            sub.add_argument("--kernel", default=None)
            sub.add_argument("--cp-size", type=count(1), default=8)
            sub.add_argument("--layouts", default="zigzag", help="comma-separated")
    return top


def show(records: Sequence[dict], title: str) -> None:
    print(f"\n{title}")
    rows = []
    for record in records:
        if record["failure"] is not None:
            rows.append([record["candidate"], *["-"] * 8])
            continue
        rows.append([record["candidate"],
                     *(f"{record[k]:.{n}f}" for k, n in (("forward_ms", 3), ("forward_tflops", 1), ("forward_ratio", 2),
                                                        ("backward_ms", 3), ("backward_tflops", 1), ("backward_ratio", 2))),
                     f"{record['difference']:.1e}", "-" if record.get("peak_mib") is None else f"{record['peak_mib']:.0f}"])
    base = next((r["baseline"] for r in records if r["failure"] is None), "-")
    print(grid(["", "fwd ms", "TFLOP/s", f"x {base}", "bwd ms", "TFLOP/s", f"x {base}", "differs by", "peak MiB"], rows))
    for record in records:
        if record["failure"] is not None:
            print(f"{record['candidate']} did not run: {record['failure']}")
    sys.stdout.flush()


def draw(groups: dict[str, list[dict]], path: str) -> None:
    """One bar group per shape, forward and backward side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r["candidate"] for records in groups.values() for r in records))
    figure, axes = pyplot.subplots(1, 2, figsize=(6 + 2 * len(groups), 4.5), sharey=True)
    for axis, which in zip(axes, ("forward", "backward")):
        for i, name in enumerate(names):
            found = [next((r for r in records if r["candidate"] == name), None) for records in groups.values()]
            heights = [r[f"{which}_tflops"] if r and r["failure"] is None else 0.0 for r in found]
            axis.bar([x + (i + 0.5) * 0.8 / len(names) for x in range(len(groups))], heights, 0.8 / len(names), label=name)
        axis.set_xticks([x + 0.4 for x in range(len(groups))], [re.sub(r" (x|causal|full|window)", r"\n\1", label) for label in groups], fontsize=7)
        axis.set_title(which)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("TFLOP/s")
    # Above the axes: inside, it hides the bars of some shape.
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper right", ncols=len(names), fontsize=8)
    figure.suptitle(environment()["device"], x=0.01, ha="left")
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every candidate of every shape ran and gave the baseline's result; 1 otherwise (reasons are printed)."""
    top = parser()
    options = top.parse_args(argv)
    if options.what in ("multi", "balance"):
        try:
            return (bench_multi if options.what == "multi" else bench_balance).main(options)
        except ValueError as error:
            top.error(str(error))
    device = torch.device(options.device)
    try:
        shapes = [Shape.parse(text) for text in
                  (options.shapes.split(",") if options.shapes else GPU_SHAPES if device.type == "cuda" else CPU_SHAPES)]
        tiles = [parse_tiles(text) for text in options.tiles] if options.what == "kernels" else []
    except (ValueError, RuntimeError) as error:
        top.error(str(error))
    if options.what == "ring":
        try:
            for shape in shapes:
                dispatch.select(options.kernel or "auto", device=device, dtype=DTYPES[shape.dtype], head_dim=shape.head_dim)
        except RuntimeError as error:
            top.error(str(error))
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    if device.type != "cuda":
        print("no GPU: a smoke test of the benchmark, not a measurement")
    groups: dict[str, list[dict]] = {}
    for shape in shapes:
        if options.what == "kernels":
            names = options.candidates.split(",") if options.candidates else default_candidates(device)
            groups[str(shape)] = bench_shape([*names, *tiles], shape, device, repeats=options.repeats, warmup=options.warmup)
        else:
            groups[str(shape)] = bench_ring(shape, device, kernel=options.kernel or "auto", cp_size=options.cp_size,
                                            layouts=options.layouts.split(","), repeats=options.repeats, warmup=options.warmup)
        show(groups[str(shape)], str(shape))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    records = [record for group in groups.values() for record in group]
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        whole = {"environment": environment(), "what": options.what, "records": records}
        Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    if options.png:
        draw(groups, options.png)
    wrong = [r for r in records if r["failure"] is None and not r["difference"] <= 0.05]
    for record in wrong:
        print(f"{record['candidate']} differs from {record['baseline']} by {record['difference']:.3f} of the largest value")
    return 1 if wrong or any(r["failure"] is not None for r in records) else 0


if __name__ == "__main__":
    sys.exit(main())
