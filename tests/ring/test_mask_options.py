"""Masks of every option, alone and together, on the ring: results and gradients against the dense oracle, with known answers."""
import copy
import pickle
import random

import numpy as np
import pytest
import torch

from ringflash import Layout, Mask, ring_attention, shard_batch, simulate, simulation
from ringflash.layout import KINDS
from ringflash.ring import simulator
from ringflash.ring.plan import PASSES, build_plan
from ringflash.tests.support.masks import allowed_pairs
from ringflash.tests.support.oracle import attention_oracle
from ringflash.tests.support.plan_cases import CROSS_DOCUMENTS, CROSS_MASKS, MASKS, OPTION_MASKS, SIZES, PlanCase, mask_options
from ringflash.tests.support.ring_cases import make_inputs, run

ALL_MASKS = tuple(dict.fromkeys((*OPTION_MASKS, *MASKS)))


def errors(case: PlanCase, seed: int = 0, kernel: str = "reference", dtype: torch.dtype = torch.float64) -> dict[str, float]:
    """The largest error of out, lse and each gradient of a simulated ring against the oracle, which gets the predicate's pairs.
    NaN where one of them has a value that the other has not."""
    size_q, size_k = case.layout.seq_len, case.layout_k.seq_len
    inputs = make_inputs(size_q, seq_len_k=size_k, heads=2, kv_heads=1, head_dim=4, dtype=dtype, seed=seed)
    layout = Layout(case.layout.kind, size_q, case.layout.cp_size, case.mask)
    ours = run(simulate, inputs, cp_size=layout.cp_size, layout=layout, layout_k=case.layout_k, mask=case.mask, kernel=kernel)
    allowed = torch.from_numpy(case.allowed)
    truth = attention_oracle(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, allowed=allowed)
    found = {}
    for name, x in ours.items():
        expected = getattr(truth, name)
        same = x == expected  # also where both are -inf
        found[name] = torch.where(same, 0.0, (x - expected).abs()).max().item()
        assert not (x.isnan().any() or (name != "lse" and x.isinf().any())), (case, name)
    return found


def case_of(
    kind: str, cp_size: int, seq_len: int, seq_len_k: int | None = None, kind_k: str | None = None, **options
) -> PlanCase:
    layout = Layout(kind, seq_len, cp_size)
    keys = layout if seq_len_k is None else Layout(kind_k or kind, seq_len_k, cp_size)
    return PlanCase(tuple(options.items()), layout, keys)


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_equal_the_dense_oracle_for_random_lengths_and_options(kind, cp_size):
    draw = random.Random(f"{kind} {cp_size}")
    for name in ALL_MASKS:
        seq_len = draw.choice((draw.randint(1, 2 * cp_size), draw.randint(3, 40)))
        case = case_of(kind, cp_size, seq_len, **dict(mask_options(name, seq_len, draw)))
        assert max(errors(case).values()) < 1e-11, (case, errors(case))


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention_equals_the_dense_oracle_with_documents_of_other_lengths_on_either_side(kind, cp_size):
    draw = random.Random(f"cross {kind} {cp_size}")
    for name in dict.fromkeys((*CROSS_DOCUMENTS, *CROSS_MASKS)):
        seq_len, seq_len_k = draw.randint(1, 30), draw.randint(1, 30)
        own_lists = seq_len_k if name in CROSS_DOCUMENTS else None
        options = mask_options(name, seq_len, draw, own_lists)
        case = case_of(kind, cp_size, seq_len, seq_len_k, draw.choice(KINDS), **dict(options))
        assert max(errors(case).values()) < 1e-11, (case, errors(case))


@pytest.mark.parametrize("kernel", ("cpu", "reference"))
@pytest.mark.parametrize("options", (
    dict(window_size=(5, 0), first_tokens=3), dict(window_size=(4, 0), prefix_lens=6), dict(chunk_size=7),
    dict(cu_seqlens=(0, 9, 9, 10, 33), window_size=(3, 0), first_tokens=2, prefix_lens=(4, 0, 1, 7))))
def test_kernels_of_single_precision_take_two_visits_of_a_block(kernel, options):
    for kind in KINDS:
        assert max(errors(case_of(kind, 4, 37, **options), kernel=kernel, dtype=torch.float32).values()) < 2e-5


@pytest.mark.parametrize("cp_size", (2, 3, 4, 8))
@pytest.mark.parametrize("routing", ("ring", "direct"))
def test_both_routings_equal_the_oracle_for_every_mask(routing, cp_size, monkeypatch):
    plans = []
    monkeypatch.setattr(simulation, "build_plan", lambda *a, **_: plans.append(build_plan(*a, routing=routing)) or plans[-1])
    draw = random.Random(f"{routing} {cp_size}")
    for name in ALL_MASKS:
        seq_len = draw.randint(3, 40)
        case = case_of(draw.choice(KINDS), cp_size, seq_len, **dict(mask_options(name, seq_len, draw)))
        assert max(errors(case).values()) < 1e-11, (case, errors(case))
    assert {plan.routing for plan in plans} == {routing}


@pytest.mark.parametrize("options", (
    dict(window_size=(3, 0), first_tokens=2), dict(prefix_lens=5, window_size=(2, 0)), dict(chunk_size=4, causal=False),
    dict(cu_seqlens=(0, 4, 12), cu_seqlens_k=(0, 9, 15), prefix_lens=(0, 3))))
def test_ring_attention_gets_every_option_through_the_spec_and_layouts_by_name_take_keys_of_other_lengths(options):
    inputs = make_inputs(12, seq_len_k=15, heads=2, kv_heads=1, head_dim=4, dtype=torch.float64)
    case = case_of("zigzag", 1, 12, 15, **options)
    whole = run(ring_attention, inputs, mask=case.mask, kernel="reference")
    ring = run(simulate, inputs, mask=case.mask, cp_size=3, layout="striped", layout_k="zigzag", kernel="reference")
    allowed = torch.from_numpy(case.allowed)
    truth = attention_oracle(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, allowed=allowed)
    for name in whole:
        assert torch.allclose(whole[name], getattr(truth, name), rtol=0, atol=1e-11)
        assert torch.allclose(ring[name], getattr(truth, name), rtol=0, atol=1e-11)


EDGES = {
    "one-token documents": dict(cu_seqlens=tuple(range(14)), window_size=(2, 0), first_tokens=1, prefix_lens=(1,) * 13),
    "prefix longer than its document": dict(cu_seqlens=(0, 3, 13), prefix_lens=(9, 50)),
    "prefix of all": dict(prefix_lens=13), "prefix longer than the sequence": dict(prefix_lens=99),
    "prefix with a window of nothing": dict(prefix_lens=5, window_size=(0, 0)),
    "chunk 1": dict(chunk_size=1), "chunk as long as the sequence": dict(chunk_size=13), "chunk longer": dict(chunk_size=10**12),
    "chunk 1 without causal": dict(chunk_size=1, causal=False),
    "chunks start anew in each document": dict(cu_seqlens=(0, 5, 13), chunk_size=4, causal=False),
    "first tokens longer than the document": dict(cu_seqlens=(0, 2, 13), window_size=(1, 0), first_tokens=4),
    "first tokens longer than the sequence": dict(window_size=(1, 0), first_tokens=99),
    "first tokens of a window of nothing": dict(window_size=(0, 0), first_tokens=1),
    "two-sided window": dict(causal=False, window_size=(1, 2), first_tokens=5),
    "no document": dict(cu_seqlens=(0,), window_size=(1, 0), first_tokens=2, prefix_lens=()),
    "empty documents alone": dict(cu_seqlens=(0, 0, 0), prefix_lens=(3, 4)),
    "trailing rows": dict(cu_seqlens=(0, 6), window_size=(1, 0), first_tokens=2),
}


@pytest.mark.parametrize("cp_size", (1, 3, 8))
@pytest.mark.parametrize("options", EDGES.values(), ids=list(EDGES))
def test_options_at_the_edges_of_what_they_can_be_equal_the_oracle(options, cp_size):
    for kind in KINDS:
        assert max(errors(case_of(kind, cp_size, 13, **options)).values()) < 1e-11


@pytest.mark.parametrize(("queries", "keys"), [
    ((0, 4, 9), (0, 0, 7)), ((0, 0, 9), (0, 5, 7)), ((0, 3, 3, 9), (0, 2, 7, 7)), ((0, 9), (0, 1)), ((0, 1), (0, 7)),
    ((0, 0), (0, 7)), ((0, 9), (0, 0))])
@pytest.mark.parametrize("options", (
    dict(), dict(causal=False), dict(window_size=(1, 0)), dict(window_size=(1, 0), first_tokens=2), dict(prefix_lens=3),
    dict(chunk_size=2)))
def test_documents_that_are_empty_on_either_side_equal_the_oracle(queries, keys, options):
    for kind, kind_k in (("zigzag", "contiguous"), ("striped", "zigzag")):
        case = case_of(kind, 3, 9, 7, kind_k, cu_seqlens=queries, cu_seqlens_k=keys, **options)
        assert max(errors(case).values()) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_each_query_document_returns_the_number_of_its_key_document(kind):
    queries, keys = (0, 4, 4, 9, 15), (0, 6, 8, 9, 21)
    numbers = torch.repeat_interleave(torch.arange(4, dtype=torch.float64), torch.tensor(keys).diff())
    v = numbers[None, :, None, None].expand(1, 21, 1, 4)
    mask = Mask(cu_seqlens=queries, cu_seqlens_k=keys, causal=False)
    out = simulate(torch.zeros(1, 15, 1, 4, dtype=torch.float64), torch.zeros_like(v), v, cp_size=4, mask=mask,
                   layout=Layout(kind, 15, 4, mask), layout_k=Layout(kind, 21, 4), kernel="reference")
    expected = torch.tensor([0.0] * 4 + [2.0] * 5 + [3.0] * 6, dtype=torch.float64)
    assert (out[0, :, 0, 0] - expected).abs().max() < 1e-14  # a leak is a whole number over a few keys


def seen_by(row, **options):
    """The keys that one of 12 queries sees."""
    mask = Mask(**options)
    ends = [mask.bounds(np.array([row]), 12, 12, part) for part in range(mask.num_parts)]
    return sorted(key for first, stop in ends for key in range(int(first[0]), int(stop[0])))


def test_what_a_row_sees_is_what_the_docstring_says():
    assert seen_by(9, prefix_lens=3, window_size=(2, 0)) == [0, 1, 2, 7, 8, 9]
    assert seen_by(1, prefix_lens=3, window_size=(2, 0)) == [0, 1, 2]
    assert seen_by(1, prefix_lens=5) == [0, 1, 2, 3, 4] and seen_by(6, prefix_lens=5) == list(range(7))
    assert seen_by(9, chunk_size=4) == [8, 9] and seen_by(9, chunk_size=4, causal=False) == [8, 9, 10, 11]
    assert seen_by(11, chunk_size=4, window_size=(1, 0)) == [10, 11] and seen_by(8, chunk_size=4, window_size=(1, 0)) == [8]
    assert seen_by(9, chunk_size=4, cu_seqlens=[0, 7, 12]) == [7, 8, 9]
    assert seen_by(11, chunk_size=4, cu_seqlens=[0, 7, 12]) == [11]
    assert seen_by(9, first_tokens=2, window_size=(3, 0)) == [0, 1, 6, 7, 8, 9]
    assert seen_by(5, first_tokens=2, window_size=(3, 0)) == [0, 1, 2, 3, 4, 5]
    assert seen_by(0, first_tokens=5, window_size=(1, 1), causal=False) == [0, 1]
    assert seen_by(9, first_tokens=2, prefix_lens=4, window_size=(1, 0)) == [0, 1, 2, 3, 8, 9]
    assert seen_by(1, first_tokens=4, prefix_lens=1, window_size=(0, 0)) == [0, 1]
    assert seen_by(9, first_tokens=1, window_size=(1, 0), cu_seqlens=[0, 6, 12]) == [6, 8, 9]


@pytest.mark.parametrize(("options", "rule"), [
    (dict(chunk_size=4, prefix_lens=2), "chunk_size=4 together with prefix_lens"),
    (dict(chunk_size=4, prefix_lens=[2], cu_seqlens=[0, 4]), "chunk_size=4 together with prefix_lens"),
    (dict(chunk_size=4, first_tokens=1, window_size=(3, 0)), "chunk_size=4 together with first_tokens"),
    (dict(causal=False, prefix_lens=2), "prefix_lens with causal=False and no window"),
    (dict(cu_seqlens_k=[0, 4]), "cu_seqlens_k without cu_seqlens"),
    (dict(cu_seqlens=[0, 4, 8], cu_seqlens_k=[0, 4]), "cu_seqlens_k has 1 documents and cu_seqlens 2"),
    (dict(cu_seqlens=[0, 4], cu_seqlens_k=[0, 4, 3]), r"cu_seqlens_k\[2\]=3 < cu_seqlens_k\[1\]=4"),
    (dict(cu_seqlens=[0, 4], cu_seqlens_k=[1, 4]), "cu_seqlens_k: must start at 0"),
    (dict(prefix_lens=[1, 2]), r"prefix_lens has shape \(2,\): must be one int without documents"),
    (dict(prefix_lens=[1], cu_seqlens=[0, 4, 8]), r"one for each of the 2 documents"),
    (dict(prefix_lens=-1), r"prefix_lens\[0\]=-1"), (dict(prefix_lens=1.5), "prefix_lens: must be ints"),
    (dict(prefix_lens=torch.tensor([1.0])), "prefix_lens: must be ints"), (dict(prefix_lens=True), "prefix_lens: must be ints"),
    (dict(chunk_size=0), "chunk_size=0: must be an int, 1 <="), (dict(chunk_size=2.0), "chunk_size=2.0"),
    (dict(chunk_size=True), "chunk_size=True"), (dict(first_tokens=-1), "first_tokens=-1"),
    (dict(first_tokens=None), "first_tokens"),
    (dict(chunk_size=2**80), "chunk_size"), (dict(first_tokens=2**63), "first_tokens"),
])
def test_options_that_mean_nothing_alone_or_together_are_refused_by_name(options, rule):
    with pytest.raises(ValueError, match=rule):
        Mask(**options)


def test_lengths_that_the_lists_do_not_fit_are_refused_where_they_are_known():
    mask = Mask(cu_seqlens=[0, 4, 8], cu_seqlens_k=[0, 9, 12])
    Layout("zigzag", 8, 2, mask)  # says nothing of the keys
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[-1\]=12: documents of keys must end within seq_len_k=11"):
        build_plan(mask, Layout("zigzag", 8, 2), Layout("zigzag", 11, 2))
    with pytest.raises(ValueError, match=r"cu_seqlens\[-1\]=8: documents must end within seq_len=7"):
        Layout("zigzag", 7, 2, mask)


VALUES = (
    Mask(), Mask(prefix_lens=3), Mask(prefix_lens=4), Mask(chunk_size=3), Mask(chunk_size=3, causal=False),
    Mask(window_size=(3, 0)), Mask(window_size=(3, 0), first_tokens=3), Mask(window_size=(3, 0), prefix_lens=3),
    Mask(window_size=(3, 0), chunk_size=3), Mask(window_size=(3, 0), first_tokens=3, prefix_lens=3), Mask(cu_seqlens=[0, 3]),
    Mask(cu_seqlens=[0, 3], cu_seqlens_k=[0, 4]), Mask(cu_seqlens=[0, 3], prefix_lens=[3]), Mask(cu_seqlens=[0, 3], chunk_size=3))


def test_masks_that_differ_in_any_option_differ_as_values_as_text_and_as_specs():
    for of in (hash, repr, lambda mask: mask.spec.numpy().tobytes(), lambda mask: mask):
        assert len({of(mask) for mask in VALUES}) == len(VALUES)


@pytest.mark.parametrize("mask", VALUES, ids=repr)
def test_a_mask_survives_its_spec_a_pickle_and_a_copy(mask):
    for other in (Mask.from_spec(mask.spec), pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert other == mask and hash(other) == hash(mask) and repr(other) == repr(mask)
        assert torch.equal(other.spec, mask.spec) and other.num_parts == mask.num_parts


def test_masks_that_allow_the_same_pairs_because_an_option_takes_no_effect_are_equal():
    assert Mask(prefix_lens=0) == Mask() and Mask(cu_seqlens=[0, 3, 5], prefix_lens=[0, 0]) == Mask(cu_seqlens=[0, 3, 5])
    assert Mask(first_tokens=4) == Mask() and repr(Mask(first_tokens=4)) == repr(Mask())
    assert Mask(cu_seqlens=[0, 3, 5], prefix_lens=2) == Mask(cu_seqlens=[0, 3, 5], prefix_lens=torch.tensor([2, 2]))
    assert Mask(causal=False, window_size=(2, 0), prefix_lens=3) == Mask(window_size=(2, 0), prefix_lens=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", (dict(first_tokens=4), dict(prefix_lens=4)))
def test_first_keys_that_the_window_covers_cost_no_visit_and_no_byte(kind, options):
    """Documents no longer than the window and the first keys: the mask of two parts plans as the mask of one."""
    documents = dict(cu_seqlens=tuple(range(0, 161, 20)))
    layout = Layout(kind, 160, 4)
    covered = build_plan(Mask(window_size=(15, 0), **documents, **options), layout)
    plain = build_plan(Mask(**documents, **{k: v for k, v in options.items() if k == "prefix_lens"}), layout)
    assert covered.mask.num_parts == 2
    for rank in range(4):
        for step in range(plain.num_steps):
            ours, theirs = ([(v.owner, v.part, v.rows, v.num_pairs) for v in plan.visits(rank, step)]
                            for plan in (covered, plain))
            assert ours == theirs
    assert covered.messages("backward") == plain.messages("backward")


@pytest.mark.parametrize("cp_size", (2, 4, 8))
def test_first_tokens_travel_once_to_each_reader_beside_the_window(cp_size):
    layout = Layout("contiguous", 64 * cp_size, cp_size)
    window = build_plan(Mask(window_size=(20, 0)), layout)
    both = build_plan(Mask(window_size=(20, 0), first_tokens=4), layout)
    # Rank 1 reads the first tokens (its window has left them) and the end of rank 0's block; every later rank the first tokens.
    assert both.rows_sent("forward") == window.rows_sent("forward") + 4 * (cp_size - 1)
    assert sum(len(both.visits(rank, step)) for rank in range(cp_size) for step in range(both.num_steps)) == (
        cp_size + (cp_size - 1)              # the windows: own block, neighbour's block
        + cp_size)                           # the first tokens: by every rank
    for pass_ in PASSES:
        simulator.run(both, pass_)


def test_rows_that_both_intervals_read_arrive_once_and_both_visits_span_them():
    plan = build_plan(Mask(window_size=(9, 0), first_tokens=6), Layout("contiguous", 24, 2))
    main, lead = plan.visits(1, 1)
    assert (main.part, lead.part) == (0, 1) and main.rows == lead.rows == ((0, 12),)
    (message,) = plan.messages("forward")
    assert message.num_rows == 12 and main.num_pairs + lead.num_pairs == plan.num_pairs(1, 1)


def test_the_sum_of_gradients_of_a_block_with_two_visits_is_caught_when_one_is_lost(monkeypatch):
    """A planted defect: the second visit overwrites the first one's dk and dv instead of adding to them."""
    from ringflash.ring import travel

    case = case_of("contiguous", 2, 24, window_size=(9, 0), first_tokens=6)
    assert max(errors(case).values()) < 1e-11
    target = travel.Gradients.target
    monkeypatch.setattr(travel.Gradients, "target", lambda self, visit: (target(self, visit)[0], False))
    found = errors(case)
    assert found["dk"] > 1e-3 and found["dv"] > 1e-3 and found["dq"] < 1e-11


def test_shard_batch_puts_the_documents_into_masks_of_every_option():
    tokens = torch.arange(20)[None]
    masks = (Mask(window_size=(3, 0), first_tokens=2), Mask(prefix_lens=2), Mask(chunk_size=4),
             Mask(cu_seqlens=[0, 8, 20], cu_seqlens_k=[0, 30, 31], causal=False))
    batch = shard_batch({"tokens": tokens, "cu_seqlens": [0, 8, 20]}, Layout("zigzag", 20, 2, masks), rank=1)
    assert batch.layout.masks == (
        Mask(window_size=(3, 0), first_tokens=2, cu_seqlens=[0, 8, 20]), Mask(prefix_lens=[2, 2], cu_seqlens=[0, 8, 20]),
        Mask(chunk_size=4, cu_seqlens=[0, 8, 20]), masks[3])
    assert batch.num_valid == 18 and batch.positions.tolist() == batch.layout.positions(1).tolist()
    with pytest.raises(ValueError, match="different documents"):
        shard_batch({"tokens": tokens, "cu_seqlens": [0, 9, 20]}, Layout("zigzag", 20, 2, masks[3]), rank=1)


def test_the_predicate_says_what_a_loop_over_pairs_says():
    options = dict(causal=True, window_size=(2, -1), first_tokens=2, prefix_lens=(0, 3), cu_seqlens=(0, 4, 9),
                   cu_seqlens_k=(0, 6, 14))
    seen = allowed_pairs(torch.arange(10), torch.arange(15), seq_len_q=10, seq_len_k=15, **options)
    for query in range(10):
        for key in range(15):
            document = next((d for d in (0, 1) if options["cu_seqlens"][d] <= query < options["cu_seqlens"][d + 1]), None)
            start, stop = (0, 0) if document is None else options["cu_seqlens_k"][document:document + 2]
            if not start <= key < stop:
                assert not seen[query, key]
                continue
            at = stop - (options["cu_seqlens"][document + 1] - query)
            within = key <= at and (key >= at - 2 or key - start < 2)
            assert seen[query, key] == (within or key - start < options["prefix_lens"][document])
