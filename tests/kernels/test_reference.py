"""The specification against the oracle: float64 to 1e-12, the other dtypes within their budgets."""
import math

import pytest
import torch

from ringflash.kernels import cpu, reference
from ringflash.kernels.intervals import Intervals
from ringflash.tests.support.budgets import assert_within_budget
from ringflash.tests.support.forward_cases import run_forward
from ringflash.tests.support.masks import interval_mask, random_intervals, split_keys
from ringflash.tests.support.oracle import attention_oracle, eager_attention
from ringflash.tests.support.triton_cases import BOUNDS, Case
from ringflash.tests.support.visits import attend_in_visits, random_inputs

SHAPES = [(1, 1), (13, 13), (17, 8), (8, 29), (1, 31), (31, 1)]


@pytest.mark.parametrize("visits", [1, 2, 3, 4])
@pytest.mark.parametrize("Sq, Sk", SHAPES)
def test_float64_equals_the_oracle_for_any_split_into_visits(Sq, Sk, visits):
    for seed in range(8):
        q, k, v, dout = random_inputs(Sq, Sk, 4, 2, 5, torch.float64, seed, B=2)
        dlse = torch.randn(2, 4, Sq, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        k_lo, k_hi = random_intervals(Sq, Sk, seed)
        ours = attend_in_visits(reference, q, k, v, k_lo, k_hi, split_keys(Sk, visits, seed), dout=dout, dlse=dlse)
        oracle = attention_oracle(q, k, v, allowed=interval_mask(k_lo, k_hi, Sk), dout=dout, dlse=dlse)
        for name, x in ours.items():
            torch.testing.assert_close(x, getattr(oracle, name), atol=1e-12, rtol=1e-12, msg=lambda said: f"{name}: {said}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("Hq, Hkv", [(1, 1), (4, 1), (7, 1), (8, 1), (8, 2)])
def test_every_dtype_is_within_budget_for_any_split_into_visits(dtype, Hq, Hkv):
    for seed in range(6):
        Sq, Sk = SHAPES[seed]
        q, k, v, dout = random_inputs(Sq, Sk, Hq, Hkv, 16, dtype, seed)
        k_lo, k_hi = random_intervals(Sq, Sk, seed + 1)
        ours = attend_in_visits(reference, q, k, v, k_lo, k_hi, split_keys(Sk, 1 + seed % 4, seed), dout=dout)
        mask = dict(allowed=interval_mask(k_lo, k_hi, Sk), dout=dout)
        assert_within_budget(ours, attention_oracle(q, k, v, **mask), eager_attention(q, k, v, **mask))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("Dv", [2, 4, 8, 1])
@pytest.mark.parametrize("softcap", [0.0, 0.5, 20.0, 50.0])
def test_float64_equals_the_oracle_with_a_cap_sinks_and_a_value_dim_of_its_own(softcap, Dv, sinks):
    for seed, (Sq, Sk) in enumerate(SHAPES):
        q, k, v, dout = random_inputs(Sq, Sk, 4, 2, 4, torch.float64, seed, B=2, Dv=Dv)
        generator = torch.Generator().manual_seed(seed)
        dlse = torch.randn(2, 4, Sq, dtype=torch.float64, generator=generator)
        # scores of some 20 times the smallest cap and of the size of the largest
        options = dict(softmax_scale=8.0, softcap=softcap, dout=dout, dlse=dlse,
                       sinks=torch.randn(4, dtype=torch.float64, generator=generator) if sinks else None)
        k_lo, k_hi = random_intervals(Sq, Sk, seed)
        ours = attend_in_visits(reference, q, k, v, k_lo, k_hi, split_keys(Sk, 1 + seed % 4, seed), **options)
        oracle = attention_oracle(q, k, v, allowed=interval_mask(k_lo, k_hi, Sk), **options)
        assert ("dsinks" in ours) == sinks
        for name, x in ours.items():
            assert x.shape == getattr(oracle, name).shape
            assert torch.allclose(x, getattr(oracle, name), atol=1e-11, rtol=1e-11), name


@pytest.mark.parametrize("Sq, Sk", [(0, 4), (4, 0), (0, 0)])
def test_lengths_of_zero_are_legal(Sq, Sk):
    q, k, v, dout = random_inputs(Sq, Sk, 2, 1, 4, torch.float32, seed=0)
    ends = torch.zeros(Sq, dtype=torch.int32)
    ours = attend_in_visits(reference, q, k, v, ends, ends, [torch.arange(Sk)], dout=dout)
    assert bool((ours["lse"] == -torch.inf).all())
    assert all(bool((ours[name] == 0).all()) for name in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_gradients_agree_with_finite_differences(softcap):
    q, k, v, dout = random_inputs(3, 4, 2, 1, 2, torch.float64, seed=7, Dv=3)
    cap = dict(softcap=softcap)
    k_lo, k_hi = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([2, 3, 4], dtype=torch.int32)
    dlse = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64).expand(1, 2, 3)

    def objective() -> float:
        result = attend_in_visits(reference, q, k, v, k_lo, k_hi, [torch.arange(4)], **cap)
        return float((result["out"] * dout).sum() + (result["lse"] * dlse).sum())

    blocks = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    grads = attend_in_visits(reference, q, k, v, k_lo, k_hi, blocks, dout=dout, dlse=dlse, **cap)
    for x, name in ((q, "dq"), (k, "dk"), (v, "dv")):
        for index in range(x.numel()):
            flat, step = x.view(-1), 1e-6
            flat[index] += step
            above = objective()
            flat[index] -= 2 * step
            below = objective()
            flat[index] += step
            assert (above - below) / (2 * step) == pytest.approx(grads[name].reshape(-1)[index].item(), abs=1e-8)


def test_relaxed_matmul_precision_and_autocast_do_not_reach_the_kernel():
    q, k, v, dout = random_inputs(16, 16, 2, 1, 32, torch.float32, seed=3)
    ends = torch.zeros(16, dtype=torch.int32), torch.arange(1, 17, dtype=torch.int32)
    plain = attend_in_visits(reference, q, k, v, *ends, [torch.arange(16)], dout=dout)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            relaxed = attend_in_visits(reference, q, k, v, *ends, [torch.arange(16)], dout=dout)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert all(torch.equal(plain[name], relaxed[name]) for name in plain)


def test_shapes_that_do_not_belong_together_are_refused():
    q, k, v, _ = random_inputs(3, 3, 3, 2, 4, torch.float32, seed=0)
    intervals = Intervals.from_rows(torch.zeros(3, dtype=torch.int32), torch.full((3,), 3, dtype=torch.int32), 3, "cpu")
    with pytest.raises(ValueError, match="Hq a multiple of Hkv"):
        reference.check_shapes(q, k, v, intervals)
    with pytest.raises(ValueError, match="intervals of 3 x 3 rows for q of 2"):
        reference.check_shapes(q[:, :2, :2], k, v, intervals)
    with pytest.raises(ValueError, match="v .1, 2, 2, 4.: want"):
        reference.check_shapes(q[:, :, :2], k, v[:, :2], intervals)
    reference.check_shapes(q[:, :, :2], k, v[..., :3], intervals)


@pytest.mark.parametrize("softcap", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("backend", [reference, cpu])
def test_a_cap_that_is_not_a_finite_number_from_0_on_is_refused(backend, softcap):
    q, k, v, dout = random_inputs(2, 2, 1, 1, 4, torch.float32, seed=0)
    ends = torch.zeros(2, dtype=torch.int32), torch.full((2,), 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"softcap={softcap}"):
        attend_in_visits(backend, q, k, v, *ends, [torch.arange(2)], softcap=softcap)
    rows, intervals = torch.zeros(1, 1, 2), Intervals.from_rows(*ends, 2, "cpu")
    with pytest.raises(ValueError, match=f"softcap={softcap}"):
        backend.backward(dout, q, k, v, rows, rows, intervals, softmax_scale=1.0, softcap=softcap, dq=q, dk=k, dv=v,
                         accumulate_dq=False, accumulate_dkv=False, deterministic=True)


@pytest.mark.parametrize("backend", [reference, cpu])
def test_gradients_of_saturated_scores_keep_their_digits(backend):
    # Scores 30 and 31 under a cap of 2: 1 - tanh^2 is 4 exp(-2 * score / cap), about 1e-13 and in float32 lost in 1 - 1.
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([30.0, 31.0]).view(1, 2, 1, 1)
    v, one = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1), torch.ones(1, 1, 1, 1)
    ends = torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    result = attend_in_visits(backend, q, k, v, *ends, [torch.arange(2)], softmax_scale=1.0, softcap=2.0, dout=one)
    expected = [-0.25 * 4 * math.exp(-30), 0.25 * 4 * math.exp(-31)]  # p (1 - p) = 0.25
    assert result["dk"].flatten().tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sinks", (False, True))
def test_each_row_is_finished_by_the_last_visit_that_sees_it_where_visits_know_of_each_other(sinks):
    for bounds in sorted(BOUNDS):
        for lengths, visits in (((50, 50), 3), ((20, 90), 5), ((90, 20), 2), ((30, 30), 1)):
            case = Case(*lengths, dtype=torch.float32, bounds=bounds, visits=visits, sinks=sinks)
            at_the_end, by_turns = (run_forward(reference, case, "cpu", turns=turns)[0] for turns in (False, True))
            for name, value in at_the_end.items():
                assert torch.equal(by_turns[name], value), (case, name)
