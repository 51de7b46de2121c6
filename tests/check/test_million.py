"""The command of one million tokens: its parts are commands that exist, its report says what holds, fails and did not run."""
import argparse
import json
import signal
from pathlib import Path

import pytest
import torch

from ringflash.launch import check, million, million_report, plan_calibrate, plan_measure
from ringflash.launch.check_train import overridden_config
from ringflash.launch.million_report import Evidence, claims, report
from ringflash.launch.plan import read_config

ROOT = Path(__file__).resolve().parents[2]


def test_every_part_is_a_command_of_this_repository_that_measures_the_runs_that_are_listed_for_it():
    listed = million.runs(million.MILLION)
    parts = million.parts(million.MILLION, "/scratch")
    assert [part.name for part in parts] == list(listed)
    for part in parts:
        program, *words = part.argv
        assert (ROOT / "launch" / program).is_file()
        overrides = [word for word in words if "=" in word]
        if program == "check.py":
            options = check.parser().parse_args(words)
            assert overridden_config(options.config).data.seq_len == 131072 and options.processes == 4
            continue
        cfg = read_config(overrides, 1)
        assert cfg.model.dim == 2048 and not cfg.data.document_mask
        assert cfg.model.num_layers == (2 if part.name.startswith("two-layers") else 4 if part.name.startswith("ranks") else 8)
        if program == "train.py":
            assert [million.Run(cfg.data.seq_len)] == listed[part.name]
        else:
            command = {"calibrate": plan_calibrate, "measure": plan_measure}[words[0]]
            parser = argparse.ArgumentParser()
            parser.add_argument("overrides", nargs="*")
            command.add_options(parser)
            options = parser.parse_intermixed_args(words[1:])
        if words[0] == "measure":
            found = [(tokens, policy if options.runs else None, ranks) for ranks in options.processes or (1,)
                     for tokens, policy in plan_measure.runs_of(options, cfg, ranks)]
            assert found == [(run.tokens, run.policy, run.ranks) for run in listed[part.name]], part.name


def test_parts_that_are_timed_run_alone_and_groups_can_be_chosen_exactly(capsys):
    assert all(part.alone != part.name.startswith("ranks") for part in million.parts(4096, "/scratch"))
    for words, chosen in (("ranks-equal,ranks-memory-4,two-layers-save", ["two-layers-save", "ranks-equal", "ranks-memory-4"]),
                          ("offload", ["offload"]), ("two-layers-quarter", ["two-layers-quarter"])):
        assert million.main(["--list", "--parts", words]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == chosen


@pytest.mark.parametrize("words, named", [
    (["--parts", "stepp"], "--parts stepp: no such part; there are step, calibration"),
    (["--parts", ","], "--parts ,: no such part; there are step, calibration"),
    (["--list", "modl.dim=3"], "modl.dim: no such key; nearest: model.dim"),
    (["--list", "train.tile_rows=-1"], "train.tile_rows=-1: must be at least 0"),
    (["data.seq_len=4096"], "data.seq_len=4096: each part has a length of its own; nearest: --tokens 4096"),
])
def test_what_cannot_be_run_is_refused_in_a_line_before_anything_runs(words, named, capsys, monkeypatch):
    monkeypatch.setattr(million, "measure", lambda *given: pytest.fail("it ran"))
    assert million.main(words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"million: {named}") and said.err.count("\n") == 1 and not said.out


def test_a_folder_that_cannot_take_the_results_is_refused_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(million, "run", lambda *given: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    (tmp_path / "parts.json").write_text('{"a": 1}')
    for out, named in (("file", "file: must be a folder that can be written (File exists)"), ("file/below", "(Not a directory)"),
                       (".", "parts.json: must be the list of parts that million.py writes")):
        assert million.main(["--out", str(tmp_path / out), "run.device=cpu"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"million: --out {tmp_path}") and named in said and said.count("\n") == 1


def test_without_a_gpu_nothing_runs_but_what_is_asked_of_the_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(million, "measure", lambda *given: pytest.fail("it ran"))
    assert million.main(["--out", str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
    said = capsys.readouterr().err
    assert said.startswith("million: run.device=cuda: what is measured is a GPU, this machine has 0; nearest: run.device=cpu")
    assert said.count("\n") == 1 and million.main(["--list"]) == 0


def test_a_calibration_of_a_cpu_predicts_nothing(tmp_path, capsys):
    write_run(tmp_path / "step", "block_save_attention", 1, 5.5)
    written = {"rates": {"matmul_tflops": 1e-3}, "environment": {"device": "cpu"}}
    (tmp_path / "calibration.json").write_text(json.dumps(written))
    assert report([tmp_path], tmp_path) == 1
    assert "NOT calibrated" in capsys.readouterr().out


def test_a_folder_without_figures_is_refused_and_a_list_names_its_scratch_folder(capsys, tmp_path):
    assert million.main(["--report", str(tmp_path)]) == 2 and "nothing that million.py measured" in capsys.readouterr().err
    assert million.main(["--list", "--parts", "resume"]) == 0
    assert "checkpoint.resume=SCRATCH/step" in capsys.readouterr().out


T = 4096  # tokens of the long steps


def record(part, tokens, activations, seconds, gib, *, gpus=1, loss=5.0, layers=8, **more):
    return {"part": part, "tokens": tokens, "activations": activations, "seconds": seconds, "peak_gib": gib, "gpus": gpus,
            "loss": loss, "layers": layers, "predicted_seconds": 100.0 if tokens == T else seconds,
            "predicted_peak_gib": 50.0 if tokens == T else gib,
            "predicted_host_gib": 8.0 if activations == "offload" else 0.0, "host_gib": 8.0 if activations == "offload" else 0.0,
            "tflops_per_gpu": 500.0, "allowed_pairs": 7, "parameters_of_layers": 4e8, "document_mask": False, **more}


def out_of_memory(of):
    kept = {key: value for key, value in of.items() if key not in ("seconds", "peak_gib", "host_gib")}
    return kept | {"out_of_memory": "tried 9 GiB"}


STEPS = [record("step", T, "block_save_attention", 101.0, 50.5), record("resume", T, "block", 99.0, 49.0, loss=4.0)]


def everything():
    """A record of every run, all of them as predicted."""
    found = list(STEPS)
    for part, listed in million.runs(T).items():
        if part not in ("step", "resume"):
            found += [record(part, run.tokens, run.policy or "block", 100.0, 50.0 if run.ranks == 1 and run.policy else
                             10 + run.tokens / run.ranks / 100 + run.ranks / 100, gpus=run.ranks) for run in listed]
    for each in found:
        if each["part"] == "offload":
            each["peak_gib"] = each["predicted_peak_gib"] = 20.0 if each["activations"] == "offload" else 50.0
    return found


def judged(records, verdicts=()):
    told = {name: {"name": name, "verdict": verdict, "last": "its last line"} for name, verdict in dict(verdicts).items()}
    return claims(Evidence(records, told, T), is_calibrated=True)


def held(records, start, verdicts=()):
    return [claim.holds for claim in judged(records, verdicts) if claim.text.startswith(start)]


def test_all_claims_hold_where_every_run_was_measured_and_is_as_predicted():
    assert [claim.holds for claim in judged(everything())] == [True] * len(judged([]))
    assert [claim.holds for claim in judged([])] == [None] * len(judged([]))


def test_claims_fail_where_figures_are_not_as_claimed():
    good = everything()
    assert held(good, "4,096 tokens, 8 layers of 400 M parameters, 7 allowed pairs (no document mask)") == [True]
    worse = [good[0], record("resume", T, "block", 80.0, 60.0, loss=6.0), *good[2:]]
    for text in ("the loss", "time within", "memory within", "block over block_save_attention, all layers"):
        assert held(worse, text) == [False], text
    slow = [{**each, "tflops_per_gpu": 300.0} for each in good]
    assert held(slow, "4,096 tokens, 8 layers") == [False]
    other = [{**each, "host_gib": 4.0} if each["activations"] == "offload" else each for each in good]
    assert held(other, "host memory") == [False]
    no_saving = [{**each, "peak_gib": 50.0} if each["part"] == "offload" else each for each in good]
    assert held(no_saving, "offload saves memory") == [False]


def test_without_a_calibration_nothing_is_said_of_what_one_predicts():
    worse = [{**each, "predicted_seconds": 9e9} for each in everything()]
    found = [claim for claim in claims(Evidence(worse, {}, T), is_calibrated=False) if "a calibration of at most" in claim.text]
    assert [claim.holds for claim in found] == [None] * 3 and all(claim.lacks == ("calibration",) for claim in found)


def test_a_claim_that_lacks_a_run_holds_in_part_and_says_which_and_why():
    without = [each for each in everything() if not (each["part"] == "two-layers-quarter" and each["activations"] == "block")]
    found = next(claim for claim in judged(without, {"two-layers-quarter": "late"}) if claim.text.startswith("time within"))
    assert found.holds is None and found.lacks == ("two-layers-quarter: 1,024 tokens, block (late)",)
    assert str(found).startswith("in part  time within") and "lacks two-layers-quarter: 1,024 tokens, block (late)" in str(found)
    assert held(without, "block over block_save_attention, 1,024") == [None]
    assert held(without, "offload over block_save_attention, 1,024") == [True], "it needs no block"
    assert held([each for each in everything() if each["part"] != "step"], "the loss") == [None]


def test_twice_the_length_is_judged_on_a_step_of_twice_the_length_alone():
    text = "a step of two layers at twice the length"
    without = [each for each in everything() if each["part"] != "two-layers-twice"]
    assert held(without, text) == [None], "of two layers there is a step at the length itself"
    assert held(without, text, {"two-layers-twice": "failed"}) == [False]
    twice = next(each for each in everything() if each["part"] == "two-layers-twice")
    found = next(claim for claim in judged([*without, out_of_memory(twice)]) if claim.text == text)
    assert found.holds is False and "out of memory: tried 9 GiB" in str(found) and str(found).startswith("FAILS")


@pytest.mark.parametrize("part", [part for part, listed in million.runs(T).items() if listed])
def test_a_step_that_ran_out_of_memory_fails_what_it_was_needed_for(part):
    records = everything()
    index = next(i for i, each in enumerate(records) if each["part"] == part)
    records[index] = out_of_memory(records[index])
    failed = [claim for claim in judged(records) if claim.holds is False]
    assert any(claim.text.startswith("memory within") for claim in failed)
    assert all("tried 9 GiB" in claim.found for claim in failed)


def test_memory_of_ranks_is_flat_over_rings_and_linear_in_rows_or_the_claim_fails():
    def ranks(gib):
        return [record("ranks-memory", run.tokens, "block", 1.0, gib(run.tokens / run.ranks, run.ranks), gpus=run.ranks)
                for part, listed in million.runs(T).items() if part.startswith("ranks-memory") for run in listed]

    assert held(ranks(lambda rows, n: 10 + rows / 10 + n / 100), "memory of a rank") == [True, True]
    assert held(ranks(lambda rows, n: 1 + rows * n / 10), "memory of a rank")[0] is False
    assert held(ranks(lambda rows, n: 1 + rows * rows / 10), "memory of a rank")[1] is False
    without = [one for one in ranks(lambda rows, n: 1 + rows / 10) if one["gpus"] < 4]
    assert held(without, "memory of a rank") == [None, None], "a ring that was not measured is no ring that held"


def write_run(folder, policy, step, loss, **row):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(f"- experiment=one_million\n- train.activations={policy}\n")
    row = {"kind": "train", "step": step, "tokens": step << 20, "tokens_per_s": (1 << 20) / 110,
           "tokens_per_s_per_rank": (1 << 20) / 110, "peak_memory_gib": 117.0, "loss": loss, "tflops_per_rank": 500.0, **row}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def test_a_report_reads_what_the_parts_leave_in_several_folders_and_keeps_every_figure(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one / "step", "block_save_attention", 1, 5.5)
    write_run(one / "resume", "block", 2, 5.0)
    two.mkdir()
    rows = [{"name": "loss", "error": 1.0, "budget": 2.0, "scale": 1.0, "ok": True}]
    (two / "ranks-equal.json").write_text(json.dumps({"train": [{"rows": rows}]}))
    (two / "ranks-memory-4.json").write_text(json.dumps({"records": []}))  # it had just begun
    assert report([one, two], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "1,048,576 tokens, 8 layers, block_save_attention" in shown and "NOT calibrated" in shown and "110.00" in shown
    assert "1 of 1 quantities within budget, worst 0.50 of it" in shown and "4,398,050,705,408 allowed pairs" in shown
    written = json.loads((tmp_path / "million.json").read_text())
    assert len(written["records"]) == 2 and {claim["holds"] for claim in written["claims"]} == {True, None, False}


@pytest.mark.parametrize("verdict", ["late", "failed", "not run"])
def test_a_part_that_did_not_succeed_is_shown_and_no_success_even_where_all_claims_hold(verdict, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(million_report, "claims", lambda *given, **more: [million_report.Claim("all is well", True, "")])
    monkeypatch.setattr(million_report, "equality", lambda *given: million_report.Claim("so is this", True, ""))
    parts = [{"name": "step", "verdict": "ok", "seconds": 1.0},
             {"name": "resume", "verdict": verdict, "seconds": 2.0, "last": "so far"}]
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    assert report([tmp_path], tmp_path) == 1
    assert f"{verdict.upper():<7}  part resume, after 2 s: so far" in capsys.readouterr().out
    again = tmp_path / "again"
    again.mkdir()
    (again / "parts.json").write_text(json.dumps([{"name": "resume", "verdict": "ok", "seconds": 3.0}]))
    assert report([tmp_path, again], tmp_path) == 0, "it succeeded when it was run again"


def test_a_part_that_was_run_again_is_read_where_it_succeeded(tmp_path):
    for name, verdict, gib in (("first", "late", 1.0), ("second", "ok", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "parts.json").write_text(json.dumps([{"name": "ranks-memory-4", "verdict": verdict, "tokens": 4096}]))
        records = [{"overrides": ["experiment=one_million"], "peak_gib": gib, "gpus": 1, "seconds": 3.0}]
        (folder / "ranks-memory-4.json").write_text(json.dumps(records))
    folders = [tmp_path / "first", tmp_path / "second"]
    found = list(million_report.measured(folders, million_report.read_verdicts(folders)))
    assert [each["peak_gib"] for each in found] == [2.0]
    assert "seconds" not in found[0], "ranks that share a card, perhaps beside another part, are not timed"


ONE = {"overrides": ["experiment=one_million"], "seconds": 1.0, "peak_gib": 1.0}


@pytest.mark.parametrize("file, written, named", [
    ("two-layers-save.json", [{**ONE, "seconds": 0}], "record 1: seconds=0: must be a finite number above 0"),
    ("two-layers-save.json", [ONE, {**ONE, "seconds": None}], "record 2: seconds=None: must be"),
    ("two-layers-save.json", [{**ONE, "loss": "a"}], "record 1: loss=a: must be"),
    ("two-layers-save.json", [{**ONE, "overrides": ["modle.dim=3"]}], "modle.dim: no such key; nearest: model.dim"),
    ("ranks-equal.json", {"train": [{"rows": [{"ok": True}]}]}, "must be what check.py --train --json writes: KeyError("),
    ("parts.json", {"a": 1}, "must be the list of parts that million.py writes"),
    ("step/metrics.jsonl", {"kind": "train", "step": 1}, "line 1: tokens=None: must be")])
def test_a_report_of_what_cannot_be_read_is_refused_in_a_line_that_names_the_file(file, written, named, tmp_path, capsys):
    if file.startswith("step"):
        write_run(tmp_path / "step", "block", 1, 5.0)
    (tmp_path / file).write_text(json.dumps(written) + "\n")
    assert million.main(["--report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("million: ") and str(tmp_path / file) in said and named in said and said.count("\n") == 1


def test_a_run_leaves_nothing_of_an_earlier_one_in_its_folder_and_ends_its_parts_with_it(tmp_path, monkeypatch):
    (tmp_path / "two-layers-save.json").write_text("[]")
    (tmp_path / "offload.json").write_text("[]")
    seen = []

    def run(wanted, folder, jobs, limit):
        seen.append(sorted(path.name for path in folder.iterdir()))
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        return [{"name": part.name, "verdict": "ok"} for part in wanted]

    monkeypatch.setattr(million, "run", run)
    monkeypatch.setattr(million, "show", lambda folders, out: 0)
    assert million.main(["--parts", "two-layers-save", "--tokens", "2048", "--out", str(tmp_path), "run.device=cpu"]) == 0
    assert seen == [["offload.json"]] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert json.loads((tmp_path / "parts.json").read_text()) == [{"name": "two-layers-save", "verdict": "ok", "tokens": 2048}]


@pytest.mark.parametrize("words", [["--config", "model=tiny"], ["--train", "--run", "x", "--config", "model=tiny"]])
def test_a_configuration_is_for_training_alone_and_not_beside_a_run(words, capsys):
    with pytest.raises(SystemExit):
        check.main(words)
    assert "--config model=tiny: only --train takes it" in capsys.readouterr().err


def test_a_misspelt_configuration_is_refused_by_key():
    with pytest.raises(ValueError, match="--config: modle.dim: no such key; nearest: model.dim"):
        overridden_config(["modle.dim=3"])
