"""Ranks killed at random moments, also while they write a checkpoint, and started again: little is lost, and the result is the same."""
import functools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import figures, go, kept, rows, same_bits, weights, whole

from ringflash.train import checkpoint_files as files
from ringflash.train.world import connect

CPU = torch.device("cpu")
EVERY, STEPS, RANKS = 4, 40, 2
SEED = 20261129
# (whom to kill, after which step at the earliest, whether while a checkpoint is being written, whether a thread writes it)
MOMENTS = [((0,), 5, True, False), ((1,), 10, False, True), ((0, 1), 14, True, True), ((1,), 21, True, False), ((0,), 27, False, False)]


def configuration(asynchronous: bool):
    return kept(steps=STEPS, every=EVERY, keep=2, asynchronous=asynchronous)


def one_rank(rank: int, folder: Path, attempt: int, asynchronous: bool) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    log = os.open(folder / f"log-{attempt}-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1), os.dup2(log, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store-{attempt}"), RANKS), rank=rank, world_size=RANKS)
    go(configuration(asynchronous), connect(1, RANKS, CPU, timeout_s=60.0), folder / "run")
    dist.barrier()
    dist.destroy_process_group()


def start(folder: Path, attempt: int, asynchronous: bool) -> list:
    # A fork of a server that has imported torch already.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ringflash.train.loop"])
    processes = [context.Process(target=functools.partial(one_rank, rank, folder, attempt, asynchronous), daemon=True)
                 for rank in range(RANKS)]
    for process in processes:
        process.start()
    return processes


def last_step(folder: Path) -> int:
    """The newest step that the run has told of; a torn last line does not count."""
    path = folder / "run" / "metrics.jsonl"
    return (path.read_bytes() if path.exists() else b"").count(b'"lr"')


def await_moment(folder: Path, processes: list, attempt: int, after: int, writing: bool, wait_s: float) -> bool:
    """Returns at the chosen moment; False when the ranks were too fast for it."""
    deadline, log = time.monotonic() + 40.0, folder / f"log-{attempt}-0"
    log.touch()
    # What the attempt before has left, rows and an unfinished checkpoint, is no moment of this one.
    while last_step(folder) < after or (attempt and "goes on after step" not in log.read_text()):
        assert time.monotonic() < deadline and all(p.is_alive() for p in processes), logs(folder)
        time.sleep(0.001)
    if not writing:
        time.sleep(wait_s)
        return True
    root = folder / "run" / files.FOLDER
    while all(p.is_alive() for p in processes):
        if any(root.glob("step-*.part")):
            time.sleep(wait_s / 20)
            return True
    return False


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("log-*")))


def finish(processes: list, folder: Path) -> None:
    for process in processes:
        process.join(40.0)
    assert [p.exitcode for p in processes] == [0] * RANKS, logs(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    finish(start(folder, 0, False), folder)
    return folder / "run"


def test_five_kills_lose_no_more_than_the_interval_and_the_result_is_that_of_an_uninterrupted_run(tmp_path, plain):
    rng, cut_short = random.Random(SEED), 0
    for attempt, (victims, after, writing, asynchronous) in enumerate(MOMENTS):
        processes = start(tmp_path, attempt, asynchronous)
        assert await_moment(tmp_path, processes, attempt, after, writing, rng.uniform(0.0, 0.1))
        for victim in victims:
            os.kill(processes[victim].pid, signal.SIGKILL)
        for process in processes:
            process.join(20.0)
            if process.is_alive():
                process.kill()
                process.join()
        assert all(p.exitcode != 0 for p in processes), "a rank without its peer does not end well"
        cut_short += any((tmp_path / "run" / files.FOLDER).glob("step-*.part"))
        newest = max((step for step, _ in files.whole(tmp_path / "run" / files.FOLDER)), default=0)
        # A thread may still be writing the checkpoint of one interval when the next is due.
        assert last_step(tmp_path) - newest <= EVERY * (2 if asynchronous else 1)
    finish(start(tmp_path, len(MOMENTS), False), tmp_path)
    assert cut_short >= 1, "no kill fell into the writing of a checkpoint"
    run = tmp_path / "run"
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert figures(run) == figures(plain) and same_bits(weights(run), weights(plain))
    assert whole(run) == [f"step-{STEPS - EVERY:08d}", f"step-{STEPS:08d}"]
    said = "".join(path.read_text() for path in tmp_path.glob("log-*-0"))
    assert said.count("goes on after step") == len(MOMENTS) and "was never finished: removed" in said
