"""Memory that all ranks of a host can write to, and the handshake that finds out whether there is any.

Built on torch.distributed._symmetric_memory, of which only allocation and rendezvous are used: peers' memory mapped into this
process. Its NVLink multicast is never used here.
"""
from __future__ import annotations

import os
import socket
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ringflash.ring import watchdog
from ringflash.ring.exchange import describe_rank
from ringflash.ring.signals import Ledger, arrived_offset, words_bytes
from ringflash.ring.stream_memory import driver

_GRANULE_BYTES = 2 << 20                                    # what VMM allocations are rounded up to anyway
_PING_BYTES, _PING_TIMEOUT_S = 4096, 20.0


@dataclass(frozen=True)
class Facts:
    """What one rank says of itself in the handshake. problem: why it cannot take part, whoever its peers are."""

    host: str
    device_index: int
    device_uuid: str
    reachable: tuple[str, ...]                              # uuids of the devices that its own can access directly, itself too
    indices: tuple[str, ...]                                # uuids of the devices it sees, by index
    may_share: bool                                         # torch was told to allow ranks that share a device (for tests)
    problem: str | None = None


def own_facts(device: torch.device) -> Facts:
    """Facts of this process; device: the CUDA device of its tensors."""
    index, uuids, reachable, problem = device.index, (), (), None
    index = torch.cuda.current_device() if index is None else index
    try:
        driver()
        if not hasattr(torch._C._distributed_c10d, "_SymmetricMemory"):
            raise RuntimeError(f"torch {torch.__version__} was built without symmetric memory")
        uuids = tuple(str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count()))
        reachable = tuple(uuid for i, uuid in enumerate(uuids) if i == index or torch.cuda.can_device_access_peer(index, i))
    except (RuntimeError, AttributeError) as error:
        problem = str(error)
    may_share = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    return Facts(_host(), index, uuids[index] if uuids else "", reachable, uuids, may_share, problem)


def _host() -> str:
    """Tells hosts apart, also containers with one host name: processes can pass file descriptors only where this is the same."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def hosts_of(facts: Sequence[Facts]) -> list[tuple[int, ...]]:
    """The ranks of each host, hosts by their first rank."""
    found: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        found.setdefault(fact.host, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def obstacles(facts: Sequence[Facts]) -> list[str]:
    """Why these ranks cannot copy to each other; empty when they can. Every rank finds the same list."""
    problems = [f"cp rank {rank}: {fact.problem}" for rank, fact in enumerate(facts) if fact.problem is not None]
    if problems:
        return problems
    hosts = hosts_of(facts)
    if all(len(ranks) == 1 for ranks in hosts):
        return [f"each of the {len(facts)} ranks is on a host of its own"]
    for ranks in hosts:
        for one in ranks:
            for other in ranks:
                if other <= one:
                    continue
                a, b = facts[one], facts[other]
                pair = f"cp ranks {one} and {other}"
                if a.device_uuid == b.device_uuid:
                    if not (a.may_share and b.may_share):
                        problems.append(f"{pair} share one device")
                elif a.device_index == b.device_index:
                    problems.append(f"{pair} both call their device cuda:{a.device_index} (CUDA_VISIBLE_DEVICES set per rank?): "
                                    f"symmetric memory needs one numbering on a host")
                elif a.indices != b.indices:
                    problems.append(f"{pair} see different lists of devices (CUDA_VISIBLE_DEVICES)")
                elif b.device_uuid not in a.reachable or a.device_uuid not in b.reachable:
                    problems.append(f"{pair}: devices cuda:{a.device_index} and cuda:{b.device_index} have no direct access to "
                                    f"each other's memory (no NVLink)")
    return problems


class Arena:
    """One allocation on each rank of a host, mapped by all of them: counters first, then receive buffers.

    Making one is a collective of the host's ranks. ledger: what was counted in these counters since.
    """

    def __init__(self, num_bytes: int, device: torch.device, ranks: Sequence[int], cp_size: int, group: dist.ProcessGroup):
        """ranks: cp ranks of the host, in the order of `group`, which holds just them. RuntimeError where torch cannot."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.num_bytes, self.device, self.ledger = num_bytes, device, Ledger()
        # Not symm_mem.empty(): its pool would keep and hand out parts of what is freed here.
        self.local: Tensor = symmetric_memory._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        self.local[:words_bytes(cp_size)].zero_()
        torch.cuda.synchronize(device)                      # zero before any peer can count: rendezvous ends with a barrier
        self._handle = symmetric_memory.rendezvous(self.local, group)
        if self._handle is None:
            raise RuntimeError("symmetric memory: rendezvous gave no handle")
        self._bases = dict(zip(ranks, self._handle.buffer_ptrs))

    def address(self, rank: int, offset: int) -> int:
        """Of a byte of a rank's arena (a cp rank of this host), as this process sees it."""
        return self._bases[rank] + offset


class Domain:
    """The ranks of one host of one ring, and the arena they share. Made by domain_of()."""

    def __init__(self, ring: dist.ProcessGroup, hosts: list[tuple[int, ...]], device: torch.device):
        self.device, self.cp_size, self.rank = device, dist.get_world_size(ring), dist.get_rank(ring)
        self.ranks = next(ranks for ranks in hosts if self.rank in ranks)
        self.spans_ring = len(self.ranks) == self.cp_size
        self._group = ring
        if not self.spans_ring and not self.is_alone:
            members = [dist.get_global_rank(ring, rank) for rank in self.ranks]
            self._group = dist.new_group(members, use_local_synchronization=True)
        # The stream of the copies, and the stream that the buffers were last read on. High priority keeps it off the hardware
        # queues of ordinary streams, where its waits would hold up kernels.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.reader: torch.cuda.Stream | None = None
        self._arena: Arena | None = None

    @property
    def is_alone(self) -> bool:
        return len(self.ranks) == 1

    def arena(self, num_bytes: int) -> Arena:
        """An arena of at least num_bytes, kept from call to call: a collective whenever it has to grow. num_bytes is the same on
        all ranks, and so every rank knows when that is."""
        if self._arena is None or self._arena.num_bytes < num_bytes:
            if self._arena is not None:
                torch.cuda.synchronize(self.device)         # all that was counted in the old one has come
                self._arena = None
            self._arena = Arena(roomy(num_bytes), self.device, self.ranks, self.cp_size, self._group)
        return self._arena

    def ping(self) -> None:
        """Writes a pattern to the next rank of this host and awaits that of the last. RuntimeError when it does not come."""
        arena, words, here = self.arena(_GRANULE_BYTES), words_bytes(self.cp_size), self.ranks.index(self.rank)
        target, source = self.ranks[(here + 1) % len(self.ranks)], self.ranks[here - 1]
        patterns = {rank: torch.arange(_PING_BYTES, device=self.device).add_(rank * 7).to(torch.uint8)
                    for rank in (self.rank, source)}
        lane, cuda = self.stream, driver()
        lane.wait_stream(torch.cuda.current_stream(self.device))
        cuda.copy(lane.cuda_stream, arena.address(target, words), patterns[self.rank].data_ptr(), _PING_BYTES)
        # The counters of a pair start at 0 for its messages: the ping goes there and back to 0 behind a barrier.
        cuda.write(lane.cuda_stream, arena.address(target, arrived_offset(self.rank)), 1)
        cuda.wait_at_least(lane.cuda_stream, arena.address(self.rank, arrived_offset(source)), 1)
        deadline = time.monotonic() + _PING_TIMEOUT_S
        while not lane.query():
            if time.monotonic() > deadline:
                # Let the stream go: its wait would outlive this attempt.
                with torch.cuda.stream(torch.cuda.Stream(self.device)):
                    arena.local[:words].view(torch.int32).fill_(1)
                lane.synchronize()
                raise RuntimeError(f"a word written by cp rank {source} did not come within {_PING_TIMEOUT_S:g} s")
            time.sleep(0.0005)
        if not torch.equal(arena.local[words:words + _PING_BYTES], patterns[source]):
            raise RuntimeError(f"a block written by cp rank {source} arrived damaged")
        self._arena = None                                  # its counters are not at zero any more


def roomy(num_bytes: int) -> int:
    """num_bytes rounded up by at most an eighth, so that slowly growing batches do not make a new arena each."""
    step = max(_GRANULE_BYTES, (1 << max(num_bytes - 1, 1).bit_length()) // 16)
    return -(-num_bytes // step) * step


_domains: weakref.WeakKeyDictionary[dist.ProcessGroup, Domain | str] = weakref.WeakKeyDictionary()


def domain_of(group: dist.ProcessGroup, device: torch.device) -> Domain | str:
    """The domain of this rank, or why there is none; all ranks of the group get one, or all the same reason.

    A collective when it is first asked for on a group, which all ranks must do alike; remembered afterwards.
    """
    if group not in _domains:
        hops = ("handshake of the copy engines with all ranks of the ring",)
        who = describe_rank(group, dist.get_rank(group))
        with watchdog.waiting(watchdog.Position("warm-up", watchdog.next_call("warm-up"), 0, who, hops)):
            _domains[group] = _handshake(group, device)
    return _domains[group]


def _handshake(group: dist.ProcessGroup, device: torch.device) -> Domain | str:
    facts: list[Facts] = _gather(group, own_facts(device))
    problems = obstacles(facts)
    if problems:
        return "; ".join(problems)
    domain, problem = None, None
    try:
        domain = Domain(group, hosts_of(facts), device)
        if not domain.is_alone:
            domain.ping()
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    found = _gather(group, problem)
    problems = [f"cp rank {rank}: {text}" for rank, text in enumerate(found) if text is not None]
    return domain if not problems else "; ".join(problems)


def _gather(group: dist.ProcessGroup, value: object) -> list:
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
