"""`plan.py compare`: predicted against measured seconds and memory, with the error of each."""
from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringflash.config import Config
from ringflash.launch.counts import duration
from ringflash.launch.train import misspelt
from ringflash.planning.hardware import DEFAULT, GPUS, Hardware, device_of, hardware_of, kind_of
from ringflash.planning.job import divisions
from ringflash.planning.search import Prediction, predict
from ringflash.planning.show import table
from ringflash.train.trainer import layer_masks

FIGURES = ("seconds", "peak_gib", "host_gib")  # host_gib: pinned host memory of a rank
_ROW = ("step", "tokens", "tokens_per_s", "tokens_per_s_per_rank", "peak_memory_gib")  # of metrics.jsonl, what is read of a step
ReadConfig = Callable[[Sequence[str], int], Config]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", metavar="RUN", nargs="+", required=True,
                        help="run folders of ringflash train, or JSON: {overrides, seconds, peak_gib, host_gib, gpus}, or a list")
    parser.add_argument("--calibration", metavar="FILE")
    parser.add_argument("--gpu", help=f"kind: {', '.join(GPUS)} (default: the calibration's, or {DEFAULT})")
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument("--max-memory-error", type=duration, default=0.05, help="a share (default 0.05)")
    parser.add_argument("--max-time-error", type=duration, default=0.10, help="a share (default 0.10)")


def run(options: argparse.Namespace, read_config: ReadConfig) -> int:
    """1 where an error is larger than it may be, or a step did not fit the memory."""
    hardware = hardware_of(options.gpu, options.calibration)
    head = [cell for unit in ("seconds", "GiB", "host GiB") for cell in (unit, "predicted", "error")]
    rows, is_good = [["run", "GPUs", *head]], True
    records = [record for path in options.measured for record in read_measured(Path(path))]
    for record in records:
        _check_device(record, hardware)
    for record in records:
        cells, good = compare(record, hardware, options, read_config)
        rows.append(cells)
        is_good &= good
    print(table(rows, left=(0,)))
    print(f"allowed: {100 * options.max_time_error:g}% of the seconds, {100 * options.max_memory_error:g}% of the tensors' peak "
          f"and of the host's memory: {'held' if is_good else 'NOT held'}")
    return 0 if is_good else 1


def _check_device(record: dict, hardware: Hardware) -> None:
    device = record.get("device")
    if device == "cpu":
        raise ValueError(f"--measured {record['file']}: was measured on a CPU, and is no {hardware.name}'s; nearest: a run on a "
                         "GPU")
    if hardware.name in GPUS and kind_of(device) not in (None, hardware.name):
        raise ValueError(f"--gpu {hardware.name}: --measured {record['file']} was measured on an {device}; nearest: --gpu "
                         f"{kind_of(device)}")


def compare(record: dict, hardware: Hardware, options: argparse.Namespace, read_config: ReadConfig) -> tuple[list, bool]:
    prediction = predicted(record, hardware, read_config, options.gpus_per_host, options.overrides)
    name = record["name"] + (", OUT OF MEMORY" if "out_of_memory" in record else "")
    cells, is_good = [name, record["gpus"]], "out_of_memory" not in record
    allowed = dict(zip(FIGURES, (options.max_time_error, options.max_memory_error, options.max_memory_error)))
    for key, expected in figures_of(prediction).items():
        measured = record.get(key)
        cells += against(measured, expected)
        is_good &= measured is None or abs(expected - measured) <= allowed[key] * measured
    return cells, is_good


def figures_of(prediction: Prediction) -> dict[str, float]:
    """What FIGURES are predicted to be."""
    return dict(zip(FIGURES, (prediction.time.seconds, prediction.memory.live_gib, prediction.host_gib)))


def against(measured: float | None, expected: float) -> list[str]:
    """Three cells: measured, predicted, the prediction's error."""
    if not measured:  # host memory may be none at all
        return ["-" if measured is None else f"{measured:.2f}", f"{expected:.2f}", "-"]
    return [f"{measured:.2f}", f"{expected:.2f}", f"{100 * (expected / measured - 1):+.1f}%"]


def predicted(record: dict, hardware: Hardware, read_config: ReadConfig, gpus_per_host: int = 8, overrides: Sequence[str] = ()
              ) -> Prediction:
    """Of what a record was measured with. ValueError naming its file where its overrides are none."""
    gpus, words = record["gpus"], [*record["overrides"], *overrides]
    try:
        cfg = read_config(words, gpus)
        dp = cfg.parallel.dp if cfg.parallel.dp != -1 else gpus // cfg.parallel.cp
        jobs = divisions(cfg, layer_masks(cfg.attention), gpus, gpus_per_host, dp=dp, ulysses=cfg.parallel.ulysses,
                         activations=cfg.train.activations)
        return predict(jobs[0], hardware)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{record['file']}: {record['name']}: {in_a_line(error, words)}") from error


def in_a_line(error: Exception, overrides: Sequence[str]) -> str:
    """What is wrong with these overrides. Hydra's own errors are a dozen lines, of which the last say where it looked."""
    return "; ".join(misspelt(list(overrides))) or " ".join(str(error).split("Config search path")[0].split())


def read_measured(path: Path, option: str = "--measured", *, or_none: bool = False) -> list[dict]:
    """[{file, name, overrides, gpus, device ("cpu", a card's name or None), and of FIGURES what was measured, positive and
    finite}]; of a step that did not fit out_of_memory instead of figures. ValueError, which begins with `option`, for what is
    neither a run folder nor such a file, or (without or_none) has no record."""
    device = None
    if path.is_dir():
        records = [_read_folder(path, option)]
    else:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{option} {path}: {error}") from error
        records = found.get("records", [found]) if isinstance(found, dict) else found
        device = device_of(found) if isinstance(found, dict) else None
    if not isinstance(records, list) or not (records or or_none):
        raise ValueError(f"{option} {path}: must be a record of overrides with seconds or peak_gib, or a list of such, of one at "
                         "least; plan.py measure --json FILE writes one")
    checked = [_checked(record, path, f"{option} {path}: record {number}") for number, record in enumerate(records, 1)]
    return [{"device": device, **record} for record in checked]


def _checked(record: Any, path: Path, where: str) -> dict:
    if isinstance(record, dict):
        record = {"gpus": 1, **record, "name": str(record.get("name", path.stem)), "file": str(path)}
    words = record.get("overrides") if isinstance(record, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"{where}: overrides={words}: must be a list of words, as of ringflash train; nearest: [\"model=base\"]")
    gpus = record["gpus"]
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 1:
        raise ValueError(f"{where}: gpus={gpus}: must be an int of at least 1; nearest: 1")
    if "out_of_memory" in record:
        return record
    known = [key for key in FIGURES if record.get(key) is not None]
    for key in known:
        check_number(record[key], f"{where}: {key}", or_zero=key == "host_gib")
    if not known:
        raise ValueError(f"{where}: has nothing that was measured; nearest: seconds or peak_gib")
    return record


def check_number(value: Any, where: str, *, or_zero: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{where}={value}: must be a finite number {'from' if or_zero else 'above'} 0")


def _read_folder(folder: Path, option: str) -> dict:
    overrides, metrics = folder / ".hydra" / "overrides.yaml", folder / "metrics.jsonl"
    if not overrides.is_file() or not metrics.is_file():
        raise ValueError(f"{option} {folder}: no run folder, it has no {'metrics.jsonl' if overrides.is_file() else '.hydra'}")
    try:
        words = OmegaConf.to_container(OmegaConf.load(overrides))
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{option} {overrides}: {' '.join(str(error).split())}") from error
    steps = _steps(metrics, option)
    later = steps[1:] or steps              # the first step compiles and warms up
    if not later:
        raise ValueError(f"{option} {folder}: no step is in its metrics.jsonl")
    return {"name": folder.name, "overrides": words, "device": _device_of_run(folder, words),
            "gpus": round(later[0]["tokens_per_s"] / later[0]["tokens_per_s_per_rank"]),
            # A row has the tokens of all steps so far.
            "seconds": statistics.median(row["tokens"] / row["step"] / row["tokens_per_s"] for row in later),
            "loss": later[-1].get("loss"), "tflops_per_gpu": later[-1].get("tflops_per_rank"),
            "peak_gib": max(row["peak_memory_gib"] for row in later)}


def _device_of_run(folder: Path, words: Sequence[str]) -> str | None:
    """ "cpu" where the run says so: in its summary once it has ended, in its configuration where that did not leave it open."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        summary = None
    ranks = summary.get("ranks") if isinstance(summary, dict) else None
    config = folder / ".hydra" / "config.yaml"
    try:
        composed = OmegaConf.select(OmegaConf.load(config), "run.device") if config.is_file() else None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException):
        composed = None
    return "cpu" if str(ranks).endswith(" on cpu") or "cpu" in (composed, *_given("run.device", words)) else None


def _given(key: str, words: Sequence[str]) -> list[str]:
    return [value for name, _, value in (word.partition("=") for word in words) if name.lstrip("+") == key][-1:]


def _steps(metrics: Path, option: str) -> list[dict]:
    """Rows of the training steps that changed the weights. ValueError naming file and line for what is no such row."""
    found = []
    for number, line in enumerate(metrics.read_text(errors="replace").splitlines(), 1):
        where = f"{option} {metrics}: line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"{where}: is no row of a run, it has no kind")
        if row["kind"] == "train" and "skipped" not in row:
            for key in _ROW:
                check_number(row.get(key), f"{where}: {key}")
            found.append(row)
    return found
