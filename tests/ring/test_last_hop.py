"""A rank's later own keys wait for the last step of the backward, so that its last hop has a kernel beside it."""
import pytest
import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.ring import loop
from ringflash.ring.plan import build_plan
from ringflash.ring.rotate import choose
from ringflash.ops import heads_of
from ringflash.simulation import SimulatedRing
from ringflash.tests.support.plan_cases import cases
from ringflash.tests.support.ring_cases import make_inputs


class Recorder:
    """Notes what is asked of a backward kernel: (step of the ring, key rows, pairs)."""

    def __init__(self, rank):
        self.plain = dispatch.select("reference", device="cpu", dtype=torch.float32, head_dim=8)
        self.name, self.rank, self.step, self.calls = "recorder", rank, 0, []
        self.delta = self.plain.delta

    def backward(self, dout, q, k, v, lse, delta, intervals, **options):
        self.calls.append((self.step, k.shape[1], int((intervals.host_k_hi.long() - intervals.host_k_lo.long()).sum())))
        for x in (options["dq"], options["dk"], options["dv"]):
            x.zero_()

    def post(self, step, sends, recvs):
        self.step = step

    def receive_buffer(self, message, row_shape, dtype):
        return torch.zeros(message.num_rows, *row_shape, dtype=dtype)


def calls_of(plan, rank, layout):
    rows = layout.shard_len(rank)
    q, k = torch.zeros(1, rows, 2, 8), torch.zeros(1, rows, 1, 8)
    lse = torch.zeros(1, 2, rows)
    recorder = Recorder(rank)
    loop.drive(loop.backward(plan, rank, q, None, q, k, k, q, lse, recorder, recorder, softmax_scale=1.0, deterministic=True,
                             gradients=[]))
    return recorder.calls


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_of_a_causal_zigzag_ring_a_quarter_of_the_own_visit_stands_beside_the_last_hop(cp_size):
    layout = Layout("zigzag", 64 * cp_size, cp_size)
    plan = build_plan(Mask(), layout)
    for rank in range(cp_size):
        calls = calls_of(plan, rank, layout)
        own = plan.visits(rank, 0)[0].num_pairs
        last = plan.num_backward_steps - 1
        assert calls[0][:2] == (0, 32) and calls[-1][:2] == (last, 32)
        assert calls[0][2] + calls[-1][2] == own
        assert calls[-1][2] / own == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize(("kind", "cp_size"), [("zigzag", 2), ("contiguous", 3), ("striped", 4), ("zigzag", 1)])
def test_every_pair_is_computed_once_whatever_waits(kind, cp_size):
    for case in cases(kind, cp_size, seed=31, lengths=2):
        for rank in range(cp_size):
            rows = case.layout.shard_len(rank)
            if case.layout != case.layout_k or rows == 0:
                continue
            calls = calls_of(case.plan, rank, case.layout)
            pairs = sum(case.plan.num_pairs(rank, step) for step in range(case.plan.num_steps))
            assert sum(call[2] for call in calls) == pairs
            assert cp_size > 1 or all(step == 0 for step, _, _ in calls)


def test_a_single_row_and_a_rotating_query_side_are_not_divided():
    layout = Layout("contiguous", 2, 2)
    assert all(loop.deferred_rows(build_plan(Mask(causal=False), layout), rank) is None for rank in range(2))
    inputs, layout = make_inputs(16), Layout("zigzag", 16, 2)
    plan = build_plan(Mask(), layout)
    assert loop.deferred_rows(plan, 0) == (4, 8)
    rotated = choose(plan, heads_of(inputs.q, inputs.k, inputs.v), "q").plan
    assert loop.deferred_rows(rotated, 0) is None


@pytest.mark.parametrize(("mask", "kind", "cp_size", "early"), [
    (Mask(), "zigzag", 2, False), (Mask(), "zigzag", 4, True), (Mask(causal=False), "contiguous", 4, False),
    (Mask(cu_seqlens=[0, 5, 11, 24]), "zigzag", 3, None),
    (Mask(first_tokens=2, window_size=(5, 0)), "zigzag", 2, None)], ids=str)
def test_gradients_that_come_home_before_the_own_ones_are_written_are_kept(mask, kind, cp_size, early, monkeypatch):
    """Fresh memory holds NaN here: what nobody wrote may not be added to. early: gradients come home before the last step."""
    def poisoned(*arguments, _empty=torch.empty, **options):
        x = _empty(*arguments, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)
    inputs, layout = make_inputs(24), Layout(kind, 24, cp_size)
    backend = dispatch.select("reference", device="cpu", dtype=torch.float32, head_dim=inputs.q.shape[3])
    plan = build_plan(mask, layout)
    assert early is None or any(loop.comes_home_early(plan, rank) for rank in range(cp_size)) == early
    found = []
    for one in (layout, Layout("contiguous", 24, 1)):
        ring = SimulatedRing(build_plan(mask, one), one, one, backend, 0.3, deterministic=True)
        out, lse = ring.forward(inputs.q, inputs.k, inputs.v)
        found.append(ring.backward(inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse))
    for ours, alone in zip(*found):
        assert torch.allclose(ours, alone, atol=1e-5)
