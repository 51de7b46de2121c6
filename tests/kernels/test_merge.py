"""Folding two partial results: exact values, no NaN, no overflow, in value and gradient."""
import math

import pytest
import torch

from ringflash.kernels import dispatch
from ringflash.kernels.reference import merge
from ringflash.tests.support.visits import attend_in_visits

INF = math.inf
KERNELS = ("reference", "cpu")


def merged(lse_a, lse_b, dtype=torch.float32):
    """Of one row with outputs 1 and 3: (out, lse), and the gradients of their sum."""
    out_a, out_b = (torch.full((1, 1, 1, 1), x, dtype=dtype, requires_grad=True) for x in (1.0, 3.0))
    if lse_a == -INF:
        out_a = torch.zeros_like(out_a).requires_grad_()
    if lse_b == -INF:
        out_b = torch.zeros_like(out_b).requires_grad_()
    lses = [torch.full((1, 1, 1), x, dtype=dtype, requires_grad=True) for x in (lse_a, lse_b)]
    out, lse = merge(out_a, lses[0], out_b, lses[1])
    (out.sum() + lse.masked_fill(lse == -INF, 0.0).sum()).backward()
    return out.item(), lse.item(), [x.grad.item() for x in (out_a, out_b, *lses)]


def test_merge_of_lse_0_and_100_is_exactly_100_and_the_second_output():
    out, lse, _ = merged(0.0, 100.0)
    assert (out, lse) == (3.0, 100.0)


@pytest.mark.parametrize("x", [0.0, -60000.0, 3.25, 88.0, 2.0**100])
def test_merge_with_minus_infinity_changes_nothing(x):
    assert merged(x, -INF)[:2] == (1.0, x)
    assert merged(-INF, x)[:2] == (3.0, x)


def test_merge_of_two_empty_rows_is_empty_without_nan_in_the_gradients():
    out, lse, grads = merged(-INF, -INF)
    assert (out, lse) == (0.0, -INF)
    assert all(math.isfinite(g) for g in grads)


@pytest.mark.parametrize("gap", [88.0, 88.7, 88.8, 89.0, 104.0, 1e4, 3e38])
def test_merge_does_not_overflow_above_a_gap_of_88_7(gap):
    for sign in (1, -1):
        out, lse, grads = merged(sign * gap / 2, -sign * gap / 2)
        assert out == (1.0 if sign > 0 else 3.0) and lse == torch.tensor(gap / 2, dtype=torch.float32).item()
        assert all(math.isfinite(g) for g in grads)


@pytest.mark.parametrize("lse_a, lse_b", [(0.0, 100.0), (1.5, -INF), (-INF, 1.5), (0.0, 0.0), (-2.0, 3.0)])
def test_merge_gradients_are_those_of_the_weighted_mean(lse_a, lse_b):
    # out + lse with out = w a + (1 - w) b, w = sigmoid(lse_a - lse_b): d/d lse_a = w (1 - w) (a - b) + w.
    _, _, grads = merged(lse_a, lse_b, torch.float64)
    w = 0.0 if lse_a == -INF else 1.0 if lse_b == -INF else 1.0 / (1.0 + math.exp(lse_b - lse_a))
    expected = [w, 1 - w, w * (1 - w) * (1 - 3) + w, -w * (1 - w) * (1 - 3) + 1 - w]
    assert grads == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("split", [False, True])
def test_logits_near_minus_60000_come_out_exactly_however_they_are_split(kernel, order, split):
    backend = dispatch.select(kernel, device="cpu", dtype=torch.float32, head_dim=4)
    k = torch.tensor([-3e4, -3.00001e4])[list(order)].view(1, 2, 1, 1).expand(1, 2, 1, 4)
    v = torch.tensor([1.0, 3.0])[list(order)].view(1, 2, 1, 1).expand(1, 2, 1, 4)
    blocks = [torch.tensor([0]), torch.tensor([1])] if split else [torch.arange(2)]
    ends = torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    result = attend_in_visits(backend, torch.ones(1, 1, 1, 4), k, v, *ends, blocks, softmax_scale=0.5)
    # The tolerance is for float32, which holds -3.00001e4 as -30000.099609375 only.
    assert result["out"].flatten().tolist() == pytest.approx([1.900332] * 4, abs=1e-2)
    assert result["lse"].item() == pytest.approx(-59999.4019, abs=1e-2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("split", [False, True])
def test_a_state_that_starts_at_a_sink_ends_as_if_the_sink_were_a_key_without_value(kernel, split):
    # Two keys of score 0 and a sink of log(2): weights 1/4, 1/4, 1/2; the second row sees no key.
    backend = dispatch.select(kernel, device="cpu", dtype=torch.float32, head_dim=1)
    zeros, v = torch.zeros(1, 2, 1, 1), torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
    k_lo, k_hi = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2, 2], dtype=torch.int32)
    blocks = [torch.tensor([0]), torch.tensor([1])] if split else [torch.arange(2)]
    result = attend_in_visits(backend, zeros, zeros, v, k_lo, k_hi, blocks, sinks=torch.tensor([math.log(2.0)]),
                              dout=torch.ones(1, 2, 1, 1))
    assert result["out"].flatten().tolist() == pytest.approx([2.0, 0.0])
    assert result["lse"].flatten().tolist() == pytest.approx([math.log(4.0), math.log(2.0)])
    assert result["dv"].flatten().tolist() == pytest.approx([0.25, 0.25])
    assert result["dsinks"].item() == pytest.approx(-0.5 * 2.0)  # -p * rowsum(dout * out)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gap", [0.0, 80.0, 89.0, 150.0, 1e4])
@pytest.mark.parametrize("larger_first", [True, False])
def test_kernel_folds_blocks_whose_lse_lie_far_apart(kernel, gap, larger_first):
    backend = dispatch.select(kernel, device="cpu", dtype=torch.float32, head_dim=1)
    k = torch.tensor([gap, 0.0] if larger_first else [0.0, gap]).view(1, 2, 1, 1)
    v = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
    ends = torch.zeros(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    blocks = [torch.tensor([0]), torch.tensor([1])]
    one = torch.ones(1, 1, 1, 1)
    result = attend_in_visits(backend, one, k, v, *ends, blocks, softmax_scale=1.0, dout=one)
    weight = 1.0 / (1.0 + math.exp(-gap))  # of the larger one
    first = weight if larger_first else 1.0 - weight
    assert result["out"].item() == pytest.approx(2.0 * first + 6.0 * (1.0 - first), rel=1e-6)
    assert result["lse"].item() == pytest.approx(gap + math.log1p(math.exp(-gap)), rel=1e-6)
    assert result["dv"].flatten().tolist() == pytest.approx([first, 1.0 - first], rel=1e-5, abs=1e-30)
    assert all(bool(x.isfinite().all()) for x in result.values())
