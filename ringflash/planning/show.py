"""Predictions as text and as a picture."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ringflash.planning.hardware import GIB, Hardware
from ringflash.planning.job import Job
from ringflash.planning.search import Prediction

MFU = ("model FLOPs = 6 x weights of matrix products x tokens + 12 x heads x head_dim x allowed pairs of each layer, nothing for "
       "what is computed again, of the bf16 dense peak")

ORDER = ("What fits, most tokens/s/GPU first; of those within 1% of the most, the smallest dp, then the least ulysses, host GiB, "
         "GiB.\nThen what does not fit, least GiB first.")


def text(best: Prediction, others: Sequence[Prediction], longest: int) -> str:
    """The best division in full, the others as a table, and what all of it rests on."""
    parts = [f"{title(best.job, best.hardware)}\n{ORDER}\n{ranking([best, *others])}", f"{best.job.name}:\n{memory(best)}",
             seconds(best), communication(best), totals(best, longest), assumptions(best.hardware)]
    return "\n\n".join(parts)


def title(job: Job, hardware: Hardware) -> str:
    cfg = job.cfg
    hosts = -(-job.num_gpus // job.gpus_per_host)
    documents = "one document" if job.documents is None else f"{len(job.documents) - 1:,} documents"
    return (f"{job.sizes.total / 1e9:.2f} B parameters in {cfg.model.num_layers} layers, {job.batch} x {job.seq_len:,} tokens "
            f"per replica, {documents}, on {job.num_gpus} x {hardware.name} ({hosts} host{'s' if hosts > 1 else ''})\n"
            f"activations in {job.compute_itemsize} bytes, residual stream in {job.residual_itemsize}, train.tile_rows="
            f"{cfg.train.tile_rows}, attention.layout={cfg.attention.layout}, optim.offload={str(cfg.optim.offload).lower()}, "
            f"accumulation {cfg.train.accumulation}")


def ranking(predictions: Sequence[Prediction]) -> str:
    rows = [["dp", "ring", "ulysses", "shard", "train.activations", "s / step", "tokens/s/GPU", "MFU", "GiB", "host GiB", ""]]
    for each in predictions:
        job, time = each.job, each.time
        rows.append([job.dp, job.ring, job.ulysses, job.shard, job.activations, _short(time.seconds),
                     f"{time.tokens_per_s_per_gpu:,.0f}", f"{100 * time.mfu:.1f}%", f"{each.memory.reserved_gib:.1f}",
                     f"{each.host_gib:.0f}",
                     "" if each.fits else f"does not fit: {each.why_not}"])
    return table(rows, left=(4, 10))


def memory(prediction: Prediction) -> str:
    found = prediction.memory
    rows = [["memory per GPU at its peak", "GiB"]]
    rows += [[part, f"{size / GIB:.2f}"] for part, size in sorted(found.parts.items(), key=lambda item: -item[1])]
    rows += [["tensors (max_memory_allocated)", f"{found.live_gib:.2f}"],
             ["allocator's slack", f"{found.live_gib * found.slack:.2f}"], ["context, libraries", f"{found.context_gib:.2f}"],
             ["all", f"{found.reserved_gib:.2f} of {prediction.hardware.memory_gib:.1f}"]]
    others = ", ".join(f"{name} {sum(parts.values()) / GIB:.1f}" for name, parts in found.moments.items())
    return f"{table(rows, left=(0,))}\npeak: {found.when} (GiB of tensors at the moments: {others})"


def seconds(prediction: Prediction) -> str:
    time = prediction.time
    rows = [["seconds per step", "s", "share"]]
    rows += [[part, _short(value), f"{100 * value / time.seconds:.1f}%"] for part, value in time.parts.items() if value]
    rows.append(["step", _short(time.seconds), "100%"])
    return table(rows, left=(0,))


def communication(prediction: Prediction) -> str:
    job, time, rows = prediction.job, prediction.time, []
    for kind, (_, count, *passes) in zip(job.kinds, time.attention):
        for name, each in zip(("forward", "backward"), passes):
            hops = [step for step in each.steps if step.hop_ms]
            low, high = (f(step.hidden for step in hops) for f in (min, max)) if hops else (1.0, 1.0)
            rows.append([f"{kind!r}", count, name, len(each.steps), f"{max(step.kernel_ms for step in each.steps):.2f}",
                         f"{max(step.hop_ms for step in each.steps):.2f}", f"{1e3 * each.hop_gb:,.1f}", f"{each.sent_gb:.2f}",
                         f"{100 * each.hidden:.1f}%", f"{100 * low:.0f} to {100 * high:.0f}%", f"{each.alltoall_ms:.2f}"])
    head = ["attention of a layer that sees", "layers", "pass", "steps", "kernel ms", "hop ms", "MB a hop", "GB sent", "hidden",
            "by step", "all-to-all ms"]
    lines = [table([head, *rows], left=(0, 2)),
             "kernel, hop: of the step that has most; hidden: the share of the hops' time that kernels of the same steps cover"]
    if job.shard > 1:
        lines.append(f"weights and gradients: {time.fsdp_gb:.1f} GB received per GPU and step (gathered twice, reduced once)")
    if time.offload_gb:
        lines.append(f"offload: {time.offload_gb:.1f} GB per GPU and step to host memory, as much back")
    return "\n".join(lines)


def proposal(words: str, prediction: Prediction) -> str:
    """The best division with what the configuration has not."""
    fits = "" if prediction.fits else f", does not fit: {prediction.why_not}"
    return (f"\nproposal, not in this plan: with {words} the first of these takes {_short(prediction.time.seconds)} s per step, "
            f"{prediction.memory.reserved_gib:.1f} GiB of {prediction.hardware.memory_gib:.1f}{fits}")


def totals(prediction: Prediction, longest: int) -> str:
    time = prediction.time
    attention = time.model_flops - time.matmul_flops
    flops, products, pairs = (f"{count / 1e15:,.1f}" for count in (time.model_flops, time.matmul_flops, attention))
    return (f"FLOPs per step: {flops} PFLOP of the model (products {products}, attention {pairs})\n"
            f"predicted: {_short(time.seconds)} s per step, {time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
            f"{time.model_tflops_per_gpu:.0f} model-TFLOP/s per GPU, MFU {100 * time.mfu:.1f}%\n"
            f"  ({MFU}, {time.peak_tflops:,.0f} TFLOP/s)\n"
            f"longest sequence that fits so: {longest:,} tokens")


def assumptions(hardware: Hardware) -> str:
    rows = [["rests on", "", "from"]]
    for each in fields(Hardware):
        value = getattr(hardware, each.name)
        if each.name in ("name", "sources", "kernel"):
            continue
        shown = ", ".join(f"{rows_}: {rate:.0f}" for rows_, rate in value) if isinstance(value, tuple) else f"{value:g}"
        rows.append([each.name, shown, hardware.source(each.name) or "default"])
    rows.append(["kernel", hardware.kernel, "of which the rates of attention are"])
    return table(rows, left=(0, 1, 2))


def table(rows: Sequence[Sequence[object]], left: Sequence[int]) -> str:
    """Aligned columns, the first row their names; left: columns that are aligned left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
             for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def draw(predictions: Sequence[Prediction], path: str | Path) -> None:
    """Memory by part, and seconds by part, a bar each for every prediction; the first is the best."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(14, 2.5 + 0.5 * len(predictions)))
    labels = [each.job.name for each in predictions]
    memory_parts = [{part: size / GIB for part, size in each.memory.parts.items()}
                    | {"slack, context": each.memory.reserved_gib - each.memory.live_gib} for each in predictions]
    for axis, stacks, unit in ((axes[0], memory_parts, "GiB per GPU at the peak"),
                               (axes[1], [each.time.parts for each in predictions], "seconds per step")):
        names = dict.fromkeys(name for stack in stacks for name, value in stack.items() if value)
        start = [0.0] * len(stacks)
        for index, name in enumerate(names):
            widths = [stack.get(name, 0.0) for stack in stacks]
            axis.barh(range(len(stacks)), widths, left=start, label=name, color=pyplot.get_cmap("tab20")(index % 20))
            start = [a + b for a, b in zip(start, widths)]
        axis.set_yticks(range(len(stacks)), labels if axis is axes[0] else [""] * len(stacks), fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=3)
    axes[0].axvline(predictions[0].hardware.memory_gib, color="black", linestyle="--")
    figure.suptitle(title(predictions[0].job, predictions[0].hardware).split("\n")[0], fontsize=10)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def as_dict(prediction: Prediction) -> dict:
    """All figures, for a file."""
    job, time, found = prediction.job, prediction.time, prediction.memory
    return {"dp": job.dp, "ring": job.ring, "ulysses": job.ulysses, "shard": job.shard, "activations": job.activations,
            "tile_rows": job.cfg.train.tile_rows, "seq_len": job.seq_len, "gpus": job.num_gpus, "fits": prediction.fits,
            "seconds": time.seconds,
            "seconds_by_part": dict(time.parts),
            "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu, "model_tflops_per_gpu": time.model_tflops_per_gpu, "mfu": time.mfu,
            "live_gib": found.live_gib, "reserved_gib": found.reserved_gib, "peak": found.when, "host_gib": prediction.host_gib,
            "gib_by_part": {part: size / GIB for part, size in found.parts.items()}}
