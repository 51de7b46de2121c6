"""The tables of launch/million.py: what was measured, what `plan` says of it, which claims hold, and what they lack."""
from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ringflash.launch.million import MILLION, Run, runs
from ringflash.launch.plan import read_config
from ringflash.launch.plan_compare import FIGURES, against, check_number, figures_of, predicted, read_measured
from ringflash.planning.hardware import device_of, hardware_of, read_calibration
from ringflash.planning.show import table
from ringflash.planning.step_time import mask_pairs

MEMORY_ERROR, TIME_ERROR = 0.05, 0.10  # of predictions
LEAST_TFLOPS = 400.0  # of the model, causal-exact, at the length of the longest step of all layers
RINGS = (1, 2, 4)
FLAT, LINEAR = 0.12, 0.05  # memory over the ranks of a ring at equal rows (the ring's buffers, at most); over rows at equal ranks
FOLDERS, FILES = ("step", "resume"), ("offload", "two-layers", "ranks-memory")  # parts, and beginnings of parts, that leave such
SAVE = "block_save_attention"


@dataclass(frozen=True)
class Claim:
    """holds: None where it was not measured, or not all of it. lacks: runs that it needs and that were not measured, with why."""

    text: str
    holds: bool | None
    found: str
    lacks: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = {True: "holds", False: "FAILS", None: "in part" if self.found else "not run"}[self.holds]
        more = [self.found] if self.found else []
        more += [f"lacks {'; '.join(self.lacks)}"] if self.lacks else []
        return f"{said:<7}  {self.text}" + "".join(f"\n         {line}" for line in more)


@dataclass(frozen=True)
class Evidence:
    """records: of measured(). verdicts: of parts.json, by part. tokens: of the long steps, as they were asked for."""

    records: Sequence[dict]
    verdicts: dict[str, dict]
    tokens: int

    @cached_property
    def runs(self) -> dict[str, list[Run]]:
        return runs(self.tokens)

    def of(self, kind: str, *, tokens: int | None = None) -> dict[str, dict]:
        """Records with figures by policy, of parts whose names begin so."""
        return {record["activations"]: record for record in self.records if record["part"].startswith(kind)
                and "out_of_memory" not in record and tokens in (None, record["tokens"])}

    def judged(self, text: str, good: bool | None, found: str, parts: Iterable[str], only: Sequence[str] | None = None) -> Claim:
        """A claim on the runs of these parts, of which only those of some policies (None: all): it fails where one of them did,
        and holds where none is missing."""
        failures, lacks = [], []
        for part in parts:
            verdict = self.verdicts.get(part, {"verdict": "not run"})
            needed = [run for run in self.runs[part] if only is None or run.policy in only]
            found_of = {run: self._record(part, run) for run in needed}
            failures += [f"{part}: {run}: out of memory: {record['out_of_memory']}" for run, record in found_of.items()
                         if record is not None and "out_of_memory" in record]
            missing = [run for run, record in found_of.items() if record is None]
            if not missing:
                continue
            name = part if missing == self.runs[part] else f"{part}: {', '.join(map(str, missing))}"
            if verdict["verdict"] == "failed":
                failures.append(f"{name}: failed: {verdict.get('last', '')}")
            else:
                lacks.append(f"{name} ({verdict['verdict']})")
        holds = False if failures or good is False else None if lacks or good is None else True
        return Claim(text, holds, "; ".join(filter(None, [found, *failures])), tuple(lacks))

    def _record(self, part: str, run: Run) -> dict | None:
        """The run's, whichever part of its kind measured it."""
        kind = next((kind for kind in FILES if part.startswith(kind)), part)
        return next((record for record in self.records if record["part"].startswith(kind) and record["tokens"] == run.tokens
                     and record["gpus"] == run.ranks and run.policy in (None, record["activations"])), None)


def report(folders: Sequence[Path], out: Path) -> int:
    """Prints the tables and writes out/million.json. 0 where every part succeeded, and all that is claimed was measured and
    holds. ValueError naming the file where one cannot be read."""
    verdicts = read_verdicts(folders)
    calibration = _best(folders, "calibration.json", verdicts.get("calibration"))
    if calibration is not None and device_of(read_calibration(calibration)) == "cpu":
        calibration = None                  # a test of the code: a CPU's rates predict nothing of a GPU
    hardware = hardware_of(None, calibration)
    records = list(measured(folders, verdicts))
    if not records and not verdicts and _best(folders, "ranks-equal.json", None) is None:
        raise ValueError(f"--report {', '.join(map(str, folders))}: nothing that million.py measured is there; nearest: a folder "
                         "that million.py wrote")
    for record in records:
        expected = predicted(record, hardware, read_config)
        job = expected.job
        record |= {f"predicted_{key}": value for key, value in figures_of(expected).items()}
        record |= {"tokens": job.seq_len, "activations": job.activations, "layers": job.cfg.model.num_layers,
                   "document_mask": job.cfg.data.document_mask,
                   "allowed_pairs": sum(layers * mask_pairs(mask, job.seq_len) for mask, layers in job.layers_by_mask),
                   "parameters_of_layers": job.sizes.num_layers * job.sizes.layer}
    head = ["part", "what", "ranks", "seconds", "predicted", "error", "TFLOP/s", "GiB", "predicted", "error", "host GiB",
            "predicted", "error", "loss"]
    if records:
        print(table([head, *map(_row, records)], left=(0, 1)))
        print(f"predictions: {calibration or 'the table of plan, NOT calibrated'}; TFLOP/s: of the model, causal-exact; GiB: the "
              "most\nthat tensors took at a time (max_memory_allocated); the first step of a run has no optimizer state in it; "
              "ranks-*: no seconds,\nthey share a card, and may run side by side")
    print()
    for part in verdicts.values():
        if part["verdict"] != "ok":
            took, last = part.get("seconds", 0), part.get("last", "")
            print(f"{part['verdict'].upper():<7}  part {part['name']}, after {took:.0f} s: {last}")
    evidence = Evidence(records, verdicts, _tokens(records, verdicts))
    found = claims(evidence, is_calibrated=calibration is not None)
    found.append(equality(_best(folders, "ranks-equal.json", verdicts.get("ranks-equal")), verdicts.get("ranks-equal")))
    print("\n".join(map(str, found)))
    out.mkdir(parents=True, exist_ok=True)
    written = {"records": records, "claims": [asdict(claim) for claim in found], "parts": list(verdicts.values()),
               "calibration": json.loads(calibration.read_text()) if calibration else None}
    (out / "million.json").write_text(json.dumps(written, indent=1) + "\n")
    return 0 if all(claim.holds for claim in found) and all(part["verdict"] == "ok" for part in verdicts.values()) else 1


def read_verdicts(folders: Sequence[Path]) -> dict[str, dict]:
    """Of parts.json of all folders, by part, with the folder: a success where there is one, else the first."""
    found: dict[str, dict] = {}
    for path in (folder / "parts.json" for folder in folders if (folder / "parts.json").is_file()):
        try:
            listed = [{**part, "folder": str(path.parent), "name": part["name"], "verdict": str(part["verdict"])}
                      for part in json.loads(path.read_text())]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"--report {path}: must be the list of parts that million.py writes: {error!r}") from error
        for part in listed:
            if part["name"] not in found or (part["verdict"] == "ok") > (found[part["name"]]["verdict"] == "ok"):
                found[part["name"]] = part
    return found


def _best(folders: Sequence[Path], name: str, verdict: dict | None) -> Path | None:
    """This file or folder where its part succeeded, else the first that is there."""
    ordered = sorted(folders, key=lambda folder: verdict is not None and str(folder) != verdict["folder"])
    return next((folder / name for folder in ordered if (folder / name).exists()), None)


def measured(folders: Sequence[Path], verdicts: dict[str, dict]) -> Iterable[dict]:
    """Every record of the folders, with its part, also of steps that ran out of memory. ValueError for one that lacks what its
    part measures."""
    names = [*FOLDERS, *(path.stem for kind in FILES for folder in folders for path in sorted(folder.glob(f"{kind}*.json")))]
    for part in dict.fromkeys(names):
        path = _best(folders, part if part in FOLDERS else f"{part}.json", verdicts.get(part))
        if path is None or (part in FOLDERS and not (path / "metrics.jsonl").is_file()):
            continue
        is_timed = not part.startswith("ranks-memory")
        for number, record in enumerate(read_measured(path, "--report", or_none=True), 1):
            where = f"--report {path}: record {number}"
            if "out_of_memory" not in record:
                for key in ("seconds", "peak_gib") if is_timed else ("peak_gib",):
                    check_number(record.get(key), f"{where}: {key}")
                for key in ("loss", "tflops_per_gpu"):
                    if record.get(key) is not None:
                        check_number(record[key], f"{where}: {key}", or_zero=True)
            if not is_timed:
                record = {key: value for key, value in record.items() if key != "seconds"}
            yield {**record, "part": part}


def _tokens(records: Sequence[dict], verdicts: dict[str, dict]) -> int:
    """Of the long steps."""
    asked = [part["tokens"] for part in verdicts.values() if isinstance(part.get("tokens"), int)]
    return next((record["tokens"] for record in records if record["part"] in FOLDERS), asked[0] if asked else MILLION)


def _row(record: dict) -> list[object]:
    what = f"{record['tokens']:,} tokens, {record['layers']} layers, {record['activations']}"
    cells = {key: against(record.get(key), record[f"predicted_{key}"]) for key in FIGURES}
    if "out_of_memory" in record:
        cells["seconds"][0] = "OUT OF MEMORY"
    elif "seconds" not in record:
        cells["seconds"] = ["-"] * 3
    if not record.get("host_gib") and not record["predicted_host_gib"]:
        cells["host_gib"] = [""] * 3
    tflops = record.get("tflops_per_gpu") if "seconds" in record else None
    loss = record.get("loss")
    return [record["part"], what, record["gpus"], *cells["seconds"], "-" if tflops is None else f"{tflops:.0f}",
            *cells["peak_gib"], *cells["host_gib"], "-" if loss is None else f"{loss:.4f}"]


def claims(evidence: Evidence, *, is_calibrated: bool) -> list[Claim]:
    steps = [record for part in FOLDERS for record in evidence.of(part).values()]
    found = [_long(evidence, steps)]
    losses = [record["loss"] for record in steps if record.get("loss") is not None]
    text = "the loss of the same batch falls, from a step to the next through a checkpoint and another policy"
    found.append(evidence.judged(text, losses[1] < losses[0] if len(losses) == 2 else None,
                                 ", then ".join(f"{loss:.4f}" for loss in losses), FOLDERS))
    found.append(_twice(evidence))
    everything = [part for part, listed in evidence.runs.items() if listed]
    timed = [part for part in everything if not part.startswith("ranks-memory")]
    for key, name, allowed, parts, only in (("seconds", "time", TIME_ERROR, timed, None),
                                            ("peak_gib", "memory", MEMORY_ERROR, everything, None),
                                            ("host_gib", "host memory of offload", MEMORY_ERROR, timed, ("offload",))):
        errors = [record[f"predicted_{key}"] / record[key] - 1 for record in evidence.records if record.get(key)
                  and (only is None or record["activations"] in only)]
        worst = max(errors, key=abs, default=None)
        text = f"{name} within {100 * allowed:.0f}% of what a calibration of at most 64K tokens predicts"
        said = "" if worst is None else f"{len(errors)} steps, the largest error {100 * worst:+.1f}%" \
            + ("" if is_calibrated else " of what plan's table says")
        claim = evidence.judged(text, abs(worst) <= allowed if errors and is_calibrated else None, said, parts, only)
        found.append(claim if is_calibrated else replace(claim, lacks=("calibration", *claim.lacks)))
    return found + _policies(evidence) + _ranks(evidence)


def _long(evidence: Evidence, steps: Sequence[dict]) -> Claim:
    what = "the long step"
    if steps:
        masked, first = "" if steps[0]["document_mask"] else " (no document mask)", steps[0]
        what = (f"{first['tokens']:,} tokens, {first['layers']} layers of {first['parameters_of_layers'] / 1e6:.0f} M "
                f"parameters, {first['allowed_pairs']:,} allowed pairs{masked}")
    rates = [record.get("tflops_per_gpu") or 0 for record in steps]
    said = "; ".join(f"{record['activations']}: {record['seconds']:.1f} s, {rate:.0f} TFLOP/s, {record['peak_gib']:.1f} GiB"
                     for record, rate in zip(steps, rates))
    return evidence.judged(f"{what}, on one GPU, at {LEAST_TFLOPS:.0f} model-TFLOP/s or more",
                           any(rate >= LEAST_TFLOPS for rate in rates) if rates else None, said, FOLDERS[:1])


def _twice(evidence: Evidence) -> Claim:
    done = evidence.of("two-layers", tokens=2 * evidence.tokens).get(SAVE)
    said = "" if done is None else (
        f"{done['tokens']:,} tokens, {done['parameters_of_layers'] / 1e6:.0f} M parameters in layers, {done['allowed_pairs']:,} "
        f"pairs: {done['seconds']:.1f} s, {done['peak_gib']:.1f} GiB")
    return evidence.judged("a step of two layers at twice the length", None if done is None else True, said, ["two-layers-twice"])


def _policies(evidence: Evidence) -> list[Claim]:
    """What block_save_attention saves beside block: attention's forward. What offload costs beside it (nothing, or copies), and
    what memory it saves."""
    half, quarter = evidence.tokens // 2, evidence.tokens // 4
    whole = {record["activations"]: record for part in FOLDERS for record in evidence.of(part).values()}
    few = {tokens: evidence.of("two-layers", tokens=tokens) for tokens in (quarter, evidence.tokens)}
    groups = [("block", "all layers", whole, FOLDERS, None),
              ("offload", f"{half:,} tokens, all layers", evidence.of("offload", tokens=half), ("offload",), None),
              *((other, f"{quarter:,} tokens, two layers", few[quarter], ("two-layers-quarter",), (other, SAVE))
                for other in ("block", "offload")),
              ("offload", f"{evidence.tokens:,} tokens, two layers", few[evidence.tokens],
               ("two-layers-save", "two-layers-offload"), None)]
    found = []
    for other, where, of, parts, only in groups:
        good, said = None, ""
        if other in of and SAVE in of:
            ratio, foreseen = (of[other][key] / of[SAVE][key] for key in ("seconds", "predicted_seconds"))
            good, said = abs(foreseen / ratio - 1) <= TIME_ERROR, f"{ratio:.3f}, predicted {foreseen:.3f}"
        found.append(evidence.judged(f"{other} over {SAVE}, {where}: seconds within {100 * TIME_ERROR:.0f}% of the prediction",
                                     good, said, parts, only))
    of, good, said = evidence.of("offload", tokens=half), None, ""
    if len(of) == 2:
        saved, foreseen = (of[SAVE][key] - of["offload"][key] for key in ("peak_gib", "predicted_peak_gib"))
        good = saved > 0 and abs(foreseen - saved) <= MEMORY_ERROR * of[SAVE]["peak_gib"]
        host, foreseen_host = of["offload"].get("host_gib") or 0, of["offload"]["predicted_host_gib"]
        said = (f"{saved:.1f} GiB, predicted {foreseen:.1f}, of {of[SAVE]['peak_gib']:.1f}; {host:.1f} GiB of host memory, "
                f"predicted {foreseen_host:.1f}")
    found.append(evidence.judged(f"offload saves memory, {half:,} tokens, all layers: as much as predicted, within "
                                 f"{100 * MEMORY_ERROR:.0f}% of the peak without", good, said, ["offload"]))
    return found


def _ranks(evidence: Evidence) -> list[Claim]:
    """Memory of a rank: at equal rows that of one and the ring's buffers, and linear in the rows of a ring."""
    peaks: dict[int, dict[int, float]] = {}  # by rows of a rank, by ranks
    for record in evidence.records:
        if record["part"].startswith("ranks-memory") and "out_of_memory" not in record:
            peaks.setdefault(record["tokens"] // record["gpus"], {})[record["gpus"]] = record["peak_gib"]
    needed = [part for part in evidence.runs if part.startswith("ranks-memory")]
    flat = [max(of.values()) / min(of.values()) - 1 for of in peaks.values() if set(RINGS) <= set(of)]
    said = "; ".join(f"{rows:,} rows: " + ", ".join(f"{gib:.2f}" for _, gib in sorted(of.items()))
                     for rows, of in sorted(peaks.items()))
    sizes = sorted({ranks for of in peaks.values() for ranks in of})
    text = f"memory of a rank at equal rows: rings of 1, 2 and 4 differ by their buffers, at most {100 * FLAT:.0f}%"
    first = evidence.judged(text, max(flat) <= FLAT if flat else None,
                            f"GiB, {' '.join(map(str, sizes))} ranks: {said}" if peaks else "", needed)
    bends = []
    for ranks in sizes:
        points = sorted((rows, of[ranks]) for rows, of in peaks.items() if ranks in of)
        if len(points) > 2:
            slopes = [(high[1] - low[1]) / (high[0] - low[0]) for low, high in zip(points, points[1:])]
            bends.append(max(slopes) / min(slopes) - 1 if min(slopes) > 0 else float("inf"))
    second = evidence.judged("memory of a rank is linear in its rows", max(bends) <= LINEAR if bends else None,
                             f"bytes per further row differ by at most {100 * max(bends):.1f}%" if bends else "", needed)
    return [first, second]


def equality(path: Path | None, verdict: dict | None) -> Claim:
    """Of what check.py --train wrote, or of why it did not."""
    text = "4 ranks give the step of one: loss, gradients, their norm, weights after it"
    said = (verdict or {}).get("verdict", "not run")
    if path is None and said == "failed":
        return Claim(text, False, f"failed: {verdict.get('last', '')}")
    if path is None:
        return Claim(text, None, "", (f"ranks-equal ({said})",))
    try:
        rows = [row for record in json.loads(path.read_text()).get("train", []) for row in record["rows"]]
        good = sum(row["ok"] for row in rows)
        worst = max((row["error"] / row["budget"] for row in rows if row["budget"]), default=0.0)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--report {path}: must be what check.py --train --json writes: {error!r}") from error
    return Claim(text, bool(rows) and good == len(rows),
                 f"{good} of {len(rows)} quantities within budget, worst {worst:.2f} of it")
