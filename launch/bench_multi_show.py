"""Records of bench multi as tables and pictures."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringflash.launch.check_table import environment, grid


def table(records: Sequence[dict]) -> str:
    """One table per section that ran."""
    parts = []
    for section, title, show in (("stress", "Signals of the copy engines", _stress), ("matrix", "Equivalence", _matrix),
                                 ("link", "To the next rank, while as much comes from the last", _link),
                                 ("overlap", "A hop, a kernel, both of a step", _overlap),
                                 ("nccl", "NCCL groups", _overlap),
                                 ("ring", "Causal zigzag ring, 32 q / 8 kv heads, D=128, bf16", _ring)):
        chosen = [record for record in records if record["section"] == section]
        failed = [record["failure"] for record in chosen if "candidate" not in record and record.get("failure") is not None]
        chosen = [record for record in chosen if record.get("failure") not in failed or "candidate" in record]
        parts += [f"\n{title}: {text}" for text in failed]
        if chosen:
            parts.append(f"\n{title}\n{show(chosen)}")
    return "\n".join(parts)


def _stress(records: Sequence[dict]) -> str:
    return grid(["left out", "steps", "blocks", "wrong elements", "seconds", ""],
                [[r["without"] or "nothing", r["steps"], r["blocks"], r["wrong"], f"{r['seconds']:.1f}",
                  "ok" if r["ok"] else "FAIL"] for r in records])


def _matrix(records: Sequence[dict]) -> str:
    lines = grid(["carrier", "cells", "within budget and same bits", "worst of budget", "seconds"],
                 [[r["carrier"], r["cells"], r["ok"], f"{r['worst_of_budget']:.2f}", f"{r['seconds']:.0f}"] for r in records])
    return "\n".join([lines, *(f"FAIL {r['carrier']} {text}" for r in records for text in r["bad"])])


def _link(records: Sequence[dict]) -> str:
    return grid(["carrier", "MiB", "us", "GB/s"],
                [[r["carrier"], f"{r['bytes'] / 2**20:.0f}", f"{r['ms'] * 1e3:.0f}", f"{r['gb_per_s']:.0f}"] for r in records])


def _overlap(records: Sequence[dict]) -> str:
    rows = [[r["carrier"] + (" high priority" if r.get("high_priority") else ""), r.get("spare_sms", 0), r["rows"], r["kernel"],
             f"{r['kernel_ms']:.3f}", f"{r['hop_ms']:.3f}", f"{r['both_ms']:.3f}", f"{100 * r['added']:.1f}",
             f"{100 * r['hidden']:.0f}"] for r in records]
    return grid(["carrier", "spare SMs", "rows", "kernel", "kernel ms", "hop ms", "both ms", "added %", "hidden %"], rows)


def _ring(records: Sequence[dict]) -> str:
    rows = []
    for r in records:
        if r["failure"] is not None:
            rows.append([r["rows"], r["candidate"], *["-"] * 7, r["failure"][:60]])
            continue
        rows.append([r["rows"], r["candidate"], r["kernel"], f"{r['forward_ms']:.3f}", f"{r['both_ms']:.3f}",
                     *(f"{r[f'{which}_tflops']:.0f}" for which in ("forward", "backward", "both")),
                     f"{100 * r['both_of_one_gpu']:.1f}",
                     "" if r["difference"] is None else f"differs by {r['difference']:.1e}"])
    return grid(["rows", "candidate", "kernel", "fwd ms", "both ms", "fwd TFLOP/s", "bwd", "both", "% of one GPU", ""], rows)


def draw(records: Sequence[dict], prefix: str) -> None:
    """PREFIX-links.png, PREFIX-overlap.png, PREFIX-ring.png, of the sections that ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    views = (("link", "links", "carrier", lambda r: r["bytes"] / 2**20, lambda r: r["gb_per_s"], "message, MiB",
              "GB/s to the next rank"),
             ("overlap", "overlap", "carrier", lambda r: r["rows"], lambda r: 100 * r["added"], "rows of a hop",
              "added to a step by its hop, %"),
             ("ring", "ring", "candidate", lambda r: r["rows"], lambda r: r["both_tflops"], "rows per GPU",
              "forward + backward, TFLOP/s per GPU"))
    for section, name, key, x, y, x_label, y_label in views:
        chosen = [r for r in records if r["section"] == section and r.get("failure") is None]
        if not chosen:
            continue
        figure, axis = pyplot.subplots(figsize=(7, 4.5))
        for line in dict.fromkeys(r[key] for r in chosen):
            points = [(x(r), y(r)) for r in chosen if r[key] == line]
            axis.plot(*zip(*points), marker="o", label=line)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        found = environment()
        axis.set_title(f"{found['devices']} x {found['device']}", fontsize=10)
        figure.tight_layout()
        figure.savefig(f"{prefix}-{name}.png", dpi=120)
        pyplot.close(figure)
