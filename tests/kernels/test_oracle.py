"""The judge itself, against values known without it, and the budgets against planted errors."""
import math

import pytest
import torch

from ringflash.tests.support import oracle as oracle_module
from ringflash.tests.support.budgets import NAMES, budget, budgets
from ringflash.tests.support.masks import allowed_pairs, random_intervals, interval_mask
from ringflash.tests.support.oracle import attention_oracle, eager_attention, sample_rows
from ringflash.tests.support.visits import random_inputs

INF = math.inf


def counting(Sq: int, Sk: int, **mask):
    """q = k = 0 and v_j = j + 1: out is the mean of the allowed j + 1, lse the log of their number."""
    zero_q, zero_k = torch.zeros(1, Sq, 1, 1), torch.zeros(1, Sk, 1, 1)
    v = torch.arange(1.0, Sk + 1).view(1, Sk, 1, 1)
    result = attention_oracle(zero_q, zero_k, v, dout=torch.ones(1, Sq, 1, 1), **mask)
    return result, result.out.flatten().tolist(), result.lse.flatten().tolist()


def test_more_queries_than_keys_are_aligned_bottom_right():
    result, out, lse = counting(5, 2)
    assert out == pytest.approx([0, 0, 0, 1, 1.5]) and lse == pytest.approx([-INF, -INF, -INF, 0, math.log(2)])
    assert result.dv.flatten().tolist() == pytest.approx([1.5, 0.5])
    assert bool((result.dq == 0).all())


def test_more_keys_than_queries_are_aligned_bottom_right():
    _, out, lse = counting(2, 5)
    assert out == pytest.approx([2.5, 3]) and lse == pytest.approx([math.log(4), math.log(5)])


@pytest.mark.parametrize(
    "mask, counts",
    [
        (dict(causal=False), [4, 4, 4, 4]),
        (dict(window_size=(1, 0)), [1, 2, 2, 2]),
        (dict(window_size=(0, 0)), [1, 1, 1, 1]),
        (dict(causal=False, window_size=(0, 1)), [2, 2, 2, 1]),
        (dict(causal=False, window_size=(-1, 1)), [2, 3, 4, 4]),
        (dict(cu_seqlens=[0, 1, 1, 3]), [1, 1, 2, 0]),
        (dict(causal=False, cu_seqlens=[0, 0, 3, 3]), [3, 3, 3, 0]),
        (dict(window_size=(1, 0), cu_seqlens=[0, 4]), [1, 2, 2, 2]),
    ],
)
def test_each_mask_allows_as_many_keys_as_its_definition_says(mask, counts):
    _, _, lse = counting(4, 4, **mask)
    assert [round(math.exp(x)) for x in lse] == counts


def test_documents_never_mix():
    for lengths in ((4, 8, 6, 10), (1, 27)):
        ends = torch.tensor((0, *lengths)).cumsum(0)
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).double().view(1, -1, 1, 1)
        zeros = torch.zeros_like(number)
        for causal in (True, False):
            out = attention_oracle(zeros, zeros, number, causal=causal, cu_seqlens=ends).out
            torch.testing.assert_close(out, number, atol=1e-12, rtol=1e-12)


def test_cu_seqlens_with_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="as many queries as keys"):
        allowed_pairs(torch.arange(2), torch.arange(3), seq_len_q=2, seq_len_k=3, cu_seqlens=[0, 2])


@pytest.mark.parametrize("group", [1, 4])
def test_oracle_agrees_with_pytorch_attention_on_square_causal_input(group):
    q, k, v, dout = random_inputs(9, 9, 4, 4 // group, 8, torch.float64, seed=group, B=2)
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(dout.transpose(1, 2))
    result = attention_oracle(q, k, v, dout=dout)
    for ours, theirs in zip((result.out, result.dq, result.dk, result.dv), (out, *(x.grad for x in leaves))):
        torch.testing.assert_close(ours, theirs.detach().transpose(1, 2), atol=1e-13, rtol=0)


def test_gradient_of_lse_is_the_probability_times_the_other_side():
    q, k, v, _ = random_inputs(3, 3, 1, 1, 4, torch.float64, seed=0)
    result = attention_oracle(q, k, v, causal=False, softmax_scale=1.0, dout=torch.zeros_like(q), dlse=torch.ones(1, 1, 3))
    p = torch.softmax(q[0, :, 0] @ k[0, :, 0].T, -1)
    torch.testing.assert_close(result.dq[0, :, 0], p @ k[0, :, 0], atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(result.dk[0, :, 0], p.T @ q[0, :, 0], atol=1e-13, rtol=1e-12)
    assert bool((result.dv == 0).all())


def test_a_cap_bounds_scores_and_damps_their_gradient_by_1_minus_tanh_squared():
    # One row, scores 3 and -3 under a cap of 2, values 1 and 0.
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([3.0, -3.0]).view(1, 2, 1, 1), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    options = dict(causal=False, softmax_scale=1.0, softcap=2.0, dout=torch.ones(1, 1, 1, 1))
    score = 2 * math.tanh(1.5)
    p = 1 / (1 + math.exp(-2 * score))
    ds = p * (1 - p) * (1 - math.tanh(1.5) ** 2)
    for attention, digits in ((attention_oracle, 1e-14), (eager_attention, 1e-5)):
        result = attention(q, k, v, **options)
        assert result.out.item() == pytest.approx(p, rel=digits)
        assert result.lse.item() == pytest.approx(score + math.log1p(math.exp(-2 * score)), rel=digits)
        assert result.dk.flatten().tolist() == pytest.approx([ds, -ds], rel=digits)
        assert result.dq.item() == pytest.approx(6 * ds, rel=digits)
    assert attention_oracle(q, k * 20, v, **options).dk[0, 0].item() == pytest.approx(p_of(2.0) * 4 * math.exp(-60), rel=1e-12)


def p_of(cap: float) -> float:
    """p * (1 - p) of two scores, cap and -cap."""
    p = 1 / (1 + math.exp(-2 * cap))
    return p * (1 - p)


def test_a_sink_takes_its_share_of_every_row_and_is_the_lse_of_rows_without_keys():
    # As `counting`: n keys of score 0 and a sink of log 2, worth two keys of value 0.
    zeros, v = torch.zeros(1, 3, 1, 1), torch.arange(1.0, 4.0).view(1, 3, 1, 1)
    sinks, dlse = torch.tensor([math.log(2.0)], dtype=torch.float64), torch.tensor([0.0, 0.0, 5.0]).view(1, 1, 3)
    result = attention_oracle(zeros, zeros, v, cu_seqlens=[0, 2], sinks=sinks, dout=torch.ones(1, 3, 1, 1), dlse=dlse)
    assert result.out.flatten().tolist() == pytest.approx([1 / 3, 3 / 4, 0])
    assert result.lse.flatten().exp().tolist() == pytest.approx([3, 4, 2])
    assert result.row_is_empty.tolist() == [False, False, True] and result.key_is_read.tolist() == [True, True, False]
    assert result.dv.flatten().tolist() == pytest.approx([1 / 3 + 1 / 4, 1 / 4, 0])
    # -p * delta of the two rows, and all of what arrives at the lse of the third
    assert result.dsinks.tolist() == pytest.approx([-2 / 3 * 1 / 3 - 2 / 4 * 3 / 4 + 5])


def test_gradients_of_sinks_and_capped_scores_agree_with_finite_differences():
    q, k, v, dout = random_inputs(4, 5, 2, 1, 2, torch.float64, seed=3, Dv=3)
    sinks, step = torch.tensor([0.4, -1.2], dtype=torch.float64), 1e-6
    options = dict(softcap=0.8, softmax_scale=1.0, sinks=sinks, window_size=(1, 0))
    dlse = torch.randn(1, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = attention_oracle(q, k, v, dout=dout, dlse=dlse, **options)

    def objective() -> float:
        made = attention_oracle(q, k, v, **options)
        return float((made.out * dout).sum() + (made.lse * dlse).sum())

    for x, grad in ((q, result.dq), (k, result.dk), (v, result.dv), (sinks, result.dsinks)):
        flat = x.view(-1)
        for index in range(x.numel()):
            flat[index] += step
            above = objective()
            flat[index] -= 2 * step
            below = objective()
            flat[index] += step
            assert (above - below) / (2 * step) == pytest.approx(grad.reshape(-1)[index].item(), abs=1e-8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_budget_catches_a_gradient_without_the_caps_slope_and_a_forgotten_sink(dtype):
    q, k, v, dout = random_inputs(24, 24, 4, 2, 16, dtype, seed=3, Dv=8)
    sinks = torch.tensor([0.0, 1.0, 2.0, -1.0])
    right = dict(softcap=3.0, softmax_scale=1.0, sinks=sinks, dout=dout)
    oracle, eager = attention_oracle(q, k, v, **right), eager_attention(q, k, v, **right)
    names = (*NAMES, "dsinks")
    assert all(verdict.ok for verdict in budgets({name: getattr(eager, name) for name in names}, oracle, eager))
    for wrong in (dict(softcap=0.0), dict(softcap=3.1), dict(sinks=None)):
        made = attention_oracle(q, k, v, **{**right, **wrong})
        assert not any(verdict.ok for verdict in budgets({name: getattr(made, name) for name in NAMES}, oracle, eager)), wrong
    slopeless = oracle.dq / (1 - torch.tanh(torch.tensor(0.5)) ** 2)
    assert not budget("dq", slopeless, oracle, eager).ok
    assert not budget("dsinks", oracle.dsinks * 1.03, oracle, eager).ok and budget("dsinks", oracle.dsinks, oracle, eager).ok


def test_nan_in_what_the_mask_leaves_out_reaches_nothing():
    q, k, v, dout = random_inputs(6, 6, 2, 1, 4, torch.float32, seed=1)
    clean = attention_oracle(q, k, v, cu_seqlens=[0, 2, 4], dout=dout)
    for x in (q, k, v, dout):
        x[:, 4:] = torch.nan
    result = attention_oracle(q, k, v, cu_seqlens=[0, 2, 4], dout=dout)
    for name in NAMES:
        assert torch.equal(getattr(result, name), getattr(clean, name))
    assert bool((result.dk[:, 4:] == 0).all()) and result.key_is_read.tolist() == [True] * 4 + [False] * 2


def test_chunks_and_sampled_rows_give_the_rows_of_the_whole(monkeypatch):
    q, k, v, dout = random_inputs(40, 33, 2, 1, 4, torch.float64, seed=2)
    whole = attention_oracle(q, k, v, window_size=(9, 0), dout=dout)
    monkeypatch.setitem(oracle_module._CHUNK_ELEMENTS, "cpu", 2 * 33 * 7)
    rows, key_rows = torch.tensor([0, 6, 7, 22, 39]), torch.tensor([0, 13, 32])
    part = attention_oracle(q, k, v, window_size=(9, 0), dout=dout, rows=rows, key_rows=key_rows)
    for name, index in (("out", rows), ("dq", rows), ("dk", key_rows), ("dv", key_rows)):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[:, index], atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(part.lse, whole.lse[:, :, rows], atol=1e-13, rtol=1e-12)
    assert attention_oracle(q, k, v, dout=dout, rows=rows).dk is None
    sunk = dict(sinks=torch.tensor([0.5, -0.5]), dout=dout)
    part, whole = (attention_oracle(q, k, v, **sunk, **some) for some in (dict(rows=rows, key_rows=key_rows), {}))
    torch.testing.assert_close(part.dsinks, whole.dsinks, atol=1e-13, rtol=1e-12)
    assert part.magnitude["dsinks"] == pytest.approx(whole.magnitude["dsinks"])
    assert attention_oracle(q, k, v, **sunk, rows=rows).dsinks is None


def test_sampled_rows_include_both_ends():
    rows = sample_rows(5000, 100)
    assert set(range(256)) | set(range(5000 - 256, 5000)) <= set(rows.tolist()) and len(rows) > 580
    assert torch.equal(sample_rows(600, 100), torch.arange(600))


def planted(name: str, tensors: dict, defect: str) -> torch.Tensor:
    x = tensors[name].clone()
    if defect == "one element":
        x.view(-1)[x.abs().argmax()] *= 1.1
    elif defect == "all slightly":
        x *= 1.05
    elif defect == "nan":
        x.view(-1)[x.abs().argmax()] = torch.nan
    elif defect == "base 2":
        x /= math.log(2)
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("defect", ["none", "one element", "all slightly", "nan", "base 2"])
def test_budget_accepts_eager_and_catches_each_planted_error(dtype, defect):
    k_lo, k_hi = random_intervals(24, 30, seed=5)
    q, k, v, dout = random_inputs(24, 30, 4, 2, 16, dtype, seed=3)
    mask = dict(allowed=interval_mask(k_lo, k_hi, 30), dout=dout)
    oracle, eager = attention_oracle(q, k, v, **mask), eager_attention(q, k, v, **mask)
    tensors = {name: getattr(eager, name).masked_fill(getattr(oracle, name) == -INF, 0.0) for name in NAMES}
    dead = oracle.lse == -INF
    for name in NAMES:
        ours = planted(name, tensors, defect)
        ours = ours.masked_fill(dead, -INF) if name == "lse" else ours
        verdict = budget(name, ours, oracle, eager)
        assert verdict.ok == (defect == "none"), str(verdict)
        assert ("ok" if verdict.ok else "FAILED") in str(verdict)


def test_budget_wants_exact_zeros_and_infinities_where_the_mask_leaves_rows_out():
    q, k, v, dout = random_inputs(5, 5, 1, 1, 4, torch.float32, seed=4)
    mask = dict(cu_seqlens=[0, 3], dout=dout)
    oracle, eager = attention_oracle(q, k, v, **mask), eager_attention(q, k, v, **mask)
    good = {name: getattr(eager, name) for name in NAMES}
    assert all(verdict.ok for verdict in budgets(good, oracle, eager))
    for name in NAMES:
        bad = good[name].clone()
        (bad[:, :, 4] if name == "lse" else bad[:, 4]).fill_(1e-30)
        verdict = budget(name, bad, oracle, eager)
        assert not verdict.ok and verdict.why
    with pytest.raises(ValueError, match="shape"):
        budget("out", good["out"][:, :3], oracle, eager)


def test_a_plain_float32_sum_in_order_over_a_thousand_even_keys_is_within_budget_and_errors_nine_times_as_large_are_not():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 2, 32, generator=generator) for rows in (400, 1333, 1333))
    options = dict(causal=True, softmax_scale=0.02)
    oracle, eager = attention_oracle(q, k, v, **options), eager_attention(q, k, v, **options)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) * 0.02
    later = torch.arange(1333)[None] > torch.arange(400)[:, None] + 1333 - 400
    p = torch.exp(scores.masked_fill(later[:, None], -torch.inf))
    summed = torch.zeros(1, 400, 2, 32)
    for key in range(1333):
        summed = summed + p[..., key, None] * v[:, key, None]
    ours = summed / p.sum(-1, keepdim=True)
    verdict = budget("out", ours, oracle, eager)
    assert verdict.ok and verdict.max_error > 2 * (eager.out.double() - oracle.out).abs().max(), str(verdict)
    assert not budget("out", ours + 8 * (ours - oracle.out.float()), oracle, eager).ok
