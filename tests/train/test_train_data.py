"""Claims about the data of a run: what is refused before any rank starts, mixtures, and rows that a thread reads ahead."""
import dataclasses
import errno
import json
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_runs import StopAfter, figures, kept
from train_ranks import text, tiny

from ringflash import Layout, Mask, shard_batch
from ringflash.config import DataConfig, validate
from ringflash.data import LazyTokens, MixedDataset, PackedDataset, Reading, find_source, prepare
from ringflash.train.loop import train
from ringflash.train.prefetch import Prefetcher, wanted_rows
from ringflash.train.text import open_data
from ringflash.train.trainer import Trainer, document_positions
from ringflash.train.world import single

ROOT = Path(__file__).resolve().parents[2]


def written(path: Path, letter: str = "a", count: int = 40) -> Path:
    path.write_text("".join(json.dumps({"text": letter * (20 + i)}) + "\n" for i in range(count)))
    return path


def config(tmp_path, **data):
    return dataclasses.replace(tiny(), data=DataConfig(cache_dir=str(tmp_path / "cache"), **({"seq_len": 32} | data)))


def test_a_vocabulary_that_the_model_does_not_hold_is_refused_with_the_size_it_needs(tmp_path):
    (tmp_path / "a.bin").write_bytes(np.arange(500, dtype="<u2").tobytes())
    cfg = config(tmp_path, path=str(tmp_path / "a.bin"), seq_len=25)
    validate(cfg, 1)
    with pytest.raises(ValueError, match=r"model.vocab_size=257: the tokens of data.path=.*a.bin need 500 \(the largest is 499\); "
                                         "nearest: 500"):
        open_data(cfg)
    cfg.model.vocab_size = 500
    assert open_data(cfg).train.num_samples == 475 // 25


def test_a_prepared_folder_serves_the_samples_of_the_files_it_was_made_from(tmp_path):
    path = written(tmp_path / "a.jsonl")
    folder = prepare(find_source(path), tmp_path / "out", Reading())
    ours, theirs = (open_data(config(tmp_path, path=str(p))) for p in (path, folder))
    assert ours.train.description() == theirs.train.description() and ours.unigram_nats == theirs.unigram_nats
    rows = np.arange(32)
    assert all(np.array_equal(ours.train.read(n, rows), theirs.train.read(n, rows)) for n in range(40))


def test_a_mixture_has_the_shares_of_its_weights_and_documents_of_at_most_the_length_asked_for(tmp_path):
    paths = [str(written(tmp_path / f"{letter}.jsonl", letter)) for letter in "ab"]
    data = open_data(config(tmp_path, mixture=paths, weights=[3, 1], max_document_tokens=10))
    assert isinstance(data.train, MixedDataset) and isinstance(data.heldout, MixedDataset)
    samples = [data.train.read(n, np.arange(32)) for n in range(400)]
    letters = [{chr(t) for t in tokens if t < 256} for tokens in samples]
    assert 0.7 < sum(found == {"a"} for found in letters) / 400 < 0.8 and all(len(found) == 1 for found in letters)
    assert max(np.diff(data.train.cu_seqlens(n)).max() for n in range(40)) == 10


def test_a_stopped_and_resumed_mixture_has_the_figures_of_one_that_was_not_stopped(tmp_path):
    paths = [str(written(tmp_path / f"{letter}.jsonl", letter)) for letter in "ab"]
    cfg = dataclasses.replace(kept(), data=DataConfig(cache_dir=str(tmp_path / "cache"), seq_len=32, mixture=paths, weights=[2, 1]))
    for name in ("plain", "resumed"):
        (tmp_path / name).mkdir()
    assert train(cfg, single(), open_data(cfg), tmp_path / "plain", StopAfter()) is not None
    assert train(cfg, single(), open_data(cfg), tmp_path / "resumed", StopAfter(3)) is None
    assert train(cfg, single(), open_data(cfg), tmp_path / "resumed", StopAfter()) is not None
    assert figures(tmp_path / "plain") == figures(tmp_path / "resumed") and len(figures(tmp_path / "plain")) >= 6


@pytest.mark.parametrize(("data", "message"), [
    (dict(mixture=["a", "b"], weights=[1.0]), "data.weights=[1.0]: 1 weights for 2 sources of data.mixture"),
    (dict(mixture=["a", "b"], weights=[1.0, 0.0]), "data.weights=[1.0, 0.0]: each must be a finite number above 0"),
    (dict(mixture=["a"], path="b"), "data.path=b: given beside data.mixture"),
    (dict(mixture=["a", ""]), "data.mixture=['a', '']: an entry names no file"),
    (dict(format="csv"), "data.format=csv: valid: auto, text, jsonl, parquet, bin"),
    (dict(bin_dtype="int32"), "data.bin_dtype=int32: valid: uint16, uint32"),
    (dict(max_document_tokens=1), "data.max_document_tokens=1: must be at least 2, or null; nearest: 2"),
    (dict(text_field=""), "data.text_field='': names no field"),
    (dict(bin_document_start=-1), "data.bin_document_start=-1: must be at least 0, or null; nearest: 0"),
])
def test_broken_rules_of_the_data_group_name_key_and_value(tmp_path, data, message):
    with pytest.raises(ValueError) as caught:
        validate(config(tmp_path, **data), 1)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "content", "options", "message"), [
    ("a.bin", b"\0" * 4001, [], "is cut short: 4001 bytes"),
    ("a.bin", b"\xff" * 4000, [], "model.vocab_size=257: the tokens of data.path="),
    ("a.jsonl", b'{"txt": "abc"}\n', [], "data.text_field=text: "),
    ("a.jsonl", b'{"text": "abc"}\n', ["data.text_fild=x"], "data.text_fild: no such key; nearest: data.text_field"),
])
def test_the_launcher_refuses_bad_data_with_2_before_there_is_a_run_folder(tmp_path, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    done = subprocess.run([sys.executable, "launch/train.py", "run.device=cpu", f"run.root={tmp_path / 'runs'}", f"data.path={tmp_path / name}",
                           "model=tiny", *options], cwd=ROOT, capture_output=True, text=True)
    assert message in done.stderr and done.returncode in (1, 2) and (options or done.returncode == 2), done.stderr
    assert not [p for p in (tmp_path / "runs").glob("*") if p.name != "cache"]


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize(("cp", "ulysses"), [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("documents", [True, False])
def test_what_is_read_ahead_is_all_that_a_rank_reads_and_little_else(name, cp, ulysses, documents):
    data = text(tiny(seq_len=333)).train
    cu_seqlens = data.cu_seqlens(4) if documents else None
    mask = Mask(cu_seqlens=cu_seqlens) if documents else Mask()
    read = 0
    for rank in range(cp):
        layout = Layout(name, 333, cp // ulysses, mask, ulysses)
        rows = wanted_rows(name, 333, cp, ulysses, rank, [Mask()], cu_seqlens)
        tokens = LazyTokens(data, (4,))
        tokens.take(rows, LazyTokens(data, (4,))[..., rows])
        ahead = shard_batch({"tokens": tokens}, layout, rank=rank)
        assert tokens.read_s == 0
        plain = shard_batch({"tokens": LazyTokens(data, (4,))}, layout, rank=rank)
        assert torch.equal(ahead.tokens, plain.tokens) and torch.equal(ahead.labels, plain.labels)
        assert len(rows) <= 2 * layout.shard_len(rank)
        read += layout.shard_len(rank)
    assert read == 333


def test_reading_ahead_changes_no_bit_and_leaves_nothing_to_be_read_in_the_step():
    losses, late = {}, []
    for prefetch in (True, False):
        cfg = tiny(accumulation=2, steps=4)
        cfg.data.prefetch = prefetch
        trainer = Trainer(cfg, single(), text(cfg))
        shard = trainer.shard

        def spy(batch):
            sharded = shard(batch)
            late.append((prefetch, batch["tokens"].read_s > 0))
            return sharded

        trainer.shard = spy
        losses[prefetch] = [(r.loss, r.grad_norm) for r in map(trainer.train_step, range(4))]
        assert all(r >= 0 for r in (trainer.gradients(0).data_wait_ms,))
    assert losses[True] == losses[False]
    # The first step has nobody who read ahead for it; then every micro-batch was there.
    assert [is_late for prefetch, is_late in late if prefetch][:8] == [True] * 2 + [False] * 6
    assert all(is_late for prefetch, is_late in late if not prefetch)


def test_a_step_does_not_wait_for_rows_that_were_read_while_the_one_before_computed():
    data, reading, go = text(tiny()).train, threading.Event(), threading.Event()

    def rows(samples):
        reading.set()
        go.wait(30)
        return np.arange(45)

    ahead = Prefetcher(data, rows)
    ahead.start([(7,)])
    assert reading.wait(30)  # while this thread is free to compute
    go.set()
    tokens = [LazyTokens(data, (7,)), LazyTokens(data, (8,))]
    ahead.give(tokens)
    assert [int((t[..., np.arange(45)]).shape[1]) for t in tokens] == [45, 45]
    assert tokens[0].read_s == 0 < tokens[1].read_s


def test_what_the_thread_cannot_read_is_left_to_the_step_where_all_ranks_hear_of_it():
    data = text(tiny()).train
    ahead = Prefetcher(data, lambda samples: np.array([45]))
    ahead.start([(0,)])
    tokens = LazyTokens(data, (0,))
    ahead.give([tokens])
    assert tokens[..., np.arange(45)].shape == (1, 45) and tokens.read_s > 0
    ahead.give([tokens])  # nothing was started: nothing to wait for


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
def test_host_memory_of_the_loader_is_that_of_a_ranks_rows_and_not_of_the_sequence(name, documents):
    tokens, starts = np.zeros(1 << 22, np.uint16), np.arange(0, (1 << 22) + 1, 1 << 14)
    peaks = []
    for seq_len, cp in ((1 << 16, 8), (1 << 19, 64)):  # eight times the sequence, as many rows on each rank
        dataset = PackedDataset(tokens, starts, seq_len, document_mask=documents)

        def load():
            batch = dataset.batch(0, 1, 0, num_micro_batches=2, dp_size=1)
            rows = wanted_rows(name, seq_len, cp, 1, 3, [Mask()], batch.get("cu_seqlens"))
            batch["tokens"].take(rows, LazyTokens(dataset, (1,))[..., rows])
            mask = Mask(cu_seqlens=batch.get("cu_seqlens"))
            sharded = shard_batch({"tokens": batch["tokens"]}, Layout(name, seq_len, cp, mask), rank=3)
            if documents:
                document_positions(sharded.positions, batch["cu_seqlens"])

        load()  # the epoch's order, which grows with the documents of the text
        tracemalloc.start()
        load()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    rows_kib = (1 << 13) * 8 >> 10
    assert peaks[1] - peaks[0] < 2 * rows_kib << 10, peaks  # what a cp of 64 costs the balanced layout
    assert peaks[0] < 20 * rows_kib << 10 < (1 << 19) * 8, peaks


def test_a_cache_without_room_is_named_by_its_key(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("ringflash.data.corpus.os.replace", full)
    (tmp_path / "a.txt").write_text("some text " * 200)
    cfg = dataclasses.replace(tiny(), data=DataConfig(path=str(tmp_path / "a.txt"), seq_len=45, cache_dir=str(tmp_path / "cache")))
    with pytest.raises(OSError, match="data.cache_dir=.*cache: the tokens cannot be written there .No space left"):
        open_data(cfg)
