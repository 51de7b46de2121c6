"""What a plan computes: every allowed pair exactly once, whatever the mask, the layout and the ring."""
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ringflash import Layout, Mask
from ringflash.layout import KINDS
from ringflash.ring import plan as plan_module
from ringflash.ring.cache import BoundedCache
from ringflash.ring.plan import build_plan
from ringflash.ring.ranges import num_rows, row_index
from ringflash.tests.support.plan_cases import SIZES, PlanCase, cases

ROOT = Path(__file__).resolve().parents[2]
everywhere = pytest.mark.parametrize(("kind", "cp_size"), [(kind, size) for kind in KINDS for size in SIZES])


def visits_of(plan):
    return [v for step in range(plan.num_steps) for rank in range(plan.cp_size) for v in plan.visits(rank, step)]


def times_computed(case: PlanCase, visits) -> np.ndarray:
    """int64 [Sq, Sk]: how often each pair is computed."""
    times = np.zeros(case.allowed.shape, dtype=np.int64)
    for visit in visits:
        keys = case.layout_k.positions(visit.owner)[row_index(visit.rows)]
        k_lo, k_hi, _, _ = visit.intervals()
        for query, low, high in zip(case.layout.positions(visit.rank), k_lo, k_hi, strict=True):
            times[query, keys[low:high]] += 1
    return times


@everywhere
def test_visits_of_all_ranks_cover_each_allowed_pair_exactly_once_and_no_other(kind, cp_size):
    for case in cases(kind, cp_size, seed=2):
        assert np.array_equal(times_computed(case, visits_of(case.plan)), case.allowed.astype(np.int64)), case


@everywhere
def test_both_sides_of_a_visit_name_the_same_pairs_and_all_ends_are_monotone(kind, cp_size):
    for case in cases(kind, cp_size, seed=3):
        for visit in visits_of(case.plan):
            k_lo, k_hi, q_lo, q_hi = ends = visit.intervals()
            assert all(x.dtype == np.int32 and (np.diff(x) >= 0).all() for x in ends)
            assert len(k_lo) == len(k_hi) == case.layout.shard_len(visit.rank)
            assert len(q_lo) == len(q_hi) == visit.num_rows == num_rows(visit.rows)
            assert (0 <= k_lo).all() and (k_lo <= k_hi).all() and (k_hi <= visit.num_rows).all()
            assert (0 <= q_lo).all() and (q_lo <= q_hi).all() and (q_hi <= len(k_lo)).all()
            query, key = np.arange(len(k_lo))[:, None], np.arange(visit.num_rows)
            seen = (k_lo[:, None] <= key) & (key < k_hi[:, None])
            assert np.array_equal(seen, (q_lo <= query) & (query < q_hi)), (case, visit)
            assert visit.num_pairs == seen.sum()


@everywhere
def test_every_rank_visits_its_own_block_first_and_other_blocks_only_where_a_pair_is_allowed(kind, cp_size):
    for case in cases(kind, cp_size, seed=4):
        plan = case.plan
        for rank in range(cp_size):
            own, *more = plan.visits(rank, 0)
            for visit in (own, *more):
                assert visit.is_own and visit.owner == rank and visit.num_rows == case.layout_k.shard_len(rank)
                assert visit.rows == (((0, visit.num_rows),) if visit.num_rows else ())
            assert len(more) < case.mask.num_parts and (not more or all(visit.num_pairs for visit in (own, *more)))
        for visit in visits_of(plan):
            assert visit.step == 0 or (visit.num_pairs and not visit.is_own and visit.owner != visit.rank)
            assert visit in plan.visits(visit.rank, visit.step)
        assert plan.num_pairs(0, 0) == case.pairs_of(0, 0).sum()
        assert plan.visits(0, plan.num_steps) == () and plan.visits(0, plan.num_backward_steps) == ()


@everywhere
def test_dead_rows_are_those_that_no_pair_names(kind, cp_size):
    for case in cases(kind, cp_size, seed=5):
        for rank in range(cp_size):
            dead_q = row_index(case.plan.dead_q(rank))
            dead_k = row_index(case.plan.dead_k(rank))
            assert np.array_equal(dead_q, np.flatnonzero(~case.allowed[case.layout.positions(rank)].any(axis=1))), case
            assert np.array_equal(dead_k, np.flatnonzero(~case.allowed[:, case.layout_k.positions(rank)].any(axis=0))), case


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("left", ["0", "S/W - 2", "S/W - 1", "S/W", "S", "S + 5", "63"])
def test_windows_at_the_edges_of_a_shard_equal_the_definition(kind, cp_size, left):
    seq_len = 512 if left == "63" else 48
    shard = seq_len // cp_size
    reach = {"0": 0, "S/W - 2": shard - 2, "S/W - 1": shard - 1, "S/W": shard, "S": seq_len, "S + 5": seq_len + 5, "63": 63}[left]
    layout = Layout(kind, seq_len, cp_size)
    case = PlanCase((("window_size", (reach, 0)),), layout, layout)
    assert np.array_equal(times_computed(case, visits_of(case.plan)), case.allowed.astype(np.int64))
    if reach == 0:
        assert case.plan.num_steps == 1 and not case.plan.messages("backward")


def test_the_check_of_coverage_finds_a_skipped_a_doubled_and_a_shifted_visit():
    layout = Layout("zigzag", 24, 3)
    case = PlanCase((("causal", True),), layout, layout)
    visits = visits_of(case.plan)
    shifted = replace(visits[4], rank=(visits[4].rank + 1) % 3)
    for defective in (visits[:-1], visits + visits[-1:], visits[:4] + [shifted] + visits[5:]):
        assert not np.array_equal(times_computed(case, defective), case.allowed.astype(np.int64))


def test_a_mask_whose_ends_fall_is_refused_by_the_plan():
    class Falling(Mask):
        def bounds(self, positions, seq_len_q, seq_len_k, part=0):
            first, stop = super().bounds(positions, seq_len_q, seq_len_k, part)
            dead = positions % 5 == 3
            return np.where(dead, 0, first), np.where(dead, 0, stop)  # a dead row at (0, 0)

    with pytest.raises(AssertionError, match="must not decrease"):
        build_plan(Falling(), Layout("zigzag", 32, 2))


def test_layouts_of_different_rings_and_unfit_masks_are_refused():
    with pytest.raises(ValueError, match="cp_size=2 but layout_k has cp_size=3"):
        build_plan(Mask(), Layout("zigzag", 8, 2), Layout("zigzag", 8, 3))
    with pytest.raises(ValueError, match="part=1: this mask has 1"):
        Mask().bounds(np.arange(8), 8, 8, 1)
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\]=9"):
        build_plan(Mask(cu_seqlens=[0, 9]), Layout("zigzag", 8, 2))
    with pytest.raises(ValueError, match="lanes"):
        build_plan(Mask(), Layout("zigzag", 8, 2), lanes=(2,))
    with pytest.raises(ValueError, match="routing='straight': valid are auto, ring, direct"):
        build_plan(Mask(), Layout("zigzag", 8, 2), routing="straight")
    with pytest.raises(ValueError, match="only a ring has lanes"):
        build_plan(Mask(), Layout("zigzag", 8, 2), routing="direct", lanes=(1,))
    with pytest.raises(ValueError, match="forward, backward"):
        build_plan(Mask(), Layout("zigzag", 8, 2)).messages("sideways")


def test_plans_are_shared_by_content_and_kept_within_bounds(monkeypatch):
    monkeypatch.setattr(plan_module, "_plans", BoundedCache(3))
    one = build_plan(Mask(cu_seqlens=[0, 4, 8]), Layout("zigzag", 8, 2))
    other_masks = Layout("zigzag", 8, 2, Mask(causal=False))
    assert build_plan(Mask(cu_seqlens=np.array([0, 4, 8])), other_masks) is one
    assert build_plan(Mask(cu_seqlens=[0, 4, 8]), Layout("zigzag", 8, 2), lanes=(1,)) is not one
    for seq_len in range(8, 40):
        build_plan(Mask(), Layout("zigzag", seq_len, 2))
    assert len(plan_module._plans) == 3
    assert build_plan(Mask(cu_seqlens=[0, 4, 8]), Layout("zigzag", 8, 2)) is not one


def test_a_bounded_cache_forgets_the_longest_unused_and_never_exceeds_its_weight():
    cache = BoundedCache(10)
    made = []

    def ask(key, weight):
        return cache.get_or_make(key, lambda: made.append(key) or key, lambda value: weight)

    assert [ask("a", 4), ask("b", 4), ask("a", 4), ask("c", 4)] == ["a", "b", "a", "c"]  # b goes, a was used later
    assert ask("a", 4) == "a" and made == ["a", "b", "c"]
    assert ask("b", 4) == "b" and made == ["a", "b", "c", "b"]
    assert ask("huge", 11) == "huge" and len(cache) == 2 and cache.weight == 8


def test_planning_imports_no_torch():
    code = ("import sys; from ringflash.mask import Mask; from ringflash.layout import Layout;"
            "from ringflash.ring import plan, simulator;"
            "p = plan.build_plan(Mask(), Layout('zigzag', 16, 4)); simulator.run(p, 'backward'); p.visits(3, 1)[0].intervals();"
            "assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_planning_a_million_dense_tokens_does_not_grow_with_pairs_of_ranks_times_tokens(kind):
    # Bound by the number of large arrays, not by time: no array of a plan is longer than a shard.
    plan = build_plan(Mask(), Layout(kind, 2**20, 8))
    assert len(plan.messages("backward")) <= 8 * 7 * 3
    assert all(len(m.rows) <= 2 for m in plan.messages("backward"))
    pairs = sum(plan.visits(rank, step)[0].num_pairs for rank in (0, 7) for step in range(8) if plan.visits(rank, step))
    assert pairs == sum(int(p) + 1 for rank in (0, 7) for p in plan.layout.positions(rank))
