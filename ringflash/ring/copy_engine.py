"""The carrier of one NVLink domain: blocks are written into the peer's memory by the copy engines, beside the kernels.

No SM, no host sync, no kernel that spins: counters in the receiver's memory, written and awaited by the streams themselves
(stream_memory.py), say that a buffer is free and that a block has arrived (signals.py; Note [Copy engines] in DESIGN.md).
Messages to other hosts go to the carrier of torch.distributed, in the same step.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.ring import watchdog
from ringflash.ring.exchange import DistributedExchange, Parcels, Pending, describe_hop, describe_rank, failure, log_sends
from ringflash.ring.message import Message
from ringflash.ring.plan import PASSES, Plan
from ringflash.ring.signals import Booking, arrived_offset, free_offset, landing_of, words_bytes
from ringflash.ring.stream_memory import driver
from ringflash.ring.symmetric import Domain


class CopyExchange:
    """One pass of one call. Making it is a collective when the receive buffers have to grow; then it never waits on the host."""

    def __init__(self, group: dist.ProcessGroup, domain: Domain, plan: Plan, pass_: str, call: int, row_bytes: Mapping[str, int]):
        """row_bytes: of a row on the wire, by kind of message."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("exchange='copy': its counters advance with every call, so it cannot be captured in a CUDA graph; "
                               "use exchange='nccl'")
        self._group, self._domain, self._pass, self._call = group, domain, pass_, call
        self._landing = landing_of(plan, pass_)
        first = words_bytes(domain.cp_size)
        self._offsets, _ = self._landing.offsets(first, row_bytes)
        # Room for both passes at once: the backward of a first call should not have to grow the arena again.
        needed = max(landing_of(plan, each).offsets(first, row_bytes)[1] for each in PASSES)
        self._arena = None if domain.is_alone else domain.arena(needed)
        self._across = None if domain.spans_ring else DistributedExchange(group, pass_, call)

    def receive_buffer(self, message: Message, row_shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Where a message will arrive: [num_rows, *row_shape] in the arena; None when it comes from another host."""
        if message.src not in self._domain.ranks:
            return None
        shape = (message.num_rows, *row_shape)
        start = self._offsets[self._landing.slot_of[message]]
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self._arena.local[start:start + num_bytes].view(dtype).view(shape)

    def post(self, step: int, sends: Parcels, recvs: Parcels) -> Pending | None:
        near_sends = [(m, t) for m, t in sends if m.dst in self._domain.ranks]
        near_recvs = [(m, t) for m, t in recvs if m.src in self._domain.ranks]
        across = None
        if self._across is not None:
            far_sends = [(m, t) for m, t in sends if m.dst not in self._domain.ranks]
            far_recvs = [(m, t) for m, t in recvs if m.src not in self._domain.ranks]
            across = self._across.post(step, far_sends, far_recvs)
        if not near_sends and not near_recvs:
            return across
        log_sends(self._pass, near_sends)
        hops = tuple(describe_hop(self._group, m, is_recv) for parcels, is_recv in ((near_sends, False), (near_recvs, True))
                     for m, _ in parcels)
        position = watchdog.Position(self._pass, self._call, step, describe_rank(self._group, self._domain.rank), hops)
        booking = self._arena.ledger.book([m for m, _ in near_sends], [m for m, _ in near_recvs])
        try:
            done = self._queue(booking, dict(near_sends))
        except RuntimeError as error:
            raise failure(position, hops, error) from error
        return _CopyPending(position, self._domain.device, done, across)

    def _queue(self, booking: Booking, tensors: Mapping[Message, Tensor]) -> torch.cuda.Event:
        """Queues a step's batch on the copy stream; returns what stands behind all of it: sent, and arrived."""
        domain, arena, cuda = self._domain, self._arena, driver()
        current = torch.cuda.current_stream(domain.device)
        if domain.reader is not None and domain.reader != current:
            domain.stream.wait_stream(domain.reader)        # the buffers were last read by a call on another stream
        domain.reader = current
        domain.stream.wait_stream(current)                  # kernels that read the buffers, and those that made what is sent
        lane = domain.stream.cuda_stream
        for peer, value in booking.free:                    # before any wait: see Note [Copy engines]
            cuda.write(lane, arena.address(peer, free_offset(domain.rank)), value)
        for push in booking.pushes:
            cuda.wait_at_least(lane, arena.address(domain.rank, free_offset(push.peer)), push.value)
            for message in push.messages:
                source = tensors[message]
                target = arena.address(push.peer, self._offsets[self._landing.slot_of[message]])
                cuda.copy(lane, target, source.data_ptr(), source.numel() * source.element_size())
            cuda.write(lane, arena.address(push.peer, arrived_offset(domain.rank)), push.value)
        # Here and not on the kernels' stream, where every operation between two kernels is time that nothing hides.
        for peer, value in booking.arrivals:
            cuda.wait_at_least(lane, arena.address(domain.rank, arrived_offset(peer)), value)
        done = torch.cuda.Event()
        done.record(domain.stream)
        return done


class _CopyPending:
    def __init__(self, position: watchdog.Position, device: torch.device, done: torch.cuda.Event, across: Pending | None):
        self._position, self._device, self._done, self._across = position, device, done, across

    def wait(self) -> None:
        """Orders the current stream behind what was received, and behind what was sent; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        # A wait on a stream has no timeout of its own: the watchdog sees that the event does not come.
        watchdog.passed(self._position, self._device, self._done)
        if self._across is not None:
            self._across.wait()
