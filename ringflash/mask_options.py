"""What a user may write in a Mask, read into plain values, and what each mistake is told. numpy alone."""
from __future__ import annotations

import operator
from typing import Any

import numpy as np

_MAX_REACH = 2**62  # a position plus this is still an int64


def read_window(window_size: Any, causal: bool) -> tuple[int, int]:
    """(left, right), each >= 0 or -1. ValueError for anything else, and for causal with right > 0."""
    try:
        left, right = (operator.index(x) for x in window_size)
    except (TypeError, ValueError):
        raise ValueError(f"window_size={window_size!r}: must be two ints (left, right), each >= 0, or -1 for unlimited") from None
    for name, value in (("left", left), ("right", right)):
        if value < -1:
            raise ValueError(f"window_size={(left, right)}: {name}={value} must be >= 0, or -1 for unlimited")
        if value > _MAX_REACH:
            raise ValueError(f"window_size={(left, right)}: {name}={value} must be <= {_MAX_REACH}; -1 is unlimited")
    if causal and right > 0:
        raise ValueError(
            f"window_size={(left, right)} with causal=True: a causal query sees no later key: right must be 0 or -1, not {right}"
        )
    return left, right


def read_count(name: str, value: Any, least: int) -> int:
    """An int >= least. ValueError for anything else, True and False included."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or number > _MAX_REACH or isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: must be an int, {least} <= {name} <= {_MAX_REACH}")
    return number


def read_boundaries(name: str, value: Any) -> np.ndarray:
    """Document boundaries as a read-only int64 array [N+1]; a tensor on a device is copied to the host here, once."""
    boundaries = _read_ints(name, value)
    if boundaries.ndim != 1 or boundaries.shape[0] == 0:
        raise ValueError(f"{name}: must be 1-D with at least the boundary 0, got shape {boundaries.shape}")
    if boundaries[0] != 0:
        raise ValueError(f"{name}: must start at 0, starts at {boundaries[0]}")
    falls = np.flatnonzero(np.diff(boundaries) < 0)
    if falls.size:
        i = int(falls[0])
        fall = f"{name}[{i + 1}]={boundaries[i + 1]} < {name}[{i}]={boundaries[i]}"
        raise ValueError(f"{name}: must not decrease, but {fall}")
    return boundaries


def read_key_boundaries(value: Any, boundaries: np.ndarray | None) -> np.ndarray:
    """cu_seqlens_k, int64 [N+1], read-only; boundaries: those of the queries."""
    keys = read_boundaries("cu_seqlens_k", value)
    if boundaries is None:
        raise ValueError("cu_seqlens_k without cu_seqlens: the documents of the keys need those of the queries; give both")
    if keys.shape != boundaries.shape:
        raise ValueError(f"cu_seqlens_k has {keys.shape[0] - 1} documents and cu_seqlens {boundaries.shape[0] - 1}: the i-th "
                         "document of the queries sees the i-th of the keys, so both need as many")
    return keys


def read_prefixes(value: Any, boundaries: np.ndarray | None) -> np.ndarray:
    """prefix_lens, int64 [N] (one int is every document's; without documents [1]), read-only."""
    prefixes = _read_ints("prefix_lens", value)
    documents = 1 if boundaries is None else boundaries.shape[0] - 1
    if prefixes.ndim == 0:
        prefixes = np.full(documents, prefixes, dtype=np.int64)
    if prefixes.shape != (documents,):
        what = "one int without documents" if boundaries is None else f"one int, or one for each of the {documents} documents"
        raise ValueError(f"prefix_lens has shape {prefixes.shape}: must be {what}")
    for i in np.flatnonzero((prefixes < 0) | (prefixes > _MAX_REACH))[:1]:
        raise ValueError(f"prefix_lens[{i}]={prefixes[i]}: must be an int, 0 <= prefix <= {_MAX_REACH}")
    prefixes.flags.writeable = False
    return prefixes


def refuse_combinations(options: dict[str, Any], causal: bool, window: tuple[int, int]) -> None:
    """ValueError for options that have no single clear meaning together, naming them. options: those that were given."""
    for first, second in (("chunk_size", "prefix_lens"), ("chunk_size", "first_tokens")):
        if first in options and second in options:
            raise ValueError(f"{first}={options[first]} together with {second}: a token sees its own chunk only, so whether it sees "
                             f"{second} of an earlier chunk has no single meaning; give one of them")
    if "prefix_lens" in options and not causal and window == (-1, -1):
        raise ValueError("prefix_lens with causal=False and no window: every key is seen already; for a prefix-LM give causal=True")


def _read_ints(name: str, value: Any) -> np.ndarray:
    """A copy in int64, read-only: what the caller changes later does not reach the mask."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        if value.is_floating_point() or value.is_complex():
            raise ValueError(f"{name}: must be ints, got dtype {value.dtype}")
        value = value.detach().cpu().numpy()
    values = np.asarray(value)
    if values.dtype.kind not in "iu" and not (values.size == 0 and values.ndim == 1 and isinstance(value, (list, tuple))):
        raise ValueError(f"{name}: must be ints, got dtype {values.dtype}")
    result = values.astype(np.int64)
    result.flags.writeable = False
    return result
