"""Claims about weighted mixtures, and about documents cut into pieces."""
import numpy as np
import pytest

from ringflash.data import LazyTokens, MixedDataset, PackedDataset, split_documents
from ringflash.data.mixture import SLOTS, quotas


def dataset(base: int, num_tokens: int, **options) -> PackedDataset:
    starts = np.append(np.arange(0, num_tokens, 13), num_tokens)
    return PackedDataset(np.arange(base, base + num_tokens).astype(np.uint32), starts, 8, content=str(base), **options)


def mixture(weights=(3.0, 1.0), seed: int = 5, **options) -> MixedDataset:
    return MixedDataset([dataset(0, 300, **options), dataset(1000, 90, **options)], weights, seed=seed)


def test_shares_are_those_of_the_weights_in_every_block_and_near_them_on_the_way():
    mixed = mixture()
    parts = np.array([mixed.place(n)[0] for n in range(3 * SLOTS)])
    assert [int((block == 1).sum()) for block in parts.reshape(3, SLOTS)] == [SLOTS // 4] * 3
    running = np.cumsum(parts) / np.arange(1, len(parts) + 1)
    assert np.abs(running[100:] - 0.25).max() < 0.12
    assert not np.array_equal(parts[:SLOTS], parts[SLOTS:2 * SLOTS])


def test_each_part_is_served_in_its_own_order_without_a_gap_or_a_repetition():
    mixed = mixture()
    places = [mixed.place(n) for n in range(2 * SLOTS + 17)]
    for part in (0, 1):
        numbers = [number for p, number in places if p == part]
        assert numbers == list(range(len(numbers)))


def test_a_sample_depends_on_its_number_and_the_seed_alone_in_whatever_order_samples_are_asked_for():
    a, b = mixture(), mixture()
    numbers = np.random.default_rng(0).integers(0, 5 * SLOTS, 50).tolist()
    assert [a.place(n) for n in numbers] == [b.place(n) for n in reversed(numbers)][::-1]
    assert [a.place(n) for n in range(99)] != [mixture(seed=6).place(n) for n in range(99)]


def test_a_step_sees_the_same_samples_however_they_are_spread_over_ranks_and_micro_batches():
    mixed = mixture(document_mask=False)
    rows = np.arange(8)
    steps = [[tuple(mixed.batch(3, m, r, num_micro_batches=count, dp_size=dp)["tokens"][..., rows][0])
              for m in range(count) for r in range(dp)] for count, dp in ((1, 4), (4, 1), (2, 2))]
    assert steps[0] == steps[1] == steps[2]


def test_batches_come_from_the_part_that_the_number_names_with_its_documents():
    mixed = mixture()
    for n in range(40):
        part, number = mixed.place(n)
        batch = mixed.batch(n, 0, 0, num_micro_batches=1, dp_size=1)
        assert np.array_equal(batch["tokens"][..., np.arange(8)][0], mixed.parts[part].read(number, np.arange(8)))
        assert np.array_equal(batch["cu_seqlens"], mixed.parts[part].cu_seqlens(number))
    assert len({mixed.batch_hash((n,)) for n in range(40)}) == 40
    assert mixed.batch_hash((3,)) == mixture().batch_hash((3,))
    assert mixed.description() != mixture(weights=(1.0, 1.0)).description() and mixed.description() == mixture().description()


def test_the_smallest_weight_gets_at_least_one_sample_of_a_block():
    assert quotas([1e9, 1e-9, 1.0], 3).tolist() == [SLOTS - 2, 1, 1]
    assert quotas([1, 1, 1], 3).sum() == SLOTS and quotas([0.5, 0.5], 2).tolist() == [SLOTS // 2] * 2
    for weights in ([1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, -1.0]):
        with pytest.raises(ValueError, match="data.weights="):
            quotas(weights, 2)


def test_parts_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one seq_len"):
        MixedDataset([dataset(0, 300), PackedDataset(np.arange(90), [0, 90], 9)], [1, 1])


def test_long_documents_are_cut_into_pieces_and_short_ones_stay():
    starts = np.array([0, 3, 3, 13, 18], np.int64)
    assert split_documents(starts, 5).tolist() == [0, 3, 3, 8, 13, 18]
    assert split_documents(starts, 4).tolist() == [0, 3, 3, 7, 11, 13, 17, 18]
    assert split_documents(starts, None) is starts and split_documents(starts, 10).tolist() == starts.tolist()


def test_rows_that_were_read_ahead_are_not_read_again_and_others_are():
    tokens = LazyTokens(dataset(0, 300), (2,))
    expected = tokens[..., np.arange(8)]
    tokens.take(np.array([1, 2, 5]), np.array([[-1, -2, -5]]))
    assert tokens[..., np.array([5, 1])].tolist() == [[-5, -1]]
    assert tokens[..., np.array([1, 3])].tolist() == expected[:, [1, 3]].tolist()
    tokens.take(np.empty(0, np.int64), np.empty((1, 0), np.int64))
    assert tokens[..., np.array([7])].tolist() == expected[:, [7]].tolist()
