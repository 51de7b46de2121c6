"""The rendezvous simulator passes every plan, and catches what a buffering carrier would hide."""
import copy
from dataclasses import replace

import pytest

from ringflash import Layout, Mask
from ringflash.layout import KINDS
from ringflash.ring import simulator
from ringflash.ring.plan import PASSES, build_plan
from ringflash.ring.simulator import Batch, RendezvousError, rendezvous, schedule_of
from ringflash.tests.support.plan_cases import SIZES, cases

everywhere = pytest.mark.parametrize(("kind", "cp_size"), [(kind, size) for kind in KINDS for size in SIZES])
rings = pytest.mark.parametrize(("kind", "cp_size"), [(kind, size) for kind in KINDS for size in (2, 3, 4, 8)])


def a_plan(kind, cp_size, **options):
    return build_plan(Mask(**options), Layout(kind, 5 * cp_size + 3, cp_size))


def edited(schedule, rank, step, *, sends=None, recvs=None):
    """The schedule with the batch of one rank and step mapped, made where there was none, dropped where it becomes empty."""
    batches = {batch.step: batch for batch in schedule[rank]}
    batch = batches.get(step, Batch(step, (), ()))
    batches[step] = Batch(step, *(change(old) if change else old for change, old in ((sends, batch.sends), (recvs, batch.recvs))))
    kept = [batches[s] for s in sorted(batches) if batches[s].sends or batches[s].recvs]
    return [kept if r == rank else of_rank for r, of_rank in enumerate(schedule)]


def without(message):
    return lambda posted: tuple(m for m in posted if m != message)


def one_step_later(schedule, messages):
    """The schedule in which each message is received one step later than it is sent."""
    for m in messages:
        schedule = edited(schedule, m.dst, m.step, recvs=without(m))
        schedule = edited(schedule, m.dst, m.step + 1, recvs=lambda posted, m=m: tuple(sorted((*posted, m))))
    return schedule


@everywhere
def test_every_plan_completes_without_any_buffering(kind, cp_size):
    for case in cases(kind, cp_size, seed=12):
        for pass_ in PASSES:
            simulator.run(case.plan, pass_)
            assert rendezvous(schedule_of(case.plan, pass_)) == len(case.plan.messages(pass_))


@everywhere
def test_no_rank_posts_an_empty_batch_and_one_batch_a_step(kind, cp_size):
    for case in cases(kind, cp_size, seed=13):
        for pass_ in PASSES:
            for batches in schedule_of(case.plan, pass_):
                assert all(batch.sends or batch.recvs for batch in batches)
                assert [b.step for b in batches] == sorted({b.step for b in batches})


def test_posting_an_empty_batch_is_caught():
    with pytest.raises(RendezvousError, match="rank 1 posts an empty batch in step 0"):
        rendezvous([[], [Batch(0, (), ())]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [4, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_any_receive_posted_one_step_later_is_caught(kind, cp_size, causal):
    plan = a_plan(kind, cp_size, causal=causal)
    for pass_ in PASSES:
        for message in plan.messages(pass_):
            with pytest.raises(RendezvousError, match="deadlock|different steps|wrong pairing|sizes differ"):
                rendezvous(one_step_later(schedule_of(plan, pass_), [message]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [4, 8])
def test_receives_that_every_rank_posts_one_step_later_deadlock(kind, cp_size):
    plan = a_plan(kind, cp_size, causal=False)
    with pytest.raises(RendezvousError, match="deadlock: rank 0 waits in step 0 to"):
        rendezvous(one_step_later(schedule_of(plan, "forward"), plan.messages("forward")))
    home = [m for m in plan.messages("backward") if m.is_home]
    with pytest.raises(RendezvousError, match="deadlock"):
        rendezvous(one_step_later(schedule_of(plan, "backward"), home))


@rings
def test_a_message_that_only_one_end_posts_is_caught(kind, cp_size):
    plan = a_plan(kind, cp_size)
    for pass_ in PASSES:
        schedule = schedule_of(plan, pass_)
        for m in plan.messages(pass_)[:: max(1, cp_size // 2)]:
            with pytest.raises(RendezvousError):
                rendezvous(edited(schedule, m.src, m.step, sends=without(m)))
            with pytest.raises(RendezvousError):
                rendezvous(edited(schedule, m.dst, m.step, recvs=without(m)))


@rings
def test_a_message_that_neither_end_posts_is_caught_by_following_the_rows(kind, cp_size):
    plan = a_plan(kind, cp_size)
    for pass_ in PASSES:
        for m in plan.messages(pass_):
            defective = copy.copy(plan)
            for table in ("_sends", "_recvs"):
                setattr(defective, table, {at: without(m)(batch) for at, batch in getattr(plan, table).items()})
            rendezvous(schedule_of(defective, pass_))
            with pytest.raises(RendezvousError):
                simulator.run(defective, pass_)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [3, 4, 8])
def test_swapped_neighbours_are_caught(kind, cp_size):
    plan = a_plan(kind, cp_size, causal=False)

    def to_the_other_side(posted):
        return tuple(replace(m, dst=(2 * m.src - m.dst) % cp_size) for m in posted)

    with pytest.raises(RendezvousError):
        rendezvous(edited(schedule_of(plan, "forward"), 1, 0, sends=to_the_other_side))
    with pytest.raises(RendezvousError):
        schedule = schedule_of(plan, "forward")
        rendezvous([[Batch(b.step, to_the_other_side(b.sends), b.recvs) for b in of_rank] for of_rank in schedule])


@rings
def test_a_smaller_receive_is_caught(kind, cp_size):
    plan = a_plan(kind, cp_size)

    def shorter(posted):
        (start, stop), *rest = posted[0].rows
        return (replace(posted[0], rows=((start, stop - 1), *rest)), *posted[1:])

    for m in plan.messages("forward"):
        with pytest.raises(RendezvousError, match="sizes differ"):
            rendezvous(edited(schedule_of(plan, "forward"), m.dst, m.step, recvs=shorter))


def test_rows_of_another_block_of_the_same_size_are_caught():
    plan = a_plan("zigzag", 4, causal=False)
    m = plan.recvs(2, 1, "forward")[0]
    other = edited(schedule_of(plan, "forward"), 2, 1, recvs=lambda posted: (replace(m, owner=(m.owner + 1) % 4),))
    with pytest.raises(RendezvousError, match="wrong pairing|sizes differ"):
        rendezvous(other)


def test_two_messages_of_one_pair_posted_in_another_order_at_one_end_are_caught():
    layout = Layout("zigzag", 64, 4)
    plan = build_plan(Mask(window_size=(20, 0)), layout)
    pairs = [(rank, step) for step in range(plan.num_backward_steps) for rank in range(4)
             if len({m.src for m in plan.recvs(rank, step, "backward")}) < len(plan.recvs(rank, step, "backward"))]
    assert pairs  # keys and gradients travel between the same two ranks in one step
    rank, step = pairs[0]
    with pytest.raises(RendezvousError, match="wrong pairing|sizes differ"):
        rendezvous(edited(schedule_of(plan, "backward"), rank, step, recvs=lambda posted: posted[::-1]))


def test_rows_that_a_sender_does_not_hold_are_caught():
    plan = a_plan("zigzag", 4)
    m = next(m for m in plan.messages("forward") if m.step == 1)
    more = replace(m, rows=((0, plan.layout_k.shard_len(m.owner) + 1),))
    defective = copy.copy(plan)
    for table in ("_sends", "_recvs"):
        changed = {at: tuple(more if x == m else x for x in batch) for at, batch in getattr(plan, table).items()}
        setattr(defective, table, changed)
    with pytest.raises(RendezvousError, match="not held by its sender"):
        simulator.run(defective, "forward")
