"""One visit's mask: what from_host accepts, and the transpose."""
import pytest
import torch

from ringflash.kernels.intervals import Intervals, accumulate_dtype, transpose
from ringflash.tests.support.masks import interval_mask, random_intervals, split_keys, visit_rows


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("num_q, num_k", [(1, 1), (5, 2), (2, 5), (17, 17), (40, 23), (3, 0), (0, 3)])
def test_transpose_names_the_same_pairs_as_the_rows(num_q, num_k):
    for seed in range(40):
        k_lo, k_hi = random_intervals(num_q, num_k, seed)
        q_lo, q_hi = transpose(k_lo, k_hi, num_k)
        assert q_lo.dtype == q_hi.dtype == torch.int32
        assert torch.equal(interval_mask(k_lo, k_hi, num_k), interval_mask(q_lo, q_hi, num_q).T)
        assert bool((q_lo <= q_hi).all()) and bool((q_lo.diff() >= 0).all()) and bool((q_hi.diff() >= 0).all())


@pytest.mark.parametrize("seed", range(8))
def test_visits_of_dealt_keys_cover_each_pair_once(seed):
    k_lo, k_hi = random_intervals(19, 31, seed)
    whole = interval_mask(k_lo, k_hi, 31)
    total = torch.zeros(19, 31, dtype=torch.int64)
    for keys in split_keys(31, 3, seed):
        total[:, keys] += interval_mask(*visit_rows(k_lo, k_hi, keys), len(keys)).long()
    assert torch.equal(total, whole.long())


def test_host_and_device_sides_hold_what_was_given():
    k_lo, k_hi = ints(0, 0, 1), ints(1, 2, 2)
    intervals = Intervals.from_host(k_lo, k_hi, ints(0, 1), ints(2, 3), "cpu")
    assert (intervals.num_q, intervals.num_k, intervals.is_empty) == (3, 2, False)
    assert torch.equal(intervals.k_hi, k_hi) and torch.equal(intervals.q_hi, ints(2, 3))
    assert torch.equal(intervals.host_q_lo, ints(0, 1)) and intervals.cache == {}


def test_a_visit_without_any_pair_is_empty():
    assert Intervals.from_rows(ints(0, 2, 2), ints(0, 2, 2), 2, "cpu").is_empty
    assert Intervals.from_rows(ints(), ints(), 4, "cpu").is_empty
    assert Intervals.from_rows(ints(0, 0), ints(0, 0), 0, "cpu").is_empty


@pytest.mark.parametrize(
    "k_lo, k_hi, message",
    [
        (ints(0, 0), ints(1, 4), r"outside \[0, 3\)"),
        (ints(-1, 0), ints(1, 3), r"outside \[0, 3\)"),
        (ints(0, 2), ints(2, 1), "k_lo > k_hi"),
        (ints(1, 0), ints(2, 3), "k_lo decreases at row 0"),
        (ints(0, 0), ints(3, 2), "k_hi decreases at row 0"),
    ],
)
def test_ends_that_a_kernel_would_read_out_of_bounds_are_refused(k_lo, k_hi, message):
    with pytest.raises(ValueError, match=message):
        Intervals.from_rows(k_lo, k_hi, 3, "cpu")


def test_other_dtypes_and_shapes_are_refused():
    with pytest.raises(ValueError, match="torch.int64"):
        Intervals.from_host(torch.zeros(2, dtype=torch.int64), ints(1, 1), ints(0), ints(2), "cpu")
    with pytest.raises(ValueError, match="shapes"):
        Intervals.from_host(ints(0), ints(1, 1), ints(0), ints(2), "cpu")


def test_sums_are_float32_except_for_float64():
    assert [accumulate_dtype(d) for d in (torch.float16, torch.bfloat16, torch.float32)] == [torch.float32] * 3
    assert accumulate_dtype(torch.float64) == torch.float64
