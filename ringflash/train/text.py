"""The text of a run as two streams of samples. Without torch: the launcher looks at the data before any rank starts."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ringflash.config import Config
from ringflash.data import (
    VOCAB_SIZE, MixedDataset, PackedDataset, Prepared, Reading, cached, find_source, format_of, is_prepared, load_corpus,
    open_prepared, split_documents, unigram_entropy,
)
from ringflash.data_options import DataConfig


@dataclass(frozen=True)
class Data:
    train: PackedDataset | MixedDataset
    heldout: PackedDataset | MixedDataset
    unigram_nats: float  # of the held-out text, under the token frequencies of the training text; of a mixture, the weighted mean


def open_data(cfg: Config) -> Data:
    """The text of the run, ready to read. Raises ValueError or OSError naming the option for one that is missing, empty, too small,
    damaged, or in a vocabulary that model.vocab_size does not hold."""
    d = cfg.data
    paths = list(d.mixture) or [d.path]
    weights = list(d.weights) or [1.0] * len(paths)
    sources = [open_source(d, path) for path in paths]
    for path, source in zip(paths, sources):
        if source.num_ids > cfg.model.vocab_size:
            raise ValueError(f"model.vocab_size={cfg.model.vocab_size}: the tokens of data.path={path or 'null'} need "
                             f"{source.num_ids} (the largest is {source.num_ids - 1}); nearest: {source.num_ids}")

    def packed(split, batch_size: int) -> PackedDataset:
        return PackedDataset(split.tokens, split_documents(split.doc_starts, d.max_document_tokens), d.seq_len,
                             seed=cfg.train.seed, batch_size=batch_size, document_mask=d.document_mask, content=split.content)

    train = [packed(source.corpus.train, d.batch_size) for source in sources]
    heldout = [packed(source.corpus.heldout, 1) for source in sources]
    nats = sum(weight * source.unigram_nats for weight, source in zip(weights, sources)) / sum(weights)
    if len(sources) == 1:
        return Data(train[0], heldout[0], nats)
    return Data(MixedDataset(train, weights, seed=cfg.train.seed), MixedDataset(heldout, weights, seed=cfg.train.seed), nats)


def open_source(d: DataConfig, path: str | os.PathLike | None) -> Prepared:
    """One source: prepared already, or made ready in data.cache_dir."""
    if is_prepared(path):
        return open_prepared(path)
    source = find_source(path, pattern=d.pattern)
    if d.tokenizer != "bytes" or d.document_start is not None or any(format_of(p, d.format) != "text" for _, p in source.files):
        return cached(source, Path(d.cache_dir), reading_of(d))
    corpus = load_corpus(source, Path(d.cache_dir), heldout_fraction=d.heldout_fraction, max_bytes=d.max_bytes)
    return Prepared(corpus, VOCAB_SIZE, unigram_entropy(corpus.heldout.tokens, counts_from=corpus.train.tokens))


def reading_of(d: DataConfig) -> Reading:
    return Reading(format=d.format, text_field=d.text_field, tokenizer=d.tokenizer, document_start=d.document_start,
                   bin_dtype=d.bin_dtype, bin_document_start=d.bin_document_start, heldout_fraction=d.heldout_fraction,
                   max_bytes=d.max_bytes)
