"""Records of bench multi as tables and pictures."""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ringflash.launch.bench_multi_ulysses import verdict
from ringflash.launch.check_table import environment, grid

PASSES = ("forward", "backward", "both")


def table(records: Sequence[dict]) -> str:
    """One table per section that ran."""
    parts = []
    for section, title, show in (("stress", "Signals of the copy engines", _stress), ("matrix", "Equivalence", _matrix),
                                 ("link", "To the next rank, while as much comes from the last", _link),
                                 ("overlap", "A hop, a kernel, both of a step", _overlap),
                                 ("nccl", "NCCL groups", _overlap),
                                 ("ring", "Ring, 32 q / 8 kv heads, D=128, bf16; % of one GPU's kernel at equal FLOPs", _ring),
                                 ("ulysses", "Ring x Ulysses, causal zigzag, D=128, bf16", _ulysses),
                                 ("train", "Training step", _train)):
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
            rows.append([r["rows"], r["layout"], r["candidate"], *["-"] * 12, r["failure"][:70]])
            continue
        note = [] if r["difference"] is None else [f"differs by {r['difference']:.1e}"]
        if "both_of_same_mask" in r:
            note.append(f"of one GPU with the same mask {100 * r['both_of_same_mask']:.1f}")
        rows.append([r["rows"], r["layout"], r["candidate"], r["kernel"], *(f"{r[f'{which}_ms']:.3f}" for which in PASSES),
                     *(f"{r[f'{which}_tflops']:.0f}" for which in PASSES),
                     *(f"{100 * r[f'{which}_of_one_gpu']:.1f}" for which in PASSES),
                     f"{r['host_ms']:.2f}", r["samples"], "; ".join(note)])
    return grid(["rows", "layout", "candidate", "kernel", "fwd ms", "bwd ms", "both ms", "fwd TFLOP/s", "bwd", "both",
                 "fwd %", "bwd %", "both %", "host ms", "samples", ""], rows)


def _ulysses(records: Sequence[dict]) -> str:
    rows = [[r["rows"], f"{r['heads'][0]} / {r['heads'][1]}", r["candidate"], f"{r['forward_ms']:.3f}", f"{r['both_ms']:.3f}",
             f"{r['both_tflops']:.0f}", f"{r['over_fastest']:.3f}", f"{r['estimate_forward_ms']:.3f}",
             f"{r['estimate_both_ms']:.3f}", f"{r['estimate_over_cheapest']:.3f}"] for r in records]
    lines = [grid(["rows", "heads", "way", "fwd ms", "both ms", "TFLOP/s", "x fastest", "estimate: fwd ms", "both ms",
                   "x cheapest"], rows)]
    problems = dict.fromkeys((r["rows"], tuple(r["heads"])) for r in records)
    lines += [verdict([r for r in records if (r["rows"], tuple(r["heads"])) == one]) for one in problems]
    return "\n".join(lines)


def _train(records: Sequence[dict]) -> str:
    lines = []
    for r in records:
        if r["what"] == "same":
            lines.append(f"{r['model']}, {r['tokens']} tokens, {r['cp_size']} GPUs against one: " + "; ".join(
                f"{name} {r[key]['ring']:.6f} and {r[key]['one_gpu']:.6f} ({r[key]['of_budget']:.3f} of its budget)"
                for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"))) + ("" if r["ok"] else "  FAIL"))
    steps = [r for r in records if r["what"] == "step"]
    rows = []
    for r in steps:
        expected, mfu = r["predicted"], "-" if r["mfu"] is None else f"{100 * r['mfu']:.1f}"
        said = ["-"] * 3
        if expected is not None:
            said = [f"{expected['seconds']:.2f}", f"{expected['peak_gib']:.1f}", f"{100 * expected['mfu']:.1f}"]
        rows.append([r["model"], r["tokens"], r["activations"], r["step"] + 1, f"{r['seconds']:.2f}", f"{r['tokens_per_s']:.0f}",
                     f"{r['peak_gib']:.1f}", mfu, *said])
    if rows:
        lines.append(grid(["model", "tokens", "activations", "step", "s", "tokens/s", "peak GiB", "MFU %", "planned: s", "GiB",
                           "MFU %"], rows))
    return "\n".join(lines)


def draw(records: Sequence[dict], prefix: str) -> None:
    """PREFIX-links.png, PREFIX-overlap.png, PREFIX-ring.png, PREFIX-ring-balanced.png, of what ran."""
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
    views += ((*views[-1][:1], "ring-balanced", *views[-1][2:]),)
    for section, name, key, x, y, x_label, y_label in views:
        chosen = [r for r in records if r["section"] == section and r.get("failure") is None
                  and r.get("layout", "zigzag") == ("balanced" if name == "ring-balanced" else "zigzag")]
        if not chosen:
            continue
        figure, axis = pyplot.subplots(figsize=(7, 4.5))
        for line in dict.fromkeys(r[key] for r in chosen):
            points = sorted((x(r), y(r)) for r in chosen if r[key] == line)
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
