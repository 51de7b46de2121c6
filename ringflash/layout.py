"""Layout: which positions of the sequence each rank of the ring owns, as a value.

A rank's rows are always sorted by global position, whatever the layout: Note [Layouts], Note [Intervals] in DESIGN.md. numpy alone,
but for `.spec`.
"""
from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringflash.mask import Mask

if TYPE_CHECKING:
    import torch

KINDS = ("contiguous", "zigzag", "striped")
_LATER_KINDS = ("balanced", "auto")
_SPEC_VERSION = 1
_MAX_SHARD_LEN = 2**31 - 1  # intervals index the rows of a block in int32


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layout:
    """The rows of every rank.

    kind: "contiguous": equal runs in order. "zigzag": rank r owns the r-th run from the front and the r-th from the back, which
        evens out causal work. "striped": every cp_size-th row.
    seq_len: length of the global sequence, >= 1. cp_size: ranks in the ring, >= 1. Shards differ by at most one row, and are
        empty where seq_len < cp_size; nothing is padded.
    masks: the Mask, or one Mask per kind of layer; None is (Mask(causal=True),). These are the masks the ranks agree on.
    ulysses_size: 1 (more is not available yet).
    group, agree: with a process group, all its ranks compare this layout and its masks (and `agree`, whatever else they must
        agree on) in one small collective, and `token` says so; ring_attention then exchanges nothing. Without: token is None.

    Equal and hashable by kind, seq_len, cp_size, ulysses_size and masks. Raises ValueError for an impossible layout,
    NotImplementedError naming what is not available yet, and with a group the same error on all ranks.
    """

    kind: str
    seq_len: int
    cp_size: int
    ulysses_size: int
    masks: tuple[Mask, ...]
    token: str | None
    is_agreed: bool

    def __init__(
        self,
        kind: str,
        seq_len: int,
        cp_size: int,
        masks: Mask | Iterable[Mask] | None = None,
        ulysses_size: int = 1,
        *,
        group: Any = None,
        agree: Any = None,
    ):
        try:
            self._set(kind, seq_len, cp_size, masks, ulysses_size)
            if group is None and agree is not None:
                raise ValueError("Layout(agree=...) needs group=...: without a group there is nobody to agree with")
        except Exception as error:
            if group is not None:
                from ringflash import agreement, mesh

                # The other ranks are about to wait for this one: tell them why it refuses, so that all raise the same.
                agreement.agree(mesh.ring_group(group), "Layout", {}, problem=error)
            raise
        if group is not None:
            from ringflash.agreement import agree_layout

            self.set_token(agree_layout(self, group, agree))

    def _set(self, kind: str, seq_len: int, cp_size: int, masks: Mask | Iterable[Mask] | None, ulysses_size: int) -> None:
        check_kind(kind)
        put = object.__setattr__
        put(self, "kind", kind)
        put(self, "seq_len", _positive("seq_len", seq_len))
        put(self, "cp_size", _positive("cp_size", cp_size))
        put(self, "ulysses_size", _positive("ulysses_size", ulysses_size))
        put(self, "masks", as_masks(masks))
        put(self, "token", None)
        put(self, "is_agreed", False)
        if self.ulysses_size > 1:
            raise NotImplementedError(f"Layout(ulysses_size={self.ulysses_size}) is not available yet: only 1")
        if -(-self.seq_len // self.cp_size) > _MAX_SHARD_LEN:
            raise ValueError(f"seq_len={self.seq_len} over cp_size={self.cp_size}: a shard holds at most {_MAX_SHARD_LEN} rows")
        for mask in self.masks:
            mask.check_lengths(self.seq_len, None)  # keys may have a layout of their own
        if "torch" in sys.modules:
            _ = self.spec  # made now, as Mask's is, for compiled graphs

    def set_token(self, token: str) -> None:
        """Note that all ranks have agreed on this layout and its masks (who calls this has compared them)."""
        object.__setattr__(self, "token", token)
        # Beside the token, because a compiled graph that read the token itself would recompile for each new one.
        object.__setattr__(self, "is_agreed", True)

    @property
    def geometry(self) -> tuple:
        """What decides the rows of the ranks: plans are shared between layouts of equal geometry."""
        return (self.kind, self.seq_len, self.cp_size, self.ulysses_size)

    def shard_len(self, rank: int) -> int:
        """Rows that `rank` owns."""
        self._check_rank(rank)
        return self.seq_len // self.cp_size + (rank < self.seq_len % self.cp_size)

    def chunks(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """The rows of `rank` as position ranges (start, stop, stride), in order; none is empty, stop is one past the last row."""
        self._check_rank(rank)
        rows = self.shard_len(rank)
        if self.kind == "striped":
            return ((rank, rank + (rows - 1) * self.cp_size + 1, self.cp_size),) if rows else ()
        if self.kind == "contiguous":
            start = rank * (self.seq_len // self.cp_size) + min(rank, self.seq_len % self.cp_size)
            runs = [(start, start + rows)]
        else:
            runs = self._zigzag_runs(rank)
        return tuple((start, stop, 1) for start, stop in runs if start < stop)

    def positions(self, rank: int) -> np.ndarray:
        """int64 [shard_len(rank)]: the global positions of the rows of `rank`, sorted."""
        parts = [np.arange(start, stop, stride, dtype=np.int64) for start, stop, stride in self.chunks(rank)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @property
    def spec(self) -> torch.Tensor:
        """int64 CPU tensor [5] that `from_spec` turns into a layout of the same rows (masks have their own spec)."""
        cached = self.__dict__.get("_spec")
        if cached is None:
            import torch

            values = [_SPEC_VERSION, KINDS.index(self.kind), self.seq_len, self.cp_size, self.ulysses_size]
            cached = torch.tensor(values, dtype=torch.int64)
            object.__setattr__(self, "_spec", cached)
        return cached

    @classmethod
    def from_spec(cls, spec: torch.Tensor, masks: Mask | Iterable[Mask] | None = None) -> Layout:
        """The layout that `spec` (int64 CPU [5]) describes, with `masks`, and without a token."""
        values = spec.tolist()
        if len(values) != 5 or values[0] != _SPEC_VERSION or not 0 <= values[1] < len(KINDS):
            raise ValueError(f"not a layout spec of version {_SPEC_VERSION}: {values}")
        return cls(KINDS[values[1]], values[2], values[3], masks, values[4])

    def _zigzag_runs(self, rank: int) -> list[tuple[int, int]]:
        # The front run takes the odd row of a shard, so that fronts are laid from the start and backs from the end.
        front_start, back_stop = 0, self.seq_len
        base, larger = divmod(self.seq_len, self.cp_size)
        for rows, count in ((base + 1, min(rank, larger)), (base, max(rank - larger, 0))):
            front_start += count * (rows - rows // 2)
            back_stop -= count * (rows // 2)
        rows = self.shard_len(rank)
        return [(front_start, front_start + rows - rows // 2), (back_stop - rows // 2, back_stop)]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.cp_size:
            raise ValueError(f"rank={rank}: this layout has ranks 0..{self.cp_size - 1}")

    def _content(self) -> tuple:
        return (self.geometry, self.masks)

    def __reduce__(self) -> tuple:
        # Without the token: whoever unpickles or copies it was not there when the ranks agreed.
        return type(self), (self.kind, self.seq_len, self.cp_size, self.masks, self.ulysses_size)

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        agreed = "" if self.token is None else ", agreed"
        masks = self.masks[0] if len(self.masks) == 1 else self.masks
        return f"Layout({self.kind!r}, seq_len={self.seq_len}, cp_size={self.cp_size}, masks={masks}{agreed})"


def check_kind(kind: Any) -> None:
    """Raises ValueError for an unknown kind of layout, NotImplementedError for one that is not available yet."""
    if kind in _LATER_KINDS:
        raise NotImplementedError(f"layout {kind!r} is not available yet; valid: {', '.join(KINDS)}")
    if kind not in KINDS:
        raise ValueError(f"layout kind {kind!r}: valid are {', '.join(KINDS)}")


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be an int >= 1") from None
    if number < 1 or isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r}: must be an int >= 1")
    return number


def as_masks(masks: Mask | Iterable[Mask] | None) -> tuple[Mask, ...]:
    if masks is None:
        return (Mask(causal=True),)
    if not isinstance(masks, (Mask, Iterable)):
        raise ValueError(f"masks={masks!r}: must be a Mask or several")
    result = (masks,) if isinstance(masks, Mask) else tuple(masks)
    if not result:
        raise ValueError("masks=(): a layout needs at least one Mask")
    for mask in result:
        if not isinstance(mask, Mask):
            raise ValueError(f"masks: {mask!r} is not a Mask")
    return result
