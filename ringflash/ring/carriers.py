"""Which carrier a call takes: what was asked for by name, or for "auto" the copy engines where all ranks can use them."""
from __future__ import annotations

import datetime
import logging
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ringflash.ring import watchdog
from ringflash.ring.copy_engine import CopyExchange
from ringflash.ring.exchange import DistributedExchange, Exchange, warm_up
from ringflash.ring.plan import Plan
from ringflash.ring.symmetric import Domain, domain_of

_logger = logging.getLogger("ringflash")
_logged: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()
_TIMEOUT = datetime.timedelta(minutes=10)                   # of torch's NCCL groups, unless they were given another


def make_carrier(exchange: str, group: dist.ProcessGroup, plan: Plan, pass_: str, row_bytes: Mapping[str, int],
                 device: torch.device) -> Exchange:
    """The carrier of one pass of one call. row_bytes: of a row on the wire, by kind of message (rotate.py); device: of tensors.

    exchange was checked against the group (check_carrier). With "auto" and "copy" on CUDA the first call on a group finds out,
    by a collective of all its ranks, whether they can copy to each other. RuntimeError, on every rank the same, when "copy" was
    asked for and they cannot.
    """
    warm_up(group, device)
    if exchange == "auto" and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _log(group, exchange, "nccl, as this call is captured in a CUDA graph")
    elif device.type == "cuda" and exchange in ("auto", "copy"):
        domain = domain_of(group, device)
        if isinstance(domain, Domain):
            _log(group, exchange, "the copy engines of this host's devices" + (
                "" if domain.spans_ring else ", and nccl to those of other hosts"))
            # Nothing else ends a wait on a stream: NCCL would have ended its own after the group's timeout.
            watchdog.start_unless_running(_timeout_s(group, device))
            return CopyExchange(group, domain, plan, pass_, watchdog.next_call(pass_), row_bytes)
        if exchange == "copy":
            raise RuntimeError(f"exchange='copy': {domain}; use exchange='nccl' or 'auto'")
        _log(group, exchange, f"nccl, as the copy engines cannot be used: {domain}")
    return DistributedExchange(group, pass_, watchdog.next_call(pass_))


def _log(group: dist.ProcessGroup, exchange: str, choice: str) -> None:
    done = _logged.setdefault(group, set())
    if exchange == "auto" and choice not in done:
        done.add(choice)
        _logger.info("exchange=auto: %s", choice)


def _timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", _TIMEOUT).total_seconds()
