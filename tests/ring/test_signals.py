"""Signals of the copy engines: no order of queues overwrites, tears or reads a stale block; each part of the protocol is needed."""
import pytest

from ringflash import Layout, Mask
from ringflash.layout import KINDS
from ringflash.ring import signal_simulator, signals
from ringflash.ring.plan import PASSES, build_plan
from ringflash.ring.signal_simulator import SignalError
from ringflash.tests.support.plan_cases import cases

rings = pytest.mark.parametrize(("kind", "cp_size"), [(kind, size) for kind in KINDS for size in (2, 3, 4, 8)])
CALLS = ("forward", "forward", "backward", "forward", "backward")


@rings
def test_no_order_of_the_queues_overwrites_or_tears_a_block_over_several_calls(kind, cp_size):
    for case in cases(kind, cp_size, seed=21, lengths=2):
        for seed in range(2):
            pushed = signal_simulator.run(case.plan, CALLS, seed=seed)
            assert pushed == sum(len(case.plan.messages(pass_)) for pass_ in CALLS)


@rings
def test_a_single_queue_per_rank_in_order_of_submission_does_not_deadlock(kind, cp_size):
    for case in cases(kind, cp_size, seed=22, lengths=2):
        signal_simulator.run(case.plan, CALLS, seed=3, merged=True)


@pytest.mark.parametrize("rotates", ["kv", "q"])
@pytest.mark.parametrize("routing", ["ring", "direct", "allgather"])
def test_every_routing_and_either_side_that_rotates_is_sound(routing, rotates):
    for cp_size in (2, 3, 4, 8):
        for mask in (Mask(), Mask(causal=False), Mask(window_size=(3, 0))):
            plan = build_plan(mask, Layout("zigzag", 5 * cp_size + 3, cp_size), routing=routing, rotates=rotates)
            for seed, merged in ((0, False), (1, False), (2, True)):
                signal_simulator.run(plan, PASSES * 2, seed=seed, merged=merged)


@pytest.mark.parametrize("part", signal_simulator.PARTS)
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_without_any_one_part_of_the_protocol_some_order_breaks_a_block(part, cp_size):
    plan = build_plan(Mask(causal=False), Layout("contiguous", 4 * cp_size, cp_size))
    caught = 0
    for seed in range(40):
        try:
            signal_simulator.run(plan, ("forward", "backward") * 3, seed=seed, without=part)
        except SignalError as error:
            assert "deadlock" not in str(error)
            caught += 1
    assert caught > 0


def test_the_simulator_refuses_a_part_that_it_does_not_know():
    with pytest.raises(ValueError, match="without='luck'.*free, arrived, order"):
        signal_simulator.run(build_plan(Mask(), Layout("zigzag", 8, 2)), without="luck")


@rings
def test_both_ends_count_alike_and_counts_only_grow(kind, cp_size):
    for case in cases(kind, cp_size, seed=23, lengths=2):
        ledgers = [signals.Ledger() for _ in range(cp_size)]
        last: dict = {}
        for pass_ in PASSES * 2:
            for step in range(case.plan.num_backward_steps):
                booked = [ledger.book(case.plan.sends(rank, step, pass_), case.plan.recvs(rank, step, pass_))
                          for rank, ledger in enumerate(ledgers)]
                pushed = {(rank, push.peer): (push.value, len(push.messages))
                          for rank, b in enumerate(booked) for push in b.pushes}
                for what in ("free", "arrivals"):
                    told = {(peer, rank): value for rank, b in enumerate(booked) for peer, value in getattr(b, what)}
                    assert told == {pair: value for pair, (value, _) in pushed.items()}
                for pair, (value, count) in pushed.items():
                    assert value == last.get(pair, 0) + count
                    last[pair] = value


@rings
def test_landing_buffers_are_the_same_on_all_ranks_hold_every_message_and_do_not_overlap(kind, cp_size):
    row_bytes = {"kv": 48, "dkv": 96}
    for case in cases(kind, cp_size, seed=24, lengths=2):
        for pass_ in PASSES:
            landing = signals.landing_of(case.plan, pass_)
            offsets, end = landing.offsets(signals.words_bytes(cp_size), row_bytes)
            assert set(landing.slot_of) == set(case.plan.messages(pass_))
            places = sorted((start, start + landing.rows[slot] * row_bytes["kv" if slot[0] == "kv" else "dkv"])
                            for slot, start in offsets.items())
            assert all(start % signals.ALIGNMENT == 0 and start >= signals.words_bytes(cp_size) for start, _ in places)
            assert all(stop <= after for (_, stop), (after, _) in zip(places, places[1:]))
            assert not places or places[-1][1] == end
            for message, slot in landing.slot_of.items():
                assert message.num_rows <= landing.rows[slot]
            for step in range(case.plan.num_backward_steps):
                for rank in range(cp_size):
                    taken = [landing.slot_of[m] for m in case.plan.recvs(rank, step, pass_)]
                    assert len(taken) == len(set(taken))


def test_words_of_different_peers_and_meanings_are_apart():
    for cp_size in (2, 8, 72):
        words = [of(peer) for of in (signals.arrived_offset, signals.free_offset) for peer in range(cp_size)]
        assert len(set(words)) == 2 * cp_size and all(word % 4 == 0 for word in words)
        assert max(words) + 4 <= signals.words_bytes(cp_size)
