"""What is whole, what is passed over and why, what a failing disk does: one rank, and two where ranks must agree."""
import dataclasses
import errno
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_runs import StopAfter, figures, go, kept, rows, same_bits, weights, whole
from torch.distributed.checkpoint.filesystem import FileSystem
from train_ranks import run_ranks, tiny

from ringflash.train import checkpoint_files as files
from ringflash.train.checkpoint import ResumeError, SaveError
from ringflash.train.rng import rng_state, set_rng_state
from ringflash.train.world import connect, single

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one rank with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    go(kept(every=2), single(), folder)
    return folder


@pytest.fixture
def stopped(finished, tmp_path):
    """The same run as a kill after step 6 left it: no results yet."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for name in ("weights.pt", "summary.json"):
        (folder / name).unlink()
    return folder


def of_step(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def tear(folder: Path, name: str, how: str) -> None:
    path = folder / name
    if how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "one bit":
        flip(path, path.stat().st_size // 2)
    else:
        path.unlink()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("how", ["truncated", "one bit", "missing"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_named(finished, stopped, capsys, name, how):
    tear(of_step(stopped, 6), name, how)
    go(kept(every=2), single(), stopped)
    said = capsys.readouterr().err
    assert f"{of_step(stopped, 6)} is passed over: {name} " in said and "goes on after step 4, sample 8, from " in said
    if name != "manifest.json":
        assert {"truncated": " were written\n", "one bit": "holds other bytes than were written", "missing": "cannot be read"}[how] in said
    assert figures(stopped) == figures(finished) and same_bits(weights(stopped), weights(finished))
    assert whole(stopped) == ["step-00000002", "step-00000004", "step-00000006", "step-00000006.bad"]


def test_two_damaged_ones_are_passed_over_and_an_unfinished_one_is_removed_by_name(finished, stopped, capsys):
    tear(of_step(stopped, 6), "__0_0.distcp", "one bit")
    tear(of_step(stopped, 4), ".metadata", "missing")
    shutil.copytree(of_step(stopped, 2), stopped / "checkpoints" / "step-00000008.part")
    go(kept(every=2), single(), stopped)
    said = capsys.readouterr().err
    assert "step-00000008.part was never finished: removed" in said and "goes on after step 2," in said
    assert figures(stopped) == figures(finished) and same_bits(weights(stopped), weights(finished))
    assert not list((stopped / "checkpoints").glob("*.part"))


def test_where_none_is_whole_the_run_stops_and_nothing_is_lost(stopped):
    for step in (2, 4, 6):
        tear(of_step(stopped, step), "__0_0.distcp", "truncated")
    before = (stopped / "metrics.jsonl").read_bytes()
    with pytest.raises(ResumeError, match="holds no whole checkpoint; checkpoint.resume=none and another run.dir"):
        go(kept(every=2), single(), stopped)
    assert (stopped / "metrics.jsonl").read_bytes() == before and len(whole(stopped)) == 3


def test_a_run_killed_before_its_results_were_written_only_writes_them(finished, stopped):
    summary, served = go(kept(every=2), single(), stopped)
    assert served == [] and figures(stopped) == figures(finished) and same_bits(weights(stopped), weights(finished))
    assert json.loads((stopped / "summary.json").read_text()) == summary
    assert summary["heldout_loss"] == json.loads((finished / "summary.json").read_text())["heldout_loss"]


def test_a_finished_run_goes_on_when_it_is_given_more_steps_and_refuses_fewer(stopped):
    with pytest.raises(ResumeError, match="train.steps=5: .*step-00000006 stands at step 6 already; nearest: 6"):
        go(kept(every=2, steps=5), single(), stopped)
    _, served = go(kept(every=2, steps=8), single(), stopped)
    assert [row["step"] for row in rows(stopped)] == list(range(1, 9)) and served[0] == (12,)
    assert [row["step"] for row in rows(stopped, "eval")] == [2, 4, 6, 8]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_are_kept(tmp_path, keep):
    go(kept(every=1, keep=keep), single(), tmp_path)
    assert whole(tmp_path) == [f"step-{step:08d}" for step in range(7 - keep, 7)]


def test_without_checkpoints_there_is_no_folder_and_no_resume(tmp_path):
    go(kept(every=0), single(), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_rows_of_lost_steps_and_torn_ones_are_dropped_from_the_metrics(finished, stopped):
    shutil.rmtree(of_step(stopped, 6))
    with open(stopped / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 7, "loss": 9.0}\n{"kind": "train", "st')
    go(kept(every=2), single(), stopped)
    assert figures(stopped) == figures(finished)


def test_another_folder_can_be_named_and_stays_as_it_is(finished, tmp_path, capsys):
    before = sorted(path.name for path in finished.rglob("*"))
    for resume in (finished, finished / "checkpoints", of_step(finished, 6), of_step(finished, 2)):
        new = tmp_path / f"{resume.name}-new"
        go(kept(every=3, steps=7, resume=str(resume)), single(), new)
        step = 2 if resume == of_step(finished, 2) else 6
        assert f"goes on after step {step}" in (said := capsys.readouterr().err) and "changed: train.steps=7 (6 there)" in said
        assert [row["step"] for row in rows(new)] == list(range(step + 1, 8))
    assert sorted(path.name for path in finished.rglob("*")) == before
    with pytest.raises(ResumeError, match="holds no whole checkpoint"):
        go(kept(resume=str(tmp_path / "nowhere")), single(), tmp_path / "x")


def test_another_model_is_refused_by_the_keys_that_differ(finished, tmp_path):
    cfg = kept(resume=str(finished), model={"dim": 32})
    with pytest.raises(ResumeError, match=r"of another model or optimizer: model\.embedding\.weight \[257, 24\] there, "
                                          r"\[257, 32\] here.*the configuration differs in model\.dim=32 \(24 there\)"):
        go(cfg, single(), tmp_path)
    cfg = kept(resume=str(finished), model={"sinks": True})
    with pytest.raises(ResumeError, match=r"layers\.0\.attention\.sinks None there, \[4\] here.*model\.sinks=True \(False there\)"):
        go(cfg, single(), tmp_path / "sinks")


def test_other_data_is_read_from_its_beginning_and_said(finished, tmp_path, capsys):
    _, served = go(kept(tiny(seq_len=60, accumulation=2), steps=8, resume=str(finished)), single(), tmp_path)
    assert served[0] == (0,) and "the data is another, and is read from its beginning" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    code = ("import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
            "time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run/checkpoints/lock")], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(ResumeError, match="another process is training in this run folder"):
                go(kept(every=2), single(), tmp_path / "run")
        finally:
            other.kill()


# A disk that fails


class FailingDisk:
    """Files of checkpoints cannot be opened for writing from the n-th on."""

    def __init__(self, monkeypatch, after: int, number: int = errno.ENOSPC):
        self.left, self.number, self.create = after, number, FileSystem.create_stream
        monkeypatch.setattr(FileSystem, "create_stream", lambda fs, path, mode: self(fs, path, mode))

    def __call__(self, fs, path, mode):
        if "w" in mode:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.number, os.strerror(self.number))
        return self.create(fs, path, mode)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_leaves_the_old_checkpoint_whole_and_training_goes_on(
        finished, tmp_path, capsys, monkeypatch, asynchronous, number):
    FailingDisk(monkeypatch, 3, number)  # data and metadata of step 2, data of step 4; not its metadata
    go(kept(every=2, asynchronous=asynchronous), single(), tmp_path)
    said = capsys.readouterr().err
    for step in (4, 6):
        assert f"the checkpoint of step {step} could not be saved: {os.strerror(number)}; the newest is still step-00000002" in said
    assert whole(tmp_path) == ["step-00000002"] and figures(tmp_path) == figures(finished)
    monkeypatch.undo()
    (tmp_path / "weights.pt").unlink()
    go(kept(every=2), single(), tmp_path)
    assert same_bits(weights(tmp_path), weights(finished)) and figures(tmp_path) == figures(finished)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_by_policy_a_checkpoint_that_cannot_be_saved_stops_the_run(tmp_path, monkeypatch, asynchronous):
    FailingDisk(monkeypatch, 2)
    with pytest.raises(SaveError, match="the checkpoint of step 4 could not be saved: No space left on device"):
        go(kept(every=2, on_error="stop", asynchronous=asynchronous), single(), tmp_path)
    # Asynchronous: known at the next save.
    assert len(rows(tmp_path)) == (6 if asynchronous else 4) and whole(tmp_path) == ["step-00000002"]


def test_a_run_that_was_told_to_stop_and_cannot_save_says_so_whatever_the_policy(tmp_path, monkeypatch):
    FailingDisk(monkeypatch, 0)
    with pytest.raises(SaveError, match="step 1 could not be saved"):
        go(kept(), single(), tmp_path, stop=StopAfter(1))
    assert not (tmp_path / "stopped.json").exists() and whole(tmp_path) == []


def under_a_limit(folder: Path) -> None:
    """Neither a checkpoint (90 KB and more) nor many more rows of metrics find room."""
    limit = (folder / "metrics.jsonl").stat().st_size + 300
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    cfg = kept(every=2)
    go(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, save_weights=False)), single(), folder)


def test_a_real_limit_on_the_size_of_files_is_survived_by_training_and_by_the_old_checkpoint(tmp_path):
    go(kept(every=2, steps=2), single(), tmp_path)
    # In a process of its own: the limit would hold for pytest's files too.
    code = "import sys; from pathlib import Path; from test_checkpoint_files import under_a_limit; under_a_limit(Path(sys.argv[1]))"
    paths = os.pathsep.join([str(Path(files.__file__).parents[2]), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": paths}, capture_output=True,
                          text=True, timeout=100.0)
    assert done.returncode == 0, done.stderr
    for step in (4, 6):
        assert f"the checkpoint of step {step} could not be saved: File too large; the newest is still step-00000002" in done.stderr
    assert done.stderr.count("metrics.jsonl: ") == 1 and "rows may be missing" in done.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 6 and whole(tmp_path) == ["step-00000002"]
    go(kept(every=2), single(), tmp_path)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 7)) and whole(tmp_path)[-1] == "step-00000006"


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ResumeError, match=r"checkpoint\.every=3: checkpoints cannot be saved in .*checkpoints: File exists; nearest"):
        go(kept(), single(), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def two_ranks(rank: int, folder: Path) -> dict:
    world, found = connect(1, 2, CPU, timeout_s=60.0), {}
    create = FileSystem.create_stream

    def full(fs, path, mode):
        if "w" in mode and rank == 1 and "step-00000004" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(fs, path, mode)

    FileSystem.create_stream = full
    found["summary"] = go(kept(every=2, steps=5), world, folder / "warn")[0]
    try:
        go(kept(every=2, on_error="stop"), world, folder / "stop")
    except SaveError as error:
        found["error"] = str(error)
    FileSystem.create_stream = create
    if rank == 0:
        tear(of_step(folder / "warn", 5), "__1_0.distcp", "one bit")
    _, found["served"] = go(kept(every=2), world, folder / "warn")
    return found


def test_a_disk_that_is_full_on_one_rank_is_told_to_all_and_a_file_of_one_rank_spoils_the_whole(tmp_path):
    ranks = run_ranks(functools.partial(two_ranks, folder=tmp_path), 2, tmp_path)
    for found in ranks:
        assert found["summary"]["steps"] == 5
        assert found["error"] == "the checkpoint of step 4 could not be saved: rank 1: No space left on device"
        assert found["served"][0] == (4,), "step 5 was damaged and step 4 never saved, so both ranks go on after step 2"
    assert whole(tmp_path / "warn") == ["step-00000002", "step-00000004", "step-00000005.bad", "step-00000006"]
    assert whole(tmp_path / "stop") == ["step-00000002"]


def test_generators_come_back_as_they_were():
    import random

    import numpy as np

    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next call
    state = rng_state(CPU)
    draw = lambda: (torch.rand(3).tolist(), random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand())  # noqa: E731
    first = draw()
    assert draw() != first
    set_rng_state(state, CPU)
    assert draw() == first


def test_looking_for_checkpoints_needs_no_torch():
    code = "import sys, ringflash.train.checkpoint_files, ringflash.checkpointing; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(files.__file__).parents[2]).returncode == 0
