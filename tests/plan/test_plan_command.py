"""`ringflash plan`: what it prints, refuses, measures and compares."""
import json

import pytest

from ringflash.launch import plan
from ringflash.planning.hardware import GPUS, hardware_of

LLAMA = ["model=llama3_8b", "data.seq_len=1048576", "train.residual_dtype=bf16"]


def test_a_plan_names_memory_by_part_seconds_communication_the_best_division_and_every_source(capsys, tmp_path):
    files = [str(tmp_path / name) for name in ("plan.json", "plan.png")]
    assert plan.main([*LLAMA, "--gpus", "8", "--json", files[0], "--png", files[1]]) == 0
    shown = capsys.readouterr().out
    for text in ("8.03 B parameters in 32 layers", "optimizer state", "K, V and gradients under way", "attention, backward",
                 "hidden", "tokens/s per GPU, ", "MFU", "longest sequence that fits so: ", "datasheet",
                 "bench.py multi --sections overlap",
                 "6 x weights of matrix products"):
        assert text in shown
    written = json.loads((tmp_path / "plan.json").read_text())
    best = written["predictions"][0]
    assert best["fits"] and best["seconds"] == pytest.approx(sum(best["seconds_by_part"].values()))
    assert best["ring"] * best["ulysses"] * best["dp"] == 8 and written["longest"] >= 1 << 20
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_what_is_given_is_not_searched_and_rates_and_documents_change_the_prediction(capsys):
    given = [*LLAMA, "parallel.cp=8", "parallel.dp=1", "parallel.ulysses=1", "parallel.shard=8", "train.activations=block",
             "--gpus", "8"]
    assert plan.main(given) == 0
    whole = capsys.readouterr().out
    assert "block_save_attention" not in whole and "attention, recomputed" in whole
    assert plan.main([*given, "--rate", "matmul_tflops=340", "--documents", "lognormal:sigma=1.0,seed=0"]) == 0
    packed = capsys.readouterr().out
    assert "340" in packed and " documents" in packed and packed.count("--rate") == 1


@pytest.mark.parametrize("words, named", [
    (["--gpu", "h300"], "--gpu h300: unknown kind; valid: h200"),
    (["--gpus", "12"], "--gpus 12: more than one host, so a multiple of --gpus-per-host 8; nearest: 8 or 16"),
    (["parallel.cp=3", "--gpus", "8"], "parallel.cp=3: must divide the 8 GPUs; nearest: 2 or 4"),
    (["modle.dim=3"], "modle.dim: no such key; nearest: model.dim"),
    (["model=llama9"], "Available options in 'model': base"),
    (["train.activations=all"], "train.activations=all: valid: none, block, block_save_attention, offload"),
    (["model=hf", "model.hf=folder"], "model.hf=folder: "),
    (["--rate", "matmul_tflops=fast"], "--rate matmul_tflops=fast: must be NAME=NUMBER"),
    (["--documents", "uniform"], "documents 'uniform'"),
    (["--calibration", "/nowhere.json"], "--calibration /nowhere.json: "),
    (["compare", "--measured", "/nowhere"], "--measured /nowhere: "),
])
def test_a_wrong_plan_is_refused_in_one_line_with_key_rule_and_nearest(words, named, capsys):
    assert plan.main(words) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1 and said.startswith("ringflash plan: ")


def test_calibrate_measures_here_and_its_file_replaces_the_tables_numbers_and_predicts_the_step_it_has_not_seen(tmp_path, capsys):
    file = tmp_path / "calibration.json"
    assert plan.main(["calibrate", "model=tiny", "train.dtype=fp32", "--json", str(file), "--layers", "1"]) == 0
    capsys.readouterr()
    found = json.loads(file.read_text())
    assert set(found["rates"]) >= {"matmul_tflops", "memory_gb_s", "forward_tflops", "backward_tflops", "optimizer_ns",
                                   "extra_gib", "rest_factor", "slack"}
    hardware = hardware_of("h200", file)
    assert hardware.matmul_tflops == found["rates"]["matmul_tflops"] != GPUS["h200"].matmul_tflops
    assert hardware.source("matmul_tflops") == f"measured: {file}" and "assumed" in hardware.source("across_gb_s")
    assert {(step["activations"], step["seq_len"]) for step in found["steps"]} >= {("block", 64), ("offload", 256)}
    # Memory of a step that the correction was not taken from: the live bytes of the CPU kernels are few beside the weights.
    step = next(step for step in found["steps"] if step["activations"] == "block" and step["seq_len"] == 64)
    record = {"overrides": ["model=tiny", "model.num_layers=1", "train.dtype=fp32", "train.activations=block", "data.seq_len=64",
                            "parallel.cp=1"], "peak_gib": step["peak_gib"]}
    (tmp_path / "run.json").write_text(json.dumps(record))
    allowed = ["--max-memory-error", "0.1"]
    assert plan.main(["compare", "--calibration", str(file), "--measured", str(tmp_path / "run.json"), *allowed]) == 0
    assert "held" in capsys.readouterr().out


def test_compare_reads_a_run_folder_and_fails_where_the_error_is_larger_than_allowed(tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    overrides = ("model=tiny", "data.seq_len=4096", "parallel.cp=2", "data.document_mask=false")
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in overrides))
    rows = [{"kind": "train", "step": step, "tokens": 4096 * step, "tokens_per_s": 4096 / seconds,
             "tokens_per_s_per_rank": 2048 / seconds, "peak_memory_gib": 0.5} for step, seconds in ((1, 9.0), (2, 2.0), (3, 2.0))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plan.main(["compare", "--measured", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "run" in shown and " 2 " in shown and "2.00" in shown and "NOT held" in shown
    assert plan.main(["compare", "--measured", str(folder), "--max-memory-error", "1e9", "--max-time-error", "1"]) == 0
