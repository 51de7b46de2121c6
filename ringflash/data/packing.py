"""Documents packed to a fixed length: which tokens a sample holds, decided by (seed, epoch, index) and by nothing else.

An epoch lays all documents end to end in a shuffled order, cuts that line into windows of seq_len, and serves the windows in a
shuffled order; what is left over at the end (fewer than seq_len tokens) is not served in that epoch. No padding.
Nothing is read until rows are asked for, and then only those rows: a rank of a ring reads its own.
Note [Data].
"""
import hashlib
import time
from collections.abc import Sequence

import numpy as np

_EPOCHS_KEPT = 2  # a batch may straddle two
_DOCUMENTS, _WINDOWS = 0, 1  # the two shuffles of an epoch


class Samples:
    """What is numbered for ever and served in micro-batches. A subclass has seq_len, document_mask, batch_size, num_samples, and
    read, cu_seqlens, description and batch_hash as PackedDataset has them."""

    seq_len: int
    document_mask: bool
    batch_size: int
    num_samples: int

    def sample_numbers(self, step: int, micro_batch: int, dp_rank: int, *, num_micro_batches: int, dp_size: int,
                       origin: int = 0) -> tuple[int, ...]:
        """Numbers of the samples of one micro-batch of one data-parallel rank, batch_size of them.

        A step takes num_micro_batches * dp_size * batch_size consecutive numbers, so it sees the same samples however they are
        spread over micro-batches and ranks; the ranks of a ring share dp_rank and with it the batch. origin is where step 0 begins,
        or would have begun: a run that goes on with another number of samples per step may have a negative one.
        """
        for key, value, size in (("micro_batch", micro_batch, num_micro_batches), ("dp_rank", dp_rank, dp_size)):
            if not 0 <= value < size:
                raise ValueError(f"{key}={value}: must lie in [0, {size})")
        if step < 0:
            raise ValueError(f"step={step}: must be at least 0")
        first = origin + ((step * num_micro_batches + micro_batch) * dp_size + dp_rank) * self.batch_size
        if first < 0:
            raise ValueError(f"origin={origin}: step {step} would begin before the first sample")
        return tuple(range(first, first + self.batch_size))

    def batch(self, step: int, micro_batch: int, dp_rank: int, *, num_micro_batches: int, dp_size: int, origin: int = 0) -> dict:
        """{"tokens": LazyTokens [B, seq_len]} and, with document_mask, "cu_seqlens": int32 [N + 1]. See sample_numbers."""
        return self.batch_of(self.sample_numbers(step, micro_batch, dp_rank, num_micro_batches=num_micro_batches, dp_size=dp_size,
                                                 origin=origin))

    def batch_of(self, samples: tuple[int, ...]) -> dict:
        """As batch(), of these samples."""
        batch = {"tokens": LazyTokens(self, samples)}
        if self.document_mask:
            batch["cu_seqlens"] = self.cu_seqlens(samples[0])
        return batch


class PackedDataset(Samples):
    """Samples of seq_len tokens.

    tokens         integers [T], array-like; only tokens[int64 index array] is ever used
    doc_starts     int64 [N + 1], from 0 to T
    seq_len        tokens per sample
    seed           of the shuffles
    document_mask  True: a batch carries cu_seqlens, batch_size is 1. False: no document boundaries, any batch_size
    batch_size     samples per micro-batch and data-parallel rank
    content        digest of the text (Split.content), part of batch_hash
    max_samples    only the first so many samples, over and over in the same order; None: all

    Samples are numbered for ever: sample n is window n % num_samples of epoch n // num_samples.
    Raises ValueError for a seq_len beyond the text, doc_starts that do not fit, or a masked batch of more than one sample.
    """

    def __init__(self, tokens, doc_starts, seq_len: int, *, seed: int = 0, document_mask: bool = True, batch_size: int = 1,
                 content: str = "", max_samples: int | None = None):
        self.doc_starts = np.asarray(doc_starts, np.int64)
        starts = self.doc_starts
        if starts.ndim != 1 or len(starts) < 2 or starts[0] or np.any(np.diff(starts) < 0):
            raise ValueError("doc_starts must be int64 [N + 1], non-decreasing from 0")
        self.num_tokens = int(self.doc_starts[-1])
        if self.num_tokens != len(tokens):
            raise ValueError(f"doc_starts must end at the number of tokens, {len(tokens)}, got {self.num_tokens}")
        if not 1 <= seq_len <= self.num_tokens:
            raise ValueError(f"data.seq_len={seq_len}: must lie between 1 and the size of the text, {self.num_tokens} tokens "
                             f"in {len(self.doc_starts) - 1} documents")
        if batch_size < 1 or (document_mask and batch_size > 1):
            rule = "1 where documents are masked (data.document_mask=true)" if document_mask else "at least 1"
            raise ValueError(f"data.batch_size={batch_size}: must be {rule}")
        self.tokens, self.seq_len, self.seed, self.content = tokens, seq_len, seed, content
        self.document_mask, self.batch_size = document_mask, batch_size
        self.num_samples = self.num_tokens // seq_len
        self.max_samples = None if max_samples is None else min(max_samples, self.num_samples)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        """Tokens (int64 [n]) at positions (int64 [n], any order) of a sample; reads those rows only. IndexError outside it."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not (0 <= positions.min() and positions.max() < self.seq_len):
            raise IndexError(f"positions must lie in [0, {self.seq_len}), got {positions.min()}..{positions.max()}")
        order, line_starts, start = self._window(sample)
        line = start + positions
        place = np.searchsorted(line_starts, line, side="right") - 1
        return np.asarray(self.tokens[self.doc_starts[order[place]] + line - line_starts[place]]).astype(np.int64)

    def cu_seqlens(self, sample: int) -> np.ndarray:
        """Document boundaries within a sample, int32 [N + 1] from 0 to seq_len, strictly rising; ends may cut documents."""
        _, line_starts, start = self._window(sample)
        first, stop = np.searchsorted(line_starts, start, "right"), np.searchsorted(line_starts, start + self.seq_len, "left")
        inner = line_starts[first:stop]
        return np.unique(np.concatenate(([0], inner - start, [self.seq_len]))).astype(np.int32)

    def description(self) -> dict:
        """What the numbers of samples mean, JSON: two datasets with the same one serve the same samples."""
        documents = hashlib.blake2b(self.doc_starts.tobytes(), digest_size=8).hexdigest()
        return {"content": self.content, "documents": documents, "seq_len": self.seq_len, "seed": self.seed,
                "document_mask": self.document_mask} | ({} if self.max_samples is None else {"max_samples": self.max_samples})

    def batch_hash(self, samples: Sequence[int]) -> int:
        """63-bit number that names these samples: text, documents, seq_len, seed and numbers; equal on all ranks of a ring."""
        text = f"{self.content} {self.seq_len} {self.seed} {self.document_mask} {tuple(int(s) for s in samples)}"
        digest = hashlib.blake2b(text.encode() + self.doc_starts.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def _window(self, sample: int) -> tuple[np.ndarray, np.ndarray, int]:
        """(order of the documents [N], their starts on the epoch's line [N + 1], start of the sample on it)."""
        if sample < 0:
            raise IndexError(f"sample={sample}: must be at least 0")
        epoch, index = divmod(sample if self.max_samples is None else sample % self.max_samples, self.num_samples)
        known = self._epochs.get(epoch)
        if known is None:
            order = permutation(len(self.doc_starts) - 1, self.seed, epoch, _DOCUMENTS)
            line_starts = np.concatenate(([0], np.cumsum(np.diff(self.doc_starts)[order])))
            known = order, line_starts, permutation(self.num_samples, self.seed, epoch, _WINDOWS)
            # A new dict in one assignment: a thread that prefetches may be in here too.
            self._epochs = dict([*list(self._epochs.items())[1 - _EPOCHS_KEPT:], (epoch, known)])
        order, line_starts, windows = known
        return order, line_starts, int(windows[index]) * self.seq_len


class LazyTokens:
    """Tokens [B, seq_len] of a batch, not read yet: `tokens[..., index]` reads the rows named by index and no others.

    shape (B, seq_len), dtype int64; index is a 1-D integer array or a slice, the result numpy int64 [B, n].
    batch_hash names the batch (PackedDataset.batch_hash).
    """

    dtype = np.dtype(np.int64)
    ndim = 2

    def __init__(self, dataset: Samples, samples: Sequence[int]):
        self.dataset, self.samples = dataset, tuple(samples)
        self.shape = (len(self.samples), dataset.seq_len)
        self.read_s = 0.0  # spent on reading here
        self._ready: tuple[np.ndarray, np.ndarray] | None = None

    def take(self, rows: np.ndarray, values: np.ndarray) -> None:
        """values [B, n] of rows (int64 [n], rising) that were read before: rows among them are not read again."""
        self._ready = rows, values

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def batch_hash(self) -> int:
        return self.dataset.batch_hash(self.samples)

    def __getitem__(self, key) -> np.ndarray:
        rows = key[1] if isinstance(key, tuple) and len(key) == 2 and (key[0] is Ellipsis or key[0] == slice(None)) else None
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(self.shape[1]))
        elif rows is not None:
            rows = np.asarray(rows)
        if rows is None or rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise IndexError("LazyTokens takes tokens[..., index] with a 1-D integer array or a slice")
        if self._ready is not None:
            known, values = self._ready
            places = np.minimum(np.searchsorted(known, rows), len(known) - 1)
            if len(known) and np.array_equal(known[places], rows):
                return values[:, places]
        began = time.perf_counter()
        values = np.stack([self.dataset.read(sample, rows) for sample in self.samples])
        self.read_s += time.perf_counter() - began
        return values


def split_documents(doc_starts: np.ndarray, max_tokens: int | None) -> np.ndarray:
    """doc_starts (int64 [N + 1]) with each document of more than max_tokens cut into pieces of that many, the last one shorter."""
    if max_tokens is None:
        return doc_starts
    lengths = np.diff(doc_starts)
    pieces = np.maximum(-(-lengths // max_tokens), 1)
    first = np.concatenate(([0], np.cumsum(pieces)))[:-1]
    offsets = np.arange(pieces.sum(), dtype=np.int64) - np.repeat(first, pieces)
    return np.append(np.repeat(doc_starts[:-1], pieces) + offsets * max_tokens, doc_starts[-1])


def permutation(n: int, seed: int, epoch: int, stream: int) -> np.ndarray:
    """A shuffle of range(n) that depends on the four numbers alone, not on numpy's version: indices sorted by a 64-bit hash."""
    salt = hashlib.blake2b(f"{seed} {epoch} {stream}".encode(), digest_size=8).digest()
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(salt, "little"))
    # The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection, so no two indices share a hash.
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")
