"""The real ring over gloo: one spawn per world size, many cases each."""
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ringflash import Layout, Mask, ring_attention, shard, shard_batch, simulate, unshard
from ringflash.ring import exchange, watchdog
from ringflash.ring.plan import build_plan
from ringflash.tests.support.distributed import check_ranks, run_ranks
from ringflash.tests.support.ring_cases import LAYOUTS, Inputs, differing, make_inputs, masks, run


def _device():
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _kernels():
    return ("reference", "triton" if _device() == "cuda" else "cpu")


def _local(inputs, layout, rank):
    parts = [shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    return Inputs(*parts, shard(inputs.dlse, layout, rank=rank, dim=2), inputs.sinks)


def _own(results, layout, rank):
    return {name: shard(x, layout, rank=rank, dim=2 if name == "lse" else 1) for name, x in results.items()}


def _with_random_delays(seed):
    clock, plain = random.Random(seed), exchange.DistributedExchange.post

    def post(self, step, sends, recvs):
        time.sleep(clock.random() * 0.004)
        return plain(self, step, sends, recvs)

    exchange.DistributedExchange.post = post


def _equals_loopback(rank, world_size):
    """Every layout and mask, even and uneven shards, by value and by name: bitwise what one process computes."""
    for row, kind in enumerate(LAYOUTS):
        for column, name in enumerate(masks(1)):            # every layout with every mask; lengths and kernels in turn
            seq_len = (29, 8 * world_size, 3)[(row + column) % 3]
            kernel = _kernels()[column % 2]
            mask = masks(seq_len)[name]
            layout = Layout(kind, seq_len, world_size, Mask(**mask), group=dist.group.WORLD)
            inputs = make_inputs(seq_len, dtype=torch.bfloat16, head_dim=16).to(_device())
            whole = run(simulate, inputs, cp_size=world_size, layout=kind, kernel=kernel, **mask)
            ours = run(ring_attention, _local(inputs, layout, rank), layout=layout, group=dist.group.WORLD, kernel=kernel)
            assert not differing(ours, _own(whole, layout, rank)), (kernel, kind, seq_len, name)
    inputs = make_inputs(8 * world_size, batch=2).to(_device())
    layout = Layout("striped", 8 * world_size, world_size)
    ours = run(ring_attention, _local(inputs, layout, rank), layout="striped", window_size=(5, 0), group=dist.group.WORLD,
               kernel="reference", exchange=dist.get_backend())
    whole = run(simulate, inputs, cp_size=world_size, layout="striped", window_size=(5, 0), kernel="reference")
    assert not differing(ours, _own(whole, layout, rank))


def _lengths_differ(rank, world_size):
    inputs = make_inputs(4 * world_size, seq_len_k=6 * world_size).to(_device())
    layout, layout_k = Layout("zigzag", 4 * world_size, world_size), Layout("contiguous", 6 * world_size, world_size)
    whole = run(simulate, inputs, cp_size=world_size, layout=layout, layout_k=layout_k, kernel="reference")
    local = Inputs(*(shard(x, y, rank=rank) for x, y in ((inputs.q, layout), (inputs.k, layout_k), (inputs.v, layout_k),
                                                         (inputs.dout, layout))), shard(inputs.dlse, layout, rank=rank, dim=2))
    for named in ("contiguous", layout_k):
        ours = run(ring_attention, local, layout="zigzag", layout_k=named, group=dist.group.WORLD, kernel="reference")
        for name, x in whole.items():
            own = shard(x, layout_k if name in ("dk", "dv") else layout, rank=rank, dim=2 if name == "lse" else 1)
            assert torch.equal(ours[name], own), name


def _sinks_softcap_and_wide_values_equal_loopback(rank, world_size):
    """The gradient of the replicated sinks: each rank has its rows' share, and their sum is the whole."""
    for number, (name, mask) in enumerate(masks(29).items()):
        seq_len = (29, 3)[number % 2]
        layout = Layout(LAYOUTS[number % 3], seq_len, world_size, Mask(**masks(seq_len)[name]), group=dist.group.WORLD)
        inputs = make_inputs(seq_len, dtype=torch.bfloat16, head_dim_v=(4, 12)[number % 2], sinks=torch.float32).to(_device())
        options = dict(kernel=_kernels()[number % 2], softcap=(0.0, 1.5)[number % 2])
        whole = run(simulate, inputs, cp_size=world_size, layout=layout.kind, **masks(seq_len)[name], **options)
        ours = run(ring_attention, _local(inputs, layout, rank), layout=layout, group=dist.group.WORLD, **options)
        share, expected = ours.pop("dsinks"), whole.pop("dsinks")
        assert not differing(ours, _own(whole, layout, rank)), name
        dist.all_reduce(share)
        torch.testing.assert_close(share, expected, rtol=1e-5, atol=1e-6)
    layout = Layout("zigzag", 4 * world_size, world_size)
    inputs = _local(make_inputs(4 * world_size, sinks=torch.bfloat16).to(_device()), layout, rank)
    assert run(ring_attention, inputs, group=dist.group.WORLD, kernel="reference")["dsinks"].dtype == torch.bfloat16


def _bytes_are_the_plans(rank, world_size):
    inputs = make_inputs(40, heads=8, kv_heads=2, head_dim=16, dtype=torch.bfloat16).to(_device())
    for kind in LAYOUTS:
        layout = Layout(kind, 40, world_size, group=dist.group.WORLD)
        with exchange.record_traffic() as log:
            run(ring_attention, _local(inputs, layout, rank), layout=layout, group=dist.group.WORLD, kernel="reference", rotate="kv")
        plan = build_plan(Mask(), layout)
        for pass_ in ("forward", "backward"):
            wanted = [m for m in plan.messages(pass_) if m.src == rank]
            counted = [posted for posted in log if posted.pass_ == pass_]
            assert sorted(posted.message for posted in counted) == sorted(wanted)
            assert sum(posted.num_bytes for posted in counted) == sum(
                m.num_rows * 2 * 2 * 16 * (2 if m.kind == "kv" else 4) for m in wanted)


def _rings_side_by_side(rank, world_size):
    """Two rings in one job, of contiguous and of strided ranks, also as the axes of a mesh."""
    if world_size != 4:
        return
    mesh = dist.init_device_mesh(_device(), (2, 2), mesh_dim_names=("dp", "cp"))
    for members, axis in ((((0, 1), (2, 3)), "cp"), (((0, 2), (1, 3)), "dp")):
        groups = [dist.new_group(list(ranks)) for ranks in members]
        index = next(i for i, ranks in enumerate(members) if rank in ranks)
        inputs = make_inputs(14, seed=index).to(_device())                # each ring has data of its own
        layout = Layout("zigzag", 14, 2)
        whole = run(simulate, inputs, cp_size=2, kernel="reference")
        cp_rank = members[index].index(rank)
        for group in (groups[index], mesh[axis]):
            ours = run(ring_attention, _local(inputs, layout, cp_rank), layout=layout, group=group, kernel="reference")
            assert not differing(ours, _own(whole, layout, cp_rank)), (members, group)


def _checkpointing_is_bitwise(rank, world_size):
    layout = Layout("zigzag", 23, world_size, (Mask(), Mask(window_size=(4, 0))), group=dist.group.WORLD)
    inputs = _local(make_inputs(23, head_dim=16).to(_device()), layout, rank)

    def layers(q, k, v):
        for mask in layout.masks:
            q = ring_attention(q, k, v, layout=layout, mask=mask, group=dist.group.WORLD, kernel=_kernels()[1],
                               deterministic=True)
        return q

    grads = []
    for call in (layers, lambda *x: checkpoint(layers, *x, use_reentrant=False)):
        q, k, v = inputs.fresh()
        call(q, k, v).backward(inputs.dout)
        grads.append({"dq": q.grad, "dk": k.grad, "dv": v.grad})
    assert not differing(*grads)


def _compiled_equals_eager(rank, world_size):
    if world_size != 2:
        return
    compiled = torch.compile(lambda q, k, v, layout: ring_attention(q, k, v, layout=layout, group=dist.group.WORLD, kernel="cpu"),
                             backend="aot_eager", fullgraph=True)
    for ends in ([0, 5, 16], [0, 3, 9, 16]):
        layout = Layout("zigzag", 16, world_size, Mask(cu_seqlens=ends), group=dist.group.WORLD)
        local = _local(make_inputs(16), layout, rank)
        results = []
        for call in (compiled, lambda q, k, v, layout: ring_attention(q, k, v, layout=layout, group=dist.group.WORLD,
                                                                             kernel="cpu")):
            q, k, v = local.fresh()
            out = call(q, k, v, layout)
            out.backward(local.dout)
            results.append({"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad})
        assert not differing(*results)


def _unshard_inverts_shard(rank, world_size):
    for kind in LAYOUTS:
        for seq_len in (11, 2):
            layout = Layout(kind, seq_len, world_size)
            x = torch.randn(2, seq_len, 3, generator=torch.Generator().manual_seed(1)).to(_device())
            local = shard(x, layout, group=dist.group.WORLD).requires_grad_()
            whole = unshard(local, layout, group=dist.group.WORLD)
            assert torch.equal(whole, x)
            weights = torch.randn(2, seq_len, 3, generator=torch.Generator().manual_seed(2)).to(_device())
            (whole * weights * (rank + 1)).sum().backward()
            total = world_size * (world_size + 1) / 2
            torch.testing.assert_close(local.grad, shard(weights * total, layout, rank=rank))
            assert torch.equal(unshard(shard(x.mT, layout, rank=rank, dim=2), layout, group=dist.group.WORLD, dim=2), x.mT)


def _batches_agree(rank, world_size):
    tokens = torch.arange(8 * world_size)[None]
    batch = {"tokens": tokens, "cu_seqlens": [0, 3, 8 * world_size]}
    sharded = shard_batch(batch, "zigzag", group=dist.group.WORLD)
    assert sharded.num_valid == 8 * world_size - 2
    assert sharded.layout.is_agreed == (world_size > 1)
    alone = shard_batch(batch, Layout("zigzag", 8 * world_size, world_size), rank=rank)
    assert torch.equal(sharded.labels, alone.labels) and torch.equal(sharded.tokens, alone.tokens)
    labels = tokens.clone()
    labels[:, ::3] = -100
    counted = [shard_batch({"tokens": tokens, "labels": labels}, **where).num_valid for where in (
        {"layout": "striped", "group": dist.group.WORLD},
        {"layout": Layout("striped", 8 * world_size, world_size), "rank": rank})]
    assert counted[0] == counted[1] == int((labels[:, 1:] != -100).sum())
    gathered = unshard(sharded.positions, sharded.layout, group=dist.group.WORLD, dim=0)
    assert torch.equal(gathered, torch.arange(8 * world_size))


def _disagreements_raise_the_same_error_everywhere(rank, world_size):
    if world_size == 1:
        return
    odd = rank == world_size - 1
    base = make_inputs(4)

    def attend(q=base.q, k=base.k, v=base.v, **options):
        return ring_attention(q, k, v, group=dist.group.WORLD, kernel="reference", **options)

    layout = Layout("zigzag", 4 * world_size, world_size)
    tokens = torch.arange(16)[None]
    cases = {
        "shape": lambda: attend(*(x[:, :3] if odd else x for x in (base.q, base.k, base.v))),
        "heads": lambda: attend(q=base.q[:, :, :2] if odd else base.q),
        "dtype": lambda: attend(*(x.bfloat16() if odd else x for x in (base.q, base.k, base.v))),
        "mask": lambda: attend(window_size=(2, 0) if odd else (3, 0)),
        "documents": lambda: attend(layout=layout, mask=Mask()) if not odd else attend(cu_seqlens=[0, 4 * world_size]),
        "layout": lambda: attend(layout="striped" if odd else "zigzag"),
        "kernel": lambda: ring_attention(base.q, base.k, base.v, group=dist.group.WORLD, kernel="cpu" if odd else "reference"),
        "kernel unknown": lambda: ring_attention(base.q, base.k, base.v, group=dist.group.WORLD,
                                                 kernel="fast" if odd else "reference"),
        "kernel absent": lambda: ring_attention(base.q, base.k, base.v, group=dist.group.WORLD, kernel="hopper"),
        "scale": lambda: attend(softmax_scale=0.5 if odd else None),
        "head_dim of v": lambda: attend(v=base.v[..., :4] if odd else base.v),
        "sinks": lambda: attend(sinks=torch.zeros(4) if odd else None),
        "sinks refused": lambda: attend(sinks=torch.zeros(3 if odd else 4)),
        "sinks dtype": lambda: attend(sinks=torch.zeros(4, dtype=torch.half if odd else torch.float)),
        "not a tensor": lambda: attend(q=None if odd else base.q),
        "gradients": lambda: attend(*(x.detach().requires_grad_(not odd) for x in (base.q, base.k, base.v))),
        "softcap": lambda: attend(softcap=1.0 if odd else 2.0),
        "softcap refused": lambda: attend(softcap=-1.0 if odd else 0.0),
        "exchange": lambda: attend(exchange="nccl"),
        "rows": lambda: attend(*(x[:, :3] if odd else x for x in (base.q, base.k, base.v)), layout=layout),
        "Layout": lambda: Layout("zigzag", 8 if odd else 9, world_size, group=dist.group.WORLD),
        "Layout refused": lambda: Layout("zigzag", 8, world_size, Mask(cu_seqlens=[0, 9] if odd else [0, 8]),
                                         group=dist.group.WORLD),
        "Layout agree": lambda: Layout("zigzag", 8, world_size, group=dist.group.WORLD,
                                       agree={"dtype": torch.half if odd else torch.bfloat16}),
        "batch": lambda: shard_batch({"tokens": tokens + 1 if odd else tokens}, group=dist.group.WORLD),
        "batch refused": lambda: shard_batch({"tokens": tokens, "cu_seqlens": [1, 16] if odd else [0, 16]},
                                             group=dist.group.WORLD),
    }
    texts = {}
    for name, call in cases.items():
        start = time.monotonic()
        try:
            call()
            texts[name] = "no error"
        except Exception as error:  # whatever it is, all ranks must have the same one
            texts[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - start < 20
    everyone = [None] * world_size
    dist.all_gather_object(everyone, texts)
    for name in cases:
        said = {texts[name] for texts in everyone}
        assert len(said) == 1 and "no error" not in said, (name, said)
    last = f"cp rank{'s' if world_size == 1 else ''} {world_size - 1}"
    assert "q.dtype differs: torch.float32 on cp rank" in texts["dtype"] and f"torch.bfloat16 on {last}" in texts["dtype"]
    assert texts["kernel absent"].startswith("RuntimeError")
    assert "softcap differs: 2.0 on cp rank" in texts["softcap"] and f"1.0 on {last}" in texts["softcap"]
    assert "sinks differs: none on cp rank" in texts["sinks"] and f"(4,) torch.float32 on {last}" in texts["sinks"]
    assert f"{last}: sinks: shape (3,)" in texts["sinks refused"] and f"{last}: softcap=-1.0" in texts["softcap refused"]
    assert "v [Dv] differs: 8 on cp rank" in texts["head_dim of v"] and f"4 on {last}" in texts["head_dim of v"]
    assert "valid: auto" in texts["kernel unknown"] and last in texts["kernel unknown"]
    assert "needs gradients differs: True on cp rank" in texts["gradients"]
    assert "hash of tokens differs" in texts["batch"]
    assert "must start at 0" in texts["batch refused"]


_CASES = (_equals_loopback, _lengths_differ, _sinks_softcap_and_wide_values_equal_loopback, _bytes_are_the_plans,
          _rings_side_by_side, _checkpointing_is_bitwise, _compiled_equals_eager, _unshard_inverts_shard, _batches_agree,
          _disagreements_raise_the_same_error_everywhere)


_NCCL_CASES = (_equals_loopback, _lengths_differ, _sinks_softcap_and_wide_values_equal_loopback, _bytes_are_the_plans,
               _rings_side_by_side, _checkpointing_is_bitwise, _unshard_inverts_shard)


def _all_cases(rank, world_size):
    _with_random_delays(rank)
    for case in _CASES if _device() == "cpu" else _NCCL_CASES:
        case(rank, world_size)


@pytest.mark.parametrize("world_size", (1, 2, 3, 4))
def test_a_ring_of_processes_passes_every_case_and_equals_one_process_bitwise(world_size):
    check_ranks(_all_cases, world_size, timeout_s=110)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("world_size", (2, 4))
def test_a_nccl_ring_also_on_one_card_equals_one_process_bitwise(world_size):
    check_ranks(_all_cases, world_size, timeout_s=115, backend="nccl")


def _loses_a_rank(rank, world_size, how):
    watchdog.start(4.0, dist.distributed_c10d._get_default_store().clone(), poll_s=0.2)
    layout = Layout("zigzag", 24, world_size, group=dist.group.WORLD)
    inputs = _local(make_inputs(24), layout, rank)
    plain = exchange.DistributedExchange.post

    def post(self, step, sends, recvs):
        if rank == 1 and step == 1 and self._call == 1:     # the second call, in its second step
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return plain(self, step, sends, recvs)

    exchange.DistributedExchange.post = post
    for _ in range(3):
        run(ring_attention, inputs, layout=layout, group=dist.group.WORLD, kernel="reference")


@pytest.mark.parametrize("how", ("killed", "asleep"))
def test_when_a_rank_is_lost_the_others_end_with_an_error_that_names_the_hop(how):
    outcomes = run_ranks(_loses_a_rank, 3, how, timeout_s=60)
    others = [outcomes[0], outcomes[2]]
    assert all(outcome.exitcode not in (0, None) for outcome in others), "\n".join(map(str, outcomes))
    said = [outcome.error + outcome.stderr for outcome in others]
    assert all("forward call 1, step 1" in text or "forward call 1, step 0" in text or "backward call" in text
               for text in said), said
    assert any("cp rank 1 (global rank 1)" in text and "step 1" in text and "kv of cp rank" in text for text in said), said
    assert max(outcome.seconds for outcome in others) < 45
