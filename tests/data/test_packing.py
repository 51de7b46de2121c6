"""Claims about packed samples."""
import itertools

import numpy as np
import pytest

from ringflash.data import LazyTokens, PackedDataset

LENGTHS = [4, 8, 6, 10, 1, 27, 1, 1, 13, 5, 40, 3]
STARTS = np.cumsum([0, *LENGTHS])
# Token = document * 100 + offset, so that a token says where it came from.
TOKENS = np.concatenate([100 * i + np.arange(n) for i, n in enumerate(LENGTHS)]).astype(np.uint16)


class Spy:
    """Tokens that remember which of them were read."""

    def __init__(self, tokens):
        self.tokens, self.read = tokens, []

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        self.read.extend(np.asarray(index).tolist())
        return self.tokens[index]


def whole(dataset, sample):
    return dataset.read(sample, np.arange(dataset.seq_len))


@pytest.mark.parametrize("seq_len", [1, 2, 5, 7, 16, 31, 118, 119])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_serves_every_token_once_but_for_less_than_one_window(seq_len, epoch):
    dataset = PackedDataset(TOKENS, STARTS, seq_len)
    assert dataset.num_samples == len(TOKENS) // seq_len
    served = np.concatenate([whole(dataset, epoch * dataset.num_samples + i) for i in range(dataset.num_samples)])
    assert len(set(served)) == len(served) == len(TOKENS) // seq_len * seq_len
    assert set(served) <= set(TOKENS.tolist())


@pytest.mark.parametrize("seq_len", [1, 5, 16, 31, 119])
def test_cu_seqlens_mark_exactly_the_places_where_a_document_begins(seq_len):
    dataset = PackedDataset(TOKENS, STARTS, seq_len)
    for sample in range(2 * dataset.num_samples):
        tokens, cu = whole(dataset, sample), dataset.cu_seqlens(sample)
        assert cu.dtype == np.int32 and cu[0] == 0 and cu[-1] == seq_len and (np.diff(cu) > 0).all()
        assert cu[1:-1].tolist() == [i for i in range(1, seq_len) if tokens[i] % 100 == 0]
        for a, b in zip(cu[:-1], cu[1:]):  # one document, in its own order
            assert tokens[a:b].tolist() == list(range(tokens[a], tokens[a] + b - a))


def test_empty_documents_leave_no_empty_segment():
    dataset = PackedDataset(np.arange(6, dtype=np.uint16), [0, 0, 3, 3, 3, 6, 6], 6)
    assert dataset.cu_seqlens(0).tolist() == [0, 3, 6]


def test_samples_depend_on_seed_epoch_and_index_alone():
    a, b = PackedDataset(TOKENS, STARTS, 16, seed=3), PackedDataset(TOKENS, STARTS, 16, seed=3)
    forward = [whole(a, i).tolist() for i in range(40)]
    assert [whole(b, i).tolist() for i in reversed(range(40))] == forward[::-1]  # whatever was asked for before
    assert [whole(PackedDataset(TOKENS, STARTS, 16, seed=4), i).tolist() for i in range(40)] != forward
    assert forward[:7] != forward[7:14], "epochs repeat each other"


def test_the_shuffle_is_pinned_so_that_a_run_resumes_on_any_version():
    dataset = PackedDataset(np.arange(12, dtype=np.uint16), [0, 4, 8, 12], 4, seed=1)
    assert [whole(dataset, i)[0] for i in range(9)] == [4, 8, 0, 4, 0, 8, 4, 0, 8]


@pytest.mark.parametrize("seq_len", [1, 16, 61])
def test_rows_read_in_pieces_are_the_rows_of_the_whole_sample(seq_len):
    dataset = PackedDataset(TOKENS, STARTS, seq_len)
    for size in (1, 2, 3, 4, 8):
        shards = [np.arange(r, seq_len, size) for r in range(size)]  # may be empty
        for shard in shards:
            assert dataset.read(1, shard).tolist() == whole(dataset, 1)[shard].tolist()
            assert dataset.read(1, shard[::-1]).tolist() == whole(dataset, 1)[shard[::-1]].tolist()


def test_a_rank_reads_its_own_rows_and_the_next_of_each_only():
    spy = Spy(TOKENS)
    dataset = PackedDataset(spy, STARTS, 31)
    batch = dataset.batch(0, 0, 0, num_micro_batches=1, dp_size=1)
    assert not spy.read, "making a batch reads nothing"
    rows = np.array([0, 1, 14, 15])
    tokens, following = batch["tokens"][..., rows], batch["tokens"][..., rows + 1]
    assert len(spy.read) == 8
    assert (tokens.shape, tokens.dtype) == ((1, 4), np.int64)
    assert set(spy.read) == set(np.searchsorted(TOKENS, np.concatenate((tokens, following)).ravel()))


@pytest.mark.parametrize("document_mask, batch_size", [(True, 1), (False, 1), (False, 3)])
def test_a_step_holds_the_same_samples_for_every_split_over_ranks_and_micro_batches(document_mask, batch_size):
    dataset = PackedDataset(TOKENS, STARTS, 5, document_mask=document_mask, batch_size=batch_size)
    for step in (0, 1, 9):
        steps = set()
        for dp_size in (1, 2, 4):
            micro = 4 // dp_size
            numbers = [dataset.sample_numbers(step, m, r, num_micro_batches=micro, dp_size=dp_size)
                       for m, r in itertools.product(range(micro), range(dp_size))]
            assert all(len(n) == batch_size for n in numbers)
            steps.add(tuple(itertools.chain(*numbers)))
        assert steps == {tuple(range(4 * step * batch_size, 4 * (step + 1) * batch_size))}


def test_ranks_of_one_ring_see_one_batch_and_other_rings_another():
    def view(dp_rank, seed=0, content="text"):
        fresh = PackedDataset(TOKENS, STARTS, 16, seed=seed, content=content)
        return fresh.batch(2, 1, dp_rank, num_micro_batches=2, dp_size=2)["tokens"]

    mine, peer, other = view(0), view(0), view(1)
    assert mine[..., :].tolist() == peer[..., :].tolist() != other[..., :].tolist()
    hashes = {t.batch_hash for t in (mine, peer)}
    assert len(hashes) == 1 and 0 <= mine.batch_hash < 2**63
    assert not hashes & {t.batch_hash for t in (other, view(0, seed=1), view(0, content="changed"))}


def test_batch_hash_changes_with_every_part_of_what_names_a_batch():
    names = {PackedDataset(TOKENS, starts, seq_len, document_mask=mask).batch_hash(samples)
             for starts in (STARTS, [0, len(TOKENS)]) for seq_len in (5, 6) for mask in (True, False)
             for samples in ((0,), (1,), (0, 1), (1, 0))}
    assert len(names) == 32


def test_a_dense_batch_has_different_rows_and_no_boundaries():
    dataset = PackedDataset(TOKENS, STARTS, 7, document_mask=False, batch_size=3)
    batch = dataset.batch(0, 0, 1, num_micro_batches=1, dp_size=2)
    assert set(batch) == {"tokens"} and isinstance(batch["tokens"], LazyTokens)
    assert batch["tokens"].shape == (3, 7) and batch["tokens"].dtype == np.int64 and len(batch["tokens"]) == 3
    assert batch["tokens"][..., :].tolist() == [whole(dataset, n).tolist() for n in (3, 4, 5)]
    assert batch["tokens"][:, 2:4].tolist() == batch["tokens"][..., [2, 3]].tolist()
    assert batch["tokens"][..., []].shape == (3, 0)


def test_samples_may_straddle_epochs_in_one_batch():
    dataset = PackedDataset(TOKENS, STARTS, 50, document_mask=False, batch_size=3)  # two windows an epoch
    rows = dataset.batch(0, 0, 0, num_micro_batches=1, dp_size=1)["tokens"][..., :]
    assert [len(set(r)) for r in rows] == [50] * 3 and not set(rows[0]) & set(rows[1])


def test_a_sequence_longer_than_the_text_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="data.seq_len=120: .* 119 tokens in 12 documents"):
        PackedDataset(TOKENS, STARTS, 120)
    with pytest.raises(ValueError, match="data.seq_len=0"):
        PackedDataset(TOKENS, STARTS, 0)


@pytest.mark.parametrize("make, words", [
    (lambda: PackedDataset(TOKENS, STARTS, 4, batch_size=2), "data.batch_size=2: must be 1 where documents are masked"),
    (lambda: PackedDataset(TOKENS, STARTS, 4, document_mask=False, batch_size=0), "data.batch_size=0"),
    (lambda: PackedDataset(TOKENS, STARTS[:-1], 4), "119, got 116"),
    (lambda: PackedDataset(TOKENS, [0, 9, 3, 119], 4), "non-decreasing"),
    (lambda: PackedDataset(TOKENS, STARTS, 4).batch(0, 1, 0, num_micro_batches=1, dp_size=1), r"micro_batch=1.*\[0, 1\)"),
    (lambda: PackedDataset(TOKENS, STARTS, 4).batch(0, 0, 2, num_micro_batches=1, dp_size=2), r"dp_rank=2.*\[0, 2\)"),
    (lambda: PackedDataset(TOKENS, STARTS, 4).batch(-1, 0, 0, num_micro_batches=1, dp_size=1), "step=-1"),
])
def test_what_does_not_fit_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("key", [(Ellipsis, [5]), (Ellipsis, [-1]), (0, [1]), 0, (Ellipsis, 1), (Ellipsis, [[1]]),
                                 (Ellipsis, [0.5])])
def test_rows_outside_the_sample_and_other_indexing_are_errors(key):
    with pytest.raises(IndexError):
        PackedDataset(TOKENS, STARTS, 5).batch(0, 0, 0, num_micro_batches=1, dp_size=1)["tokens"][key]


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
def test_shard_batch_reads_only_own_rows_and_their_successors_and_puts_the_batch_together_again(kind):
    from ringflash import Layout, Mask, shard_batch

    size, seq_len, valid = 4, 61, 0
    seen, labelled = np.full(seq_len, -1), np.full(seq_len, -1)
    for rank in range(size):
        spy = Spy(TOKENS)
        batch = PackedDataset(spy, STARTS, seq_len).batch(0, 0, 0, num_micro_batches=1, dp_size=1)
        layout = Layout(kind, seq_len, size, Mask(causal=True, cu_seqlens=batch["cu_seqlens"]))
        part = shard_batch(batch, layout, rank=rank)
        assert len(spy.read) <= 2 * len(part.positions)
        seen[part.positions], labelled[part.positions] = part.tokens[0], part.labels[0]
        valid += int((part.labels != -100).sum())
    dataset = PackedDataset(TOKENS, STARTS, seq_len)
    tokens, ends = whole(dataset, 0), dataset.cu_seqlens(0)[1:] - 1
    assert seen.tolist() == tokens.tolist()
    assert valid == seq_len - len(ends) and (labelled[ends] == -100).all()
    inner = np.setdiff1d(np.arange(seq_len), ends)
    assert labelled[inner].tolist() == tokens[inner + 1].tolist()


def test_steps_may_begin_at_any_sample_and_a_description_tells_other_data():
    tokens, starts = np.arange(100, dtype=np.uint16), np.array([0, 30, 100])
    dataset = PackedDataset(tokens, starts, 10, content="a")
    # After 3 steps of 4 samples a run goes on with 8 in a step: the samples before are not served again, and none is left out.
    origin = 3 * 4 - 3 * 8
    served = [n for step in (3, 4) for micro in range(4) for rank in range(2)
              for n in dataset.sample_numbers(step, micro, rank, num_micro_batches=4, dp_size=2, origin=origin)]
    assert served == list(range(12, 28))
    assert dataset.batch(3, 0, 1, num_micro_batches=4, dp_size=2, origin=origin)["tokens"].samples == (13,)
    with pytest.raises(ValueError, match="origin=-12: step 0 would begin before the first sample"):
        dataset.sample_numbers(0, 0, 0, num_micro_batches=4, dp_size=2, origin=origin)
    same, *others = (PackedDataset(tokens, s, length, seed=seed, content=content) for s, length, seed, content in (
        (starts, 10, 0, "a"), (starts, 20, 0, "a"), (starts, 10, 1, "a"), (starts, 10, 0, "b"), (np.array([0, 31, 100]), 10, 0, "a")))
    assert same.description() == dataset.description() and all(other.description() != dataset.description() for other in others)


def test_of_max_samples_the_first_are_served_over_and_over_and_the_description_says_so():
    every = PackedDataset(TOKENS, STARTS, 16, seed=3)
    few = PackedDataset(TOKENS, STARTS, 16, seed=3, max_samples=2)
    for sample in range(3 * every.num_samples):
        assert whole(few, sample).tolist() == whole(every, sample % 2).tolist()
        assert few.cu_seqlens(sample).tolist() == every.cu_seqlens(sample % 2).tolist()
    assert few.description() == every.description() | {"max_samples": 2}
    many = PackedDataset(TOKENS, STARTS, 16, seed=3, max_samples=10**6)
    assert whole(many, many.num_samples).tolist() == whole(many, 0).tolist()
