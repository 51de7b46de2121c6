"""What the compiler makes of the hopper forward, seen without a GPU: wgmma, spills, and a softmax beside the second product.

A launch's own arguments are compiled for sm_90, so tile table, descriptors and specialisation are those of a run.
"""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from ringflash.kernels import hopper

if hopper.missing_software():
    pytest.skip(hopper.missing_software(), allow_module_level=True)

import triton  # noqa: E402

from ringflash.kernels import hopper_forward, visits  # noqa: E402
from ringflash.kernels.intervals import Intervals  # noqa: E402
from ringflash.tests.support.gluon_compile import build, sass  # noqa: E402

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
SHARED_LIMIT = 227 << 10
# Bytes of spill stores + loads per thread, by triton up to 3.7 and from 3.8 on; absent: none. (head_dim, first, by_sums). At
# D = 256 they are strides of the state, kept aside once per kernel and read once per query tile, none in a loop over keys.
SPILLS = {(256, first, by_sums): (80, 160) for first in (False, True) for by_sums in (False, True)}
SPILLS |= {(64, False, False): (0, 88), (64, False, True): (8, 0)}
WAYS = [(True, True), (True, False), (False, False), (False, True)]  # first, last
BF16, FP16 = torch.bfloat16, torch.float16
QUICK = [(d, BF16, first, last, 0.0, True) for d in (64, 128) for first, last in WAYS[1:]]
QUICK += [(256, BF16, False, False, 0.0, False), (128, FP16, False, True, 0.0, False), (128, BF16, True, True, 30.0, False)]
# All that a launch can ask for: by sums where the tile table says so and p has the range (bf16), else by maxima.
EVERY = [(d, dtype, first, last, cap, hopper_forward.FORWARD_TILES[d].by_sums and dtype == BF16)
         for d in hopper.HEAD_DIMS for dtype in hopper.DTYPES for first, last in WAYS for cap in (0.0, 30.0)]
SLOW = [pytest.param(*variant, marks=pytest.mark.slow) for variant in EVERY if variant not in QUICK]


def launch(head_dim: int, dtype: torch.dtype, first: bool, last: bool, softcap: float, by_sums: bool) -> tuple[dict, dict]:
    """Kernel arguments and options of a visit of 512 rows; k and v as they arrive, as views of one buffer."""
    rows, heads, kv_heads = 512, 4, 2
    q = torch.zeros(1, rows, heads, head_dim, dtype=dtype)
    k, v = torch.zeros(rows, 1, kv_heads, 2 * head_dim, dtype=dtype).transpose(0, 1).split(head_dim, -1)
    start = torch.zeros(rows, dtype=torch.int32)
    intervals = Intervals.from_rows(start, start + rows, rows, "cpu")
    state, lse, counter = torch.zeros(q.shape), torch.zeros(1, heads, rows), torch.zeros(1, dtype=torch.int32)
    tile = replace(hopper_forward.FORWARD_TILES[head_dim], by_sums=by_sums)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hopper_forward.FORWARD_TILES, head_dim, tile)
        _, arguments, options = hopper_forward.forward_launch(
            q, k, v, intervals, counter, state, lse, torch.zeros_like(q) if last else None, 0.125, softcap, first, 132)
    return arguments, options


def exponentials_beside_the_second_product(machine_code: str) -> list[int]:
    """For every wait for the first of two products in flight: how many exponentials stand before the wait for the second."""
    counts, since = [], None
    for line in machine_code.splitlines():
        if re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", line):
            since = 0
        elif re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", line) and since is not None:
            counts.append(since)
            since = None
        elif since is not None and "MUFU.EX2" in line:
            since += 1
    return counts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("head_dim, dtype, first, last, softcap, by_sums", [*QUICK, *SLOW], ids=str)
def test_hopper_forward_uses_wgmma_spills_nothing_and_overlaps_softmax_and_second_product(
    head_dim, dtype, first, last, softcap, by_sums
):
    arguments, options = launch(head_dim, dtype, first, last, softcap, by_sums)
    made = build(hopper_forward.forward_kernel, arguments, options)
    assert made.wgmma > 0 and "mma.sync.aligned.m16n8" not in made.ptx
    assert made.spill_bytes <= SPILLS.get((head_dim, first, by_sums), (0, 0))[TRITON >= (3, 8)]
    assert made.warnings == (), f"ptxas serialised wgmma: {made.warnings}"
    assert made.shared <= SHARED_LIMIT
    assert "cp.async.bulk.tensor" in made.ptx and "cp.async.bulk.tensor.4d.global.shared" in made.ptx
    tile = hopper_forward.FORWARD_TILES[head_dim]
    counts = exponentials_beside_the_second_product(sass(hopper_forward.forward_kernel, arguments, options))
    # Of each consumer first the masked loop, then the one over full tiles; a thread has block_m * block_n / 128 scores. By maxima
    # at D = 64 ptxas gives the overlap up, which three consumers hardly feel (they overlap each other).
    assert len(counts) == 2 * tile.consumers
    if by_sums or head_dim != 64:
        assert min(counts[1::2]) >= tile.block_m * tile.block_n // 128, f"the wait for p v has moved up: {counts}"


@pytest.mark.parametrize("heads, most, section", [
    (8, 3, 2), (8, 8, 8), (8, 100, 8), (32, 28, 16), (16, 6, 4), (11, 10, 6), (7, 3, 3), (5, 0, 1), (1, 4, 1)])
def test_sections_of_heads_are_alike_where_that_does_not_halve_them(heads, most, section):
    assert hopper_forward.even_section(heads, most) == section


def test_operands_are_copied_only_where_the_copy_engine_cannot_address_them():
    x = torch.zeros(2, 40, 3, 64, dtype=BF16)
    for view in (x, x[:, 3:], x[..., 1:, :], x[:1], x.transpose(0, 1)):
        assert visits.loadable(view) is view
    odd = torch.zeros(x.numel() + 1, dtype=BF16)[1:].view(x.shape)
    for view in (odd, x[..., :1].expand(-1, -1, -1, 64), x[:1].expand(2, -1, -1, -1), x.transpose(2, 3)[..., :2, :],
                 torch.zeros(2, 40, 3, 65, dtype=BF16)[..., :-1]):
        copy = visits.loadable(view)
        assert copy is not view and copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, view)


@pytest.mark.parametrize("device, dtype, head_dim, head_dim_v, reason", [
    ("cuda", torch.float32, 128, None, "^dtype torch.float32"), ("cuda", BF16, 96, None, "^head_dim 96"),
    ("cuda", BF16, 128, 64, "^head_dim_v 64"), ("cpu", torch.float32, 96, 64, "^device cpu: .*compute capability 9.0"),
])
def test_hopper_says_what_it_lacks_first_that_it_is_no_gpu(device, dtype, head_dim, head_dim_v, reason):
    assert re.search(reason, hopper.unavailable(torch.device(device), dtype, head_dim, False, head_dim_v))


def test_hopper_says_which_triton_it_needs(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "triton 3.6 or later" in hopper.missing_software()
