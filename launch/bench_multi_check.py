"""Correctness on several GPUs, a part of their benchmark: the matrix over each carrier, and the stress of the signals."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ringflash.launch import check_cells, check_ring, check_signals
from ringflash.launch.check_judge import Judge, loopback_cell
from ringflash.launch.check_spawn import Rank


def matrix_cells(kernels: Sequence[str], dtypes: Sequence[str], num_ranks: int) -> list[check_cells.Cell]:
    """Every mask and layout, with the other axes walked beside them."""
    return check_cells.matrix(kernels, dtypes, cp_sizes=(num_ranks,), seq_lens=(5, 389), head_dims=(64, 128), diagonal=True)


def matrix(rank: Rank, exchanges: Sequence[str], cells: Sequence[check_cells.Cell], say: Callable[[dict], None], *,
           delay_ms: float) -> list[dict]:
    """One record per carrier: cells within budget, and those with the bits of the loopback ring. Rank 0 judges; others get []."""
    records, judge = [], Judge(rank.device)
    answers: dict[int, dict] = {}
    for exchange in exchanges:
        start = time.monotonic()
        parts: list = [None] * rank.num_processes
        dist.all_gather_object(parts, check_ring.ring_cells(rank, cells, delay_ms, exchange))
        if rank.rank:
            continue
        bad, worst = [], 0.0
        for index, (cell, result) in enumerate(zip(cells, check_ring.assemble(cells, parts))):
            answers.setdefault(index, loopback_cell(cell, rank.device))
            verdict = judge.judge(cell, lambda result=result: result, same_as=lambda index=index: answers[index])
            worst = max([worst, *verdict.ratios.values()])
            if not verdict.ok:
                bad.append(f"{cell}: {verdict.why()}")
        records.append({"section": "matrix", "carrier": exchange, "cells": len(cells), "ok": len(cells) - len(bad),
                        "worst_of_budget": worst, "bad": bad[:10], "seconds": time.monotonic() - start})
        say(records[-1])
    dist.barrier()                          # the others do not start what rank 0 cannot join yet
    return records


def stress(rank: Rank, num_steps: int, say: Callable[[dict], None], *, max_delay_us: float = 200.0) -> list[dict]:
    """The signals under random delays: as they are, and with either wait left out, which has to show."""
    records = []
    for without, steps in ((None, num_steps), ("free", num_steps // 20), ("arrived", num_steps // 20)):
        found = check_signals.stress(rank, steps, max_delay_us, without)
        wrong = torch.tensor([found["wrong"]], device=rank.device)
        dist.all_reduce(wrong)
        ok = int(wrong) > 0 if without else int(wrong) == 0
        records.append({"section": "stress", "without": without, **found, "wrong": int(wrong), "ok": ok})
        say(records[-1])
    return records
