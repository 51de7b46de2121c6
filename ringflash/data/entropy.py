"""What a model of single bytes reaches: the loss that a language model must fall well below."""
import numpy as np

from .tokens import DOCUMENT_START

_CHUNK_TOKENS = 1 << 24


def unigram_entropy(tokens: np.ndarray, counts_from: np.ndarray | None = None) -> float:
    """Nats per byte of tokens (int [T]) under byte frequencies, their own or those of counts_from (then each count + 1, so that
    a byte unseen there costs something finite). DOCUMENT_START is left out: nothing ever predicts it. Raises ValueError if no
    byte is left."""
    counts = _counts(tokens)
    if not counts.sum():
        raise ValueError(f"unigram_entropy: no byte among {len(tokens)} tokens")
    model = counts if counts_from is None else _counts(counts_from) + 1
    seen = counts > 0
    return float(-(counts[seen] * np.log(model[seen] / model.sum())).sum() / counts.sum())


def _counts(tokens: np.ndarray) -> np.ndarray:
    """int64 [256]: how often each byte occurs."""
    counts = np.zeros(DOCUMENT_START, np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        counts += np.bincount(tokens[start:start + _CHUNK_TOKENS], minlength=DOCUMENT_START + 1)[:DOCUMENT_START]
    return counts
