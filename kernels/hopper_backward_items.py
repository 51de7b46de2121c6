"""What the programs of the `hopper` backward compute of a visit: key tiles, each with the query rows that it meets, decided on the host.

A program walks whole query tiles, from the first query on that sees any of its keys, for every query head of its group: [a, b) and
[c, d) partial, [b, c) seen by all keys of the tile. Key tiles may begin with documents (`tile_rows`, with keys for rows): one with
the end of one and the start of another would walk the queries of both, all masked. Where keys of two documents lie in one key tile
all the same and their queries apart, each gets a program of its own: one would walk all that lies between. Where there are too few
programs to fill the GPU, or the last wave of equal ones would leave it idle, long ones are cut along the queries. Programs that share
rows of dk and dv add to them.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .hopper_forward_tiles import in_order, spans, tile_rows
from .intervals import Intervals

RECORD = 8  # of the table: the first key; a, b, c, d; where in [b, c) the walk starts; whether it adds to dk and dv; where its keys stop
START = 4  # what a program costs beside its steps, in steps: loading k and v, storing dk and dv
# Of the time that the estimate gives: pieces also add to dk and dv and walk apart, which it does not know, so a few per cent that it
# promises (the last of several waves of equal programs) turn into a loss.
WORTH = 0.85


def key_items(
    intervals: Intervals, block_m: int, block_n: int, group: int, num_kv_total: int, sms: int, *, cut: bool, accumulate: bool,
) -> tuple[Tensor, Tensor | slice | None, int, bool]:
    """(int32 [items, RECORD] on the device, as `in_order`; the rows of the keys that programs share, or None; query rows of the
    longest program; whether walks begin at any row, else at whole query tiles); kept with the intervals. group: query heads per
    kv head; num_kv_total: kv heads of all batches. cut: programs may share rows of dk and dv. accumulate: all add to dk and dv,
    and key tiles that nobody sees need no program."""
    key = ("hopper", "key items", block_m, block_n, group, num_kv_total, sms, cut, accumulate)
    if key not in intervals.cache:
        bounds = intervals.host_q_lo, intervals.host_q_hi
        tiles = tile_rows([bounds], block_n, block_m, any_rows=cut, cost=-(-START // group))
        items = runs(*bounds, *tiles, intervals.num_q, block_m, block_n, 2 * START // group if cut else None)
        if cut:
            items = cut_long(items, block_m, group, num_kv_total, sms)
        items = items[torch.argsort(items[:, 0], stable=True)]
        if accumulate:
            items = items[items[:, 4] > items[:, 1]]
        items = items[in_order((items[:, 4] - items[:, 1]) // block_m * group + START, sms / num_kv_total)]
        shared = _rows(items[items[:, 6] != 0, 0].unique(), block_n, intervals.num_k)
        # Neighbours start two tiles apart, so that they do not add to the same rows of dq at the same time.
        full = (items[:, 3] - items[:, 2]).clamp(min=block_m)
        items[:, 5] = items[:, 2] + items[:, 0] // block_n * 2 * block_m % full
        items[:, 6] |= int(accumulate)
        longest = int((items[:, 4] - items[:, 1]).max())
        if isinstance(shared, Tensor):
            shared = shared.to(intervals.device)
        any_rows = bool((items[:, 1] % block_m != 0).any())
        intervals.cache[key] = items.to(torch.int32).to(intervals.device), shared, longest, any_rows
    return intervals.cache[key]


def _rows(first: Tensor, block_n: int, num_k: int) -> Tensor | slice | None:
    """The rows of the key tiles that begin at these [tiles], in order: some run of rows that holds them where it is not twice as long."""
    if not len(first):
        return None
    span = slice(int(first[0]), min(int(first[-1]) + block_n, num_k))
    if span.stop - span.start <= 2 * block_n * len(first):
        return span
    rows = (first[:, None] + torch.arange(block_n)).unique()  # tiles may overlap
    return rows[rows < num_k]


def runs(q_lo: Tensor, q_hi: Tensor, col0: Tensor, stop: Tensor, num_q: int, block_m: int, block_n: int, gap: int | None) -> Tensor:
    """int64 [items, RECORD], one per key tile and run of query tiles. q_lo, q_hi: int32 [Sk]. col0, stop: of the key tiles, which have
    block_n keys at most. gap: runs end where more than that many query tiles in a row see none of the keys; None: nowhere."""
    lo, hi, empty, gaps = spans(q_lo, q_hi, col0, stop, block_m if gap is None else gap * block_m)
    last = stop - 1
    a = torch.where(empty, 0, lo)
    d = torch.where(empty, 0, a + _tiles(hi - a, block_m) * block_m)
    # Both ends are non-decreasing: the first and the last key bound what all are seen by. Rows past the end give nothing: the last
    # query tile counts as full. A key tile with fewer keys is masked in every step: what lies behind them would give p > 0.
    whole, lo_last, hi_first = stop - col0 == block_n, q_lo[last].long(), q_hi[col0].long()
    b = torch.where(whole, torch.clamp(a + _tiles(lo_last - a, block_m) * block_m, a, d), d)
    c = torch.where(whole, torch.clamp(torch.where(hi_first >= num_q, d, a + (hi_first - a) // block_m * block_m), b, d), d)
    zero = torch.zeros_like(a)
    # The copy engine writes whole tiles: one that ends before the next one's rows adds zeros to these.
    adds = (~whole & (stop < q_lo.shape[0])).long()
    items, more = torch.stack((col0, a, b, c, d, zero, adds, stop), 1), []
    # Each run has query tiles of its own, from its first query on; none has a full part. The first remains the tile's record, so that
    # no other is cut.
    begins: dict[int, int] = {}  # of a tile's last run, where it has several
    for tile, start, after in gaps if gap is not None else []:
        begin = begins.get(tile, int(a[tile]))
        end = begin - (begin - start) // block_m * block_m
        if after - end > gap * block_m:
            _close(items, more, tile, begins.get(tile), end)
            begins[tile] = after
    for tile, begin in begins.items():
        _close(items, more, tile, begin, begin - (begin - int(hi[tile])) // block_m * block_m)
    return torch.cat((items, torch.tensor(more, dtype=torch.int64).view(-1, RECORD)))


def _close(items: Tensor, more: list[list[int]], tile: int, begin: int | None, end: int) -> None:
    """A run of a tile ends: the first (None), which is in items, or another, which goes to `more`."""
    if begin is None:
        items[tile, 2:5], items[tile, 6] = end, 1
    else:
        more.append([int(items[tile, 0]), begin, end, end, end, 0, 1, int(items[tile, 7])])


def _tiles(rows: Tensor, block_m: int) -> Tensor:
    return -(-rows // block_m)


def cut_long(items: Tensor, block_m: int, group: int, num_kv_total: int, sms: int) -> Tensor:
    """The items, some of them in pieces, when the longest or the last ones would leave SMs idle."""
    tiles = (items[:, 4] - items[:, 1]) // block_m
    order = torch.argsort(tiles, descending=True, stable=True)
    count = int((tiles > 0).sum())
    share = float((tiles * group + START).sum()) * num_kv_total / sms
    last_wave = -(-(count * num_kv_total % sms) // num_kv_total)
    best, parts = _time(tiles * group, num_kv_total, sms) * WORTH, None
    for pieces in (2, 4, 8):
        of_last = torch.ones_like(tiles)
        of_last[order[count - last_wave : count]] = pieces
        of_long = -(-(tiles * group) // max(1, int(share * 2 / pieces)))
        for choice in (of_last, of_long):
            choice = torch.clamp(choice, torch.ones_like(tiles), tiles.clamp(min=1))
            time = _time((-(-tiles // choice) * group).repeat_interleave(choice), num_kv_total, sms)
            if time < best:
                best, parts = time, choice
    if parts is None:
        return items
    found, many, length = (x.repeat_interleave(parts, 0) for x in (items, parts, tiles))
    piece = torch.arange(len(found)) - (parts.cumsum(0) - parts).repeat_interleave(parts)
    start = found[:, 1].clone()
    found[:, 1], found[:, 4] = (start + length * n // many * block_m for n in (piece, piece + 1))
    for column in (2, 3):
        found[:, column] = torch.clamp(found[:, column], found[:, 1], found[:, 4])
    found[:, 6] |= (many > 1).long()
    return found


def _time(steps: Tensor, heads: int, sms: int) -> float:
    """What a launch takes, in steps, longest programs first; steps: of each item, of which there is one per head."""
    costs = (steps[steps > 0] + START).sort(descending=True).values
    if not len(costs):
        return 0.0
    # Of the k * sms + 1 longest some SM gets k + 1.
    rank = torch.arange(0, len(costs) * heads, sms)
    return max(float(costs.sum()) * heads / sms, float((torch.arange(1, len(rank) + 1) * costs[rank // heads]).max()))
