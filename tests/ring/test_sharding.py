"""shard, shard_batch: rows, labels, counts, and what is read of a source."""
import numpy as np
import pytest
import torch

from ringflash import Layout, Mask, shard, shard_batch, unshard
from ringflash.layout import LAYOUTS
from ringflash.sharding import batch_hash

_TOKENS = torch.arange(8)[None]


class _Source:
    """Tokens [B, S] that note which columns were read."""

    def __init__(self, tokens):
        self._tokens, self.shape, self.read = np.asarray(tokens), tuple(tokens.shape), set()
        self.batch_hash = 5

    def __getitem__(self, key):
        self.read |= set(np.arange(self.shape[1])[key[1]].tolist())
        return self._tokens[:, key[1]]


def _labels(kind, cp_size, **batch):
    layout = Layout(kind, 8, cp_size)
    return [shard_batch({"tokens": _TOKENS, **batch}, layout, rank=rank) for rank in range(cp_size)]


def test_labels_at_shard_edges_are_the_next_tokens_of_the_whole_sequence():
    assert [x.labels[0].tolist() for x in _labels("contiguous", 2)] == [[1, 2, 3, 4], [5, 6, 7, -100]]
    zigzag = _labels("zigzag", 2)
    assert [x.tokens[0].tolist() for x in zigzag] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [x.positions.tolist() for x in zigzag] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [x.labels[0].tolist() for x in zigzag] == [[1, 2, 7, -100], [3, 4, 5, 6]]
    assert all(x.num_valid == 7 for x in zigzag)


def test_the_last_token_of_each_document_has_no_label():
    parts = _labels("zigzag", 2, cu_seqlens=[0, 3, 8])
    assert [x.labels[0].tolist() for x in parts] == [[1, 2, 7, -100], [-100, 4, 5, 6]]
    assert all(x.num_valid == 8 - 2 for x in parts)
    # Empty documents, one-token documents, rows after the last one.
    for kind in ("contiguous", "zigzag", "striped"):
        for cp_size in (1, 2, 3, 8):
            parts = _labels(kind, cp_size, cu_seqlens=[0, 0, 1, 4, 4, 6])
            by_position = dict(zip(torch.cat([x.positions for x in parts]).tolist(),
                                   torch.cat([x.labels[0] for x in parts]).tolist()))
            assert [by_position[i] for i in range(8)] == [-100, 2, 3, -100, 5, -100, -100, -100]
            assert {x.num_valid for x in parts} == {3}


def test_given_labels_are_shifted_and_ignored_ones_do_not_count():
    labels = torch.tensor([[10, -100, 12, 13, -100, 15, 16, 17]])
    parts = _labels("contiguous", 2, labels=labels)
    assert [x.labels[0].tolist() for x in parts] == [[-100, 12, 13, -100], [15, 16, 17, -100]]
    assert all(x.num_valid == 5 for x in parts)


def test_the_returned_layout_masks_hold_the_documents_and_the_given_layout_is_left_alone():
    layout = Layout("zigzag", 8, 2, (Mask(), Mask(window_size=(2, 0))))
    sharded = shard_batch({"tokens": _TOKENS, "cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32)}, layout, rank=1)
    assert sharded.layout.masks == (Mask(cu_seqlens=[0, 3, 8]), Mask(window_size=(2, 0), cu_seqlens=[0, 3, 8]))
    assert layout.masks == (Mask(), Mask(window_size=(2, 0))) and not sharded.layout.is_agreed
    known = Layout("zigzag", 8, 1, Mask(cu_seqlens=[0, 3, 8]))
    assert shard_batch({"tokens": _TOKENS}, known).num_valid == 6       # documents known from the mask alone


def test_only_own_rows_and_the_ones_after_them_are_read():
    source = _Source(_TOKENS)
    shard_batch({"tokens": source}, Layout("zigzag", 8, 4), rank=1)     # rows 1 and 6
    assert source.read == {1, 2, 6, 7}
    with_labels = _Source(_TOKENS)
    shard_batch({"tokens": with_labels, "labels": _TOKENS}, Layout("zigzag", 8, 4), rank=1)
    assert with_labels.read == {1, 6}


def test_a_balanced_shard_of_many_runs_reads_its_own_rows_and_the_ones_after_them_only():
    boundaries = np.cumsum([0] + [3, 40, 7, 11, 2, 60, 5, 9, 1, 30, 20, 12] * 5).tolist()
    source = _Source(np.arange(1200)[None] % 1000)
    layout = Layout("balanced", 1200, 4)                                # its rows follow from the batch's documents
    parts = [shard_batch({"tokens": _Source(np.arange(1200)[None] % 1000), "cu_seqlens": boundaries}, layout, rank=rank)
             for rank in range(4)]
    made = parts[0].layout
    assert made == Layout("balanced", 1200, 4, Mask(cu_seqlens=boundaries)) and all(part.layout == made for part in parts)
    assert len(made.chunks(1)) > 5 and made.geometry != layout.geometry
    shard_batch({"tokens": source, "cu_seqlens": boundaries}, layout, rank=1)
    own = set(made.positions(1).tolist())
    assert own <= source.read <= own | {row + 1 for row in own}
    plain = shard_batch({"tokens": np.arange(1200)[None] % 1000, "cu_seqlens": boundaries}, "contiguous")
    for part in parts:
        assert torch.equal(part.labels, plain.labels[:, part.positions]) and part.num_valid == plain.num_valid


def test_shard_batch_takes_balanced_and_auto_by_name_but_shard_and_unshard_cannot():
    batch = {"tokens": _TOKENS, "cu_seqlens": [0, 3, 8]}
    for name in ("balanced", "auto"):
        assert shard_batch(batch, name).layout == Layout(name, 8, 1, Mask(cu_seqlens=[0, 3, 8]))
        assert shard_batch(batch, Layout(name, 8, 2), rank=1).layout.asked == name
        for call in (shard, unshard):
            with pytest.raises(ValueError, match=f"'{name}' cannot be given by name.*make a Layout"):
                call(torch.zeros(1, 8), name)
    with pytest.raises(ValueError, match="spiral.*balanced, auto"):
        shard_batch(batch, "spiral")


def test_an_empty_rank_gets_an_empty_part():
    part = shard_batch({"tokens": _TOKENS[:, :2]}, Layout("contiguous", 2, 3), rank=2)
    assert part.tokens.shape == (1, 0) and part.labels.shape == (1, 0) and part.positions.shape == (0,) and part.num_valid == 1


def test_sources_of_any_kind_give_the_same_part(tmp_path):
    values = np.arange(2 * 64, dtype=np.uint16).reshape(2, 64)
    values.tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r", shape=(2, 64))
    layout = Layout("striped", 64, 3)
    parts = [shard_batch({"tokens": x}, layout, rank=2) for x in (values, mapped, torch.from_numpy(values.astype(np.int32)))]
    for part in parts:
        assert part.tokens.dtype == torch.int64
        assert torch.equal(part.tokens, parts[0].tokens) and torch.equal(part.labels, parts[0].labels)
    assert batch_hash(values) == batch_hash(torch.from_numpy(values.astype(np.int64))) != batch_hash(values + 1)
    assert batch_hash(mapped) == batch_hash(np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r", shape=(2, 64)))


@pytest.mark.parametrize("batch, names", (
    ({}, "needs 'tokens'"), ({"tokens": _TOKENS, "lables": _TOKENS}, "lables"), ({"tokens": _TOKENS[0]}, r"\[B, S\]"),
    ({"tokens": _TOKENS, "labels": _TOKENS[:, :4]}, r"labels.*\(1, 4\)"),
    ({"tokens": _TOKENS.expand(2, 8), "cu_seqlens": [0, 8]}, "batch size 2.*B == 1"),
    ({"tokens": _TOKENS, "cu_seqlens": [0, 9]}, r"cu_seqlens\[-1\]=9"),
    ({"tokens": _TOKENS, "positions": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])}, "restart at row 4.*cu_seqlens"),
    ({"tokens": _TOKENS, "positions": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), "cu_seqlens": [0, 4, 8]}, "restart at row 3"),
    ({"tokens": _TOKENS, "positions": torch.arange(7)}, r"integers \[8\]"),
    ({"tokens": _TOKENS, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])}, "not all ones.*cu_seqlens"),
))
def test_a_batch_that_cannot_be_is_refused(batch, names):
    with pytest.raises(ValueError, match=names):
        shard_batch(batch, "zigzag")


def test_positions_may_restart_at_documents_and_a_mask_of_ones_is_no_mask():
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])
    batch = {"tokens": _TOKENS, "cu_seqlens": [0, 3, 8], "positions": positions, "attention_mask": torch.ones(1, 8)}
    part = shard_batch(batch, Layout("striped", 8, 2), rank=1)
    assert part.positions.tolist() == positions[1::2].tolist()
    plain = shard_batch({"tokens": _TOKENS, "cu_seqlens": [0, 3, 8]}, Layout("striped", 8, 2), rank=1)
    assert torch.equal(part.labels, plain.labels) and part.layout == plain.layout


def test_conflicting_ways_to_say_the_same_are_refused():
    layout = Layout("zigzag", 8, 2, Mask(cu_seqlens=[0, 4, 8]))
    for match, options in (("different documents", dict(layout=layout, rank=0)),
                           ("masks together", dict(layout=layout, rank=0, masks=Mask()))):
        with pytest.raises(ValueError, match=match):
            shard_batch({"tokens": _TOKENS, "cu_seqlens": [0, 3, 8]}, **options)
    with pytest.raises(ValueError, match="which rank"):
        shard_batch({"tokens": _TOKENS}, layout)
    with pytest.raises(ValueError, match="seq_len=9"):
        shard_batch({"tokens": _TOKENS}, Layout("zigzag", 9, 1))
    with pytest.raises(ValueError, match=r"rank=2: must lie in \[0, 2\)"):
        shard(torch.zeros(1, 8), layout, rank=2)
    with pytest.raises(ValueError, match="seq_len=8"):
        shard(torch.zeros(1, 7), layout, rank=1)
    with pytest.raises(ValueError, match="how many ranks"):
        shard(torch.zeros(1, 8), "zigzag", rank=1)
    with pytest.raises(ValueError, match="gives cp rank 0 8 rows"):
        unshard(torch.zeros(1, 7), Layout("zigzag", 8, 1))


def test_shards_partition_the_rows_and_their_gradients():
    for kind in LAYOUTS:
        for cp_size, ulysses_size in ((1, 1), (2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (2, 3)):
            x = torch.randn(2, 3, 13, requires_grad=True)
            layout = Layout(kind, 13, cp_size, Mask(cu_seqlens=[0, 2, 9, 11]), ulysses_size)
            parts = [shard(x, layout, rank=rank, dim=2) for rank in range(layout.num_ranks)]
            assert sorted(torch.cat(parts, 2)[0, 0].tolist()) == sorted(x[0, 0].tolist())
            sum(part.sum() for part in parts).backward()
            assert torch.equal(x.grad, torch.ones_like(x))
    x = torch.randn(1, 5, requires_grad=True)
    unshard(shard(x, "zigzag"), "zigzag").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
