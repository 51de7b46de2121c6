"""Claims about the benchmark: it counts what it says, goes on past failures, and runs without a GPU."""
import json

import pytest
import torch

from ringflash.launch import bench
from ringflash.launch.bench_kernels import Shape, bench_shape, interleaved
from ringflash.launch.bench_tiles import parse_tiles

ONE_SHAPE = ["kernels", "--device", "cpu", "--repeats", "1", "--shapes", "16:2:2:32:causal:fp32"]


def test_flops_count_causal_as_half_and_a_window_by_its_pairs():
    full, causal = (Shape.parse(f"64:8:2:1000:{mask}:bf16") for mask in ("full", "causal"))
    assert full.flops() == 4 * 1000 * 1000 * 64 * 8
    assert causal.flops() == 4 * (1000 * 1001 // 2) * 64 * 8
    assert Shape.parse("64:8:2:1000:window0:bf16").flops() == 4 * 1000 * 64 * 8
    assert Shape.parse("64:8:2:1000:window5:bf16").flops() == 4 * (6 * 1000 - 15) * 64 * 8


@pytest.mark.parametrize(
    "text", ["128:16:16384", "128:16:3:64:causal:bf16", "128:16:4:64:banded:bf16", "128:16:4:64:causal:int8"])
def test_a_shape_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError):
        Shape.parse(text)
    with pytest.raises(SystemExit) as left:
        bench.main(["kernels", "--shapes", text])
    assert left.value.code == 2


@pytest.mark.parametrize("what, option, wrong", [
    *((what, "--repeats", "0") for what in ("kernels", "ring", "balance", "multi")),
    *((what, "--warmup", "-1") for what in ("kernels", "ring", "balance")),
    ("ring", "--cp-size", "0"), ("balance", "--cp-size", "0"), ("balance", "--seq-len", "0"), ("balance", "--dense-rows", "-3"),
    ("balance", "--seeds", "-1"), ("multi", "--processes", "0"), ("multi", "--steps", "0"), ("multi", "--timeout", "nan"),
    ("multi", "--rows", "8,0"), ("multi", "--sizes-mib", "0"), ("multi", "--channels", "-1"), ("multi", "--hop-rows", "x"),
])
def test_a_count_that_measures_nothing_is_refused(what, option, wrong, capsys):
    with pytest.raises(SystemExit) as left:
        bench.main([what, option, wrong])
    said = capsys.readouterr().err
    assert left.value.code == 2 and option in said and "must be" in said


def test_candidates_take_turns():
    calls = []
    interleaved([lambda: calls.append("a"), lambda: calls.append("b")], torch.device("cpu"), repeats=3, warmup=1)
    assert calls == ["a", "b"] * 4


def test_the_smoke_run_compares_every_candidate_and_writes_json_and_png(tmp_path, capsys):
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "png")}
    assert bench.main(["kernels", "--device", "cpu", "--repeats", "2", "--warmup", "1", "--json", str(paths["json"]),
                       "--png", str(paths["png"])]) == 0
    records = json.loads(paths["json"].read_text())["records"]
    assert {r["candidate"] for r in records} == {"sdpa", "cpu", "reference"} and len(records) == 9
    assert all(r["failure"] is None and r["forward_tflops"] > 0 and r["difference"] < 0.05 for r in records)
    assert paths["png"].read_bytes()[:4] == b"\x89PNG"
    assert "smoke test" in capsys.readouterr().out


def test_a_candidate_that_cannot_run_says_why_and_the_others_go_on(capsys):
    assert bench.main([*ONE_SHAPE, "--candidates", "sdpa,hopper,cpu"]) == 1
    out = capsys.readouterr().out
    assert "hopper did not run: RuntimeError" in out and "cpu" in out


def test_a_candidate_that_computes_something_else_fails_the_run(monkeypatch):
    from ringflash.kernels import cpu

    plain = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda q, *rest, **options: plain(q * 2, *rest, **options))
    assert bench.main([*ONE_SHAPE, "--candidates", "sdpa,cpu"]) == 1


def test_a_windowed_shape_has_no_sdpa_but_runs_ours():
    sdpa, ours = bench_shape(["sdpa", "cpu"], Shape.parse("16:2:2:32:window3:fp32"), torch.device("cpu"), repeats=1, warmup=0)
    assert "dense" in sdpa["failure"] and ours["failure"] is None and ours["baseline"] == "cpu"


def test_the_formula_a_visit_of_a_ring_and_the_kernel_agree_and_an_unknown_flag_is_named():
    for mask in ("causal", "full", "window5"):
        shape = Shape.parse(f"16:4:2:40:{mask}:fp32")
        records = bench_shape(["plain", "cpu", "cpu+fold", "cpu+det+fold"], shape, torch.device("cpu"), repeats=2, warmup=1)
        assert all(r["failure"] is None and r["difference"] < 1e-4 for r in records), records
    wrong, = bench_shape(["cpu+fast"], shape, torch.device("cpu"), repeats=1, warmup=0)
    assert "'cpu+fast': unknown flag; valid: +det, +fold" in wrong["failure"]


def test_the_ring_benchmark_compares_all_visits_with_one_call(capsys):
    arguments = ["ring", "--device", "cpu", "--repeats", "1", "--warmup", "0", "--cp-size", "3", "--layouts", "zigzag,striped",
                 "--shapes", "16:4:2:40:causal:fp32", "--kernel", "cpu"]
    assert bench.main(arguments) == 0
    assert "zigzag W=3" in capsys.readouterr().out


def test_tiles_are_parsed_applied_and_put_back(monkeypatch):
    tiles = pytest.importorskip("ringflash.kernels.triton_tiles")
    monkeypatch.setattr(tiles, "arch_of", lambda device: "hopper")
    before = dict(tiles.TILES)
    patch = parse_tiles("fwd:128:bf16=64,128,4,3,notma; bwd:64:fp16=64,64,8,2,dq=atomic")
    with patch.applied(torch.device("cpu")):
        forward, backward = tiles.TILES["hopper", 128, "forward", "half"], tiles.TILES["hopper", 64, "backward", "half"]
        assert (forward.block_m, forward.block_n, forward.warps, forward.stages, forward.tma) == (64, 128, 4, 3, False)
        assert (backward.block_m, backward.dq, backward.tma) == (64, "atomic", before["hopper", 64, "backward", "half"].tma)
    assert tiles.TILES == before
    with pytest.raises(RuntimeError, match="no entry"), parse_tiles("fwd:80:bf16=64,64,4,2").applied(torch.device("cpu")):
        pass
    assert tiles.TILES == before


@pytest.mark.parametrize(
    "text", ["", "fwd=1,2,3,4", "fwd:128:bf16=1,2,3", "sideways:128:bf16=1,2,3,4", "fwd:128:bf16=1,2,3,4,often"])
def test_tiles_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match="tiles"):
        parse_tiles(text)
