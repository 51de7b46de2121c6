"""Byte-level tokens: 0..255 are bytes, each document begins with one DOCUMENT_START."""
import numpy as np

DOCUMENT_START = 256
VOCAB_SIZE = 257
TOKEN_DTYPE = np.dtype("<u2")  # on disk


def encode(text: bytes) -> np.ndarray:
    """bytes [n] -> uint16 [n + 1]: DOCUMENT_START, then the bytes."""
    tokens = np.empty(len(text) + 1, TOKEN_DTYPE)
    tokens[0] = DOCUMENT_START
    tokens[1:] = np.frombuffer(text, np.uint8)
    return tokens
