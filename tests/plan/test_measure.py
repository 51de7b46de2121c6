"""`ringflash plan measure`: a step of each length and policy, in this process or on rings, as records that compare reads."""
import json

import pytest

from ringflash.launch import plan

SMALL = ["model=tiny", "data.document_mask=false", "data.max_bytes=60000", "run.device=cpu", "train.tile_rows=32"]


def test_a_step_of_each_length_and_policy_is_written_with_what_it_took_and_compare_reads_it(tmp_path, capsys):
    file, words = tmp_path / "measured.json", [*SMALL, f"data.cache_dir={tmp_path}"]
    runs = "200:none,100:block_save_attention,100:offload"
    assert plan.main(["measure", *words, "--runs", runs, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert "compiles kernels" in " ".join(found["excluded"].split()) and found["environment"]["device"] == "cpu"
    records = found["records"]
    assert [(r["tokens"], r["overrides"][-1]) for r in records] == [
        (200, "train.activations=none"), (100, "train.activations=block_save_attention"), (100, "train.activations=offload")]
    for record in records:
        pairs = record["layers"] * record["tokens"] * (record["tokens"] + 1) // 2
        assert record["allowed_pairs"] == pairs and f"{pairs:,}" in shown
        assert record["seconds"] > 0 and record["peak_gib"] > 0 and 3 < record["loss"] < 7 and record["gpus"] == 1
    plan.main(["compare", "--measured", str(file)])
    assert "200 tokens, none" in capsys.readouterr().out


def test_rings_of_processes_are_measured_at_equal_rows_and_report_every_rank(tmp_path):
    file = tmp_path / "ring.json"
    assert plan.main(["measure", *SMALL, f"data.cache_dir={tmp_path}", "--processes", "2", "--rows", "64,96",
                      "--json", str(file), "--timeout", "100"]) == 0
    records = json.loads(file.read_text())["records"]
    assert [(r["gpus"], r["tokens"]) for r in records] == [(2, 128), (2, 192)]
    assert all("parallel.cp=2" in r["overrides"] and len(r["peak_gib_of_ranks"]) == 2 for r in records)


@pytest.mark.parametrize("words, named", [
    (["--runs", "100:all"], "--runs 100:all: must be TOKENS:POLICY, of none, block"),
    (["--runs", "block"], "--runs block: must be TOKENS:POLICY"),
    (["--policies", "none,auto"], "--policies auto: must be of none, block"),
    (["train.tile_rows=-1"], "train.tile_rows=-1: must be at least 0"),
])
def test_what_cannot_be_measured_is_refused_in_a_line(words, named, tmp_path, capsys):
    assert plan.main(["measure", *SMALL, *words, "--json", str(tmp_path / "no.json")]) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1
