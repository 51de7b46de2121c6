"""How a rank leaves when it is told to stop: after the step and its checkpoint where all ranks manage, else at once and in words."""
from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ringflash.ring import post_mortem, watchdog

_POLL_S = 0.1
_PARENT_POLL_S = 0.5


class StopRequest:
    """Whether SIGTERM has come, and how long this rank may still take to reach the end of a step.

    Without arm(), SIGTERM ends the process at once: there is nothing to save yet. SIGINT always does.
    """

    def __init__(self) -> None:
        self.grace_s: float | None = None
        self._deadline: float | None = None
        self._saving = False

    def arm(self, grace_s: float) -> None:
        """From now on SIGTERM asks for a stop; the process is ended when it does not come to save within grace_s."""
        self.grace_s = grace_s

    def asked(self) -> bool:
        return self._deadline is not None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While this rank saves it stands at the end of a step: the deadline waits, and starts anew afterwards."""
        self._saving = True
        try:
            yield
        finally:
            if self._deadline is not None:
                self._deadline = time.monotonic() + self.grace_s
            self._saving = False

    def take(self, number: int) -> None:
        """A signal has come. Ends the process unless it can be a request."""
        if number == signal.SIGINT or self.grace_s is None:
            leave(number, "")
        elif self._deadline is None:
            # A second SIGTERM changes nothing: a launcher and its batch system both send one.
            self._deadline = time.monotonic() + self.grace_s

    def check(self) -> None:
        """Ends the process when its time is over."""
        if self._deadline is not None and not self._saving and time.monotonic() > self._deadline:
            # It may be this rank that is stuck, or a peer of its: the stacks say which.
            post_mortem.write(f"checkpoint.grace_s={self.grace_s:g} after SIGTERM; {watchdog.describe()}")
            leave(signal.SIGTERM, f"not every rank came to the end of a step within checkpoint.grace_s={self.grace_s:g}; ")


def leave_on_signals(*, without_parent: bool = False) -> StopRequest:
    """On SIGTERM, and on Ctrl-C, this process says where its ring stands and exits with 143 (130); see StopRequest.arm.

    A rank that waits for a peer that died sits inside a C call, where a Python signal handler never gets to run: a thread reads
    the wake-up pipe instead, which the C-level handler writes at once.

    without_parent: the death of the process that started this one counts as a SIGTERM. For those whose launcher stays: nobody else
    would ever end them.
    """
    request, parent = StopRequest(), os.getppid() if without_parent else None
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: None)

    def watch() -> None:
        nonlocal parent
        while True:
            wait_s = _POLL_S if request.asked() else None if parent is None else _PARENT_POLL_S
            ready, _, _ = select.select([read_end], [], [], wait_s)
            if parent is not None and os.getppid() != parent:
                parent = None
                _say(f"rank {os.environ.get('RANK', '0')}: the launcher has died; this is a SIGTERM")
                request.take(signal.SIGTERM)
            for number in os.read(read_end, 64) if ready else ():
                if number in (signal.SIGTERM, signal.SIGINT):
                    request.take(number)
            request.check()

    threading.Thread(target=watch, name="ringflash-signals", daemon=True).start()
    return request


def leave(number: int, why: str) -> None:
    rank, name = os.environ.get("RANK", "0"), signal.Signals(number).name
    _say(f"rank {rank}: stopped by {name}; {why}{watchdog.describe()}")
    os._exit(128 + number)


def _say(message: str) -> None:
    with suppress(OSError):  # whoever read this may be gone, which must not keep the process
        print(message, file=sys.stderr, flush=True)
