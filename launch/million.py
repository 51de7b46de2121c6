"""One million tokens on one GPU: every claim measured, beside what `plan` predicts from a calibration of at most 64K tokens.

    python launch/million.py                                 all parts, about 15 minutes on an H200, into outputs/million-<time>/
    python launch/million.py --list                          what they are, as commands to be run by hand
    python launch/million.py --parts step,resume --limit 300     those whose names begin so; what has no time left is "not run"
    python launch/million.py --report outputs/million-...    the table again, also of several folders together
    python launch/million.py --tokens 32768                  all of it at another length

One after the other, since they are timed. Each is a command of this repository; checkpoints (5 GiB) and the tokenised text go to
--scratch. Further words are overrides for all of them. The table and million.json say what holds, and what a claim still lacks;
exit code 1 where something does not hold, failed, or did not run.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and not __package__ and (ROOT / "pyproject.toml").is_file():
    sys.path[0] = str(ROOT)                 # run as a file: the checkout, not launch/, is the import root

from ringflash.launch.counts import count, duration
from ringflash.launch.prove import Part, choose, part, run

MILLION = 1 << 20
ALLOCATOR = "expandable_segments:True"


@dataclass(frozen=True)
class Run:
    """A step that a part measures. tokens: of the whole sequence. policy: None where it is the configuration's."""

    tokens: int
    policy: str | None = None
    ranks: int = 1

    def __str__(self) -> str:
        more = [self.policy] if self.policy else []
        return ", ".join([f"{self.tokens:,} tokens", *more, *([f"{self.ranks} ranks"] if self.ranks > 1 else [])])


def runs(tokens: int) -> dict[str, list[Run]]:
    """What each part measures, the most important first. tokens: of the long steps; the others follow from it."""
    save, half, quarter, rows = "block_save_attention", tokens // 2, tokens // 4, tokens // 64
    return {
        "step": [Run(tokens)], "calibration": [], "resume": [Run(tokens)],
        "offload": [Run(half, save), Run(half, "offload")],
        "two-layers-twice": [Run(2 * tokens, save)],
        "two-layers-save": [Run(tokens, save)],
        "two-layers-quarter": [Run(quarter, policy) for policy in ("none", save, "block", "offload")],
        "two-layers-offload": [Run(tokens, "offload")],
        "ranks-equal": [],
        "ranks-memory-4": [Run(4 * rows * more, None, 4) for more in (2, 3, 4)],
        "ranks-memory-1-2": [Run(ranks * rows * more, None, ranks) for ranks in (1, 2) for more in (2, 3, 4)],
    }


def parts(tokens: int, scratch: str, words: Sequence[str] = ()) -> list[Part]:
    """Those of runs(), as commands."""
    model = " ".join(["experiment=one_million", f"data.cache_dir={scratch}/cache", *words])
    train = f"train.py {model} data.seq_len={tokens} data.max_samples=1 train.eval_sequences=0 run.plot=false"
    long = tokens >= MILLION
    wanted = runs(tokens)

    def steps(name: str, limit_s: float, needs_s: float, more: str = "model.num_layers=2") -> Part:
        listed = ",".join(f"{each.tokens}:{each.policy}" for each in wanted[name])
        command = " ".join(f"plan.py measure {model} {more} --runs {listed} --json {{out}}/{name}.json".split())
        return part(name, limit_s, command, alone=True, needs_s=needs_s * long)

    def bytes_of_ranks(name: str) -> Part:
        # Tiles so small that attention, not a tile's MLP, is what needs most memory at each of these lengths.
        sizes = dict.fromkeys(each.ranks for each in wanted[name])
        rows = dict.fromkeys(each.tokens // each.ranks for each in wanted[name])
        return part(name, 150, f"plan.py measure {model} model.num_layers=4 train.tile_rows={tokens // 512} "
                               f"attention.layout=zigzag --processes {','.join(map(str, sizes))} "
                               f"--rows {','.join(map(str, rows))} --json {{out}}/{name}.json", needs_s=40)

    return [
        part("step", 300, f"{train} train.steps=1 run.dir={scratch}/step", alone=True, needs_s=150 * long),
        part("calibration", 90, f"plan.py calibrate {model} --json {{out}}/calibration.json", alone=True, needs_s=30),
        part("resume", 300, f"{train} train.steps=2 train.activations=block checkpoint.every=0 "
                            f"checkpoint.resume={scratch}/step run.dir={scratch}/resume", alone=True, needs_s=150 * long),
        steps("offload", 240, 110, ""),
        steps("two-layers-twice", 240, 130),
        steps("two-layers-save", 120, 45),
        steps("two-layers-quarter", 120, 25),
        steps("two-layers-offload", 150, 60),
        part("ranks-equal", 320, f"check.py --train --processes 4 --timeout 300 --json {{out}}/ranks-equal.json --config {model} "
                                 f"model.num_layers=2 data.seq_len={tokens // 8} attention.layout=zigzag", needs_s=150),
        bytes_of_ranks("ranks-memory-4"),
        bytes_of_ranks("ranks-memory-1-2"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0: every part that was asked for ran, and all that is claimed was measured and holds. 1: not so. 2: it cannot be."""
    parser = argparse.ArgumentParser("million.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of ringflash train, for all parts")
    parser.add_argument("--parts", help="comma-separated beginnings of names")
    parser.add_argument("--limit", type=duration, default=float("inf"), help="seconds in all")
    parser.add_argument("--jobs", type=count(1), default=1, help="parts side by side: ranks-*, which are not timed (default 1)")
    parser.add_argument("--tokens", type=count(1024), default=MILLION, help=f"of the long steps (default {MILLION:,})")
    parser.add_argument("--out", type=Path, help="a folder; default outputs/million-<time>")
    parser.add_argument("--scratch", type=Path, help="a folder for checkpoints and tokens (default: a temporary one, removed)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FOLDER", help="runs nothing: the table of what is there")
    options = parser.parse_intermixed_args(argv)
    if options.report:
        return show(options.report, options.out or options.report[0])
    with tempfile.TemporaryDirectory(prefix="ringflash-million-") as temporary:
        scratch = temporary if options.scratch is None else str(options.scratch.resolve())
        try:
            wanted = choose(parts(options.tokens, "SCRATCH" if options.list else scratch, options.overrides), options.parts)
            check(options.overrides, is_run=not options.list)
        except ValueError as error:
            print(f"million: {error}", file=sys.stderr)
            return 2
        if options.list:
            for p in wanted:
                print(f"{p.name:<18} {p.command}")
            return 0
        try:
            folder, earlier = prepared(options.out or Path("outputs") / time.strftime("million-%Y%m%d-%H%M%S"))
        except OSError as error:
            print(f"million: --out {options.out}: must be a folder that can be written ({error.strerror})", file=sys.stderr)
            return 2
        except ValueError as error:
            print(f"million: --out {error}; nearest: another folder", file=sys.stderr)
            return 2
        return measure(wanted, options, scratch, folder, earlier)


def check(overrides: Sequence[str], is_run: bool) -> None:
    """ValueError for what no part could be run with; where it is to be run, also without a GPU but for run.device=cpu."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from ringflash.launch.plan import read_config
    from ringflash.launch.plan_calibrate import device_at_hand
    from ringflash.launch.plan_compare import in_a_line

    for word in overrides:
        if word.split("=")[0] == "data.seq_len":
            raise ValueError(f"{word}: each part has a length of its own; nearest: --tokens {word.partition('=')[2]}")
    try:
        cfg = read_config(["experiment=one_million", *overrides], 1)
        if is_run:
            device_at_hand(cfg)
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        raise ValueError(in_a_line(error, overrides)) from error


def prepared(out: Path) -> tuple[Path, list[dict]]:
    """The folder, and what its parts.json has of earlier parts. ValueError where that is none, OSError where nothing can be written
    there."""
    folder = out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "parts.json"
    if not known.is_file():
        return folder, []
    try:
        earlier = json.loads(known.read_text())
        return folder, [{**each, "name": each["name"]} for each in earlier]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{known}: must be the list of parts that million.py writes ({error!r})") from error


def measure(wanted: Sequence[Part], options: argparse.Namespace, scratch: str, folder: Path, earlier: Sequence[dict]) -> int:
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
    print(f"PYTORCH_CUDA_ALLOC_CONF={os.environ['PYTORCH_CUDA_ALLOC_CONF']}, into {folder}", flush=True)
    for p in wanted:                        # what an earlier run left there is not this one's
        (folder / f"{p.name}.json").unlink(missing_ok=True)
        shutil.rmtree(folder / p.name, ignore_errors=True)
    # A signal ends what was started, too: each part is a session of its own.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        results = [{**result, "tokens": options.tokens} for result in run(wanted, folder, options.jobs, options.limit)]
    finally:
        signal.signal(signal.SIGTERM, before)
    for name in ("step", "resume"):
        if (Path(scratch) / name).is_dir():
            shutil.copytree(Path(scratch) / name, folder / name, ignore=shutil.ignore_patterns("checkpoints"), dirs_exist_ok=True)
    again = {result["name"] for result in results}
    kept = [each for each in earlier if each["name"] not in again]
    (folder / "parts.json").write_text(json.dumps([*kept, *results], indent=1) + "\n")
    return show([folder], folder)


def show(folders: Sequence[Path], out: Path) -> int:
    from ringflash.launch.million_report import report

    try:
        return report(folders, out)
    except (ValueError, OSError) as error:
        print(f"million: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
