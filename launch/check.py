"""Proves on this machine that the ring computes what one device computes: errors against budgets, exit code 0 or 1.

    python launch/check.py                          the matrix on the loopback ring
    python launch/check.py --quick                  the same lines with fewer cells, under a minute
    python launch/check.py --processes 3 --delays   the matrix on a real ring of 3 processes (gloo; with GPUs NCCL)
    python launch/check.py --random 300 --seed 7    problems drawn at random from everything that can be asked for together
    python launch/check.py --interpreter            the Triton kernels without a GPU, on a pairwise-covering subset
    python launch/check.py --train --processes 2    one SGD step of a small model on one rank against a ring
    python launch/check.py --train --run DIR        ... of the model that the run in DIR trained
    python launch/check.py --train --config experiment=one_gpu data.seq_len=16384       ... of what launch/train.py would train
    python launch/check.py --planted all            planted defects must be caught
    python launch/check.py --growth --bitwise 30 --memory       claims about scale; --memory needs a GPU

The matrix: masks x layouts x kernels x query heads per key/value head x ranks x dtypes, for out, lse, dq, dk, dv; beside it
softcap, sinks (with their gradient) and values of another head dim, walked through every line; and "combined", a subset in which
every two values meet of all masks (also prefixes, chunks, first tokens, keys of their own), all layouts, routings, and what
rotates in the backward. Budgets, for the largest and the RMS error against fp64: 2 x that of eager torch in the same dtype + 2
eps max|reference|.
Several sections may be asked for at once; without any the matrix runs. --json keeps every figure.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ in ("__main__", "__mp_main__") and not __package__ and (ROOT / "pyproject.toml").is_file():
    sys.path[0] = str(ROOT)                 # run as a file: the checkout, not launch/, is the import root

import torch

from ringflash.launch import check_cells as cells
from ringflash.launch.check_judge import Judge, judge_loopback, loopback_cell
from ringflash.launch.check_kernels import chosen_kernels, valid_kernels, walked_variants
from ringflash.launch.check_table import CellVerdict, report, write_json
from ringflash.launch.counts import count, counts, duration
from ringflash.ring.exchange import EXCHANGES
from ringflash.ring.rotate import ROTATES

SEQ_LENS = {"cpu": (5, 61), "cuda": (5, 389)}
FULL_SEQ_LENS = {"cpu": (1, 5, 61, 128), "cuda": (1, 5, 128, 389, 1031)}
HEAD_DIMS = {"cpu": (32,), "cuda": (128,)}
FULL_HEAD_DIMS = {"cpu": (32, 80), "cuda": (64, 80, 128, 256)}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = top.add_argument_group("sections")
    what.add_argument("--matrix", action="store_true", help="the matrix, also beside other sections")
    what.add_argument("--processes", type=count(1), default=None, metavar="N", help="on a real ring of N processes (matrix, --train)")
    what.add_argument("--interpreter", action="store_true", help="triton under its interpreter, pairwise subset, on the CPU")
    what.add_argument("--train", action="store_true", help="training equivalence: loss, gradients, grad norm, weights")
    what.add_argument("--random", type=count(1), default=None, metavar="N",
                      help="N problems drawn at random, and what their plans have to be")
    what.add_argument("--planted", default=None, metavar="NAME|all", help="planted defects, comma-separated")
    what.add_argument("--growth", action="store_true", help="RMS error at W=8 against W=1")
    what.add_argument("--bitwise", type=count(2), default=None, metavar="N", help="N >= 2 runs give the same bits")
    what.add_argument("--memory", action="store_true", help="peak memory and seconds at rising lengths")
    how = top.add_argument_group("how")
    size = how.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="walk the axes side by side instead of multiplying them")
    size.add_argument("--full", action="store_true", help="more lengths and dtypes")
    size.add_argument("--pairwise", action="store_true", help="only a subset in which every pair of values occurs")
    how.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    how.add_argument("--kernels", type=words, default=None, help="comma-separated; default: all that run here")
    how.add_argument("--dtypes", type=words, default=None, help="comma-separated: fp32, bf16, fp16 (default: fp32,bf16)")
    how.add_argument("--cp-sizes", type=numbers, default=None, help="ranks of the loopback ring (default: 1,2,3,4,8)")
    how.add_argument("--masks", type=words, default=None, help=f"of {', '.join(cells.ALL_MASKS)}")
    how.add_argument("--layouts", type=words, default=None, help=f"of {', '.join(cells.ALL_LAYOUTS)}")
    how.add_argument("--ratios", type=numbers, default=None, help="query heads per key/value head (default: 1,4,7,8)")
    how.add_argument("--variants", type=words, default=None, metavar="NAMES",
                     help=f"of {', '.join(cells.VARIANTS)}; those named are multiplied (default: plain, the others walked)")
    how.add_argument("--seq-lens", type=numbers, default=None)
    how.add_argument("--head-dims", type=numbers, default=None)
    how.add_argument("--seed", type=int, default=0, help="of --random: case i is that of seed + i")
    how.add_argument("--lengths", type=numbers, default=(262144, 524288, 1048576), help="of --memory; at least two, rising")
    how.add_argument("--rotate", default="kv", choices=ROTATES, help="of --memory: what rotates in the backward (kv)")
    how.add_argument("--delays", type=duration, nargs="?", const=20.0, default=0.0, metavar="MS",
                     help="with --processes: random pauses of every rank before every batch, up to MS (20)")
    how.add_argument("--exchange", default="auto", choices=EXCHANGES, help="with --processes: what carries the messages")
    how.add_argument("--timeout", type=duration, default=900.0, metavar="S", help="of a ring of processes, all its cells together")
    how.add_argument("--run", default=None, metavar="DIR", help="with --train: folder of a finished run")
    how.add_argument("--config", nargs="+", default=(), metavar="OVERRIDE",
                     help="with --train: a model, data and length, as of ringflash train")
    how.add_argument("--json", default=None, metavar="PATH")
    return top


def words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


numbers = functools.partial(counts, 1)


def choose(options: argparse.Namespace, name: str, default: Sequence, valid: Sequence | None = None) -> tuple:
    """An option's values, or the default. Raises ValueError for one that is not valid, or for none at all."""
    given = getattr(options, name)
    if given is None:
        return tuple(default)
    wrong = [value for value in given if valid is not None and value not in valid]
    if wrong or not given:
        raise ValueError(f"--{name.replace('_', '-')}={','.join(map(str, given))}: "
                         + (f"{wrong[0]!r} unknown; valid: {', '.join(map(str, valid or ()))}" if wrong else "empty"))
    return tuple(given)


def named_kernels(options: argparse.Namespace) -> tuple[str, ...] | None:
    """None: the device's own."""
    return None if options.kernels is None else choose(options, "kernels", (), valid_kernels())


def matrix_cells(options: argparse.Namespace) -> list[cells.Cell]:
    dtypes = choose(options, "dtypes", ("fp32", "bf16", "fp16") if options.full else ("fp32", "bf16"), list(cells.DTYPES))
    head_dims = choose(options, "head_dims", (FULL_HEAD_DIMS if options.full else HEAD_DIMS)[options.device])
    seq_lens = choose(options, "seq_lens", (FULL_SEQ_LENS if options.full else SEQ_LENS)[options.device])
    cp_sizes = (options.processes,) if options.processes else choose(options, "cp_sizes", cells.CP_SIZES)
    named = choose(options, "variants", ("plain",), cells.VARIANTS)
    kernels = chosen_kernels(named_kernels(options), options.device, dtypes, head_dims, named)
    walked = {}
    if options.variants is None:
        walked = {kernel: walked_variants(kernel, options.device, *takes) for kernel, takes in kernels.items()}
    masks, layouts = (choose(options, "masks", cells.MASKS, cells.ALL_MASKS),
                      choose(options, "layouts", cells.LAYOUTS, cells.ALL_LAYOUTS))
    axes = dict(seq_lens=seq_lens, cp_sizes=cp_sizes, ratios=choose(options, "ratios", cells.RATIOS))
    everything = axes | dict(masks=choose(options, "masks", cells.ALL_MASKS),
                             layouts=choose(options, "layouts", cells.ALL_LAYOUTS))

    def combined(kernel: str, dtypes: Sequence[str], group: str = "") -> list[cells.Cell]:
        return cells.pairwise_cells(kernel, dtypes=dtypes, head_dims=kernels[kernel][1], group=group,
                                    variants=(*named, *walked.get(kernel, ())), **everything)

    if options.pairwise:
        return [cell for kernel, (some, _) in kernels.items() for cell in combined(kernel, some)]
    found = []
    for kernel, (some, dims) in kernels.items():
        found += cells.matrix((kernel,), some, masks=masks, layouts=layouts, diagonal=options.quick, variants=named, walked=walked,
                              head_dims=dims, **axes)
    for kernel, (some, _) in kernels.items():
        for walk in [some] if options.quick else [(dtype,) for dtype in some]:
            found += combined(kernel, walk, "combined")
    return found


def check_matrix(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[bool, list[CellVerdict]]:
    wanted = matrix_cells(options)
    if options.processes is None:
        verdicts = judge_loopback(wanted, options.device, say=say)
        where = f"loopback ring on {options.device}"
    else:
        from ringflash.launch.check_ring import run_ring

        results = run_ring(wanted, options.processes, device_type=options.device, delay_ms=options.delays,
                           exchange=options.exchange, timeout_s=options.timeout, say=say)
        judge, verdicts = Judge(options.device), []
        for index, (cell, result) in enumerate(zip(wanted, results)):
            verdicts.append(judge.judge(cell, lambda result=result: result,
                                        same_as=lambda cell=cell: loopback_cell(cell, options.device)))
            say(f"judging {index + 1}/{len(wanted)}")
        where = (f"real ring of {options.processes} processes on {options.device}, exchange={options.exchange}"
                 + (", random delays" if options.delays else ""))
    say("")
    return report(f"Equivalence on the {where}", verdicts), verdicts


def check_interpreter(options: argparse.Namespace) -> tuple[bool, dict]:
    """In a process of its own: triton reads TRITON_INTERPRET when it is imported."""
    command = [sys.executable, "-m", "ringflash.launch.check", "--pairwise", "--device", "cpu", "--kernels", "triton",
               "--dtypes", ",".join(options.dtypes or ("fp32", "bf16", "fp16")),
               "--seq-lens", ",".join(map(str, options.seq_lens or (1, 17, 33, 48))),
               "--head-dims", ",".join(map(str, options.head_dims or (16, 40))),
               "--masks", ",".join(options.masks or cells.MASKS), "--layouts", ",".join(options.layouts or cells.LAYOUTS)]
    environment = dict(os.environ, TRITON_INTERPRET="1",
                       PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    print("Triton interpreter, pairwise-covering subset", flush=True)
    done = subprocess.run(command, env=environment)
    return done.returncode == 0, {"command": command[2:], "exit_code": done.returncode}


def run_sections(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, tuple[bool, object]]:
    """Every section that was asked for, by name: (held, what it found)."""
    device = torch.device(options.device)
    found: dict[str, tuple[bool, object]] = {}
    others = (options.interpreter, options.train, options.planted is not None, options.growth, options.bitwise, options.memory,
              options.random)
    if options.matrix or not any(others):
        found["matrix"] = check_matrix(options, say)
    if options.interpreter:
        found["interpreter"] = check_interpreter(options)
    scale_kernels = tuple(chosen_kernels(named_kernels(options), device.type, ("bf16",), (64,))) if any(others[2:6]) else ()
    large = device.type == "cuda"
    if options.planted is not None:
        from ringflash.launch import check_planted

        names = tuple(check_planted.DEFECTS) if options.planted == "all" else words(options.planted)
        if unknown := [name for name in names if name not in check_planted.DEFECTS]:
            raise ValueError(f"--planted={unknown[0]}: unknown; valid: all, {', '.join(check_planted.DEFECTS)}")
        if not names:
            raise ValueError(f"--planted={options.planted}: names none; valid: all, {', '.join(check_planted.DEFECTS)}")
        parts = [check_planted.planted(names, kernel, device, head_dim=64 if large else 32) for kernel in scale_kernels]
        found["planted"] = all(held for held, _ in parts), [record for _, records in parts for record in records]
    if options.growth or options.bitwise or options.memory:
        from ringflash.launch import check_scale
    if options.growth:
        size = dict(seq_len=8192, head_dim=128) if large else dict(seq_len=384, head_dim=64)
        judged = [kernel for kernel in scale_kernels if kernel != "reference" or not large]
        if not judged:
            raise ValueError("--growth: the reference kernel does not judge itself on a GPU; name another in --kernels")
        parts = [check_scale.growth(kernel, device, **size) for kernel in judged]
        found["growth"] = all(held for held, _ in parts), [record for _, records in parts for record in records]
    if options.bitwise:
        size = dict(seq_len=1031, head_dim=128) if large else dict(seq_len=61, head_dim=32)
        found["bitwise"] = check_scale.bitwise(scale_kernels, device, repeats=options.bitwise, **size)
    if options.memory:
        found["memory"] = check_scale.memory(scale_kernels[0], device, seq_lens=options.lengths, rotate=options.rotate)
    if options.random:
        from ringflash.launch import check_random

        found["random"] = check_random.check(options.random, options.seed, device=options.device,
                                             kernels=named_kernels(options), say=say,
                                             dtypes=choose(options, "dtypes", check_random.DTYPES, list(cells.DTYPES)))
    if options.train:
        from ringflash.launch.check_train import check_train

        found["train"] = check_train(num_processes=options.processes or 2, device_type=options.device, run=options.run,
                                     overrides=options.config, timeout_s=options.timeout, say=say)
    return found


@contextlib.contextmanager
def one_thread(device: str) -> Iterator[None]:
    """On the CPU as many threads as a rank of a ring of processes has: a matrix product's bits depend on their number."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(argv: Sequence[str] | None = None) -> int:
    """0: every section that ran held. 1: one did not, or the world failed (one message). 2: the options make no sense."""
    top = parser()
    options = top.parse_args(argv)
    progress = sys.stderr.isatty()

    def say(text: str) -> None:
        if progress:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    if options.run is not None and not options.train:
        top.error(f"--run={options.run}: only --train takes a run")
    if options.config and (not options.train or options.run is not None):
        top.error(f"--config {' '.join(options.config)}: only --train takes it, and instead of --run")
    if options.delays and options.processes is None:
        top.error("--delays: only a ring of --processes can be delayed")
    if options.exchange != "auto" and options.processes is None:
        top.error(f"--exchange={options.exchange}: only a ring of --processes has one")
    if len(options.lengths) < 2 or any(a >= b for a, b in zip(options.lengths, options.lengths[1:])):
        top.error(f"--lengths={','.join(map(str, options.lengths))}: must be at least two, each longer than the one before, to tell "
                  "whether memory is linear")
    if options.rotate != "kv" and not options.memory:
        top.error(f"--rotate={options.rotate}: only --memory takes it")
    try:
        with one_thread(options.device):
            found = run_sections(options, say)
    except ValueError as error:
        top.error(str(error))
    except (RuntimeError, OSError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    ok = all(held for held, _ in found.values())
    if options.json:
        write_json(options.json, {name: what for name, (_, what) in found.items()}, ok)
    print(f"\ncheck: {', '.join(f'{name} ' + ('ok' if held else 'FAILED') for name, (held, _) in found.items())}", flush=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
