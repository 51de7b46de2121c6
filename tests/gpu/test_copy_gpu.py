"""exchange="copy" on GPUs: signals under random delays, the matrix with the bits of loopback, what is refused, a lost peer.

Ranks that share one card stand in for several cards where there is one: torch allows that on request, and then memory, words and
waits are as real, only the link is missing.
"""
import os
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask, ring_attention, shard, simulate
from ringflash.kernels.dispatch import unavailable
from ringflash.launch import check_signals
from ringflash.launch.check_cells import matrix
from ringflash.launch.check_judge import Judge, loopback_cell
from ringflash.launch.check_ring import run_ring
from ringflash.launch.check_spawn import RingFailure
from ringflash.launch.check_spawn import run_ranks as spawn
from ringflash.ring import watchdog
from ringflash.ring.copy_engine import CopyExchange
from ringflash.ring.exchange import record_traffic
from ringflash.tests.support.distributed import check_ranks, run_ranks
from ringflash.tests.support.ring_cases import LAYOUTS, Inputs, differing, make_inputs, masks, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
              pytest.mark.timeout(600)]
NUM_CARDS = torch.cuda.device_count()
without_cards = pytest.mark.skipif(NUM_CARDS >= 4, reason="four ranks have a card each")


def several_cards(test):
    return pytest.mark.multigpu(pytest.mark.skipif(NUM_CARDS < 2, reason="needs two CUDA devices")(test))


def share_a_card(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def ring_matches_loopback(num_processes):
    cells = matrix(("triton",), ("bf16",), cp_sizes=(num_processes,), seq_lens=(5, 389), head_dims=(64,), diagonal=True)
    judge = Judge("cuda")
    results = run_ring(cells, num_processes, device_type="cuda", delay_ms=2.0, timeout_s=500, exchange="copy")
    verdicts = [judge.judge(cell, lambda: result, same_as=lambda: loopback_cell(cell, "cuda"))
                for cell, result in zip(cells, results)]
    bad = [f"{v.cell}: {v.why()}" for v in verdicts if not v.ok]
    assert verdicts and not bad, "\n".join(bad)


def stress(num_processes, steps, without=None):
    found = spawn(check_signals.stress, num_processes, steps, 200.0, without, device_type="cuda", timeout_s=500)
    assert all(one["steps"] >= steps for one in found)
    return sum(one["wrong"] for one in found)


@several_cards
def test_ten_thousand_steps_with_random_delays_give_no_stale_or_torn_block():
    assert stress(NUM_CARDS, 10_000) == 0


@several_cards
@pytest.mark.parametrize("without", ["free", "arrived"])
def test_the_stress_finds_what_a_missing_wait_breaks(without):
    assert stress(NUM_CARDS, 500, without) > 0


@several_cards
def test_ranks_on_a_card_each_have_the_bits_of_loopback():
    ring_matches_loopback(NUM_CARDS)


def _q_side_equals_loopback(rank, world_size, kernel):
    for number, (name, mask) in enumerate(masks(389).items()):
        layout = Layout(LAYOUTS[number % 3], 389, world_size, Mask(**mask), group=dist.group.WORLD)
        inputs = make_inputs(389, heads=4, kv_heads=(4, 2)[number % 2], head_dim=64, dtype=torch.bfloat16, seed=number).to("cuda")
        options = dict(kernel=kernel, rotate="q", deterministic=True)
        whole = run(simulate, inputs, cp_size=world_size, layout=layout.kind, **mask, **options)
        local = Inputs(*(shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)),
                       shard(inputs.dlse, layout, rank=rank, dim=2))
        with record_traffic() as log:
            ours = run(ring_attention, local, layout=layout, group=dist.group.WORLD, exchange="copy", **options)
        own = {name: shard(x, layout, rank=rank, dim=2 if name == "lse" else 1) for name, x in whole.items()}
        assert not differing(ours, own), name
        assert {posted.message.kind for posted in log if posted.pass_ == "backward"} <= {"q", "dq"}


@several_cards
@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_the_q_side_rotates_over_copies_with_the_bits_of_loopback(kernel):
    if reason := unavailable(kernel, device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=64):
        pytest.skip(f"{kernel}: {reason}")
    check_ranks(_q_side_equals_loopback, NUM_CARDS, kernel, timeout_s=200, backend="nccl")


@without_cards
def test_four_ranks_that_share_a_card_have_the_bits_of_loopback(monkeypatch):
    share_a_card(monkeypatch)
    ring_matches_loopback(4)


@without_cards
def test_ranks_that_share_a_card_without_leave_are_refused_by_name_and_auto_takes_nccl():
    cells = matrix(("triton",), ("bf16",), cp_sizes=(4,), seq_lens=(5,), head_dims=(64,), masks=("causal",),
                   layouts=("zigzag",), ratios=(1,))[:1]
    with pytest.raises(RingFailure, match="exchange='copy'.*share one device.*use exchange='nccl'"):
        run_ring(cells, 4, device_type="cuda", timeout_s=200, exchange="copy")
    assert len(run_ring(cells, 4, device_type="cuda", timeout_s=200, exchange="auto")) == 1


def _loses_a_rank(rank, world_size, how):
    if how != "implied":
        watchdog.start(5.0, dist.distributed_c10d._get_default_store().clone(), poll_s=0.2)
    layout = Layout("zigzag", 256, world_size, group=dist.group.WORLD)
    q, k, v = (torch.randn(1, 256 // world_size, heads, 64, device="cuda", requires_grad=True) for heads in (4, 2, 2))
    plain = CopyExchange.post

    def post(self, step, sends, recvs):
        if rank == 1 and self._pass == "backward" and self._call == 1 and step == 0:
            print(f"lost at {time.time()}", file=sys.stderr, flush=True)
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return plain(self, step, sends, recvs)

    CopyExchange.post = post
    for _ in range(3):
        out = ring_attention(q, k, v, layout=layout, group=dist.group.WORLD, kernel="reference", exchange="copy")
        out.square().sum().backward()
        torch.cuda.synchronize()


@several_cards
@pytest.mark.parametrize("how", ["killed", "asleep", "implied"])
def test_when_a_rank_is_lost_the_other_ends_with_an_error_that_names_the_hop(how):
    """implied: nobody started a watchdog, so the group's timeout counts, as it would over NCCL."""
    began = time.time()
    lost, gone = run_ranks(_loses_a_rank, 2, how, timeout_s=60, backend="nccl", group_timeout_s=8.0 if how == "implied" else 60.0)
    lost_after_s = float(re.search(r"lost at ([0-9.]+)", gone.stderr)[1]) - began
    # The timeout (5 s; implied: 8), the watchdog's poll, and what it waits for the others' last words and its own recordings.
    assert lost.seconds - lost_after_s < (8.0 if how == "implied" else 5.0) + 10.0
    assert lost.exitcode == watchdog.EXIT_CODE, str(lost)
    assert "cp rank 0 (global rank 0), backward call 1, step 0" in lost.stderr
    assert "receiving kv of cp rank 1 from cp rank 1 (global rank 1)" in lost.stderr
