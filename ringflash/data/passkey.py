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
_DEPTH, _KEY, _FILLER, _LENGTH = 0, 1, 2, 3  # streams of random numbers of a sample


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
    length has the same share of the tokens; what is left at the end of a sample and holds no text of any length is filler.

    texts    the task, one per length, with the same filler and seed
    """

    document_mask, batch_size = True, 1

    def __init__(self, texts: Sequence[PasskeyDataset], seq_len: int):
        self.texts, self.seq_len = sorted(texts, key=lambda text: text.seq_len), seq_len
        self.filler, self.seed, self.everywhere = texts[0].filler, texts[0].seed, texts[0].everywhere
        self.alphabet = texts[0].alphabet
        self.lengths = np.array([text.seq_len for text in self.texts])
        if self.lengths[-1] > seq_len:
            raise ValueError(f"{seq_len} tokens do not hold a text of {self.lengths[-1]}")

    def cu_seqlens(self, sample: int) -> np.ndarray:
        """int32 [N + 1]: where the texts begin."""
        most = self.seq_len // int(self.lengths[0])
        shares = np.cumsum(1 / self.lengths)
        drawn = _draw(self.seed, sample, _LENGTH, np.arange(most), 1 << 32) / 2.0**32
        starts = [0]
        for value in drawn:
            left = self.seq_len - starts[-1]
            fitting = int(np.searchsorted(self.lengths, left, side="right"))
            if not fitting:
                break
            index = np.searchsorted(shares[:fitting - 1], value * shares[fitting - 1], side="right")
            starts.append(starts[-1] + int(self.lengths[index]))
        return np.unique([*starts, self.seq_len]).astype(np.int32)

    def read(self, sample: int, positions: np.ndarray) -> np.ndarray:
        """As PackedDataset.read."""
        return self._each(sample, positions, "read")

    def answers(self, sample: int, positions: np.ndarray) -> np.ndarray:
        return self._each(sample, positions, "answers")

    def _each(self, sample: int, positions: np.ndarray, what: str) -> np.ndarray:
        positions = np.asarray(positions, np.int64)
        if positions.size and not (0 <= positions.min() and positions.max() < self.seq_len):
            raise IndexError(f"positions must lie in [0, {self.seq_len}), got {positions.min()}..{positions.max()}")
        boundaries = self.cu_seqlens(sample)
        place = np.searchsorted(boundaries, positions, side="right") - 1
        values = np.empty(positions.shape, np.int64)
        for index in np.unique(place):
            mine, start = place == index, int(boundaries[index])
            length = int(boundaries[index + 1]) - start
            number = sample * self.seq_len + start  # of the text among all texts
            text = next((text for text in self.texts if text.seq_len == length), None)
            if text is not None:
                values[mine] = getattr(text, what)(number, positions[mine] - start)
            else:
                values[mine] = self.filler.read(number, positions[mine] - start) if what == "read" else IGNORE
        return values

    def description(self) -> dict:
        """As PackedDataset.description."""
        return {"texts": [text.description() for text in self.texts], "seq_len": self.seq_len}


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
