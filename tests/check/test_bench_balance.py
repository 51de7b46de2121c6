"""bench balance without a GPU: its problems are what their names say, its kernels compute them, its figures add up."""
import argparse
import json

import numpy as np
import pytest
import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.launch import bench, bench_balance
from ringflash.ring.plan import build_plan

REFERENCE = dispatch.select("reference", device="cpu", dtype=torch.float32, head_dim=8)
TINY = ["balance", "--device", "cpu", "--kernel", "cpu", "--repeats", "1", "--warmup", "0", "--seq-len", "128", "--dense-rows",
        "64", "--heads", "2", "1", "8"]


def test_the_problems_at_131072_tokens_are_the_ones_named():
    found = {(case.name, case.cp_size): dict(case.options) for case in bench_balance.cases(131072, 8, (0, 1))}
    assert len(found) == 13
    for (name, _), options in found.items():
        lengths = np.diff(options["cu_seqlens"]) if "cu_seqlens" in options else None
        if lengths is not None:
            assert lengths.sum() == 131072 and lengths.min() > 0
        if name.startswith("lognormal"):
            assert (65536 in lengths) == name.endswith("64k") and lengths.max() <= 65536
    assert len(found["64 mixed", 8]["cu_seqlens"]) == 65 and len(set(np.diff(found["64 mixed", 8]["cu_seqlens"]))) > 50
    assert {ranks for name, ranks in found if name == "window 4,096"} == {1, 8}
    assert found["window 4,096", 8]["window_size"] == (4095, 0)
    assert [set(np.diff(found[f"documents of {n}", 1]["cu_seqlens"])) for n in (32, 128)] == [{32}, {128}]
    assert len(found["documents of 32", 1]["cu_seqlens"]) == 4097 and len(found["documents of 128", 1]["cu_seqlens"]) == 1025


@pytest.mark.parametrize("options", [(), (("window_size", (9, 0)), ("first_tokens", 6))], ids=["causal", "two intervals"])
def test_the_kernels_that_are_timed_are_a_ring_s_and_their_difference_shows_a_wrong_one(options):
    case = bench_balance.Case("tiny", 24, 3, "contiguous", options)
    plan, tensors = case.plan(), bench_balance.draw(24, (2, 1, 8), "fp32", torch.device("cpu"))
    ranks = [bench_balance.RankKernels(plan, rank, tensors, REFERENCE) for rank in range(3)]
    steps = [[], []]
    for kernels in ranks:
        kernels.forward(steps[0].append)
        kernels.backward(steps[1].append)
    visits = [visit.step for rank in range(3) for step in range(plan.num_steps) for visit in plan.visits(rank, step)]
    assert steps[0] == steps[1] == visits
    assert bench_balance.difference(ranks, plan, tensors, REFERENCE) < 1e-5
    ranks[1].dq[0, 3] *= 1.5
    assert bench_balance.difference(ranks, plan, tensors, REFERENCE) > 1e-2


def test_a_share_is_pairs_over_ranks_at_the_dense_speed_and_the_slowest_rank_counts(monkeypatch):
    case = bench_balance.Case("tiny", 16, 2, "contiguous", ())                             # pairs 36 and 100
    tensors = bench_balance.draw(16, (1, 1, 8), "fp32", torch.device("cpu"))
    dense = bench_balance.RankKernels(build_plan(Mask(), Layout("contiguous", 8, 1)), 0, [x[:, :8] for x in tensors], REFERENCE)
    given = {8: {0: 3.6}, 1: {0: 5.0}, 2: {0: 4.0, 1: 16.0}}                                 # dense, rank 0, rank 1
    plain = bench_balance.timed

    def timed(kernels, pass_, device, times=1):
        plain(kernels, pass_, device, times)
        return given[8 if kernels is dense else len(kernels.visits[pass_])]

    monkeypatch.setattr(bench_balance, "timed", timed)
    record = bench_balance.bench_case(case, tensors, dense, 36, REFERENCE, repeats=1, warmup=0)
    assert record["pairs"] == 136 and record["pairs_busiest"] == pytest.approx(100 / 68)
    for pass_ in bench_balance.PASSES:
        figures = record[pass_]
        assert figures["share_ms"] == pytest.approx(6.8) and figures["slowest_ms"] == 20.0
        assert figures["slowest"] == pytest.approx(20 / 6.8) and figures["of_dense_speed"] == pytest.approx(13.6 / 25)
        assert figures["step_by_step"] == pytest.approx((5 + 16) / 6.8)


def test_a_pass_that_is_repeated_counts_once(monkeypatch):
    class Kernels:
        calls = 0

        def forward(self, mark):
            self.calls += 1
            for step in range(2):
                mark(step)

    now = iter(range(100))
    monkeypatch.setattr(bench_balance.time, "perf_counter", lambda: float(next(now)))        # a second from mark to mark
    kernels = Kernels()
    assert bench_balance.timed(kernels, "forward", torch.device("cpu"), 5) == {0: 1000.0, 1: 1000.0} and kernels.calls == 5


def test_the_smoke_run_times_every_case_and_writes_json(tmp_path, capsys):
    path = tmp_path / "balance.json"
    assert bench.main([*TINY, "--cp-size", "3", "--json", str(path)]) == 0
    whole = json.loads(path.read_text())
    assert whole["kernel"] == "cpu" and whole["heads"] == [2, 1, 8] and len(whole["records"]) == 9
    for record in whole["records"]:
        assert record["failure"] is None and record["difference"] < 1e-4
        assert all(len(record[pass_]["rank_ms"]) == record["cp_size"] and record[pass_]["slowest"] > 0
                   for pass_ in bench_balance.PASSES)
    out = capsys.readouterr().out
    assert "smoke test" in out and "documents of 32 over documents of 128" in out and "TFLOP/s" in out


def test_a_case_that_cannot_run_or_differs_fails_the_run_and_the_others_go_on(monkeypatch, capsys):
    plain = bench_balance.Case.plan

    def broken(case):
        if case.name == "64 mixed":
            raise RuntimeError("broken on purpose")
        return plain(case)

    monkeypatch.setattr(bench_balance.Case, "plan", broken)
    assert bench.main([*TINY, "--cp-size", "2", "--cases", "64,window"]) == 1
    out = capsys.readouterr().out
    assert "RuntimeError: broken on purpose" in out and "window 4,096, W=2: slowest rank" in out
    monkeypatch.undo()
    monkeypatch.setattr(bench_balance, "difference", lambda *arguments: 0.2)
    assert bench.main([*TINY, "--cp-size", "2", "--cases", "window"]) == 1


@pytest.mark.parametrize("wrong", [["--cases", "nothing"], ["--cp-size", "0"], ["--heads", "3", "2", "8"], ["--seq-len", "0"]])
def test_options_that_make_no_sense_are_refused_by_name(wrong, capsys):
    with pytest.raises(SystemExit) as left:
        bench.main([*TINY, *wrong])
    assert left.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_the_command_reads_its_options():
    top = argparse.ArgumentParser()
    bench_balance.add_parser(top.add_subparsers(dest="what"))
    assert top.parse_args(["balance", "--kernel", "hopper", "--seeds", "3", "4"]).seeds == [3, 4]
