"""How far each mask reaches, forward and backward: changed inputs change exactly the rows that may see them, documents return
their own number, windows about the size of a shard are dense attention; on every layout, routing and rotation, with Ulysses too."""
import math

import pytest
import torch

from ringflash import Layout, Mask, simulate
from ringflash.tests.support.masks import allowed_pairs
from ringflash.tests.support.ring_cases import differing, judge, make_inputs, run

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced", "auto")
WAYS = tuple({"rotate": rotate, "routing": routing} for rotate, routing in (
    ("kv", "ring"), ("q", "ring"), ("kv", "direct"), ("q", "direct"), ("kv", "allgather"), ("q", "allgather")))
# Options of a mask over 96 tokens; a change of which token; the first and the last position that it reaches through two layers.
REACHES = {
    "window": (dict(window_size=(9, 0)), 0, 0, 18),
    "window, from the middle": (dict(window_size=(9, 0)), 40, 40, 58),
    "two-sided window": (dict(causal=False, window_size=(3, 5)), 40, 30, 46),
    "window of nothing": (dict(window_size=(0, 0)), 40, 40, 40),
    "causal": ({}, 40, 40, 95),
    "full": (dict(causal=False), 40, 0, 95),
    "chunk": (dict(chunk_size=16), 35, 35, 47),
    "full chunk": (dict(chunk_size=16, causal=False), 35, 32, 47),
    "chunk and window": (dict(chunk_size=16, window_size=(4, 0)), 35, 35, 43),
    "first tokens are seen by all": (dict(window_size=(9, 0), first_tokens=3), 2, 2, 95),
    "others only through the window": (dict(window_size=(9, 0), first_tokens=3), 3, 3, 21),
    "a prefix is seen by all": (dict(prefix_lens=7, window_size=(9, 0)), 6, 0, 95),
    "what follows it only through the window": (dict(prefix_lens=7, window_size=(9, 0)), 7, 7, 25),
    "documents": (dict(cu_seqlens=(0, 20, 20, 21, 70, 90)), 30, 30, 69),
    "a document of one token": (dict(cu_seqlens=(0, 20, 20, 21, 70, 90)), 20, 20, 20),
    "documents, window and first tokens": (dict(cu_seqlens=(0, 20, 70, 90), window_size=(4, 0), first_tokens=2), 21, 21, 69),
    "documents and chunks": (dict(cu_seqlens=(0, 20, 70, 90), chunk_size=16), 40, 40, 51),
}
LENGTH = 96


def tokens(length: int = LENGTH) -> torch.Tensor:
    # float64: what two layers carry over many positions is below the rounding of float32
    return torch.randn(1, length, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def two_layers(x, mask, layout, **way):
    for _ in range(2):
        x = x + simulate(x, x[:, :, :1], x[:, :, 1:], cp_size=layout.cp_size, layout=layout, mask=mask, kernel="reference", **way)
    return x


@pytest.mark.parametrize("name", REACHES)
def test_two_layers_carry_a_change_exactly_as_far_as_the_mask_lets_them_and_gradients_exactly_back(name):
    options, changed, first, last = REACHES[name]
    mask, x = Mask(**options), tokens()
    other = x.clone()
    other[:, changed] += 1
    reached = torch.arange(LENGTH)[first:last + 1].tolist()
    turn = list(REACHES).index(name)
    for number, (kind, cp_size) in enumerate((kind, cp_size) for row, kind in enumerate(LAYOUTS)
                                             for cp_size in ((1, 4), (2, 8))[(turn + row) % 2]):
        layout, way = Layout(kind, LENGTH, cp_size, mask), WAYS[(turn + number) % len(WAYS)]
        leaf = x.clone().requires_grad_()
        plain = two_layers(leaf, mask, layout, **way)
        rows = (plain != two_layers(other, mask, layout, **way)).any(-1).any(-1).flatten().nonzero().flatten().tolist()
        assert rows == reached, (kind, cp_size)
        for row in {first, last, max(first - 1, 0), min(last + 1, LENGTH - 1)}:
            (gradient,) = torch.autograd.grad(plain[:, row].sum(), leaf, retain_graph=True)
            assert bool(gradient[:, changed].any()) == (row in reached), (kind, cp_size, row)


def test_a_window_of_64_over_512_tokens_reaches_127_positions_whatever_travels_and_how():
    mask, x = Mask(window_size=(63, 0)), tokens(512)
    other = x.clone()
    other[:, 0] += 1
    for cp_size in (1, 2, 4, 8):
        for number, kind in enumerate(LAYOUTS):
            layout, way = Layout(kind, 512, cp_size, mask), WAYS[(number + cp_size) % len(WAYS)]
            changed = (two_layers(x, mask, layout, **way) != two_layers(other, mask, layout, **way)).any(-1).any(-1)
            assert changed.flatten().nonzero().flatten().tolist() == list(range(127)), (kind, cp_size)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['rotate']} {way['routing']}")
@pytest.mark.parametrize("beside", [{}, {"first_tokens": 2}, {"prefix_lens": 3}], ids=["alone", "first tokens", "prefix"])
def test_windows_about_the_size_of_a_shard_equal_the_dense_result_on_every_layout(beside, way):
    length, failures = 24, []
    rows = torch.arange(length)
    inputs = make_inputs(length)
    for cp_size in (2, 3, 4, 8):
        shard = length // cp_size
        for number, left in enumerate((0, max(shard - 2, 0), shard - 1, shard, length, length + 16)):
            options = dict(window_size=(left, 0), **beside)
            mask, kind = Mask(**options), LAYOUTS[(number + cp_size) % 5]
            ours = run(simulate, inputs, cp_size=cp_size, layout=Layout(kind, length, cp_size, mask), mask=mask,
                       kernel="reference", **way)
            pairs = allowed_pairs(rows, rows, seq_len_q=length, seq_len_k=length, **options)
            failures += [(cp_size, left, kind, str(v)) for v in judge(ours, inputs, allowed=pairs)]
            if left == 0 and not beside:
                assert torch.equal(ours["out"], inputs.v.repeat_interleave(2, dim=2))
    assert not failures


@pytest.mark.parametrize("ulysses_size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_document_returns_its_own_number_however_keys_reach_their_readers(layout, ulysses_size):
    for lengths in ((4, 8, 6, 10), (1, 27), (3, 1, 1, 16, 7)):
        mask = Mask(cu_seqlens=[0, 0, *torch.tensor(lengths).cumsum(0).tolist(), 28])
        number = torch.repeat_interleave(torch.arange(1.0, len(lengths) + 1), torch.tensor(lengths))
        q, v = torch.zeros(1, 28, 2, 8), number.reshape(1, -1, 1, 1).expand(1, 28, 2, 8)
        for cp_size in (1, 2, 4):
            for routing in ("ring", "direct", "allgather"):
                out = simulate(q, q, v, cp_size=cp_size, layout=Layout(layout, 28, cp_size, mask, ulysses_size), mask=mask,
                               kernel="reference", routing=routing)
                assert float((out - v).abs().max()) < 1e-5, (lengths, cp_size, routing)     # a leak is at least 1 / 28


@pytest.mark.parametrize("layout", ["balanced", "auto"])
def test_fewer_rows_than_ranks_or_tiles_leave_nothing_out_on_layouts_made_from_masks(layout):
    failures = []
    for length in (1, 2, 3, 7, 9):
        for options in ({}, {"causal": False}, {"window_size": (1, 0)}, {"cu_seqlens": [0, 0, 1, length, length]},
                        {"window_size": (0, 0), "first_tokens": 1}):
            mask, inputs, rows = Mask(**options), make_inputs(length), torch.arange(length)
            pairs = allowed_pairs(rows, rows, seq_len_q=length, seq_len_k=length, **options)
            for cp_size in (2, 4, 8):
                made = Layout(layout, length, cp_size, mask)
                ours = run(simulate, inputs, cp_size=cp_size, layout=made, mask=mask, kernel="reference")
                failures += [(length, options, cp_size, str(v)) for v in judge(ours, inputs, allowed=pairs)]
    assert not failures


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_nan_in_rows_that_see_nothing_and_keys_that_nobody_sees_reaches_nothing_on_any_way(kernel):
    # Queries 11..15 are in no document, the second document has no keys, the third no queries; keys 17..19 are in no document.
    mask = Mask(cu_seqlens=[0, 4, 7, 7, 11], cu_seqlens_k=[0, 6, 6, 11, 17])
    dead_q, dead_k = [*range(4, 7), *range(11, 16)], [*range(6, 11), *range(17, 20)]
    for number, layout in enumerate(LAYOUTS):
        for cp_size in (1, 2, 3, 8):
            options = dict(cp_size=cp_size, layout=Layout(layout, 16, cp_size, mask), layout_k=Layout("zigzag", 20, cp_size),
                           mask=mask, kernel=kernel, **WAYS[(number + cp_size) % len(WAYS)])
            expected = run(simulate, make_inputs(16, seq_len_k=20), **options)
            poisoned = make_inputs(16, seq_len_k=20)
            for x, dead in ((poisoned.q, dead_q), (poisoned.dout, dead_q), (poisoned.k, dead_k), (poisoned.v, dead_k)):
                x[:, dead] = math.nan
            poisoned.dlse[:, :, dead_q] = math.nan
            ours = run(simulate, poisoned, **options)
            assert not differing(ours, expected), (layout, cp_size)
            assert not ours["out"][:, dead_q].any() and not ours["dq"][:, dead_q].any()
            assert not ours["dk"][:, dead_k].any() and not ours["dv"][:, dead_k].any()
            assert bool((ours["lse"][:, :, dead_q] == -math.inf).all())
