"""What the hopper kernels are told to compute, without a GPU: every allowed pair once, and nothing that nobody sees."""
import heapq
import itertools
import random

import pytest
import torch

from ringflash.kernels.hopper_backward_items import cut_long, key_items, runs
from ringflash.kernels.hopper_forward_tiles import (
    ENDS, FINAL, ROW_BITS, STARTS, in_drawn_order, in_order, query_tiles, tile_rows, tile_table)
from ringflash.kernels.intervals import Intervals, transpose, turns


def random_rows(rng: random.Random, num_q: int, num_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k_lo, k_hi int32 [num_q]: documents, some of whose rows or keys are missing, each full, causal or with a window."""
    cuts = sorted(rng.randint(0, num_q) for _ in range(rng.randint(0, 6)))
    lo, hi, key = [], [], 0
    for first, stop in zip([0, *cuts], [*cuts, num_q]):
        keys = rng.choice((0, 0, rng.randint(0, num_k), stop - first))
        start, key = key, min(num_k, key + keys)
        kind = rng.choice(("full", "causal", "window"))
        for i in range(stop - first):
            end = key if kind == "full" else min(key, start + i + 1)
            begin = max(start, end - 5) if kind == "window" else start
            lo.append(min(begin, end))
            hi.append(end)
        key = min(num_k, key + rng.choice((0, 0, rng.randint(0, num_k))))  # keys of a document without rows
    return torch.tensor(lo, dtype=torch.int32), torch.tensor(hi, dtype=torch.int32)


def walked(record: list[int], block_n: int) -> list[int]:
    """The first keys of the tiles of a record in the order of its steps: what `first_key` of the kernel computes."""
    _, _, _, steps, high, masked, top, low = record
    found = []
    for step in range(steps):
        key = low + (step - high) * block_n if step >= high else top - (step + 1) * block_n
        found.append(top - (step + 1 + high - masked) * block_n if step >= masked else key)
    return found


@pytest.mark.parametrize("by_sums", [False, True])
def test_query_tiles_walk_each_key_tile_that_a_row_sees_once_and_mask_all_that_not_all_rows_see(by_sums):
    rng, gaps, odd, rows, block_n = random.Random(1), 0, 0, 8, 4
    for _ in range(600):
        lo, hi = random_rows(rng, rng.randint(1, 40), num_k := rng.randint(1, 60))
        allowed = (torch.arange(num_k) >= lo[:, None]) & (torch.arange(num_k) < hi[:, None])
        tiles_at = tile_rows([(lo, hi)], rows, block_n)
        table = tile_table(lo, hi, *tiles_at, block_n, by_sums, True, False).tolist()
        spread = sorted((record[0], record[2] >> ROW_BITS) for record in table)
        assert [row0 for row0, _ in spread] == [0, *itertools.accumulate(count for _, count in spread)][:-1]
        assert sum(count for _, count in spread) == len(lo) and all(0 < count <= rows for _, count in spread)
        odd += any(row0 % rows for row0, _ in spread)
        for record in table:
            row0, marks, count, steps, _, masked, top, _ = record
            seen = allowed[row0 : row0 + (count >> ROW_BITS)]
            starts = walked(record, block_n)
            tiles = [seen[:, max(start, 0) : start + block_n] for start in starts]
            met = torch.zeros(num_k + 2 * block_n, dtype=torch.int64)  # from -block_n on
            for start in starts:
                met[start + block_n : start + 2 * block_n] += 1
            assert marks & STARTS and not marks & ENDS and met.max() == 1
            assert (met[block_n : block_n + num_k] == 1)[seen.any(0)].all()
            if not seen.any():
                assert steps == masked == 1 and starts == [0] and marks & FINAL
                continue
            assert all(tile.shape[1] == block_n and tile.all() for tile in tiles[masked:])
            assert bool(marks & FINAL) == (not by_sums or masked == steps)
            first = torch.cat(tiles[: max(masked, 1)], 1)
            assert not by_sums or masked == steps or first.any(1).all(), "a row sees its first key in a tile without maxima"
            span = seen.any(0).nonzero()
            assert steps <= -(-(int(span.max() - span.min()) + 1) // block_n)
            gaps += steps < -(-(int(span.max() - span.min()) + 1) // block_n)
    assert gaps > 8 and odd > 8


@pytest.mark.parametrize("rows", [128, 192])
def test_tiles_that_begin_with_documents_never_cost_more_than_those_that_do_not(rows):
    """Two documents of 65 rows fit in a tile of 128 nearly, but one each would double the tiles."""
    rng, fewer = random.Random(4), 0
    for lengths in [*([n] * 60 for n in (65, 70, 80, 100, 130, 200, 300)), *([rng.randint(1, 900) for _ in range(30)] for _ in range(20))]:
        ends = torch.tensor(lengths).cumsum(0)
        lo = torch.repeat_interleave(ends - torch.tensor(lengths), torch.tensor(lengths)).to(torch.int32)
        hi = torch.arange(1, len(lo) + 1, dtype=torch.int32)
        costs = []
        for any_rows in (True, False):
            table = tile_table(lo, hi, *tile_rows([(lo, hi)], rows, 128, any_rows), 128, False, True, False)
            costs.append(3 * len(table) + int(table[:, 3].sum()))
        assert costs[0] <= costs[1], lengths
        fewer += costs[0] < costs[1]
    assert fewer > 8


def test_the_widest_run_of_key_tiles_that_no_row_of_a_query_tile_sees_is_left_out():
    lo = torch.tensor([0] * 4 + [8] * 2 + [40] * 2, dtype=torch.int32)
    hi = torch.tensor([4] * 4 + [12] * 2 + [48] * 2, dtype=torch.int32)
    [record] = tile_table(lo, hi, torch.tensor([0]), torch.tensor([8]), 4, False, True, False).tolist()
    assert sorted(walked(record, 4)) == [0, 4, 8, 40, 44]


def test_the_tiles_with_most_steps_come_first_and_those_that_see_nothing_only_where_they_are_written():
    lo = torch.tensor([0] * 128 + [64] * 128 + [464] * 128 + [64] * 40, dtype=torch.int32).sort().values
    hi = torch.tensor([64] * 128 + [400] * 128 + [464] * 40 + [464] * 128, dtype=torch.int32)
    intervals = Intervals.from_rows(lo, hi, 464, "cpu")
    for first, last in ((True, False), (False, True), (False, False)):
        table, longest = query_tiles(intervals, 128, 128, False, first, last, 4, 1)
        assert longest == 128 * int(table[:, 3].max())
        assert table[:, 0].tolist() == [256, 128, *([384] if first or last else []), 0]  # one step each: the last row first
        assert set((table[:, 1] & ~FINAL).tolist()) == {STARTS * first + ENDS * last}
        assert table.dtype == torch.int32 and query_tiles(intervals, 128, 128, False, first, last, 4, 1)[0] is table


def test_a_tile_starts_with_its_first_visit_and_ends_with_its_last_and_one_that_no_visit_sees_does_both_in_the_first():
    rng, rows = random.Random(3), 8
    for _ in range(300):
        num_q, num_k, visits = rng.randint(1, 50), 20, rng.randint(1, 4)
        masks = [random_rows(rng, num_q, num_k) for _ in range(visits)]
        seen = torch.stack([lo < hi for lo, hi in masks])
        row0, stop = tile_rows(masks, rows, 4)
        log = {ends: [] for ends in zip(row0.tolist(), stop.tolist())}
        for n, ((lo, hi), turn) in enumerate(zip(masks, turns(masks, has_state=False))):
            for record in tile_table(lo, hi, row0, stop, 4, True, n == 0, n == visits - 1, turn).tolist():
                log[record[0], record[0] + (record[2] >> ROW_BITS)].append((n, record[1] & (STARTS | ENDS)))
        for (first, after), of_tile in log.items():
            by_visit = seen[:, first:after].any(1).nonzero()[:, 0].tolist() or [0]
            assert [n for n, _ in of_tile] == by_visit
            assert [mark for _, mark in of_tile] == [
                STARTS * (i == 0) + ENDS * (i == len(by_visit) - 1) for i in range(len(by_visit))]


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_backward_programs_meet_each_query_of_their_keys_once_and_mask_all_that_not_all_keys_are_seen_by(cut):
    rng, block_m, block_n, shared, odd = random.Random(2), 4, 8, 0, 0
    for _ in range(600):
        lo, hi = random_rows(rng, num_q := rng.randint(1, 60), num_k := rng.randint(1, 40))
        q_lo, q_hi = transpose(lo, hi, num_k)
        keys = torch.arange(num_k)
        allowed = (keys >= lo[:, None]) & (keys < hi[:, None])
        starts, stops = tile_rows([(q_lo, q_hi)], block_n, block_m, any_rows=cut, cost=1)
        assert starts.tolist() == [0, *stops.tolist()][:-1] and int(stops[-1]) == num_k
        odd += bool((starts % block_n != 0).any())
        items = runs(q_lo, q_hi, starts, stops, num_q, block_m, block_n, 1 if cut else None)
        tile_of = dict(zip(starts.tolist(), stops.tolist()))
        for col0, a, b, c, d, _, _, stop in items.tolist():
            seen = allowed[:, col0:stop].any(1).nonzero()[:, 0]
            assert a == (int(seen[0]) if len(seen) else 0) or (items[:, 0] == col0).sum() > 1
        if cut:
            items = cut_long(items, block_m, rng.choice((1, 4)), rng.choice((1, 2)), rng.choice((2, 7, 50)))
        met = torch.zeros(num_q + block_m, num_k, dtype=torch.int64)
        for col0, a, b, c, d, _, shares, stop in items.tolist():
            assert 0 <= a <= b <= c <= d < num_q + block_m and all((end - a) % block_m == 0 for end in (b, c, d))
            assert stop == tile_of[col0] and 0 < stop - col0 <= block_n
            of_tile = slice(col0, stop)
            met[a:d, of_tile] += 1
            assert b == c or (allowed[b:c, of_tile].all() and stop - col0 == block_n)
            # It writes block_n rows: where another program has some of them, it must add.
            assert shares == ((items[:, 0] == col0).sum() > 1 or stop < min(col0 + block_n, num_k))
            shared += shares
        assert set(items[:, 0].tolist()) == set(tile_of)
        met = met[:num_q]
        assert met.max() <= 1 and bool((met[allowed] == 1).all())
    assert bool(shared) == cut and (odd > 50) == cut


@pytest.mark.parametrize("group", [1, 4, 8, 16])
def test_runs_of_one_key_tile_never_meet_a_query_twice(group):
    """Documents of a few keys and many queries, of which few see anything: several runs in each key tile, of rows as they come."""
    rng, several = random.Random(7), 0
    for _ in range(60):
        lo, hi, key = [], [], 0
        for _ in range(rng.randint(2, 30)):
            rows, keys = rng.randint(1, 400), rng.randint(1, 40)
            blind = rng.randint(0, rows)
            lo += [key] * rows
            hi += [key] * blind + [key + keys] * (rows - blind)
            key += keys
        intervals = Intervals.from_rows(*(torch.tensor(x, dtype=torch.int32) for x in (lo, hi)), key, "cpu")
        items, *_ = key_items(intervals, 64, 128, group, 1, 132, cut=True, accumulate=False)
        met = torch.zeros(len(lo) + 64, key, dtype=torch.int64)
        rows = torch.arange(met.shape[0])[:, None]
        for col0, a, b, c, d, _, _, stop in items.tolist():
            seen = (rows >= intervals.host_q_lo[col0:stop]) & (rows < intervals.host_q_hi[col0:stop]) | (rows >= b) & (rows < c)
            met[a:d, col0:stop] += seen[a:d]
        keys = torch.arange(key)
        allowed = (keys >= intervals.host_k_lo[:, None]) & (keys < intervals.host_k_hi[:, None])
        assert torch.equal(met[: len(lo)], allowed.long())
        several += int((items[:, 0].unique(return_counts=True)[1] > 2).sum())
    assert several > 10


def test_key_tiles_that_begin_with_documents_take_fewer_steps_and_fewer_of_them_masked():
    rng = random.Random(5)
    for _ in range(20):
        lengths = torch.tensor([rng.randint(1, 3000) for _ in range(10)])
        k_lo = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths).to(torch.int32)
        rows = len(k_lo)
        bounds = transpose(k_lo, torch.arange(1, rows + 1, dtype=torch.int32), rows)
        found = []
        for any_rows in (True, False):
            items = runs(*bounds, *tile_rows([bounds], 128, 64, any_rows, cost=1), rows, 64, 128, 2)
            found.append((int((items[:, 4] - items[:, 1]).sum()) // 64 + len(items),
                          int((items[:, 4] - items[:, 1] - items[:, 3] + items[:, 2]).sum()) // 64))
        (steps, masked), (steps_before, masked_before) = found
        assert steps <= steps_before and masked <= masked_before
    assert steps < 0.99 * steps_before and masked < 0.8 * masked_before


def test_keys_of_two_documents_whose_queries_lie_apart_have_a_program_each_and_are_zeroed_before_both_add():
    """128 keys, half of them seen by the first 256 queries, half by the last: 2,000 queries lie between."""
    q_lo = torch.tensor([0] * 64 + [2256] * 64, dtype=torch.int32)
    q_hi = torch.tensor([256] * 64 + [2512] * 64, dtype=torch.int32)
    lo = torch.tensor([0] * 256 + [64] * 2256, dtype=torch.int32)
    hi = torch.tensor([64] * 2256 + [128] * 256, dtype=torch.int32)
    intervals = Intervals.from_host(lo, hi, q_lo, q_hi, "cpu")
    items, shared, longest, any_rows = key_items(intervals, 64, 128, 4, 1320, 132, cut=True, accumulate=False)
    assert sorted(items[:, 1:5].tolist()) == [[0, 256, 256, 256], [2256, 2512, 2512, 2512]] and shared == slice(0, 128) and any_rows
    alone, none, whole, _ = key_items(intervals, 64, 128, 4, 1320, 132, cut=False, accumulate=False)
    assert alone[:, 1:5].tolist() == [[0, 2304, 2304, 2560]] and none is None and (longest, whole) == (256, 2560)


def test_only_keys_that_programs_share_are_zeroed():
    """Of 25 documents of 384 queries, each sees 320 keys, those of every fifth lie two thousand queries further than the ones before."""
    k_lo = torch.repeat_interleave(torch.arange(25, dtype=torch.int32) * 320, 384)
    for n in range(5, 25, 5):  # queries between that see nothing
        at = int((k_lo < n * 320).sum())
        k_lo = torch.cat((k_lo[:at], torch.full((2048,), n * 320, dtype=torch.int32), k_lo[at:]))
    seeing = torch.ones(len(k_lo), dtype=torch.bool)
    for n in range(5, 25, 5):
        at = int((k_lo < n * 320).sum())
        seeing[at : at + 2048] = False
    intervals = Intervals.from_rows(k_lo, torch.where(seeing, k_lo + 320, k_lo), 8000, "cpu")
    items, shared, *_ = key_items(intervals, 64, 128, 4, 8, 132, cut=True, accumulate=False)
    of_tile = items[items[:, 6] == 1, 0]
    assert 2 <= len(of_tile.unique()) < 20
    assert shared.tolist() == sorted({row for first in of_tile.tolist() for row in range(first, min(first + 128, 8000))})


@pytest.mark.parametrize("heads", [8, 32])
def test_neighbours_run_together_and_the_gpu_is_busy_to_the_end(heads):
    rng, kept, sms = random.Random(3), [], 132
    for _ in range(60):
        documents = [rng.choice((2, 5, 9, 20, 40)) for _ in range(rng.randint(1, 60))] + [60] * (rng.random() < 0.3)
        costs = torch.tensor([4 + n - i for n in documents for i in range(n)])
        order = in_order(costs, sms / heads).tolist()
        assert sorted(order) == list(range(len(costs)))
        kept.append(sum(b - a == 1 for a, b in zip(order, order[1:])) / len(order))
        ends = [0] * sms
        for item in order:
            for _ in range(heads):
                heapq.heapreplace(ends, ends[0] + int(costs[item]))
        assert max(ends) <= 1.08 * max(float(costs.sum()) * heads / sms, float(costs.max())) + int(costs.median())
    assert sorted(kept)[30] > 0.7
    assert in_order(torch.zeros(0, dtype=torch.int64), 4.0).tolist() == []


def pieces(k_hi: torch.Tensor, heads: int, group: int = 1) -> torch.Tensor:
    rows = k_hi.shape[0]
    items = runs(*(bounds := transpose(torch.zeros_like(k_hi), k_hi, rows)), *tile_rows([bounds], 128, 64), rows, 64, 128, None)
    return cut_long(items, 64, group, heads, 132)


@pytest.mark.parametrize("rows, heads, causal, cut", [
    (16384, 16, True, False), (16384, 16, False, False), (16896, 1, False, False), (2048, 8, True, True), (1024, 8, False, True),
    (8192, 8, True, False), (8192, 8, False, False)])
def test_programs_are_cut_where_the_gpu_would_stand_idle_and_nowhere_else(rows, heads, causal, cut):
    """Too few programs (64), or a few long ones (128 on 132 SMs); not several waves of equal ones, and not where short ones fill the end."""
    k_hi = torch.arange(1, rows + 1, dtype=torch.int32) if causal else torch.full((rows,), rows, dtype=torch.int32)
    found = pieces(k_hi, heads, group=4)
    assert (len(found) > rows // 128) == cut
    assert len(found) < rows // 128 + (8 if rows > 8192 else 64)


def test_key_tiles_that_nobody_sees_have_a_program_only_where_they_are_written():
    k_hi = torch.full((256,), 128, dtype=torch.int32)
    intervals = Intervals.from_rows(torch.zeros_like(k_hi), k_hi, 256, "cpu")
    tiles = [key_items(intervals, 64, 128, 1, 132, 132, cut=False, accumulate=add)[0][:, 0].tolist() for add in (False, True)]
    assert tiles == [[0, 128], [0]]


def test_items_that_are_drawn_one_ahead_never_end_later_than_in_the_usual_order_and_long_ones_among_short_ones_earlier():
    rng, earlier = random.Random(6), 0
    for _ in range(40):
        long = [rng.randint(40, 60) for _ in range(10)]
        costs = torch.tensor([cost for n in long for cost in (*[rng.randint(4, 18) for _ in range(rng.randint(1, 6))], n)])
        order, usual = in_drawn_order(costs, 132, 32), in_order(costs, 132 / 32)
        assert sorted(order.tolist()) == list(range(len(costs)))
        ends = []
        for found in (order, usual):
            items = iter([int(costs[i]) for i in found for _ in range(32)])
            ends.append(0)
            ready = [(0, next(items)) for _ in range(132)]
            while ready:  # takes up an item, draws the next
                time, cost = heapq.heappop(ready)
                ends[-1] = max(ends[-1], time + cost)
                if (drawn := next(items, None)) is not None:
                    heapq.heappush(ready, (time + cost, drawn))
        assert ends[0] <= ends[1]
        earlier += ends[0] < 0.95 * ends[1]
    assert earlier > 10
