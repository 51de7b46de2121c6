"""The carrier without processes: all ranks of a ring live in one process, and their loops take turns.

Semantics are those of the strictest network: nothing is buffered, and a rank goes on only when every message of its batch has
been posted by both ends. So a plan that would deadlock over NCCL is refused here too.
"""
from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ringflash.ring.exchange import Parcels, log_sends
from ringflash.ring.loop import Waits

if TYPE_CHECKING:
    from ringflash.ring.plan import Message


class Loopback:
    """What the ranks of one pass share. carrier(rank) is the exchange of one rank."""

    def __init__(self, pass_: str):
        self.pass_ = pass_
        self._sends: dict[Message, Tensor] = {}
        self._recvs: dict[Message, Tensor] = {}
        self._done: set[Message] = set()

    def carrier(self, rank: int) -> "_Carrier":
        return _Carrier(self, rank)

    def post(self, sends: Parcels, recvs: Parcels) -> None:
        log_sends(self.pass_, sends)
        for box, parcels in ((self._sends, sends), (self._recvs, recvs)):
            for message, tensor in parcels:
                if message in box:
                    raise RuntimeError(f"loopback: {message} was posted twice")
                box[message] = tensor
        for message in [m for m, _ in (*sends, *recvs)]:
            if message in self._sends and message in self._recvs:
                self.deliver(message, self._sends[message], self._recvs[message])
                self._done.add(message)

    def deliver(self, message: Message, source: Tensor, target: Tensor) -> None:
        if source.shape != target.shape or source.dtype != target.dtype:
            raise RuntimeError(f"loopback: {message}: sent {tuple(source.shape)} {source.dtype}, "
                               f"awaited {tuple(target.shape)} {target.dtype}")
        target.copy_(source)

    def is_done(self, messages: Sequence[Message]) -> bool:
        return all(message in self._done for message in messages)


class _Carrier:
    def __init__(self, shared: Loopback, rank: int):
        self._shared, self._rank = shared, rank

    def post(self, step: int, sends: Parcels, recvs: Parcels) -> "_LoopbackPending | None":
        if not sends and not recvs:
            return None
        self._shared.post(sends, recvs)
        return _LoopbackPending(self._shared, self._rank, step, tuple(m for m, _ in (*sends, *recvs)))

    def receive_buffer(self, message: "Message", row_shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return None


class _LoopbackPending:
    def __init__(self, shared: Loopback, rank: int, step: int, messages: tuple[Message, ...]):
        self._shared, self.rank, self.step, self._messages = shared, rank, step, messages

    @property
    def is_ready(self) -> bool:
        return self._shared.is_done(self._messages)

    def wait(self) -> None:
        if not self.is_ready:
            raise RuntimeError(f"loopback: rank {self.rank} at step {self.step} waits for messages that the other end has not "
                               f"posted")


def drive_all(waits: Sequence[Waits], order: random.Random | None = None) -> None:
    """Step the loops of all ranks to their ends: in turn, or with `order` in random order.

    RuntimeError when none of those left can go on (a deadlock), naming ranks and steps.
    """
    waiting: dict[int, _LoopbackPending | None] = {rank: None for rank in range(len(waits))}
    while waiting:
        ready = [rank for rank, pending in waiting.items() if pending is None or pending.is_ready]
        if not ready:
            where = ", ".join(f"rank {rank} at step {pending.step}" for rank, pending in waiting.items() if pending is not None)
            raise RuntimeError(f"loopback: deadlock: {where}")
        for rank in [order.choice(ready)] if order is not None else ready:
            pending = next(waits[rank], None)
            if pending is None:
                del waiting[rank]
            else:
                waiting[rank] = pending
