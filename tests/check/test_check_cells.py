"""Claims about what the check runs: the matrix is whole, pairwise subsets cover every pair, inputs are what they say."""
import itertools

import pytest
import torch

from ringflash import Mask
from ringflash.launch import check_cells as cells
from ringflash.launch import check_problem as problem
from ringflash.ring.plan import build_plan


def test_the_matrix_holds_every_combination_of_kernel_dtype_mask_layout_ranks_and_group_size():
    found = cells.matrix(("cpu", "reference"), ("fp32", "bf16"), seq_lens=(5, 61), head_dims=(32,))
    got = {(c.kernel, c.dtype, c.mask, c.layout, c.cp_size, c.ratio, c.seq_len) for c in found}
    assert got == set(itertools.product(("cpu", "reference"), ("fp32", "bf16"), cells.MASKS, cells.LAYOUTS, cells.CP_SIZES,
                                        cells.RATIOS, (5, 61)))
    assert len(found) == len(got)


def test_the_quick_matrix_keeps_every_line_and_in_each_line_every_value_of_every_axis():
    whole = cells.matrix(("cpu",), ("fp32",), seq_lens=(5, 61), head_dims=(32,))
    quick = cells.matrix(("cpu",), ("fp32",), seq_lens=(5, 61), head_dims=(32,), diagonal=True)
    assert len(quick) < len(whole) / 4
    assert {c.line for c in quick} == {c.line for c in whole}
    for line in {c.line for c in quick}:
        members = [c for c in quick if c.line == line]
        for axis in ("cp_size", "ratio", "seq_len", "deterministic"):
            assert {getattr(c, axis) for c in members} == {getattr(c, axis) for c in whole}, (line, axis)


@pytest.mark.parametrize("diagonal, extras", [(False, 15 * 4), (True, 15)], ids=["whole", "quick"])
def test_variants_walk_beside_the_plain_matrix_and_come_with_every_number_of_ranks_group_size_mask_and_layout(diagonal, extras):
    options = dict(seq_lens=(5, 61), head_dims=(32,), diagonal=diagonal)
    plain = cells.matrix(("cpu",), ("fp32",), **options)
    found = cells.matrix(("cpu", "other"), ("fp32",), walked={"cpu": cells.VARIANTS[1:], "other": ()}, **options)
    mine = [c for c in found if c.kernel == "cpu"]
    assert [c for c in mine if c.variant == "plain"] == plain and len(mine) == len(plain) + extras
    assert {c.variant for c in found if c.kernel == "other"} == {"plain"}
    walked = [c for c in mine if c.variant != "plain"]
    for axis in ("cp_size", "ratio", "seq_len", "mask", "layout"):
        assert {getattr(c, axis) for c in walked} == {getattr(c, axis) for c in plain}, axis
    named = cells.matrix(("cpu",), ("fp32",), variants=("sinks", "all"), **options)
    assert len(named) == 2 * len(plain) and {c.variant for c in named} == {"sinks", "all"}


@pytest.mark.parametrize("head_dim", [16, 32, 80, 128, 256])
def test_a_variant_has_what_its_name_says_and_values_of_a_dim_that_kernels_take(head_dim):
    found = {name: cells.Cell("cpu", "fp32", "documents", "zigzag", 2, 4, 61, head_dim, variant=name) for name in cells.VARIANTS}
    assert {name for name, c in found.items() if c.has_sinks} == {"sinks", "all"}
    assert {name for name, c in found.items() if c.softcap} == {"softcap", "all"}
    assert {name for name, c in found.items() if c.head_dim_v != head_dim} == {"v-dim", "all"}
    for cell in found.values():
        q, k, v, dout = problem.make_inputs(cell, "cpu")
        assert (q.shape[3], k.shape[3], v.shape[3], dout.shape[3]) == (head_dim, head_dim, cell.head_dim_v, cell.head_dim_v)
        assert 0 < cell.head_dim_v <= 256
        options, dlse = problem.call_options(cell, "cpu"), problem.make_dlse(cell, "cpu")
        assert ("sinks" in options) == (dlse is not None) == cell.has_sinks
        if cell.has_sinks:
            assert options["sinks"].isinf().tolist() == [True] + 7 * [False] and dlse.shape == (1, 8, 61)


@pytest.mark.parametrize("axes", [
    {"a": (1, 2), "b": (1, 2)},
    {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False)},
    {"mask": cells.MASKS, "cp": cells.CP_SIZES, "ratio": cells.RATIOS, "layout": cells.LAYOUTS, "dtype": ("fp32", "bf16", "fp16"),
     "len": (1, 17, 33, 48), "det": (False, True)},
], ids=["two", "three", "matrix"])
def test_pairwise_rows_cover_every_pair_with_far_fewer_rows_than_the_product(axes):
    rows = cells.pairwise(axes)
    for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(xs, ys)), (a, b)
    assert cells.missing_pairs(rows, axes) == []
    two_largest = sorted(map(len, axes.values()))[-2:]
    assert len(rows) <= 2 * two_largest[0] * two_largest[1]
    assert cells.pairwise(axes) == rows


def test_a_missing_pair_is_named():
    axes = {"a": (1, 2), "b": (1, 2), "c": (1, 2)}
    rows = [row for row in cells.pairwise(axes) if not (row["a"] == 2 and row["c"] == 1)]
    assert (("a", 2), ("c", 1)) in cells.missing_pairs(rows, axes)


def test_pairwise_cells_of_the_plain_matrix_stay_small_enough_for_the_interpreter():
    found = cells.pairwise_cells("triton", dtypes=("fp32", "bf16", "fp16"), seq_lens=(1, 17, 33, 48), head_dims=(16, 40),
                                 masks=cells.MASKS, layouts=cells.LAYOUTS)
    assert len(found) <= 40
    assert {c.mask for c in found} == set(cells.MASKS) and {c.cp_size for c in found} == set(cells.CP_SIZES)


def test_what_goes_beyond_the_matrix_meets_in_pairs_and_is_counted_in_lines_of_its_own():
    found = cells.pairwise_cells("cpu", dtypes=("fp32", "bf16"), seq_lens=(5, 61), head_dims=(32,), group="combined")
    assert len(found) < 100                                 # beside 600 cells of the matrix
    for one, other in itertools.product(("mask", "layout"), ("layout", "rotate", "routing", "cp_size", "ratio", "variant")):
        pairs = {(getattr(c, one), getattr(c, other)) for c in found}
        ways = [len({getattr(c, axis) for c in found}) for axis in (one, other)]
        assert one == other or len(pairs) == ways[0] * ways[1]
    assert {c.mask for c in found} == {*cells.MASKS, *cells.OPTION_MASKS}
    assert {c.layout for c in found} == {*cells.LAYOUTS, "balanced", "auto"}
    assert {c.line for c in found} == {("cpu", dtype, mask, "combined") for dtype in ("fp32", "bf16") for mask in cells.ALL_MASKS}


@pytest.mark.parametrize("seq_len", [1, 5, 17, 61, 389])
@pytest.mark.parametrize("name", cells.ALL_MASKS)
def test_every_mask_is_what_its_name_says_at_every_length(name, seq_len):
    cell = cells.Cell("cpu", "fp32", name, "zigzag", 2, 4, seq_len, 8)
    mask, layouts = cell.make_mask(), cell.layouts()
    assert mask.num_parts == 1 + (name in ("prefix+window", "first+window", "documents+first+window", "cross first+window"))
    assert (mask.cu_seqlens is not None) == ("documents" in name or "cross" in name)
    assert (mask.cu_seqlens_k is not None) == ("cross" in name) and (mask.chunk_size is not None) == ("chunk" in name)
    assert (mask.prefix_lens is not None) == ("prefix" in name) and (mask.first_tokens > 0) == ("first" in name)
    assert mask.causal == (name not in ("full", "cross documents"))
    if seq_len > 4:
        assert ("layout_k" in layouts) == (cell.seq_len_k != seq_len) == (name.startswith("cross") or "keys" in name)
        assert mask != Mask() or name in ("causal", "more keys", "fewer keys")
    seen = problem.allowed(cell)
    assert seen.shape == (seq_len, cell.seq_len_k)
    if seq_len >= 61:
        plan = build_plan(mask, layouts["layout"], layouts.get("layout_k"))
        assert sum(plan.num_pairs(rank, step) for rank in range(2) for step in range(plan.num_steps)) == int(seen.sum())
        assert any(v.part == 1 for rank in range(2) for step in range(plan.num_steps)
                   for v in plan.visits(rank, step)) == (mask.num_parts == 2)


@pytest.mark.parametrize("seq_len", [1, 5, 17, 61, 389])
def test_documents_hold_empty_ones_a_single_token_and_a_dead_tail(seq_len):
    ends = problem.document_ends(seq_len)
    assert ends[0] == 0 and list(ends) == sorted(ends) and ends[-1] <= seq_len
    assert 0 in [b - a for a, b in zip(ends, ends[1:])] and 1 in [b - a for a, b in zip(ends, ends[1:])]
    assert (ends[-1] < seq_len) == (seq_len >= 16)
    keys = problem.key_document_ends(seq_len)
    assert len(keys) == len(ends) and keys[0] == 0 and list(keys) == sorted(keys) and keys[-1] <= seq_len
    if seq_len >= 61:
        lengths = [(b - a, d - c) for a, b, c, d in zip(ends, ends[1:], keys, keys[1:])]
        assert any(q == 0 < k for q, k in lengths) and any(k == 0 < q for q, k in lengths)


def test_inputs_are_views_of_a_packed_buffer_and_the_same_every_time_with_nan_in_dead_rows_only():
    cell = cells.Cell("cpu", "bf16", "documents", "zigzag", 2, 4, 61, 8)
    inputs = problem.make_inputs(cell, "cpu")
    assert [tuple(x.shape) for x in inputs] == [(1, 61, 8, 8), (1, 61, 2, 8), (1, 61, 2, 8), (1, 61, 8, 8)]
    dead = problem.document_ends(61)[-1]
    for x, again in zip(inputs, problem.make_inputs(cell, "cpu")):
        assert not x.is_contiguous() and x.dtype == torch.bfloat16
        assert torch.equal(x.view(torch.int16), again.view(torch.int16))
        assert x[:, dead:].isnan().all() and not x[:, :dead].isnan().any()
    other = problem.make_inputs(cells.Cell("cpu", "bf16", "causal", "zigzag", 2, 4, 61, 8), "cpu")
    assert not torch.equal(other[0][:, :50], inputs[0][:, :50])


@pytest.mark.parametrize("name", ["fewer keys", "cross documents"])
def test_queries_without_keys_and_keys_without_queries_hold_nan_each_on_their_side(name):
    cell = cells.Cell("cpu", "fp32", name, "zigzag", 2, 4, 61, 8)
    q, k, v, dout = problem.make_inputs(cell, "cpu")
    seen = problem.allowed(cell)
    assert not seen.any(1).all() and q.shape[1] == dout.shape[1] == 61 and k.shape[1] == v.shape[1] == cell.seq_len_k
    for x, lives in ((q, seen.any(1)), (dout, seen.any(1)), (k, seen.any(0)), (v, seen.any(0))):
        assert torch.equal(x.isnan().all((0, 2, 3)), ~lives) and not x[:, lives].isnan().any()
