"""The rows of metrics.jsonl as TensorBoard scalars."""
from __future__ import annotations

from pathlib import Path


class EventFiles:
    """Writes <folder>/events.*; step: the one that the run goes on from, later ones in the folder are hidden.

    The scalar KIND/KEY of a row is its number KEY, in fp32 as TensorBoard has it; what is no number is left out."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, row: dict) -> None:
        """A row with "kind" and "step"."""
        for key, value in row.items():
            if key not in ("kind", "step") and isinstance(value, (int, float)) and not isinstance(value, bool):
                self.writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def close(self) -> None:
        self.writer.close()
