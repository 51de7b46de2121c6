"""A message of the ring: what one rank sends to another in one step."""
from __future__ import annotations

from dataclasses import dataclass

from ringflash.ring import ranges
from ringflash.ring.ranges import RowRanges

# What travels, and its gradients, by what rotates: K and V, or in a backward the Q side (q, dout, lse and delta).
KINDS = {"kv": ("kv", "dkv"), "q": ("q", "dq")}
GRADIENTS = ("dkv", "dq")


@dataclass(frozen=True, order=True)
class Message:
    """Rows of one owner's block on their way from src to dst; both post it in the batch of `step`.

    The order of the fields is the one sorted order in which both ends post a step's messages: NCCL matches by order alone.
    kind: "kv" (keys and values) or "dkv" (their gradients; dst == owner: on the way home); where the Q side rotates, "q" and "dq".
    lane: the direction of travel, +1 towards higher ranks, -1 towards lower ones, 0 straight from the owner to a reader or back;
        2 and more where all go straight in one step (routes.py).
    rows: ranges of local rows of the owner's block, compacted on the wire in this order.
    """

    step: int
    kind: str
    src: int
    dst: int
    owner: int
    lane: int
    rows: RowRanges

    @property
    def num_rows(self) -> int:
        return ranges.num_rows(self.rows)

    @property
    def is_gradient(self) -> bool:
        return self.kind in GRADIENTS

    @property
    def is_home(self) -> bool:
        """Gradients on the last hop, to the rank that owns the rows."""
        return self.is_gradient and self.dst == self.owner

    def __str__(self) -> str:
        shown = ",".join(f"{start}:{stop}" for start, stop in self.rows[:4]) + (",.." if len(self.rows) > 4 else "")
        return f"{self.kind} of rank {self.owner} [{shown}] {self.src} -> {self.dst} in step {self.step}"
