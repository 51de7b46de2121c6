"""The options of checkpoints and their rules: a part of ringflash.config, without torch as that is."""
from __future__ import annotations

import math
from dataclasses import dataclass

MAX_TIMEOUT_S = 1e7  # 115 days
ON_ERROR = ("warn", "stop")


@dataclass
class CheckpointConfig:
    """What a run keeps of itself on the way, and where it goes on from."""

    every: int = 100  # optimizer steps; also after the last step and on SIGTERM. 0: no checkpoints
    keep: int = 2  # the newest ones
    asynchronous: bool = False  # written by a thread from a copy in host memory, while training goes on
    resume: str = "auto"  # auto: the run folder's newest whole one; none; or a run folder, or one checkpoint's folder
    on_error: str = "warn"  # when one cannot be saved (disk full, read-only): warn and train on, or stop
    grace_s: float = 10.0  # after SIGTERM: for all ranks to reach the end of a step; without it they leave unsaved
    timeout_s: float = 600.0  # for the slowest rank to write its share
    restarts: int = 0  # of a plain start: how often torchrun starts all ranks again after one was lost


def checkpoint_problems(c: CheckpointConfig) -> list[str]:
    """A line for each broken rule."""
    problems = [f"checkpoint.{key}={getattr(c, key)}: must be at least {low}; nearest: {low}"
                for key, low in (("every", 0), ("keep", 1), ("restarts", 0)) if getattr(c, key) < low]
    problems += [f"checkpoint.{key}={getattr(c, key)}: must be a finite number above 0" for key in ("grace_s", "timeout_s")
                 if not (math.isfinite(getattr(c, key)) and getattr(c, key) > 0)]
    problems += timeout_problems("checkpoint.timeout_s", c.timeout_s)
    if c.on_error not in ON_ERROR:
        problems.append(f"checkpoint.on_error={c.on_error}: valid: {', '.join(ON_ERROR)}")
    if not c.resume:
        problems.append("checkpoint.resume='': valid: auto, none, or a folder with checkpoints")
    if c.restarts > 0 and (c.every == 0 or c.resume == "none"):
        key = "every=0" if c.every == 0 else "resume=none"
        problems.append(f"checkpoint.restarts={c.restarts}: with checkpoint.{key} each would begin at step 1 again; nearest: 0")
    return problems


def timeout_problems(key: str, seconds: float) -> list[str]:
    """Of a finite timeout that torch could not count in its own units."""
    if not MAX_TIMEOUT_S < seconds < math.inf:
        return []
    return [f"{key}={seconds}: must be at most {MAX_TIMEOUT_S:.0f}; nearest: {MAX_TIMEOUT_S:.0f}"]
