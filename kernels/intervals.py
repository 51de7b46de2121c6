"""What a kernel is told about a mask: one interval of keys per query row, and its transpose.

Row i of q attends to the key rows [k_lo[i], k_hi[i]), and key row j is read by the query rows [q_lo[j], q_hi[j]). All four
arrays are non-decreasing, so the first and last row of a tile bound everything the tile touches. Kernels know nothing of
documents, windows, layouts, ranks or rings.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of running out, lse, delta, dq, dk and dv for inputs of `dtype`: float32, but float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def transpose(k_lo: Tensor, k_hi: Tensor, num_k: int) -> tuple[Tensor, Tensor]:
    """The intervals seen from the keys.

    k_lo, k_hi: int32 [Sq], both non-decreasing, k_lo <= k_hi. Returns q_lo, q_hi: int32 [num_k]; a key that no row reads has
    q_lo == q_hi. Row i reads key j when k_lo[i] <= j < k_hi[i], and both conditions are monotone in i.
    """
    keys = torch.arange(num_k, dtype=k_lo.dtype, device=k_lo.device)
    q_lo = torch.searchsorted(k_hi.contiguous(), keys, right=True, out_int32=True)
    q_hi = torch.searchsorted(k_lo.contiguous(), keys, right=True, out_int32=True)
    return q_lo, q_hi


class Intervals:
    """The mask of one visit. Immutable; made on the host, moved to the device once (the q side when a backward asks for it).

    k_lo, k_hi: int32 [num_q] on the device; q_lo, q_hi: int32 [num_k] on the device; host_*: the same on the CPU, for what is
    decided before a launch (tile orders, which tiles need masking). cache: what a backend derives from this mask and wants to
    keep, keyed by a tuple that starts with the backend's name.
    """

    def __init__(self, k_lo: Tensor, k_hi: Tensor, q_lo: Tensor, q_hi: Tensor, device: torch.device):
        self.host_k_lo, self.host_k_hi, self.host_q_lo, self.host_q_hi = k_lo, k_hi, q_lo, q_hi
        self.device = device
        self.num_q, self.num_k = k_lo.shape[0], q_lo.shape[0]
        self.is_empty = not bool((k_lo < k_hi).any())
        self.k_lo, self.k_hi = k_lo.to(device), k_hi.to(device)
        self.cache: dict = {}
        self._q_side: tuple[Tensor, Tensor] | None = None

    @classmethod
    def from_host(cls, k_lo: Tensor, k_hi: Tensor, q_lo: Tensor, q_hi: Tensor, device: torch.device | str) -> Intervals:
        """From four CPU int32 tensors: k_lo, k_hi [Sq], q_lo, q_hi [Sk].

        Raises ValueError when an interval is not inside the other side's rows, is reversed, or an end decreases: a kernel
        would read past a buffer or skip a tile. (That q_* is the transpose of k_* is the caller's word.)
        """
        if k_lo.shape != k_hi.shape or q_lo.shape != q_hi.shape or k_lo.ndim != 1 or q_lo.ndim != 1:
            shapes = [tuple(x.shape) for x in (k_lo, k_hi, q_lo, q_hi)]
            raise ValueError(f"intervals: shapes {shapes}, want [Sq], [Sq], [Sk], [Sk]")
        for name, x in (("k_lo", k_lo), ("k_hi", k_hi), ("q_lo", q_lo), ("q_hi", q_hi)):
            if x.dtype != torch.int32 or x.device.type != "cpu":
                raise ValueError(f"intervals: {name} is {x.dtype} on {x.device}, want torch.int32 on cpu")
        _check("k", k_lo, k_hi, q_lo.shape[0])
        _check("q", q_lo, q_hi, k_lo.shape[0])
        return cls(*(x.contiguous() for x in (k_lo, k_hi, q_lo, q_hi)), torch.device(device))

    @classmethod
    def from_rows(cls, k_lo: Tensor, k_hi: Tensor, num_k: int, device: torch.device | str) -> Intervals:
        """From the query side alone (CPU int32 [Sq] each); the transpose is computed here."""
        _check("k", k_lo, k_hi, num_k)
        return cls.from_host(k_lo, k_hi, *transpose(k_lo, k_hi, num_k), device)

    @property
    def q_lo(self) -> Tensor:
        return self._q()[0]

    @property
    def q_hi(self) -> Tensor:
        return self._q()[1]

    def _q(self) -> tuple[Tensor, Tensor]:
        if self._q_side is None:
            self._q_side = (self.host_q_lo.to(self.device), self.host_q_hi.to(self.device))
        return self._q_side

    def __repr__(self) -> str:
        return f"Intervals(num_q={self.num_q}, num_k={self.num_k}, device={self.device}, is_empty={self.is_empty})"


class Turn:
    """Where a visit stands among all visits of one forward: what a backend needs to finish each row with the last visit that sees it,
    rather than all of them at the end. Made by `turns`.

    before: bool [num_q] on the CPU, rows whose state and lse hold something: earlier visits saw them, or it was put there beforehand
    (sinks). later: likewise, rows that later visits see; closes: there are none. opens: it is the first visit, which also finishes
    the rows that none sees. visits: k_lo, k_hi (int32 [num_q], CPU) of every visit. cache: as that of Intervals; shared: of all turns.
    """

    def __init__(self, before: Tensor, later: Tensor, opens: bool, visits: Sequence[tuple[Tensor, Tensor]], shared: dict):
        self.before, self.later, self.opens, self.closes = before, later, opens, not bool(later.any())
        self.visits, self.shared = visits, shared
        self.cache: dict = {}


def turns(visits: Sequence[tuple[Tensor, Tensor]], has_state: bool) -> list[Turn]:
    """One for each visit. visits: their k_lo, k_hi (CPU int32 [num_q] each) in order. has_state: every row's state holds something
    before the first."""
    nothing = torch.zeros(1, visits[0][0].shape[0], dtype=torch.bool)
    seen = torch.stack([lo < hi for lo, hi in visits])
    before = torch.cat((nothing, seen.cumsum(0).bool())) | has_state
    later = torch.cat((seen.flip(0).cumsum(0).flip(0).bool(), nothing))
    shared: dict = {}
    return [Turn(before[n], later[n + 1], n == 0, visits, shared) for n in range(len(visits))]


def _check(side: str, lo: Tensor, hi: Tensor, limit: int) -> None:
    if lo.numel() == 0:
        return
    if int(lo[0]) < 0 or int(hi[-1]) > limit:
        raise ValueError(f"intervals: {side} spans [{int(lo[0])}, {int(hi[-1])}), outside [0, {limit})")
    for name, bad in (
        (f"{side}_lo > {side}_hi", lo > hi),
        (f"{side}_lo decreases", lo[1:] < lo[:-1]),
        (f"{side}_hi decreases", hi[1:] < hi[:-1]),
    ):
        if bool(bad.any()):
            raise ValueError(f"intervals: {name} at row {int(bad.nonzero()[0])}")
