"""Moving packed blocks between the ranks of a ring: bytes only, no maths.

post(step, sends, recvs) -> Pending | None posts a step's messages as ONE batch, in the plan's order, which both ends share
(Note [Messages are posted in one step by both ends]); None when there are none. Nothing that was received may be read, and nothing
that was sent may be written, before Pending.wait(). Here: torch.distributed (NCCL for CUDA tensors, gloo for CPU tensors);
copy_engine.py has that of one NVLink domain, loopback.py the one that needs no processes.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.ring import watchdog

if TYPE_CHECKING:
    from ringflash.ring.plan import Message

EXCHANGES = ("auto", "nccl", "gloo", "copy")
# Which backend of torch.distributed can send tensors of a device point to point (gloo accepts CUDA tensors and then fails).
_POINT_TO_POINT = {"cuda": "nccl", "cpu": "gloo"}

Parcels = Sequence[tuple["Message", Tensor]]


class Pending(Protocol):
    def wait(self) -> None: ...


class Exchange(Protocol):
    def post(self, step: int, sends: Parcels, recvs: Parcels) -> Pending | None:
        """Post one step's batch. Tensors are contiguous [rows, B, Hkv, D + Dv]; a receive has exactly its message's rows."""
        ...

    def receive_buffer(self, message: Message, row_shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """The buffer [rows, *row_shape] that a message has to be received in, where the carrier minds; else None."""
        ...


@dataclass(frozen=True)
class Posted:
    """One message as it was handed to a carrier (record_traffic)."""

    pass_: str
    message: Message
    num_bytes: int


_recorders: list[list[Posted]] = []


@contextmanager
def record_traffic() -> Iterator[list[Posted]]:
    """Collects every message that this process sends, through any carrier, while the context lasts."""
    log: list[Posted] = []
    _recorders.append(log)
    try:
        yield log
    finally:
        _recorders.remove(log)


def log_sends(pass_: str, sends: Parcels) -> None:
    for recorder in _recorders:
        recorder.extend(Posted(pass_, message, tensor.numel() * tensor.element_size()) for message, tensor in sends)


def check_exchange(exchange: str) -> None:
    """ValueError for an unknown name."""
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r}: unknown; valid: {', '.join(EXCHANGES)}")


def group_backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend of each device type of a group, such as {"cpu": "gloo", "cuda": "nccl"}."""
    return dict(item.split(":") for item in dist.get_backend_config(group).split(","))


def check_carrier(exchange: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """RuntimeError unless this group can carry tensors of `device` point to point, by the backend that `exchange` names.

    "copy" needs nccl as well: its ranks find each other through it, and it goes between hosts. Whether their devices can copy to
    each other is found out later, by all ranks together (symmetric.py).
    """
    check_exchange(exchange)
    backends = group_backends(group)
    wanted = _POINT_TO_POINT.get(device.type)
    found = backends.get(device.type)
    described = ", ".join(f"{kind}: {name}" for kind, name in sorted(backends.items()))
    if wanted is None:
        raise RuntimeError(f"exchange={exchange!r}: no carrier for tensors on {device.type}; supported: cuda (nccl), cpu (gloo)")
    if found != wanted:
        raise RuntimeError(
            f"exchange={exchange!r}: q, k, v are on {device.type}, which needs a group with {wanted}, "
            f"but this group has ({described}); make the group with backend={wanted!r}, or move the tensors")
    if exchange not in ("auto", wanted) and (exchange, wanted) != ("copy", "nccl"):
        raise RuntimeError(
            f"exchange={exchange!r}: q, k, v are on {device.type}, which {wanted} carries; use exchange='auto' or {wanted!r}")


_warm: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """One collective per group and device type before its first plan: torch leaves a first P2P batch undefined if only some
    ranks take part in it, and a plan may give a rank nothing to do. Every rank must come here, which every first call does."""
    done = _warm.setdefault(group, set())
    if device.type in done:
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    hops = (f"first collective of all {size} ranks on {device.type}, before the first call",)
    position = watchdog.Position("warm-up", watchdog.next_call("warm-up"), 0, describe_rank(group, rank), hops)
    with watchdog.waiting(position):
        try:
            dist.all_reduce(torch.ones(1, device=device), group=group)
        except RuntimeError as error:
            raise failure(position, hops, error) from error
    watchdog.passed(position, device)
    done.add(device.type)


def describe_rank(group: dist.ProcessGroup, rank: int) -> str:
    return f"cp rank {rank} (global rank {dist.get_global_rank(group, rank)})"


def describe_hop(group: dist.ProcessGroup, message: Message, is_recv: bool) -> str:
    verb, peer = ("receiving", f"from {describe_rank(group, message.src)}") if is_recv else (
        "sending", f"to {describe_rank(group, message.dst)}")
    return f"{verb} {message.kind} of cp rank {message.owner} {peer}"


class DistributedExchange:
    """The carrier of torch.distributed: one batch_isend_irecv per step on `group`."""

    def __init__(self, group: dist.ProcessGroup, pass_: str, call: int):
        self._group, self._pass, self._call = group, pass_, call
        self._rank = dist.get_rank(group)

    def post(self, step: int, sends: Parcels, recvs: Parcels) -> Pending | None:
        if not sends and not recvs:
            return None                                     # batch_isend_irecv([]) raises IndexError
        log_sends(self._pass, sends)
        # One order for both directions: NCCL matches the messages between two ranks by the order in which they are posted.
        parcels = sorted([(m, 0, t) for m, t in sends] + [(m, 1, t) for m, t in recvs], key=lambda parcel: parcel[:2])
        operations = [dist.P2POp(dist.irecv if is_recv else dist.isend, tensor,
                                 dist.get_global_rank(self._group, m.src if is_recv else m.dst), self._group)
                      for m, is_recv, tensor in parcels]
        hops = tuple(describe_hop(self._group, m, bool(is_recv)) for m, is_recv, _ in parcels)
        position = watchdog.Position(self._pass, self._call, step, describe_rank(self._group, self._rank), hops)
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise failure(position, hops, error) from error
        return _DistributedPending(works, position, operations[0].tensor.device)

    def receive_buffer(self, message: Message, row_shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return None


class _DistributedPending:
    def __init__(self, works: list[dist.Work], position: watchdog.Position, device: torch.device):
        self._works, self._position, self._device = works, position, device

    def wait(self) -> None:
        # gloo: blocks this thread until the bytes are there. NCCL: orders the current stream behind the batch; the host goes on.
        hops = self._position.hops
        with watchdog.waiting(self._position):
            for index, work in enumerate(self._works):
                try:
                    work.wait()
                except RuntimeError as error:
                    culprit = hops[index:index + 1] if len(self._works) == len(hops) else hops
                    raise failure(self._position, culprit, error) from error
        watchdog.passed(self._position, self._device)


def failure(position: watchdog.Position, hops: tuple[str, ...], error: RuntimeError) -> RuntimeError:
    return RuntimeError(f"ring_attention: {position.describe(hops)} failed: {error}")
