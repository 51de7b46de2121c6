"""The arithmetic of rows and positions under the plan, against lists."""
import random

import numpy as np
import pytest

from ringflash import Layout
from ringflash.layout import KINDS
from ringflash.ring import routes
from ringflash.ring.ranges import Runs, ShardTable, num_rows, row_index, true_runs, union_of_intervals, union_of_sets


def test_runs_of_true_are_ranges_of_indices_or_of_edges():
    flags = np.array([True, False, False, True, True, False, True])
    assert true_runs(flags) == ((0, 1), (3, 5), (6, 7))
    assert true_runs(flags, np.array([2, 4, 5, 9, 10, 12, 20, 21])) == ((2, 4), (9, 12), (20, 21))
    assert true_runs(np.zeros(3, dtype=bool)) == true_runs(np.zeros(0, dtype=bool)) == ()
    assert num_rows(((0, 1), (3, 5))) == 3 and row_index(((0, 1), (3, 5))).tolist() == [0, 3, 4] and row_index(()).size == 0


def test_union_of_monotone_intervals_is_the_union_of_their_members():
    draw = random.Random(0)
    for _ in range(300):
        count = draw.randint(0, 12)
        first = np.sort(np.array([draw.randint(0, 30) for _ in range(count)], dtype=np.int64))
        stop = np.maximum.accumulate(np.array([f + draw.randint(0, 4) for f in first], dtype=np.int64))
        union = union_of_intervals(first, stop)
        members = sorted({x for f, s in zip(first, stop) for x in range(f, s)})
        assert row_index(tuple(map(tuple, union))).tolist() == members
        assert (union[:, 0] < union[:, 1]).all() and (union[1:, 0] > union[:-1, 1]).all()


def test_union_of_sets_of_ranges_is_the_union_of_their_members_sorted_and_disjoint():
    draw = random.Random(1)
    for _ in range(300):
        sets = []
        for _ in range(2):
            edges = sorted(draw.sample(range(30), 2 * draw.randint(0, 5)))
            sets.append(np.array(edges, dtype=np.int64).reshape(-1, 2))
        union = union_of_sets(*sets)
        members = {row for ranges in sets for row in row_index(tuple(map(tuple, ranges)))}
        assert row_index(tuple(map(tuple, union))).tolist() == sorted(members)
        assert (union[:, 0] < union[:, 1]).all() and (union[1:, 0] > union[:-1, 1]).all()


def test_direct_transfers_never_share_an_end_in_a_step_and_take_as_few_steps_as_distances_or_fewer():
    draw = random.Random(2)
    for _ in range(200):
        size = draw.randint(2, 9)
        pairs = [(owner, reader) for owner in range(size) for reader in range(size) if owner != reader]
        chosen = [(*pair, draw.randint(1, 9)) for pair in draw.sample(pairs, draw.randint(0, len(pairs)))]
        steps = routes._steps_of(chosen, size)
        for end in (0, 1):
            assert len({(transfer[end], step) for transfer, step in zip(chosen, steps)}) == len(chosen)
        assert sorted(set(steps)) == list(range(1, max(steps, default=0) + 1))
        assert max(steps, default=0) <= len({(reader - owner) % size for owner, reader, _ in chosen})


@pytest.mark.parametrize("kind", KINDS)
def test_counting_below_is_searchsorted_over_the_positions_of_a_shard(kind):
    for seq_len in (1, 2, 7, 23, 40):
        for cp_size in (1, 2, 3, 8):
            layout = Layout(kind, seq_len, cp_size)
            for rank in range(cp_size):
                values = np.arange(-3, seq_len + 4)
                expected = np.searchsorted(layout.positions(rank), values)
                assert np.array_equal(Runs(layout.chunks(rank)).count_below(values), expected)


def test_counting_below_works_for_any_number_of_runs_as_a_balanced_layout_will_have():
    runs = [(2, 5, 1), (9, 16, 3), (16, 17, 1), (30, 40, 2)]
    values = [x for start, stop, stride in runs for x in range(start, stop, stride)]
    probe = np.arange(-2, 45)
    assert np.array_equal(Runs(runs).count_below(probe), np.searchsorted(values, probe))
    assert Runs(runs).total == len(values) and Runs([]).count_below(probe).sum() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_reads_are_split_into_the_rows_of_their_owners(kind):
    draw = random.Random(kind)
    for _ in range(60):
        seq_len, cp_size = draw.randint(1, 60), draw.choice((1, 2, 3, 4, 8))
        layout = Layout(kind, seq_len, cp_size)
        edges = sorted(draw.sample(range(seq_len + 1), 2 * min(draw.randint(0, 4), (seq_len + 1) // 2)))
        reads = np.array(edges, dtype=np.int64).reshape(-1, 2)
        owner, start, stop = ShardTable([Runs(layout.chunks(rank)) for rank in range(cp_size)]).rows_of_owners(reads)
        wanted = row_index(tuple(map(tuple, reads)))
        for rank in range(cp_size):
            mine = [(int(a), int(b)) for o, a, b in zip(owner, start, stop) if o == rank]
            assert row_index(tuple(mine)).tolist() == np.flatnonzero(np.isin(layout.positions(rank), wanted)).tolist()
            assert all(a < b for a, b in mine) and all(x[1] < y[0] for x, y in zip(mine, mine[1:]))


def test_rows_between_the_reads_of_several_ranks_have_no_reader_and_do_not_travel():
    # As prefixes and chunks of documents leave them.
    demand = routes.demand_of(0, 4, np.array([1, 2]), np.array([2, 9]), np.array([5, 12]))
    assert demand.edges.tolist() == [2, 5, 9, 12]
    assert demand.last[routes.UP].tolist() == [1, 0, 2] and demand.last[routes.DOWN].tolist() == [3, 0, 2]
    assert demand.unread(14) == ((0, 2), (5, 9), (12, 14))
    route = routes.Route()
    routes.add_rotation(route, demand, np.full(3, routes.UP), routes.UP, 4)
    assert [m.rows for m in sorted(route.messages) if m.kind == "kv"] == [((2, 5), (9, 12)), ((9, 12),)]
    assert sorted(route.stops) == [(1, 1, 0, 1, ((2, 5), (9, 12))), (2, 2, 0, 1, ((9, 12),))]
