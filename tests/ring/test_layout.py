"""Layout: rows of all ranks partition the sequence, sorted, evenly."""
import copy
import pickle

import numpy as np
import pytest
import torch

import ringflash.agreement
from ringflash import Layout, Mask
from ringflash.layout import KINDS, LAYOUTS


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 5, 8, 64])
def test_rows_of_all_ranks_partition_any_length_and_differ_by_at_most_one(kind, cp_size):
    most = 4 * cp_size + 2 if kind in KINDS else 30  # the others are made by a search
    for seq_len in [*range(1, most), 127, 128]:
        layout = Layout(kind, seq_len, cp_size)
        shards = [layout.positions(rank) for rank in range(cp_size)]
        lengths = [len(shard) for shard in shards]
        assert sorted(np.concatenate(shards).tolist()) == list(range(seq_len))
        assert max(lengths) - min(lengths) <= 1
        assert lengths == [layout.shard_len(rank) for rank in range(cp_size)]
        for rank, shard in enumerate(shards):
            assert shard.dtype == np.int64 and (np.diff(shard) > 0).all()
            chunks = layout.chunks(rank)
            assert [p for start, stop, stride in chunks for p in range(start, stop, stride)] == shard.tolist()
            assert all(start < stop and (stop - 1 - start) % stride == 0 for start, stop, stride in chunks)


def test_the_layouts_are_the_ones_their_names_promise():
    rows = {kind: [Layout(kind, 8, 2).positions(rank).tolist() for rank in range(2)] for kind in KINDS}
    assert rows == {
        "contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]],
        "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]],
        "striped": [[0, 2, 4, 6], [1, 3, 5, 7]],
    }
    assert [Layout("zigzag", 16, 4).positions(r).tolist() for r in range(4)] == [
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def test_shards_are_equal_when_the_length_divides():
    for kind in KINDS:
        assert [Layout(kind, 21, 3).shard_len(rank) for rank in range(3)] == [7, 7, 7]
        assert [Layout(kind, 7, 2).shard_len(rank) for rank in range(2)] == [4, 3]
        assert [Layout(kind, 2, 4).shard_len(rank) for rank in range(4)] == [1, 1, 0, 0]


@pytest.mark.parametrize("kind", ["zig-zag", "", None, 3])
def test_an_unknown_kind_is_refused_with_the_valid_ones(kind):
    with pytest.raises(ValueError, match="contiguous, zigzag, striped, balanced, auto"):
        Layout(kind, 8, 2)


@pytest.mark.parametrize(("options", "rule"), [
    (dict(seq_len=0), "seq_len=0: must be an int >= 1"),
    (dict(seq_len=8.0), "seq_len=8.0: must be an int >= 1"),
    (dict(cp_size=0), "cp_size=0: must be an int >= 1"),
    (dict(cp_size=True), "cp_size=True: must be an int >= 1"),
    (dict(ulysses_size=0), "ulysses_size=0"),
    (dict(masks=()), "at least one Mask"),
    (dict(masks="causal"), "is not a Mask"),
    (dict(masks=Mask(cu_seqlens=[0, 9])), r"cu_seqlens\[-1\]=9.*seq_len=8"),
    (dict(seq_len=2**33, cp_size=2), "at most 2147483647 rows"),
    (dict(agree={"step": 1}), "needs group"),
])
def test_an_impossible_layout_is_refused_with_the_rule_and_the_numbers(options, rule):
    with pytest.raises(ValueError, match=rule):
        Layout(**{"kind": "zigzag", "seq_len": 8, "cp_size": 2, **options})


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_ring_is_refused(rank):
    for ask in (Layout("zigzag", 8, 2).positions, Layout("striped", 8, 2).chunks, Layout("contiguous", 8, 2).shard_len):
        with pytest.raises(ValueError, match=r"ranks 0\.\.1"):
            ask(rank)


def test_layouts_are_values_equal_by_content_and_hashable():
    window = Mask(window_size=(3, 0))
    assert Layout("zigzag", 8, 2) == Layout("zigzag", 8, 2, Mask()) == Layout("zigzag", 8, 2, [Mask()])
    different = [Layout("zigzag", 8, 2), Layout("striped", 8, 2), Layout("zigzag", 9, 2), Layout("zigzag", 8, 4),
                 Layout("zigzag", 8, 2, window), Layout("zigzag", 8, 2, (Mask(), window))]
    assert len(set(different)) == len(different)
    with pytest.raises(AttributeError):
        different[0].seq_len = 9


def test_spec_is_a_cpu_int64_tensor_that_gives_the_layout_back():
    for kind in (*KINDS, "balanced"):
        layout = Layout(kind, 77, 4, Mask(cu_seqlens=[0, 3, 50, 60, 77]), ulysses_size=2)
        assert layout.spec.dtype == torch.int64 and layout.spec.device.type == "cpu" and layout.spec is layout.spec
        assert Layout.from_spec(layout.spec, layout.masks) == layout
        other = Layout.from_spec(layout.spec, Mask(causal=False))  # other masks, the same rows
        assert other.masks == (Mask(causal=False),) and other.geometry == layout.geometry
    with pytest.raises(ValueError, match="spec"):
        Layout.from_spec(torch.tensor([1, 9, 8, 2, 1]))


@pytest.mark.parametrize("runs", [[], [0, 4], [0, 4, 8, 0, 1, 0], [0, 4, 2, 0, 1, 1], [1, 4, 0, 1], [0, 4, 0, 2], [0, 4, 1, 1],
                                  [0, 5, 0, 1], [0, 4, 0]])
def test_a_spec_whose_runs_are_no_balanced_layout_is_refused(runs):
    assert Layout.from_spec(torch.tensor([1, 3, 8, 2, 1, 0, 4, 1, 0])).chunks(0) == ((4, 8, 1),)
    with pytest.raises(ValueError, match="spec|runs"):
        Layout.from_spec(torch.tensor([1, 3, 8, 2, 1, *runs]))


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ulysses_size", [1, 2, 3, 4])
def test_ulysses_ranks_split_the_sorted_rows_of_their_ring_shard(kind, ulysses_size):
    for cp_size in (1, 2, 3):
        for seq_len in (1, 2, 7, 24, 53):
            layout = Layout(kind, seq_len, cp_size, Mask(cu_seqlens=[0, seq_len // 3, seq_len]), ulysses_size)
            ring = layout.ring
            assert (layout.num_ranks, ring.num_ranks, ring.ulysses_size) == (cp_size * ulysses_size, cp_size, 1)
            lengths = [layout.shard_len(rank) for rank in range(layout.num_ranks)]
            assert max(lengths) - min(lengths) <= 1 and lengths[0] == max(lengths) and sum(lengths) == seq_len
            for ring_rank in range(cp_size):
                parts = range(ring_rank * ulysses_size, (ring_rank + 1) * ulysses_size)
                rows = [layout.positions(rank) for rank in parts]
                assert np.array_equal(np.concatenate(rows), ring.positions(ring_rank))
                for rank, part in zip(parts, rows):
                    assert [p for start, stop, stride in layout.chunks(rank) for p in range(start, stop, stride)] == part.tolist()
                    assert len(part) == lengths[rank]
    assert Layout("zigzag", 16, 2, ulysses_size=2).chunks(1) == ((12, 16, 1),)
    assert Layout("zigzag", 16, 2) != Layout("zigzag", 16, 2, ulysses_size=2)
    assert "ulysses_size=2" in repr(Layout("zigzag", 16, 2, ulysses_size=2))


def test_a_layout_agrees_only_when_it_is_given_a_group(monkeypatch):
    seen = []
    monkeypatch.setattr(ringflash.agreement, "agree_layout", lambda *arguments: seen.append(arguments) or "agreed on this")
    assert Layout("zigzag", 8, 2).token is None and not seen
    layout = Layout("zigzag", 8, 2, group="the ring", agree={"hash": 3})
    assert layout.token == "agreed on this" and seen == [(layout, "the ring", {"hash": 3})]


def test_a_rank_that_refuses_its_layout_tells_the_group_before_it_raises(monkeypatch):
    told = []
    monkeypatch.setattr("ringflash.mesh.ranks_of", lambda group: group)
    monkeypatch.setattr(ringflash.agreement, "agree", lambda group, what, fields, problem: told.append((group, str(problem))))
    with pytest.raises(ValueError, match="seq_len=0"):
        Layout("zigzag", 0, 2, group="the ring")
    assert told == [("the ring", "seq_len=0: must be an int >= 1")]


def test_a_pickled_or_copied_layout_claims_no_agreement():
    for kind in LAYOUTS:
        layout = Layout(kind, 10, 2, Mask(cu_seqlens=[0, 4, 10]), ulysses_size=2)
        layout.set_token("agreed")
        for made in (pickle.loads(pickle.dumps(layout)), copy.copy(layout), copy.deepcopy(layout)):
            assert made == layout and hash(made) == hash(layout) and made.geometry == layout.geometry
            assert (made.asked, made.reason) == (layout.asked, layout.reason) and made.asked == kind
            assert made.token is None and not made.is_agreed
