"""Planted defects: each must be caught by the same check that the ring passes."""
import math

import pytest
import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.ring.loopback import Loopback, drive_all
from ringflash.ring.message import Message
from ringflash.ring.plan import build_plan
from ringflash.simulation import SimulatedRing
from ringflash.tests.support.ring_cases import judge, make_inputs


class _Backend:
    """The reference kernel with a mistake in one place."""

    def __init__(self, **replaced):
        self._replaced = replaced

    def __getattr__(self, name):
        found = dispatch.select("reference", device="cpu", dtype=torch.float32, head_dim=8)
        return self._replaced.get(name, getattr(found, name))


class _Plan:
    """A plan without one visit."""

    def __init__(self, plan, rank, step):
        self._plan, self._missing = plan, (rank, step)

    def __getattr__(self, name):
        return getattr(self._plan, name)

    def visits(self, rank, step):
        return () if (rank, step) == self._missing else self._plan.visits(rank, step)


class _SwappedNeighbours(Loopback):
    """K and V come from the wrong side: what rank r sends up arrives at the rank below."""

    def deliver(self, message, source, target):
        other = next((m for m in self._sends if m != message and m.step == message.step and m.kind == message.kind == "kv"
                      and self._sends[m].shape == target.shape), None)
        super().deliver(message, source if other is None else self._sends[other], target)


class _FirstBlockReused(Loopback):
    """The backward keeps the K and V of hop 0: later hops bring nothing."""

    def __init__(self, pass_):
        super().__init__(pass_)
        self._first = {}

    def deliver(self, message, source, target):
        if self.pass_ == "backward" and message.kind == "kv":
            source = self._first.setdefault((message.dst, source.shape), source.clone())
        super().deliver(message, source, target)


class _RoundedGradients(Loopback):
    """dK and dV travel in bf16."""

    def deliver(self, message, source, target):
        super().deliver(message, source.bfloat16().float() if message.kind == "dkv" else source, target)


def _wrong_base(dout, q, k, v, lse, *rest, **options):
    found = dispatch.select("reference", device="cpu", dtype=torch.float32, head_dim=8)
    found.backward(dout, q, k, v, lse / math.log(2), *rest, **options)


def _failed(cp_size, *, plan=None, backend=None, loopback=Loopback):
    inputs = make_inputs(30)
    layout = Layout("zigzag", 30, cp_size)
    real = build_plan(Mask(), layout)
    ring = SimulatedRing(real if plan is None else plan(real), layout, layout, backend or _Backend(), 8 ** -0.5,
                         loopback=loopback)
    out, lse = ring.forward(inputs.q, inputs.k, inputs.v)
    grads = ring.backward(inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse)
    ours = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads))}
    return {verdict.name for verdict in judge(ours, inputs)}


@pytest.mark.parametrize("cp_size", (3, 4))
def test_planted_defects_are_caught(cp_size):
    assert _failed(cp_size) == set()
    assert {"out", "lse"} <= _failed(cp_size, plan=lambda plan: _Plan(plan, rank=0, step=1))
    assert {"dq", "dk", "dv"} <= _failed(cp_size, backend=_Backend(backward=_wrong_base))
    assert {"out", "lse", "dq"} <= _failed(cp_size, loopback=_SwappedNeighbours)
    reused = _failed(cp_size, loopback=_FirstBlockReused)
    assert {"dq", "dk"} <= reused and not {"out", "lse"} & reused
    assert {"dk", "dv"} <= _failed(cp_size, loopback=_RoundedGradients)


def test_a_receive_posted_one_step_late_is_a_deadlock_also_in_one_process():
    up, down = Message(0, "kv", 0, 1, 0, 1, ((0, 1),)), Message(0, "kv", 1, 0, 1, 1, ((0, 1),))
    shared = Loopback("forward")

    def rank(carrier, batches):
        for step, (sends, recvs) in enumerate(batches):
            pending = carrier.post(step, [(m, torch.zeros(1)) for m in sends], [(m, torch.zeros(1)) for m in recvs])
            yield pending

    first = rank(shared.carrier(0), [([up], []), ([], [down])])
    second = rank(shared.carrier(1), [([down], []), ([], [up])])
    with pytest.raises(RuntimeError, match="deadlock: rank 0 at step 0, rank 1 at step 0"):
        drive_all([first, second])
