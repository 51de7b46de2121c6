"""Where the ring is, in words, and a thread that ends a job that no longer moves. Note [Stalls].

A dead or stuck peer leaves the others waiting in a C++ call or on a stream, where Python cannot raise. So the exchange keeps a
record of (pass, call, step, hops) here, and training of its step and layer; start() makes a thread that reads it, names what is
stuck, tells the other ranks through the store, leaves stacks and recordings of all ranks (post_mortem.py), and ends the process
with a non-zero code.
"""
from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ringflash.ring import post_mortem

EXIT_CODE = 75                                              # EX_TEMPFAIL: the world failed, not the user's input
_KEY = "ringflash/watchdog"
_LAST_WORDS_S = 2.0                                         # for the other ranks, after a report


@dataclass(frozen=True)
class Position:
    """One batch of one step, with what it moves."""

    pass_: str                                              # forward | backward | agreement | warm-up | collective
    call: int                                               # how many ring calls of this pass this process had begun before
    step: int
    rank: str                                               # "cp rank 1 (global rank 3)"
    hops: tuple[str, ...]                                   # "receiving kv of cp rank 0 from cp rank 2 (global rank 5)", ...
    place: str = field(default_factory=lambda: _place())    # "optimizer step 7, layer 2", where training says so

    def describe(self, hops: tuple[str, ...] | None = None) -> str:
        what = "; ".join(self.hops if hops is None else hops)
        place = f" ({self.place})" if self.place else ""
        return f"{self.rank}, {self.pass_} call {self.call}, step {self.step}{place}: {what}"


class _Record:
    """What this process waits for. Written by the threads that run the ring, read by the watchdog's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: dict[str, int] = {}
        self.waiting: tuple[Position, float] | None = None  # a host wait (gloo), since when
        self.queued: deque[tuple[Position, torch.cuda.Event]] = deque()     # batches that a stream waits for (NCCL)
        self.moved = time.monotonic()                       # when the queue last got shorter, or stopped being empty
        self.last: Position | None = None                   # the last batch that is known to be complete
        self.stage = self.layer = ""                        # where the model's user stands, in its own words


_record = _Record()
_watching: _Watchdog | None = None


def at(*, stage: str | None = None, layer: str | None = None) -> None:
    """What follows belongs to this stage ("optimizer step 7"; a new one is in no layer yet), or to this layer of the model. For
    messages alone."""
    if stage is not None:
        _record.stage, _record.layer = stage, ""
    if layer is not None:
        _record.layer = layer


def _place() -> str:
    return ", ".join(word for word in (_record.stage, _record.layer) if word)


@contextmanager
def collective(what: str, rank: int, size: int) -> Iterator[None]:
    """Around a collective that this thread waits for and that is none of the ring's: a stall in it is told as one of the ring."""
    hops = (f"{what} with all {size} ranks",)
    with waiting(Position("collective", next_call("collective"), 0, f"global rank {rank}", hops, _record.stage)):
        yield


def next_call(pass_: str) -> int:
    """The number of this ring call among those of its pass (0, 1, ...): tells layers apart in messages."""
    with _record.lock:
        number = _record.calls.get(pass_, 0)
        _record.calls[pass_] = number + 1
    return number


@contextmanager
def waiting(position: Position) -> Iterator[None]:
    with _record.lock:
        _record.waiting = (position, time.monotonic())
    try:
        yield
    finally:
        with _record.lock:
            _record.waiting = None


def passed(position: Position, device: torch.device, event: torch.cuda.Event | None = None) -> None:
    """The wait returned: complete on a CPU; on CUDA only queued, so an event stands for it (while someone watches): that given,
    or one recorded here."""
    if device.type != "cuda":
        _record.last = position
        return
    if _watching is None or torch.cuda.is_current_stream_capturing():
        return
    if event is None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
    with _record.lock:
        if not _record.queued:
            _record.moved = time.monotonic()
        _record.queued.append((position, event))


def oldest_wait() -> tuple[Position, float] | None:
    """The batch that this process has waited for longest without progress, and for how many seconds; None when it waits for
    none."""
    with _record.lock:
        while _record.queued and _record.queued[0][1].query():
            _record.last = _record.queued.popleft()[0]
            _record.moved = time.monotonic()
        since: list[tuple[float, Position]] = []
        if _record.queued:
            since.append((_record.moved, _record.queued[0][0]))
        if _record.waiting is not None:
            since.append((_record.waiting[1], _record.waiting[0]))
    if not since:
        return None
    start, position = min(since, key=lambda pair: pair[0])
    return position, time.monotonic() - start


def describe() -> str:
    """The ring's position in words; of a wait outside the ring also where the ring stood before."""
    stuck = oldest_wait()
    if stuck is not None:
        before = _record.last if stuck[0].pass_ == "collective" else None
        ring = "" if before is None else f"; the ring's last complete batch was {before.describe()}"
        return f"waiting for {stuck[1]:.1f} s at {stuck[0].describe()}{ring}"
    if _record.last is not None:
        return f"no ring step is being waited for; the last complete one was {_record.last.describe()}"
    return "no ring step has run in this process"


class _Watchdog:
    def __init__(self, timeout_s: float, store: Any | None, poll_s: float, is_implied: bool = False):
        self.is_implied = is_implied                        # nobody asked for it by start()
        self._timeout_s, self._store, self._poll_s = timeout_s, store, poll_s
        self._stop = threading.Event()
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread = threading.Thread(target=self._run, name="ringflash-watchdog", daemon=True)
        self._old_handler: Any = None

    def start(self, on_sigterm: bool) -> None:
        if on_sigterm:
            # The Python handler of a signal runs in the main thread, which may sit in a C++ wait; the wakeup fd is written at
            # once.
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._old_handler)
            for end in self._wake:
                end.close()

    def _on_sigterm(self, number: int, frame: Any) -> None:
        if callable(self._old_handler):
            self._old_handler(number, frame)

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            if self._wake is not None and self._terminated():
                print(f"ringflash: terminated: {describe()}", file=sys.stderr, flush=True)
                if self._old_handler in (signal.SIG_DFL, None):
                    os._exit(128 + signal.SIGTERM)
            stuck = oldest_wait()
            if stuck is not None and stuck[1] > self._timeout_s:
                self._abort(f"no progress for {stuck[1]:.1f} s (watchdog timeout {self._timeout_s:g} s): {stuck[0].describe()}",
                            True)
            told = self._heard()
            if told is not None:
                self._abort(f"ended because another rank reported: {told}; here: {describe()}", False)

    def _terminated(self) -> bool:
        try:
            return signal.SIGTERM in self._wake[0].recv(64)
        except BlockingIOError:
            return False

    def _heard(self) -> str | None:
        if self._store is None:
            return None
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else None
        except RuntimeError:                                # the store's host is gone: nothing to hear, our own timeout remains
            self._store = None
            return None

    def _abort(self, reason: str, publish: bool) -> None:
        try:
            self._report(reason, publish)
        finally:
            # Not sys.exit: the main thread is in a wait that never ends, and destructors of a broken group may wait as well.
            os._exit(EXIT_CODE)

    def _report(self, reason: str, publish: bool) -> None:
        print(f"ringflash: {reason}", file=sys.stderr, flush=True)
        told = time.monotonic()
        if publish and self._store is not None:
            try:
                self._store.set(_KEY, reason)
            except RuntimeError as error:
                print(f"ringflash: the store did not take the report: {error}", file=sys.stderr, flush=True)
        written = post_mortem.write(reason)
        if written is not None:
            print(f"ringflash: stacks in {written}", file=sys.stderr, flush=True)
        if publish and self._store is not None:
            # Rank 0 may host the store, and a launcher ends the rest at the first exit: let the others read, and write.
            time.sleep(max(told + _LAST_WORDS_S - time.monotonic(), 2 * self._poll_s))


def start(timeout_s: float, store: Any | None = None, *, on_sigterm: bool = False, poll_s: float = 0.5) -> None:
    """Watch this process until stop(): when one batch of the ring takes longer than timeout_s, print it, publish it, exit with
    75.

    store: a torch.distributed store that all ranks share: a rank that finds another's report there ends too, repeating it. A
    store must not be in use by a blocking call of the same process, so give it a clone() or an own TCPStore.
    on_sigterm: also print the position when SIGTERM arrives (then end with 143, or leave that to a handler that was
    installed before); main thread only.
    Takes the place of one that start_unless_running() made. Raises RuntimeError when another is running already, ValueError for
    a timeout that is not positive.
    """
    global _watching
    if timeout_s <= 0:
        raise ValueError(f"watchdog timeout_s={timeout_s}: must be > 0")
    if _watching is not None and _watching.is_implied:
        stop()
    if _watching is not None:
        raise RuntimeError("the watchdog is running already; stop() it first")
    _watching = _Watchdog(timeout_s, store, poll_s)
    _watching.start(on_sigterm)


def start_unless_running(timeout_s: float, *, poll_s: float = 0.5) -> None:
    """For carriers whose waits have no end of their own: watch this process, unless somebody does."""
    global _watching
    if _watching is None:
        _watching = _Watchdog(timeout_s, None, poll_s, is_implied=True)
        _watching.start(False)


def stop() -> None:
    """End the watch; nothing happens when there is none."""
    global _watching
    if _watching is not None:
        _watching.stop()
        _watching = None
        with _record.lock:
            _record.queued.clear()
