"""What the equivalence check runs: the cells of the required matrix, and pairwise-covering subsets of what goes beyond it."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from ringflash.launch.check_problem import (
    CP_SIZES, DTYPES, LAYOUTS, MADE_LAYOUTS, MASKS, OPTION_MASKS, RATIOS, ROTATES, ROUTINGS, TENSORS, VARIANTS, Cell,
    mask_options)

__all__ = ["CP_SIZES", "DTYPES", "LAYOUTS", "MADE_LAYOUTS", "MASKS", "OPTION_MASKS", "RATIOS", "ROTATES", "ROUTINGS", "TENSORS",
           "VARIANTS", "Cell", "matrix", "missing_pairs", "pairwise", "pairwise_cells"]

ALL_MASKS = (*MASKS, *OPTION_MASKS)
ALL_LAYOUTS = (*LAYOUTS, *MADE_LAYOUTS)


def matrix(kernels: Sequence[str], dtypes: Sequence[str], *, cp_sizes: Sequence[int] = CP_SIZES, seq_lens: Sequence[int],
           head_dims: Sequence[int], masks: Sequence[str] = MASKS, layouts: Sequence[str] = LAYOUTS,
           ratios: Sequence[int] = RATIOS, diagonal: bool = False, variants: Sequence[str] = ("plain",),
           walked: Mapping[str, Sequence[str]] | None = None) -> list[Cell]:
    """Cells of the required matrix, in the order of the table's lines.

    diagonal walks (cp_size, ratio, seq_len, head_dim) side by side instead of multiplying them: each value of each axis still
    occurs in every line. Every second cell asks for the deterministic backward, so that both kinds meet every line. variants
    multiply the matrix. walked: further variants, by kernel, that are walked: each once in every line, with the values of the
    other axes in turn; with diagonal one a line, in turn.
    """
    cells: list[Cell] = []
    axes = (cp_sizes, ratios, seq_lens, head_dims)
    for number, (kernel, dtype, mask, layout) in enumerate(itertools.product(kernels, dtypes, masks, layouts)):
        if diagonal:
            longest = max(map(len, axes))
            combos = [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)]
        else:
            combos = list(itertools.product(*axes))
        wanted = [(combo, variant) for variant in variants for combo in combos]
        extras = tuple((walked or {}).get(kernel, ()))
        per_line = min(1, len(extras)) if diagonal else len(extras)
        for turn in range(number * per_line, (number + 1) * per_line):
            # Shifted by one after each round of the variants, so that none comes with the same values every time.
            round_, index = divmod(turn, len(extras))
            wanted.append((tuple(axis[(round_ + index) % len(axis)] for axis in axes), extras[index]))
        for i, ((cp_size, ratio, seq_len, head_dim), variant) in enumerate(wanted):
            batch = 1 if ratio > 4 or "cu_seqlens" in mask_options(mask, seq_len) else 2
            cells.append(Cell(kernel, dtype, mask, layout, cp_size, ratio, seq_len, head_dim, batch=batch,
                              deterministic=i % 2 == 1, variant=variant))
    return cells


def pairwise(axes: Mapping[str, Sequence]) -> list[dict]:
    """Rows that cover every pair of values of every two axes, found greedily; the same rows every time.

    Each row starts from a pair that is still uncovered and takes, axis by axis, the value that covers most uncovered pairs.
    """
    names = list(axes)
    uncovered = {frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    order = [frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]]
    rows = []
    while uncovered:
        row = dict(next(pair for pair in order if pair in uncovered))
        for name in names:
            if name not in row:
                row[name] = max(axes[name], key=lambda value: sum(
                    frozenset({(name, value), item}) in uncovered for item in row.items()))
        uncovered -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append({name: row[name] for name in names})
    return rows


def missing_pairs(rows: Iterable[Mapping], axes: Mapping[str, Sequence]) -> list[tuple]:
    """Pairs ((axis, value), (axis, value)) that no row holds."""
    rows = list(rows)
    return [((a, x), (b, y)) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]
            if not any(row[a] == x and row[b] == y for row in rows)]


def pairwise_cells(kernel: str, *, dtypes: Sequence[str], seq_lens: Sequence[int], head_dims: Sequence[int],
                   cp_sizes: Sequence[int] = CP_SIZES, masks: Sequence[str] = ALL_MASKS, layouts: Sequence[str] = ALL_LAYOUTS,
                   ratios: Sequence[int] = RATIOS, variants: Sequence[str] = VARIANTS, rotates: Sequence[str] = ROTATES,
                   routings: Sequence[str] = ROUTINGS, group: str = "") -> list[Cell]:
    """Cells in which every pair of values of every two axes occurs (RuntimeError should one be missing). group: Cell.group."""
    axes = {"mask": masks, "cp_size": cp_sizes, "ratio": ratios, "layout": layouts, "dtype": dtypes, "seq_len": seq_lens,
            "head_dim": head_dims, "variant": variants, "deterministic": (False, True), "rotate": rotates, "routing": routings}
    rows = pairwise(axes)
    if missing := missing_pairs(rows, axes):
        raise RuntimeError(f"the pairwise subset lacks {len(missing)} pairs, the first is {missing[0]}")
    return [Cell(kernel=kernel, num_kv_heads=1 if row["ratio"] > 4 else 2, group=group, **row) for row in rows]
