"""The specification against the oracle: float64 to 1e-12, the other dtypes within their budgets."""
import pytest
import torch

from ringflash.kernels import reference
from ringflash.kernels.intervals import Intervals
from ringflash.tests.support.budgets import assert_within_budget
from ringflash.tests.support.masks import interval_mask, random_intervals, split_keys
from ringflash.tests.support.oracle import attention_oracle, eager_attention
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
            assert torch.allclose(x, getattr(oracle, name), atol=1e-12, rtol=1e-12), name


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


@pytest.mark.parametrize("Sq, Sk", [(0, 4), (4, 0), (0, 0)])
def test_lengths_of_zero_are_legal(Sq, Sk):
    q, k, v, dout = random_inputs(Sq, Sk, 2, 1, 4, torch.float32, seed=0)
    ends = torch.zeros(Sq, dtype=torch.int32)
    ours = attend_in_visits(reference, q, k, v, ends, ends, [torch.arange(Sk)], dout=dout)
    assert bool((ours["lse"] == -torch.inf).all())
    assert all(bool((ours[name] == 0).all()) for name in ("out", "dq", "dk", "dv"))


def test_gradients_agree_with_finite_differences():
    q, k, v, dout = random_inputs(3, 4, 2, 1, 2, torch.float64, seed=7)
    k_lo, k_hi = torch.tensor([0, 1, 1], dtype=torch.int32), torch.tensor([2, 3, 4], dtype=torch.int32)
    dlse = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64).expand(1, 2, 3)

    def objective() -> float:
        result = attend_in_visits(reference, q, k, v, k_lo, k_hi, [torch.arange(4)])
        return float((result["out"] * dout).sum() + (result["lse"] * dlse).sum())

    grads = attend_in_visits(reference, q, k, v, k_lo, k_hi, [torch.tensor([0, 3]), torch.tensor([1, 2])], dout=dout, dlse=dlse)
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
