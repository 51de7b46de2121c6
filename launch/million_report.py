"""The table of launch/million.py: what was measured, what `plan` says of it, and which claims hold."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ringflash.launch.plan import read_config
from ringflash.launch.plan_compare import predicted, read_measured
from ringflash.planning.hardware import hardware_of
from ringflash.planning.show import table
from ringflash.planning.step_time import mask_pairs

MEMORY_ERROR, TIME_ERROR = 0.05, 0.10  # of predictions
LEAST_TFLOPS = 400.0  # of the model, causal-exact, at the length of the longest step of all layers
RINGS = (1, 2, 4)
FLAT, LINEAR = 0.12, 0.05  # memory over the ranks of a ring at equal rows (the ring's buffers, at most); over rows at equal ranks
RUNS, FILES = ("step", "resume"), ("two-layers", "ranks-memory")


@dataclass(frozen=True)
class Claim:
    """holds: None where it was not measured."""

    text: str
    holds: bool | None
    found: str


def report(folders: Sequence[Path], out: Path) -> int:
    """Prints the tables and writes out/million.json. 0 where all that is claimed was measured and holds."""
    calibration = _first(folders, "calibration.json")
    hardware = hardware_of("h200", calibration)
    records = list(measured(folders))
    rows = []
    for record in records:
        expected = predicted(record, hardware, read_config)
        record["predicted_seconds"], record["predicted_gib"] = expected.time.seconds, expected.memory.live_gib
        job = expected.job
        record["allowed_pairs"] = sum(layers * mask_pairs(mask, job.seq_len) for mask, layers in job.layers_by_mask)
        record["parameters_of_layers"] = job.sizes.num_layers * job.sizes.layer
        rows.append(_row(record))
    head = ["part", "what", "ranks", "seconds", "predicted", "error", "TFLOP/s", "GiB", "predicted", "error", "loss"]
    if rows:
        print(table([head, *rows], left=(0, 1)))
        print(f"predictions: {calibration or 'the table of plan, NOT calibrated'}; TFLOP/s: of the model, causal-exact; GiB: the "
              "most\nthat tensors took at a time (max_memory_allocated); the first step of a run has no optimizer state in it")
    found = claims(records, is_calibrated=calibration is not None) + [equality(_first(folders, "ranks-equal.json"))]
    print()
    for claim in found:
        said = {True: "holds", False: "FAILS", None: "not run"}[claim.holds]
        print(f"{said:<7}  {claim.text}" + (f"\n         {claim.found}" if claim.found else ""))
    out.mkdir(parents=True, exist_ok=True)
    lists = [folder / "parts.json" for folder in folders]
    parts = [part for path in lists if path.is_file() for part in json.loads(path.read_text())]
    written = {"records": records, "claims": [asdict(claim) for claim in found], "parts": parts,
               "calibration": json.loads(calibration.read_text()) if calibration else None}
    (out / "million.json").write_text(json.dumps(written, indent=1) + "\n")
    return 0 if all(claim.holds for claim in found) else 1


def measured(folders: Sequence[Path]) -> Iterable[dict]:
    """Every record of the folders, with its part. ValueError where there is none."""
    any_found = False
    for part in (*RUNS, *FILES):
        path = _first(folders, part if part in RUNS else f"{part}.json")
        if path is None or (part in RUNS and not (path / "metrics.jsonl").is_file()):
            continue
        for record in read_measured(path):
            any_found = True
            cfg = read_config(record["overrides"], record["gpus"])
            yield {**record, "part": part, "tokens": cfg.data.seq_len, "activations": cfg.train.activations,
                   "layers": cfg.model.num_layers, "document_mask": cfg.data.document_mask}
    if not any_found and _first(folders, "ranks-equal.json") is None:
        raise ValueError(f"{', '.join(map(str, folders))}: nothing that million.py measured is there")


def _first(folders: Sequence[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def _row(record: dict) -> list[object]:
    def pair(value: float | None, expected: float) -> list[str]:
        if value is None:
            return ["-", f"{expected:.2f}", "-"]
        return [f"{value:.2f}", f"{expected:.2f}", f"{100 * (expected / value - 1):+.1f}%"]

    what = f"{record['tokens']:,} tokens, {record['layers']} layers, {record['activations']}"
    tflops = record.get("tflops_per_gpu") if "seconds" in record else None
    loss = record.get("loss")
    return [record["part"], what, record["gpus"], *pair(record.get("seconds"), record["predicted_seconds"]),
            "-" if tflops is None else f"{tflops:.0f}", *pair(record.get("peak_gib"), record["predicted_gib"]),
            "-" if loss is None else f"{loss:.4f}"]


def claims(records: Sequence[dict], *, is_calibrated: bool) -> list[Claim]:
    by_part: dict[str, list[dict]] = {}
    for record in records:
        by_part.setdefault(record["part"], []).append(record)
    found = [_steps(by_part)]
    losses = [by_part[part][0]["loss"] for part in RUNS if part in by_part]
    found.append(Claim("the loss of the same batch falls, from a step to the next through a checkpoint and another policy",
                       losses[1] < losses[0] if len(losses) == 2 else None, ", then ".join(f"{loss:.4f}" for loss in losses)))
    few = by_part.get("two-layers", [])
    twice = max(few, key=lambda record: record["tokens"], default=None)
    found.append(Claim("a step of two layers at twice the length", None if twice is None else True, "" if twice is None else
                       f"{twice['tokens']:,} tokens, {twice['parameters_of_layers'] / 1e6:.0f} M parameters in layers, "
                       f"{twice['allowed_pairs']:,} pairs: {twice['seconds']:.1f} s, {twice['peak_gib']:.1f} GiB"))
    for key, name, unit, allowed in (("seconds", "time", "s", TIME_ERROR), ("peak_gib", "memory", "GiB", MEMORY_ERROR)):
        long = [r for r in records if r.get(key) is not None and (r["part"] != "ranks-memory" or key == "peak_gib")]
        errors = [r["predicted_seconds" if key == "seconds" else "predicted_gib"] / r[key] - 1 for r in long]
        worst = max(errors, key=abs, default=None)
        found.append(Claim(f"{name} within {100 * allowed:.0f}% of what a calibration of at most 64K tokens predicts",
                           abs(worst) <= allowed if errors and is_calibrated else None,
                           "" if worst is None else f"{len(errors)} steps, the largest error {100 * worst:+.1f}%"))
    found += _policies(by_part)
    found += _ranks(by_part.get("ranks-memory", []))
    return found


def _steps(by_part: dict[str, list[dict]]) -> Claim:
    steps = [by_part[part][0] for part in RUNS if part in by_part]
    said = "; ".join(f"{r['activations']}: {r['seconds']:.1f} s, {r['tflops_per_gpu'] or 0:.0f} TFLOP/s, {r['peak_gib']:.1f} GiB"
                     for r in steps)
    what = "the long step"
    if steps:
        masked = "" if steps[0]["document_mask"] else " (no document mask)"
        first = steps[0]
        what = (f"{first['tokens']:,} tokens, {first['layers']} layers of {first['parameters_of_layers'] / 1e6:.0f} M parameters, "
                f"{first['allowed_pairs']:,} allowed pairs{masked}")
    return Claim(f"{what}, on one GPU, at {LEAST_TFLOPS:.0f} model-TFLOP/s or more",
                 any((r["tflops_per_gpu"] or 0) >= LEAST_TFLOPS for r in steps) if steps else None, said)


def _policies(by_part: dict[str, list[dict]]) -> list[Claim]:
    """What block_save_attention saves beside block: attention's forward. And what offload costs beside it: nothing, or copies."""
    whole = {r["activations"]: r for part in RUNS for r in by_part.get(part, [])}
    few = by_part.get("two-layers", [])
    found = []
    groups = [(whole, "all layers")]
    for length in sorted({r["tokens"] for r in few}):
        groups.append(({r["activations"]: r for r in few if r["tokens"] == length}, f"{length:,} tokens, two layers"))
    for group, where in groups:
        for other in ("block", "offload"):
            if other in group and "block_save_attention" in group:
                ratios = [group[other][key] / group["block_save_attention"][key] for key in ("seconds", "predicted_seconds")]
                found.append(Claim(f"{other} over block_save_attention, {where}: seconds within {100 * TIME_ERROR:.0f}% of the "
                                   "prediction", abs(ratios[1] / ratios[0] - 1) <= TIME_ERROR,
                                   f"{ratios[0]:.3f}, predicted {ratios[1]:.3f}"))
    return found or [Claim("block and offload over block_save_attention", None, "")]


def _ranks(records: Sequence[dict]) -> list[Claim]:
    """Memory of a rank: at equal rows that of one and the ring's buffers, and linear in the rows of a ring."""
    peaks: dict[int, dict[int, float]] = {}  # by rows of a rank, by ranks
    for record in records:
        peaks.setdefault(record["tokens"] // record["gpus"], {})[record["gpus"]] = record["peak_gib"]
    flat = [max(of.values()) / min(of.values()) - 1 for of in peaks.values() if set(RINGS) <= set(of)]
    said = "; ".join(f"{rows:,} rows: " + ", ".join(f"{gib:.2f}" for _, gib in sorted(of.items()))
                     for rows, of in sorted(peaks.items()))
    ring = " ".join(str(ranks) for ranks in sorted({record["gpus"] for record in records}))
    first = Claim(f"memory of a rank at equal rows: rings of 1, 2 and 4 differ by their buffers, at most {100 * FLAT:.0f}%",
                  max(flat) <= FLAT if flat else None, f"GiB, {ring} ranks: {said}" if peaks else "")
    bends = []
    for ranks in {record["gpus"] for record in records}:
        points = sorted((rows, of[ranks]) for rows, of in peaks.items() if ranks in of)
        if len(points) > 2:
            slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in zip(points, points[1:])]
            bends.append(max(slopes) / min(slopes) - 1 if min(slopes) > 0 else float("inf"))
    second = Claim("memory of a rank is linear in its rows", max(bends) <= LINEAR if bends else None,
                   f"bytes per further row differ by at most {100 * max(bends):.1f}%" if bends else "")
    return [first, second]


def equality(path: Path | None) -> Claim:
    text = "4 ranks give the step of one: loss, gradients, their norm, weights after it"
    if path is None:
        return Claim(text, None, "")
    found = json.loads(path.read_text())
    rows = [row for record in found.get("train", []) for row in record["rows"]]
    good = sum(row["ok"] for row in rows)
    worst = max((row["error"] / row["budget"] for row in rows if row["budget"]), default=0.0)
    return Claim(text, bool(rows) and good == len(rows),
                 f"{good} of {len(rows)} quantities within budget, worst {worst:.2f} of it")
