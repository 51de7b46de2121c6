"""The triton kernels on a GPU: the interpreter's cases at real sizes, offsets past 2^31 elements, bitwise repeatability."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]
if torch.cuda.is_available():
    from ringflash.kernels import triton_backend, triton_support, triton_tiles
    from ringflash.kernels.intervals import Intervals
    from ringflash.tests.support.triton_cases import BOUNDS, Case, check, run

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LENGTHS = (1, 63, 127, 129, 1000, 2049)
# float32 runs on the general cores and compiles slowly: fewer head dims
HEAD_DIMS = [(d, dtype) for d in (64, 80, 96, 128, 256) for dtype in DTYPES if dtype != torch.float32 or d in (64, 128)]


def case(*lengths: int, **changes) -> Case:
    """16-bit, scale 1/8, two heads on one kv head."""
    return Case(*lengths, **{"head_dim": 128, "dtype": torch.bfloat16, "scale": 0.125, **changes})


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim, dtype", HEAD_DIMS, ids=str)
def test_every_head_dim_and_dtype_keeps_its_budget_at_odd_lengths(head_dim, dtype, deterministic):
    for length in LENGTHS:
        check(triton_backend, case(length, length, head_dim=head_dim, dtype=dtype, deterministic=deterministic), "cuda")


@pytest.mark.parametrize("visits", [1, 3])
@pytest.mark.parametrize("bounds", ["causal", "full", "window", "documents", "gaps", "nothing"])
def test_every_mask_keeps_its_budget_folded_and_whole(bounds, visits):
    assert bounds in BOUNDS
    for lengths in ((1000, 1000), (300, 2049), (2049, 129)):
        for accumulate in (False, True):
            for deterministic in (False, True):
                check(triton_backend, case(*lengths, bounds=bounds, visits=visits, accumulate=accumulate,
                                           deterministic=deterministic), "cuda")


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1), (7, 1), (8, 1), (8, 2)])
def test_grouped_heads_batches_and_strided_views_keep_their_budget(heads, kv_heads, head_dim):
    for strided in (False, True):
        check(triton_backend, case(515, 643, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=2, strided=strided,
                                   visits=2), "cuda")


@pytest.mark.parametrize("softcap, scale", [(0.5, 1.0), (20.0, 0.5), (50.0, 2.0), (50.0, 0.02)])
@pytest.mark.parametrize("head_dim, dtype", [
    (64, torch.float16), (64, torch.float32), (128, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16)], ids=str)
def test_capped_scores_keep_their_budget(head_dim, dtype, softcap, scale):
    for deterministic in (False, True):
        for bounds, sinks, accumulate in (("causal", False, False), ("gaps", True, True)):
            check(triton_backend, case(1000, 1333, head_dim=head_dim, dtype=dtype, softcap=softcap, scale=scale, bounds=bounds,
                                       sinks=sinks, accumulate=accumulate, visits=2, deterministic=deterministic), "cuda")


@pytest.mark.parametrize("head_dim, head_dim_v, dtype", [
    (192, 128, torch.bfloat16), (192, 128, torch.float32), (128, 64, torch.float16), (64, 128, torch.bfloat16),
    (128, 256, torch.bfloat16), (256, 128, torch.float16), (64, 1, torch.bfloat16), (64, 40, torch.float32),
    (40, 64, torch.bfloat16),
], ids=str)
def test_values_have_a_head_dim_of_their_own(head_dim, head_dim_v, dtype):
    for deterministic in (False, True):
        for softcap, strided in ((0.0, False), (20.0, True)):
            check(triton_backend, case(515, 1000, heads=4, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype,
                                       softcap=softcap, strided=strided, visits=2, deterministic=deterministic), "cuda")


@triton.jit
def _tanh_kernel(x, value, slope, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t, s = triton_support.tanh_and_slope(tl.load(x + rows))
    tl.store(value + rows, t)
    tl.store(slope + rows, s)


def test_the_devices_tanh_is_accurate_to_a_few_roundings():
    """exp2 and the division are approximate here (2 ulp each); see Note [Softcap] and the interpreter's test of the same."""
    count = 1 << 20
    x = torch.linspace(0x00800000, 0x42B00000, count, dtype=torch.float64).to(torch.int32).view(torch.float32)
    x[-4:] = torch.tensor([0.0, 0.6, 1e38, float("inf")])
    x = torch.cat([x, -x]).cuda()
    value, slope = torch.empty_like(x), torch.empty_like(x)
    _tanh_kernel[(2 * count // 1024,)](x, value, slope, BLOCK=1024)
    exact = x.double()
    t, s = torch.tanh(exact), 1 / torch.cosh(exact) ** 2
    assert bool(((value - t).abs() <= 10.0 * 2**-24 * t.abs()).all())
    normal = exact.abs() < 43
    assert bool(((slope - s).abs() <= (20 + 2.5 * exact.abs()) * 2**-24 * s)[normal].all())


@pytest.mark.parametrize("head_dim", [4, 20, 33, 64, 128, 256])
def test_pointers_give_what_descriptors_give(head_dim, monkeypatch):
    arch = triton_tiles.arch_of(torch.device("cuda"))
    for (name, width, kind, precision), tile in list(triton_tiles.TILES.items()):
        if name == arch and tile.tma:
            monkeypatch.setitem(triton_tiles.TILES, (name, width, kind, precision), replace(tile, tma=False))
    for deterministic in (False, True):
        check(triton_backend, case(1000, 777, head_dim=head_dim, visits=2, deterministic=deterministic), "cuda")


def test_forward_is_bitwise_repeatable_and_backward_too_when_deterministic():
    capped = dict(softcap=20.0, head_dim=192, head_dim_v=128)
    for bounds, changes in (("causal", {}), ("documents", {}), ("causal", capped)):
        repeated = case(2049, 2049, heads=4, kv_heads=2, bounds=bounds, visits=2, deterministic=True, **changes)
        want, _ = run(triton_backend, repeated, torch.device("cuda"))
        for _ in range(30):
            got, _ = run(triton_backend, repeated, torch.device("cuda"))
            for name in want:
                assert torch.equal(got[name], want[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("tma", [True, False], ids=["descriptors", "pointers"])
def test_rows_past_2_31_elements_equal_those_of_compact_tensors(tma, monkeypatch):
    """Every tensor is a view whose rows lie 2^16 elements apart: row 32,768 is the first past 2^31. Bitwise against copies."""
    stride, heads, head_dim = 1 << 16, 2, 64
    edge = -(-(1 << 31) // stride)
    rows = edge + 130
    if torch.cuda.get_device_properties(0).total_memory < 64 << 30:
        pytest.skip("needs 64 GiB of device memory")
    arch = triton_tiles.arch_of(torch.device("cuda"))
    for key, tile in list(triton_tiles.TILES.items()):
        if key[0] == arch and tile.tma and not tma:
            monkeypatch.setitem(triton_tiles.TILES, key, replace(tile, tma=False))

    def wide(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        buffer = torch.empty((1, rows, stride), dtype=dtype, device="cuda")
        size = heads * head_dim
        return [buffer[..., stride - (i + 1) * size: stride - i * size].unflatten(-1, (heads, head_dim)) for i in range(count)]

    q, k, v = wide(torch.bfloat16, 3)
    dout, out = wide(torch.bfloat16, 2)
    state, dq, dk, dv = wide(torch.float32, 4)
    for x in (q, k, v, dout):
        x.normal_()
    lo, hi = (torch.arange(rows, dtype=torch.int32) - 299).clamp(min=0), torch.arange(1, rows + 1, dtype=torch.int32)
    intervals = Intervals.from_rows(lo, hi, rows, "cuda")

    def visit(q, k, v, dout, state, out, dq, dk, dv):
        lse = torch.empty((1, heads, rows), device="cuda")
        given = dict(softmax_scale=0.125, state=state, lse=lse)
        triton_backend.forward(q, k, v, intervals, out=None, first=True, **given)
        triton_backend.forward(q, k, v, intervals, out=out, first=False, **given)
        delta = triton_backend.delta(dout, out)
        triton_backend.backward(dout, q, k, v, lse, delta, intervals, softmax_scale=0.125, dq=dq, dk=dk, dv=dv,
                                accumulate_dq=False, accumulate_dkv=False, deterministic=True)
        return dict(lse=lse, delta=delta, state=state, out=out, dq=dq, dk=dk, dv=dv)

    far = visit(q, k, v, dout, state, out, dq, dk, dv)
    near = visit(*(x.contiguous() for x in (q, k, v, dout)), *(torch.empty(x.shape, dtype=x.dtype, device="cuda")
                                                               for x in (state, out, dq, dk, dv)))
    for name, want in near.items():
        assert torch.equal(far[name], want), name
    # and the atomic dq, within rounding
    again = torch.empty_like(dq.contiguous())
    for target in (dq, again):
        triton_backend.backward(dout, q, k, v, far["lse"], far["delta"], intervals, softmax_scale=0.125, dq=target, dk=dk, dv=dv,
                                accumulate_dq=False, accumulate_dkv=False, deterministic=False)
        assert torch.allclose(target[:, -256:], near["dq"][:, -256:], rtol=1e-3, atol=1e-3)
