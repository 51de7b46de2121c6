"""The Q side rotating on a GPU: within budget with every kernel, the same bits from run to run, real NCCL ranks equal one process."""
import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask, ring_attention, shard, simulate
from ringflash.kernels.dispatch import unavailable
from ringflash.ring.exchange import record_traffic
from ringflash.tests.support.distributed import check_ranks
from ringflash.tests.support.ring_cases import LAYOUTS, Inputs, differing, judge, make_inputs, masks, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
              pytest.mark.timeout(300)]


def kernel_for(name: str, dtype: torch.dtype, head_dim: int) -> str:
    reason = unavailable(name, device=torch.device("cuda"), dtype=dtype, head_dim=head_dim)
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name


@pytest.mark.parametrize("kernel", ("triton", "hopper"))
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_every_layout_and_mask_is_within_budget(dtype, head_dim, kernel):
    kernel, failures = kernel_for(kernel, dtype, head_dim), []
    for cp_size in (1, 2, 3, 8):
        for number, (name, mask) in enumerate(masks(389).items()):
            layout = LAYOUTS[(number + cp_size) % 3]
            inputs = make_inputs(389, heads=8, kv_heads=(1, 2, 8)[number % 3], head_dim=head_dim, dtype=dtype,
                                 sinks=(None, torch.float32)[number % 2], seed=number).to("cuda")
            ours = run(simulate, inputs, cp_size=cp_size, layout=layout, kernel=kernel, rotate="q", **mask)
            failures += [(cp_size, layout, name, str(verdict)) for verdict in judge(ours, inputs, **mask)]
    assert not failures


@pytest.mark.parametrize("heads, head_dim, head_dim_v", ((6, 80, 80), (3, 96, 48), (2, 24, 40), (4, 256, 256)))
def test_rows_of_any_width_are_read_where_they_lie(heads, head_dim, head_dim_v):
    inputs = make_inputs(259, heads=heads, kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype=torch.bfloat16).to("cuda")
    ours = run(simulate, inputs, cp_size=3, kernel="triton", rotate="q", softcap=2.0)
    assert not judge(ours, inputs, softcap=2.0)


@pytest.mark.parametrize("kernel", ("triton", "hopper"))
def test_deterministic_gradients_repeat_bit_for_bit_and_out_is_that_of_the_other_side(kernel):
    kernel = kernel_for(kernel, torch.bfloat16, 128)
    inputs = make_inputs(1031, heads=8, kv_heads=4, head_dim=128, dtype=torch.bfloat16).to("cuda")
    options = dict(cp_size=4, kernel=kernel, deterministic=True, window_size=(700, 0))
    first = run(simulate, inputs, rotate="q", **options)
    for _ in range(5):
        assert not differing(run(simulate, inputs, rotate="q", **options), first)
    other = run(simulate, inputs, rotate="kv", **options)
    assert torch.equal(first["out"], other["out"]) and torch.equal(first["lse"], other["lse"])


def _equals_loopback(rank, world_size):
    for number, (name, mask) in enumerate(masks(389).items()):
        layout = Layout(LAYOUTS[number % 3], 389, world_size, Mask(**mask), group=dist.group.WORLD)
        inputs = make_inputs(389, heads=4, kv_heads=4, head_dim=64, dtype=torch.bfloat16, seed=number).to("cuda")
        options = dict(kernel="triton", rotate=("q", "auto")[number % 2], deterministic=True)
        whole = run(simulate, inputs, cp_size=world_size, layout=layout.kind, **mask, **options)
        local = Inputs(*(shard(x, layout, rank=rank) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)),
                       shard(inputs.dlse, layout, rank=rank, dim=2))
        with record_traffic() as log:
            ours = run(ring_attention, local, layout=layout, group=dist.group.WORLD, **options)
        own = {name: shard(x, layout, rank=rank, dim=2 if name == "lse" else 1) for name, x in whole.items()}
        assert not differing(ours, own), name
        assert {posted.message.kind for posted in log if posted.pass_ == "backward"} <= {"q", "dq"}


@pytest.mark.parametrize("world_size", (2, 4))
def test_nccl_ranks_equal_one_process_bitwise_on_one_card_or_several(world_size):
    check_ranks(_equals_loopback, world_size, timeout_s=200, backend="nccl")
