"""A start that is refused changes nothing in the run folder and ends in one line; a launcher that dies takes its ranks along."""
import dataclasses
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_runs import go, kept, whole
from test_checkpoint_launch import running, steps_of
from test_train_launch import MINI, a_long_run, descendants, launch, own_launcher

from ringflash.launch.train import check_overrides, of_resumed_run
from ringflash.launch.train_agent import Quiet, never_again_after_words, spoken_of
from ringflash.train import checkpoint_files as files
from ringflash.train.checkpoint import ResumeError
from ringflash.train.folder import stop_mark, write_description
from ringflash.train.world import single


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 4 steps with two checkpoints, and with what a kill or a stop may have left."""
    cwd = tmp_path_factory.mktemp("refusals")
    done = launch(cwd, *MINI, "train.steps=4", "checkpoint.every=2", "run.dir=mine")
    assert done.returncode == 0, done.stderr
    folder = cwd / "mine"
    shutil.copytree(folder / "checkpoints" / "step-00000002", folder / "checkpoints" / "step-00000006.part")
    (folder / "stopped.json").write_text('{"step": 2}\n')
    return folder


def contents(folder: Path) -> dict[str, tuple]:
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
            for path in folder.rglob("*")}


@pytest.mark.slow
def test_a_refused_resume_changes_nothing_says_one_line_and_the_next_one_goes_on(finished):
    before = contents(finished)
    # With restarts: a refusal would be the same each time, and is said once.
    done = launch(finished.parent, "--resume", str(finished), "model.dim=48", "checkpoint.restarts=2")
    said = [line for line in done.stderr.splitlines() if "run folder" not in line]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert f"ringflash train: {finished}/checkpoints/step-00000004 is of another model or optimizer" in said[0]
    assert contents(finished) == before
    with open(finished / "checkpoints" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Of a rank that somebody else's launcher has started, which writes what --resume reads itself.
        (rank,) = own_launcher(finished.parent, [["--resume", str(finished), "train.steps=9", "parallel.nproc=null"]])
        assert rank.returncode == 2 and "another process is training in this run folder" in rank.stderr
        assert contents(finished) == before
    done = launch(finished.parent, "--resume", str(finished), "train.steps=5")
    assert done.returncode == 0 and "goes on after step 4," in done.stderr, done.stderr
    assert steps_of(finished) == [1, 2, 3, 4, 5] and not (finished / "stopped.json").exists()
    assert (finished / ".hydra-1").is_dir() and "train.steps=5" in (finished / ".hydra" / "overrides.yaml").read_text()
    assert not list((finished / "checkpoints").glob("*.part"))


def test_nothing_is_told_accepted_or_cleared_before_the_checkpoint_fits(tmp_path):
    go(kept(every=2), single(), tmp_path)
    shutil.copytree(tmp_path / "checkpoints" / "step-00000002", tmp_path / "checkpoints" / "step-00000008.part")
    before = whole(tmp_path)
    with pytest.raises(ResumeError, match="of another model"):
        go(kept(every=2, model={"dim": 32}), single(), tmp_path)
    assert whole(tmp_path) == before
    go(kept(every=2, steps=7), single(), tmp_path)
    assert not any(name.endswith(".part") for name in whole(tmp_path))


@pytest.mark.parametrize("victim", ["launch/train.py", "torchrun"])
def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path, victim):
    process, ranks = a_long_run(tmp_path, "checkpoint.every=1000", steps=3)
    everybody = [process.pid, *descendants(process.pid)]
    (agent,) = set(everybody) - {process.pid, *ranks}
    os.kill(process.pid if victim == "launch/train.py" else agent, signal.SIGKILL)
    _, err = process.communicate(timeout=60.0)
    deadline = time.monotonic() + 20.0
    while running(everybody) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(everybody), err
    (stopped,) = tmp_path.glob("outputs/mini-*/stopped.json")
    step = json.loads(stopped.read_text())["step"]
    assert (stopped.parent / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists(), err


@pytest.mark.parametrize(("codes", "expected"), [
    ([2, 2], 2), ([3], 1), ([2, -15], 2), ([3, 143], 1), ([2, 3], 1), ([1, 2], None), ([-9, 3], None), ([-11], None), ([143, -15], None),
])
def test_only_ranks_that_ended_in_words_spare_the_traceback_of_torchrun(codes, expected):
    assert spoken_of(codes) == expected


@pytest.mark.parametrize(("codes", "left"), [([2, 2], 0), ([3], 0), ([-9], 3), ([1, 2], 3), ([], 3)])
def test_ranks_are_started_again_after_a_crash_and_not_after_words(codes, left):
    class Agent:
        _remaining_restarts = 3

        def _monitor_workers(self, worker_group):
            return SimpleNamespace(failures={rank: SimpleNamespace(exitcode=code) for rank, code in enumerate(codes)})

    never_again_after_words(Agent)
    agent = Agent()
    assert len(agent._monitor_workers(None).failures) == len(codes) and agent._remaining_restarts == left


@pytest.mark.parametrize(("code", "passes"), [(2, False), (3, False), (1, True), (-9, True)])
def test_torchruns_line_about_a_crash_stays(code, passes):
    text = "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s"
    record = logging.LogRecord("torch", logging.ERROR, "api.py", 1, text, (code, 0, 17, "python"), None)
    assert Quiet().filter(record) is passes


@pytest.mark.parametrize("word", ["~model", "~optim=adamw", "model=null", "optim=NULL", "data=[]", "~model@model", "~train.steps"])
def test_a_group_or_key_cannot_be_taken_away(word):
    with pytest.raises(ValueError, match="taken away.*nearest: "):
        check_overrides(["experiment=quickstart", word])


def test_what_may_be_absent_can_be_left_out():
    check_overrides(["~experiment", "~debug", "experiment=null", "run.dir=null", "~hydra/job_logging", "parallel.nproc=null", "-m", "model=tiny"])


def test_a_group_that_is_taken_away_is_refused_with_the_rule_before_anything_starts(tmp_path):
    done = launch(tmp_path, *MINI[2:], "~model")
    assert done.returncode == 2 and done.stderr == ("ringflash train: ~model: model cannot be taken away, a run needs one; nearest: "
                                                    "model=NAME, a file of configs/model/, or leave it out\n")
    assert not list(tmp_path.iterdir())


CONTENT = {"format": files.FORMAT, "step": 4, "sample": 8, "progress": {}, "data": {}, "ranks": {"dp": 1, "cp": 1, "device": "cpu"},
           "config": {}, "files": {"a": {"bytes": 1, "blake2b": "00"}}}


def test_a_manifest_that_is_whole_but_lacks_a_field_is_damaged(tmp_path):
    files.write_manifest(tmp_path, CONTENT)
    assert files.read_manifest(tmp_path) == CONTENT
    for content in (*({k: v for k, v in CONTENT.items() if k != name} for name in CONTENT), CONTENT | {"step": "4"}, [], None, "x",
                    CONTENT | {"files": {"a": 1}}, CONTENT | {"ranks": {"dp": 1}}):
        files.write_manifest(tmp_path, content)
        with pytest.raises(files.DamagedError, match="manifest.json (lacks|has format)"):
            files.read_manifest(tmp_path)


def test_a_checkpoint_whose_manifest_has_no_format_is_passed_over(tmp_path, capsys):
    go(kept(every=2), single(), tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000006"
    content = files.read_manifest(newest)
    del content["format"]
    files.write_manifest(newest, content)
    go(kept(every=2), single(), tmp_path)
    said = capsys.readouterr().err
    assert f"{newest} is passed over: manifest.json has format none" in said and "goes on after step 4," in said


def test_a_description_replaces_the_one_before_which_is_kept_and_the_same_one_changes_nothing(tmp_path):
    first = {"config.yaml": "a: 1\n", "overrides.yaml": "- a=1\n", "hydra.yaml": "h\n"}
    write_description(tmp_path, first)
    write_description(tmp_path, first)
    assert [path.name for path in tmp_path.iterdir()] == [".hydra"]
    for number in (2, 3):
        write_description(tmp_path, {"config.yaml": f"a: {number}\n", "overrides.yaml": f"- a={number}\n"})
    read = {path.name: {p.name: p.read_text() for p in path.iterdir()} for path in tmp_path.iterdir()}
    assert read == {".hydra-1": first, ".hydra-2": {"config.yaml": "a: 2\n", "overrides.yaml": "- a=2\n"},
                    ".hydra": {"config.yaml": "a: 3\n", "overrides.yaml": "- a=3\n"}}


def test_a_run_folder_that_cannot_be_described_is_refused(tmp_path):
    def fail() -> None:
        raise OSError(28, "No space left on device")

    from ringflash.train.loop import train
    from train_ranks import text
    cfg = kept(every=0)
    cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, save_weights=False))
    with pytest.raises(ResumeError, match="the run folder cannot be written: .*No space left"):
        train(cfg, single(), text(cfg), tmp_path, accepted=fail)
    assert not list(tmp_path.iterdir()) and stop_mark(tmp_path) is None


@pytest.mark.parametrize("text", ["not: [a", "a: 1", "\x00"])
def test_overrides_that_are_damaged_are_refused_in_a_line(tmp_path, text):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"overrides.yaml: .*is it damaged\?"):
        of_resumed_run(["--resume", str(tmp_path)])
