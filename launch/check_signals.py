"""Stress of the copy engines' signals: thousands of steps with random delays on host and streams, every buffer poisoned first.

A step's blocks hold numbers that name call, owner and kind. Each block is compared as a whole when it has arrived, and keys and
values once more late in the next step, while the buffer beside them fills. Sound signals give no wrong element; with a wait
left out (`without`) there must be some, or the test proves nothing.
"""
from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from ringflash import Layout, Mask
from ringflash.launch.check_spawn import Rank
from ringflash.ring import copy_engine, watchdog
from ringflash.ring.copy_engine import CopyExchange
from ringflash.ring.exchange import warm_up
from ringflash.ring.message import Message
from ringflash.ring.plan import Plan, build_plan
from ringflash.ring.signals import COUNTER_BYTES
from ringflash.ring.stream_memory import driver
from ringflash.ring.symmetric import Domain, domain_of

ROWS = (3, 64, 257)                         # of a block; all plans share the buffers
ELEMENTS = 4096                             # int32 of a row: a block of 257 rows is 4 MiB, about 12 us on the link
POISON = -1
CYCLES_PER_US = 1_700


class _Deaf:
    """The driver without one kind of wait: streams go on at once. without: "free" or "arrived"."""

    def __init__(self, without: str, words: int):
        self._parity, self._words = {"arrived": 0, "free": 1}[without], words

    def __getattr__(self, name: str):
        return getattr(driver(), name)

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        # The words of a peer are a pair, "arrived" first (signals.arrived_offset, free_offset).
        if (address - self._words) // COUNTER_BYTES % 2 != self._parity:
            driver().wait_at_least(stream, address, value)


def stress(rank: Rank, num_steps: int, max_delay_us: float, without: str | None = None) -> dict:
    """The work of one rank: at least num_steps steps with messages. {"steps", "blocks", "wrong" (elements), "seconds"}.

    RuntimeError where these ranks cannot copy to each other.
    """
    group = dist.group.WORLD
    warm_up(group, rank.device)
    domain = domain_of(group, rank.device)
    if not isinstance(domain, Domain):
        raise RuntimeError(domain)
    run = _Run(rank, domain, max_delay_us)
    start = time.monotonic()
    with run.deaf(without):
        shared = random.Random(0)           # calls are the same on all ranks; delays are not
        while run.steps < num_steps:
            rank.at(run.steps)
            run.call(shared.choice(run.plans), shared.choice(("forward", "backward")))
            if run.calls % 200 == 0:
                torch.cuda.synchronize(rank.device)
    torch.cuda.synchronize(rank.device)
    return {"steps": run.steps, "blocks": run.blocks, "wrong": int(run.wrong), "seconds": time.monotonic() - start}


class _Run:
    def __init__(self, rank: Rank, domain: Domain, max_delay_us: float):
        self.rank, self.domain, self.max_delay_us = rank, domain, max_delay_us
        size = rank.num_processes
        self.plans = [build_plan(Mask(causal=False), Layout("contiguous", rows * size, size)) for rows in ROWS]
        self.clock = random.Random(f"delays of rank {rank.rank}")
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.steps = self.blocks = self.calls = 0
        self.sources: dict[tuple, torch.Tensor] = {}
        self.row_bytes = {"kv": 4 * ELEMENTS, "dkv": 4 * ELEMENTS}
        self.carrier(self.plans[-1], "backward")            # the largest first: then no call makes the buffers anew

    def carrier(self, plan: Plan, pass_: str) -> CopyExchange:
        return CopyExchange(dist.group.WORLD, self.domain, plan, pass_, watchdog.next_call(pass_), self.row_bytes)

    @contextlib.contextmanager
    def deaf(self, without: str | None) -> Iterator[None]:
        if without is None:
            yield
            return
        words = self.domain.arena(0).address(self.rank.rank, 0)
        with mock.patch.object(copy_engine, "driver", lambda: _Deaf(without, words)):
            yield

    def call(self, plan: Plan, pass_: str) -> None:
        carrier, here = self.carrier(plan, pass_), []
        for step in range(plan.num_steps if pass_ == "forward" else plan.num_backward_steps):
            self.sleep()
            recvs = [(m, carrier.receive_buffer(m, (1, 1, ELEMENTS), torch.int32))
                     for m in plan.recvs(self.rank.rank, step, pass_)]
            for _, buffer in recvs:
                buffer.fill_(POISON)
            pending = carrier.post(step, [(m, self.source(m, here)) for m in plan.sends(self.rank.rank, step, pass_)], recvs)
            self.sleep()
            self.compare([(m, block) for m, block in here if m.kind == "kv"])       # what a kernel of this step would read
            if pending is not None:
                pending.wait()
                self.steps += 1
            self.compare(recvs)
            here = recvs
        self.calls += 1

    def source(self, message: Message, here: list[tuple[Message, torch.Tensor]]) -> torch.Tensor:
        """What is sent: a block that is passed on lies where it arrived; others are written anew into the buffer of an earlier
        step, which the wait of that step has set free."""
        for arrived, block in here:
            if message.kind == "kv" and (arrived.owner, arrived.lane) == (message.owner, message.lane):
                return block[:message.num_rows]
        key = (message.kind, message.dst, message.lane)
        if key not in self.sources:
            self.sources[key] = torch.empty((max(ROWS), 1, 1, ELEMENTS), dtype=torch.int32, device=self.rank.device)
        return self.sources[key][:message.num_rows].fill_(self.number(message))

    def number(self, message: Message) -> int:
        """Differs between calls, owners and, for gradients, senders; the same at both ends."""
        return self.calls * 1024 + message.owner * 32 + (message.src + 8 if message.kind == "dkv" else 0)

    def compare(self, blocks: list[tuple[Message, torch.Tensor]]) -> None:
        for message, block in blocks:
            self.wrong += (block != self.number(message)).sum()
            self.blocks += 1

    def sleep(self) -> None:
        """A random pause, on the host, on the stream of the kernels, on that of the copies, or none."""
        pause_us = self.clock.uniform(0.0, self.max_delay_us)
        where = self.clock.randrange(4)
        if where == 0:
            time.sleep(pause_us * 1e-6)
        elif where == 1:
            torch.cuda._sleep(int(pause_us * CYCLES_PER_US))
        elif where == 2:
            with torch.cuda.stream(self.domain.stream):
                torch.cuda._sleep(int(pause_us * CYCLES_PER_US))
