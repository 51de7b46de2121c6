"""The main job from end to end on this machine: `make demo`, or `python launch/demo.py [overrides]`.

Without a GPU it trains `experiment=quickstart` on two CPU ranks; with GPUs `experiment=one_gpu`, one rank for each card. Then the
same model is put to the proof: one step of plain SGD from the trained weights on one rank against the ring, every gradient.
"""
from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

LAUNCH = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    """`argv`: overrides for launch/train.py, no flags (2). Returns the exit code of the first part that failed, or 0."""
    overrides = sys.argv[1:] if argv is None else list(argv)
    flags = [word for word in overrides if word.startswith("-")]
    if flags:
        print(__doc__)
        return 0 if set(flags) <= {"-h", "--help"} else 2
    import torch

    gpus = torch.cuda.device_count()
    ranks = gpus or 2
    experiment = ["experiment=one_gpu", f"parallel.nproc={gpus}"] if gpus else ["experiment=quickstart"]
    folder = Path("outputs") / time.strftime("demo-%Y%m%d-%H%M%S")
    train = [sys.executable, str(LAUNCH / "train.py"), *experiment, f"run.dir={folder}", *overrides]
    # One card: the ring of the proof is two ranks that share it.
    check = [sys.executable, str(LAUNCH / "check.py"), "--train", "--run", str(folder), "--processes", str(max(ranks, 2))]
    for part in (train, check):
        print("+ " + " ".join(["python", *part[1:]]), flush=True)
        code = subprocess.run(part).returncode
        if code:
            print(f"demo: failed with exit code {code}", file=sys.stderr)
            return code
    print(f"demo: done; loss.png, metrics.jsonl and the rest are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
