"""Masks from their definition, pair by pair, and random interval masks for kernels. Shares no code with ringflash."""
from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


def allowed_pairs(
    rows: Tensor, keys: Tensor, *, seq_len_q: int, seq_len_k: int, causal: bool = True,
    window_size: tuple[int, int] = (-1, -1), cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None, prefix_lens: Sequence[int] | Tensor | int | None = None,
    chunk_size: int | None = None, first_tokens: int = 0,
) -> Tensor:
    """bool [len(rows), len(keys)]: may query rows[i] attend to key keys[j]? rows, keys: int64 global positions.

    Without documents, all queries and all keys are one. A pair in different documents, or past the last one, is not allowed. Within
    a document both count from its start; it is bottom-right aligned, so its last query stands at its last key. The first
    prefix_lens[i] keys of document i are seen by all its queries, the first first_tokens keys whatever the window's left.
    """
    if cu_seqlens is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k needs cu_seqlens")
    if cu_seqlens is not None and cu_seqlens_k is None and seq_len_q != seq_len_k:
        raise ValueError(f"cu_seqlens needs as many queries as keys, got {seq_len_q} and {seq_len_k}")
    ends_q = [0, seq_len_q] if cu_seqlens is None else cu_seqlens
    ends_k = [0, seq_len_k] if cu_seqlens is None else cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    document, document_k = (document_of(n, ends).to(rows.device)[x] for n, ends, x in (
        (seq_len_q, ends_q, rows), (seq_len_k, ends_k, keys)))
    # Tables over documents, with a last entry for rows that are in none (index -1).
    q_ends, k_ends = (torch.tensor([int(x) for x in ends], device=rows.device) for ends in (ends_q, ends_k))
    behind_q, behind_k = (torch.cat([ends[1:], ends[-1:]]) for ends in (q_ends, k_ends))
    before_k = torch.cat([k_ends[:-1], k_ends[-1:]])
    from_end = behind_q[document] - rows                            # 1: the last query of its document
    length_k = (behind_k - before_k)[document]
    at = (length_k - from_end)[:, None]                             # where the query stands, counted in its document's keys
    key = (keys - before_k[document_k])[None, :]
    allowed = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device)
    left, right = window_size
    if causal:
        allowed &= key <= at
    if left >= 0:
        allowed &= (at - key <= left) | (key < first_tokens)
    if right >= 0:
        allowed &= key - at <= right
    if chunk_size is not None:
        allowed &= torch.div(at, chunk_size, rounding_mode="floor") == torch.div(key, chunk_size, rounding_mode="floor")
    if prefix_lens is not None:
        prefixes = [prefix_lens] * (len(q_ends) - 1) if isinstance(prefix_lens, int) else [int(x) for x in prefix_lens]
        allowed |= key < torch.tensor([*prefixes, 0], device=rows.device)[document][:, None]
    return allowed & (document[:, None] == document_k[None, :]) & (document[:, None] >= 0)


def document_of(seq_len: int, cu_seqlens: Sequence[int] | Tensor) -> Tensor:
    """int64 [seq_len]: the index of the document a position is in, -1 past the last one."""
    ends = [int(x) for x in cu_seqlens]
    document = torch.full((seq_len,), -1, dtype=torch.int64)
    for index, (start, stop) in enumerate(zip(ends, ends[1:])):
        document[start:stop] = index
    return document


def random_intervals(num_q: int, num_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """k_lo, k_hi: int32 [num_q], both non-decreasing within [0, num_k], some rows empty; kinds from nearly full to nearly
    nothing (the kind is part of the seed)."""
    rng = random.Random(seed)
    draw = {
        0: lambda: (rng.randint(0, num_k), rng.randint(0, num_k)),  # anything
        1: lambda: (0, rng.randint(0, num_k)),  # causal-like
        2: lambda: ((x := rng.randint(0, num_k)), min(num_k, x + rng.randint(0, 5))),  # a narrow band
        3: lambda: ((x := rng.choice((0, num_k // 3, num_k // 2, num_k))), x),  # steps, as documents make them
    }[seed % 4]
    pairs = [draw() for _ in range(num_q)]
    k_lo, k_hi = sorted(lo for lo, _ in pairs), sorted(hi for _, hi in pairs)
    if seed % 4 == 3:  # every row sees the whole of its document, and the last document ends early
        k_hi = [next((x for x in sorted(set(k_lo)) if x > lo), lo) for lo in k_lo]
    k_hi = [max(lo, hi) for lo, hi in zip(k_lo, k_hi)]
    return torch.tensor(k_lo, dtype=torch.int32), torch.tensor(k_hi, dtype=torch.int32)


def interval_mask(k_lo: Tensor, k_hi: Tensor, num_k: int) -> Tensor:
    """bool [num_q, num_k]: k_lo[i] <= j < k_hi[i]."""
    keys = torch.arange(num_k, device=k_lo.device)
    return (k_lo[:, None] <= keys) & (keys < k_hi[:, None])


def split_keys(num_k: int, parts: int, seed: int) -> list[Tensor]:
    """The keys 0 .. num_k - 1 dealt at random to `parts` blocks (int64, sorted, possibly empty): what ranks would own."""
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(parts, (num_k,), generator=generator)
    return [(owner == part).nonzero().flatten() for part in range(parts)]


def visit_rows(k_lo: Tensor, k_hi: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals of a visit that sees only the keys `keys` (sorted), as indices into them: int32 [num_q] each."""
    return tuple((keys[None, :] < end[:, None]).sum(1).to(torch.int32) for end in (k_lo, k_hi))
