"""Checkpoints as users meet them: SIGTERM, a killed rank under torchrun, --resume, and what is refused before a rank starts."""
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from test_train_launch import MINI, a_long_run, launch, rows, run_folders

from ringflash.launch.train import of_resumed_run
from ringflash.train.stopping import StopRequest


def steps_of(folder) -> list[int]:
    return [row["step"] for row in rows(folder, "train")]


def test_a_run_that_is_told_to_stop_saves_ends_with_0_and_goes_on_when_resumed(tmp_path):
    process, ranks = a_long_run(tmp_path, "checkpoint.every=1000", steps=3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60.0)
    assert process.returncode == 0, err
    (folder,) = run_folders(tmp_path)
    step = json.loads((folder / "stopped.json").read_text())["step"]
    assert f"stopped by SIGTERM, and saved; to go on: --resume {folder}" in err and err.count("stopped by") == 1
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.name != "lock"] == [f"step-{step:08d}"]
    assert steps_of(folder) == list(range(1, step + 1)) and not (folder / "summary.json").exists()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks)
    done = launch(tmp_path, "--resume", str(folder), f"train.steps={step + 2}", "optim.lr=0.002")
    assert done.returncode == 0, done.stderr
    assert f"goes on after step {step}, sample {2 * step}, from {folder}" in done.stderr
    assert re.search(r"changed: optim\.lr=0\.002 \(0\.006 there\); train\.steps=\d+ \(100000 there\)", done.stderr), done.stderr
    assert steps_of(folder) == list(range(1, step + 3)) and not (folder / "stopped.json").exists()
    assert run_folders(tmp_path) == [folder] and (folder / ".hydra-1" / "config.yaml").exists()


def test_a_rank_that_does_not_come_to_the_end_of_its_step_makes_the_others_leave_in_words(tmp_path):
    process, ranks = a_long_run(tmp_path, "checkpoint.grace_s=2", "checkpoint.every=1000")
    os.kill(ranks[1], signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(ranks[0], signal.SIGTERM)
    deadline = time.monotonic() + 30.0
    while ranks[0] in running(ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60.0)
    assert process.returncode not in (0, None)
    assert re.search(r"rank 0: stopped by SIGTERM; not every rank came to the end of a step within checkpoint\.grace_s=2; waiting for "
                     r"\d.*cp rank 0 \(global rank 0\), (forward|backward|agreement) call \d+", err), err
    assert not list(tmp_path.glob("outputs/mini-*/stopped.json"))


def running(pids: list[int]) -> list[int]:
    found = [(pid, Path(f"/proc/{pid}/stat")) for pid in pids]
    return [pid for pid, stat in found if stat.exists() and stat.read_text().split(")")[-1].split()[0] != "Z"]


def test_torchrun_starts_the_ranks_again_after_one_was_killed_and_they_go_on(tmp_path):
    process, ranks = a_long_run(tmp_path, "train.steps=60", "checkpoint.every=4", "checkpoint.restarts=1", steps=6)
    os.kill(ranks[1], signal.SIGKILL)
    out, err = process.communicate(timeout=90.0)
    assert process.returncode == 0, err
    (folder,) = run_folders(tmp_path)
    assert steps_of(folder) == list(range(1, 61)) and (folder / "summary.json").exists()
    assert int(re.search(r"goes on after step (\d+), sample", err)[1]) >= 4


def test_a_checkpoint_or_a_run_that_is_not_there_is_refused_before_a_rank_starts(tmp_path):
    done = launch(tmp_path, *MINI, "checkpoint.resume=atuo")
    assert done.returncode == 2
    assert "checkpoint.resume=atuo: no checkpoint there; valid: auto, none, a run folder, or one checkpoint's folder" in done.stderr
    assert not [p for p in tmp_path.glob("outputs/*") if p.name != "cache"]
    done = launch(tmp_path, "--resume", "nowhere")
    assert done.returncode == 2 and "--resume nowhere: no run with checkpoints; it has no .hydra" in done.stderr
    (tmp_path / "old" / ".hydra").mkdir(parents=True)
    done = launch(tmp_path, *MINI, "run.dir=old")
    assert done.returncode == 2 and "run.dir=old: holds a run already (.hydra)" in done.stderr


def test_resume_stands_for_the_overrides_of_that_run_but_for_those_given_anew(tmp_path):
    folder = tmp_path / "it's a run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- experiment=quickstart\n- optim=sgd\n- +train.steps=5\n- run.dir=elsewhere\n")
    got = of_resumed_run(["optim=adamw", "--resume", str(folder), "train.steps=9"])
    quoted = str(folder.resolve()).replace("'", "\\'")
    assert got == ["experiment=quickstart", "optim=adamw", "train.steps=9", f"run.dir='{quoted}'"]
    assert of_resumed_run(["a=1"]) == ["a=1"]
    with pytest.raises(ValueError, match="--resume: names the run folder"):
        of_resumed_run(["--resume"])


def test_time_spent_saving_does_not_count_against_the_grace(monkeypatch):
    left = []
    monkeypatch.setattr("ringflash.train.stopping.leave", lambda number, why: left.append(why))
    request = StopRequest()
    request.take(signal.SIGTERM)
    assert left == [""], "nothing to save yet: at once"
    request.arm(0.05)
    request.take(signal.SIGTERM)
    assert request.asked() and len(left) == 1
    with request.saving():
        time.sleep(0.1)
        request.check()
        assert len(left) == 1
    request.check()
    assert len(left) == 1, "the deadline starts anew"
    time.sleep(0.1)
    request.check()
    assert len(left) == 2 and "checkpoint.grace_s=0.05" in left[1]
    request.take(signal.SIGINT)
    assert len(left) == 3
