"""Layout: which positions of the sequence each rank of the ring owns, as a value.

A rank's rows are always sorted by global position, whatever the layout: Note [Layouts], Note [Balanced], Note [Intervals] in
DESIGN.md. numpy alone, but for `.spec`.
"""
from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringflash import balance
from ringflash.mask import Mask
from ringflash.work import Runs

if TYPE_CHECKING:
    import torch

KINDS = ("contiguous", "zigzag", "striped")  # kinds whose rows follow from seq_len and cp_size: a name says it all
LAYOUTS = (*KINDS, "balanced", "auto")  # all that a Layout can be made as
_SPEC_KINDS = (*KINDS, "balanced")
_SPEC_VERSION = 1
_SPEC_HEADER = 5  # version, kind, seq_len, cp_size, ulysses_size; then, for "balanced", starts and owners of the runs
_MAX_SHARD_LEN = 2**31 - 1  # intervals index the rows of a block in int32


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Layout:
    """The rows of every rank.

    kind: "contiguous": equal runs in order. "zigzag": rank r owns the r-th run from the front and the r-th from the back, which
        evens out causal work. "striped": every cp_size-th row. "balanced": runs chosen so that all ranks have an even share of
        the allowed pairs of `masks` (of all of them together), with equally many rows. "auto": whichever of contiguous, zigzag
        and balanced suits the masks best; `kind` is then what it came to. `reason`: what was decided, and what it gives.
    seq_len: length of the global sequence, >= 1. cp_size: ranks in the ring, >= 1. Shards differ by at most one row, and are
        empty where seq_len < cp_size; nothing is padded.
    masks: the Mask, or one Mask per kind of layer; None is (Mask(causal=True),). These are the masks the ranks agree on.
    ulysses_size: ranks that share a ring shard, each holding a contiguous part of its sorted rows. The layout has
        num_ranks = cp_size * ulysses_size ranks; rank i is the (i % ulysses_size)-th of ring rank i // ulysses_size, and `ring`
        is the layout of whole ring shards.
    group, agree: with a process group of all num_ranks ranks, or their 2-D DeviceMesh (ring, ulysses), they all compare this
        layout and its masks (and `agree`, whatever else they must agree on) in one small collective (one per axis of a mesh), and
        `token` says so; ring_attention then exchanges nothing. Without: token is None.

    Equal and hashable by the rows of all ranks (kind, seq_len, cp_size, ulysses_size, and runs of a balanced one) and masks. A
    pure function of its arguments, equal on every rank. Raises ValueError for an impossible layout, and with a group the same
    error on all ranks.
    """

    kind: str
    seq_len: int
    cp_size: int
    ulysses_size: int
    masks: tuple[Mask, ...]
    asked: str  # kind as given: "auto" where `kind` was chosen
    reason: str
    token: str | None
    is_agreed: bool
    _runs: Runs | None  # of a balanced layout

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
                agreement.agree(mesh.ranks_of(group), "Layout", {}, problem=error)
            raise
        if group is not None:
            from ringflash.agreement import agree_layout

            self.set_token(agree_layout(self, group, agree))

    def _set(self, kind: str, seq_len: int, cp_size: int, masks: Mask | Iterable[Mask] | None, ulysses_size: int,
             runs: Runs | None = None) -> None:
        check_made_as(kind)
        put = object.__setattr__
        put(self, "kind", kind)
        put(self, "asked", kind)
        put(self, "seq_len", _positive("seq_len", seq_len))
        put(self, "cp_size", _positive("cp_size", cp_size))
        put(self, "ulysses_size", _positive("ulysses_size", ulysses_size))
        put(self, "masks", as_masks(masks))
        put(self, "token", None)
        put(self, "is_agreed", False)
        if -(-self.seq_len // self.cp_size) > _MAX_SHARD_LEN:
            raise ValueError(f"seq_len={self.seq_len} over cp_size={self.cp_size}: a shard holds at most {_MAX_SHARD_LEN} rows")
        for mask in self.masks:
            mask.check_lengths(self.seq_len, None)  # keys may have a layout of their own
        reason = ""
        if kind == "auto":
            zigzag = ((start, stop, rank) for rank in range(self.cp_size) for start, stop in self._zigzag_runs(rank))
            segments = tuple((start, rank) for start, stop, rank in zigzag if start < stop)
            chosen, runs, reason = balance.choose(self.masks, self.seq_len, self.cp_size, segments)
            put(self, "kind", chosen)
        elif kind == "balanced":
            runs = balance.balance(self.masks, self.seq_len, self.cp_size) if runs is None else runs
            reason = runs.reason
        put(self, "reason", reason)
        put(self, "_runs", runs if self.kind == "balanced" else None)
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
        plain = (self.kind, self.seq_len, self.cp_size, self.ulysses_size)
        return plain if self._runs is None else (*plain, self._runs.key)

    @property
    def num_ranks(self) -> int:
        return self.cp_size * self.ulysses_size

    @property
    def ring(self) -> Layout:
        """The rows of whole ring shards: this layout with ulysses_size 1, and no token."""
        if self.ulysses_size == 1:
            return self
        return _made(self.asked, self.reason, self.kind, self.seq_len, self.cp_size, self.masks, 1, self._runs)

    def with_masks(self, masks: Mask | Iterable[Mask]) -> Layout:
        """This layout for other masks: a balanced one has other rows then, an "auto" one chooses again. No token."""
        if as_masks(masks) == self.masks:
            return copy.copy(self)
        return Layout(self.asked, self.seq_len, self.cp_size, masks, self.ulysses_size)

    def shard_len(self, rank: int) -> int:
        """Rows that `rank` owns."""
        ring_rank, start, stop = self._part(rank)
        return stop - start

    def chunks(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """The rows of `rank` as position ranges (start, stop, stride), in order; none is empty, stop is one past the last row."""
        ring_rank, start, stop = self._part(rank)
        whole = self._ring_chunks(ring_rank)
        return whole if self.ulysses_size == 1 else _rows_of(whole, start, stop)

    def positions(self, rank: int) -> np.ndarray:
        """int64 [shard_len(rank)]: the global positions of the rows of `rank`, sorted."""
        few = self.chunks(rank)
        if 0 < len(few) <= 32:  # half the time of the below for long shards, which every plan lists
            return np.concatenate([np.arange(first, stop, stride, dtype=np.int64) for first, stop, stride in few])
        chunks = np.array(few, dtype=np.int64).reshape(-1, 3)
        start, stride = chunks[:, 0], chunks[:, 2]
        rows = (chunks[:, 1] - 1 - start) // stride + 1
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        return np.repeat(start, rows) + within * np.repeat(stride, rows)

    @property
    def spec(self) -> torch.Tensor:
        """int64 CPU tensor [5], or of a balanced layout [5 + 2 * runs], that `from_spec` turns into a layout of the same rows
        (masks have their own spec)."""
        cached = self.__dict__.get("_spec")
        if cached is None:
            import torch

            header = [_SPEC_VERSION, _SPEC_KINDS.index(self.kind), self.seq_len, self.cp_size, self.ulysses_size]
            runs = () if self._runs is None else (self._runs.starts, self._runs.owners)
            cached = torch.from_numpy(np.concatenate((np.array(header, dtype=np.int64), *runs)))
            object.__setattr__(self, "_spec", cached)
        return cached

    @classmethod
    def from_spec(cls, spec: torch.Tensor, masks: Mask | Iterable[Mask] | None = None) -> Layout:
        """The layout that `spec` (int64 CPU) describes, with `masks`, without a token. ValueError when it describes none."""
        values = spec.numpy()
        header = values[:_SPEC_HEADER].tolist()
        if len(header) != _SPEC_HEADER or header[0] != _SPEC_VERSION or not 0 <= header[1] < len(_SPEC_KINDS):
            raise ValueError(f"not a layout spec of version {_SPEC_VERSION}: {header}")
        kind, runs = _SPEC_KINDS[header[1]], values[_SPEC_HEADER:]
        if (kind == "balanced") != (runs.shape[0] > 0) or runs.shape[0] % 2:
            raise ValueError(f"not a layout spec of version {_SPEC_VERSION}: {kind} with {runs.shape[0]} numbers after {header}")
        made = Runs.read_only(*runs.reshape(2, -1)) if kind == "balanced" else None
        if made is not None:
            made.check(header[2], header[3])
        return _made(kind, "", kind, *header[2:4], masks, header[4], made)

    def _part(self, rank: int) -> tuple[int, int, int]:
        """Its ring rank, and which of the sorted rows of the ring shard it has: start, stop."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank={rank}: this layout has ranks 0..{self.num_ranks - 1}")
        ring_rank, part = divmod(rank, self.ulysses_size)
        rows = self._ring_rows(ring_rank)
        base, larger = divmod(rows, self.ulysses_size)
        start = part * base + min(part, larger)
        return ring_rank, start, start + base + (part < larger)

    def _ring_rows(self, ring_rank: int) -> int:
        return self.seq_len // self.cp_size + (ring_rank < self.seq_len % self.cp_size)

    def _ring_chunks(self, ring_rank: int) -> tuple[tuple[int, int, int], ...]:
        if self._runs is not None:
            return self._runs.of(ring_rank, self.seq_len)
        rows = self._ring_rows(ring_rank)
        if self.kind == "striped":
            return ((ring_rank, ring_rank + (rows - 1) * self.cp_size + 1, self.cp_size),) if rows else ()
        if self.kind == "contiguous":
            start = ring_rank * (self.seq_len // self.cp_size) + min(ring_rank, self.seq_len % self.cp_size)
            runs = [(start, start + rows)]
        else:
            runs = self._zigzag_runs(ring_rank)
        return tuple((start, stop, 1) for start, stop in runs if start < stop)

    def _zigzag_runs(self, rank: int) -> list[tuple[int, int]]:
        # The front run takes the odd row of a shard, so that fronts are laid from the start and backs from the end.
        front_start, back_stop = 0, self.seq_len
        base, larger = divmod(self.seq_len, self.cp_size)
        for rows, count in ((base + 1, min(rank, larger)), (base, max(rank - larger, 0))):
            front_start += count * (rows - rows // 2)
            back_stop -= count * (rows // 2)
        rows = self._ring_rows(rank)
        return [(front_start, front_start + rows - rows // 2), (back_stop - rows // 2, back_stop)]

    def _content(self) -> tuple:
        return (self.geometry, self.masks)

    def __reduce__(self) -> tuple:
        # Without the token: whoever unpickles or copies it was not there when the ranks agreed. With its runs: equal by content.
        return _made, (self.asked, self.reason, self.kind, self.seq_len, self.cp_size, self.masks, self.ulysses_size, self._runs)

    def __eq__(self, other: object) -> bool:
        return self._content() == other._content() if isinstance(other, Layout) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content())

    def __repr__(self) -> str:
        agreed = "" if self.token is None else ", agreed"
        masks = self.masks[0] if len(self.masks) == 1 else self.masks
        ulysses = "" if self.ulysses_size == 1 else f", ulysses_size={self.ulysses_size}"
        return f"Layout({self.kind!r}, seq_len={self.seq_len}, cp_size={self.cp_size}{ulysses}, masks={masks}{agreed})"


def check_made_as(kind: Any) -> None:
    """Raises ValueError for what no Layout can be made as."""
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise ValueError(f"layout kind {kind!r}: valid are {', '.join(LAYOUTS)}")


def check_kind(kind: Any) -> None:
    """Raises ValueError for what is no layout by name: an unknown kind, or one whose rows follow from masks."""
    if kind in LAYOUTS and kind not in KINDS:
        raise ValueError(f"layout {kind!r} cannot be given by name here, since its rows follow from the masks: make a "
                         f"Layout({kind!r}, seq_len, cp_size, masks), or take the one of shard_batch(batch, {kind!r}, ...); "
                         f"by name: {', '.join(KINDS)}")
    if kind not in KINDS:
        raise ValueError(f"layout kind {kind!r}: valid are {', '.join(KINDS)}, and as a Layout also balanced, auto")


def _made(asked: str, reason: str, kind: str, seq_len: int, cp_size: int, masks: Any, ulysses_size: int,
          runs: Runs | None) -> Layout:
    """A layout whose runs are known (a kind that has none: None)."""
    layout = object.__new__(Layout)
    layout._set(kind, seq_len, cp_size, masks, ulysses_size, runs)
    object.__setattr__(layout, "asked", asked)
    object.__setattr__(layout, "reason", reason)
    return layout


def _rows_of(chunks: tuple[tuple[int, int, int], ...], start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """Of the rows that `chunks` hold in order, those from `start` to `stop`, as chunks."""
    found, before = [], 0
    for first, end, stride in chunks:
        rows = (end - 1 - first) // stride + 1
        low, high = max(start - before, 0), min(stop - before, rows)
        if low < high:
            found.append((first + low * stride, first + (high - 1) * stride + 1, stride))
        before += rows
    return tuple(found)


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
