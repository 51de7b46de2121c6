"""The `hopper` backward's own code on the CPU, but for what is inline assembly: tables, masks, barriers, what is stored and what is
added, against `reference`."""
from __future__ import annotations

import math
import random
import sys

import pytest
import torch
from torch import Tensor

from ringflash.kernels import reference
from ringflash.kernels.intervals import Intervals
from ringflash.tests.support.document_rows import documents
from ringflash.tests.support.gluon_interpreter import interpreted, run

BACKWARD = interpreted("hopper_backward")
_PACKAGE = BACKWARD.__name__.rpartition(".")[0]
_CONSUMER = sys.modules[f"{_PACKAGE}.hopper_backward_consumer"]
_CONSUMER.packed, _CONSUMER.tanh = lambda x, dtype: x.to(dtype), torch.tanh
COPIES = sys.modules[f"{_PACKAGE}.hopper_backward_prepare"].COPIES
CASES = 40


def prepared(lse: Tensor, delta: Tensor, folded: bool, init_dp: bool, any_rows: bool) -> tuple[Tensor, Tensor]:
    """What `prepare` makes of lse and delta [B, H, S] (a kernel of its own), for a softmax_scale of 1/8."""
    num_q = lse.shape[2]
    padded, found = -(-num_q // 128) * 128, []
    value = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e) + 3.0 * folded)
    for x, past_the_end in ((value, math.inf), (delta * (-1.0 if init_dp else 1.0), 0.0)):
        long = torch.full((lse.shape[0] * lse.shape[1], padded + COPIES), past_the_end)
        long[:, :num_q] = x.flatten(0, 1)
        found.append(torch.cat([long[:, n:padded + n] for n in range(COPIES if any_rows else 1)]))
    return found[0], found[1]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_backward_gives_what_the_reference_gives_over_documents_in_any_order_of_its_programs(head_dim, dtype):
    rng, generator = random.Random(head_dim), torch.Generator().manual_seed(head_dim)
    variant, odd, shared = BACKWARD.VARIANTS[head_dim], 0, 0
    for case in range(CASES):
        num_q, num_k, group = rng.randint(100, 500), rng.randint(100, 500), (1, 2, 16)[case % 3]
        softcap, with_dq, accumulate = 2.0 * (case == 0), rng.random() < 0.8, rng.random() < 0.4
        intervals = Intervals.from_rows(*documents(rng, num_q, num_k), num_k, "cpu")
        if intervals.is_empty:
            continue
        q, dout = torch.randn(2, 1, num_q, group, head_dim, generator=generator).to(dtype)
        k, v = torch.randn(2, 1, num_k, 1, head_dim, generator=generator).to(dtype)
        lse, out = torch.empty(1, group, num_q), torch.empty_like(q)
        reference.forward(q, k, v, intervals, softmax_scale=0.125, softcap=softcap, state=None, lse=lse, out=out, first=True)
        delta = reference.delta(dout, out)
        exact = [torch.zeros(x.shape) for x in (q, k, v)]
        reference.backward(dout, q, k, v, lse, delta, intervals, softmax_scale=0.125, softcap=softcap, dq=exact[0], dk=exact[1],
                           dv=exact[2], accumulate_dq=False, accumulate_dkv=False, deterministic=True)
        before = [torch.randn(x.shape, generator=generator) * accumulate for x in exact]
        before[0].zero_()
        # Without accumulation nothing may be read that was not written.
        got = [x.clone() if accumulate or n == 0 else torch.full_like(x, torch.nan) for n, x in enumerate(before)]
        items, rows, _, any_rows = BACKWARD._items(q, k, intervals, variant, 132, with_dq, accumulate)
        grid, arguments, _ = BACKWARD.backward_launch(
            dout, q, k, v, *prepared(lse, delta, BACKWARD._folded(dtype), variant.init_dp, any_rows), intervals,
            got[0] if with_dq else None, *got[1:], 0.125, softcap, 1, accumulate, variant, 132)
        run(BACKWARD.backward_kernel, grid, arguments, rng.sample(range(grid[0]), grid[0]))
        odd, shared = odd + bool((items[:, 0] % 128 != 0).any()), shared + (rows is not None)
        allowed = 2e-2 if dtype == torch.bfloat16 else 4e-3
        for name, ours, start, want in list(zip(("dq", "dk", "dv"), got, before, exact))[not with_dq:]:
            error = (ours - start - want).abs().max() / want.abs().max().clamp(min=1.0)
            assert error < allowed, (case, name, float(error))
    assert odd and shared
