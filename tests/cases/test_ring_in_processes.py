"""What only real processes show: recomputed blocks whose collectives must not pair with another block's, ranks with other data,
a model that compiles once for many batches on a ring. One spawn, many cases."""
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ringflash import Layout, Mask, ring_attention, shard, shard_batch
from ringflash.data import PackedDataset
from ringflash.ring import exchange
from ringflash.tests.support.distributed import check_ranks, run_ranks
from ringflash.tests.support.ring_cases import make_inputs

SIZE = 3


def _blocks_that_are_recomputed_give_the_same_bits(rank):
    """Three blocks, each checkpointed by itself, by name (each call compares its arguments, also when it is recomputed)."""
    masks = (Mask(), Mask(window_size=(4, 0)), Mask(causal=False))
    layout = Layout("zigzag", 8 * SIZE, SIZE)
    inputs = make_inputs(8 * SIZE, head_dim=16)
    local = [shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]

    def block(q, k, v, mask):
        return ring_attention(q, k, v, mask=mask, layout="zigzag", group=dist.group.WORLD, kernel="cpu", deterministic=True)

    results, calls = [], []
    for reentrant in (None, False, True):
        leaves = [x.clone().requires_grad_() for x in local[:3]]
        out = leaves[0]
        with exchange.record_traffic() as log:
            for mask in masks:
                if reentrant is None:
                    out = block(out, *leaves[1:], mask)
                else:
                    out = checkpoint(block, out, *leaves[1:], mask, use_reentrant=reentrant)
            out.backward(local[3])                          # the reentrant kind takes no torch.autograd.grad
            results.append([out.detach(), *(x.grad for x in leaves)])
        calls.append(sum(posted.pass_ == "forward" for posted in log))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other))
    assert calls[1] == calls[2] == 2 * calls[0], "a block was not recomputed"


def _ranks_that_read_another_text_or_seed_are_told(rank):
    tokens, starts = torch.arange(400).numpy(), [0, 13, 90, 400]
    for differing in ({"seed": rank // 2}, {"content": f"text {rank // 2}"}):
        dataset = PackedDataset(tokens, starts, 40, **differing)
        batch = dataset.batch(0, 0, 0, num_micro_batches=1, dp_size=1)
        with pytest.raises(ValueError) as caught:
            shard_batch(batch, "zigzag", group=dist.group.WORLD)
        assert "hash of tokens differs" in str(caught.value) and "on cp rank 2" in str(caught.value)
    same = PackedDataset(tokens, starts, 40, seed=5).batch(0, 0, 0, num_micro_batches=1, dp_size=1)
    assert shard_batch(same, "zigzag", group=dist.group.WORLD).layout.is_agreed


def _the_first_call_on_a_group_compares_what_a_token_does_not_know(rank):
    """gloo completes a receive of fewer bytes than it awaits: rank 1 would compute on what its buffer held before."""
    layout = Layout("contiguous", 8 * SIZE, SIZE, group=dist.group.WORLD)
    inputs = make_inputs(8 * SIZE)
    q, k, v = (shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v))
    odd = {"q.dtype": lambda: (q.half(), k.half(), v.half()), "k [B, Hkv, D]": lambda: (q, k[:, :, :1], v[:, :, :1])}
    for field, differing in odd.items():
        group = dist.new_group(list(range(SIZE)))
        with pytest.raises(ValueError, match="^ring_attention: .* differs: .*on cp rank 0; .*on cp ranks 1, 2") as caught:
            ring_attention(*(differing() if rank == 0 else (q, k, v)), layout=layout, group=group, kernel="reference")
        assert field in str(caught.value)
        ring_attention(q, k, v, layout=layout, group=group, kernel="reference")


def _batches_of_other_documents_compile_at_most_twice(rank):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v, layout: ring_attention(q, k, v, layout=layout, group=dist.group.WORLD, kernel="reference"),
        backend=counter, fullgraph=True)
    inputs = make_inputs(24)
    for number in range(8):
        ends = [0, *range(1, 2 + number % 5), 7 + number % 11, 24]
        batch = shard_batch({"tokens": torch.arange(24)[None], "cu_seqlens": ends}, "zigzag", group=dist.group.WORLD)
        leaves = [shard(x, batch.layout, rank=rank).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = compiled(*leaves, batch.layout)
        plain = ring_attention(*leaves, layout=batch.layout, group=dist.group.WORLD, kernel="reference")
        assert torch.equal(out, plain)
        dout = shard(inputs.dout, batch.layout, rank=rank)
        for one, other in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(plain, leaves, dout)):
            assert torch.equal(one, other)
    assert counter.frame_count <= 2


def _all(rank, world_size):
    _blocks_that_are_recomputed_give_the_same_bits(rank)
    _ranks_that_read_another_text_or_seed_are_told(rank)
    _the_first_call_on_a_group_compares_what_a_token_does_not_know(rank)
    _batches_of_other_documents_compile_at_most_twice(rank)


def test_three_processes_recompute_compare_batches_and_compile_once():
    check_ranks(_all, SIZE, timeout_s=110)


def _reads_fewer_rows_than_agreed(rank, world_size):
    layout = Layout("zigzag", 16, world_size, group=dist.group.WORLD)
    inputs = make_inputs(8)
    k = inputs.k[:, :7] if rank == 1 else inputs.k
    ring_attention(inputs.q, k, inputs.v[:, : k.shape[1]], layout=layout, group=dist.group.WORLD, kernel="reference")


def test_after_an_agreement_a_rank_that_refuses_its_own_tensors_ends_the_others_too():
    outcomes = run_ranks(_reads_fewer_rows_than_agreed, 2, timeout_s=60)
    assert "k: 7 local rows on cp rank 1" in outcomes[1].error and "gives it 8" in outcomes[1].error
    assert all(outcome.exitcode not in (0, None) and outcome.seconds < 45 for outcome in outcomes)
