"""Named ranges of the ring in a profiler's trace: pass, step, hop and peer. Off, a range is one look at a flag and no text is made."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ringflash.ring.exchange import Parcels, Pending

_NOTHING = nullcontext()
_is_on = False


@contextmanager
def named_ranges() -> Iterator[None]:
    """While it lasts, the ring calls of this process name what they do, for whatever profiler runs."""
    global _is_on
    before, _is_on = _is_on, True
    try:
        yield
    finally:
        _is_on = before


def span(template: str, *values: Any) -> AbstractContextManager:
    """A range called template.format(*values)."""
    return torch.profiler.record_function(template.format(*values)) if _is_on else _NOTHING


def posting(pass_: str, step: int, sends: Parcels, recvs: Parcels) -> AbstractContextManager:
    """The range in which a step's messages are posted, if it has any."""
    return span("ring {} step {}: post{}", pass_, step, _hops(sends, recvs)) if _is_on and (sends or recvs) else _NOTHING


def awaited(pending: Pending | None, pass_: str, step: int, sends: Parcels, recvs: Parcels) -> Pending | None:
    """pending, with a range around its wait."""
    return _Traced(pending, f"ring {pass_} step {step}: wait{_hops(sends, recvs)}") if _is_on and pending is not None else pending


class _Traced:
    def __init__(self, pending: Pending, name: str):
        self._pending, self._name = pending, name

    def wait(self) -> None:
        with torch.profiler.record_function(self._name):
            self._pending.wait()


def _hops(sends: Parcels, recvs: Parcels) -> str:
    """Peers as ranks of the ring."""
    texts = [f" {message.kind} of {message.owner} to {message.dst}" for message, _ in sends]
    return ",".join(texts + [f" {message.kind} of {message.owner} from {message.src}" for message, _ in recvs])
