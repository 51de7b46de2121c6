"""Computes a cell on the loopback ring, and judges any result of a cell against the float64 oracle."""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ringflash import simulate
from ringflash.launch.check_problem import DTYPES, Cell, allowed, call_options, make_dlse, make_inputs
from ringflash.launch.check_table import CellVerdict
from ringflash.tests.support import budgets, oracle

Tensors = dict[str, torch.Tensor]


def loopback_cell(cell: Cell, device: torch.device | str) -> Tensors:
    """All ranks in this process: out [B, Sq, Hq, Dv], lse [B, Hq, Sq], dq, dk, dv, in global order; dsinks [Hq] with sinks."""
    return differentiate(
        simulate, *make_inputs(cell, device), make_dlse(cell, device), cp_size=cell.cp_size, mask=cell.make_mask(),
        **cell.layouts(), **cell.how(), **call_options(cell, device))


def differentiate(attend: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor,
                  dlse: torch.Tensor | None, **options) -> Tensors:
    """out, lse and all gradients of attend(q, k, v, return_lse=True, **options), by name."""
    leaves = {"dq": q, "dk": k, "dv": v} | ({"dsinks": options["sinks"]} if "sinks" in options else {})
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    if "sinks" in options:
        options["sinks"] = leaves["dsinks"]
    out, lse = attend(leaves["dq"], leaves["dk"], leaves["dv"], return_lse=True, **options)
    outputs, arriving = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
    gradients = torch.autograd.grad(outputs, tuple(leaves.values()), arriving)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, gradients))}


class Judge:
    """Keeps the oracle's answers of the latest problems: cells that differ in kernel, layout or ranks share them."""

    def __init__(self, device: torch.device | str, keep: int = 256):
        self.device = torch.device(device)
        self._answers = functools.lru_cache(maxsize=keep)(self._answer)
        self._cells: dict[tuple, Cell] = {}

    def _answer(self, problem: tuple) -> tuple[oracle.Result, oracle.Result]:
        cell = self._cells[problem]
        q, k, v, dout = make_inputs(cell, self.device)
        options = dict(dout=dout, dlse=make_dlse(cell, self.device), allowed=allowed(cell, self.device),
                       **call_options(cell, self.device))
        return oracle.attention_oracle(q, k, v, **options), oracle.eager_attention(q, k, v, **options)

    def ratios(self, cell: Cell, result: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Per tensor the worse of its max-abs and RMS error over its budget; inf when something that must be exact is not."""
        self._cells[cell.problem] = cell
        truth, eager = self._answers(cell.problem)
        found = {}
        for verdict in budgets.budgets(result, truth, eager):
            pairs = ((verdict.max_error, verdict.max_budget), (verdict.rms_error, verdict.rms_budget))
            worst = max((error / budget if budget else 0.0 if error == 0.0 else float("inf")) for error, budget in pairs)
            found[verdict.name] = float("inf") if verdict.why or not worst == worst else worst
        return found

    def judge(self, cell: Cell, compute: Callable[[], Mapping[str, torch.Tensor]], *,
              same_as: Callable[[], Mapping[str, torch.Tensor]] | None = None) -> CellVerdict:
        """The verdict on compute(); with same_as, out and lse (dq, dk, dv too when the cell is deterministic) must be its bits.

        What the computation raises becomes the verdict's failure: one cell that breaks must not hide the others.
        """
        start = time.perf_counter()
        try:
            result = {name: tensor.to(self.device) for name, tensor in compute().items()}
            wrong_dtype = [name for name in ("out", "dq", "dk", "dv") if result[name].dtype != DTYPES[cell.dtype]]
            if wrong_dtype:
                raise TypeError(f"{', '.join(wrong_dtype)} not in the dtype of the inputs, {cell.dtype}")
            ratios = self.ratios(cell, result)
            bitwise = {} if same_as is None else same_bits(cell, result, same_as())
        except Exception as error:  # the message is the verdict
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return CellVerdict(cell, {}, {}, failure=text[:300], seconds=time.perf_counter() - start)
        return CellVerdict(cell, ratios, bitwise, seconds=time.perf_counter() - start)


def same_bits(cell: Cell, result: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    names = ("out", "lse", "dq", "dk", "dv") if cell.deterministic else ("out", "lse")
    return {name: torch.equal(result[name], other[name].to(result[name].device)) for name in names}


def judge_loopback(cells: Sequence[Cell], device: torch.device | str, *, say: Callable[[str], None] = lambda text: None
                   ) -> list[CellVerdict]:
    """Every cell on the loopback ring."""
    judge, verdicts = Judge(device), []
    for index, cell in enumerate(cells):
        verdicts.append(judge.judge(cell, lambda cell=cell: loopback_cell(cell, device)))
        say(f"{index + 1}/{len(cells)}")
    return verdicts
