"""bench multi without GPUs: its options, its tables and pictures, what makes it fail, and its sections on two gloo ranks."""
import argparse
import dataclasses
import math

import pytest
import torch

from ringflash.launch import (
    bench, bench_multi, bench_multi_check, bench_multi_ring, bench_multi_show, bench_multi_train, bench_multi_ulysses)
from ringflash.launch.bench_multi_timing import Timing
from ringflash.launch.check_spawn import run_ranks
from ringflash.planning.hardware import GPUS
from ringflash.train.world import World
from ringflash.work import Work

PASSES = ("forward", "backward", "both")


def ring_record(candidate, layout="zigzag", **more):
    values = {"ms": 1.0, "tflops": 420.0, "of_one_gpu": 0.75}
    figures = {f"{which}_{name}": value for which in PASSES for name, value in values.items()}
    return {"section": "ring", "layout": layout, "candidate": candidate, "rows": 8192, "failure": None, "kernel": "triton",
            "difference": None, "samples": 5, "host_ms": 0.5, **figures, **more}

RECORDS = [
    {"section": "stress", "without": None, "steps": 10, "blocks": 20, "wrong": 0, "seconds": 0.1, "ok": True},
    {"section": "matrix", "carrier": "copy", "cells": 2, "ok": 2, "worst_of_budget": 0.3, "bad": [], "seconds": 1.0},
    {"section": "link", "carrier": "copy", "bytes": 4 << 20, "rows": 1024, "ms": 0.03, "gb_per_s": 140.0, "host_ms": 0.02},
    {"section": "overlap", "carrier": "copy", "rows": 8192, "kernel": "triton", "kernel_ms": 1.0, "hop_ms": 0.1, "both_ms": 1.01,
     "added": 0.01, "hidden": 0.9, "kernel_tflops": 500.0, "host_ms": {}},
    ring_record("one GPU"),
    ring_record("copy", "balanced", both_of_same_mask=0.875),
    ring_record("ring-flash-attn") | {"failure": "RuntimeError: not installed"},
    {"section": "ulysses", "candidate": "ulysses 2", "rows": 4096, "heads": [32, 8, 128], "failure": None, "forward_ms": 1.0,
     "both_ms": 4.25, "both_tflops": 400.0, "over_fastest": 1.0, "estimate_forward_ms": 1.0, "estimate_both_ms": 3.5,
     "estimate_over_cheapest": 1.0},
    {"section": "train", "what": "same", "model": "tiny", "tokens": 64, "cp_size": 2, "failure": None, "ok": True,
     "loss": {"ring": 5.0, "one_gpu": 5.0, "of_budget": 0.125}, "grad_norm": {"ring": 1.0, "one_gpu": 1.0, "of_budget": 0.25}},
    {"section": "train", "what": "step", "model": "tiny", "tokens": 128, "cp_size": 2, "failure": None, "step": 1,
     "seconds": 12.75, "tokens_per_s": 10.0, "peak_gib": 61.5, "mfu": 0.415, "activations": "offload",
     "predicted": {"seconds": 11.25, "peak_gib": 60.0, "mfu": 0.4}},
    {"section": "nccl", "failure": "no NCCL"},
]


def read(*arguments):
    parser = argparse.ArgumentParser()
    bench_multi.add_parser(parser.add_subparsers(dest="what"))
    return bench_multi.read(parser.parse_args(["multi", *arguments]))


def test_options_are_read_and_refused_by_name():
    assert read("--rows", "8,16", "--exchanges", "copy").rows == (8, 16)
    assert "trace" not in read().sections and "trace" in read("--trace", "x").sections
    with pytest.raises(ValueError, match="--sections=speed: unknown; valid: stress, matrix"):
        read("--sections", "link,speed")
    for wrong in ("gloo", ""):
        with pytest.raises(ValueError, match="--exchanges=.*valid are nccl, nccl-high, copy"):
            read("--exchanges", wrong)


def test_peers_are_named_by_what_travels_how_and_kernel():
    assert read().peers == ("allgather-cudnn", "allgather-flash", "alltoall-cudnn", "alltoall-flash", "ring-flash-attn")
    assert read("--peers", "").peers == ()
    with pytest.raises(ValueError, match="--peers=ring: unknown; valid: allgather-cudnn"):
        read("--peers", "ring")
    with pytest.raises(ValueError, match="--layouts=striped: unknown; valid: zigzag, balanced"):
        read("--layouts", "striped")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_without_gpus_it_ends_with_one_message(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["multi"])
    assert ended.value.code == 2
    assert "bench multi: needs GPUs" in capsys.readouterr().err


def test_every_record_is_in_a_table_and_a_picture(tmp_path):
    shown = bench_multi_show.table(RECORDS)
    for text in ("nothing", "140", "90", "one GPU", "75.0", "same mask 87.5", "not installed", "NCCL groups: no NCCL", "0.30",
                 "4.25", "the estimate says ulysses 2; so it is", "0.125 of its budget", "12.75", "61.5", "41.5", "11.25"):
        assert text in shown, text
    bench_multi_show.draw(RECORDS, str(tmp_path / "bench"))
    assert {path.name for path in tmp_path.iterdir()} == {"bench-links.png", "bench-overlap.png", "bench-ring.png",
                                                              "bench-ring-balanced.png"}


def test_lines_of_pictures_go_from_few_rows_to_many_in_whatever_order_these_were_timed(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "plot", lambda axis, xs, ys, **options: drawn.append(tuple(xs)))
    monkeypatch.setattr(Axes, "legend", lambda *arguments, **options: None)
    records = [ring_record("copy") | {"rows": rows} for rows in (8192, 32768, 2048)]
    bench_multi_show.draw(records, str(tmp_path / "bench"))
    assert drawn == [(2048, 8192, 32768)]


def test_wrong_blocks_a_cell_over_budget_and_a_section_that_did_not_run_fail_the_run():
    assert [bench_multi.held(record) for record in RECORDS] == [True] * (len(RECORDS) - 1) + [False]
    assert not bench_multi.held({**RECORDS[0], "ok": False}) and not bench_multi.held({**RECORDS[1], "ok": 1})
    same = next(record for record in RECORDS if record.get("what") == "same")
    assert not bench_multi.held({**same, "ok": False})


def test_the_matrix_of_several_gpus_has_every_mask_and_layout():
    cells = bench_multi_check.matrix_cells(("triton",), ("bf16",), 2)
    assert len({(cell.mask, cell.layout) for cell in cells}) == 15 and {cell.cp_size for cell in cells} == {2}


@pytest.mark.parametrize("kind", bench_multi_ring.LAYOUTS)
@pytest.mark.parametrize("cp_size", (2, 8))
def test_one_gpu_is_given_as_many_pairs_as_each_rank_of_the_ring_has(kind, cp_size):
    given = bench_multi_ring.problem(kind, 8192, cp_size)
    assert given.layout.seq_len == 8192 * cp_size and {given.layout.positions(rank).size for rank in range(cp_size)} == {8192}
    assert given.pairs == Work((given.mask,), given.layout.seq_len).total
    assert math.isclose(given.equal_rows * (given.equal_rows + 1) / 2, given.pairs / cp_size, rel_tol=0.05)


def test_the_backward_is_what_both_take_longer_and_counts_as_two_and_a_half_forwards():
    found = bench_multi_ring.figures(Timing(1.0, 0.0), Timing(3.5, 0.0), 1e6)
    assert found["backward_ms"] == 2.5 and found["forward_tflops"] == found["backward_tflops"] == found["both_tflops"]
    assert math.isclose(found["forward_tflops"], 4 * 1e6 * 32 * 128 / 1e-3 / 1e12)


def test_an_estimate_that_calls_a_slow_way_the_cheapest_is_told():
    record = {"rows": 4096, "heads": [32, 8, 128]}
    ring, ulysses = ({**record, "candidate": name, "estimate_both_ms": said, "both_ms": ms}
                     for name, said, ms in (("ring 2, copy", 3.0, 4.5), ("ulysses 2", 3.3, 3.0)))
    assert "says ring 2, copy; fastest is ulysses 2, 1.50x (estimated 1.10x" in bench_multi_ulysses.verdict([ring, ulysses])
    close = {**ulysses, "both_ms": 4.4}
    assert "ulysses 2 is 2.3% faster, which says nothing" in bench_multi_ulysses.verdict([ring, close])


def with_train(*arguments, num_ranks=2):
    parser = argparse.ArgumentParser()
    bench_multi.add_parser(parser.add_subparsers(dest="what"))
    options = parser.parse_args(["multi", "--train-model", "tiny", "--train-tokens", "128", *arguments])
    return bench_multi.with_train(bench_multi.read(options), options, num_ranks)


def test_a_training_step_is_that_of_launch_train_and_refused_by_name():
    job = with_train("--train-overrides", "optim.lr=0.5 train.activations=block").train
    assert (job.cfg.optim.lr, job.cfg.train.activations, job.cfg.parallel.shard, job.cfg.data.seq_len) == (0.5, "block", -1, 128)
    for wrong in ("train.step=3", "data.seq_len=64", "data.document_mask=true", "parallel.ulysses=3"):
        with pytest.raises(ValueError, match=wrong.partition("=")[0]):
            with_train("--train-overrides", wrong)
    with pytest.raises(ValueError, match="--train-model=huge"):
        with_train("--train-model", "huge")


@pytest.mark.timeout(120)
def test_ring_ulysses_and_train_run_on_two_ranks():
    plan = with_train("--sections", "ring,ulysses,train", "--rows", "32", "--ulysses-rows", "16", "--repeats", "1",
                      "--train-steps", "1", "--train-same-tokens", "64", "--peers", "ring-flash-attn")
    plan = dataclasses.replace(plan, exchanges=("gloo",))
    records = run_ranks(bench_multi.run_rank, 2, plan, device_type="cpu", timeout_s=100)[0]
    assert not [record for record in records if "candidate" not in record and record["failure"] is not None]
    found = {(r["layout"], r["candidate"]) for r in records if r["section"] == "ring" and r["failure"] is None}
    both = {(layout, name) for layout in ("zigzag", "balanced") for name in ("one GPU", "visits", "gloo")}
    assert found == both | {("balanced", "one GPU, all documents")}
    absent, = (r["failure"] for r in records if r.get("candidate") == "ring-flash-attn")
    assert absent.startswith("RuntimeError: not installed")
    ways = [r["candidate"] for r in records if r["section"] == "ulysses" and r["heads"] == [32, 8, 128]]
    assert sorted(ways) == ["all-gather 2, gloo", "ring 2, gloo", "ulysses 2"]
    same, step = (r for r in records if r["section"] == "train")
    assert same["ok"] and same["loss"]["one_gpu"] > 1.0 and same["grad_norm"]["of_budget"] <= 1.0
    assert step["tokens"] == 128 and step["seconds"] > 0 and math.isfinite(step["loss"])
    assert bench_multi_show.table(records).count("\n") > 20


@pytest.mark.parametrize("model, tokens, num_ranks", (("llama3_1b", 262_144, 2), ("llama3_8b", 1_048_576, 8)))
def test_the_steps_of_large_models_have_a_prediction(model, tokens, num_ranks, monkeypatch):
    job = with_train("--train-model", model, "--train-tokens", str(tokens), num_ranks=num_ranks).train
    monkeypatch.setattr(bench_multi_train, "known_hardware", lambda device: GPUS["h200"])
    world = World(rank=0, world_size=num_ranks, dp=1, cp=num_ranks, device=torch.device("cpu"))
    found = bench_multi_train.prediction(job.cfg, world, "offload")
    assert 0 < found["mfu"] < 1 and 0 < found["peak_gib"] < 140
    assert math.isclose(sum(found["parts"].values()), found["seconds"])
