"""What goes round the ring in the backward: K, V with dK, dV, or the Q side with dQ. By bytes, with the reason. No torch.

Note [What rotates in the backward] in DESIGN.md.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ringflash.ring.cache import BoundedCache
from ringflash.ring.plan import Plan, build_plan

ROTATES = ("auto", "kv", "q")
# Bytes: what vector loads and tensor maps of a GPU ask of an address; and of a row, so that its stride is a multiple of 16 elements,
# which Triton's kernels are specialised on.
_PART_BYTES, _ROW_BYTES = 16, 64
_NAMES = {"kv": "K, V, dK and dV", "q": "q, dout, lse, delta and dQ"}
_rotations = BoundedCache(max_weight=256)
_logger = logging.getLogger("ringflash")
_logged: set[tuple] = set()


@dataclass(frozen=True)
class Heads:
    """What a row weighs on the wire. head_dim_v: None for head_dim; grad_itemsize: of gradients, lse and delta."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    head_dim_v: int | None = None
    grad_itemsize: int = 4

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of one row on the wire, by kind of message (wires.py)."""
        wide = self.head_dim if self.head_dim_v is None else self.head_dim_v
        keys = self.batch * self.num_kv_heads * (self.head_dim + wide)
        queries = query_sections(self.batch, self.num_heads, self.head_dim, wide, self.itemsize, self.grad_itemsize)[1]
        return {"kv": keys * self.itemsize, "dkv": keys * self.grad_itemsize, "q": queries,
                "dq": self.batch * self.num_heads * self.head_dim * self.grad_itemsize}


def query_sections(
    batch: int, num_heads: int, head_dim: int, head_dim_v: int, itemsize: int, grad_itemsize: int
) -> tuple[tuple[int, int, int, int], int]:
    """Byte offsets of q, dout, lse and delta in a row of the Q side on the wire, and the bytes of that row."""
    per_head = (head_dim * itemsize, head_dim_v * itemsize, grad_itemsize, grad_itemsize)
    offsets, end = [], 0
    for num_bytes in per_head:
        offsets.append(-(-end // _PART_BYTES) * _PART_BYTES)
        end = offsets[-1] + batch * num_heads * num_bytes
    return tuple(offsets), max(-(-end // _ROW_BYTES), 1) * _ROW_BYTES  # also of a batch of none: its strides are those of bytes


@dataclass(frozen=True)
class Rotation:
    """plan: of the backward. bytes_by_side: what a backward sends with "kv" and with "q" (without the side that was not asked for;
    empty where nothing travels). reason: one line."""

    plan: Plan
    bytes_by_side: Mapping[str, int]
    reason: str


def backward_bytes(plan: Plan, heads: Heads, rank: int | None = None) -> int:
    """Bytes that a backward sends by `plan`, of all ranks or one."""
    row_bytes = heads.row_bytes
    return sum(row_bytes[kind] * plan.rows_sent("backward", kind, rank) for kind in plan.kinds)


def choose(plan: Plan, heads: Heads, rotate: str = "auto") -> Rotation:
    """What rotates in the backward of a forward by `plan`. Cached.

    rotate: "kv" or "q" demand it; "auto" takes the side that sends fewer bytes, K and V where they are equal. A pure function of
    its arguments, so the same on every rank. Where nothing travels (also: one rank) there is no difference, and the plan is the
    forward's. ValueError for an unknown name.
    """
    if rotate not in ROTATES:
        raise ValueError(f"rotate={rotate!r}: unknown; valid: {', '.join(ROTATES)}")
    return _rotations.get_or_make((plan.key, heads, rotate), lambda: _choose(plan, heads, rotate))


def _choose(plan: Plan, heads: Heads, rotate: str) -> Rotation:
    if not plan.messages("backward"):
        return Rotation(plan, {}, "nothing travels in the backward")
    plans = {"kv": plan}
    if rotate != "kv":
        plans["q"] = build_plan(plan.mask, plan.layout, plan.layout_k, rotates="q", routing=plan.asked_routing)
    if rotate == "q":
        del plans["kv"]
    sent = {side: backward_bytes(of_side, heads) for side, of_side in plans.items()}
    side = min(sent, key=sent.__getitem__)                  # the first of equals: K and V
    reason = f"{_NAMES[side]} rotate in the backward, {sent[side]:,} bytes"
    if rotate != "auto":
        return Rotation(plans[side], sent, f"{reason}, as demanded")
    other = "q" if side == "kv" else "kv"
    ratio = sent[other] / max(sent[side], 1)                # 0 bytes: a batch of none
    reason += f" ({_NAMES[other]}: {sent[other]:,}, {ratio:.2f}x)"
    if (side, heads) not in _logged:                        # once, not for every batch of documents
        _logged.add((side, heads))
        _logger.info("rotate=auto: %s", reason)
    return Rotation(plans[side], sent, reason)
