"""Ulysses x ring: every factorisation of the ranks gives the attention of one rank, in one process and over gloo."""
import dataclasses
import os
import random
import time

import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask, ring_attention, shard, shard_batch, simulate, ulysses, unshard
from ringflash.mesh import make_mesh, ranks_of
from ringflash.ring import head_exchange
from ringflash.ring.heads import HeadSplit, check_degree
from ringflash.ring.rotate import Heads
from ringflash.tests.support.distributed import check_ranks, run_ranks
from ringflash.tests.support.ring_cases import LAYOUTS, Inputs, differing, judge, make_inputs, masks, run

FACTORS = {2: ((1, 2),), 4: ((4, 1), (2, 2), (1, 4)), 6: ((6, 1), (3, 2), (2, 3), (1, 6))}
# Query and KV heads: the degree divides the latter, or they divide it, or neither.
HEADS = ((4, 4), (4, 2), (8, 2), (4, 1), (12, 3), (6, 2))


def every_split():
    for num_heads in range(1, 25):
        for num_kv_heads in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
            for size in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
                yield HeadSplit(num_heads, num_kv_heads, size)


def test_each_query_head_is_on_one_rank_and_beside_its_own_kv_head():
    for split in every_split():
        group, owned = split.num_heads // split.num_kv_heads, []
        for rank in range(split.size):
            start, stop = split.queries(rank)
            owned += range(start, stop)
            first, end = split.keys(rank)
            copies = split.copies(rank)
            assert len(copies) == split.local_kv_heads and max(copies) < end - first
            for local, head in enumerate(range(start, stop)):
                assert first + copies[local // split.per_kv_head] == head // group, (split, rank, head)
        assert owned == list(range(split.num_heads))


def test_kv_heads_are_never_repeated_where_the_degree_divides_them_and_no_more_than_needed_where_they_divide_it():
    for split in every_split():
        if split.num_kv_heads % split.size == 0:
            assert not split.is_replicated and split.local_kv_heads == split.num_kv_heads // split.size
        elif split.size % split.num_kv_heads == 0:
            assert split.is_replicated and split.local_kv_heads == 1
    heads = HeadSplit(32, 8, 4).local(Heads(1, 32, 8, 128, 2))
    assert (heads.num_heads, heads.num_kv_heads) == (8, 2)


@pytest.mark.parametrize("degree, num_heads, nearest", ((4, 6, "3, 6"), (5, 8, "4, 8"), (16, 8, "8"), (2, 1, "1")))
def test_a_degree_that_does_not_divide_the_heads_is_refused_with_the_nearest_that_do(degree, num_heads, nearest):
    for call in (lambda: check_degree(degree, num_heads),
                 lambda: simulate(*[torch.zeros(1, 16, num_heads, 4)] * 3, cp_size=1,
                                  layout=Layout("zigzag", 16, 1, ulysses_size=degree))):
        with pytest.raises(ValueError, match=f"{degree} Ulysses ranks must divide num_heads={num_heads}.*nearest valid: {nearest}$"):
            call()


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_every_factorisation_is_one_rank_in_every_layout_and_mask(heads, kv_heads):
    number = 0
    for seq_len in (29, 5):                                 # uneven; and with ranks that have no rows
        made = dict(heads=heads, kv_heads=kv_heads, head_dim_v=6, sinks=torch.float64, dtype=torch.float64)
        inputs = make_inputs(seq_len, **made)
        for name, mask in masks(seq_len).items():
            options = dict(kernel="reference", softcap=1.5, mask=Mask(**mask))
            whole = run(simulate, inputs, cp_size=1, **options)
            for size, factors in FACTORS.items():
                kind, rotate, number = LAYOUTS[number % 3], ("auto", "kv", "q")[number % 3], number + 1
                for ring, degree in factors:
                    if heads % degree:
                        continue
                    layout = Layout(kind, seq_len, ring, options["mask"], degree)
                    ours = run(simulate, inputs, cp_size=ring, layout=layout, rotate=rotate, **options)
                    for key, value in whole.items():
                        torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=1e-10, msg=lambda text: f"{layout}: {text}")


@pytest.mark.parametrize("kernel", ("reference", "cpu"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_gradients_of_replicated_kv_heads_are_added_in_fp32_and_within_budget(kernel, dtype):
    failures = []
    for heads, kv_heads, ring, degree in ((8, 1, 1, 8), (8, 2, 2, 4), (12, 3, 2, 2), (7, 7, 2, 7)):
        inputs = make_inputs(37, heads=heads, kv_heads=kv_heads, head_dim=16, dtype=dtype, sinks=torch.float32, seed=degree)
        layout = Layout("zigzag", 37, ring, Mask(window_size=(20, 0)), degree)
        ours = run(simulate, inputs, cp_size=ring, layout=layout, kernel=kernel)
        failures += [(heads, kv_heads, str(verdict)) for verdict in judge(ours, inputs, window_size=(20, 0))]
    assert not failures


def test_many_small_gradients_of_one_kv_head_are_not_lost_to_16_bit_sums():
    """dv of the one KV head is a sum over 32 query heads: 1 and 31 times 2^-9, which bf16 sums of 4 and 4 would round away."""
    q, k, v = torch.zeros(1, 4, 32, 4), torch.zeros(1, 4, 1, 4), torch.zeros(1, 4, 1, 4)
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    dout = torch.full((1, 4, 32, 4), 2.0**-9)
    dout[:, :, 0] = 1.0
    for degree in (1, 8, 32):
        out = simulate(q, k, v, cp_size=1, layout=Layout("zigzag", 4, 1, Mask(window_size=(0, 0)), degree), kernel="reference")
        (dv,) = torch.autograd.grad(out, v, dout.bfloat16())
        assert torch.equal(dv, torch.full_like(dv, 1.0 + 31 * 2.0**-9)), degree


def test_lengths_of_q_and_k_may_differ_and_rows_may_see_nothing():
    inputs = make_inputs(13, seq_len_k=22, heads=6, kv_heads=3, sinks=torch.float32, dtype=torch.float64)
    poisoned = dataclasses.replace(inputs, q=inputs.q.clone(), dout=inputs.dout.clone())
    for options in (dict(causal=True), dict(mask=Mask(cu_seqlens=[0, 4, 11], cu_seqlens_k=[0, 9, 20]))):
        whole = run(simulate, inputs, cp_size=1, kernel="reference", **options)
        if "mask" in options:                               # queries 11, 12 belong to no document
            poisoned.q[:, 11:] = poisoned.dout[:, 11:] = torch.nan
        allowed = options.get("mask", Mask())
        for ring, degree in ((1, 3), (2, 2), (2, 3)):
            layout = Layout("striped", 13, ring, allowed, degree)
            layout_k = Layout("zigzag", 22, ring, allowed, degree)
            ours = run(simulate, poisoned, cp_size=ring, layout=layout, layout_k=layout_k, kernel="reference", **options)
            for name, value in whole.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-11)


def test_the_order_in_which_ranks_run_changes_no_bit():
    inputs = make_inputs(26, heads=8, kv_heads=2, dtype=torch.bfloat16, sinks=torch.bfloat16)
    layout = Layout("zigzag", 26, 3, ulysses_size=4)
    plain = run(simulate, inputs, cp_size=3, layout=layout, kernel="cpu", deterministic=True)
    for seed in range(3):
        again = run(simulate, inputs, cp_size=3, layout=layout, kernel="cpu", deterministic=True, order=random.Random(seed))
        assert not differing(again, plain)


def test_what_no_mask_connects_costs_no_ring_message_but_the_all_to_alls_remain(monkeypatch):
    posts = []
    plain = head_exchange.LoopbackHeads.post
    monkeypatch.setattr(head_exchange.LoopbackHeads, "post", lambda *posted: posts.append(posted[1]) or plain(*posted))
    run(simulate, make_inputs(16), cp_size=2, layout=Layout("contiguous", 16, 2, Mask(window_size=(0, 0)), 2))
    assert len(posts) == 4 * 4                              # two a direction, of each of four ranks


def _rotated(split, rank):
    return [(copy + 1) % (split.keys(rank)[1] - split.keys(rank)[0]) for copy in range(split.local_kv_heads)]


def _first_copies(member):
    copies = member.split.copies(member.rank)
    return [copies.index(head) for head in sorted(set(copies))]


DEFECTS = {
    "KV heads of another group": lambda patch: patch.setattr(HeadSplit, "copies", _rotated),
    "gradients of one copy only": lambda patch: patch.setattr(
        ulysses.Member, "_without_copies", lambda self, part: part.x[:, :, _first_copies(self)] if part.is_kv else part.x),
    "parts of peers swapped": lambda patch: patch.setattr(
        ulysses, "_views", lambda *arguments, plain=ulysses._views: plain(*arguments)[::-1]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_caught(defect, monkeypatch):
    inputs = make_inputs(20, heads=12, kv_heads=3, dtype=torch.float64)
    options = dict(cp_size=2, layout=Layout("zigzag", 20, 2, ulysses_size=2), kernel="reference")
    assert not judge(run(simulate, inputs, **options), inputs)
    DEFECTS[defect](monkeypatch)
    assert judge(run(simulate, inputs, **options), inputs)


# Over gloo, and NCCL where there is a GPU. One spawn per world size.

def _device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _local(inputs, layout, rank):
    parts = [shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    return Inputs(*parts, shard(inputs.dlse, layout, rank=rank, dim=2), inputs.sinks)


def _equals_loopback(rank, mesh, ring, degree):
    for number, (name, mask) in enumerate(masks(29).items()):
        seq_len, kind = (29, 3, 24)[number % 3], LAYOUTS[number % 3]
        kernel = ("reference", "triton" if _device() == "cuda" else "cpu")[number % 2]
        layout = Layout(kind, seq_len, ring, Mask(**masks(seq_len)[name]), degree, group=mesh)
        inputs = make_inputs(seq_len, heads=12, kv_heads=3, head_dim_v=(4, 12)[number % 2], dtype=torch.bfloat16,
                             sinks=torch.float32).to(_device())
        options = dict(kernel=kernel, softcap=(0.0, 1.5)[number % 2], rotate=("auto", "q")[number % 2])
        whole = run(simulate, inputs, cp_size=ring, layout=layout, **options)
        ours = run(ring_attention, _local(inputs, layout, rank), layout=layout, group=mesh, **options)
        share, expected = ours.pop("dsinks"), whole.pop("dsinks")
        own = {key: shard(x, layout, rank=rank, dim=2 if key == "lse" else 1) for key, x in whole.items()}
        assert not differing(ours, own), (ring, degree, name, differing(ours, own))
        dist.all_reduce(share)
        torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-6)


def _by_name_also_compiled(rank, mesh, ring, degree):
    seq_len = 6 * ring * degree
    inputs = make_inputs(seq_len, batch=2, heads=12, kv_heads=3)
    layout = Layout("striped", seq_len, ring, ulysses_size=degree)
    local = _local(inputs, layout, rank)

    def attend(q, k, v, **options):
        return ring_attention(q, k, v, layout="striped", window_size=(5, 0), group=mesh, kernel="reference", **options)

    ours = run(attend, local)
    whole = run(simulate, inputs, cp_size=ring, layout=Layout("striped", seq_len, ring, Mask(window_size=(5, 0)), degree),
                kernel="reference")
    assert not differing(ours, {key: shard(x, layout, rank=rank, dim=2 if key == "lse" else 1) for key, x in whole.items()})
    assert not judge({"out": unshard(ours["out"], layout, group=mesh)}, inputs, window_size=(5, 0))
    assert not differing(run(torch.compile(attend, backend="aot_eager", fullgraph=True), local), ours)


def _batches_and_shards(rank, mesh, ring, degree):
    tokens = torch.arange(31)[None]
    batch = {"tokens": tokens, "cu_seqlens": [0, 3, 20, 31]}
    for kind in ("zigzag", "balanced", "auto"):
        sharded = shard_batch(batch, kind, group=mesh)
        assert (sharded.layout.cp_size, sharded.layout.ulysses_size, sharded.layout.is_agreed) == (ring, degree, True)
        assert sharded.num_valid == 28
        assert torch.equal(unshard(sharded.tokens, sharded.layout, group=mesh), tokens)
        given = shard_batch(batch, Layout(kind, 31, ring, ulysses_size=degree), group=dist.group.WORLD)
        assert torch.equal(given.tokens, sharded.tokens)
    assert torch.equal(shard_batch({"tokens": tokens}, mesh).positions, shard(tokens[0], Layout(
        "zigzag", 31, ring, ulysses_size=degree), rank=rank, dim=0))
    x = torch.arange(62.0).reshape(2, 31)
    part = shard(x, sharded.layout, group=mesh).requires_grad_()
    (unshard(part, sharded.layout, group=mesh) * (rank + 1)).sum().backward()
    assert torch.equal(part.grad, torch.full_like(part, sum(range(1, ring * degree + 1))))


def _all_ranks_raise_the_same(rank, mesh, ring, degree):
    odd, size = rank == 1, ring * degree
    base = make_inputs(4, heads=12, kv_heads=3)
    flat = Layout("zigzag", 4 * size, ring, ulysses_size=degree)

    def attend(**options):
        return ring_attention(**{"q": base.q, "k": base.k, "v": base.v, "group": mesh, **options})

    cases = {
        "must divide num_heads=5": lambda: attend(**{name: torch.zeros(1, 4, 5, 8) for name in "qkv"}),
        "q [B, Hq, D] differs": lambda: attend(**({"q": torch.zeros(1, 4, 24, 8)} if odd else {})),
        "routing differs: auto on cp ranks 0, 2, 3; ring on cp rank 1": lambda: attend(routing="ring" if odd else "auto"),
        "routing='all'": lambda: attend(routing="all" if odd else "auto"),
        "init_device_mesh(device_type": lambda: attend(layout=flat, group=dist.group.WORLD),
        "make the Layout with ulysses_size": lambda: attend(layout=Layout("zigzag", 4 * size, size)),
        "ring x ulysses; make the Layout with": lambda: Layout("zigzag", 8, size, group=mesh),
        "hash of tokens differs": lambda: shard_batch({"tokens": torch.arange(16)[None] + odd}, group=mesh),
    }
    texts = {}
    for name, call in cases.items():
        start = time.monotonic()
        with pytest.raises(ValueError) as caught:
            call()
        texts[name] = str(caught.value)
        assert name in texts[name] and time.monotonic() - start < 20, texts[name]
    everyone = [None] * size
    dist.all_gather_object(everyone, texts)
    assert everyone == [everyone[0]] * size


def _every_case(rank, world_size):
    for ring, degree in FACTORS[world_size]:
        mesh = make_mesh(1, world_size, _device(), degree)
        mesh = mesh["ring", "ulysses"] if degree > 1 else dist.init_device_mesh(_device(), (ring, 1))
        assert (ranks_of(mesh).rank, ranks_of(mesh).size) == (rank, world_size)
        _equals_loopback(rank, mesh, ring, degree)
        if world_size == 4 and _device() == "cpu":
            _by_name_also_compiled(rank, mesh, ring, degree)
            _batches_and_shards(rank, mesh, ring, degree)
            if degree > 1:
                _all_ranks_raise_the_same(rank, mesh, ring, degree)


@pytest.mark.parametrize("world_size", (4, 6))
def test_processes_on_a_mesh_equal_one_process_bitwise(world_size):
    check_ranks(_every_case, world_size, timeout_s=115)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_ranks_on_a_mesh_also_on_one_card_equal_one_process_bitwise():
    check_ranks(_every_case, 4, timeout_s=115, backend="nccl")


def _loses_its_peer(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (1, 2))
    layout = Layout("zigzag", 24, 1, ulysses_size=2, group=mesh)
    inputs = _local(make_inputs(24), layout, rank)
    for number in range(2):
        if (rank, number) == (1, 1):
            os._exit(3)
        ring_attention(inputs.q, inputs.k, inputs.v, layout=layout, group=mesh, kernel="reference")


def test_when_a_peer_is_lost_the_error_names_the_all_to_all_and_who_waited():
    outcomes = run_ranks(_loses_its_peer, 2, timeout_s=60, group_timeout_s=20.0)
    assert outcomes[1].exitcode == 3 and outcomes[0].exitcode not in (0, None), outcomes[0]
    said = outcomes[0].error
    assert "Ulysses rank 0 (global rank 0), ulysses forward call 1" in said and "all-to-all of heads over 2 Ulysses ranks" in said


def _meshes_side_by_side(rank, world_size):
    """dp x ring x ulysses: two sequences, each on two ranks, with heads or rows apart."""
    for degree in (1, 2):
        mesh = make_mesh(2, 2, "cpu", degree)
        axes = mesh["cp"] if degree == 1 else mesh["ring", "ulysses"]
        inputs = make_inputs(13, seed=rank // 2)
        layout = Layout("zigzag", 13, 2 // degree, ulysses_size=degree)
        whole = run(simulate, inputs, cp_size=2 // degree, layout=layout, kernel="reference")
        ours = run(ring_attention, _local(inputs, layout, rank % 2), layout=layout, group=axes, kernel="reference")
        own = {key: shard(x, layout, rank=rank % 2, dim=2 if key == "lse" else 1) for key, x in whole.items()}
        assert not differing(ours, own)


def test_meshes_of_one_job_do_not_meet():
    check_ranks(_meshes_side_by_side, 4, timeout_s=100)
