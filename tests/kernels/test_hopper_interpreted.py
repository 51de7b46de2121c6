"""The `hopper` forward's own code on the CPU, but for what is inline assembly: tables, masks, barriers, stores, against `reference`."""
from __future__ import annotations

import math
import random
import types

import pytest
import torch
from torch import Tensor

from ringflash.kernels import reference
from ringflash.kernels.intervals import Intervals, turns
from ringflash.tests.support.document_rows import documents
from ringflash.tests.support.gluon_interpreter import interpreted, run

INFINITY = float("inf")
CASES = 6


def softmax_module() -> types.ModuleType:
    """hopper_forward_softmax.py in plain terms. A row's reference is [rows, 1], sums and shrink are [rows, 4]: all of it in the
    first of four columns, or the same in all."""
    module = types.ModuleType("hopper_forward_softmax")

    def apply_mask(s, lo, hi, col0, cols):
        keys = col0 + cols
        return torch.where((keys >= lo[:, None]) & (keys < hi[:, None]), s, -INFINITY)

    def parts(p):
        return torch.nn.functional.pad(p.sum(1, keepdim=True), (0, 3))

    def softmax_of_first_tile(s, ref, scale_log2, FOLD):
        top, before = s.amax(1, keepdim=True) * scale_log2, ref[:, None]
        new = torch.where(top == -INFINITY, before, torch.maximum(top, before - 16.0)) if FOLD else top
        finite = torch.where(new == -INFINITY, 0.0, new)
        p, shrink = torch.exp2(s * scale_log2 - finite), torch.exp2(before - finite).expand(-1, 4)
        return p, new, parts(p) + 0.25 * shrink if FOLD else parts(p), shrink if FOLD else torch.ones_like(shrink)

    def softmax(s, ref, sums, scale_log2, GUARD):
        top = s.amax(1, keepdim=True) * scale_log2
        new = torch.where(top - ref > 8.0, top, ref)
        finite = torch.where(new == -INFINITY, 0.0, new)
        p, shrink = torch.exp2(s * scale_log2 - finite), torch.where(new != ref, torch.exp2(ref - finite), 1.0).expand(-1, 4)
        return p, new, sums * shrink + parts(p), shrink

    def softmax_by_sums(s, ref, sums, scale_log2):
        p = torch.exp2(s * scale_log2 - ref)  # NaN where a row has seen nothing: then a table is wrong
        return p, ref, sums + parts(p), torch.ones_like(sums)

    module.__dict__.update(
        LN_2=math.log(2.0), base_2=lambda x: x * math.log2(math.e), cap=lambda s, pre: torch.tanh(s * pre), apply_mask=apply_mask,
        softmax_of_first_tile=softmax_of_first_tile, softmax=softmax, softmax_by_sums=softmax_by_sums,
        pack=lambda p, dtype: p, unpack=lambda p, dtype, layout: p, rescale=lambda acc, shrink: acc * shrink[:, :1])
    return module


FORWARD = interpreted("hopper_forward", hopper_forward_softmax=softmax_module())


def forward(head_dim: int, visits: list, q: Tensor, blocks: list, *, by_turns: bool, sinks: bool, programs: int, softcap: float):
    """out, lse of the interpreted kernel over all visits. blocks: k, v of each."""
    state, lse = torch.full(q.shape, torch.nan), torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    if sinks:
        state.zero_()
        lse.fill_(0.5)
    places = turns([(x.host_k_lo, x.host_k_hi) for x in visits], sinks)
    counter = torch.zeros(1, dtype=torch.int32)
    for n, (intervals, (k, v)) in enumerate(zip(visits, blocks)):
        is_last, first = n == len(visits) - 1, n == 0 and not sinks
        turn = places[n] if by_turns else None
        grid, arguments, _ = FORWARD.forward_launch(
            q, k, v, intervals, counter, state, lse, out if by_turns or is_last else None, 0.125, softcap, first, programs,
            turn=turn)
        if arguments["total"]:
            run(FORWARD.forward_kernel, grid, arguments)
        assert int(counter) == 0
    return out, lse


@pytest.mark.timeout(300)
@pytest.mark.parametrize("head_dim, dtype", [(64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)], ids=str)
def test_tiles_that_are_finished_by_the_last_visit_that_sees_them_have_the_bits_of_those_that_wait(head_dim, dtype, monkeypatch):
    rng, generator, odd = random.Random(head_dim), torch.Generator().manual_seed(head_dim), 0
    scope = FORWARD.query_tiles.__globals__
    real = scope["tile_rows"]
    for case in range(CASES):
        num_q, sinks = rng.randint(200, 700), rng.random() < 0.3
        q = torch.randn(1, num_q, 2, head_dim, generator=generator).to(dtype)
        visits, blocks, found = [], [], []
        for _ in range(rng.randint(2, 3)):
            num_k = rng.randint(1, 900)
            visits.append(Intervals.from_rows(*documents(rng, num_q, num_k), num_k, "cpu"))
            blocks.append(torch.randn(2, 1, num_k, 1, head_dim, generator=generator).to(dtype).unbind(0))

        def remembered(*given):
            found.append(real(*given))
            return found[-1]

        # Bits are those of the tiles: both walk those of the first, which are the same in all visits.
        monkeypatch.setitem(scope, "tile_rows", remembered)
        finished = forward(head_dim, visits, q, blocks, by_turns=True, sinks=sinks, programs=2, softcap=0.0)
        monkeypatch.setitem(scope, "tile_rows", lambda *given: found[0])
        waiting = forward(head_dim, visits, q, blocks, by_turns=False, sinks=sinks, programs=2, softcap=0.0)
        assert len(found) == 1
        odd += bool((found[0][0][1:] % found[0][0][1].clamp(min=1) != 0).any()) if len(found[0][0]) > 1 else 0
        for name, ours, theirs in zip(("out", "lse"), finished, waiting):
            assert torch.equal(ours, theirs), (case, name)
    assert odd or head_dim == 256


@pytest.mark.timeout(300)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_forward_gives_what_the_reference_gives_over_documents_in_visits(head_dim, dtype):
    rng, generator = random.Random(head_dim), torch.Generator().manual_seed(head_dim)
    for case in range(CASES):
        num_q, num_visits, sinks, by_turns = rng.randint(1, 700), rng.randint(1, 3), rng.random() < 0.3, rng.random() < 0.7
        softcap = 2.0 if case == 0 else 0.0
        q = torch.randn(1, num_q, 2, head_dim, generator=generator).to(dtype)
        visits, blocks = [], []
        for _ in range(num_visits):
            num_k = rng.randint(1, 900)
            visits.append(Intervals.from_rows(*documents(rng, num_q, num_k), num_k, "cpu"))
            blocks.append(torch.randn(2, 1, num_k, 1, head_dim, generator=generator).to(dtype).unbind(0))
        got = forward(head_dim, visits, q, blocks, by_turns=by_turns, sinks=sinks, programs=rng.choice((1, 2, 5)), softcap=softcap)
        state, lse, out = torch.zeros(q.shape), torch.full((1, 2, num_q), 0.5), torch.empty_like(q)
        for n, (intervals, (k, v)) in enumerate(zip(visits, blocks)):
            reference.forward(q, k, v, intervals, softmax_scale=0.125, softcap=softcap, state=state, lse=lse,
                              out=out if n == num_visits - 1 else None, first=n == 0 and not sinks)
        for name, ours, exact in zip(("out", "lse"), got, (out, lse)):
            torch.testing.assert_close(ours.float(), exact.float(), rtol=0.02, atol=0.02, msg=lambda m: f"{case} {name}: {m}")

