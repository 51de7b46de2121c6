"""What a plan moves: only needed rows, held by their sender, each gradient home exactly once."""
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ringflash import Layout, Mask
from ringflash.layout import KINDS
from ringflash.ring import routes
from ringflash.ring.plan import PASSES, build_plan
from ringflash.ring.ranges import row_index
from ringflash.ring.show import evenness
from ringflash.tests.support.plan_cases import SIZES, PlanCase, cases

everywhere = pytest.mark.parametrize(("kind", "cp_size"), [(kind, size) for kind in KINDS for size in SIZES])


def steps_of(plan, pass_):
    return range(plan.num_steps if pass_ == "forward" else plan.num_backward_steps)


@everywhere
def test_both_ends_derive_the_same_sorted_batches_and_together_they_are_all_messages(kind, cp_size):
    for case in cases(kind, cp_size, seed=6):
        for pass_ in PASSES:
            everything = Counter()
            for step in steps_of(case.plan, pass_):
                for rank in range(cp_size):
                    sends, recvs = (of(rank, step, pass_) for of in (case.plan.sends, case.plan.recvs))
                    assert list(sends) == sorted(sends) and list(recvs) == sorted(recvs)
                    assert all(m.src == rank and m.step == step for m in sends)
                    assert all(m.dst == rank and m.step == step for m in recvs)
                    everything.update(sends)
                    for peer in range(cp_size):
                        received = case.plan.recvs(peer, step, pass_)
                        assert [m for m in sends if m.dst == peer] == [m for m in received if m.src == rank]
            messages = case.plan.messages(pass_)
            assert everything == Counter(messages) and list(messages) == sorted(messages)
            assert all(count == 1 for count in everything.values())
            assert all(m.src != m.dst and m.num_rows > 0 for m in messages)


@everywhere
def test_steps_end_with_the_last_work_and_the_backward_has_one_more_where_gradients_travel(kind, cp_size):
    for case in cases(kind, cp_size, seed=7):
        plan = case.plan
        assert any(plan.visits(rank, plan.num_steps - 1) for rank in range(cp_size))
        assert plan.num_backward_steps == plan.num_steps + (plan.num_steps > 1)
        for pass_ in PASSES:
            assert all(m.step < steps_of(plan, pass_)[-1] + 1 for m in plan.messages(pass_))
        last = {m.step for m in plan.messages("backward") if m.is_home}
        assert not last or max(last) == plan.num_backward_steps - 1


@everywhere
def test_keys_are_held_by_their_sender_and_every_row_a_visit_reads_has_arrived(kind, cp_size):
    for case in cases(kind, cp_size, seed=8):
        positions = [case.layout_k.positions(rank) for rank in range(cp_size)]
        own = {(rank, rank, 0): positions[rank] for rank in range(cp_size)}
        held = dict(own)  # (rank, owner, lane) -> positions of k, v
        for step in range(case.plan.num_steps):
            for rank in range(cp_size):
                for visit in case.plan.visits(rank, step):
                    expected = positions[visit.owner][row_index(visit.rows)]
                    assert np.array_equal(held[rank, visit.owner, visit.lane], expected), (case, visit)
            arriving = {}
            for m in (m for m in case.plan.messages("forward") if m.step == step):
                rows = positions[m.owner][row_index(m.rows)]
                assert np.isin(rows, (held | own)[m.src, m.owner, 0 if m.src == m.owner else m.lane]).all(), (case, m)
                hops = m.lane - (case.plan.routing == "allgather")
                assert m.src == m.owner if m.lane == 0 else (m.dst - m.src) % cp_size == hops % cp_size
                assert (m.lane == 0) == (case.plan.routing == "direct")
                assert (m.dst, m.owner, m.lane) not in arriving
                arriving[m.dst, m.owner, m.lane] = rows
            held = arriving | own
        assert held == own


@everywhere
def test_no_row_of_a_ring_travels_further_than_its_last_reader_on_the_shorter_way(kind, cp_size):
    for case in (replace(case, routing="ring") for case in cases(kind, cp_size, seed=9)):
        fewest = 0
        for owner in range(cp_size):
            reads = np.stack([case.pairs_of(rank, owner).any(axis=0) for rank in range(cp_size)])
            hops = {lane: (np.arange(cp_size) - owner) * lane % cp_size for lane in (1, -1)}
            last = {lane: (reads * hops[lane][:, None]).max(axis=0, initial=0) for lane in (1, -1)}
            fewest += int(np.minimum(last[1], last[-1]).sum())
            for m in (m for m in case.plan.messages("forward") if m.owner == owner):
                assert (last[m.lane][row_index(m.rows)] >= hops[m.lane][m.dst]).all(), (case, m)
        assert case.plan.rows_sent("forward") == fewest == case.plan.rows_by_routing["ring"], case


def fewest_rows(case):
    """The sum over readers of the rows that they need of others."""
    pairs = [(rank, owner) for rank in range(case.layout.cp_size) for owner in range(case.layout.cp_size) if rank != owner]
    return sum(int(case.pairs_of(rank, owner).any(axis=0).sum()) for rank, owner in pairs)


@everywhere
def test_direct_messages_hold_exactly_the_rows_that_their_reader_needs_each_way(kind, cp_size):
    for case in (replace(case, routing="direct") for case in cases(kind, cp_size, seed=15)):
        plan = case.plan
        keys = [m for m in plan.messages("backward") if m.kind == "kv"]
        assert plan.messages("forward") == tuple(keys) and plan.rows_sent("forward") == fewest_rows(case)
        assert len({(m.src, m.dst) for m in keys}) == len(keys)
        for m in keys:
            needed = np.flatnonzero(case.pairs_of(m.dst, m.src).any(axis=0))
            assert m.owner == m.src and np.array_equal(row_index(m.rows), needed), (case, m)
        back = {(m.step - 2, m.dst, m.src, m.rows) for m in plan.messages("backward") if m.kind == "dkv"}
        assert back == {(m.step, m.src, m.dst, m.rows) for m in keys}
        for end in ("src", "dst"):  # one block to send and one to receive in a step
            assert len({(m.step, getattr(m, end)) for m in keys}) == len(keys)


@everywhere
def test_the_plan_is_direct_where_that_sends_clearly_fewer_rows_and_no_step_is_without_work(kind, cp_size):
    for case in (replace(case, routing="auto") for case in cases(kind, cp_size, seed=16)):
        plan, ring = case.plan, replace(case, routing="ring").plan
        rows = {routing: replace(case, routing=routing).plan.rows_sent("forward") for routing in ("direct", "ring")}
        assert plan.rows_by_routing == rows and rows["direct"] == fewest_rows(case) <= rows["ring"]
        is_idle = not all(any(ring.visits(rank, step) for rank in range(cp_size)) for step in range(ring.num_steps))
        if plan.routing == "allgather":
            assert rows["direct"] <= (cp_size - 1) * case.layout_k.seq_len / 3 and plan.num_steps == 2, case
            continue
        assert plan.routing == ("direct" if rows["direct"] < 0.9 * rows["ring"] or is_idle else "ring"), case
        assert all(any(plan.num_pairs(rank, step) for rank in range(cp_size)) for step in range(1, plan.num_steps))


@pytest.mark.parametrize("kind", ("contiguous", "zigzag"))
def test_a_dense_mask_or_a_window_sends_as_much_either_way_and_keeps_to_the_ring(kind):
    several = (
        dict(), dict(causal=False), dict(window_size=(60, 0)), dict(prefix_lens=300), dict(window_size=(9, 0), first_tokens=4))
    for options in several:
        plan = build_plan(Mask(**options), Layout(kind, 1024, 8))
        of_several = "first_tokens" in options and kind == "zigzag"  # the first rank and both neighbours: little of each
        assert plan.routing == ("allgather" if of_several else "ring"), options
        assert plan.rows_by_routing["ring"] == plan.rows_by_routing["direct"] > 0, options


def test_what_is_read_is_there_at_once_where_it_is_little_of_several_blocks():
    few = dict(cu_seqlens=(0, 300, 1024), chunk_size=64)
    for size, kind, options, routing in (
            (8, "zigzag", dict(window_size=(100, 0)), "allgather"),  # 64 rows a chunk: the two before each
            (8, "zigzag", dict(window_size=(9, 0)), "ring"), (8, "contiguous", dict(window_size=(9, 0)), "ring"),  # neighbours alone
            (8, "striped", few, "ring"), (8, "zigzag", dict(), "ring"), (2, "zigzag", dict(window_size=(100, 0)), "ring")):
        plan = build_plan(Mask(**options), Layout(kind, 1024, size))
        assert (plan.routing, plan.reason == "little is read") == (routing, routing == "allgather"), (size, kind, options)


def test_documents_whose_pieces_lie_far_apart_are_sent_directly():
    # Chunks of 384 rows join six of zigzag's sixteen runs: the last four belong to ranks 3, 2, 1, 0, the middle ones to 5, 6, 7.
    plan = build_plan(Mask(chunk_size=384), Layout("zigzag", 1024, 8))
    assert plan.routing == "direct" and plan.reason == "fewer bytes"
    assert plan.rows_sent("forward") == plan.rows_by_routing["direct"] < 0.9 * plan.rows_by_routing["ring"]


def test_direct_steps_that_nobody_needs_do_not_exist():
    """Ranks 0 and 3 read each other, and so do 1 and 4: one step, although the distances are two, 3 and 5."""
    demands = [routes.demand_of(owner, 8, np.array([reader]), np.array([0]), np.array([4]))
               for owner, reader in ((0, 3), (1, 4), (2, 2), (3, 0), (4, 1), (5, 5), (6, 6), (7, 7))]
    route = routes.Route()
    routes.add_direct(route, demands, 8)
    assert {(m.kind, m.step) for m in route.messages} == {("kv", 0), ("dkv", 2)} and len(route.messages) == 8
    assert sorted((rank, step, owner) for rank, step, owner, _, _ in route.stops) == [(0, 1, 3), (1, 1, 4), (3, 1, 0), (4, 1, 1)]


@everywhere
def test_each_contribution_to_a_gradient_comes_home_exactly_once(kind, cp_size):
    """The backward with counters for gradients: row j's is int64 [cp_size], the pairs that each rank computed with it."""
    for case in cases(kind, cp_size, seed=10):
        plan = case.plan
        shard = [case.layout_k.shard_len(rank) for rank in range(cp_size)]
        home = [np.zeros((n, cp_size), dtype=np.int64) for n in shard]
        partial, arrived = {}, {}  # (rank, owner, lane) -> int64 [rows of the whole shard, cp_size]
        for step in range(plan.num_backward_steps):
            owed = {at: partial.get(at, 0) + arrived.get(at, 0) for at in partial.keys() | arrived.keys()}
            partial, arrived = {}, {}
            for m in (m for m in plan.messages("backward") if m.step == step and m.kind == "dkv"):
                rows = row_index(m.rows)
                sent = np.zeros((shard[m.owner], cp_size), dtype=np.int64)
                at = (m.src, m.owner, m.lane)
                if at in owed:
                    sent[rows] = owed[at][rows]
                    owed[at][rows] = 0
                if m.is_home:
                    assert sent[rows].any(axis=1).all(), (case, m)  # a row goes home from a rank that read it
                    home[m.owner] += sent
                else:
                    arrived[m.dst, m.owner, m.lane] = sent
            assert not any(x.any() for x in owed.values()), "a gradient is left behind"
            for visit in (v for rank in range(cp_size) for v in plan.visits(rank, step)):
                written = np.zeros((shard[visit.owner], cp_size), dtype=np.int64)
                _, _, q_lo, q_hi = visit.intervals()
                written[row_index(visit.rows), visit.rank] = q_hi - q_lo
                if visit.is_own:
                    home[visit.rank] += written
                else:
                    at = (visit.rank, visit.owner, visit.lane)
                    partial[at] = partial.get(at, 0) + written  # a block with two visits
        assert not partial and not arrived
        for owner in range(cp_size):
            expected = np.stack([case.pairs_of(rank, owner).sum(axis=0) for rank in range(cp_size)], axis=1)
            assert np.array_equal(home[owner], expected), case


@everywhere
def test_gradients_of_a_ring_go_on_with_the_rows_of_the_keys_and_home_from_the_last_reader(kind, cp_size):
    for case in (replace(case, routing="ring") for case in cases(kind, cp_size, seed=11)):
        keys = [m for m in case.plan.messages("forward")]
        gradients = [m for m in case.plan.messages("backward") if m.kind == "dkv"]
        assert [m for m in case.plan.messages("backward") if m.kind == "kv"] == keys
        onward = {(m.step - 1, m.src, m.dst, m.owner, m.lane, m.rows) for m in gradients if not m.is_home}
        assert onward == {(m.step, m.src, m.dst, m.owner, m.lane, m.rows) for m in keys if m.step > 0}
        for owner in range(cp_size):
            home = np.concatenate([np.empty(0, int), *(row_index(m.rows) for m in gradients if m.is_home and m.owner == owner)])
            travelled = np.concatenate([np.empty(0, int), *(row_index(m.rows) for m in keys if m.src == owner == m.owner)])
            assert sorted(home) == sorted(travelled)


@pytest.mark.parametrize(("kind", "mask", "lanes", "fraction"), [
    ("contiguous", Mask(), (1, -1), 0.50),
    ("contiguous", Mask(), (-1,), 0.88),
    ("zigzag", Mask(), (1, -1), 0.75),
    ("zigzag", Mask(), (1,), 0.94),
    ("striped", Mask(), (1, -1), 1.00),
    ("contiguous", Mask(causal=False), (1, -1), 1.00),
    ("contiguous", Mask(window_size=(4096, 0)), (1, -1), 0.03),
    ("zigzag", Mask(window_size=(4096, 0)), (1, -1), 0.06),
])
def test_bytes_are_the_fractions_of_the_full_rotation_that_the_design_promises(kind, mask, lanes, fraction):
    plan = build_plan(mask, Layout(kind, 131072, 8), lanes=lanes)
    assert round(plan.rotation_fraction, 2) == fraction


def test_a_dense_causal_plan_keeps_to_one_direction_and_a_window_on_zigzag_uses_both():
    for kind, lane in (("contiguous", 1), ("zigzag", -1), ("striped", 1)):
        for cp_size in (3, 4, 8):
            assert {m.lane for m in build_plan(Mask(), Layout(kind, 96, cp_size)).messages("backward")} == {lane}
    assert {m.lane for m in build_plan(Mask(window_size=(2, 0)), Layout("zigzag", 96, 4)).messages("forward")} == {1, -1}


def test_a_block_of_zigzag_sheds_its_back_chunk_after_rank_0_and_leaves_a_prefix():
    plan = build_plan(Mask(), Layout("zigzag", 64, 4))
    for m in plan.messages("forward"):
        back_chunk_goes_on = m.dst < m.owner
        assert m.rows == (((0, 16),) if back_chunk_goes_on else ((0, 8),))


def test_zigzag_causal_is_even_in_every_step_and_contiguous_is_not():
    assert max(evenness(build_plan(Mask(), Layout("zigzag", 4096, 8)))) < 1.001
    assert max(evenness(build_plan(Mask(), Layout("striped", 4096, 8)))) < 1.005
    assert evenness(build_plan(Mask(), Layout("contiguous", 4096, 8)))[-1] == 8.0


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_count_kv_heads_once_per_hop_and_gradients_in_their_own_width(kind):
    layout = Layout(kind, 37, 4)
    case = PlanCase((("causal", True),), layout, layout)
    sizes = dict(batch=2, num_kv_heads=3, head_dim=16, itemsize=2)
    keys = sum(m.num_rows for m in case.plan.messages("forward"))
    gradients = sum(m.num_rows for m in case.plan.messages("backward") if m.kind == "dkv")
    assert case.plan.bytes_sent("forward", **sizes) == keys * 2 * 3 * (16 + 16) * 2
    assert case.plan.bytes_sent("backward", **sizes) == 2 * 3 * (16 + 16) * (keys * 2 + gradients * 4)
    assert case.plan.bytes_sent("backward", **sizes, grad_itemsize=8) == 2 * 3 * (16 + 16) * (keys * 2 + gradients * 8)
    by_rank = [case.plan.bytes_sent("backward", **sizes, rank=rank) for rank in range(4)]
    assert sum(by_rank) == case.plan.bytes_sent("backward", **sizes)


def test_one_rank_sends_nothing():
    plan = build_plan(Mask(), Layout("zigzag", 9, 1))
    assert plan.num_steps == plan.num_backward_steps == 1
    assert not plan.messages("forward") and not plan.messages("backward") and plan.rotation_fraction == 0.0
