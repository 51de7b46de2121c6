"""Mask against the definition of what it allows, pair by pair."""
import copy
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ringflash import Mask
from ringflash.tests.support.plan_cases import SIZES, cases


def pairs(mask, seq_len_q, seq_len_k=None):
    """bool [Sq, Sk]: the pairs of all parts, none of which may be in two."""
    seq_len_k = seq_len_q if seq_len_k is None else seq_len_k
    keys = np.arange(seq_len_k)
    times = np.zeros((seq_len_q, seq_len_k), dtype=np.int64)
    for part in range(mask.num_parts):
        first, stop = mask.bounds(np.arange(seq_len_q), seq_len_q, seq_len_k, part)
        times += (first[:, None] <= keys) & (keys < stop[:, None])
    assert (times <= 1).all(), mask
    return times.astype(bool)


@pytest.mark.parametrize("cp_size", SIZES)
def test_bounds_allow_exactly_the_pairs_of_the_definition_and_are_monotone(cp_size):
    for case in cases("contiguous", cp_size, seed=1, lengths=8):
        size_q, size_k = case.layout.seq_len, case.layout_k.seq_len
        assert np.array_equal(pairs(case.mask, size_q, size_k), case.allowed), case
        for part in range(case.mask.num_parts):
            first, stop = case.mask.bounds(np.arange(size_q), size_q, size_k, part)
            assert (first <= stop).all() and (first >= 0).all() and (stop <= size_k).all()
            assert (np.diff(first) >= 0).all() and (np.diff(stop) >= 0).all(), case


def test_bounds_of_some_rows_are_those_rows_of_all_bounds():
    mask = Mask(window_size=(5, 0), cu_seqlens=[0, 7, 7, 20, 33])
    rows = np.array([0, 6, 7, 19, 20, 34, 39])
    for some, every in zip(mask.bounds(rows, 40, 40), mask.bounds(np.arange(40), 40, 40)):
        assert np.array_equal(some, every[rows])


def test_the_last_query_sits_at_the_last_key_when_lengths_differ():
    assert pairs(Mask(), 5, 2).sum(axis=1).tolist() == [0, 0, 0, 1, 2]
    assert pairs(Mask(), 2, 5).sum(axis=1).tolist() == [4, 5]


def test_rows_past_the_last_document_and_rows_of_a_mask_without_documents_are_dead():
    assert pairs(Mask(cu_seqlens=[0, 3]), 5).sum(axis=1).tolist() == [1, 2, 3, 0, 0]
    assert not pairs(Mask(cu_seqlens=[0]), 5).any()
    assert not pairs(Mask(cu_seqlens=[0, 0, 0]), 5).any()


def test_empty_documents_change_nothing():
    plain = Mask(cu_seqlens=[0, 4, 12, 18, 28])
    assert np.array_equal(pairs(Mask(cu_seqlens=[0, 0, 4, 4, 4, 12, 18, 28, 28]), 28), pairs(plain, 28))


@pytest.mark.parametrize("lengths", [(4, 8, 6, 10), (1, 27)])
def test_with_all_pairs_inside_documents_each_row_sees_its_own_document_only(lengths):
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    document = np.repeat(np.arange(len(lengths)), lengths)
    seen = pairs(Mask(cu_seqlens=boundaries), 28)
    assert [set(document[row]) for row in seen] == [{d} for d in document]


def test_window_63_over_512_tokens_and_two_layers_with_residual_carries_token_0_to_positions_0_to_126():
    one_layer = pairs(Mask(window_size=(63, 0)), 512)
    reached = one_layer.astype(int) @ one_layer.astype(int)[:, 0]
    assert np.flatnonzero(reached).tolist() == list(range(127))


@pytest.mark.parametrize("left", [0, 62, 63, 64, 512, 1000])
def test_window_left_counts_keys_before_the_query(left):
    assert pairs(Mask(window_size=(left, 0)), 512).sum(axis=1).tolist() == [min(i, left) + 1 for i in range(512)]


@pytest.mark.parametrize(("options", "rule"), [
    (dict(window_size=(-2, 0)), r"left=-2 must be >= 0, or -1"),
    (dict(window_size=(3, -5)), r"right=-5 must be >= 0, or -1"),
    (dict(window_size=(3, 1)), r"right must be 0 or -1, not 1"),
    (dict(window_size=(3,)), r"two ints"),
    (dict(window_size=(3.0, 0)), r"two ints"),
    (dict(window_size=None), r"two ints"),
    (dict(causal=None), r"must be True or False"),
    (dict(cu_seqlens=[1, 4]), r"must start at 0, starts at 1"),
    (dict(cu_seqlens=[0, 4, 3]), r"cu_seqlens\[2\]=3 < cu_seqlens\[1\]=4"),
    (dict(cu_seqlens=[]), r"must be"),
    (dict(cu_seqlens=[0.0, 4.0]), r"must be ints"),
    (dict(cu_seqlens=[[0, 4]]), r"1-D"),
    (dict(cu_seqlens=torch.tensor([0.0, 2.0])), r"must be ints"),
])
def test_a_mask_that_means_nothing_is_refused_with_the_rule_and_the_numbers(options, rule):
    with pytest.raises(ValueError, match=rule):
        Mask(**options)


def test_documents_longer_than_the_sequence_or_with_other_keys_are_refused_when_the_lengths_are_known():
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\]=9: documents must end within seq_len=8"):
        Mask(cu_seqlens=[0, 9]).bounds(np.arange(8), 8, 8)
    with pytest.raises(ValueError, match="seq_len_q=8 and seq_len_k=9.*cu_seqlens_k"):
        Mask(cu_seqlens=[0, 8]).bounds(np.arange(8), 8, 9)


def test_masks_are_values_equal_by_what_they_allow_and_hashable():
    assert Mask() == Mask(causal=True, window_size=(-1, 0)) == Mask(causal=False, window_size=(-1, 0))
    assert hash(Mask()) == hash(Mask(causal=False, window_size=(-1, 0)))
    for boundaries in (np.array([0, 4, 8], dtype=np.int32), torch.tensor([0, 4, 8]), (0, 4, 8), range(0, 9, 4)):
        assert Mask(cu_seqlens=boundaries) == Mask(cu_seqlens=[0, 4, 8])
    different = [Mask(), Mask(causal=False), Mask(window_size=(3, 0)), Mask(cu_seqlens=[0, 4, 8]), Mask(cu_seqlens=[0, 8])]
    assert len(set(different)) == len(different)
    assert Mask() != "causal"


def test_a_mask_keeps_no_hold_on_the_boundaries_it_was_made_from_and_cannot_be_changed():
    boundaries = torch.tensor([0, 4, 8])
    mask = Mask(cu_seqlens=boundaries)
    boundaries[1] = 7
    assert mask.cu_seqlens.tolist() == [0, 4, 8]
    with pytest.raises(ValueError):
        mask.cu_seqlens[1] = 7
    with pytest.raises(AttributeError):
        mask.causal = False


def test_spec_is_a_cpu_int64_tensor_that_gives_the_mask_back():
    draw = random.Random(0)
    for cp_size in SIZES:
        for case in cases("contiguous", cp_size, seed=draw.random(), lengths=2):
            spec = case.mask.spec
            assert spec.dtype == torch.int64 and spec.ndim == 1 and spec.numel() >= 2 and spec.device.type == "cpu"
            again = Mask.from_spec(spec)
            assert again == case.mask and torch.equal(again.spec, spec) and case.mask.spec is spec


@pytest.mark.parametrize("spec", [
    [2, -1], [1, -1, 0, 0, 0, -1, -1, -1], [2, -1, 0, 0, 0, 3, -1, -1, 0, 4], [2, -1, 0, 0, 0, 2, -1, -1, 0],
    [2, -1, 0, 0, 0, -1, -1, 1]])
def test_a_broken_spec_is_refused(spec):
    with pytest.raises(ValueError, match="spec"):
        Mask.from_spec(torch.tensor(spec))


def test_repr_names_what_differs_from_the_default_and_stays_short():
    assert repr(Mask()) == "Mask(causal=True)"
    assert repr(Mask(window_size=(63, 0), cu_seqlens=[0, 4])) == "Mask(causal=True, window_size=(63, 0), cu_seqlens=[0, 4])"
    assert "4000 documents, 8000 tokens" in repr(Mask(cu_seqlens=range(0, 8001, 2)))


def test_equal_masks_print_alike_however_they_were_written():
    assert repr(Mask(causal=False, window_size=(-1, 0))) == repr(Mask())
    assert repr(Mask(causal=True, window_size=(3, -1))) == repr(Mask(causal=False, window_size=(3, 0)))
    assert repr(Mask(causal=False)) != repr(Mask())


@pytest.mark.parametrize("causal, window_size", ((True, (2**63, 0)), (False, (0, 2**63 - 1)), (False, (2**80, 1))))
def test_a_window_that_positions_cannot_hold_is_refused(causal, window_size):
    with pytest.raises(ValueError, match="-1 is unlimited"):
        Mask(causal, window_size)


def test_a_mask_that_was_pickled_or_copied_hashes_as_in_this_process_and_stays_read_only():
    mask = Mask(window_size=(5, 0), cu_seqlens=[0, 3, 8])
    # Another process salts hashes differently; a pickle must not bring its own.
    code = "import pickle, sys; from ringflash import Mask; sys.stdout.write(pickle.dumps(Mask(True, (5, 0), [0, 3, 8])).hex())"
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    foreign = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    for other in (pickle.loads(bytes.fromhex(foreign)), copy.deepcopy(mask)):
        assert other == mask and hash(other) == hash(mask) and other in {mask}
        assert not other.cu_seqlens.flags.writeable
