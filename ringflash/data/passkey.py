"""The passkey task: a key said once somewhere in a long text, and asked for at its end (Mohtashami and Jaggi 2023).

    filler ... PROMPT KEY filler ... PROMPT KEY

The second key is the answer: its tokens are the labels. It is in the input too (teacher forcing), so one forward tells whether
each of them would have been the model's first choice. What a sample holds is decided by (seed, number) alone; nothing is stored,
and a rank makes its own rows only.
"""
from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from .packing import LazyTokens, Samples

IGNORE = -100
_SAMPLES_KEPT = 4  # this step's and the next one's
_DEPTH, _KEY, _FILLER, _LENGTH, _ORDER = 0, 1, 2, 3, 4  # streams of random numbers of a sample


class RandomFiller:
    """Tokens drawn evenly from ids (integers [n]), each by itself."""

    def __init__(self, ids: np.ndarray, seed: int):
        self.ids, self.seed = np.asarray(ids, np.int64), seed

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        return self.ids[_draw(self.seed, sample, _FILLER, positions, len(self.ids))]

    def description(self) -> dict:
        return {"random": hashlib.blake2b(self.ids.tobytes(), digest_size=8).hexdigest()}


class TextFiller:
    """A stretch of running text from a place drawn evenly, on from the start where the text ends.

    tokens   one array-like of integers [T] per source; a sample is filled from one of them
    content  their digests (Split.content)
    """

    def __init__(self, tokens: Sequence, content: Sequence[str], seed: int):
        self.tokens, self.content, self.seed = list(tokens), list(content), seed

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        source = self.tokens[int(_draw(self.seed, sample, _FILLER, np.zeros(1), len(self.tokens))[0])]
        start = int(_draw(self.seed, sample, _FILLER, np.ones(1), len(source))[0])
        return np.asarray(source[(start + positions) % len(source)]).astype(np.int64)

    def description(self) -> dict:
        return {"text": self.content}


class _Questions(Samples):
    """What samples of the task have in common: numbered for ever, with labels at the answers alone unless they are everywhere."""

    num_samples = 1 << 40
    everywhere: bool

    def answers(self, sample: int, positions: np.ndarray) -> np.ndarray:
        """Labels (int64 [n], aligned with tokens) at positions (int64 [n]) of a sample: the answer's tokens, elsewhere -100."""
        raise NotImplementedError

    def batch_of(self, samples: tuple[int, ...]) -> dict:
        """As Samples.batch_of, with "labels" (aligned with tokens, not shifted) unless they are everywhere."""
        batch = super().batch_of(samples)
        if not self.everywhere:
            batch["labels"] = Answers(self, batch["tokens"].samples)
        return batch

    def batch_hash(self, samples: Sequence[int]) -> int:
        """As PackedDataset.batch_hash."""
        text = f"{self.description()} {tuple(int(s) for s in samples)}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class PasskeyDataset(_Questions):
    """Samples of the task, seq_len tokens each, numbered for ever.

    filler      RandomFiller or TextFiller
    prompt      integers [m]: says that the key follows
    alphabet    integers [a], all different: the tokens that keys are drawn from
    key_tokens  of each key, at most a
    depths      places of the first key, 0 the start, 1 right before the question; sample n has depths[n % len]. None: any place
    everywhere  labels everywhere; else at the answer alone
    document_mask  batches carry cu_seqlens [0, seq_len]: a sample is one document

    Raises ValueError where seq_len does not hold both keys and their prompts.
    """

    def __init__(self, filler: RandomFiller | TextFiller, seq_len: int, *, prompt: np.ndarray, alphabet: np.ndarray,
                 key_tokens: int, seed: int = 0, depths: Sequence[float] | None = None, everywhere: bool = False,
                 batch_size: int = 1, document_mask: bool = False):
        self.filler, self.seq_len, self.seed, self.depths, self.everywhere = filler, seq_len, seed, depths, everywhere
        self.prompt, self.alphabet, self.key_tokens = np.asarray(prompt, np.int64), np.asarray(alphabet, np.int64), key_tokens
        self.batch_size, self.document_mask = batch_size, document_mask
        self.num_filler = seq_len - 2 * (len(self.prompt) + key_tokens)
        if self.num_filler < 0:
            raise ValueError(f"{seq_len} tokens do not hold a key of {key_tokens} with its prompt of {len(self.prompt)} twice; "
                             f"nearest: {seq_len - self.num_filler}")

    def place(self, sample: int) -> int:
        """Where the first prompt begins: between 0 and num_filler."""
        if self.depths is None:
            return int(_draw(self.seed, sample, _DEPTH, np.zeros(1), self.num_filler + 1)[0])
        return round(self.depths[sample % len(self.depths)] * self.num_filler)

    def key(self, sample: int) -> np.ndarray:
        """int64 [key_tokens], all different: one token says which comes next."""
        return self.alphabet[np.argsort(_draw(self.seed, sample, _KEY, np.arange(len(self.alphabet)), 1 << 62))[:self.key_tokens]]

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        """As PackedDataset.read."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not (0 <= positions.min() and positions.max() < self.seq_len):
            raise IndexError(f"positions must lie in [0, {self.seq_len}), got {positions.min()}..{positions.max()}")
        said = np.concatenate([self.prompt, self.key(sample)])
        first, second = self.place(sample), self.seq_len - len(said)
        tokens = np.empty(positions.shape, np.int64)
        is_filler = np.ones(positions.shape, bool)
        for start in (first, second):
            inside = (positions >= start) & (positions < start + len(said))
            tokens[inside] = said[positions[inside] - start]
            is_filler &= ~inside
        rest = positions[is_filler]
        tokens[is_filler] = self.filler.read(sample, rest - np.where(rest >= first, len(said), 0))
        return tokens

    def answers(self, sample: int, positions: np.ndarray) -> np.ndarray:
        first = self.seq_len - self.key_tokens
        labels = np.full(positions.shape, IGNORE, np.int64)
        labels[positions >= first] = self.key(sample)[positions[positions >= first] - first]
        return labels

    def cu_seqlens(self, sample: int) -> np.ndarray:
        """int32 [2]: a sample is one document."""
        return np.array([0, self.seq_len], np.int32)

    def description(self) -> dict:
        """As PackedDataset.description."""
        return {"passkey": [self.prompt.tolist(), self.alphabet.tolist(), self.key_tokens, self.depths, self.everywhere],
                "filler": self.filler.description(), "seq_len": self.seq_len, "seed": self.seed,
                "document_mask": self.document_mask}


class PackedPasskeys(_Questions):
    """Samples of seq_len tokens, each several texts one after another as documents: the task at many lengths at once.

    A key is found over a short distance long before it is found over a long one, and what is learnt there carries over. Each
    length has the same share of the tokens, as far as whole texts allow; what is left at the end of a sample is filler.

    filler      one stretch for all texts of a sample
    lengths     of texts, tokens
    others      as PasskeyDataset has them

    Raises ValueError where a length does not hold both keys and their prompts, or seq_len a text.
    """

    document_mask, batch_size = True, 1

    def __init__(self, filler: RandomFiller | TextFiller, seq_len: int, lengths: Sequence[int], *, prompt: np.ndarray,
                 alphabet: np.ndarray, key_tokens: int, seed: int = 0, everywhere: bool = False):
        self.filler, self.seq_len, self.seed, self.everywhere = filler, seq_len, seed, everywhere
        self.prompt, self.alphabet, self.key_tokens = np.asarray(prompt, np.int64), np.asarray(alphabet, np.int64), key_tokens
        self.lengths = sorted(set(lengths), reverse=True)
        self.said = len(self.prompt) + key_tokens
        if self.lengths[-1] < 2 * self.said:
            raise ValueError(f"{self.lengths[-1]} tokens do not hold a key of {key_tokens} with its prompt of "
                             f"{len(self.prompt)} twice; nearest: {2 * self.said}")
        if self.lengths[0] > seq_len:
            raise ValueError(f"{seq_len} tokens do not hold a text of {self.lengths[0]}; nearest: {seq_len}")
        self._samples: dict[int, tuple[np.ndarray, ...]] = {}

    def cu_seqlens(self, sample: int) -> np.ndarray:
        """int32 [N + 1]: where the texts begin."""
        return self._sample(sample)[0]

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        """As PackedDataset.read."""
        positions = np.asarray(positions, np.int64)
        if positions.size and not (0 <= positions.min() and positions.max() < self.seq_len):
            raise IndexError(f"positions must lie in [0, {self.seq_len}), got {positions.min()}..{positions.max()}")
        _, rows, values, _ = self._sample(sample)
        return _laid_over(self.filler.read(sample, positions), positions, rows, values)

    def answers(self, sample: int, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, np.int64)
        _, rows, values, is_answer = self._sample(sample)
        return _laid_over(np.full(positions.shape, IGNORE, np.int64), positions, rows[is_answer], values[is_answer])

    def _sample(self, sample: int) -> tuple[np.ndarray, ...]:
        """(cu_seqlens, rows of prompts and keys int64 [n], rising, their tokens int64 [n], which are answers bool [n])."""
        known = self._samples.get(sample)
        if known is None:
            known = self._lay_out(sample)
            # A new dict in one assignment: a thread that prefetches may be in here too.
            self._samples = dict([*list(self._samples.items())[1 - _SAMPLES_KEPT:], (sample, known)])
        return known

    def _lay_out(self, sample: int) -> tuple[np.ndarray, ...]:
        counts, left = [], self.seq_len
        rounding = _draw(self.seed, sample, _LENGTH, np.arange(len(self.lengths)), 1 << 32) / 2.0**32
        for index, length in enumerate(self.lengths):
            remaining = len(self.lengths) - index
            # Of an even share that is no whole number of texts a fraction is the chance of one more; the shortest get the rest.
            share = left / remaining / length + (rounding[index] if remaining > 1 else 0.0)
            counts.append(min(int(share), left // length))
            left -= counts[-1] * length
        lengths = np.repeat(self.lengths, counts)
        lengths = lengths[np.argsort(_draw(self.seed, sample, _ORDER, np.arange(len(lengths)), 1 << 62))]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        texts, letters = len(lengths), len(self.alphabet)
        free = lengths - 2 * self.said + 1
        places = starts[:-1] + _draw(self.seed, sample, _DEPTH, np.arange(texts), 1 << 62) % free
        drawn = _draw(self.seed, sample, _KEY, np.arange(texts * letters), 1 << 62).reshape(texts, letters)
        keys = self.alphabet[np.argsort(drawn, axis=1)[:, :self.key_tokens]]
        said = np.concatenate([np.broadcast_to(self.prompt, (texts, len(self.prompt))), keys], axis=1)
        rows = np.stack([places, starts[1:] - self.said], axis=1)[:, :, None] + np.arange(self.said)
        is_answer = np.zeros(rows.shape, bool)
        is_answer[:, 1, len(self.prompt):] = True
        boundaries = np.unique([*starts, self.seq_len]).astype(np.int32)
        return boundaries, rows.ravel(), np.stack([said, said], axis=1).ravel(), is_answer.ravel()

    def description(self) -> dict:
        """As PackedDataset.description."""
        return {"passkey": [self.prompt.tolist(), self.alphabet.tolist(), self.key_tokens, self.lengths, self.everywhere],
                "filler": self.filler.description(), "seq_len": self.seq_len, "seed": self.seed}


def _laid_over(values: np.ndarray, positions: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """values [n] at positions [n], in place with tokens [m] where a position is one of rows [m], rising."""
    places = np.minimum(np.searchsorted(rows, positions), max(len(rows) - 1, 0))
    if len(rows):
        is_row = rows[places] == positions
        values[is_row] = tokens[places[is_row]]
    return values


class Answers(LazyTokens):
    """Labels [B, seq_len] of samples of the task."""

    def __getitem__(self, key) -> np.ndarray:
        rows = key[1] if isinstance(key, tuple) and len(key) == 2 and key[0] is Ellipsis else None
        if rows is None or isinstance(rows, slice):
            raise IndexError("Answers take labels[..., index] with a 1-D integer array")
        return np.stack([self.dataset.answers(sample, np.asarray(rows)) for sample in self.samples])


def _draw(seed: int, sample: int, stream: int, numbers: np.ndarray, below: int) -> np.ndarray:
    """int64 [n] in [0, below): a function of (seed, sample, stream) and each of numbers [n]."""
    salt = hashlib.blake2b(f"{seed} {sample} {stream}".encode(), digest_size=8).digest()
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(salt, "little"))
    # The finaliser of splitmix64 (Steele, Lea and Flood 2014).
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) % np.uint64(below)).astype(np.int64)
