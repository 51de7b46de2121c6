"""The text of a run as two streams of samples. Without torch: the launcher looks at the data before any rank starts."""
from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ringflash.config import Config
from ringflash.data import (
    VOCAB_SIZE, MixedDataset, PackedDataset, Prepared, Reading, cached, find_source, format_of, is_prepared, load_corpus,
    open_prepared, split_documents, unigram_entropy,
)
from ringflash.data.packing import Samples
from ringflash.data.passkey import PackedPasskeys, PasskeyDataset, RandomFiller, TextFiller
from ringflash.data.tokenizer import load_tokenizer
from ringflash.data_options import DataConfig

_ASKED, _HELDOUT = -1, -2  # seeds: every run is asked the same keys, and none that it is trained on


@dataclass(frozen=True)
class Data:
    train: Samples
    heldout: Samples
    # Of the held-out text, under the token frequencies of the training text; of a mixture, the weighted mean; of the answers of
    # data.task=passkey, by chance.
    unigram_nats: float
    passkey: tuple[PasskeyDataset, ...] = ()  # what evaluation asks for: one per length


def open_data(cfg: Config) -> Data:
    """The text of the run, ready to read. Raises ValueError or OSError naming the option for one that is missing, empty, too small,
    damaged, or in a vocabulary that model.vocab_size does not hold."""
    d = cfg.data
    paths = list(d.mixture) or [d.path]
    weights = list(d.weights) or [1.0] * len(paths)
    needs_text = d.task == "text" or cfg.eval.passkey.filler == "text"
    sources = [open_source(d, path) for path in paths] if needs_text else []
    for path, source in zip(paths, sources):
        if source.num_ids > cfg.model.vocab_size:
            raise ValueError(f"model.vocab_size={cfg.model.vocab_size}: the tokens of data.path={path or 'null'} need "
                             f"{source.num_ids} (the largest is {source.num_ids - 1}); nearest: {source.num_ids}")
    depths = depths_of(cfg.eval.passkey.depths)
    asked = tuple(passkey_samples(cfg, sources, length, seed=_ASKED, depths=depths, document_mask=True)
                  for length in cfg.eval.passkey.lengths)
    if d.task == "passkey":
        options = {"everywhere": cfg.eval.passkey.labels == "all", "document_mask": d.document_mask,
                   "packed": tuple(cfg.eval.passkey.packed)}
        train = passkey_samples(cfg, sources, d.seq_len, seed=cfg.train.seed, is_training=True, batch_size=d.batch_size,
                                **options)
        heldout = passkey_samples(cfg, sources, d.seq_len, seed=_HELDOUT, **options)
        return Data(train, heldout, math.log(len(train.alphabet)), asked)

    def packed(split, batch_size: int, max_samples: int | None = None) -> PackedDataset:
        return PackedDataset(split.tokens, split_documents(split.doc_starts, d.max_document_tokens), d.seq_len,
                             seed=cfg.train.seed, batch_size=batch_size, document_mask=d.document_mask, content=split.content,
                             max_samples=max_samples)

    train = [packed(source.corpus.train, d.batch_size, d.max_samples) for source in sources]
    heldout = [packed(source.corpus.heldout, 1) for source in sources]
    nats = sum(weight * source.unigram_nats for weight, source in zip(weights, sources)) / sum(weights)
    if len(sources) == 1:
        return Data(train[0], heldout[0], nats, asked)
    return Data(MixedDataset(train, weights, seed=cfg.train.seed), MixedDataset(heldout, weights, seed=cfg.train.seed), nats,
                asked)


def depths_of(count: int) -> tuple[float, ...]:
    """count depths from 0 to 1; of one, the middle."""
    return tuple(index / (count - 1) for index in range(count)) if count > 1 else (0.5,)


def passkey_samples(cfg: Config, sources: Sequence[Prepared], length: int, *, seed: int, is_training: bool = False,
                    packed: Sequence[int] = (), **options) -> PasskeyDataset | PackedPasskeys:
    """Samples of `length` tokens of the task of eval.passkey, filled from the training or the held-out text of the sources.
    packed: each of several texts of these lengths."""
    p, d = cfg.eval.passkey, cfg.data
    tokenizer = load_tokenizer(d.tokenizer, d.document_start)
    if any(source.num_ids > tokenizer.size for source in sources):
        raise ValueError(f"eval.passkey.prompt={p.prompt!r}: would be written in data.tokenizer={d.tokenizer}, which did not "
                         "make the text's tokens; name the tokenizer.json that did")
    prompt = tokenizer.encode(p.prompt.encode())[1:]
    letters = {letter: tokenizer.encode(letter.encode())[1:] for letter in p.alphabet}
    for letter, tokens in letters.items():
        if len(tokens) != 1:
            raise ValueError(f"eval.passkey.alphabet={p.alphabet!r}: each character is to be one token, which {letter!r} is not")
    alphabet = np.concatenate(list(letters.values()))
    num_ids = max(int(prompt.max()), int(alphabet.max())) + 1
    if num_ids > cfg.model.vocab_size:
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size}: the tokens of eval.passkey's prompt and alphabet need "
                         f"{num_ids}; nearest: {num_ids}")
    if p.filler == "random":
        ids = np.arange(min(tokenizer.size, cfg.model.vocab_size))
        filler = RandomFiller(np.setdiff1d(ids, [*prompt, *alphabet, tokenizer.start]), seed)
    else:
        splits = [source.corpus.train if is_training else source.corpus.heldout for source in sources]
        filler = TextFiller([split.tokens for split in splits], [split.content for split in splits], seed)
    task = {"prompt": prompt, "alphabet": alphabet, "key_tokens": p.key_tokens, "seed": seed}
    try:
        if packed:
            return PackedPasskeys(filler, length, packed, everywhere=options["everywhere"], **task)
        return PasskeyDataset(filler, length, **task, **options)
    except ValueError as error:
        key = "eval.passkey.lengths" if "depths" in options else "eval.passkey.packed" if packed else "data.seq_len"
        raise ValueError(f"{key}={list(packed) or length}: {error}") from error


def open_source(d: DataConfig, path: str | os.PathLike | None) -> Prepared:
    """One source: prepared already, or made ready in data.cache_dir. OSError naming that, where it has no room or is read-only."""
    if is_prepared(path):
        return open_prepared(path)
    try:
        return _made_ready(d, path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        raise OSError(f"data.cache_dir={d.cache_dir}: the tokens cannot be written there ({error.strerror})") from error


def _made_ready(d: DataConfig, path: str | os.PathLike | None) -> Prepared:
    source = find_source(path, pattern=d.pattern)
    if d.tokenizer != "bytes" or d.document_start is not None or any(format_of(p, d.format) != "text" for _, p in source.files):
        return cached(source, Path(d.cache_dir), reading_of(d))
    corpus = load_corpus(source, Path(d.cache_dir), heldout_fraction=d.heldout_fraction, max_bytes=d.max_bytes)
    return Prepared(corpus, VOCAB_SIZE, unigram_entropy(corpus.heldout.tokens, counts_from=corpus.train.tokens))


def reading_of(d: DataConfig) -> Reading:
    return Reading(format=d.format, text_field=d.text_field, tokenizer=d.tokenizer, document_start=d.document_start,
                   bin_dtype=d.bin_dtype, bin_document_start=d.bin_document_start, heldout_fraction=d.heldout_fraction,
                   max_bytes=d.max_bytes)
