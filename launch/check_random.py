"""Problems drawn at random from everything that can be asked for together: lengths, ranks, layouts, masks, documents, heads,
dtypes, options and ways of computing. Each is judged by the oracle's budgets, and its plan by what every plan has to be."""
from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringflash.launch.check_judge import Judge, loopback_cell
from ringflash.launch.check_kernels import chosen_kernels
from ringflash.launch.check_problem import LAYOUTS, MADE_LAYOUTS, ROTATES, ROUTINGS, Cell, Drawn, allowed
from ringflash.launch.check_table import CellVerdict, report
from ringflash.ring import simulator
from ringflash.ring.gathered import positions_of, visits_of
from ringflash.ring.plan import PASSES, Plan, build_plan
from ringflash.tests.support import plan_cases

DTYPES = ("fp32", "bf16", "fp16")
# On a GPU every new head dim is compiled: two, and lengths of a few tiles. On a CPU lengths are those at which rings go wrong.
_HEAD_DIMS = {"cpu": (4, 8, 12, 16), "cuda": (64, 128)}
_LONGEST = {"cpu": 60, "cuda": 400}


def draw(seed: int, *, kernels: Sequence[str], dtypes: Sequence[str] = DTYPES, device: str = "cpu") -> Cell:
    """The problem of a seed: the same on every machine for the same arguments."""
    rng = random.Random(seed)
    kernel = rng.choice(kernels)
    dtype, head_dim = rng.choice(_dtypes(kernel, dtypes)), rng.choice(_HEAD_DIMS[device])
    cp_size, num_kv_heads, ratio = rng.choice((1, 2, 2, 3, 4, 5, 8)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 3, 4, 7))

    def length() -> int:
        return rng.choice((rng.randint(1, 2 * cp_size), rng.randint(3, _LONGEST[device]), rng.randint(3, _LONGEST[device])))

    seq_len = seq_len_k = length()
    name = rng.choice((*plan_cases.MASKS, *plan_cases.OPTION_MASKS))
    has_own_keys = rng.random() < 0.3
    if has_own_keys:
        name = rng.choice((*plan_cases.CROSS_MASKS, *plan_cases.CROSS_DOCUMENTS))
        seq_len_k = length()
    # As many documents of keys as of queries where the two have lists of their own; else a mask that both lengths can have.
    own_lists = seq_len_k if has_own_keys and name in plan_cases.CROSS_DOCUMENTS else None
    options = plan_cases.mask_options(name, seq_len if own_lists else min(seq_len, seq_len_k), rng, own_lists)
    degrees = [n for n in (2, 3, 4) if num_kv_heads * ratio % n == 0]
    drawn = Drawn(
        options, seq_len_k, softcap=rng.choice((0.0, 0.0, 0.5, 1.5, 30.0)), has_sinks=rng.random() < 0.3,
        # hopper's values have the head dim of its keys.
        head_dim_v=rng.choice((head_dim, head_dim, rng.choice(_HEAD_DIMS[device]) if kernel != "hopper" else head_dim)),
        layout_k=rng.choice(LAYOUTS),
        ulysses_size=rng.choice(degrees) if degrees and rng.random() < 0.2 else 1, seed=seed)
    return Cell(
        kernel, dtype, name, rng.choice((*LAYOUTS, *MADE_LAYOUTS)), cp_size, ratio, seq_len, head_dim, num_kv_heads,
        batch=1 if "documents" in name else rng.choice((1, 1, 2)), deterministic=rng.random() < 0.5, rotate=rng.choice(ROTATES),
        routing=rng.choice(ROUTINGS), group="random", drawn=drawn)


def _dtypes(kernel: str, dtypes: Sequence[str]) -> Sequence[str]:
    return [dtype for dtype in dtypes if kernel != "hopper" or dtype != "fp32"] or dtypes


def plan_fault(cell: Cell) -> str | None:
    """What is wrong with the plans of a cell: some pair not computed exactly once, a batch whose two ends differ, rows that
    travel though nobody needs them there. None: nothing."""
    layouts = {name: layout.ring for name, layout in cell.layouts().items()}
    layout, layout_k = layouts["layout"], layouts.get("layout_k", layouts["layout"])
    wanted = allowed(cell).numpy()
    for rotates in ("kv", "q"):
        plan = build_plan(cell.make_mask(), layout, layout_k, routing=cell.routing, rotates=rotates)
        pairs = wanted if rotates == "kv" else wanted.T
        for pass_ in PASSES:
            times = times_computed(plan, pass_, pairs.shape)
            if not np.array_equal(times, pairs):
                row, key = np.argwhere(times != pairs)[0]
                found, want = times[row, key], int(pairs[row, key])
                return f"plan (rotates={rotates}, {pass_}): pair ({row}, {key}) is computed {found} times, want {want}"
        sent, least = plan.rows_sent("forward"), fewest_rows(plan, pairs)
        if sent != least:
            return f"plan (rotates={rotates}, {plan.routing}): {sent} rows travel, {least} have to"
        try:
            for pass_ in PASSES:
                simulator.run(plan, pass_)
        except RuntimeError as error:
            return f"plan (rotates={rotates}): {error}"
    return None


def times_computed(plan: Plan, pass_: str, shape: tuple[int, int]) -> np.ndarray:
    """int64 [queries, keys]: how often the kernels that a pass launches compute each pair."""
    times = np.zeros(shape, dtype=np.int64)
    for rank in range(plan.cp_size):
        rows = plan.layout.positions(rank)
        for visit in (v for step in range(plan.num_steps) for v in visits_of(plan, rank, step, pass_)):
            keys = positions_of(plan, visit)
            k_lo, k_hi = visit.intervals()[:2]
            index = np.arange(len(keys))
            times[np.ix_(rows, keys)] += (k_lo[:, None] <= index) & (index < k_hi[:, None])
    return times


def fewest_rows(plan: Plan, pairs: np.ndarray) -> int:
    """Rows on the wire that this routing cannot do without, from the pairs themselves: directly, one for each reader that is not
    the owner; round a ring, one for each hop up to the last reader, in the direction in which that one is nearer."""
    size = plan.cp_size
    reads = np.stack([pairs[plan.layout.positions(rank)].any(axis=0) for rank in range(size)])          # [reader, key]
    total = 0
    for owner in range(size):
        mine = reads[:, plan.layout_k.positions(owner)]
        mine[owner] = False
        if plan.routing != "ring":
            total += int(mine.sum())
            continue
        hops = (np.arange(size) - owner) % size
        up, down = ((mine * distance[:, None]).max(axis=0, initial=0) for distance in (hops, (size - hops) % size))
        total += int(np.minimum(up, down).sum())
    return total


def judged(judge: Judge, cell: Cell, device: str) -> CellVerdict:
    """The verdict on the result, unless the plan is at fault already."""
    start = time.perf_counter()
    fault = plan_fault(cell)
    if fault is not None:
        return CellVerdict(cell, {}, {}, failure=fault, seconds=time.perf_counter() - start)
    verdict = judge.judge(cell, lambda: loopback_cell(cell, device))
    return dataclasses.replace(verdict, seconds=time.perf_counter() - start)


def check(count: int, seed: int, *, device: str, kernels: Sequence[str] | None, dtypes: Sequence[str] = DTYPES,
          say: Callable[[str], None] = lambda text: None) -> tuple[bool, list[CellVerdict]]:
    """Draws and judges `count` problems, that of seed + i the i-th; prints the table. kernels: None for the device's own.
    RuntimeError when a kernel cannot run."""
    if kernels is None:
        kernels = tuple(chosen_kernels(None, device, dtypes, _HEAD_DIMS[device]))
    for kernel in kernels:
        chosen_kernels((kernel,), device, _dtypes(kernel, dtypes), _HEAD_DIMS[device])
    judge, verdicts = Judge(torch.device(device), keep=1), []
    for index in range(count):
        cell = draw(seed + index, kernels=kernels, dtypes=dtypes, device=device)
        verdicts.append(judged(judge, cell, device))
        say(f"random {index + 1}/{count}")
    say("")
    title = f"Problems drawn at random (seeds {seed} to {seed + count - 1}) on the loopback ring on {device}"
    return report(title, verdicts), verdicts
