"""A tiny run whose ranks are killed at random moments and started again: how much is lost, and is the result the same?

    python launch/kill_test.py --moments 50 --seed 0

Two CPU ranks (gloo), 40 steps, a checkpoint every 4. A moment is: whom SIGKILL hits (either rank or both), after which step, how
long after it, and whether it waits until a checkpoint is being written; checkpoints are written by the ranks or by a thread of
theirs. After each kill: at most the steps since the last whole checkpoint are lost, which are at most one interval (with a thread
two: it may still write when the next is due). A run that reaches its end must have the losses, evaluations and weights of a run
that nobody touched, bit for bit; then the next run begins. The moments are drawn from the seed, when they come is up to the clock.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, "") and (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file():
    # As in train.py: a script's own folder comes first on the path.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
import torch.distributed as dist

from ringflash.config import AttentionConfig, CheckpointConfig, Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from ringflash.config import TrainConfig
from ringflash.data import PackedDataset
from ringflash.train import checkpoint_files as files
from ringflash.train.loop import train
from ringflash.train.text import Data
from ringflash.train.world import connect

RANKS, STEPS, EVERY = 2, 40, 4
_DEADLINE_S = 60.0
_POLL_S = 0.001
_COMPARED = ("kind", "step", "loss", "lr", "grad_norm", "tokens", "valid_tokens", "heldout_loss")


@dataclass(frozen=True)
class Moment:
    victims: tuple[int, ...]
    after: int  # new steps since the start
    wait_s: float
    writing: bool
    asynchronous: bool

    @staticmethod
    def draw(rng: random.Random) -> Moment:
        return Moment(rng.choice([(0,), (1,), (0, 1)]), rng.randrange(0, 2 * EVERY), rng.uniform(0.0, 0.05), rng.random() < 0.5,
                      rng.random() < 0.5)


def drawn(rng: random.Random) -> Iterator[Moment]:
    while True:
        yield Moment.draw(rng)


class Failed(Exception):
    """What the kills have broken."""


def configuration(asynchronous: bool) -> Config:
    return Config(
        model=ModelConfig(vocab_size=257, dim=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=40, head_dim=8),
        data=DataConfig(seq_len=45), attention=AttentionConfig(layout="zigzag", kernel="reference"),
        parallel=ParallelConfig(dp=1, cp=-1, timeout_s=60.0), optim=OptimConfig(name="adamw", lr=0.01, warmup_steps=2),
        train=TrainConfig(steps=STEPS, accumulation=2, dtype="fp32", eval_every=10, eval_sequences=2),
        checkpoint=CheckpointConfig(every=EVERY, keep=2, asynchronous=asynchronous), run=RunConfig(progress=False, plot=False))


def text(seq_len: int) -> Data:
    rng = np.random.default_rng(7)
    tokens, starts = rng.integers(0, 40, 4000).astype(np.uint16), np.append(np.arange(0, 4000, 37), 4000).astype(np.int64)
    return Data(*(PackedDataset(tokens, starts, seq_len, seed=seed, content="synthetic") for seed in (1, 2)), 3.0)


def one_rank(rank: int, folder: Path, attempt: int, asynchronous: bool) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    log = os.open(folder / f"log-{attempt}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store-{attempt}"), RANKS), rank=rank, world_size=RANKS)
    cfg = configuration(asynchronous)
    train(cfg, connect(1, RANKS, torch.device("cpu"), timeout_s=60.0), text(cfg.data.seq_len), folder / "run")
    dist.barrier()
    dist.destroy_process_group()


class Attempt:
    """The ranks of one start."""

    def __init__(self, folder: Path, number: int, asynchronous: bool):
        self.folder, self.run, self.log = folder, folder / "run", folder / f"log-{number}-0"
        self.run.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        self.newest = newest(self.run)
        # A fork of a server that has imported torch already.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "ringflash.train.loop"])
        self.ranks = [context.Process(target=one_rank, args=(rank, folder, number, asynchronous), daemon=True) for rank in range(RANKS)]
        for rank in self.ranks:
            rank.start()

    def is_running(self) -> bool:
        return all(rank.is_alive() for rank in self.ranks)

    def await_moment(self, moment: Moment) -> bool:
        """Returns when it has come; False when the ranks ended before."""
        deadline = time.monotonic() + _DEADLINE_S
        # What the attempt before has left, rows and an unfinished checkpoint, is no moment of this one.
        while not self._is_past(self.newest + moment.after):
            if not self.is_running():
                return False
            if time.monotonic() > deadline:
                raise Failed(f"no step within {_DEADLINE_S:g} s: {self.log.read_text()[-2000:]}")
            time.sleep(_POLL_S)
        while moment.writing and not any((self.run / files.FOLDER).glob("step-*.part")):
            if not self.is_running():
                return False
        time.sleep(moment.wait_s / (20 if moment.writing else 1))
        return self.is_running()

    def _is_past(self, step: int) -> bool:
        return ("goes on after step" in self.log.read_text() or not self.newest) and last_row(self.run) >= step

    def kill(self, victims: tuple[int, ...]) -> None:
        for victim in victims:
            os.kill(self.ranks[victim].pid, signal.SIGKILL)
        for rank in self.ranks:
            rank.join(20.0)
            if rank.is_alive():
                rank.kill()
                rank.join()
        if any(rank.exitcode == 0 for rank in self.ranks) and not (self.run / "summary.json").exists():
            raise Failed(f"{self.run}: a rank without its peer ended as if all were well")

    def finish(self) -> None:
        for rank in self.ranks:
            rank.join(_DEADLINE_S)
        if [rank.exitcode for rank in self.ranks] != [0] * RANKS:
            for rank in self.ranks:
                rank.kill()
            raise Failed(f"a start that nobody touched ended with {[rank.exitcode for rank in self.ranks]}: {self.log.read_text()[-2000:]}")


def rows(run: Path) -> list[dict]:
    """What is in metrics.jsonl; a torn last line does not count."""
    path, found = run / "metrics.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def last_row(run: Path) -> int:
    return max((row["step"] for row in rows(run)), default=0)


def newest(run: Path) -> int:
    return max((step for step, _ in files.whole(run / files.FOLDER)), default=0)


def result(run: Path) -> tuple[list, dict, float]:
    """(rows without what a clock has measured, weights, last training loss)"""
    found = [{key: row[key] for key in _COMPARED if key in row} for row in rows(run)]
    return found, torch.load(run / "weights.pt"), [row["loss"] for row in found if row["kind"] == "train"][-1]


def compare(run: Path, expected: tuple[list, dict, float]) -> None:
    found = result(run)
    if found[2] != expected[2]:
        raise Failed(f"{run}: the final loss is {found[2]!r}, uninterrupted it is {expected[2]!r}")
    if found[0] != expected[0] or any(not torch.equal(found[1][name], tensor) for name, tensor in expected[1].items()):
        raise Failed(f"{run}: losses on the way, or weights, are others than without the kills")


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each moment and a verdict. Returns 0, or 1 at the first thing that is wrong (its folder stays)."""
    parser = argparse.ArgumentParser("kill_test.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.moments < 1:
        parser.error(f"--moments {options.moments}: must be at least 1")
    # Killed ranks leave semaphores behind, which is what Python's tracker would warn of.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    base, began = Path(tempfile.mkdtemp(prefix="ringflash-kills-")), time.monotonic()
    try:
        cut_short, num_runs, most = kills(base, options.moments, drawn(random.Random(options.seed)))
    except Failed as error:
        print(f"WRONG: {error}\nwhat the runs left is in {base}", flush=True)
        return 1
    shutil.rmtree(base)
    print(f"{options.moments} kills, {cut_short} of them inside the writing of a checkpoint, in {num_runs} runs: at most {most} steps lost "
          f"(a checkpoint every {EVERY}), and every run ended with the losses and weights of an uninterrupted one; "
          f"{time.monotonic() - began:.0f} s", flush=True)
    return 0


def kills(base: Path, num_moments: int, moments: Iterator[Moment]) -> tuple[int, int, int]:
    """(kills inside the writing of a checkpoint, runs, most steps lost by one kill). Failed for anything wrong. moments: without
    end, since a run may be over before one comes."""
    Attempt(base / "plain", 0, False).finish()
    expected = result(base / "plain" / "run")
    num_runs, number, done, cut_short, most = 1, 0, 0, 0, 0
    while done < num_moments:
        moment, folder = next(moments), base / f"run{num_runs}"
        attempt = Attempt(folder, number, moment.asynchronous)
        number += 1
        if not attempt.await_moment(moment):
            attempt.finish()
            compare(attempt.run, expected)
            num_runs, number = num_runs + 1, 0
            continue
        attempt.kill(moment.victims)
        if (attempt.run / "summary.json").exists():
            # The run was over before the kill.
            compare(attempt.run, expected)
            num_runs, number = num_runs + 1, 0
            continue
        done += 1
        is_cut = any((attempt.run / files.FOLDER).glob("step-*.part"))
        last, kept, bound = last_row(attempt.run), newest(attempt.run), EVERY * (2 if moment.asynchronous else 1)
        cut_short, most = cut_short + is_cut, max(most, last - kept)
        print(f"{done:>4}  run {num_runs}  rank {' and '.join(map(str, moment.victims)):<7}  in step {last + 1:>2}, newest checkpoint {kept:>2}"
              f"{', written by a thread' if moment.asynchronous else ''}{', one cut short' if is_cut else ''}", flush=True)
        if kept < attempt.newest:
            raise Failed(f"{attempt.run}: checkpoint {attempt.newest} is gone")
        if last - kept > bound:
            raise Failed(f"{attempt.run}: {last - kept} steps lost, at most {bound} may be")
    last_start = Attempt(base / f"run{num_runs}", number, False)
    last_start.finish()
    compare(last_start.run, expected)
    return cut_short, num_runs, most


if __name__ == "__main__":
    sys.exit(main())
