"""`ringflash plan measure`: a step of each length and policy, in this process or on rings, as records that compare reads."""
import json

import pytest
import torch

from ringflash.launch import plan, plan_measure

SMALL = ["model=tiny", "data.document_mask=false", "data.max_bytes=60000", "run.device=cpu", "train.tile_rows=32"]


def test_a_step_of_each_length_and_policy_is_written_with_what_it_took_and_compare_reads_it(tmp_path, capsys):
    file, words = tmp_path / "measured.json", [*SMALL, f"data.cache_dir={tmp_path}"]
    runs = "200:none,100:block_save_attention,100:offload"
    assert plan.main(["measure", *words, "--runs", runs, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert "compiles kernels" in " ".join(found["excluded"].split()) and found["environment"]["device"] == "cpu"
    assert found["asked"] == [{"tokens": tokens, "activations": policy, "gpus": 1, "layers": 3} for tokens, policy in
                              ((200, "none"), (100, "block_save_attention"), (100, "offload"))]
    records = found["records"]
    assert [(r["tokens"], r["overrides"][-1]) for r in records] == [
        (200, "train.activations=none"), (100, "train.activations=block_save_attention"), (100, "train.activations=offload")]
    for record in records:
        pairs = record["layers"] * record["tokens"] * (record["tokens"] + 1) // 2
        assert record["allowed_pairs"] == pairs and f"{pairs:,}" in shown
        assert record["seconds"] > 0 and record["peak_gib"] > 0 and 3 < record["loss"] < 7 and record["gpus"] == 1
    assert plan.main(["compare", "--measured", str(file)]) == 2
    assert f"--measured {file}: was measured on a CPU, and is no h200's; nearest: " in capsys.readouterr().err
    file.write_text(json.dumps({**found, "environment": {"device": "NVIDIA H200"}}))
    plan.main(["compare", "--measured", str(file)])
    assert "200 tokens, none" in capsys.readouterr().out
    assert plan.main(["compare", "--measured", str(file), "--gpu", "h100"]) == 2
    assert "was measured on an NVIDIA H200; nearest: --gpu h200" in capsys.readouterr().err


def test_rings_of_processes_are_measured_at_equal_rows_and_report_every_rank(tmp_path):
    file = tmp_path / "ring.json"
    assert plan.main(["measure", *SMALL, f"data.cache_dir={tmp_path}", "--processes", "2", "--rows", "64,96",
                      "--json", str(file), "--timeout", "100"]) == 0
    records = json.loads(file.read_text())["records"]
    assert [(r["gpus"], r["tokens"]) for r in records] == [(2, 128), (2, 192)]
    assert all("parallel.cp=2" in r["overrides"] and len(r["peak_gib_of_ranks"]) == 2 for r in records)


def test_what_did_not_fit_the_memory_of_one_rank_did_not_fit():
    good = {"name": "n", "gpus": 2, "tokens": 8, "more": ["a=1"], "peak_gib": 1.0, "seconds": 2.0}
    assert plan_measure.of_all([good, {**good, "peak_gib": 3.0}]) == {**good, "peak_gib": 3.0, "peak_gib_of_ranks": [1.0, 3.0]}
    bad = {**{key: good[key] for key in ("name", "gpus", "tokens", "more")}, "out_of_memory": "tried"}
    assert plan_measure.of_all([good, bad]) == {**bad, "out_of_memory": "rank 1: tried"}


def test_each_run_has_host_memory_of_its_own_and_the_optimizers_is_counted(monkeypatch, tmp_path):
    stores, plain = [], plan_measure.step

    def step(trainer):
        layers = {layer.store for layer in trainer.model.blocks}
        assert layers == {trainer.model.store}
        stores.append(trainer.model.store)
        trainer.model.store.num_chunks = 3
        assert plan_measure.host_bytes(trainer) == 3 * trainer.model.store.chunk_bytes
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.numel() > 1)
            moments = plan_measure.host_bytes(trainer) - 3 * trainer.model.store.chunk_bytes
        assert moments == 8 * sum(parameter.numel() for parameter in trainer.parameters if parameter.numel() > 1)
        return plain(trainer)

    monkeypatch.setattr(plan_measure, "step", step)
    file, words = tmp_path / "measured.json", [*SMALL, f"data.cache_dir={tmp_path}", "optim.name=adamw"]
    assert plan.main(["measure", *words, "--runs", "100:offload,64:block", "--json", str(file)]) == 0
    assert len(set(stores)) == 2 and json.loads(file.read_text())["records"][0]["host_gib"] is None


def test_without_a_gpu_a_cpu_is_measured_only_where_it_is_asked_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for command in ("measure", "calibrate"):
        assert plan.main([command, "model=tiny", "--json", str(tmp_path / "no.json")]) == 2
        said = capsys.readouterr().err
        assert "run.device=auto: what is measured is a GPU, this machine has 0; nearest: run.device=cpu" in said
        assert said.count("\n") == 1 and not (tmp_path / "no.json").exists()


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
