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
            assert torch.allclose(out, number, atol=1e-12)


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
        assert torch.allclose(ours, theirs.detach().transpose(1, 2), atol=1e-13, rtol=0)


def test_gradient_of_lse_is_the_probability_times_the_other_side():
    q, k, v, _ = random_inputs(3, 3, 1, 1, 4, torch.float64, seed=0)
    result = attention_oracle(q, k, v, causal=False, softmax_scale=1.0, dout=torch.zeros_like(q), dlse=torch.ones(1, 1, 3))
    p = torch.softmax(q[0, :, 0] @ k[0, :, 0].T, -1)
    assert torch.allclose(result.dq[0, :, 0], p @ k[0, :, 0], atol=1e-13)
    assert torch.allclose(result.dk[0, :, 0], p.T @ q[0, :, 0], atol=1e-13) and bool((result.dv == 0).all())


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
        assert torch.allclose(getattr(part, name), getattr(whole, name)[:, index], atol=1e-13)
    assert torch.allclose(part.lse, whole.lse[:, :, rows], atol=1e-13)
    assert attention_oracle(q, k, v, dout=dout, rows=rows).dk is None


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
