"""The jobs of a sweep (`python launch/train.py -m ...`): one after the other, each its own torchrun, none ends the others."""
from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

_SIGNALLED = 128  # and above: exit codes of a job that a signal stopped


class Sweep:
    """launch: trains one job and returns its held-out loss, or exits with a code."""

    def __init__(self, launch: Callable[[DictConfig], float | None]):
        self.launch = launch
        self.jobs: list[dict] = []

    def task(self) -> Callable[[DictConfig], float]:
        """What Hydra is to call for each job: returns the held-out loss, which a sweeper minimises, inf for one that failed."""
        @functools.wraps(self.launch)
        def job(composed: DictConfig) -> float:
            loss, code = None, 0
            try:
                loss = self.launch(composed)
            except SystemExit as leaving:
                # What is wrong with one job says nothing about the next. A job that was told to stop ends the sweep.
                if not leaving.code or leaving.code >= _SIGNALLED:
                    raise
                code = leaving.code
            self._add(Path(HydraConfig.get().runtime.output_dir), loss, code)
            return float("inf") if loss is None else loss
        return job

    def _add(self, folder: Path, loss: float | None, code: int) -> None:
        overrides = OmegaConf.to_container(HydraConfig.get().overrides.task)
        self.jobs.append({"job": folder.name, "overrides": overrides, "heldout_loss": loss, "exit_code": code,
                          "folder": str(folder)})
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.parent / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(self.jobs[-1]) + "\n")

    def finish(self) -> int:
        """Prints the jobs, the best first, by the overrides in which they differ. Returns the exit code of the sweep."""
        shared = set.intersection(*(set(job["overrides"]) for job in self.jobs)) if len(self.jobs) > 1 else set()
        for job in sorted(self.jobs, key=lambda job: float("inf") if job["heldout_loss"] is None else job["heldout_loss"]):
            result = f"{job['heldout_loss']:.4f}" if job["heldout_loss"] is not None else \
                f"failed ({job['exit_code']})" if job["exit_code"] else "-"
            print(f"{result:>10}  job {job['job']}  {' '.join(word for word in job['overrides'] if word not in shared)}")
        return int(any(job["exit_code"] for job in self.jobs))
