"""`plan.py compare`: predicted against measured seconds and memory, with the error of each."""
from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from ringflash.config import Config
from ringflash.planning.hardware import GPUS, Hardware, hardware_of
from ringflash.planning.job import divisions
from ringflash.planning.search import Prediction, predict
from ringflash.planning.show import table
from ringflash.train.trainer import layer_masks


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", metavar="RUN", nargs="+", required=True,
                        help="run folders of ringflash train, or JSON: {overrides, seconds, peak_gib, gpus}, or a list of such")
    parser.add_argument("--calibration", metavar="FILE")
    parser.add_argument("--gpu", default="h200", help=f"kind: {', '.join(GPUS)} (default h200)")
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument("--max-memory-error", type=float, default=0.05, help="a share (default 0.05)")
    parser.add_argument("--max-time-error", type=float, default=0.10, help="a share (default 0.10)")


def run(options: argparse.Namespace, read_config: Callable[[Sequence[str], int], Config]) -> int:
    """1 where an error is larger than it may be."""
    hardware = hardware_of(options.gpu, options.calibration)
    rows, is_good = [["run", "GPUs", "seconds", "predicted", "error", "GiB", "predicted", "error"]], True
    for record in (record for path in options.measured for record in read_measured(Path(path))):
        cells, good = compare(record, hardware, options, read_config)
        rows.append(cells)
        is_good &= good
    print(table(rows, left=(0,)))
    print(f"allowed: {100 * options.max_time_error:g}% of the seconds, {100 * options.max_memory_error:g}% of the tensors' peak: "
          f"{'held' if is_good else 'NOT held'}")
    return 0 if is_good else 1


def compare(record: dict, hardware: Hardware, options: argparse.Namespace, read_config: Callable[[Sequence[str], int], Config]
            ) -> tuple[list, bool]:
    prediction = predicted(record, hardware, read_config, options.gpus_per_host, options.overrides)
    cells, is_good = [record["name"], record["gpus"]], True
    for measured, expected, allowed in ((record.get("seconds"), prediction.time.seconds, options.max_time_error),
                                        (record.get("peak_gib"), prediction.memory.live_gib, options.max_memory_error)):
        if measured is None:
            cells += ["-", f"{expected:.2f}", "-"]
            continue
        error = expected / measured - 1
        cells += [f"{measured:.2f}", f"{expected:.2f}", f"{100 * error:+.1f}%"]
        is_good &= abs(error) <= allowed
    return cells, is_good


def predicted(record: dict, hardware: Hardware, read_config: Callable[[Sequence[str], int], Config], gpus_per_host: int = 8,
              overrides: Sequence[str] = ()) -> Prediction:
    """Of what a record was measured with."""
    gpus = record["gpus"]
    cfg = read_config([*record["overrides"], *overrides], gpus)
    dp = cfg.parallel.dp if cfg.parallel.dp != -1 else gpus // cfg.parallel.cp
    jobs = divisions(cfg, layer_masks(cfg.attention), gpus, gpus_per_host, dp=dp, ulysses=cfg.parallel.ulysses,
                     activations=cfg.train.activations)
    return predict(jobs[0], hardware)


def read_measured(path: Path) -> list[dict]:
    """[{name, overrides, gpus, seconds, peak_gib}]. ValueError for what is neither a run folder nor such a file."""
    if path.is_dir():
        return [_read_folder(path)]
    try:
        found = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--measured {path}: {error}") from error
    records = found if isinstance(found, list) else found.get("records", [found]) if isinstance(found, dict) else [found]
    records = [record for record in records if not isinstance(record, dict) or "out_of_memory" not in record]
    for record in records:
        if not isinstance(record, dict) or not isinstance(record.get("overrides"), list):
            raise ValueError(f"--measured {path}: a record has overrides, as of ringflash train, and seconds or peak_gib")
    return [{"name": path.stem, "gpus": 1, **record} for record in records]


def _read_folder(folder: Path) -> dict:
    overrides, metrics = folder / ".hydra" / "overrides.yaml", folder / "metrics.jsonl"
    if not overrides.is_file() or not metrics.is_file():
        raise ValueError(f"--measured {folder}: no run folder, it has no {'metrics.jsonl' if overrides.is_file() else '.hydra'}")
    steps = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["kind"] == "train" and "skipped" not in row]
    later = steps[1:] or steps              # the first step compiles and warms up
    if not later:
        raise ValueError(f"--measured {folder}: no step is in its metrics.jsonl")
    return {"name": folder.name, "overrides": OmegaConf.to_container(OmegaConf.load(overrides)),
            "gpus": round(later[0]["tokens_per_s"] / later[0]["tokens_per_s_per_rank"]),
            # A row has the tokens of all steps so far.
            "seconds": statistics.median(row["tokens"] / row["step"] / row["tokens_per_s"] for row in later),
            "loss": later[-1].get("loss"), "tflops_per_gpu": later[-1].get("tflops_per_rank"),
            "peak_gib": max(row["peak_memory_gib"] for row in later)}
