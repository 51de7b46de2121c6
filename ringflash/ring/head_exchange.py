"""Carriers of the all-to-all over Ulysses ranks (Note [Ulysses] in DESIGN.md): torch.distributed, or all ranks in one process."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.ring import watchdog
from ringflash.ring.exchange import Pending, describe_rank, failure


class HeadExchange(Protocol):
    def post(self, send: Tensor, send_words: Sequence[int], recv: Tensor, recv_words: Sequence[int]) -> Pending:
        """One all-to-all over the Ulysses ranks: contiguous [sum(words)] int64, cut by rank in order."""
        ...


class DistributedHeadExchange:
    """The all-to-all of torch.distributed (NCCL or gloo)."""

    def __init__(self, group: dist.ProcessGroup, pass_: str):
        self._group, self._pass, self._call, self._posts = group, f"ulysses {pass_}", watchdog.next_call(f"ulysses {pass_}"), 0

    def post(self, send: Tensor, send_words: Sequence[int], recv: Tensor, recv_words: Sequence[int]) -> Pending:
        size = dist.get_world_size(self._group)
        hops = (f"all-to-all of heads over {size} Ulysses ranks",)
        place = describe_rank(self._group, dist.get_rank(self._group)).replace("cp rank", "Ulysses rank")
        position = watchdog.Position(self._pass, self._call, self._posts, place, hops)
        self._posts += 1
        try:
            work = dist.all_to_all_single(recv, send, list(recv_words), list(send_words), group=self._group, async_op=True)
        except RuntimeError as error:
            raise failure(position, hops, error) from error
        return _WorkPending(work, position, send.device)


class _WorkPending:
    def __init__(self, work: dist.Work, position: watchdog.Position, device: torch.device):
        self._work, self._position, self._device = work, position, device

    def wait(self) -> None:
        with watchdog.waiting(self._position):
            try:
                self._work.wait()
            except RuntimeError as error:
                raise failure(self._position, self._position.hops, error) from error
        watchdog.passed(self._position, self._device)


class LoopbackHeads:
    """The all-to-alls of the Ulysses ranks of one place of the ring, in one process. carrier(ulysses_rank, rank): one of them."""

    def __init__(self, size: int):
        self._size = size
        self._posted: dict[int, dict[int, tuple[Any, ...]]] = {}  # number of the all-to-all -> Ulysses rank -> what it posted
        self.num_done = 0

    def carrier(self, ulysses_rank: int, rank: int) -> HeadExchange:
        return _LoopbackCarrier(self, ulysses_rank, rank)

    def post(self, number: int, ulysses_rank: int, *posted: Any) -> None:
        here = self._posted.setdefault(number, {})
        here[ulysses_rank] = posted
        if len(here) < self._size:
            return
        for source, (send, send_words, _, _) in here.items():
            for target, piece in enumerate(send.split(list(send_words))):
                _, _, recv, recv_words = here[target]
                if piece.shape[0] != recv_words[source]:
                    raise RuntimeError(f"loopback: Ulysses rank {source} sends {piece.shape[0]} words to {target}, which awaits "
                                       f"{recv_words[source]}")
                recv.split(list(recv_words))[source].copy_(piece)
        del self._posted[number]
        self.num_done += 1


class _LoopbackCarrier:
    def __init__(self, shared: LoopbackHeads, ulysses_rank: int, rank: int):
        self._shared, self._ulysses_rank, self._rank, self._posts = shared, ulysses_rank, rank, 0

    def post(self, *posted: Any) -> Pending:
        number, self._posts = self._posts, self._posts + 1
        self._shared.post(number, self._ulysses_rank, *posted)
        return _LoopbackPending(self._shared, number, self._rank)


@dataclass(frozen=True)
class _LoopbackPending:
    shared: LoopbackHeads
    step: int  # number of the all-to-all
    rank: int

    @property
    def is_ready(self) -> bool:
        return self.shared.num_done > self.step

    def wait(self) -> None:
        if not self.is_ready:
            raise RuntimeError(f"loopback: rank {self.rank} waits for all-to-all {self.step}, which not all of its peers posted")
