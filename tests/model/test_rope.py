"""Claims about the rotary embedding."""
import math

import pytest
import torch

from ringflash.model.rope import rope_cos_sin, rope_rotate

MILLION = torch.tensor([0, 1, 2, 524_287, 999_983, 1_000_000, 1_048_575, 1_048_576, 8_388_607], dtype=torch.int64)


def exact_angles(positions, head_dim, base):
    """Angles by Python's own floats, one at a time."""
    return [[int(p) * base ** (-2 * i / head_dim) for i in range(head_dim // 2)] for p in positions]


@pytest.mark.parametrize("head_dim", [2, 32, 80, 128])
def test_cos_and_sin_near_position_one_million_are_within_1e_6_of_fp64(head_dim):
    cos, sin = rope_cos_sin(MILLION, head_dim, 10000.0)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (len(MILLION), head_dim // 2)
    for row, angles in enumerate(exact_angles(MILLION, head_dim, 10000.0)):
        assert max(abs(cos[row, i].item() - math.cos(a)) for i, a in enumerate(angles)) < 1e-6
        assert max(abs(sin[row, i].item() - math.sin(a)) for i, a in enumerate(angles)) < 1e-6


def test_fp32_angles_would_fail_the_same_bound():
    """The defect that the bound must catch."""
    inverse = 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    wrong = (MILLION.float()[:, None] * inverse).cos()
    assert (wrong - rope_cos_sin(MILLION, 128, 10000.0)[0]).abs().max() > 1e-3


def test_rotation_is_a_complex_product_of_dims_i_and_i_plus_half():
    x = torch.randn(2, len(MILLION), 3, 32, generator=torch.Generator().manual_seed(0))
    angles = torch.tensor(exact_angles(MILLION, 32, 500000.0), dtype=torch.float64)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    expected = torch.cat((turned.real, turned.imag), -1)
    got = rope_rotate(x, *rope_cos_sin(MILLION, 32, 500000.0))
    assert (got.double() - expected).abs().max() < 1e-6


def test_scores_depend_on_the_difference_of_positions_only_also_near_one_million():
    q, k = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(1))

    def score(i, j):
        turned = [rope_rotate(x, *rope_cos_sin(torch.tensor([p]), 64, 10000.0)).flatten() for x, p in ((q, i), (k, j))]
        return torch.dot(*turned).item()

    assert abs(score(1_048_570, 1_048_000) - score(570, 0)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_of_16_bit_rows_rounds_once(dtype):
    x = torch.randn(1, len(MILLION), 2, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    cos, sin = rope_cos_sin(MILLION, 32, 10000.0)
    got = rope_rotate(x, cos, sin)
    assert got.dtype == dtype
    assert torch.equal(got, rope_rotate(x.float(), cos, sin).to(dtype))


def test_no_rows_is_legal():
    cos, sin = rope_cos_sin(torch.empty(0, dtype=torch.int64), 32, 10000.0)
    assert rope_rotate(torch.empty(1, 0, 4, 32), cos, sin).shape == (1, 0, 4, 32)


def test_positions_that_are_no_int64_are_refused():
    for positions in (torch.arange(4.0), torch.arange(4, dtype=torch.int32), torch.arange(4).to(torch.bfloat16)):
        with pytest.raises(ValueError, match="int64"):
            rope_cos_sin(positions, 32, 10000.0)
    with pytest.raises(ValueError, match="1-D"):
        rope_cos_sin(torch.zeros(1, 4, dtype=torch.int64), 32, 10000.0)
    with pytest.raises(ValueError, match="head_dim=5.*even"):
        rope_cos_sin(torch.arange(4), 5, 10000.0)
