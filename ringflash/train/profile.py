"""A trace of some steps, for chrome://tracing or ui.perfetto.dev, with ranges that name the step and the ring's hops."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ringflash.config import TrainConfig
from ringflash.ring.tracing import named_ranges


class Traces:
    """The trace of this rank: train.profile steps after train.profile_after, counted from the start of the process; one file
    <folder>/trace-steps<first>-<last>-rank<n>.json. Ranks that are not in train.profile_ranks trace nothing."""

    def __init__(self, cfg: TrainConfig, rank: int, folder: Path | None):
        self.rank, self.folder, self.before = rank, folder, cfg.profile_after
        self.left = cfg.profile if folder is not None and rank in cfg.profile_ranks else 0
        self.first = 0
        self.profiler: profile | None = None
        self._open = ExitStack()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around optimizer step `step` (from 0)."""
        if self.before > 0 or not self.left:
            self.before -= 1
            yield
            return
        if self.profiler is None:
            self.first = step + 1
            self._open.enter_context(named_ranges())
            on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self.profiler = self._open.enter_context(profile(activities=[ProfilerActivity.CPU, *on_gpu]))
        with record_function(f"optimizer step {step + 1}"):
            yield
        self.left -= 1
        if not self.left:
            self.close(step + 1)

    def close(self, last: int) -> None:
        """Writes what there is, up to step number `last`. A trace that cannot be written costs the run nothing but the trace."""
        if self.profiler is None:
            return
        self._open.close()
        profiler, self.profiler, self.left = self.profiler, None, 0
        path = self.folder / f"trace-steps{self.first}-{last}-rank{self.rank}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            print(f"ringflash train: {path}: no trace: {error}", file=sys.stderr, flush=True)
