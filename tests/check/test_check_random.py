"""Problems drawn at random hold, every draw can be repeated, all there is to ask for is drawn, and what is wrong is found."""
import collections
import dataclasses
import json

import numpy as np
import pytest
import torch

from ringflash.launch import check, check_problem, check_random
from ringflash.launch.check_judge import Judge
from ringflash.ring import plan as plan_module
from ringflash.tests.support import plan_cases

REFERENCE = dict(kernels=("reference",))


@pytest.mark.parametrize("first", range(10_000, 10_500, 100))
def test_a_hundred_problems_drawn_at_random_are_within_budget_and_their_plans_hold(first):
    held, verdicts = check_random.check(100, first, device="cpu", **REFERENCE)
    assert held and len(verdicts) == 100, [f"{v.cell}: {v.why()}" for v in verdicts if not v.ok][:3]


def test_plans_of_a_thousand_more_cover_each_pair_once_match_at_both_ends_and_send_the_fewest_rows():
    faults = {seed: check_random.plan_fault(check_random.draw(seed, **REFERENCE)) for seed in range(20_000, 21_000)}
    assert not {seed: fault for seed, fault in faults.items() if fault}


def test_a_draw_is_a_function_of_its_seed_and_all_that_can_be_asked_for_is_drawn():
    drawn = [check_random.draw(seed, kernels=("cpu", "reference")) for seed in range(1500)]
    assert drawn == [check_random.draw(seed, kernels=("cpu", "reference")) for seed in range(1500)]
    assert len({cell.problem for cell in drawn}) == 1500
    for axis, values in (("kernel", ("cpu", "reference")), ("dtype", check_random.DTYPES), ("rotate", check_problem.ROTATES),
                         ("routing", check_problem.ROUTINGS), ("cp_size", (1, 2, 3, 4, 5, 8)), ("batch", (1, 2)),
                         ("layout", (*check_problem.LAYOUTS, "balanced", "auto")),
                         ("mask", (*plan_cases.MASKS, *plan_cases.OPTION_MASKS))):
        assert collections.Counter(getattr(cell, axis) for cell in drawn).keys() == set(values), axis
    assert {cell.drawn.ulysses_size for cell in drawn} == {1, 2, 3, 4} and {cell.has_sinks for cell in drawn} == {True, False}
    assert {cell.head_dim_v == cell.head_dim for cell in drawn} == {True, False} and len({cell.softcap for cell in drawn}) == 4
    parts = [cell.make_mask().num_parts for cell in drawn]
    assert parts.count(2) > 200
    lengths = [(cell.seq_len, cell.seq_len_k, cell.cp_size) for cell in drawn]
    assert any(q < k for q, k, _ in lengths) and any(q > k for q, k, _ in lengths) and any(q < w for q, _, w in lengths)
    assert any(cell.make_mask().cu_seqlens_k is not None for cell in drawn)
    documents = [cell.drawn.options for cell in drawn if cell.make_mask().cu_seqlens is not None]
    assert len(documents) > 300 and any(0 in np.diff(dict(options)["cu_seqlens"]) for options in documents)


def test_the_command_prints_its_table_and_one_seed_repeats_one_case(tmp_path, capsys):
    path = tmp_path / "random.json"
    arguments = ["--device", "cpu", "--kernels", "reference", "--json", str(path)]
    assert check.main(["--random", "5", "--seed", "40", *arguments]) == 0
    many = json.loads(path.read_text())["random"]
    assert "seeds 40 to 44" in capsys.readouterr().out and len(many) == 5
    assert check.main(["--random", "1", "--seed", "43", *arguments]) == 0
    (one,) = json.loads(path.read_text())["random"]
    assert {**one, "seconds": 0} == {**many[3], "seconds": 0}
    assert "(--random 1 --seed 43)" in str(check_random.draw(43, **REFERENCE))


def test_a_kernel_that_cannot_run_here_and_a_number_of_none_are_refused(capsys):
    assert check.main(["--random", "3", "--kernels", "hopper", "--device", "cpu"]) == 1
    assert "hopper" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        check.main(["--random", "0"])
    assert left.value.code == 2 and "argument --random: 0: must be" in capsys.readouterr().err


def find(**wanted):
    """The first drawn cell with these attributes, on several ranks, whose plan sends and computes something everywhere."""
    for seed in range(3000):
        cell = check_random.draw(seed, **REFERENCE)
        if cell.cp_size > 2 and cell.seq_len > 24 and all(getattr(cell, name) == value for name, value in wanted.items()):
            return cell
    raise AssertionError(wanted)


CELL = find(mask="causal", layout="zigzag", routing="auto")


def test_a_result_that_is_off_by_little_is_found(monkeypatch):
    plain = check_random.loopback_cell
    assert check_random.judged(Judge("cpu"), CELL, "cpu").ok
    monkeypatch.setattr(check_random, "loopback_cell", lambda cell, device: {
        name: x * 1.05 if name == "dk" else x for name, x in plain(cell, device).items()})
    verdict = check_random.judged(Judge("cpu"), CELL, "cpu")
    assert not verdict.ok and "dk" in verdict.why()


def test_a_plan_that_computes_a_pair_never_or_twice_is_found(monkeypatch):
    visits = plan_module.Plan.visits
    for change, times in ((lambda found: found[:-1], 0), (lambda found: (*found, found[-1]), 2)):
        monkeypatch.setattr(plan_module.Plan, "visits", lambda self, rank, step: change(visits(self, rank, step))
                            if (rank, step) == (2, 0) else visits(self, rank, step))
        assert f"is computed {times} times, want 1" in check_random.plan_fault(CELL)


def test_rows_that_travel_for_nobody_and_batches_that_differ_at_their_ends_are_found(monkeypatch):
    sent = plan_module.Plan.rows_sent
    monkeypatch.setattr(plan_module.Plan, "rows_sent", lambda self, pass_, *rest: sent(self, pass_, *rest) + 1)
    assert "rows travel" in check_random.plan_fault(CELL)
    monkeypatch.setattr(plan_module.Plan, "rows_sent", sent)
    recvs = plan_module.Plan.recvs
    monkeypatch.setattr(plan_module.Plan, "recvs", lambda self, rank, step, pass_: recvs(self, rank, step, pass_)[rank == 0:])
    assert check_random.plan_fault(CELL) is not None


@pytest.mark.parametrize("routing", ["ring", "direct"])
def test_the_fewest_rows_of_a_hand_made_mask_are_counted_by_hand(routing):
    # Three documents of 4 on contiguous ranks of 4 rows: nothing. One document over 12: every rank reads the ones before it.
    cell = dataclasses.replace(CELL, drawn=None, mask="causal", layout="contiguous", cp_size=3, seq_len=12, routing=routing)
    plan = plan_module.build_plan(cell.make_mask(), cell.layouts()["layout"], routing=routing)
    pairs = check_problem.allowed(cell).numpy()
    assert check_random.fewest_rows(plan, pairs) == 4 * 2 + 4 * 1 == plan.rows_sent("forward")
    first_row_of_rank_0 = np.zeros((12, 12), dtype=bool)
    first_row_of_rank_0[11, 0] = True       # its only reader is the last rank: one hop down, directly once
    assert check_random.fewest_rows(plan, first_row_of_rank_0) == 1
    first_row_of_rank_0[5, 0] = True        # and the next rank: two hops up, or one each, so two
    assert check_random.fewest_rows(plan, first_row_of_rank_0) == 2
    assert torch.equal(torch.from_numpy(pairs), torch.ones(12, 12).tril().bool())
