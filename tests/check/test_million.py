"""The command of one million tokens: its parts are commands that exist, and its report says what holds, what fails and what did not run."""
import argparse
import json
from pathlib import Path

import pytest

from ringflash.launch import check, million, plan_calibrate, plan_measure
from ringflash.launch.check_train import overridden_config
from ringflash.launch.million_report import claims, report
from ringflash.launch.plan import read_config

ROOT = Path(__file__).resolve().parents[2]


def test_every_part_is_a_command_of_this_repository_with_options_and_overrides_that_exist():
    for part in million.parts(million.MILLION, "/scratch"):
        program, *words = part.argv
        assert (ROOT / "launch" / program).is_file()
        overrides = [word for word in words if "=" in word]
        if program == "check.py":
            options = check.parser().parse_args(words)
            assert overridden_config(options.config).data.seq_len == 131072 and options.processes == 4
            continue
        cfg = read_config(overrides, 1)
        assert cfg.model.dim == 2048 and not cfg.data.document_mask
        if program == "plan.py":
            command = {"calibrate": plan_calibrate, "measure": plan_measure}[words[0]]
            parser = argparse.ArgumentParser()
            parser.add_argument("overrides", nargs="*")
            command.add_options(parser)
            options = parser.parse_intermixed_args(words[1:])
            if words[0] == "measure" and options.runs:
                assert max(plan_measure.runs_of(options, cfg))[0] == 2 * million.MILLION


def test_unknown_parts_are_refused_and_a_folder_without_figures_too(capsys, tmp_path):
    assert million.main(["--parts", "stepp"]) == 2 and "there are step, calibration" in capsys.readouterr().err
    assert million.main(["--report", str(tmp_path)]) == 2 and "nothing that million.py measured" in capsys.readouterr().err
    assert million.main(["--list", "--parts", "resume"]) == 0
    assert "checkpoint.resume=SCRATCH/step" in capsys.readouterr().out


def record(part, tokens, activations, seconds, gib, *, gpus=1, loss=5.0, layers=8):
    return {"part": part, "tokens": tokens, "activations": activations, "seconds": seconds, "peak_gib": gib, "gpus": gpus, "loss": loss,
            "layers": layers, "predicted_seconds": 100.0 if tokens > 1000 else seconds, "predicted_gib": 50.0, "tflops_per_gpu": 500.0,
            "allowed_pairs": 7, "parameters_of_layers": 4e8, "document_mask": False}


def held(records, start):
    return [claim.holds for claim in claims(records, is_calibrated=True) if claim.text.startswith(start)]


def test_claims_hold_fail_or_were_not_measured():
    good = [record("step", 2048, "block_save_attention", 101.0, 50.5), record("resume", 2048, "block", 99.0, 49.0, loss=4.0)]
    assert held(good, "the loss") == [True] and held(good, "time") == [True] and held(good, "memory within") == [True]
    assert held(good, "2,048 tokens, 8 layers of 400 M parameters, 7 allowed pairs (no document mask)") == [True]
    assert held(good, "a step of two layers") == [None] and held(good[:1], "the loss") == [None]
    worse = [good[0], record("resume", 2048, "block", 80.0, 60.0, loss=6.0)]
    assert held(worse, "the loss") == [False] and held(worse, "time") == [False] and held(worse, "memory within") == [False]
    assert held(worse, "block over block_save_attention") == [False]


def test_memory_of_ranks_is_flat_over_rings_and_linear_in_rows_or_the_claim_fails():
    def ranks(gib):
        return [record("ranks-memory", rows * n, "block", 1.0, gib(rows, n), gpus=n) for n in (1, 2, 4) for rows in (10, 20, 30)]

    assert held(ranks(lambda rows, n: 1 + rows / 10 + n / 100), "memory of a rank") == [True, True]
    assert held(ranks(lambda rows, n: 1 + rows * n / 10), "memory of a rank")[0] is False
    assert held(ranks(lambda rows, n: 1 + rows * rows / 10), "memory of a rank")[1] is False
    without = [one for one in ranks(lambda rows, n: 1 + rows / 10) if one["gpus"] < 4]
    assert held(without, "memory of a rank") == [None, True], "a ring that was not measured is no ring that held"


def test_a_report_reads_what_the_parts_leave_in_several_folders_and_keeps_every_figure(tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    for name, policy, step, loss in (("step", "block_save_attention", 1, 5.5), ("resume", "block", 2, 5.0)):
        folder = one / name
        (folder / ".hydra").mkdir(parents=True)
        (folder / ".hydra" / "overrides.yaml").write_text(f"- experiment=one_million\n- train.activations={policy}\n")
        row = {"kind": "train", "step": step, "tokens": step << 20, "tokens_per_s": (1 << 20) / 110, "tokens_per_s_per_rank": (1 << 20) / 110,
               "peak_memory_gib": 117.0, "loss": loss, "tflops_per_rank": 500.0}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    two.mkdir()
    rows = [{"name": "loss", "error": 1.0, "budget": 2.0, "scale": 1.0, "ok": True}]
    (two / "ranks-equal.json").write_text(json.dumps({"train": [{"rows": rows}]}))
    assert report([one, two], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "1,048,576 tokens, 8 layers, block_save_attention" in shown and "NOT calibrated" in shown and "110.00" in shown
    assert "1 of 1 quantities within budget, worst 0.50 of it" in shown and "4,398,050,705,408 allowed pairs" in shown
    written = json.loads((tmp_path / "million.json").read_text())
    assert len(written["records"]) == 2 and {claim["holds"] for claim in written["claims"]} == {True, None, False}


@pytest.mark.parametrize("words", [["--config", "model=tiny"], ["--train", "--run", "x", "--config", "model=tiny"]])
def test_a_configuration_is_for_training_alone_and_not_beside_a_run(words, capsys):
    with pytest.raises(SystemExit):
        check.main(words)
    assert "--config model=tiny: only --train takes it" in capsys.readouterr().err


def test_a_misspelt_configuration_is_refused_by_key():
    with pytest.raises(ValueError, match="--config: modle.dim: no such key; nearest: model.dim"):
        overridden_config(["modle.dim=3"])
