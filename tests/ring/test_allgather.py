"""routing="allgather": all that is read in one exchange, all gradients home in one, and the results of the ring."""
from importlib import import_module

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask, ring_attention, shard, simulate
from ringflash.kernels.intervals import Intervals
from ringflash.ring import show, simulator
from ringflash.ring.exchange import DistributedExchange, record_traffic
from ringflash.ring.gathered import GatheredVisit, visits_of
from ringflash.ring.plan import PASSES, build_plan
from ringflash.ring.rotate import Heads, choose
from ringflash.ring.signals import landing_of
from ringflash.tests.support.distributed import check_ranks
from ringflash.tests.support.ring_cases import LAYOUTS, Inputs, differing, judge, make_inputs, masks, run

SIZES = (1, 2, 3, 4, 8)


def plans(size, seq_len=61):
    for kind in LAYOUTS:
        for name, mask in masks(seq_len).items():
            yield name, build_plan(Mask(**mask), Layout(kind, seq_len, size), routing="allgather")


@pytest.mark.parametrize("size", SIZES)
def test_blocks_travel_in_step_0_and_gradients_in_step_2_and_no_routing_sends_fewer_rows(size):
    for name, plan in plans(size):
        assert plan.num_steps <= 2 and plan.num_backward_steps <= 3
        assert {m.step for m in plan.messages("forward")} <= {0}
        assert {m.step for m in plan.messages("backward") if m.is_gradient} <= {2}
        direct = build_plan(plan.mask, plan.layout, routing="direct")
        for kind in ("kv", "dkv"):
            assert plan.rows_sent("backward", kind) == direct.rows_sent("backward", kind) == plan.rows_by_routing["direct"], name
        for rank in range(size):
            assert len({(visit.owner, visit.lane) for visit in plan.visits(rank, 1)}) == len(plan.recvs(rank, 0, "forward"))


@pytest.mark.parametrize("size", SIZES)
def test_plans_run_without_any_buffering_and_no_two_blocks_share_a_place(size):
    for name, plan in plans(size):
        for each in {id(p): p for p in (plan, build_plan(plan.mask, plan.layout, routing="allgather", rotates="q"))}.values():
            for pass_ in PASSES:
                simulator.run(each, pass_)
                landing_of(each, pass_)                     # raises if two messages of a step met in one buffer


def test_allowed_pairs_are_those_of_the_ring():
    for size in SIZES:
        for name, plan in plans(size):
            ring = build_plan(plan.mask, plan.layout, routing="ring")
            for rank in range(size):
                assert sum(plan.num_pairs(rank, step) for step in range(plan.num_steps)) == sum(
                    ring.num_pairs(rank, step) for step in range(ring.num_steps)), (name, size, rank)


@pytest.mark.parametrize("size", SIZES)
def test_all_that_arrives_is_one_visit_whose_rows_are_sorted_and_whose_pairs_are_those_of_its_blocks(size):
    gathered = 0
    for name, plan in plans(size):
        for rank in range(size):
            blocks, visits = plan.visits(rank, 1) if plan.num_steps > 1 else (), visits_of(plan, rank, 1, "backward")
            assert visits_of(plan, rank, 0, "backward") == plan.visits(rank, 0) and sum(
                int((k_hi - k_lo).sum()) for k_lo, k_hi, *_ in (visit.intervals() for visit in visits)
            ) == sum(block.num_pairs for block in blocks), (name, rank)
            for visit in (visit for visit in visits if isinstance(visit, GatheredVisit)):
                gathered += 1
                assert (np.diff(visit.positions) > 0).all() and visit.num_rows == sum(
                    message.num_rows for message in plan.recvs(rank, 0, "forward"))
                for (owner, _), (((start, stop),), first, end) in visit.places.items():
                    assert np.array_equal(visit.positions[first:end], plan.layout_k.positions(owner)[start:stop])
                k_lo, k_hi, q_lo, q_hi = visit.intervals()
                Intervals.from_host(*map(torch.from_numpy, (k_lo, k_hi, q_lo, q_hi)), "cpu")  # raises unless they fit
                allowed = (np.arange(visit.num_rows) >= k_lo[:, None]) & (np.arange(visit.num_rows) < k_hi[:, None])
                queries = np.arange(len(k_lo))[:, None]
                assert np.array_equal(allowed, (queries >= q_lo) & (queries < q_hi))
    assert bool(gathered) == (size > 1)


@pytest.mark.parametrize("kernel", ("reference", "cpu"))
def test_one_kernel_computes_all_that_arrived_and_its_buffer_is_where_the_messages_came_in(kernel, monkeypatch):
    backend, calls = import_module(f"ringflash.kernels.{kernel}"), []
    forward = backend.forward

    def counted(q, k, v, *arguments, **options):
        calls.append(k)
        return forward(q, k, v, *arguments, **options)

    monkeypatch.setattr(backend, "forward", counted)
    inputs = make_inputs(96, heads=4, kv_heads=2)
    documents = dict(cu_seqlens=(0, 5, 40, 90, 96))
    for layout in ("zigzag", "contiguous"):
        calls.clear()
        whole, ours = (run(simulate, inputs, cp_size=size, layout=layout, routing="allgather", kernel=kernel, **documents)
                       for size in (1, 4))
        assert len(calls) <= 1 + 4 * 2
        for name, value in whole.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_every_mask_layout_and_side_that_rotates_is_within_budget(size):
    for number, (name, mask) in enumerate((name, mask) for name, mask in masks(29).items() for _ in range(3)):
        inputs = make_inputs(29, heads=4, kv_heads=2, head_dim_v=6, sinks=torch.float32, seed=number)
        for rotate in ("kv", "q"):
            ours = run(simulate, inputs, cp_size=size, layout=LAYOUTS[number % 3], routing="allgather", rotate=rotate,
                       kernel="reference", softcap=2.0, **mask)
            assert not judge(ours, inputs, softcap=2.0, **mask), (name, rotate)


def test_masks_of_two_intervals_and_ulysses_ranks_and_other_lengths_of_k_go_too():
    inputs = make_inputs(26, seq_len_k=40, heads=4, kv_heads=1, dtype=torch.float64)
    for mask in (Mask(window_size=(3, 0), first_tokens=2), Mask(prefix_lens=9)):
        whole = run(simulate, inputs, cp_size=1, mask=mask, kernel="reference")
        for degree in (1, 2):
            layout, layout_k = (Layout(kind, n, 3, mask, degree) for kind, n in (("zigzag", 26), ("striped", 40)))
            ours = run(simulate, inputs, cp_size=3, mask=mask, layout=layout, layout_k=layout_k, routing="allgather",
                       kernel="reference")
            for name, value in whole.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11)


def test_the_backward_rotates_as_asked_and_by_the_same_routing():
    plan = build_plan(Mask(), Layout("zigzag", 64, 4), routing="allgather")
    for rotate, heads in (("auto", Heads(1, 8, 8, 64, 2)), ("q", Heads(1, 8, 2, 64, 2))):
        chosen = choose(plan, heads, rotate).plan
        assert (chosen.rotates, chosen.routing, chosen.num_backward_steps) == ("q", "allgather", 3)


def test_show_says_that_it_was_demanded_and_what_a_ring_would_send(tmp_path, capsys):
    plan = build_plan(Mask(window_size=(9, 0)), Layout("zigzag", 64, 4), routing="allgather")
    assert "all that is read in one step, as demanded (neighbour ring: " in show.summary(plan)
    assert show.main(["--seq-len", "64", "--cp-size", "4", "--routing", "allgather", "--png", str(tmp_path / "plan.png")]) == 0
    assert "in 1 step; all that is read in one step, as demanded (neighbour ring: as many bytes)" in capsys.readouterr().out
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_a_lane_is_for_rings_only():
    with pytest.raises(ValueError, match="routing='allgather' with lanes"):
        build_plan(Mask(), Layout("zigzag", 64, 4), routing="allgather", lanes=(1,))


def _in_processes(rank, world_size):
    posts, plain = [], DistributedExchange.post

    def post(self, step, sends, recvs):
        posts.append((self._pass, step, len(sends), len(recvs)))
        return plain(self, step, sends, recvs)

    DistributedExchange.post = post
    for number, (name, mask) in enumerate(masks(29).items()):
        layout = Layout(LAYOUTS[number % 3], 29, world_size, Mask(**mask), group=dist.group.WORLD)
        inputs = make_inputs(29, dtype=torch.bfloat16)
        options = dict(kernel=("reference", "cpu")[number % 2], routing="allgather", rotate=("kv", "q")[number % 2])
        whole = run(simulate, inputs, cp_size=world_size, layout=layout, **options)
        local = Inputs(*(shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)),
                       shard(inputs.dlse, layout, rank=rank, dim=2))
        posts.clear()
        with record_traffic() as log:
            ours = run(ring_attention, local, layout=layout, group=dist.group.WORLD, **options)
        assert not differing(ours, {key: shard(x, layout, rank=rank, dim=2 if key == "lse" else 1) for key, x in whole.items()})
        assert {step for _, step, sends, recvs in posts if sends or recvs} <= {0, 2}
        plan = build_plan(Mask(**mask), layout, routing="allgather")
        assert [p.message for p in log if p.pass_ == "forward"] == [m for m in plan.messages("forward") if m.src == rank]
    return True


def test_processes_equal_one_process_bitwise_in_two_exchanges():
    assert check_ranks(_in_processes, 4, timeout_s=100) == [True] * 4
