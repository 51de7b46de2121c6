"""One equivalence of the check: a problem (mask, lengths, heads, dtype), the way it is computed, and its inputs."""
from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import torch

from ringflash import Layout, Mask
from ringflash.layout import KINDS
from ringflash.tests.support.masks import allowed_pairs

LAYOUTS = ("contiguous", "zigzag", "striped")
MADE_LAYOUTS = ("balanced", "auto")         # their rows follow from the mask
MASKS = ("causal", "full", "window", "documents", "documents+window")
# What a Mask can say beyond: options alone and together, two intervals per row (prefix+window, first+window), keys of another
# number, with the last query at the last key, and with documents of their own.
OPTION_MASKS = ("prefix", "prefix+window", "chunk", "documents+chunk", "first+window", "documents+first+window", "more keys",
                "fewer keys", "cross documents", "cross first+window")
RATIOS = (1, 4, 7, 8)                       # query heads per key/value head
CP_SIZES = (1, 2, 3, 4, 8)                  # 3 matters: at 2 both neighbours coincide, and a wrong direction passes
ROTATES = ("auto", "kv", "q")
ROUTINGS = ("auto", "ring", "direct", "allgather")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
TENSORS = ("out", "lse", "dq", "dk", "dv")  # of every cell; dsinks too where it has sinks
SOFTCAP = 1.5                               # scores are about normal: many are bent, some are flat
# What a call may have beside its mask. v-dim: values of half the head dim; all: sinks and softcap, and wider values.
VARIANTS = ("plain", "softcap", "sinks", "v-dim", "all")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem drawn at random (check_random.py): mask, keyword arguments of Mask as pairs; what a variant decides elsewhere."""
    options: tuple[tuple[str, Any], ...]
    seq_len_k: int
    softcap: float
    has_sinks: bool
    head_dim_v: int
    layout_k: str
    ulysses_size: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """One equivalence: a problem (mask, lengths, heads, dtype) and the way it is computed (kernel, layout, ranks, ...).

    group: the row of the table that it is counted in, in place of its layout ("": its layout).
    """
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
    rotate: str = "auto"
    routing: str = "auto"
    group: str = ""
    drawn: Drawn | None = None

    def __str__(self) -> str:
        drawn = self.drawn
        return (f"{self.kernel} {self.dtype} {self.mask} {self.layout} W={self.cp_size} S={self.seq_len} B={self.batch} "
                f"heads={self.num_kv_heads * self.ratio}/{self.num_kv_heads} D={self.head_dim}"
                + (f" Sk={self.seq_len_k}" if self.seq_len_k != self.seq_len else "")
                + (f" Dv={self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
                + (" softcap" if self.softcap else "") + (" sinks" if self.has_sinks else "")
                + (f" rotate={self.rotate}" if self.rotate != "auto" else "")
                + (f" routing={self.routing}" if self.routing != "auto" else "")
                + (" deterministic" if self.deterministic else "")
                + (f" ulysses={drawn.ulysses_size}" if drawn and drawn.ulysses_size > 1 else "")
                + (f" layout_k={drawn.layout_k} {dict(drawn.options)} (--random 1 --seed {drawn.seed})" if drawn else ""))

    @property
    def seq_len_k(self) -> int:
        if self.drawn:
            return self.drawn.seq_len_k
        return {"more keys": self.seq_len + self.seq_len // 3 + 1, "fewer keys": self.seq_len - self.seq_len // 4,
                "cross documents": self.seq_len + self.seq_len // 5, "cross first+window": self.seq_len + self.seq_len // 2
                }.get(self.mask, self.seq_len)

    @property
    def head_dim_v(self) -> int:
        return self.drawn.head_dim_v if self.drawn else head_dim_v(self.variant, self.head_dim)

    @property
    def softcap(self) -> float:
        return self.drawn.softcap if self.drawn else SOFTCAP if self.variant in ("softcap", "all") else 0.0

    @property
    def has_sinks(self) -> bool:
        return self.drawn.has_sinks if self.drawn else self.variant in ("sinks", "all")

    @property
    def line(self) -> tuple[str, str, str, str]:
        """The row of the table that this cell is counted in."""
        if self.drawn:
            return (self.kernel, self.dtype, self.group, self.layout)
        return (self.kernel, self.dtype, self.mask, self.group or self.layout)

    @property
    def problem(self) -> tuple:
        """What the oracle's answer depends on; cells that differ in kernel, layout or ranks alone share it."""
        plain = (self.dtype, self.mask, self.ratio, self.seq_len, self.head_dim, self.num_kv_heads, self.batch, self.variant)
        return plain if self.drawn is None else (*plain, self.drawn)

    def options(self) -> dict[str, Any]:
        """Arguments of Mask; the oracle's predicate is built from the same ones."""
        return dict(self.drawn.options) if self.drawn else mask_options(self.mask, self.seq_len, self.seq_len_k)

    def make_mask(self) -> Mask:
        return Mask(**self.options())

    def layouts(self, group: Any = None) -> dict[str, Layout]:
        """layout, and layout_k where keys have one of their own, as arguments of a call. group: whose ranks agree on them."""
        ulysses_size = self.drawn.ulysses_size if self.drawn else 1
        found = {"layout": Layout(self.layout, self.seq_len, self.cp_size, self.make_mask(), ulysses_size, group=group)}
        if self.drawn or self.seq_len_k != self.seq_len:
            kind = self.drawn.layout_k if self.drawn else self.layout if self.layout in KINDS else "zigzag"
            found["layout_k"] = Layout(kind, self.seq_len_k, self.cp_size, None, ulysses_size, group=group)
        return found

    def how(self) -> dict[str, Any]:
        """Options of a call that decide how it is computed, not what."""
        routing = {} if self.routing == "auto" else {"routing": self.routing}
        return {"kernel": self.kernel, "deterministic": self.deterministic, "rotate": self.rotate, **routing}


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


def key_document_ends(seq_len_k: int) -> tuple[int, ...]:
    """cu_seqlens_k for those documents: one of queries without keys, one of keys without queries, a dead tail."""
    end = seq_len_k - seq_len_k // 12
    ends = (0, seq_len_k // 9, 2 + seq_len_k // 9, 2 + seq_len_k // 9, seq_len_k // 3, seq_len_k // 2 + 1, end)
    return tuple(sorted(min(e, end) for e in ends))


def mask_options(name: str, seq_len: int, seq_len_k: int | None = None) -> dict[str, Any]:
    """Arguments of Mask for a mask of the matrix."""
    options: dict[str, Any] = {"causal": name not in ("full", "cross documents")}
    if "window" in name:
        # Narrower where a second interval is to be beside it.
        options["window_size"] = (seq_len // (8 if "first" in name or "prefix" in name else 5), 0)
    if "documents" in name or "cross" in name:
        options["cu_seqlens"] = document_ends(seq_len)
    if "cross" in name:
        options["cu_seqlens_k"] = key_document_ends(seq_len if seq_len_k is None else seq_len_k)
    if "prefix" in name:
        options["prefix_lens"] = 1 + seq_len // 3
    if "chunk" in name:
        options["chunk_size"] = 1 + seq_len // 4
    if "first" in name:
        options["first_tokens"] = 1 + seq_len // 16
    return options


def allowed(cell: Cell, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [Sq, Sk], by the predicate of tests/support."""
    return _allowed(tuple(cell.options().items()), cell.seq_len, cell.seq_len_k).to(device)


@functools.lru_cache(maxsize=64)
def _allowed(options: tuple[tuple[str, Any], ...], seq_len: int, seq_len_k: int) -> torch.Tensor:
    return allowed_pairs(torch.arange(seq_len), torch.arange(seq_len_k), seq_len_q=seq_len, seq_len_k=seq_len_k, **dict(options))


def make_inputs(cell: Cell, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] and dout [B, Sq, Hq, Dv]: views into one packed buffer where they
    have one shape per row and as many rows, else into several; the same on every machine. Rows that see nothing, and keys that
    nobody sees, hold NaN.

    Drawn on the CPU from a seed that the problem alone decides, so that every rank of a real ring makes the same global tensors.
    """
    generator = _generator(cell)
    num_heads, kv = cell.num_kv_heads * cell.ratio, cell.num_kv_heads

    def packed(rows: int, head_dim: int, *heads: int) -> tuple[torch.Tensor, ...]:
        return torch.randn((cell.batch, rows, sum(heads), head_dim), generator=generator).to(DTYPES[cell.dtype]).split(heads, 2)

    if cell.seq_len_k != cell.seq_len:
        q, k, v, dout = (packed(rows, dim, heads)[0] for rows, dim, heads in (
            (cell.seq_len, cell.head_dim, num_heads), (cell.seq_len_k, cell.head_dim, kv),
            (cell.seq_len_k, cell.head_dim_v, kv), (cell.seq_len, cell.head_dim_v, num_heads)))
    elif cell.head_dim_v == cell.head_dim:
        q, k, v, dout = packed(cell.seq_len, cell.head_dim, num_heads, kv, kv, num_heads)
    else:
        q, k = packed(cell.seq_len, cell.head_dim, num_heads, kv)
        v, dout = packed(cell.seq_len, cell.head_dim_v, kv, num_heads)
    seen = allowed(cell)
    for tensors, is_dead in (((q, dout), ~seen.any(1)), ((k, v), ~seen.any(0))):
        for x in tensors:
            x[:, is_dead] = float("nan")
    return _moved((q, k, v, dout), device)


def _moved(views: tuple[torch.Tensor, ...], device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """Views of buffers, moved buffer by buffer, so that they stay views with the strides that they had."""
    whole = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in views}
    moved = {at: torch.tensor([], dtype=views[0].dtype).set_(storage).to(device) for at, storage in whole.items()}
    return tuple(moved[x.untyped_storage().data_ptr()].as_strided(x.shape, x.stride(), x.storage_offset()) for x in views)


def call_options(cell: Cell, device: torch.device | str) -> dict[str, Any]:
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
    named = cell.problem[:-1] if cell.variant == "plain" and cell.drawn is None else cell.problem
    return torch.Generator().manual_seed(zlib.crc32((repr(named) + what).encode()))
