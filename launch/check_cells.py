"""What the equivalence check runs: the cells of the required matrix, their masks and inputs, and pairwise-covering subsets."""
from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from ringflash import Mask

LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = ("causal", "full", "window", "documents", "documents+window")
RATIOS = (1, 4, 7, 8)                       # query heads per key/value head
CP_SIZES = (1, 2, 3, 4, 8)                  # 3 matters: at 2 both neighbours coincide, and a wrong direction passes
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
TENSORS = ("out", "lse", "dq", "dk", "dv")  # of every cell; dsinks too where the variant has sinks
SOFTCAP = 1.5                               # scores are about normal: many are bent, some are flat
# What a call may have beside its mask. v-dim: values of half the head dim; all: sinks and softcap, and wider values.
VARIANTS = ("plain", "softcap", "sinks", "v-dim", "all")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One equivalence: a problem (mask, lengths, heads, dtype) and the way it is computed (kernel, layout, ranks)."""
    kernel: str
    dtype: str
    mask: str
    layout: str
    cp_size: int
    ratio: int
    seq_len: int
    head_dim: int
    num_kv_heads: int = 2                   # two, so that query head h // ratio and h % num_kv_heads differ
    batch: int = 1
    deterministic: bool = False
    variant: str = "plain"

    def __str__(self) -> str:
        return (f"{self.kernel} {self.dtype} {self.mask} {self.layout} W={self.cp_size} S={self.seq_len} B={self.batch} "
                f"heads={self.num_kv_heads * self.ratio}/{self.num_kv_heads} D={self.head_dim}"
                + (f" Dv={self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
                + (" softcap" if self.softcap else "") + (" sinks" if self.has_sinks else "")
                + (" deterministic" if self.deterministic else ""))

    @property
    def head_dim_v(self) -> int:
        return head_dim_v(self.variant, self.head_dim)

    @property
    def softcap(self) -> float:
        return SOFTCAP if self.variant in ("softcap", "all") else 0.0

    @property
    def has_sinks(self) -> bool:
        return self.variant in ("sinks", "all")

    @property
    def line(self) -> tuple[str, str, str, str]:
        """The row of the table that this cell is counted in."""
        return (self.kernel, self.dtype, self.mask, self.layout)

    @property
    def problem(self) -> tuple:
        """What the oracle's answer depends on; cells that differ in kernel, layout or ranks alone share it."""
        return (self.dtype, self.mask, self.ratio, self.seq_len, self.head_dim, self.num_kv_heads, self.batch, self.variant)


def head_dim_v(variant: str, head_dim: int) -> int:
    if variant == "v-dim":
        return head_dim // 2
    # As wide as kernels take it.
    return head_dim if variant != "all" else head_dim + head_dim // 2 if head_dim <= 170 else head_dim // 2


def document_ends(seq_len: int) -> tuple[int, ...]:
    """cu_seqlens with empty documents at the start and inside, a one-token document, cuts off the shard edges, a dead tail."""
    end = seq_len - seq_len // 16
    ends = (0, 0, 1, 1 + seq_len // 7, 1 + seq_len // 7, seq_len // 2 + 2, end)
    return tuple(min(e, end) for e in ends)


def mask_options(name: str, seq_len: int) -> dict:
    """Arguments of Mask for a mask of the matrix; the oracle's predicate is built from the same ones."""
    window = (seq_len // 5, 0)
    return {
        "causal": {"causal": True},
        "full": {"causal": False},
        "window": {"causal": True, "window_size": window},
        "documents": {"causal": True, "cu_seqlens": document_ends(seq_len)},
        "documents+window": {"causal": True, "window_size": window, "cu_seqlens": document_ends(seq_len)},
    }[name]


def make_mask(name: str, seq_len: int) -> Mask:
    return Mask(**mask_options(name, seq_len))


def dead_rows(name: str, seq_len: int) -> slice:
    """Rows behind the last document: they hold NaN in every input, and must give exactly 0 (lse: -inf)."""
    return slice(document_ends(seq_len)[-1] if name.startswith("documents") else seq_len, seq_len)


def make_inputs(cell: Cell, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """q [B, S, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, Dv] and dout [B, S, Hq, Dv]: views into one packed buffer (two where Dv
    differs), the same on every machine.

    Drawn on the CPU from a seed that the problem alone decides, so that every rank of a real ring makes the same global tensors.
    """
    generator = _generator(cell)
    num_heads, kv = cell.num_kv_heads * cell.ratio, cell.num_kv_heads

    def packed(head_dim: int, *heads: int) -> tuple[torch.Tensor, ...]:
        drawn = torch.randn((cell.batch, cell.seq_len, sum(heads), head_dim), generator=generator).to(DTYPES[cell.dtype])
        drawn[:, dead_rows(cell.mask, cell.seq_len)] = float("nan")
        return drawn.to(device).split(heads, dim=2)

    if cell.head_dim_v == cell.head_dim:
        return packed(cell.head_dim, num_heads, kv, kv, num_heads)
    return *packed(cell.head_dim, num_heads, kv), *packed(cell.head_dim_v, kv, num_heads)


def call_options(cell: Cell, device: torch.device | str) -> dict:
    """What the variant adds to a call: softcap, and sinks [Hq], fp32 as weights are, the first -inf (none in that head)."""
    options: dict = {"softcap": cell.softcap} if cell.softcap else {}
    if cell.has_sinks:
        sinks = torch.randn(cell.num_kv_heads * cell.ratio, generator=_generator(cell, "sinks"))
        sinks[0] = -torch.inf
        options["sinks"] = sinks.to(device)
    return options


def make_dlse(cell: Cell, device: torch.device | str) -> torch.Tensor | None:
    """What arrives at lse [B, Hq, S], fp32, in a cell with sinks, whose gradient it enters in a way of its own; else None."""
    if not cell.has_sinks:
        return None
    shape = (cell.batch, cell.num_kv_heads * cell.ratio, cell.seq_len)
    return torch.randn(shape, generator=_generator(cell, "dlse")).to(device)


def _generator(cell: Cell, what: str = "") -> torch.Generator:
    # The names of plain problems are what they were before there were variants: so are their inputs.
    named = cell.problem[:-1] if cell.variant == "plain" else cell.problem
    return torch.Generator().manual_seed(zlib.crc32((repr(named) + what).encode()))


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
            batch = 1 if "documents" in mask or ratio > 4 else 2
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
                   cp_sizes: Sequence[int] = CP_SIZES, masks: Sequence[str] = MASKS, layouts: Sequence[str] = LAYOUTS,
                   ratios: Sequence[int] = RATIOS, variants: Sequence[str] = VARIANTS) -> list[Cell]:
    """A subset of the matrix with every pair of values of every two axes; raises RuntimeError should one be missing."""
    axes = {"mask": masks, "cp_size": cp_sizes, "ratio": ratios, "layout": layouts, "dtype": dtypes, "seq_len": seq_lens,
            "head_dim": head_dims, "variant": variants, "deterministic": (False, True)}
    rows = pairwise(axes)
    if missing := missing_pairs(rows, axes):
        raise RuntimeError(f"the pairwise subset lacks {len(missing)} pairs, the first is {missing[0]}")
    return [Cell(kernel=kernel, num_kv_heads=1 if row["ratio"] > 4 else 2, **row) for row in rows]
