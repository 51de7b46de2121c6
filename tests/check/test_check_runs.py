"""The check run as a user runs it, on small parts of the matrix; and that it sees what is wrong."""
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringflash.launch import check, check_judge, check_planted, check_ring, check_scale, check_spawn
from ringflash.launch.check_cells import ALL_LAYOUTS, ALL_MASKS, Cell

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--seq-lens", "19", "--ratios", "1,4", "--dtypes", "fp32", "--head-dims", "8"]


def test_a_small_matrix_holds_on_both_kernels_and_writes_every_cell(tmp_path, capsys):
    path = tmp_path / "check.json"
    assert check.main([*SMALL, "--quick", "--cp-sizes", "1,3,8", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    plain, combined = ([cell for cell in found["matrix"] if cell["group"] == group] for group in ("", "combined"))
    assert len(plain) == 2 * 5 * 3 * (3 + 1) and all(cell["ok"] for cell in found["matrix"])
    assert {(cell["mask"], cell["layout"]) for cell in combined} == set(itertools.product(ALL_MASKS, ALL_LAYOUTS))
    assert {cell["rotate"] for cell in combined} == {"auto", "kv", "q"} and {cell["cp_size"] for cell in combined} == {1, 3, 8}
    assert {cell["routing"] for cell in combined} == {"auto", "ring", "direct", "allgather"}
    assert set(found["matrix"][0]["ratios"]) == {"out", "lse", "dq", "dk", "dv"}
    assert {cell["variant"] for cell in found["matrix"]} == {"plain", "softcap", "sinks", "v-dim", "all"}
    assert all(("dsinks" in cell["ratios"]) == (cell["variant"] in ("sinks", "all")) for cell in found["matrix"])
    out = capsys.readouterr().out
    total = len(found["matrix"])
    assert out.count(" ok") >= 60 and f"{total} of {total} cells within budget" in out


def test_a_wrong_result_fails_the_check(monkeypatch, capsys):
    plain = check_judge.loopback_cell

    def off_by_little(cell, device):
        result = plain(cell, device)
        return {**result, "dv": result["dv"] * (1 + 1e-3)}

    monkeypatch.setattr(check_judge, "loopback_cell", off_by_little)
    assert check.main([*SMALL, "--quick", "--kernels", "reference", "--masks", "causal", "--layouts", "zigzag"]) == 1
    assert "dv" in capsys.readouterr().out


def test_a_cell_that_raises_fails_alone_and_says_why(monkeypatch, capsys, tmp_path):
    plain, path = check_judge.simulate, tmp_path / "check.json"

    def breaks_at_3(*args, cp_size, **options):
        if cp_size == 3:
            raise RuntimeError("broken on purpose")
        return plain(*args, cp_size=cp_size, **options)

    monkeypatch.setattr(check_judge, "simulate", breaks_at_3)
    arguments = [*SMALL, "--quick", "--kernels", "reference", "--masks", "causal", "--layouts", "zigzag", "--cp-sizes", "2,3",
                 "--json", str(path)]
    assert check.main(arguments) == 1
    out = capsys.readouterr().out
    found = json.loads(path.read_text())["matrix"]
    assert {(cell["cp_size"], cell["ok"]) for cell in found} == {(2, True), (3, False)}
    assert "broken on purpose" in out and f"{sum(cell['ok'] for cell in found)} of {len(found)} cells within budget" in out


@pytest.mark.parametrize("defect", check_planted.DEFECTS)
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_planted_defect_is_caught(defect, kernel):
    caught, evidence = check_planted.catches(defect, kernel, torch.device("cpu"))
    assert caught, evidence


def test_a_wrong_direction_cannot_be_seen_with_two_ranks():
    cell = Cell("reference", "fp32", "causal", "striped", 2, 2, 48, 16)

    class BothNeighboursCoincide(check_planted.WrongNeighbour):
        cp_size = 2

    result = check_planted.run_ring(cell, torch.device("cpu"), loopback=BothNeighboursCoincide)
    assert check_judge.Judge("cpu").judge(cell, lambda: result).ok


def test_a_missed_defect_is_reported_and_fails(monkeypatch, capsys):
    harmless = check_planted.Defect("nothing at all", "causal", "zigzag", 3, {})
    monkeypatch.setitem(check_planted.DEFECTS, "skipped-visit", harmless)
    assert check.main(["--planted", "skipped-visit,lse-base", "--device", "cpu", "--kernels", "reference"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out and "CAUGHT" in out


def test_errors_do_not_grow_and_bits_repeat_on_the_cpu_kernel():
    assert check.main(["--growth", "--bitwise", "2", "--device", "cpu", "--kernels", "cpu"]) == 0


def test_two_processes_with_delays_give_the_loopback_ring_bit_for_bit(tmp_path):
    path = tmp_path / "ring.json"
    assert check.main([*SMALL, "--quick", "--processes", "2", "--delays", "1", "--kernels", "cpu", "--timeout", "110",
                       "--json", str(path)]) == 0
    found = json.loads(path.read_text())["matrix"]
    assert len(found) > 45 + 75 and all(cell["ok"] and cell["bitwise"]["out"] and cell["bitwise"]["lse"] for cell in found)
    assert {cell["mask"] for cell in found} == set(ALL_MASKS)
    assert any("dk" in cell["bitwise"] for cell in found)


@pytest.mark.parametrize(("arguments", "rule"), [
    *((["--bitwise", wrong], f"--bitwise: {wrong}: must be >= 2") for wrong in ("1", "0", "-2")),
    (["--random", "0"], "--random: 0: must be >= 1"), (["--processes", "-1"], "--processes: -1: must be >= 1"),
    *(([option, "2,0"], f"{option}: 0: must be >= 1") for option in ("--cp-sizes", "--ratios", "--seq-lens", "--head-dims")),
    (["--seq-lens", "two"], "--seq-lens: 'two': must be an int >= 1"),
    (["--processes", "2", "--delays", "nan"], "--delays: 'nan': must be a finite number >= 0"),
    (["--processes", "2", "--delays", "-1"], "--delays: '-1': must be"), (["--timeout", "inf"], "--timeout: 'inf'"),
    *((["--memory", "--lengths", wrong], f"--lengths={wrong}: must be at least two") for wrong in ("64", "64,64", "64,32")),
    (["--planted", ""], "--planted=: names none"), (["--planted", ","], "--planted=,: names none"),
    (["--rotate", "q"], "--rotate=q: only --memory takes it"),
])
def test_a_count_that_proves_nothing_is_refused(arguments, rule, capsys):
    with pytest.raises(SystemExit) as left:
        check.main([*arguments, "--device", "cpu"])
    assert left.value.code == 2 and rule in capsys.readouterr().err


@pytest.mark.parametrize("rotate", ("kv", "q"))
def test_memory_measures_the_rotation_that_it_names(rotate, monkeypatch, capsys):
    run, draw, seen = check_scale.Problem.run, check_scale.Problem.random, []

    def spy(self, cp_size, layout, kernel, rotate):
        seen.append(rotate)
        return run(self, cp_size, layout, kernel, rotate)

    class Card:  # stands for a GPU: only its memory figures are asked for
        type = "cuda"

    monkeypatch.setattr(check_scale.Problem, "run", spy)
    monkeypatch.setattr(check_scale.Problem, "random", classmethod(
        lambda cls, seq_len, *rest: draw(seq_len, 2, 2, 8, torch.float32, torch.device("cpu"))))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 2**20 * len(seen))
    held, records = check_scale.memory("cpu", Card(), seq_lens=(64, 128), cp_size=2, **({} if rotate == "kv" else {"rotate": rotate}))
    assert held and seen == [rotate] * 2 == [record["rotate"] for record in records]
    assert f"rotate={rotate}" in capsys.readouterr().out


def _ranks_of_which_one_raises(rank):
    rank.at(1)
    if rank.rank == 1:
        raise ValueError("broken on purpose")
    torch.distributed.barrier()


def test_a_rank_that_raises_ends_the_ring_with_one_message_that_names_rank_and_place():
    with pytest.raises(check_spawn.RingFailure, match="^rank 1 of 2, at the second: ValueError: broken on purpose"):
        check_spawn.run_ranks(_ranks_of_which_one_raises, 2, device_type="cpu", timeout_s=100,
                              name_of=["first", "the second"].__getitem__)


def test_of_ranks_that_are_seen_to_fail_together_the_one_that_failed_first_is_named(tmp_path):
    job = check_spawn._Job(print, (), 3, "cpu", 1.0, str(tmp_path))
    for number, rank in enumerate((2, 0)):
        (tmp_path / f"rank{rank}.error").write_text("an error")
        os.utime(tmp_path / f"rank{rank}.error", ns=(0, 1000 + number))
    assert check_spawn._cause(job, {0: 1, 2: 1}) == 2
    assert check_spawn._cause(job, {0: 1, 1: -6, 2: 1}) == 2        # an abort follows from another's end
    assert check_spawn._cause(job, {0: 1, 1: -9, 2: 1}) == 1        # a kill does not
    assert check_spawn._cause(job, {1: -6}) == 1


def test_a_kernel_that_is_not_here_is_one_message_of_the_real_ring_too():
    cell = Cell("hopper", "fp32", "causal", "zigzag", 2, 1, 8, 8)
    with pytest.raises(check_spawn.RingFailure, match=r"rank \d of 2.*hopper"):
        check_ring.run_ring([cell], 2, device_type="cpu", timeout_s=100)


def test_a_ring_that_is_late_is_ended_and_costs_exit_code_1(capsys):
    assert check.main([*SMALL, "--quick", "--processes", "2", "--timeout", "0.5"]) == 1
    assert "was not done after 0.5 s" in capsys.readouterr().err


def _rank_that_dies(rank):
    if rank.rank == 1:
        os._exit(9)
    torch.distributed.barrier()


def test_a_rank_that_dies_without_a_word_is_named():
    with pytest.raises(check_spawn.RingFailure, match="rank 1 of 2.* exit code 9|rank 0 of 2"):
        check_spawn.run_ranks(_rank_that_dies, 2, device_type="cpu", timeout_s=100)


def test_training_equivalence_of_two_ranks_prints_every_kind_of_parameter_also_of_mixed_and_sharded_ones(capsys, tmp_path):
    assert check.main(["--train", "--processes", "2", "--device", "cpu", "--json", str(tmp_path / "t.json")]) == 0
    out = capsys.readouterr().out
    assert "gradient norm" in out and "attention.wq" in out and "quantities within budget" in out
    plain, mixed, sharded = json.loads((tmp_path / "t.json").read_text())["train"]
    assert all(model["cp"] == 2 and model["ok"] for model in (plain, mixed, sharded))
    assert "global" in mixed["model"] and "sharded" in sharded["model"]
    names = {row["name"] for row in mixed["rows"]} - {row["name"] for row in plain["rows"]}
    assert names == {f"{what} layers.{layer}.attention.sinks" for what in ("gradient of", "weight") for layer in (0, 1)}


def test_the_file_runs_as_a_script_from_anywhere_without_hydra(tmp_path):
    code = ("import runpy, sys; sys.argv = ['check.py', '--quick', '--device', 'cpu', '--kernels', 'cpu', '--masks', 'causal', "
            f"'--dtypes', 'fp32', '--seq-lens', '9', '--ratios', '1', '--cp-sizes', '2'];\n"
            f"try: runpy.run_path({str(ROOT / 'launch' / 'check.py')!r}, run_name='__main__')\n"
            "except SystemExit as left: assert left.code == 0, left.code\n"
            "assert 'hydra' not in sys.modules and 'omegaconf' not in sys.modules")
    # The folder of the script comes first on the path, as python puts it there.
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'launch')!r}); {code}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "cells within budget" in done.stdout


@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
def test_sampled_rows_of_a_long_sequence_are_within_budget_and_one_wrong_row_at_the_end_is_seen(tensor):
    problem = check_scale.Problem.random(700, 4, 2, 16, torch.float32, torch.device("cpu"))
    result = problem.run(2, "zigzag", "cpu")
    ratios = check_scale.sampled_ratios(problem, result)
    assert set(ratios) == {"out", "lse", "dq", "dk", "dv"} and all(0 < ratio <= 1 for ratio in ratios.values())
    result[tensor].select(2 if tensor == "lse" else 1, 690).mul_(1.01)
    wrong = check_scale.sampled_ratios(problem, result)
    assert [name for name in wrong if wrong[name] > 1] == [tensor]
