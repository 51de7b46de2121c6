"""Packed blocks, and which carrier may carry what."""
import datetime

import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, ring_attention
from ringflash.mesh import ranks_of
from ringflash.ring.buffers import Block, BufferPool, locate
from ringflash.ring.exchange import DistributedExchange, check_carrier, check_exchange, group_backends
from ringflash.ring.wires import HeadWire, copy_bits
from ringflash.tests.support.ring_cases import differing, make_inputs, run


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(seconds=20))
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_rows_are_found_where_they_lie_compacted():
    held = ((2, 5), (7, 10), (10, 12))
    assert locate(held, held) == ((0, 8),)
    assert locate(held, ((2, 3),)) == ((0, 1),)
    assert locate(held, ((3, 5), (7, 8))) == ((1, 4),)      # neighbours in the buffer, though not in the shard
    assert locate(held, ((2, 3), (9, 11))) == ((0, 1), (5, 7))
    assert locate(held, ()) == ()
    assert locate(held, ((4, 6),)) is None and locate(held, ((12, 13),)) is None and locate((), ((0, 1),)) is None


def test_a_prefix_is_sent_as_it_lies_and_other_ranges_are_copied():
    pool = BufferPool((1, 1, 4), torch.float32, torch.device("cpu"))
    block = Block(((2, 5), (7, 9)), torch.arange(20.0).reshape(5, 1, 1, 4))
    prefix = block.part(((2, 4),), pool, ("send",))
    assert prefix.data.data_ptr() == block.data.data_ptr() and prefix.data.shape[0] == 2
    apart = block.part(((2, 3), (8, 9)), pool, ("send",))
    assert torch.equal(apart.data, block.data[[0, 4]]) and apart.data.data_ptr() != block.data.data_ptr()
    with pytest.raises(RuntimeError, match="are wanted from a block"):
        block.part(((5, 7),), pool, ("send",))


def test_packed_blocks_split_into_what_was_packed_and_add_by_rows():
    k, v = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 3, 4)
    wire, rows = HeadWire((k, v)), ((1, 2), (4, 6))
    block = Block(rows, wire.pack((k, v), rows, torch.empty(3, *wire.row_shape)))
    for half, whole in zip(wire.split(block.data), (k, v)):
        assert torch.equal(half, whole[:, [1, 4, 5]])
    total = Block(((0, 6),), torch.zeros(6, 2, 3, 8))
    total.add(block)
    total.add(block)
    assert torch.equal(total.data[[1, 4, 5]], 2 * block.data) and not total.data[[0, 2, 3]].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize(("width", "start"), [(8, 0), (8, 8), (8, 4), (8, 1), (5, 0), (3, 1), (16, 2)])
def test_rows_are_copied_to_the_bit_whether_they_consist_of_whole_words_or_not(dtype, width, start):
    bits = torch.randint(0, 256, (3, 4, 24 * dtype.itemsize), dtype=torch.uint8)        # NaNs and infinities among them
    target = torch.zeros_like(bits).view(dtype)[..., 24 - width:]
    source = bits.view(dtype).transpose(0, 1).contiguous().transpose(0, 1)[..., start:start + width]
    copy_bits(target, source)
    assert torch.equal(target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))
    across = source.transpose(1, 2)                         # its last dimension is not the one that lies together
    copy_bits(target.transpose(1, 2).zero_(), across)
    assert torch.equal(target.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))


def test_a_slot_is_one_buffer_of_the_size_that_was_reserved():
    pool = BufferPool((1, 1, 2), torch.float32, torch.device("cpu"))
    pool.reserve(("a",), 5)
    small, large = pool.take(("a",), 2), pool.take(("a",), 5)
    assert small.data_ptr() == large.data_ptr() and (small.shape[0], large.shape[0]) == (2, 5)
    assert pool.take(("b",), 2).data_ptr() != small.data_ptr()


def test_unknown_exchanges_are_refused():
    with pytest.raises(ValueError, match="exchange='mpi'.*auto, nccl, gloo, copy"):
        check_exchange("mpi")


def test_a_carrier_that_cannot_carry_the_tensors_is_refused(group):
    assert group_backends(group)["cpu"] == "gloo"
    check_carrier("auto", group, torch.device("cpu"))
    check_carrier("gloo", group, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="exchange='nccl'.*on cpu.*gloo"):
        check_carrier("nccl", group, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="exchange='copy'.*on cpu.*gloo"):
        check_carrier("copy", group, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="exchange='copy'.*on cuda, which needs a group with nccl"):
        check_carrier("copy", group, torch.device("cuda"))
    with pytest.raises(RuntimeError, match="on cuda, which needs a group with nccl"):
        check_carrier("auto", group, torch.device("cuda"))  # gloo would take them, and fail in the middle
    with pytest.raises(RuntimeError, match="no carrier for tensors on meta"):
        check_carrier("auto", group, torch.device("meta"))


def test_a_step_without_messages_posts_no_batch(group):
    assert DistributedExchange(group, "forward", 0).post(0, [], []) is None


def test_a_group_of_one_rank_or_its_mesh_equals_no_group(group):
    inputs = make_inputs(9)
    expected = run(ring_attention, inputs)
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    for ring in (group, mesh, mesh["cp"]):
        assert not differing(run(ring_attention, inputs, group=ring), expected)
    assert not differing(run(ring_attention, inputs, group=group, layout=Layout("zigzag", 9, 1, group=group)), expected)
    assert not differing(run(ring_attention, inputs, group=dist.init_device_mesh("cpu", (1, 1))), expected)
    with pytest.raises(ValueError, match="the ring is its first axis, ulysses its second"):
        ranks_of(dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("ulysses", "cp")))
    with pytest.raises(ValueError, match="a 3-D DeviceMesh.*must have one axis"):
        ranks_of(dist.init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "ring", "ulysses")))
    with pytest.raises(ValueError, match="cp_size=2.*cp_size=1"):
        ring_attention(inputs.q, inputs.k, inputs.v, group=group, layout=Layout("zigzag", 18, 2))
