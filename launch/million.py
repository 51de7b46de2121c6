"""One million tokens on one GPU: every claim measured, beside what `plan` predicts from a calibration of at most 64K tokens.

    python launch/million.py                                 all parts, about 11 minutes on an H200, into outputs/million-<time>/
    python launch/million.py --list                          what they are, as commands to be run by hand
    python launch/million.py --parts step,resume --limit 300     those whose names begin so; what has no time left is "not run"
    python launch/million.py --report outputs/million-...    the table again, also of several folders together
    python launch/million.py --tokens 32768                  all of it at another length

One after the other, since they are timed. Each is a command of this repository; checkpoints (5 GiB) and the tokenised text go to
--scratch. Further words are overrides for all of them. The table and million.json say what holds; exit code 1 where something does
not, or did not run.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and not __package__ and (ROOT / "pyproject.toml").is_file():
    sys.path[0] = str(ROOT)                 # run as a file: the checkout, not launch/, is the import root

from ringflash.launch.counts import count
from ringflash.launch.prove import Part, part, run

MILLION = 1 << 20
ALLOCATOR = "expandable_segments:True"


def parts(tokens: int, scratch: str, words: Sequence[str] = ()) -> list[Part]:
    """The most important first. tokens: of the long steps; the others follow from it."""
    model = " ".join(["experiment=one_million", f"data.cache_dir={scratch}/cache", *words])
    train = f"train.py {model} data.seq_len={tokens} data.max_samples=1 train.eval_sequences=0 run.plot=false"
    long = tokens >= MILLION
    rows = tokens // 64
    tile = rows // 8
    few = f"plan.py measure {model} model.num_layers=2"
    save = "block_save_attention"
    runs = [(2 * tokens, save), *((tokens // 4, policy) for policy in ("none", save, "block", "offload")), (tokens, "offload"),
            (tokens, save)]
    return [
        part("step", 300, f"{train} train.steps=1 run.dir={scratch}/step", needs_s=150 * long),
        part("calibration", 90, f"plan.py calibrate {model} --json {{out}}/calibration.json", needs_s=30),
        part("resume", 300, f"{train} train.steps=2 train.activations=block checkpoint.every=0 "
                            f"checkpoint.resume={scratch}/step run.dir={scratch}/resume", needs_s=150 * long),
        part("two-layers", 300, f"{few} --runs {','.join(f'{n}:{policy}' for n, policy in runs)} --json {{out}}/two-layers.json",
             needs_s=120 * long),
        part("ranks-equal", 150, f"check.py --train --processes 4 --timeout 140 --json {{out}}/ranks-equal.json --config {model} "
                                 f"model.num_layers=2 data.seq_len={tokens // 8} attention.layout=zigzag", needs_s=40),
        # Tiles so small that attention, not a tile's MLP, is what needs most memory at each of these lengths.
        part("ranks-memory", 150, f"plan.py measure {model} model.num_layers=4 train.tile_rows={tile} attention.layout=zigzag "
                                  f"--processes 1,2,4 --rows {2 * rows},{3 * rows},{4 * rows} "
                                  "--json {out}/ranks-memory.json", needs_s=40),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """0: every part that was asked for ran, and what it measured is as claimed. 1: not so. 2: there is no such part."""
    parser = argparse.ArgumentParser("million.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as of ringflash train, for all parts")
    parser.add_argument("--parts", default="", help="comma-separated beginnings of names")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    parser.add_argument("--jobs", type=count(1), default=1, help="parts side by side: of ranks-*, which are not timed (default 1)")
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
        wanted = parts(options.tokens, "SCRATCH" if options.list else scratch, options.overrides)
        names = [p.name for p in wanted]
        chosen = options.parts.split(",") if options.parts else names
        if unknown := [word for word in chosen if not any(name.startswith(word) for name in names)]:
            print(f"million: --parts {unknown[0]}: no such part; there are {', '.join(names)}", file=sys.stderr)
            return 2
        wanted = [p for p in wanted if any(p.name.startswith(word) for word in chosen)]
        if options.list:
            for p in wanted:
                print(f"{p.name:<13} {p.command}")
            return 0
        return measure(wanted, options, scratch)


def measure(wanted: Sequence[Part], options: argparse.Namespace, scratch: str) -> int:
    folder = (options.out or Path("outputs") / time.strftime("million-%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", ALLOCATOR)
    print(f"PYTORCH_CUDA_ALLOC_CONF={os.environ['PYTORCH_CUDA_ALLOC_CONF']}, into {folder}", flush=True)
    results = run(wanted, folder, options.jobs, options.limit)
    for name in ("step", "resume"):
        if (Path(scratch) / name).is_dir():
            shutil.copytree(Path(scratch) / name, folder / name, ignore=shutil.ignore_patterns("checkpoints"), dirs_exist_ok=True)
    known = folder / "parts.json"
    before = json.loads(known.read_text()) if known.is_file() else []
    again = {result["name"] for result in results}
    known.write_text(json.dumps([each for each in before if each["name"] not in again] + results, indent=1) + "\n")
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
