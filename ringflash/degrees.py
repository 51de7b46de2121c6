"""How the ranks of a run are divided: the `parallel` group of the configuration, and its rules. No torch."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """dp x cp = world size; -1 means what is left. A sequence is on `cp` ranks that follow each other (the inner axis): a ring of
    cp / ulysses places, each held by `ulysses` ranks, which have its rows outside attention and its heads inside."""

    dp: int = 1
    cp: int = -1
    ulysses: int = 1
    # Ranks that share one copy of weights, gradients and optimizer state: 1 none do; -1 all; n groups of n neighbours, each one.
    shard: int = 1
    reduce: str = "last"  # gradients of shards: in the last micro-batch of a step, or in each, so that no rank keeps whole ones
    nproc: int | None = None  # workers of a plain start; None: one per GPU, or one on CPU
    timeout_s: float = 600.0  # a collective that takes longer stops the run


REDUCES = ("last", "each")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest(value: float, valid: list[int]) -> str:
    """The valid values next below (or at) and next above `value`, as text."""
    below = max((v for v in valid if v <= value), default=None)
    above = min((v for v in valid if v > value), default=None)
    return " or ".join(str(v) for v in (below, above) if v is not None)


def degrees_of(parallel: ParallelConfig, world_size: int) -> tuple[str, tuple[int, int]]:
    """What is wrong ("": nothing), and (dp, cp) with -1 resolved."""
    dp, cp = parallel.dp, parallel.cp
    none = (0, 0)
    if parallel.nproc is not None and parallel.nproc < 1:
        return f"parallel.nproc={parallel.nproc}: workers of a plain start, at least 1 (or null: one per GPU)", none
    for key, degree in (("dp", dp), ("cp", cp)):
        if degree < 1 and degree != -1:
            return f"parallel.{key}={degree}: a degree is at least 1, or -1 for what is left of {world_size} ranks", none
    if dp == -1 and cp == -1:
        return "parallel.dp=-1, parallel.cp=-1: only one of them can be what is left; set the other, e.g. parallel.dp=1", none
    for key, other, degree in (("dp", "cp", dp), ("cp", "dp", cp)):
        rest = cp if key == "dp" else dp
        if rest == -1 and world_size % degree:
            return (f"parallel.{key}={degree}: must divide the world size {world_size} to leave {other} whole ranks; "
                    f"nearest: {nearest(degree, divisors(world_size))}"), none
    dp = world_size // cp if dp == -1 else dp
    cp = world_size // dp if cp == -1 else cp
    if dp * cp != world_size:
        pairs = sorted(((d, world_size // d) for d in divisors(world_size)), key=lambda p: (abs(p[1] - cp), p))[:2]
        ways = " or ".join(f"parallel.dp={d} parallel.cp={c}" for d, c in pairs)
        return (f"parallel.dp={parallel.dp}, parallel.cp={parallel.cp}: dp * cp must be the world size, "
                f"{dp} * {cp} = {dp * cp} is not {world_size}; nearest: {ways} (or start {dp * cp} ranks)"), none
    return "", (dp, cp)


def ulysses_problems(parallel: ParallelConfig, cp: int, num_heads: int) -> list[str]:
    """What is wrong with parallel.ulysses on cp ranks, for a model of num_heads query heads."""
    degree = parallel.ulysses
    if degree >= 1 and cp % degree == 0 and num_heads >= 1 and num_heads % degree == 0:
        return []
    if degree == 1:
        return []                                           # the model's heads are wrong, and it says so itself
    valid = [d for d in divisors(cp) if num_heads % d == 0] if num_heads >= 1 else [1]
    return [f"parallel.ulysses={degree}: must divide the {cp} ranks of a sequence (parallel.cp) and model.num_heads={num_heads}; "
            f"nearest: {nearest(degree, valid)}"]


def shard_size(parallel: ParallelConfig, world_size: int) -> int:
    """Ranks that share one copy of the weights: parallel.shard with -1 resolved."""
    return world_size if parallel.shard == -1 else parallel.shard


def shard_problems(parallel: ParallelConfig, world_size: int, accumulation: int) -> list[str]:
    """What is wrong with parallel.shard and parallel.reduce on dp * cp = world_size ranks."""
    problems = []
    shard, reduce = parallel.shard, parallel.reduce
    if shard != -1 and (shard < 1 or world_size % shard):
        problems.append(f"parallel.shard={shard}: must divide dp * cp = {world_size}, or be -1 for all of them; "
                        f"nearest: {nearest(shard, divisors(world_size))}")
    if reduce not in REDUCES:
        problems.append(f"parallel.reduce={reduce}: valid: {', '.join(REDUCES)}")
    elif reduce == "each" and (shard == 1 or accumulation == 1):
        why = "weights are not sharded, parallel.shard=1" if shard == 1 else "a step has one micro-batch, train.accumulation=1"
        problems.append(f"parallel.reduce=each: {why}; nearest: last")
    return problems
