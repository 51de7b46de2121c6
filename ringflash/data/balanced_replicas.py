"""The samples of one optimizer step dealt to data-parallel replicas, so that all have about the same attention to compute.
Note [Balanced replicas]."""
from __future__ import annotations

import numpy as np


def deal(costs: np.ndarray, dp: int) -> np.ndarray:
    """int64 [num_micro_batches, dp]: which of the step's samples each replica has in each of its micro-batches.

    costs [num_micro_batches * dp]: of the samples, any numbers. Longest processing time first (Graham 1969), every replica with
    the same number of samples: the costliest dp samples are the first micro-batch, so that its replicas, which wait for each
    other where weights are sharded, have about the same to do; within a micro-batch the costliest goes to the replica that has
    had the least so far. The same on all ranks: ties go to the lower number.
    """
    by_cost = np.argsort(-np.asarray(costs), kind="stable").reshape(-1, dp)
    order = np.empty_like(by_cost)
    load = np.zeros(dp, dtype=np.asarray(costs).dtype)
    for micro, samples in enumerate(by_cost):
        replicas = np.argsort(load, kind="stable")
        order[micro, replicas] = samples
        load[replicas] += costs[samples]
    return order


def imbalance(costs: np.ndarray, order: np.ndarray) -> float:
    """What the costliest sample of each micro-batch costs, over what the mean one does, as order [num_micro_batches, dp] deals
    them: the time of a step in which replicas wait for each other in every micro-batch. 1: even."""
    dealt = np.asarray(costs, np.float64)[order]
    return float(dealt.max(axis=1).sum() / dealt.mean(axis=1).sum()) if dealt.any() else 1.0
