"""Text into tokens: bytes, or a tokenizer.json through the `tokenizers` package, which is an extra."""
from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from .tokens import DOCUMENT_START, VOCAB_SIZE, encode

BYTES = "bytes"
# The names under which known vocabularies have a token that begins (or ends) a document, in the order in which they are tried.
_STARTS = ("<|begin_of_text|>", "<|bos|>", "<s>", "<bos>", "<|endoftext|>", "<|end_of_text|>", "</s>")


class ByteTokenizer:
    """256 bytes and the start of a document."""

    name, start, size = BYTES, DOCUMENT_START, VOCAB_SIZE

    def encode(self, text: bytes) -> np.ndarray:
        """UTF-8 [n] -> integers [n + 1], the start of a document first."""
        return encode(text)


class JsonTokenizer:
    """A tokenizer.json. start: the id that begins each document; size: ids of the vocabulary.

    Raises ValueError for a package that is not installed, a file that is none, and a vocabulary without the start token.
    """

    def __init__(self, path: str, document_start: str | None = None):
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"data.tokenizer={path}: needs the package tokenizers, which is not installed; pip install "
                             "'ringflash[tokenizers]', or data.tokenizer=bytes") from error
        if not Path(path).is_file():
            raise ValueError(f"data.tokenizer={path}: no such file; bytes, or the path of a tokenizer.json")
        try:
            text = Path(path).read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"data.tokenizer={path}: no tokenizer.json that the package can read: {error}") from error
        names = _STARTS if document_start is None else (document_start,)
        ids = [self._tokenizer.token_to_id(name) for name in names]
        self.start = next((i for i in ids if i is not None), None)
        if self.start is None:
            raise ValueError(f"data.document_start={'null' if document_start is None else document_start}: the vocabulary of {path} "
                             f"has no {' or '.join(names)}; name one of its tokens that begins a document")
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.name = hashlib.blake2b(f"{self.start} {text}".encode(), digest_size=16).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """UTF-8 [n] -> uint32 [m + 1], the start of a document first. No other special token is added."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.array([self.start, *ids], np.uint32)


def load_tokenizer(name: str, document_start: str | None = None) -> ByteTokenizer | JsonTokenizer:
    """data.tokenizer: "bytes" or the path of a tokenizer.json. Raises ValueError naming the key."""
    if name != BYTES:
        return JsonTokenizer(name, document_start)
    if document_start is not None:
        raise ValueError(f"data.document_start={document_start}: data.tokenizer=bytes has its own; nearest: null")
    return ByteTokenizer()
