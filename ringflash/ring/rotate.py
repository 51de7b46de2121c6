"""What goes round the ring in the backward: K, V with dK, dV, or the Q side with dQ. By bytes, with the reason. No torch.

Note [What rotates in the backward] in DESIGN.md.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringflash.ring.plan import Plan, build_plan

ROTATES = ("auto", "kv", "q")
_ALIGNMENT = 16                                             # bytes; what tensor maps and vector loads of a GPU ask of a row


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
        offsets.append(end)
        end = -(-(end + batch * num_heads * num_bytes) // _ALIGNMENT) * _ALIGNMENT
    return tuple(offsets), end


@dataclass(frozen=True)
class Rotation:
    """plan: of the backward. bytes_by_side: what the backward would send with either side (only "kv" or "q" where that side was
    demanded). reason: one line."""

    plan: Plan
    bytes_by_side: Mapping[str, int]
    reason: str


def backward_bytes(plan: Plan, heads: Heads, rank: int | None = None) -> int:
    """Bytes that a backward sends by `plan`, of all ranks or one."""
    row_bytes = heads.row_bytes
    return sum(row_bytes[kind] * plan.rows_sent("backward", kind, rank) for kind in plan.kinds)


def choose(plan: Plan, heads: Heads, rotate: str = "auto") -> Rotation:
    """What rotates in the backward of a forward by `plan`.

    rotate: "kv" or "q" demand it; "auto" takes the side that sends fewer bytes, K and V where they are equal. A pure function of
    its arguments, so the same on every rank. With nothing to send, or one rank, K and V "rotate", whatever was demanded: there is
    no difference then. ValueError for an unknown name.
    """
    if rotate not in ROTATES:
        raise ValueError(f"rotate={rotate!r}: unknown; valid: {', '.join(ROTATES)}")
    if not plan.messages("backward"):
        return Rotation(plan, {}, "nothing travels")
    if rotate == "kv":
        return Rotation(plan, {"kv": backward_bytes(plan, heads)}, "K, V and dK, dV rotate, as demanded")
    queries = build_plan(plan.mask, plan.layout, plan.layout_k, rotates="q")
    found = {"kv": backward_bytes(plan, heads), "q": backward_bytes(queries, heads)}
    if rotate == "q":
        return Rotation(queries, {"q": found["q"]}, "q, dout, lse, delta and dQ rotate, as demanded")
    names = {"kv": "K, V and dK, dV", "q": "q, dout, lse, delta and dQ"}
    side = "q" if found["q"] < found["kv"] else "kv"
    other = "kv" if side == "q" else "q"
    ratio = f"{found[other] / found[side]:.2f}x" if found[side] else "more"
    reason = f"{names[side]} rotate: {found[side]:,} bytes; {names[other]} would send {found[other]:,}, {ratio}"
    return Rotation(queries if side == "q" else plan, found, reason)
