"""Claims about the proof in one command: verdicts are those of the parts, limits hold, and what did not run is no success."""
import json
import time
from pathlib import Path

import pytest
import torch

from ringflash.launch import prove
from ringflash.launch.prove import Part, cpu_parts, gpu_parts, run

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, code: str, limit_s: float = 30.0, alone: bool = False) -> Part:
    return Part(name, limit_s, ("-c", code), alone)


def test_a_part_that_fails_or_is_late_is_told_and_the_others_go_on(tmp_path):
    parts = [script("good", "print('all is well')"), script("bad", "raise SystemExit(3)"),
             script("slow", "import time; print('begun', flush=True); time.sleep(60)", limit_s=2.0),
             script("last", "pass", alone=True)]
    began = time.monotonic()
    results = run(parts, tmp_path, 3, 60.0)
    assert [result["verdict"] for result in results] == ["ok", "failed", "late", "ok"]
    assert [result["last"] for result in results] == ["all is well", "", "begun", ""]
    assert time.monotonic() - began < 30.0


def test_parts_that_run_alone_meet_no_other(tmp_path):
    clock = "import time; t = time.time(); time.sleep(0.5); open(r'{0}', 'w').write(f'{{t}} {{time.time()}}')"
    names = ("a", "b", "alone1", "alone2")
    parts = [script(name, clock.format(tmp_path / name), alone=name.startswith("alone")) for name in names]
    assert all(result["verdict"] == "ok" for result in run(parts, tmp_path, 2, 60.0))
    spans = {part.name: tuple(map(float, (tmp_path / part.name).read_text().split())) for part in parts}
    for name in ("alone1", "alone2"):
        for other, (start, stop) in spans.items():
            assert other == name or stop <= spans[name][0] or start >= spans[name][1]


def test_what_there_was_no_time_for_is_no_success(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prove, "cpu_parts", lambda: [script("long", "import time; time.sleep(60)"), script("never", "pass")])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert prove.main(["--out", str(tmp_path), "--limit", "2"]) == 1
    said = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert [part["verdict"] for part in said] == ["late", "not run"]
    assert "0 of 2 parts succeeded" in capsys.readouterr().out


def test_an_unknown_part_is_refused_by_name(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert prove.main(["--parts", "matrix,mtarix"]) == 2
    assert "mtarix" in capsys.readouterr().err
    for nothing in (",", "", " , "):
        assert prove.main(["--parts", nothing]) == 2
        assert f"prove: --parts {nothing}: no such part; there are planted, " in capsys.readouterr().err


def test_a_million_tokens_are_asked_of_a_card_that_can_hold_them_last_and_alone():
    assert not any(part.name == "million" for parts in (gpu_parts(1, True), gpu_parts(8, False, 140.0)) for part in parts)
    last = gpu_parts(1, True, 139.8)[-1]
    assert last.name == "million" and last.alone and float(last.argv[last.argv.index("--limit") + 1]) < last.limit_s


@pytest.mark.parametrize("parts", [cpu_parts(), gpu_parts(1, False), gpu_parts(1, True), gpu_parts(8, True, 140.0)])
def test_every_part_has_a_name_of_its_own_and_files_that_exist(parts):
    assert len({part.name for part in parts}) == len(parts)
    for part in parts:
        for word in part.argv:
            if word.endswith(".py"):
                assert (ROOT / word if "/" in word else ROOT / "launch" / word).is_file(), part.command


def test_options_of_the_parts_are_those_of_check_and_bench():
    from ringflash.launch import bench, check

    for part in gpu_parts(2, True) + cpu_parts():
        program = {"check.py": check, "bench.py": bench}.get(part.argv[0])
        if program is not None:
            program.parser().parse_args([word.replace("{out}", "out") for word in part.argv[1:]])


def test_what_a_sanitizer_watches_is_right_in_every_step(capsys):
    from ringflash.launch import sanitize

    assert sanitize.main(["--device", "cpu", "--kernel", "cpu", "--head-dims", "64"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(sanitize.PROBLEMS) + 1
    assert sanitize.relative(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == float("inf")


def test_a_kernel_that_cannot_run_here_is_refused_in_a_line(capsys):
    from ringflash.launch import sanitize

    assert sanitize.main(["--device", "cpu", "--kernel", "hopper"]) == 2
    assert "hopper" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, word", [
    (["--device", "cpu", "--probe", "ordered"], "hopper"),
    (["--device", "cpu", "--kernel", "cpu", "--for-racecheck"], "--device cuda"),
    pytest.param(["--kernel", "reference"], "no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")),
    (["--device", "cpu", "--kernel", "cpu", "--head-dims", "64,"], "--head-dims 64,"), (["--head-dims", "0"], "--head-dims 0"),
    (["--device", "cpu", "--probe", "late"], "late"),
])
def test_what_cannot_be_watched_is_refused_in_a_line(arguments, word, capsys):
    from ringflash.launch import sanitize

    try:
        assert sanitize.main(arguments) == 2
    except SystemExit as end:
        assert end.code == 2
    assert word in capsys.readouterr().err.strip().split("\n")[-1]
