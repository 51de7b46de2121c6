"""The cost model: its bytes and pairs are the plans', its verdicts follow its rates, and it says what it rests on."""
import dataclasses
from collections import defaultdict

import pytest
import torch

from ringflash import Layout, Mask, simulate
from ringflash.ring import cost, head_exchange
from ringflash.ring.cost import Machine, compare, estimate
from ringflash.ring.heads import HeadSplit
from ringflash.ring.plan import build_plan
from ringflash.ring.rotate import Heads, backward_bytes
from ringflash.tests.support.ring_cases import make_inputs, run

HEADS = Heads(1, 32, 8, 128, itemsize=2)
FREE = Machine(inside_gb_s=1e12, alltoall_gb_s=1e12, across_gb_s=1e12, exchange_us=0.0, visit_us=0.0)


def named(estimates):
    return {each.name: each for each in estimates}


def test_with_free_exchanges_every_way_costs_its_kernels_and_these_are_the_pairs_over_the_rate():
    found = compare(Mask(), 65536, 8, HEADS, machine=FREE)
    pairs = 65536 * 65537 / 2 / 8
    for each in found:
        assert each.forward.total_ms == pytest.approx(pairs * 4 * 128 * 32 / (547 * 1e9), rel=0.01), each.name
        assert each.backward.total_ms == pytest.approx(pairs * 10 * 128 * 32 / (426 * 1e9), rel=0.01), each.name
        assert each.forward.slow_steps == each.backward.slow_steps == 0
    assert {each.name for each in found} == {
        "ring 8", "all-gather 8", "ring 4 x ulysses 2", "all-gather 4 x ulysses 2", "ring 2 x ulysses 4", "all-gather 2 x ulysses 4",
        "ulysses 8"}


@pytest.mark.parametrize("routing", ("ring", "allgather"))
def test_bytes_of_a_ring_are_those_of_its_busiest_rank_in_the_plan(routing):
    layout = Layout("contiguous", 4096, 4)
    plan = build_plan(Mask(), layout, routing=routing)
    found = estimate(plan, layout, HEADS, Machine())
    # A rank counts what it sends or what it receives, step by step, whichever is more.
    least = max(plan.rows_sent("forward", rank=rank) for rank in range(4)) * HEADS.row_bytes["kv"]
    assert least <= found.forward.sent_gb * 1e9 <= 1.5 * least
    assert found.backward.sent_gb * 1e9 >= max(backward_bytes(plan, HEADS, rank) for rank in range(4))


@pytest.mark.parametrize("heads, kv_heads, degree", ((8, 8, 2), (8, 2, 4), (8, 2, 2), (12, 3, 4), (4, 1, 4), (12, 3, 2)))
def test_bytes_of_the_all_to_alls_are_those_of_a_run(heads, kv_heads, degree, monkeypatch):
    sent = defaultdict(lambda: defaultdict(int))            # rank -> number of the all-to-all -> bytes to others
    plain = head_exchange.LoopbackHeads.post

    def post(self, number, rank, *posted):
        sent[rank][number + 2 * (number in sent[rank])] += 8 * (sum(posted[1]) - posted[1][rank])
        return plain(self, number, rank, *posted)

    monkeypatch.setattr(head_exchange.LoopbackHeads, "post", post)
    rows, inputs = 32, make_inputs(32 * degree, heads=heads, kv_heads=kv_heads, head_dim=16, dtype=torch.bfloat16)
    run(simulate, inputs, cp_size=1, layout=Layout("zigzag", 32 * degree, 1, ulysses_size=degree), with_dlse=False)
    before, after = cost._alltoall_bytes(HeadSplit(heads, kv_heads, degree), Heads(1, heads, kv_heads, 16, 2))
    expected = [before["forward"], after["forward"], before["backward"], after["backward"]]
    assert [max(of_rank[i] for of_rank in sent.values()) / rows for i in range(4)] == expected


def test_short_sequences_favour_few_exchanges_and_long_ones_the_ring():
    short, long = (named(compare(Mask(), n, 8, HEADS)) for n in (2048, 1 << 20))
    assert max(short[name].total_ms for name in ("ulysses 8", "all-gather 8")) < short["ring 8"].total_ms
    assert long["ring 8"].total_ms < long["ulysses 8"].total_ms and long["ring 8"].why == "all messages hide behind kernels"
    assert long["ring 8"].total_ms < 1.001 * min(way.total_ms for way in long.values())  # all-gather saves six launches


def test_ulysses_across_hosts_pays_for_the_slow_link_and_a_ring_hides_it():
    machine = Machine(ranks_per_host=4, across_gb_s=5.0)
    found = named(compare(Mask(), 262144, 8, HEADS, machine=machine))
    inside, across = found["ring 2 x ulysses 4"], found["ulysses 8"]
    assert across.forward.alltoall_ms > 5 * inside.forward.alltoall_ms
    near = dataclasses.replace(machine, ranks_per_host=8)
    assert named(compare(Mask(), 262144, 8, HEADS, machine=near))["ulysses 8"].total_ms < across.total_ms
    assert found["ring 8"].backward.exposed_ms < found["all-gather 8"].backward.exposed_ms


def test_all_gather_holds_every_block_and_a_ring_two():
    found = named(compare(Mask(causal=False), 8192, 8, HEADS))
    block = 1024 * HEADS.row_bytes["kv"] / 1e9
    assert found["ring 8"].held_gb == pytest.approx(2 * block) and found["all-gather 8"].held_gb == pytest.approx(7 * block)


def test_replicated_kv_heads_are_counted_and_named():
    found = named(compare(Mask(), 8192, 8, Heads(1, 16, 2, 64, 2)))
    assert found["ulysses 8"].kv_repeats == 4 and "KV heads 4x" in found["ulysses 8"].why
    assert found["ring 4 x ulysses 2"].kv_repeats == 1


def test_degrees_that_do_not_divide_the_heads_or_the_ranks_are_left_out():
    assert {(each.ring, each.ulysses) for each in compare(Mask(), 600, 6, Heads(1, 4, 2, 64, 2))} == {(6, 1), (3, 2)}
    assert [each.name for each in compare(Mask(), 600, 1, HEADS)] == ["one rank"]


def test_the_command_prints_its_reasons_and_what_is_assumed_and_what_was_given(capsys):
    assert cost.main(["--seq-len", "8192", "--ranks", "4", "--heads", "8", "2", "64", "--across-gb-s", "20", "--layout", "balanced",
                      "--documents", "lognormal:sigma=1.0,seed=0"]) == 0
    printed = capsys.readouterr().out
    assert "cheapest: " in printed and "next: " in printed and "behind no kernel" in printed
    assert "across_gb_s = 20  (given)" in printed and "exchange_us = 30  (assumed" in printed
    assert "forward_tflops = 547  (measured: one H200" in printed


@pytest.mark.parametrize("changed, told", (
    (["--ranks", "0"], "ranks=0: must be at least 1"), (["--heads", "8", "3", "64"], "KV heads must divide"),
    (["--inside-gb-s", "0"], "inside_gb_s=0.0: must be above 0"), (["--visit-us", "-1"], "visit_us=-1.0: must be at least 0"),
    (["--documents", "some"], "documents 'some'")))
def test_what_cannot_be_is_refused(changed, told, capsys):
    with pytest.raises(SystemExit):
        cost.main(["--seq-len", "8192", "--ranks", "4", "--heads", "8", "2", "64", *changed])
    assert told in capsys.readouterr().err
