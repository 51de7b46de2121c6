"""Everything that can be proven on this machine, in one command: each part a command of this repository, its log, a verdict.

    python launch/prove.py                         all parts, into outputs/prove-<time>/
    python launch/prove.py --list                  what they are, as commands to be run by hand
    python launch/prove.py --parts matrix,random   those whose names begin so
    python launch/prove.py --limit 400             seconds in all: parts that do not fit are "not run", and that is no success

Parts that only compute run side by side. Those that are timed, and several NCCL ranks on one card (which take turns on it by time
slices), run alone afterwards. Needs a checkout: some parts are its tests. Figures are in the logs and JSON files of the folder.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCH = Path(__file__).resolve().parent
MILLION_GIB = 125.0  # what a GPU must have for all parts of million.py
_POLL_S = 0.2
_PATIENCE_S = 10.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Part:
    """One command, with what it may take at most. argv: without the interpreter, unless it begins with another program's path;
    {out} is the folder."""

    name: str
    limit_s: float
    argv: tuple[str, ...]
    alone: bool = False
    needs_s: float = 0.0  # is not begun with less than this left of the limit

    @property
    def command(self) -> str:
        if self.argv[0].startswith("/"):
            return " ".join(self.argv)
        first = f"launch/{self.argv[0]}" if self.argv[0].endswith(".py") else self.argv[0]
        return " ".join(["python", first, *self.argv[1:]])


def part(name: str, limit_s: float, command: str, *, alone: bool = False, needs_s: float = 0.0) -> Part:
    return Part(name, limit_s, tuple(command.split()), alone, needs_s)


def pytest_part(name: str, limit_s: float, what: str, *, alone: bool = False) -> Part:
    return part(name, limit_s, f"-m pytest -v -m gpu {what}", alone=alone)


def choose(parts: Sequence[Part], words: str | None) -> list[Part]:
    """Those whose names begin with one of these comma-separated words; None: all. ValueError naming --parts for none."""
    if words is None:
        return list(parts)
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [word for word in wanted if not any(p.name.startswith(word) for p in parts)]
    if unknown or not wanted:
        raise ValueError(f"--parts {','.join(unknown) or words}: no such part; there are {', '.join(p.name for p in parts)}")
    return [p for p in parts if any(p.name.startswith(word) for word in wanted)]


def gpu_parts(gpus: int, has_hopper: bool, memory_gib: float = 0.0) -> list[Part]:
    """In the order in which they start: what compiles most first, since the cache of kernels is everybody's. memory_gib: of one
    GPU."""
    kernels = ["hopper", "triton"] if has_hopper else ["triton"]
    tests = {"hopper": "tests/gpu/test_hopper_gpu.py tests/gpu/test_hopper_backward_gpu.py tests/gpu/test_racecheck_gpu.py",
             "triton": "tests/gpu/test_triton_gpu.py"}
    ranks = "check.py --quick --delays --dtypes bf16"
    beside, alone = [], []
    for kernel in kernels:
        beside += [
            part(f"matrix-{kernel}", 300, f"check.py --kernels {kernel} --dtypes bf16 --json {{out}}/matrix-{kernel}.json"),
            part(f"random-{kernel}", 400, f"check.py --random 500 --kernels {kernel} --dtypes bf16,fp16"),
            part(f"scale-{kernel}", 200, f"check.py --growth --bitwise 30 --kernels {kernel}"),
            pytest_part(f"tests-{kernel}", 400, f"-n 5 {tests[kernel]}"),
        ]
        alone.append(part(f"ranks-2-{kernel}", 150, f"{ranks} --processes 2 --kernels {kernel} --timeout 140", alone=True))
    beside += [
        part("matrix-fp32", 200, "check.py --quick --kernels triton --dtypes fp32"),
        part("planted", 120, "check.py --planted all"),
        pytest_part("tests-rest", 400, "-n 4 tests/gpu/test_masks_gpu.py tests/gpu/test_rotate_gpu.py "
                    "tests/gpu/test_embedding_gpu.py tests/gpu/test_activations_gpu.py tests/model/test_loss.py"),
    ]
    best = kernels[0]
    alone += [
        part("ranks-4", 250, f"{ranks} --processes 4 --kernels triton --timeout 240", alone=True),
        pytest_part("tests-ranks", 300, "tests/gpu/test_ring_gpu.py tests/gpu/test_sharded_gpu.py "
                    "tests/train/test_post_mortem.py", alone=True),
        part("kernels", 120, "bench.py kernels --json {out}/kernels.json --png {out}/kernels.png", alone=True),
        part("balance", 100, f"bench.py balance --kernel {best} --json {{out}}/balance.json", alone=True),
        part("ring", 100, f"bench.py ring --kernel {best} --json {{out}}/ring.json", alone=True),
        part("memory", 120, f"check.py --memory --kernels {best}", alone=True),
        part("demo", 240, "demo.py train.steps=12 optim.warmup_steps=2 train.eval_every=0 data.max_bytes=3000000", alone=True),
    ]
    sanitizer = find_sanitizer()
    if sanitizer and has_hopper:
        for tool, limit_s, more in (("memcheck", 300, ()), ("racecheck", 600, ("--for-racecheck",))):
            script = sys.executable, str(LAUNCH / "sanitize.py")
            beside.append(Part(tool, limit_s, (sanitizer, "--tool", tool, "--error-exitcode", "9", *script, *more)))
    if gpus > 1:
        alone += [
            pytest_part("tests-copy", 300, "tests/gpu/test_copy_gpu.py", alone=True),
            part("multi", 600, "bench.py multi --json {out}/multi.json --png {out}/multi", alone=True),
        ]
    if has_hopper and memory_gib > MILLION_GIB:
        # Ends its own parts in time: what it starts are sessions of their own.
        alone.append(part("million", 1300, "million.py --limit 1260 --out {out}/million", alone=True, needs_s=1300))
    return beside + alone


def find_sanitizer() -> str | None:
    """compute-sanitizer of the PATH, or of a CUDA that is installed beside it."""
    beside = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))
    return shutil.which("compute-sanitizer") or (str(beside[-1]) if beside else None)


def cpu_parts() -> list[Part]:
    return [
        part("planted", 300, "check.py --planted all"),
        part("matrix", 900, "check.py --quick --json {out}/matrix.json"),
        part("random", 900, "check.py --random 300 --json {out}/random.json"),
        part("interpreter", 600, "check.py --interpreter"),
        part("ranks-3", 600, "check.py --quick --processes 3 --delays", alone=True),
        part("train", 300, "check.py --train --processes 2", alone=True),
        part("kills", 600, "kill_test.py --moments 5", alone=True),
    ]


@dataclass
class Running:
    part: Part
    process: subprocess.Popen
    began: float
    told: float | None = None


def run(parts: Sequence[Part], folder: Path, jobs: int, limit_s: float) -> list[dict]:
    """Runs them, `jobs` side by side; {name, verdict, seconds, last, command} of each, in the order of `parts`. verdict: "ok",
    "failed", "late" (past its limit) or "not run"."""
    waiting, running, found = list(parts), [], {}
    try:
        _work(waiting, running, found, folder, jobs, time.monotonic() + limit_s)
    finally:
        for job in running:
            _signal(job.process, signal.SIGKILL)
    return [found.get(p.name) or _result(p, folder, "not run", 0.0) for p in parts]


def _work(waiting: list[Part], running: list[Running], found: dict[str, dict], folder: Path, jobs: int, end: float) -> None:
    while waiting or running:
        now = time.monotonic()
        for job in list(running):
            if job.process.poll() is None:
                if job.told is None and (now - job.began > job.part.limit_s or now >= end):
                    job.told = now
                    _signal(job.process, signal.SIGTERM)
                elif job.told is not None and now - job.told > _PATIENCE_S:
                    _signal(job.process, signal.SIGKILL)
                continue
            running.remove(job)
            verdict = "late" if job.told is not None else "failed" if job.process.returncode else "ok"
            found[job.part.name] = _result(job.part, folder, verdict, now - job.began)
            _show(found[job.part.name])
        while waiting and now < end and _fits(waiting[0], running, jobs):
            following = waiting.pop(0)
            if now + following.needs_s <= end:
                running.append(_start(following, folder))
        if now >= end:
            waiting.clear()
        time.sleep(_POLL_S)


def _fits(part: Part, running: Sequence[Running], jobs: int) -> bool:
    return not running or (len(running) < jobs and not part.alone and not any(job.part.alone for job in running))


def _start(part: Part, folder: Path) -> Running:
    argv = [word.replace("{out}", str(folder)) for word in part.argv]
    if argv[0].endswith(".py"):
        argv[0] = str(LAUNCH / argv[0])
    if not part.argv[0].startswith("/"):
        argv = [sys.executable, "-u", *argv]
    with open(folder / f"{part.name}.log", "wb") as log:
        process = subprocess.Popen(argv, cwd=LAUNCH.parent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    return Running(part, process, time.monotonic())


def _signal(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def _result(part: Part, folder: Path, verdict: str, seconds: float) -> dict:
    log = folder / f"{part.name}.log"
    lines = log.read_text(errors="replace").replace("\r", "\n").split("\n") if log.exists() else []
    last = next((line.strip(" =") for line in reversed(lines) if line.strip(" =-")), "")
    return {"name": part.name, "verdict": verdict, "seconds": round(seconds, 1), "last": last, "command": part.command}


def _show(result: dict) -> None:
    print(f"{result['verdict']:<8} {result['name']:<16} {result['seconds']:>7.1f} s  {result['last'][:90]}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0: every part that was asked for ran and succeeded. 1: not so. 2: there is no such part."""
    options = argparse.ArgumentParser("prove.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", help="comma-separated beginnings of names")
    options.add_argument("--limit", type=float, default=float("inf"), help="seconds in all")
    options.add_argument("--jobs", type=int, default=None, help="parts side by side (default: 10 on a GPU, 1 without)")
    options.add_argument("--out", type=Path, default=None, help="a folder; default outputs/prove-<time>")
    options.add_argument("--list", action="store_true")
    options = options.parse_args(argv)
    import torch

    gpus = torch.cuda.device_count()
    parts = cpu_parts()
    if gpus:
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        parts = gpu_parts(gpus, torch.cuda.get_device_capability() == (9, 0), memory)
    try:
        parts = choose(parts, options.parts)
    except ValueError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    if options.list:
        for p in parts:
            print(f"{p.name:<16} {p.command}")
        return 0
    folder = (options.out or Path("outputs") / time.strftime("prove-%Y%m%d-%H%M%S")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = run(parts, folder, options.jobs or (10 if gpus else 1), options.limit)
    for result in results:
        if result["verdict"] == "not run":
            _show(result)
    record = {"torch": torch.__version__, "gpus": gpus, "parts": results}
    (folder / "summary.json").write_text(json.dumps(record, indent=2) + "\n")
    good = sum(result["verdict"] == "ok" for result in results)
    print(f"prove: {good} of {len(results)} parts succeeded; logs and summary.json are in {folder}")
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
