"""What a run leaves and shows, written by rank 0 alone: metrics.jsonl, summary.json, plots, weights.pt, event files.

metrics.jsonl holds every step once, also over a resume: rows after the step that a run goes on from belong to what was lost.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ringflash.config import Config
from ringflash.train.event_files import EventFiles
from ringflash.train.folder import STOPPED
from ringflash.train.passkey import Recall, plot_recall
from ringflash.train.plots import plot_loss, plot_positions, plot_speed


class Recorder:
    """Collects the figures of a run. With folder=None (every rank but 0) all of it does nothing."""

    def __init__(self, folder: Path | None, cfg: Config, step: int = 0, evaluated: int = 0):
        """step: the one that the run goes on from; evaluated: the newest of its evaluations. What metrics.jsonl has of later ones
        is dropped."""
        self.folder = folder
        self.train: list[dict] = []
        self.evals: list[dict] = []
        self.recall: Recall | None = None
        self.bar = None
        self.file = None
        self.board: EventFiles | None = None
        if folder is not None:
            (folder / STOPPED).unlink(missing_ok=True)
            for row in self._keep(folder / "metrics.jsonl", step, evaluated):
                if row["kind"] in ("train", "eval"):
                    (self.train if row["kind"] == "train" else self.evals).append(row)
            # Unbuffered: what a killed run has measured is on disk.
            self.file = open(folder / "metrics.jsonl", "ab", buffering=0)
            self.is_torn = self.is_full = False
            # In a log file every refresh is a line of its own: fewer there.
            interval_s = 0.3 if sys.stderr.isatty() else 10.0
            self.bar = tqdm(total=cfg.train.steps, initial=step, unit="step", dynamic_ncols=True, mininterval=interval_s, miniters=1,
                            disable=not cfg.run.progress)
            if cfg.train.tensorboard:
                self.board = EventFiles(folder / "tensorboard", step)
        self.log_every, self.steps = cfg.train.log_every, cfg.train.steps

    def step(self, row: dict) -> None:
        """One optimizer step: {step, loss, lr, grad_norm, tokens, valid_tokens, tokens_per_s, tokens_per_s_per_rank,
        tflops_per_rank, mfu (where the GPU's peak is known), peak_memory_gib, data_wait_ms, time_s}; of one that was skipped loss
        and grad_norm are None, and it has skipped: why."""
        if self.folder is None:
            return
        self.train.append(row)
        self.bar.update(1)
        if "skipped" in row and not self.bar.disable:
            self.bar.write(f"step {row['step']}: skipped, {row['skipped']}", file=sys.stderr)
        if row["step"] % self.log_every == 0 or row["step"] == self.steps or "skipped" in row:
            self._write({"kind": "train", **row})
            self.bar.set_postfix_str(in_short(row), refresh=False)

    def evaluation(self, row: dict) -> None:
        """{step, heldout_loss, valid_tokens, by_position, peak_memory_gib, time_s}."""
        if self.folder is None:
            return
        self.evals.append(row)
        self._write({"kind": "eval", **row})
        if not self.bar.disable:
            self.bar.write(f"step {row['step']}: held-out loss {row['heldout_loss']:.4f} ({row['valid_tokens']:,} tokens)",
                           file=sys.stderr)

    def passkey(self, step: int, recall: Recall) -> None:
        """How many keys were found after `step`."""
        if self.folder is None:
            return
        self.recall = recall
        self._write({"kind": "passkey", "step": step, "found": recall.mean(), **recall.row()})
        if not self.bar.disable:
            self.bar.write(recall.table(), file=sys.stderr)

    def finish(self, summary: dict, *, plot: bool, unigram_nats: float) -> None:
        """Writes summary.json and the plots and prints the table."""
        if self.folder is None:
            return
        self.close()
        _write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2).encode() + b"\n")
        if plot:
            plot_loss(self.folder / "loss.png", self.train, self.evals, unigram_nats)
            plot_speed(self.folder / "speed.png", self.train)
            if self.evals and self.evals[-1].get("by_position"):
                plot_positions(self.folder / "loss_by_position.png", self.evals[-1]["by_position"],
                               f"after step {self.evals[-1]['step']}")
            if self.recall is not None:
                plot_recall(self.folder / "passkey.png", self.recall)
        print(table(summary), flush=True)

    def close(self) -> None:
        if self.file is not None:
            self.bar.close()
            self.file.close()
            self.file = None
        if self.board is not None:
            self.board.close()
            self.board = None

    def sync(self) -> None:
        """What was written is on the disk: before the checkpoint that says it was."""
        if self.file is not None:
            try:
                os.fsync(self.file.fileno())
            except OSError as error:
                self._complain(error.strerror)

    def stopped(self, step: int) -> None:
        """Leaves stopped.json: the ranks ended as they were told to, with a checkpoint."""
        if self.folder is not None:
            self.close()
            _write_atomically(self.folder / STOPPED, json.dumps({"step": step}).encode() + b"\n")

    @staticmethod
    def _keep(path: Path, step: int, evaluated: int) -> list[dict]:
        """The rows up to `step`, those of evaluations up to `evaluated`, which are then all that the file holds."""
        rows = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn by a kill or a full disk
            if isinstance(row, dict) and row.get("step", step + 1) <= (step if row.get("kind") == "train" else evaluated):
                rows.append(row)
        _write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        return rows

    def _write(self, row: dict) -> None:
        if self.board is not None:
            self.board.add(row)
        line = (b"\n" if self.is_torn else b"") + json.dumps(row).encode() + b"\n"
        reason = "the disk took a part of a row"
        try:
            written = self.file.write(line)
        except OSError as error:
            written, reason = 0, error.strerror
        if written < len(line) and not self.is_full:
            # The run is worth more than its rows.
            self._complain(reason)
        self.is_full = written < len(line)
        self.is_torn = self.is_full and (written > 0 or self.is_torn)

    @staticmethod
    def _complain(reason: str) -> None:
        print(f"ringflash train: metrics.jsonl: {reason}; rows may be missing", file=sys.stderr, flush=True)


def in_short(row: dict) -> str:
    """The figures of a step on one line."""
    if "skipped" in row:
        return "skipped"
    parts = [f"loss {row['loss']:.4f}", f"norm {row['grad_norm']:.2f}", f"{row['tokens_per_s']:,.0f} tokens/s"]
    if row["tokens_per_s_per_rank"] != row["tokens_per_s"]:
        parts[-1] += f" ({row['tokens_per_s_per_rank']:,.0f} a rank)"
    if "mfu" in row:
        parts.append(f"MFU {100 * row['mfu']:.1f}%")
    return ", ".join([*parts, f"{row['peak_memory_gib']:.2f} GiB", f"data {row['data_wait_ms']:.0f} ms"])


def table(summary: dict) -> str:
    """The summary as aligned lines."""
    def show(value) -> str:
        if isinstance(value, float):
            return f"{value:.4f}" if abs(value) < 100 else f"{value:,.0f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    width = max(len(key) for key in summary)
    lines = [f"  {key.replace('_', ' '):<{width}}  {show(value)}" for key, value in summary.items()]
    rule = "-" * max(map(len, lines))
    return "\n".join([rule, *lines, rule])


def save_weights(path: Path, state: dict[str, Tensor]) -> None:
    """A state_dict on the CPU; the file is whole or absent."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
