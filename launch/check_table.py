"""Verdicts of the check and how they are shown: a line per (kernel, dtype, mask, layout), JSON with every cell, an exit code."""
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ringflash.launch.check_cells import TENSORS, Cell


@dataclasses.dataclass(frozen=True)
class CellVerdict:
    """What became of one cell. ratios: per tensor the worse of max-abs and RMS error over its budget (inf: not finite)."""
    cell: Cell
    ratios: dict[str, float]
    bitwise: dict[str, bool]                # per tensor that had to be the same bits as in the loopback ring
    failure: str | None = None              # why there are no figures
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.failure is None and all(r <= 1.0 for r in self.ratios.values()) and all(self.bitwise.values())

    def why(self) -> str:
        """One line that says what is wrong."""
        if self.failure is not None:
            return self.failure
        wrong = [f"{name} {ratio:.2f}x its budget" for name, ratio in self.ratios.items() if not ratio <= 1.0]
        wrong += [f"{name} is not the same bits as in the loopback ring" for name, same in self.bitwise.items() if not same]
        return ", ".join(wrong)

    def as_json(self) -> dict:
        ratios = {name: ratio if math.isfinite(ratio) else None for name, ratio in self.ratios.items()}
        return {**dataclasses.asdict(self.cell), "ratios": ratios, "bitwise": self.bitwise, "failure": self.failure,
                "ok": self.ok, "seconds": round(self.seconds, 4)}


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table: the first columns that hold words are left-aligned, numbers right-aligned."""
    rows = [list(map(str, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows)]

    def is_number(text: str) -> bool:
        return text[:1].isdigit() or text in ("inf", "nan", "-")

    left = [not all(is_number(row[i]) for row in rows) for i in range(len(header))] if rows else [True] * len(header)
    return "\n".join("  ".join(cell.ljust(w) if flush else cell.rjust(w) for cell, w, flush in zip(row, widths, left)).rstrip()
                     for row in [list(header), *rows])


def table(verdicts: Sequence[CellVerdict]) -> str:
    """One line per (kernel, dtype, mask, layout): how many cells, the worst error over its budget per tensor, ok or FAIL."""
    lines: dict[tuple, list[CellVerdict]] = {}
    for verdict in verdicts:
        lines.setdefault(verdict.cell.line, []).append(verdict)
    rows = []
    for line, members in lines.items():
        worst = [max((m.ratios[name] for m in members if name in m.ratios), default=None) for name in (*TENSORS, "dsinks")]
        bits = [same for m in members for same in m.bitwise.values()]
        rows.append([*line, len(members), *("-" if w is None else f"{w:.2f}" for w in worst),
                     "-" if not bits else "same" if all(bits) else "DIFFER", "ok" if all(m.ok for m in members) else "FAIL"])
    return grid(["kernel", "dtype", "mask", "layout", "cells", *TENSORS, "dsinks", "bits", ""], rows)


def report(title: str, verdicts: Sequence[CellVerdict], *, shown_failures: int = 10) -> bool:
    """Prints the table, then what failed. True when every cell is within budget (and there is one)."""
    bad = [v for v in verdicts if not v.ok]
    print(f"\n{title}\nworst error / budget per tensor (budget: 2 x error of eager torch in that dtype + 2 eps max|reference|)\n")
    print(table(verdicts))
    for verdict in bad[:shown_failures]:
        print(f"FAIL {verdict.cell}: {verdict.why()}")
    if len(bad) > shown_failures:
        print(f"... and {len(bad) - shown_failures} more")
    seconds = sum(v.seconds for v in verdicts)
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} cells within budget ({seconds:.0f} s of cells, without start and pauses)", flush=True)
    return bool(verdicts) and not bad


def environment() -> dict:
    """What the figures were measured on."""
    found = {"torch": torch.__version__, "device": "cpu", "devices": 0}
    if torch.cuda.is_available():
        found.update(device=torch.cuda.get_device_name(), devices=torch.cuda.device_count())
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    return found


def write_json(path: str | Path, sections: dict[str, object], ok: bool) -> None:
    """environment, ok and one entry per section that ran; verdicts become one object per cell."""
    def plain(value):
        return [item.as_json() if isinstance(item, CellVerdict) else item for item in value] if isinstance(value, list) else value

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"environment": environment(), "ok": ok, **{name: plain(value) for name, value in sections.items()}}
    path.write_text(json.dumps(whole, indent=1) + "\n")
