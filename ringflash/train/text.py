"""The text of a run as two streams of samples. Without torch: the launcher looks at the data before any rank starts."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ringflash.config import Config
from ringflash.data import PackedDataset, find_source, load_corpus, unigram_entropy


@dataclass(frozen=True)
class Data:
    train: PackedDataset
    heldout: PackedDataset
    unigram_nats: float  # of the held-out text, under the byte frequencies of the training text


def open_data(cfg: Config) -> Data:
    """The text of the run, ready to read. Raises ValueError or OSError naming data.path for a missing, empty or too small one."""
    source = find_source(cfg.data.path, pattern=cfg.data.pattern)
    corpus = load_corpus(source, Path(cfg.data.cache_dir), heldout_fraction=cfg.data.heldout_fraction,
                         max_bytes=cfg.data.max_bytes)

    def packed(split, batch_size: int) -> PackedDataset:
        return PackedDataset(split.tokens, split.doc_starts, cfg.data.seq_len, seed=cfg.train.seed, batch_size=batch_size,
                             document_mask=cfg.data.document_mask, content=split.content)

    entropy = unigram_entropy(corpus.heldout.tokens, counts_from=corpus.train.tokens)
    return Data(packed(corpus.train, cfg.data.batch_size), packed(corpus.heldout, 1), entropy)
