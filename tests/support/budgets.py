"""Error budgets: no fixed tolerance, but twice what plain PyTorch in the same dtype errs, and two roundings.

    error(ours, float64) <= 2 * error(eager, float64) + 2 * eps(dtype) * size(reference)

for the largest error (size: the largest |reference|) and for the RMS error (size: the RMS of the reference: rounding errors are
relative to each element, so their RMS is at most eps/2 times the RMS of the elements). lse is judged by eps(float32), the
gradient of sinks by the eps of their dtype.

Where summands cancel, the size is that of the summands (Result.magnitude), times the eps of the dtype that sums are taken in, if
that is larger: a score's rounding does not know that lse comes out near 0, and a row with one key has dq = 0 exactly as the
difference of two rounded numbers. In float32 this is 5 to 20 roundings instead of 2, and the largest error of out and dv may be
that of a plain sum in order, whose roundings scale with the sum of |p * v| (Result.absolute). In 16 bits it is the rounding of out that
counts: every flash backward takes delta = rowsum(dout * out) from the out it stored, where plain PyTorch has the probabilities.

See Note [Budgets] in DESIGN.md. What the mask leaves out must be exact: lse -inf at exactly the same places, out, dq, dk and
dv exactly 0 there, all else finite.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .oracle import Result

NAMES = ("out", "lse", "dq", "dk", "dv")
# Nothing judges float64 but float64 itself: a few hundred roundings of slack.
_EPS_FLOAT64 = 2.0**-43


@dataclass(frozen=True)
class Verdict:
    name: str
    max_error: float
    max_budget: float
    rms_error: float
    rms_budget: float
    ok: bool
    why: str = ""

    def __str__(self) -> str:
        state = "ok" if self.ok else f"FAILED{': ' + self.why if self.why else ''}"
        return (f"{self.name:>4}  max {self.max_error:.2e} of {self.max_budget:.2e}  rms {self.rms_error:.2e} of "
                f"{self.rms_budget:.2e}  {state}")


def budget(name: str, ours: Tensor, oracle: Result, eager: Result) -> Verdict:
    """Judge one tensor. name: out, lse, dq, dk, dv or dsinks; ours: of any floating dtype and the oracle's shape (a ValueError
    otherwise); oracle and eager: for the same inputs, mask and rows."""
    reference, plain = getattr(oracle, name), getattr(eager, name)
    if reference is None or plain is None:
        raise ValueError(f"{name}: the oracle was not asked for it")
    if ours.shape != reference.shape:
        raise ValueError(f"{name}: shape {tuple(ours.shape)}, the oracle's is {tuple(reference.shape)}")
    ours = ours.detach().to(device=reference.device, dtype=torch.float64)
    plain = plain.to(torch.float64)
    why = _what_must_be_exact(name, ours, oracle)
    if name == "lse":
        seen = reference != -torch.inf
        ours, reference, plain = ours[seen], reference[seen], plain[seen]
    largest, rms = _max_rms(reference)
    eps, eps_sum = _eps(getattr(eager, name).dtype), _eps_sum(eager.dtype)
    cancelled = eps_sum * oracle.magnitude.get(name, 0.0)
    # Half an eps: out was rounded to nearest. It is one of the two roundings, not a third.
    eps_out = _eps(eager.dtype)
    slack_max, slack_rms = (2 * max(eps * size, cancelled, eps_out / 4 * through_out)
                            for size, through_out in zip((largest, rms), oracle.through_out.get(name, (0.0, 0.0))))
    # Of the largest error alone: where a sum over many keys nearly cancels its roundings do not: one element in 100,000 shows it.
    slack_max = max(slack_max, 2 * eps_sum * oracle.absolute.get(name, 0.0))
    (max_error, rms_error), (max_plain, rms_plain) = _max_rms(ours - reference), _max_rms(plain - reference)
    max_budget, rms_budget = 2 * max_plain + slack_max, 2 * rms_plain + slack_rms
    ok = not why and max_error <= max_budget and rms_error <= rms_budget
    return Verdict(name, max_error, max_budget, rms_error, rms_budget, ok, why)


def budgets(ours: Mapping[str, Tensor], oracle: Result, eager: Result) -> list[Verdict]:
    """`budget` for every tensor of ours, by name."""
    return [budget(name, tensor, oracle, eager) for name, tensor in ours.items()]


def assert_within_budget(ours: Mapping[str, Tensor], oracle: Result, eager: Result) -> None:
    """AssertionError with every tensor's errors when one of them is out of budget."""
    verdicts = budgets(ours, oracle, eager)
    assert all(verdict.ok for verdict in verdicts), "\n" + "\n".join(map(str, verdicts))


def _what_must_be_exact(name: str, ours: Tensor, oracle: Result) -> str:
    if name == "lse":
        infinite = oracle.lse == -torch.inf  # rows without keys (with a sink their lse is that)
        if not torch.equal(ours == -torch.inf, infinite):
            return "-inf at other places than the rows without keys"
        ours = ours[~infinite]
    elif name in ("out", "dq"):
        if bool((ours[:, oracle.row_is_empty] != 0).any()):
            return "not exactly 0 in rows without keys"
    elif name in ("dk", "dv") and bool((ours[:, ~oracle.key_is_read] != 0).any()):
        return "not exactly 0 for keys that no query reads"
    return "" if bool(ours.isfinite().all()) else "not finite"


def _max_rms(x: Tensor) -> tuple[float, float]:
    if x.numel() == 0:
        return 0.0, 0.0
    return float(x.abs().max()), float(x.square().mean().sqrt())


def _eps(dtype: torch.dtype) -> float:
    return _EPS_FLOAT64 if dtype == torch.float64 else torch.finfo(dtype).eps


def _eps_sum(dtype: torch.dtype) -> float:
    """eps of the dtype that sums are taken in."""
    return _eps(torch.float64 if dtype == torch.float64 else torch.float32)
