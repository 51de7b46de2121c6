"""What rotates in the backward: the Q side gives what K and V give, sends what its plan says, and is chosen where that is less."""
import dataclasses
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask, ring_attention, shard, simulate
from ringflash.kernels import dispatch
from ringflash.layout import KINDS
from ringflash.ring import show, signal_simulator, simulator, travel
from ringflash.ring.exchange import record_traffic
from ringflash.ring.loopback import Loopback
from ringflash.ring.plan import build_plan
from ringflash.ring.rotate import Heads, backward_bytes, choose, query_sections
from ringflash.ring.wires import QueryWire
from ringflash.simulation import SimulatedRing
from ringflash.tests.support.distributed import check_ranks
from ringflash.tests.support.oracle import attention_oracle
from ringflash.tests.support.plan_cases import (
    CROSS_DOCUMENTS, CROSS_MASKS, MASKS, OPTION_MASKS, SIZES, PlanCase, cases, mask_options)
from ringflash.tests.support.ring_cases import LAYOUTS, Inputs, differing, judge, make_inputs, masks, run

GRADIENTS = ("dq", "dk", "dv")
rings = pytest.mark.parametrize(("kind", "cp_size"), [(kind, size) for kind in KINDS for size in (2, 3, 4, 8)])


def plan_of(case: PlanCase):
    return build_plan(case.mask, case.layout, case.layout_k, routing=case.routing, rotates="q")


@rings
def test_its_plan_covers_each_pair_once_and_messages_meet_without_any_buffer(kind, cp_size):
    for case in cases(kind, cp_size, seed=31, lengths=2):
        plan = plan_of(case)
        for pass_ in ("forward", "backward"):
            simulator.run(plan, pass_)
        assert {m.kind for m in plan.messages("backward")} <= {"q", "dq"}
        seen = np.zeros(case.allowed.shape, dtype=np.int64)
        for rank in range(cp_size):
            for visit in (v for step in range(plan.num_steps) for v in plan.visits(rank, step)):
                _, _, k_lo, k_hi = visit.intervals()        # of the queries that arrived, in rows of this rank's keys
                queries = np.concatenate([np.arange(*rows) for rows in visit.rows]) if visit.rows else np.arange(0)
                keys = case.layout_k.positions(rank)
                for query, low, high in zip(case.layout.positions(visit.owner)[queries], k_lo, k_hi):
                    seen[query, keys[low:high]] += 1
            kv = build_plan(case.mask, case.layout, case.layout_k)
            assert plan.dead_q(rank) == kv.dead_k(rank) and plan.dead_k(rank) == kv.dead_q(rank)
        assert np.array_equal(seen, case.allowed)


@rings
def test_only_queries_that_a_key_of_the_reader_sees_travel_and_directly_no_more(kind, cp_size):
    for case in cases(kind, cp_size, seed=32, lengths=2):
        plan = build_plan(case.mask, case.layout, case.layout_k, routing="direct", rotates="q")
        pairs = ((owner, reader) for owner in range(cp_size) for reader in range(cp_size) if owner != reader)
        wanted = sum(int(case.allowed[np.ix_(case.layout.positions(owner), case.layout_k.positions(reader))].any(1).sum())
                     for owner, reader in pairs)
        assert plan.rows_sent("backward", "q") == plan.rows_sent("backward", "dq") == wanted
        ring = build_plan(case.mask, case.layout, case.layout_k, routing="ring", rotates="q")
        busy = {rank for rank in range(cp_size) if ring.rows_sent("backward", rank=rank)}
        assert wanted <= ring.rows_sent("backward", "q") or not busy


@rings
def test_copy_engines_carry_it_in_any_order_of_their_queues(kind, cp_size):
    for case in cases(kind, cp_size, seed=33, lengths=1):
        for merged in (False, True):
            signal_simulator.run(plan_of(case), ("backward", "backward"), seed=1, merged=merged)


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_dense_oracle_for_every_mask_length_and_layout_of_keys(kind, cp_size):
    draw = random.Random(f"rotate {kind} {cp_size}")
    same = [(name, None) for name in (*MASKS, *OPTION_MASKS)]
    for name, cross in same + [(name, name in CROSS_DOCUMENTS) for name in (*CROSS_MASKS, *CROSS_DOCUMENTS)]:
        seq_len = draw.choice((draw.randint(1, 2 * cp_size), draw.randint(3, 33)))
        seq_len_k = seq_len if cross is None else draw.randint(1, 33)
        mask = Mask(**dict(mask_options(name, seq_len, draw, seq_len_k if cross else None)))
        layout = Layout(kind, seq_len, cp_size, mask)
        keys = None if cross is None else Layout(draw.choice(KINDS), seq_len_k, cp_size)
        case = PlanCase((), layout, keys or layout)
        inputs = make_inputs(seq_len, seq_len_k=seq_len_k, heads=2, kv_heads=1, head_dim=4, dtype=torch.float64, head_dim_v=3)
        allowed = dataclasses.replace(case, options=tuple(_keywords(mask))).allowed
        truth = attention_oracle(inputs.q, inputs.k, inputs.v, dout=inputs.dout, dlse=inputs.dlse, allowed=torch.from_numpy(allowed))
        ours = run(simulate, inputs, cp_size=cp_size, layout=layout, layout_k=keys, mask=mask, kernel="reference", rotate="q")
        for gradient in GRADIENTS:
            assert (ours[gradient] - getattr(truth, gradient)).abs().max() < 1e-11, (name, layout, keys, mask, gradient)


def _keywords(mask):
    listed = {name: getattr(mask, name) for name in ("cu_seqlens", "cu_seqlens_k", "prefix_lens")}
    found = {name: tuple(x.tolist()) for name, x in listed.items() if x is not None}
    if mask.cu_seqlens is None and "prefix_lens" in found:
        found["prefix_lens"] = found["prefix_lens"][0]
    plain = {"chunk_size": mask.chunk_size, "first_tokens": mask.first_tokens}
    return {"causal": mask.causal, "window_size": mask.window_size, **found, **{k: x for k, x in plain.items() if x}}.items()


@pytest.mark.parametrize("cp_size", SIZES)
@pytest.mark.parametrize("kernel", ("reference", "cpu"))
def test_every_layout_and_mask_is_within_budget(kernel, cp_size):
    failures = []
    for layout in LAYOUTS:
        for number, (name, mask) in enumerate(masks(37).items()):
            options = dict(heads=4, kv_heads=(1, 2, 4)[number % 3], dtype=(torch.float32, torch.bfloat16, torch.float16)[number % 3])
            inputs = make_inputs(37, seed=number, sinks=(None, torch.float32)[number % 2], head_dim_v=(None, 12, 5)[number % 3], **options)
            mask = {**mask, "softcap": (0.0, 1.5)[number % 2]}
            ours = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel=kernel, rotate="q", **mask)
            failures += [(layout, name, str(verdict)) for verdict in judge(ours, inputs, **mask)]
    assert not failures


@pytest.mark.parametrize("cp_size", (1, 3, 4))
def test_out_and_lse_are_the_same_bits_whatever_rotates_and_gradients_from_run_to_run(cp_size):
    for mask in masks(29).values():
        inputs = make_inputs(29, dtype=torch.bfloat16, sinks=torch.float32)
        sides = [run(simulate, inputs, cp_size=cp_size, kernel="cpu", rotate=rotate, **mask) for rotate in ("kv", "q")]
        names = ("out", "lse", *(GRADIENTS if cp_size == 1 else ()))
        assert not differing({name: sides[0][name] for name in names}, sides[1])
        for seed in range(2):
            again = run(simulate, inputs, cp_size=cp_size, kernel="cpu", rotate="q", order=random.Random(seed), **mask)
            assert not differing(again, sides[1])


def test_nan_in_dead_rows_reaches_nothing_and_their_lse_reaches_the_sinks():
    for cp_size in (2, 3, 8):
        for layout in LAYOUTS:
            results = []
            for poison in (0.0, math.nan):
                inputs = make_inputs(16, sinks=torch.float32)
                for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
                    x[:, 11:] += poison                     # rows 11..15 belong to no document
                results.append(run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", rotate="q",
                                   cu_seqlens=[0, 0, 6, 11]))
            assert not differing(*results)
            assert all(not results[0][name][:, 11:].any() for name in GRADIENTS)
            kv = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", rotate="kv", cu_seqlens=[0, 0, 6, 11])
            assert torch.equal(kv["dsinks"], results[1]["dsinks"])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64))
def test_a_packed_row_holds_q_dout_lse_and_delta_bit_for_bit_on_aligned_addresses(dtype):
    for batch, heads, head_dim, head_dim_v in ((1, 1, 5, 3), (2, 3, 8, 8), (1, 2, 7, 16), (1, 32, 128, 128)):
        inputs = make_inputs(9, batch=batch, heads=heads, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype)
        lse, delta = inputs.dlse.clone(), -inputs.dlse
        lse[:, :, 4] = -math.inf
        wire, rows = QueryWire(inputs.q, inputs.dout, lse), ((1, 3), (4, 8))
        data = wire.pack((inputs.q, inputs.dout, lse, delta), rows, torch.empty(6, *wire.row_shape, dtype=torch.uint8))
        index = [1, 2, 4, 5, 6, 7]
        found = wire.split(data)
        wanted = (inputs.q[:, index], inputs.dout[:, index], lse[:, :, index], delta[:, :, index])
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(found, wanted))
        assert found[0].stride(3) == found[1].stride(3) == 1 and all(x.is_contiguous() for x in found[2:])
        assert data.shape[1] % 64 == 0 and all((x.data_ptr() - data.data_ptr()) % 16 == 0 for x in found[:2])
        # What has been sent on is read where it lies: a prefix, in a block of more rows.
        assert torch.equal(wire.split(data[:2])[0], inputs.q[:, 1:3])


@pytest.mark.parametrize("rotate", ("kv", "q"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_on_the_wire_are_the_plans(layout, rotate):
    for cp_size, dtype in ((2, torch.bfloat16), (5, torch.float64)):
        for mask in masks(48).values():
            inputs = make_inputs(48, heads=6, kv_heads=2, head_dim=16, head_dim_v=12, dtype=dtype)
            with record_traffic() as log:
                run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", rotate=rotate, **mask)
            heads = Heads(1, 6, 2, 16, dtype.itemsize, 12, 8 if dtype == torch.float64 else 4)
            plan = choose(build_plan(Mask(**mask), Layout(layout, 48, cp_size)), heads, rotate).plan
            sent = sorted((posted.message, posted.num_bytes) for posted in log if posted.pass_ == "backward")
            assert sent == sorted((m, m.num_rows * heads.row_bytes[m.kind]) for m in plan.messages("backward"))
            assert sum(num_bytes for _, num_bytes in sent) == backward_bytes(plan, heads)
            assert backward_bytes(plan, heads) == sum(backward_bytes(plan, heads, rank) for rank in range(cp_size))
            at_once = [(m.step, m.kind, m.src, m.dst) for m in plan.messages("backward") if not m.is_gradient]
            assert len(at_once) == len(set(at_once)) or len({m.lane for m in plan.messages("backward")}) == 2


def test_the_bytes_of_a_row_are_those_of_its_heads():
    heads = Heads(batch=1, num_heads=32, num_kv_heads=8, head_dim=128, itemsize=2)
    assert heads.row_bytes == {"kv": 4096, "dkv": 8192, "q": 32 * (2 * 256 + 8), "dq": 32 * 512}
    assert query_sections(1, 1, 5, 3, 2, 4) == ((0, 16, 32, 48), 64)
    assert Heads(2, 4, 1, 64, 2, head_dim_v=32).row_bytes["q"] == 2 * 4 * (2 * 96 + 8)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_takes_the_q_side_without_gqa_for_two_thirds_of_the_bytes_and_k_and_v_at_4_to_1(kind):
    plan = build_plan(Mask(), Layout(kind, 4096, 8))
    for num_heads, num_kv_heads, side, ratio in ((32, 32, "q", 1.49), (32, 8, "kv", 2.69), (32, 16, "kv", 1.34), (32, 4, "kv", 5.37),
                                                 (45, 32, "q", 1.06), (51, 32, "kv", 1.07)):
        chosen = choose(plan, Heads(1, num_heads, num_kv_heads, 128, 2))
        sent = chosen.bytes_by_side
        assert chosen.plan.rotates == side and min(sent, key=sent.get) == side
        assert max(sent.values()) / min(sent.values()) == pytest.approx(ratio, rel=0.01)
        assert "rotate in the backward" in chosen.reason and f"{max(sent.values()):,}" in chosen.reason


def test_auto_counts_what_travels_not_heads_alone_and_a_demand_is_obeyed():
    heads = Heads(1, 32, 8, 128, 2)
    few_queries = build_plan(Mask(causal=False), Layout("contiguous", 64, 4), Layout("contiguous", 4096, 4))
    assert choose(few_queries, heads).plan.rotates == "q"
    assert choose(few_queries, heads, "kv").plan is few_queries
    plan = build_plan(Mask(), Layout("zigzag", 64, 4))
    assert choose(plan, heads).plan is plan and choose(plan, heads, "q").plan.rotates == "q"
    assert "as demanded" in choose(plan, heads, "q").reason
    for nothing in (build_plan(Mask(), Layout("zigzag", 64, 1)), build_plan(Mask(window_size=(0, 0)), Layout("striped", 64, 4))):
        assert choose(nothing, heads, "q").plan is nothing and not choose(nothing, heads).bytes_by_side
    with pytest.raises(ValueError, match="rotate='k': unknown; valid: auto, kv, q"):
        choose(plan, heads, "k")
    with pytest.raises(ValueError, match="rotates='auto': valid are kv, q"):
        build_plan(Mask(), Layout("zigzag", 64, 4), rotates="auto")


def test_the_plan_as_text_says_what_rotates_and_why(capsys):
    ring = ["--seq-len", "64", "--cp-size", "4", "--heads"]
    show.main([*ring, "8", "8", "64", "--pass", "backward"])
    said = capsys.readouterr().out
    assert "8 query and 8 kv heads of 64: q, dout, lse, delta and dQ rotate in the backward" in said and "(K, V, dK and dV: " in said
    assert "the Q side rotates: zigzag, 64 tokens on 4 ranks, Mask(causal=True)" in said and "grad" in said
    show.main([*ring, "8", "2", "64", "--summary"])
    assert "kv heads of 64: K, V, dK and dV rotate in the backward" in capsys.readouterr().out
    show.main([*ring, "8", "2", "64", "--rotate", "q", "--summary"])
    assert "bytes, as demanded" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        show.main([*ring, "8", "3", "64"])


def test_the_choice_of_auto_is_logged_once_for_each_side_and_heads(caplog):
    heads = Heads(1, 24, 24, 40, 2)                         # of no other test
    with caplog.at_level("INFO", logger="ringflash"):
        for seq_len in (64, 65):
            choose(build_plan(Mask(), Layout("zigzag", seq_len, 4)), heads)
            choose(build_plan(Mask(), Layout("zigzag", seq_len, 4)), heads, "kv")
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["rotate=auto: q"]


@pytest.mark.parametrize("cp_size", (2, 3, 8))
def test_balanced_shards_of_packed_documents_are_within_budget(cp_size):
    for mask in (Mask(cu_seqlens=[0, 3, 40, 41, 90]), Mask(cu_seqlens=[0, 50, 90], window_size=(9, 0), first_tokens=2)):
        layout = Layout("balanced", 96, cp_size, mask)
        inputs = make_inputs(96, dtype=torch.float64)
        sides = [run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="reference", rotate=rotate) for rotate in ("kv", "q")]
        assert all((sides[0][name] - sides[1][name]).abs().max() < 1e-12 for name in GRADIENTS)
        simulator.run(build_plan(mask, layout, rotates="q"), "backward")


@pytest.mark.parametrize("rotate", ("kv", "q", "auto"))
def test_a_batch_of_none_and_rows_of_none_are_legal(rotate):
    for batch, seq_len, seq_len_k in ((0, 8, 8), (2, 1, 5), (1, 5, 1)):
        inputs = make_inputs(seq_len, seq_len_k=seq_len_k, batch=batch, heads=2, kv_heads=2)
        ours = run(simulate, inputs, cp_size=4, layout="contiguous", kernel="reference", rotate=rotate)
        assert ours["dq"].shape == inputs.q.shape
        assert batch == 0 or not judge(ours, inputs)


@pytest.mark.parametrize("kernel", ("reference", "cpu"))
def test_the_error_does_not_grow_with_the_ring_in_bf16(kernel):
    inputs = make_inputs(256, head_dim=32, dtype=torch.bfloat16)
    double = Inputs(*(x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)))
    exact = run(simulate, double, cp_size=1, kernel="reference")

    def rms(cp_size):
        ours = run(simulate, inputs, cp_size=cp_size, kernel=kernel, rotate="q")
        return {name: float((ours[name].double() - exact[name]).square().mean().sqrt()) for name in GRADIENTS}

    alone, ring = rms(1), rms(8)
    assert all(ring[name] <= 1.1 * alone[name] for name in alone), (alone, ring)


class _Strangers(Loopback):
    """The lse (part 2) or delta (part 3) that comes with a block is that of another one."""

    part = 2

    def deliver(self, message, source, target):
        super().deliver(message, source, target)
        other = next((self._sends[m] for m in self._sends if m.kind == message.kind == "q" and m.owner != message.owner
                      and self._sends[m].shape == source.shape), None)
        if other is not None:
            offsets, end = query_sections(1, 4, 8, 8, 4, 4)
            low, high = (*offsets, end)[self.part:self.part + 2]
            target[:, low:high] = other[:, low:high]


class _StrangeDelta(_Strangers):
    part = 3


def _failed(loopback=Loopback):
    inputs, layout = make_inputs(32), Layout("contiguous", 32, 4)
    plan = build_plan(Mask(causal=False), layout)
    backend = dispatch.select("reference", device="cpu", dtype=torch.float32, head_dim=8)
    ring = SimulatedRing(plan, layout, layout, backend, 8 ** -0.5, loopback=loopback,
                         rotation=lambda: choose(plan, Heads(1, 4, 2, 8, 4), "q").plan)
    out, lse = ring.forward(inputs.q, inputs.k, inputs.v)
    found = ring.backward(inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse)
    return {verdict.name for verdict in judge({"out": out, "lse": lse, **dict(zip(GRADIENTS, found))}, inputs, causal=False)}


def test_planted_defects_are_caught(monkeypatch):
    assert _failed() == set()
    assert {"dq", "dk", "dv"} <= _failed(_Strangers)
    found = _failed(_StrangeDelta)
    assert {"dq", "dk"} <= found and "dv" not in found
    target = travel.Gradients.target

    def leave_early(self, visit):
        """dq is sent on as it was before the kernel of this step."""
        tensors, add = target(self, visit)
        if visit.is_own:
            return tensors, add
        for x in tensors:
            x.zero_()
        return tuple(x.clone() for x in tensors), add

    monkeypatch.setattr(travel.Gradients, "target", leave_early)
    assert _failed() == {"dq"}


def _equals_loopback(rank, world_size):
    for number, (name, mask) in enumerate(masks(29).items()):
        kind, seq_len = LAYOUTS[number % 3], (29, 3, 8 * world_size)[number % 3]
        layout = Layout(kind, seq_len, world_size, Mask(**masks(seq_len)[name]), group=dist.group.WORLD)
        inputs = make_inputs(seq_len, dtype=(torch.bfloat16, torch.float32)[number % 2], kv_heads=4, head_dim_v=(8, 5)[number % 2])
        options = dict(kernel=("reference", "cpu")[number % 2], rotate=("q", "auto")[number % 3 == 1])
        whole = run(simulate, inputs, cp_size=world_size, layout=kind, **masks(seq_len)[name], **options)
        local = Inputs(*(shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)),
                       shard(inputs.dlse, layout, rank=rank, dim=2))
        with record_traffic() as log:
            ours = run(ring_attention, local, layout=layout, group=dist.group.WORLD, **options)
        own = {name: shard(x, layout, rank=rank, dim=2 if name == "lse" else 1) for name, x in whole.items()}
        assert not differing(ours, own), (name, kind, seq_len)
        assert {posted.message.kind for posted in log if posted.pass_ == "backward"} <= {"q", "dq"}
    inputs = make_inputs(4)
    with pytest.raises(ValueError, match=r"rotate differs: kv on cp ranks? 0.*; q on cp rank"):
        ring_attention(inputs.q, inputs.k, inputs.v, group=dist.group.WORLD, kernel="reference",
                       rotate="q" if rank == world_size - 1 else "kv")
    return "compared"


@pytest.mark.parametrize("world_size", (2, 3, 4))
def test_a_ring_of_processes_equals_one_process_bitwise_and_compares_the_option(world_size):
    assert check_ranks(_equals_loopback, world_size, timeout_s=100) == ["compared"] * world_size
