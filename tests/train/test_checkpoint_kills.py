"""Ranks killed at chosen moments, also while they write a checkpoint, and started again: little is lost, the result is the same."""
import itertools
import json

import pytest
from checkpoint_runs import whole

from ringflash.launch import kill_test
from ringflash.launch.kill_test import EVERY, STEPS, Failed, Moment, compare, kills, result, rows

# Whom to kill, after how many new steps at the earliest, how much later, whether inside the writing, and whether a thread writes.
MOMENTS = [Moment((0,), 5, 0.02, True, False), Moment((1,), 4, 0.03, False, True), Moment((0, 1), 2, 0.02, True, True),
           Moment((1,), 5, 0.0, True, False), Moment((0,), 3, 0.05, False, False)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(the folder, what kills() has found): five kills and the start after them, held against a run that nobody touched."""
    base = tmp_path_factory.mktemp("kills")
    return base, kills(base, len(MOMENTS), itertools.cycle(MOMENTS))


def test_five_kills_lose_no_more_than_the_interval_and_the_result_is_that_of_an_uninterrupted_run(killed):
    base, (cut_short, num_runs, most) = killed
    assert cut_short >= 1, "no kill fell into the writing of a checkpoint"
    assert most <= 2 * EVERY
    run = base / f"run{num_runs}" / "run"
    assert [row["step"] for row in rows(run) if row["kind"] == "train"] == list(range(1, STEPS + 1))
    assert whole(run) == [f"step-{STEPS - EVERY:08d}", f"step-{STEPS:08d}"]
    said = "".join(path.read_text() for path in base.glob("run*/log-*-0"))
    assert said.count("goes on after step") >= len(MOMENTS) - num_runs + 1 and "was never finished: removed" in said


def test_a_run_whose_result_is_another_is_told(killed, tmp_path):
    base, (_, num_runs, _) = killed
    run, expected = base / f"run{num_runs}" / "run", result(base / "plain" / "run")
    compare(run, expected)
    with pytest.raises(Failed, match="the final loss is .*, uninterrupted it is"):
        compare(run, (expected[0], expected[1], expected[2] + 1e-12))
    other = json.loads(json.dumps(expected[0]))
    other[3]["loss"] += 1e-12
    with pytest.raises(Failed, match="losses on the way, or weights, are others"):
        compare(run, (other, *expected[1:]))


def test_the_command_says_what_it_found_and_ends_with_1_where_something_is_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kill_test.tempfile, "mkdtemp", lambda prefix: (tmp_path / prefix).mkdir() or str(tmp_path / prefix))
    monkeypatch.setattr(kill_test, "kills", lambda base, count, moments: (len([next(moments) for _ in range(count)]), 1, 3))
    assert kill_test.main(["--moments", "2", "--seed", "3"]) == 0
    assert "2 kills, 2 of them inside the writing of a checkpoint, in 1 runs: at most 3 steps lost" in capsys.readouterr().out

    def fail(*_):
        raise Failed("checkpoint 8 is gone")

    monkeypatch.setattr(kill_test, "kills", fail)
    assert kill_test.main(["--moments", "2"]) == 1
    assert "WRONG: checkpoint 8 is gone" in capsys.readouterr().out
