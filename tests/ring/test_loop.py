"""The ring in one process against the float64 oracle, bitwise claims, constructed cases, planted defects."""
import math
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ringflash import Layout, Mask, simulate
from ringflash.ring import buffers
from ringflash.ring.exchange import record_traffic
from ringflash.ring.plan import build_plan
from ringflash.tests.support.ring_cases import LAYOUTS, differing, judge, make_inputs, masks, run

SIZES = (1, 2, 3, 4, 8)
KERNELS = ("reference", "cpu")


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_layout_and_mask_is_within_budget_in_fp32(kernel, cp_size):
    failures = []
    for layout in LAYOUTS:
        for seq_len in (37,) if layout == "zigzag" else (16,):
            for name, mask in masks(seq_len).items():
                inputs = make_inputs(seq_len, seed=seq_len)
                ours = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel=kernel, **mask)
                failures += [(layout, seq_len, name, str(verdict)) for verdict in judge(ours, inputs, **mask)]
    assert not failures


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit_inputs_and_every_gqa_ratio_are_within_budget(kernel, dtype):
    failures = []
    for ratio in (1, 4, 7, 8):
        for cp_size in (1, 3):
            mask = {"cu_seqlens": [0, 9, 20, 29], "window_size": (7, 0)} if ratio == 7 else {}
            inputs = make_inputs(29, heads=2 * ratio, kv_heads=2, head_dim=16, dtype=dtype, seed=ratio)
            ours = run(simulate, inputs, cp_size=cp_size, kernel=kernel, **mask)
            failures += [(ratio, cp_size, str(verdict)) for verdict in judge(ours, inputs, **mask)]
    assert not failures


@pytest.mark.parametrize("seq_len", (1, 2, 5, 7))
def test_fewer_rows_than_ranks_or_chunks_leaves_nothing_out(seq_len):
    failures = []
    for cp_size in (2, 4, 8):
        for layout in LAYOUTS:
            for mask in ({}, {"causal": False}, {"window_size": (0, 0)}, {"cu_seqlens": [0, 0, 1, seq_len, seq_len]}):
                inputs = make_inputs(seq_len, batch=1 if "cu_seqlens" in mask else 2, seed=seq_len)
                ours = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", **mask)
                failures += [(cp_size, layout, mask, str(verdict)) for verdict in judge(ours, inputs, **mask)]
    assert not failures


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_of_q_and_k_may_differ_forward_and_backward(kernel):
    failures = []
    for seq_len, seq_len_k in ((5, 2), (2, 5), (12, 30), (30, 12), (9, 9)):
        for mask in ({}, {"causal": False}, {"window_size": (4, 0)}):
            for layout, layout_k, cp_size in (("zigzag", None, 1), ("zigzag", None, 3), ("contiguous", "striped", 4),
                                              ("striped", "zigzag", 2)):
                if kernel == "reference" or seq_len != 9:
                    inputs = make_inputs(seq_len, seq_len_k=seq_len_k, batch=2, seed=seq_len)
                    ours = run(simulate, inputs, cp_size=cp_size, layout=layout, layout_k=layout_k, kernel=kernel, **mask)
                    failures += [(seq_len, seq_len_k, mask, layout, cp_size, str(v)) for v in judge(ours, inputs, **mask)]
    assert not failures


@pytest.mark.parametrize("cp_size", SIZES)
def test_rows_without_keys_have_known_answers(cp_size):
    def averages(seq_len, seq_len_k):
        q = torch.zeros(1, seq_len, 1, 4, requires_grad=True)
        k = torch.zeros(1, seq_len_k, 1, 4)
        v = torch.arange(1.0, seq_len_k + 1).reshape(1, -1, 1, 1).expand(1, seq_len_k, 1, 4)
        out, lse = simulate(q, k, v, cp_size=cp_size, kernel="reference", return_lse=True)
        out.sum().backward()
        return out[0, :, 0, 0].tolist(), lse[0, 0].tolist(), q.grad

    out, lse, dq = averages(5, 2)
    assert out == pytest.approx([0, 0, 0, 1, 1.5]) and lse == pytest.approx([-math.inf] * 3 + [0, math.log(2)])
    assert torch.equal(dq[:, :3], torch.zeros(1, 3, 1, 4))
    out, lse, _ = averages(2, 5)
    assert out == pytest.approx([2.5, 3]) and lse == pytest.approx([math.log(4), math.log(5)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_near_minus_60000_merge_exactly_over_two_ranks_in_any_order(kernel):
    for order in ((0, 1), (1, 0)):
        for cp_size in (1, 2):
            q = torch.ones(1, 1, 1, 4)
            k = torch.tensor([-3e4, -3.00001e4])[list(order)].reshape(1, 2, 1, 1).expand(1, 2, 1, 4)
            v = torch.tensor([1.0, 3.0])[list(order)].reshape(1, 2, 1, 1).expand(1, 2, 1, 4)
            out, lse = simulate(q, k, v, cp_size=cp_size, layout="contiguous", softmax_scale=0.5, causal=False, return_lse=True,
                                kernel=kernel)
            assert float(out[0, 0, 0, 0]) == pytest.approx(1.900332, abs=1e-2)
            assert float(lse) == pytest.approx(-59999.4019, abs=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_document_returns_its_own_number_exactly(layout):
    for lengths in ((4, 8, 6, 10), (1, 27)):
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        number = torch.repeat_interleave(torch.arange(1.0, len(lengths) + 1), torch.tensor(lengths))
        for cp_size in (1, 2, 4):
            q = torch.zeros(1, 28, 1, 8)
            v = number.reshape(1, -1, 1, 1).expand(1, 28, 1, 8)
            out = simulate(q, q, v, cp_size=cp_size, layout=layout, cu_seqlens=ends, kernel="reference")
            assert float((out - v).abs().max()) < 1e-5, cp_size      # a leak is at least 1 / 28


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_in_dead_rows_reaches_nothing(kernel):
    ends = [0, 0, 6, 11]                                    # rows 11..15 belong to no document
    clean = make_inputs(16)
    for cp_size in (1, 2, 3, 8):
        for layout in LAYOUTS:
            expected = run(simulate, clean, cp_size=cp_size, layout=layout, kernel=kernel, cu_seqlens=ends)
            poisoned = make_inputs(16)
            for x in (poisoned.q, poisoned.k, poisoned.v, poisoned.dout):
                x[:, 11:] = math.nan
            poisoned.dlse[:, :, 11:] = math.nan
            ours = run(simulate, poisoned, cp_size=cp_size, layout=layout, kernel=kernel, cu_seqlens=ends)
            assert not differing(ours, expected), (cp_size, layout)
            assert all(bool((ours[name][:, 11:] == 0).all()) for name in ("out", "dq", "dk", "dv"))
    # Leading dead rows: queries before the first key.
    poisoned = make_inputs(9, seq_len_k=4)
    expected = run(simulate, poisoned, cp_size=2, kernel=kernel)
    poisoned.q[:, :5], poisoned.dout[:, :5] = math.nan, math.nan
    assert not differing(run(simulate, poisoned, cp_size=2, kernel=kernel), expected)


def test_a_window_reaches_exactly_as_far_as_two_layers_let_it():
    x = torch.randn(1, 512, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 0] += 1

    def two_layers(x, cp_size):
        for _ in range(2):
            x = x + simulate(x, x, x, cp_size=cp_size, window_size=(63, 0), kernel="reference")
        return x

    for cp_size in (1, 2, 4, 8):
        changed = (two_layers(x, cp_size) != two_layers(other, cp_size)).any(-1).flatten().nonzero().flatten()
        assert changed.tolist() == list(range(127)), cp_size


def test_windows_about_the_size_of_a_shard_equal_the_dense_result():
    failures = []
    for cp_size in (2, 4):
        shard = 24 // cp_size
        for left in (0, shard - 2, shard - 1, shard, 24, 40):
            for layout in LAYOUTS:
                inputs = make_inputs(24)
                ours = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", window_size=(left, 0))
                failures += [(cp_size, left, layout, str(v)) for v in judge(ours, inputs, window_size=(left, 0))]
                if left == 0:
                    assert torch.equal(ours["out"], inputs.v.repeat_interleave(2, dim=2))
    assert not failures


def test_the_order_in_which_ranks_run_changes_no_bit():
    inputs = make_inputs(25, dtype=torch.bfloat16)
    for cp_size in (3, 5):
        for mask in masks(25).values():
            plain = run(simulate, inputs, cp_size=cp_size, kernel="reference", **mask)
            for seed in range(2):
                shuffled = run(simulate, inputs, cp_size=cp_size, kernel="reference", order=random.Random(seed), **mask)
                assert not differing(shuffled, plain)


def test_deterministic_gradients_are_the_same_bits_in_30_runs():
    inputs = make_inputs(33, dtype=torch.bfloat16)
    first = run(simulate, inputs, cp_size=3, kernel="cpu", deterministic=True)
    for _ in range(29):
        assert not differing(run(simulate, inputs, cp_size=3, kernel="cpu", deterministic=True), first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_error_does_not_grow_with_the_ring_in_bf16(kernel):
    inputs = make_inputs(256, head_dim=32, dtype=torch.bfloat16)
    exact = {name: x.double() for name, x in run(simulate, _as_double(inputs), cp_size=1, kernel="reference").items()}

    def rms(cp_size):
        ours = run(simulate, inputs, cp_size=cp_size, kernel=kernel)
        return {name: float((ours[name].double() - exact[name]).square().mean().sqrt()) for name in ("out", "dq", "dk", "dv")}

    alone, ring = rms(1), rms(8)
    assert all(ring[name] <= 1.1 * alone[name] for name in alone), (alone, ring)


def _as_double(inputs):
    return type(inputs)(*(x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)))


def test_activation_checkpointing_gives_the_same_bits():
    inputs = make_inputs(24)
    layout = Layout("zigzag", 24, 3, (Mask(), Mask(window_size=(5, 0))))

    def layers(q, k, v):
        for mask in layout.masks:
            q = simulate(q, k, v, cp_size=3, layout=layout, mask=mask, kernel="cpu", deterministic=True)
        return q

    grads = []
    for wrap in (lambda q, k, v: layers(q, k, v), lambda q, k, v: checkpoint(layers, q, k, v, use_reentrant=False)):
        q, k, v = inputs.fresh()
        wrap(q, k, v).backward(inputs.dout)
        grads.append({"dq": q.grad, "dk": k.grad, "dv": v.grad})
    assert not differing(*grads)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cp_size", (1, 3))
def test_views_give_what_contiguous_tensors_give(kernel, cp_size):
    plain = make_inputs(20, batch=2, heads=2, kv_heads=2)
    expected = run(simulate, plain, cp_size=cp_size, kernel=kernel)
    B, S, H, D = plain.q.shape
    fused = torch.stack([plain.q, plain.k, plain.v], dim=2).requires_grad_()            # [B, S, 3, H, D]
    q, k, v = (fused.transpose(1, 3)[:, :, i].transpose(1, 2) for i in range(3))        # strided and transposed
    out, lse = simulate(q, k, v, cp_size=cp_size, kernel=kernel, return_lse=True)
    wide = torch.empty(B, S, H, 2 * D)
    wide[..., D:] = plain.dout
    torch.autograd.backward([out, lse], [wide[..., D:], plain.dlse])
    ours = {"out": out.detach(), "lse": lse.detach(),
            **{name: fused.grad[:, :, i] for i, name in enumerate(("dq", "dk", "dv"))}}
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-5, atol=1e-6)
    expanded = plain.k[:, :, :1].expand(B, S, H, D)
    torch.testing.assert_close(simulate(plain.q, expanded, expanded, cp_size=cp_size, kernel=kernel),
                               simulate(plain.q, expanded.contiguous(), expanded.contiguous(), cp_size=cp_size, kernel=kernel))
    out_sum = simulate(*plain.fresh(), cp_size=cp_size, kernel=kernel).sum()            # dout is an expanded scalar
    out_sum.backward()


@pytest.mark.parametrize("head_dim", (4, 64, 80, 96, 128, 256))
def test_head_dims_of_any_kind_are_within_budget(head_dim):
    inputs = make_inputs(13, head_dim=head_dim, heads=2, kv_heads=1)
    for kernel in KERNELS:
        assert not judge(run(simulate, inputs, cp_size=2, kernel=kernel), inputs)


def test_the_gradient_of_lse_alone_arrives():
    inputs = make_inputs(18)
    q, k, v = inputs.fresh()
    _, lse = simulate(q, k, v, cp_size=3, kernel="reference", return_lse=True)
    lse.backward(inputs.dlse)
    zero = type(inputs)(inputs.q, inputs.k, inputs.v, torch.zeros_like(inputs.dout), inputs.dlse)
    expected = run(simulate, zero, cp_size=3, kernel="reference")
    assert torch.equal(q.grad, expected["dq"]) and torch.equal(k.grad, expected["dk"])
    assert not v.grad.any()


def test_one_rank_posts_nothing_and_takes_no_buffer(monkeypatch):
    def refuse(*_):
        raise AssertionError("a buffer was taken")

    monkeypatch.setattr(buffers.BufferPool, "take", refuse)
    with record_traffic() as log:
        run(simulate, make_inputs(9), cp_size=1, kernel="reference")
    assert log == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_on_the_wire_are_the_plans_and_count_kv_heads(layout):
    for cp_size in (2, 5):
        for mask in masks(48).values():
            inputs = make_inputs(48, heads=8, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
            with record_traffic() as log:
                run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", rotate="kv", **mask)
            plan = build_plan(Mask(**mask), Layout(layout, 48, cp_size))
            per_row = 2 * 2 * 16                            # K and V of two kv heads, not of eight query heads
            kv, dkv = per_row * 2, per_row * 4              # bf16 and fp32
            for pass_ in ("forward", "backward"):
                counted = sorted((posted.message, posted.num_bytes) for posted in log if posted.pass_ == pass_)
                wanted = sorted((m, m.num_rows * (kv if m.kind == "kv" else dkv)) for m in plan.messages(pass_))
                assert counted == wanted
