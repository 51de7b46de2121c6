"""Softcap, sinks and values of another head dim through the whole ring in one process; the real ring: test_distributed.py."""
import dataclasses
import math
import random

import pytest
import torch

from ringflash import Layout, Mask, ring_attention, simulate
from ringflash.ring.exchange import record_traffic
from ringflash.ring.plan import build_plan
from ringflash.tests.support.masks import allowed_pairs
from ringflash.tests.support.ring_cases import LAYOUTS, differing, judge, make_inputs, masks, run

SIZES = (1, 2, 3, 4, 8)
KERNELS = ("reference", "cpu")
OPTIONS = (dict(softcap=1.5), dict(sinks=torch.float32), dict(head_dim_v=5), dict(head_dim_v=12),
           dict(softcap=0.7, sinks=torch.float32, head_dim_v=16))


def _split(options):
    """(softcap for the call, what the inputs are made with)."""
    cap = {"softcap": options["softcap"]} if "softcap" in options else {}
    return cap, {name: value for name, value in options.items() if name != "softcap"}


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_layout_and_mask_is_within_budget_with_each_option_and_with_all(kernel, cp_size):
    failures = []
    for row, layout in enumerate(LAYOUTS):
        for column, (name, mask) in enumerate(masks(37).items()):
            for options in (OPTIONS[(row + column + cp_size) % 4], OPTIONS[4]):
                cap, made = _split(options)
                inputs = make_inputs(37, seed=column, **made)
                ours = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel=kernel, **mask, **cap)
                assert ours["out"].shape[-1] == made.get("head_dim_v", 8) and ("dsinks" in ours) == ("sinks" in made)
                failures += [(layout, name, options, str(verdict)) for verdict in judge(ours, inputs, **mask, **cap)]
    assert not failures


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit_inputs_with_sinks_of_either_width_are_within_budget(kernel, dtype):
    failures = []
    for ratio, sinks in ((1, dtype), (4, torch.float32), (7, torch.float64)):
        for cp_size in (1, 3):
            inputs = make_inputs(29, heads=2 * ratio, kv_heads=2, head_dim=16, head_dim_v=8, dtype=dtype, seed=ratio, sinks=sinks)
            ours = run(simulate, inputs, cp_size=cp_size, kernel=kernel, softcap=2.0, cu_seqlens=[0, 9, 20, 27])
            found = judge(ours, inputs, softcap=2.0, cu_seqlens=[0, 9, 20, 27])
            failures += [(ratio, cp_size, str(verdict)) for verdict in found]
    assert not failures


@pytest.mark.parametrize("cp_size", (1, 2, 3))
def test_gradients_of_everything_are_those_of_finite_differences(cp_size):
    inputs = make_inputs(7, heads=2, kv_heads=1, head_dim=4, head_dim_v=3, dtype=torch.float64)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):                             # rows 5 and 6 see nothing: their lse is the sink
        return simulate(q, k, v, cp_size=cp_size, sinks=sinks, softcap=1.2, cu_seqlens=[0, 2, 5], kernel="reference",
                        return_lse=True)

    assert torch.autograd.gradcheck(attend, (*inputs.fresh(), sinks))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cp_size", SIZES)
def test_a_sink_of_log_m_counts_as_m_keys_without_a_value(kernel, cp_size):
    q, k = torch.zeros(1, 8, 2, 4), torch.zeros(1, 8, 1, 4)
    sinks = torch.tensor([math.log(3.0), -math.inf], requires_grad=True)
    out, lse = simulate(q, k, torch.ones(1, 8, 1, 6), cp_size=cp_size, sinks=sinks, return_lse=True, kernel=kernel)
    keys = torch.arange(1.0, 9.0)                           # under a causal mask
    torch.testing.assert_close(out[0, :, 0], (keys / (keys + 3))[:, None].expand(8, 6))
    torch.testing.assert_close(out[0, :, 1], torch.ones(8, 6))
    torch.testing.assert_close(lse[0], torch.stack([torch.log(keys + 3), torch.log(keys)]))
    out.sum().backward()
    weight = 3 / (keys + 3)
    torch.testing.assert_close(sinks.grad, torch.tensor([float(-6 * (weight * keys / (keys + 3)).sum()), 0.0]))


@pytest.mark.parametrize("cp_size", SIZES)
def test_rows_that_see_nothing_have_the_sink_as_lse_and_give_it_exactly_what_arrives_there(cp_size):
    for layout in LAYOUTS:
        q = torch.full((1, 5, 2, 4), math.nan)
        k = v = torch.full((1, 3, 2, 4), math.nan)
        sinks = torch.tensor([0.25, -math.inf], requires_grad=True)
        out, lse = simulate(q, k, v, cp_size=cp_size, layout=layout, mask=Mask(window_size=(0, 0), cu_seqlens=[0, 0],
                                                                               cu_seqlens_k=[0, 0]),
                            sinks=sinks, kernel="reference", return_lse=True)
        assert torch.equal(lse[0], torch.tensor([[0.25] * 5, [-math.inf] * 5])) and not out.any()
        dlse = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0]).expand(1, 2, 5)
        torch.autograd.backward([out, lse], [torch.full_like(out, math.nan), dlse])
        assert sinks.grad.tolist() == [31.0, 0.0], layout


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks_of_minus_infinity_are_none_bit_for_bit(kernel):
    inputs = make_inputs(23, dtype=torch.bfloat16)
    none = dataclasses.replace(inputs, sinks=torch.full((4,), -torch.inf))
    for cp_size in (1, 3):
        for mask in masks(23).values():
            ours = run(simulate, none, cp_size=cp_size, kernel=kernel, **mask)
            assert torch.equal(ours.pop("dsinks"), torch.zeros(4))
            assert not differing(ours, run(simulate, inputs, cp_size=cp_size, kernel=kernel, **mask)), (cp_size, mask)


def test_sinks_are_counted_once_where_a_block_has_two_visits():
    mask = dict(window_size=(3, 0), first_tokens=2)
    inputs = make_inputs(26, sinks=torch.float32, head_dim_v=6)
    rows = torch.arange(26)
    allowed = allowed_pairs(rows, rows, seq_len_q=26, seq_len_k=26, **mask)
    for cp_size in SIZES:
        ours = run(simulate, inputs, cp_size=cp_size, mask=Mask(**mask), kernel="reference", softcap=1.1)
        assert not judge(ours, inputs, allowed=allowed, softcap=1.1), cp_size


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_dead_rows_reaches_nothing_with_sinks(kernel):
    ends = [0, 0, 6, 11]                                    # rows 11..15 belong to no document
    for cp_size in (1, 2, 3, 8):
        options = dict(cp_size=cp_size, layout=LAYOUTS[cp_size % 3], kernel=kernel, cu_seqlens=ends, softcap=3.0)
        made = dict(sinks=torch.float32, head_dim_v=12)
        expected = run(simulate, make_inputs(16, **made), **options)
        poisoned = make_inputs(16, **made)
        for x in (poisoned.q, poisoned.k, poisoned.v, poisoned.dout):
            x[:, 11:] = math.nan
        assert not differing(run(simulate, poisoned, **options), expected), cp_size


def test_sinks_alone_may_need_a_gradient_and_lse_alone_may_bring_it():
    inputs = make_inputs(11, sinks=torch.float32)
    whole = run(simulate, inputs, cp_size=3, kernel="cpu")
    for attend, more in ((simulate, {"cp_size": 3}), (ring_attention, {})):
        grads = []
        for arriving in ((inputs.dout, None), (None, inputs.dlse)):
            sinks = inputs.sinks.clone().requires_grad_()
            out, lse = attend(inputs.q, inputs.k, inputs.v, sinks=sinks, kernel="cpu", return_lse=True, **more)
            used = [(x, grad) for x, grad in zip((out, lse), arriving) if grad is not None]
            torch.autograd.backward(*map(list, zip(*used)))
            grads.append(sinks.grad)
        torch.testing.assert_close(grads[0] + grads[1], whole["dsinks"])


def test_the_order_in_which_ranks_run_and_a_repeated_run_change_no_bit():
    inputs = make_inputs(25, dtype=torch.bfloat16, sinks=torch.bfloat16, head_dim_v=12)
    for mask in masks(25).values():
        options = dict(cp_size=3, kernel="cpu", softcap=5.0, deterministic=True, **mask)
        plain = run(simulate, inputs, **options)
        for seed in range(2):
            assert not differing(run(simulate, inputs, order=random.Random(seed), **options), plain)


def test_one_rank_of_ring_attention_is_one_rank_of_simulate():
    inputs = make_inputs(14, sinks=torch.float32, head_dim_v=3)
    for kernel in KERNELS:
        ours = run(ring_attention, inputs, kernel=kernel, softcap=1.0)
        assert not differing(ours, run(simulate, inputs, cp_size=1, kernel=kernel, softcap=1.0))
        assert not judge(ours, inputs, softcap=1.0)


def test_a_cap_far_above_all_scores_changes_nothing_that_shows():
    inputs = make_inputs(20)
    ours, plain = run(simulate, inputs, cp_size=2, softcap=1e4), run(simulate, inputs, cp_size=2)
    for name in plain:
        torch.testing.assert_close(ours[name], plain[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seq_len", (1, 2, 5))
def test_fewer_rows_than_ranks_leave_no_sink_out(seq_len):
    for cp_size in (2, 4, 8):
        inputs = make_inputs(seq_len, batch=2, sinks=torch.float32, head_dim_v=4)
        assert not judge(run(simulate, inputs, cp_size=cp_size, kernel="reference"), inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_on_the_wire_count_each_head_dim_once(layout):
    inputs = make_inputs(48, heads=8, kv_heads=2, head_dim=16, head_dim_v=6, dtype=torch.bfloat16, sinks=torch.float32)
    with record_traffic() as log:
        run(simulate, inputs, cp_size=5, layout=layout, kernel="reference", rotate="kv")
    plan = build_plan(Mask(), Layout(layout, 48, 5))
    for pass_ in ("forward", "backward"):
        counted = sum(posted.num_bytes for posted in log if posted.pass_ == pass_)
        assert counted == plan.bytes_sent(pass_, batch=1, num_kv_heads=2, head_dim=16, head_dim_v=6, itemsize=2)
