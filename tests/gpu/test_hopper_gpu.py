"""The forward of the `hopper` backend on a GPU: every variant against the fp64 oracle, offsets past 2^31, streams, same bits."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ringflash.kernels import hopper

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
REASON = "needs a CUDA device"
if torch.cuda.is_available():
    REASON = hopper.unavailable(torch.device("cuda"), torch.bfloat16, 128, False)
if REASON:
    pytest.skip(REASON, allow_module_level=True)

from ringflash.kernels import hopper_forward, hopper_forward_tiles  # noqa: E402
from ringflash.kernels.intervals import Intervals  # noqa: E402
from ringflash.tests.support.forward_cases import check_forward, judge, run_forward  # noqa: E402
from ringflash.tests.support.triton_cases import BOUNDS, Case  # noqa: E402

DEVICE = torch.device("cuda")
VARIANTS = [(d, dtype) for d in hopper.HEAD_DIMS for dtype in hopper.DTYPES]
LENGTHS = (1, 2, 63, 64, 127, 129, 191, 193, 1000, 2049)


@pytest.fixture(params=[False, True], ids=["by maxima", "by sums"], autouse=True)
def by_sums(request, monkeypatch):
    """Both ways of moving the softmax's reference (Note [Hopper forward]); fp16 has only the first."""
    if request.param and torch.float16 in getattr(request.node, "callspec").params.values():
        pytest.skip("fp16 goes by maxima")
    for head_dim, tile in list(hopper_forward.FORWARD_TILES.items()):
        monkeypatch.setitem(hopper_forward.FORWARD_TILES, head_dim, replace(tile, by_sums=request.param))


def case(*lengths: int, **changes) -> Case:
    """bf16, D 128, scale 1/8, two heads on one kv head."""
    return Case(*lengths, **{"head_dim": 128, "dtype": torch.bfloat16, "scale": 0.125, **changes})


@pytest.mark.parametrize("head_dim, dtype", VARIANTS, ids=str)
def test_every_head_dim_and_dtype_keeps_its_budget_at_odd_lengths(head_dim, dtype):
    for num_q in LENGTHS:
        for num_k in (num_q, 1, 333):
            for visits in (1, min(3, num_k)):
                check_forward(hopper, case(num_q, num_k, head_dim=head_dim, dtype=dtype, visits=visits), DEVICE)


@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
@pytest.mark.parametrize("bounds", sorted(BOUNDS))
def test_every_mask_keeps_its_budget_folded_and_whole(bounds, head_dim):
    for lengths in ((1000, 1000), (300, 2049), (2049, 129), (4001, 4001)):
        for visits in (1, 3):
            check_forward(hopper, case(*lengths, bounds=bounds, visits=visits, head_dim=head_dim), DEVICE)


@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1), (7, 1), (8, 2), (24, 8)])
def test_grouped_heads_batches_and_strided_views_keep_their_budget(heads, kv_heads, head_dim):
    for strided in (False, True):
        for visits in (1, 2):
            check_forward(hopper, case(515, 643, heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=3, strided=strided,
                                       visits=visits), DEVICE)


@pytest.mark.parametrize("head_dim, dtype", VARIANTS, ids=str)
def test_rows_that_are_finished_by_the_last_visit_that_sees_them_have_the_bits_of_those_that_wait_for_the_last_of_all(
    head_dim, dtype, monkeypatch
):
    real, found = hopper_forward_tiles.tile_rows, []

    def remembered(*given):
        found.append(real(*given))
        return found[-1]

    for bounds in sorted(BOUNDS):
        for lengths, visits in (((1000, 1000), 3), ((300, 2049), 5), ((2049, 129), 2), ((700, 700), 1)):
            for sinks in (False, True):
                one = case(*lengths, bounds=bounds, visits=visits, head_dim=head_dim, dtype=dtype, sinks=sinks)
                # Bits are those of the tiles: both walk the same, which may begin with documents.
                monkeypatch.setattr(hopper_forward_tiles, "tile_rows", remembered)
                finished, inputs = run_forward(hopper, one, DEVICE, turns=True)
                monkeypatch.setattr(hopper_forward_tiles, "tile_rows", lambda *given: found[-1])
                waiting = run_forward(hopper, one, DEVICE)[0]
                for name, value in waiting.items():
                    assert torch.equal(finished[name], value), (one, name)
                for verdict in judge(finished, inputs).values():
                    assert verdict.ok, f"{one}: {verdict}"


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0, 50.0])
@pytest.mark.parametrize("head_dim, dtype", VARIANTS, ids=str)
def test_softcap_and_sinks_keep_their_budget(head_dim, dtype, softcap):
    for scale in (0.125, 1.0):
        for bounds in ("causal", "gaps"):
            for visits, sinks in ((1, False), (1, True), (3, False), (3, True)):
                check_forward(hopper, case(513, 700, head_dim=head_dim, dtype=dtype, softcap=softcap, scale=scale,
                                           bounds=bounds, visits=visits, sinks=sinks), DEVICE)


@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0])
def test_any_scale_keeps_its_budget(scale):
    for softcap in (0.0, 5.0):
        check_forward(hopper, case(300, 300, scale=scale, softcap=softcap, visits=2), DEVICE)


def given(num_q: int, num_k: int, heads: int = 2, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, batch: int = 1):
    generator = torch.Generator(DEVICE).manual_seed(1)
    q, k, v = (torch.randn(batch, n, heads, head_dim, device=DEVICE, generator=generator).to(dtype)
               for n in (num_q, num_k, num_k))
    state = torch.full((batch, num_q, heads, head_dim), torch.nan, device=DEVICE)
    return q, k, v, state, torch.full((batch, heads, num_q), torch.nan, device=DEVICE), torch.full_like(q, torch.nan)


def full(num_q: int, num_k: int) -> Intervals:
    lo = torch.zeros(num_q, dtype=torch.int32)
    return Intervals.from_rows(lo, torch.full_like(lo, num_k), num_k, DEVICE)


def test_operands_that_the_copy_engine_cannot_address_give_the_same_bits():
    q, k, v, _, lse, out = given(200, 300, batch=2)
    options = dict(softmax_scale=0.1, state=None, first=True)
    hopper.forward(q, k, v, full(200, 300), lse=lse, out=out, **options)

    def odd_base(x):
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)

    def odd_rows(x):
        wide = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype, device=DEVICE)[..., :-1]
        return wide.copy_(x)

    def columns(x):
        return x.transpose(1, 3).contiguous().transpose(1, 3)

    for change in (odd_base, odd_rows, columns):
        got, l2 = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        hopper.forward(change(q), change(k), change(v), full(200, 300), lse=l2, out=got, **options)
        assert torch.equal(got, out) and torch.equal(l2, lse), change.__name__
    for change in (odd_base, odd_rows):
        got = change(torch.full_like(out, torch.nan))
        hopper.forward(q, k, v, full(200, 300), lse=lse, out=got, **options)
        assert torch.equal(got, out), change.__name__
    one_k, one_v = k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1)
    hopper.forward(q, one_k, one_v, full(200, 300), lse=lse, out=got, **options)
    hopper.forward(q, one_k.contiguous(), one_v.contiguous(), full(200, 300), lse=lse, out=out, **options)
    assert torch.equal(got, out)


def test_state_and_lse_with_any_strides_hold_what_contiguous_ones_hold():
    q, k, v, state, lse, _ = given(200, 300, batch=2)
    odd_state = torch.full((200, 2, 3, 131), torch.nan, device=DEVICE).transpose(0, 1)[:, :, 1:, 2:130]
    odd_lse = torch.full((2, 2, 207), torch.nan, device=DEVICE).transpose(0, 1)[..., 3:203]
    for first in (True, False):
        hopper.forward(q, k, v, full(200, 300), softmax_scale=0.1, state=state, lse=lse, out=None, first=first)
        hopper.forward(q, k, v, full(200, 300), softmax_scale=0.1, state=odd_state, lse=odd_lse, out=None, first=first)
        assert torch.equal(odd_state, state) and torch.equal(odd_lse, lse)


def test_empty_sides_and_masks_write_what_the_contract_says():
    for num_q, num_k in ((0, 5), (5, 0), (0, 0)):
        q, k, v, state, lse, out = given(num_q, num_k)
        hopper.forward(q, k, v, full(num_q, num_k), softmax_scale=0.1, state=state, lse=lse, out=None, first=True)
        assert bool((state == 0).all()) and bool((lse == -torch.inf).all())
        state.fill_(2), lse.fill_(1)
        hopper.forward(q, k, v, full(num_q, num_k), softmax_scale=0.1, state=state, lse=lse, out=out, first=False)
        assert bool((out == 2).all()) and bool((lse == 1).all())


def test_rows_that_see_nothing_in_a_visit_keep_their_state_to_the_bit():
    for head_dim in hopper.HEAD_DIMS:
        q, k, v, state, lse, _ = given(700, 300, head_dim=head_dim)
        hopper.forward(q, k, v, full(700, 300), softmax_scale=0.1, state=state, lse=lse, out=None, first=True)
        # rows 100 to 399 see something: their tiles hold others that do not
        lo = torch.where(torch.arange(700) < 100, 0, 40).to(torch.int32)
        hi = torch.where(torch.arange(700) < 100, 0, torch.where(torch.arange(700) < 400, 300, 300)).to(torch.int32)
        lo[400:] = 300
        before, lse_before = state.clone(), lse.clone()
        for _ in range(5):
            hopper.forward(q, k, v, Intervals.from_rows(lo, hi, 300, DEVICE), softmax_scale=0.1, state=state, lse=lse, out=None,
                           first=False)
        for rows in (slice(0, 100), slice(400, 700)):
            assert torch.equal(state[:, rows], before[:, rows]) and torch.equal(lse[..., rows], lse_before[..., rows])
        assert not torch.equal(lse[..., 100:400], lse_before[..., 100:400])


@pytest.mark.parametrize("dtype", hopper.DTYPES)
@pytest.mark.parametrize("head_dim", hopper.HEAD_DIMS)
def test_visits_whose_lse_lie_far_apart_merge_without_overflow(head_dim, dtype):
    q, k, v, state, lse, out = given(130, 256, head_dim=head_dim, dtype=dtype)
    q.fill_(1.0)
    for low, high in ((0, 128), (128, 0)):  # the heavier half of the keys first, then last
        k[:, low:low + 128], k[:, high:high + 128] = -2.0, 2.0
        for i, start in enumerate((0, 128)):
            hopper.forward(q, k[:, start:start + 128], v[:, start:start + 128], full(130, 128), softmax_scale=1.0, state=state,
                           lse=lse, out=out if i else None, first=i == 0)
        want = v[:, high:high + 128].float().mean(1, keepdim=True).expand_as(out)
        assert torch.allclose(out.float(), want, rtol=1e-2, atol=1e-3)
        assert torch.allclose(lse, torch.full_like(lse, 2.0 * head_dim + torch.tensor(128.0).log().item()), rtol=1e-6)


@pytest.mark.parametrize("head_dim, dtype", VARIANTS, ids=str)
def test_scores_that_rise_by_hundreds_from_tile_to_tile_keep_their_budget(head_dim, dtype):
    """A tile without maxima overflows there, and is done again with them; its neighbours are not, nor written twice."""
    for bounds in ("causal", "full", "window", "documents"):
        for visits, sinks in ((1, False), (3, False), (2, True)):
            check_forward(hopper, case(1500, 1500, heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype, bounds=bounds,
                                       visits=visits, sinks=sinks, scale=20.0), DEVICE)
    for rows in (64, 130, 700):  # in some rows only: a rising key towards row 0, the last tile to be computed
        q, k, v, state, lse, out = given(rows, 2000, head_dim=head_dim, dtype=dtype)
        k[:, :, :, 0] = torch.linspace(200, 0, 2000, device=DEVICE)[None, :, None]
        q[:, ::3, :, 0] = 4.0
        q[:, 1::3, :, 0], q[:, 2::3, :, 0] = 0.0, -4.0
        options = dict(softmax_scale=1.0, state=state, lse=lse)
        for first in (True, False):
            hopper.forward(q, k, v, full(rows, 2000), out=None if first else out, first=first, **options)
        both = [torch.cat([x, x], 1) for x in (k, v)]
        allowed = torch.ones(rows, 4000, dtype=torch.bool, device=DEVICE)
        inputs = dict(q=q, k=both[0], v=both[1], softmax_scale=1.0, allowed=allowed)
        for verdict in judge(dict(out=out, lse=lse), inputs).values():
            assert verdict.ok, f"{rows} rows: {verdict}"


@pytest.mark.parametrize("dtype", hopper.DTYPES)
def test_nan_in_a_query_stays_in_its_row(dtype):
    q, k, v, state, lse, out = given(300, 1000, dtype=dtype)
    hopper.forward(q, k, v, full(300, 1000), softmax_scale=0.1, state=None, lse=lse, out=out, first=True)
    q[0, 77, 1, 5] = torch.nan
    got, got_lse = torch.zeros_like(out), torch.zeros_like(lse)
    hopper.forward(q, k, v, full(300, 1000), softmax_scale=0.1, state=None, lse=got_lse, out=got, first=True)
    assert bool(got[0, 77, 1].isnan().all()) and bool(got_lse[0, 1, 77].isnan())
    got[0, 77, 1], got_lse[0, 1, 77] = out[0, 77, 1], lse[0, 1, 77]
    assert torch.allclose(got.float(), out.float(), rtol=1e-2, atol=1e-3) and torch.allclose(got_lse, lse, rtol=1e-5)


def test_forward_is_bitwise_repeatable_with_any_number_of_multiprocessors():
    for head_dim in hopper.HEAD_DIMS:
        for bounds in ("causal", "documents"):
            repeated = case(3001, 3001, heads=8, kv_heads=2, head_dim=head_dim, bounds=bounds, visits=2)
            want, _ = run_forward(hopper, repeated, DEVICE)
            for spare in (0, 0, 1, 20, 131, 1000):
                got, _ = run_forward(hopper, repeated, DEVICE, spare_sms=spare)
                assert all(torch.equal(got[name], want[name]) for name in want), (head_dim, bounds, spare)
    assert all(int(counter) == 0 for counter in hopper._counters.values())


def test_streams_and_captured_graphs_run_side_by_side_without_sharing_a_counter():
    q, k, v, _, lse, out = given(3000, 3000, heads=8)
    intervals, options = full(3000, 3000), dict(softmax_scale=0.1, state=None, first=True)
    hopper.forward(q, k, v, intervals, lse=lse, out=out, **options)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graph, captured, captured_lse = torch.cuda.CUDAGraph(), torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    with torch.cuda.graph(graph):
        hopper.forward(q, k, v, intervals, lse=captured_lse, out=captured, **options)
    results = [torch.full_like(out, torch.nan) for _ in range(30)]
    scratch = [torch.empty_like(lse) for _ in streams]
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        with torch.cuda.stream(streams[i % 3]):
            hopper.forward(q, k, v, intervals, lse=scratch[i % 3], out=result, spare_sms=100, **options)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(result, out) for result in results) and torch.equal(captured, out)
    assert all(int(counter) == 0 for counter in hopper._counters.values())


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lse_keeps_its_budget_over_half_a_million_keys_in_one_visit_and_in_eight(head_dim):
    keys, rows = 1 << 19, 130
    q, k, v, state, lse, _ = given(rows, keys, head_dim=head_dim)
    exact = torch.cat([torch.logsumexp((q[0, :, h].double() @ k[0, :, h].double().T) * 0.1, -1)[None] for h in range(2)])[None]
    budget = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    for visits in (1, 8):
        for i in range(visits):
            a, b = i * keys // visits, (i + 1) * keys // visits
            hopper.forward(q, k[:, a:b], v[:, a:b], full(rows, b - a), softmax_scale=0.1, state=state, lse=lse, out=None,
                           first=i == 0)
        worst = float((lse.double() - exact).abs().max())
        assert worst <= budget, f"{visits} visits: {worst:.2e} of {budget:.2e}"


@pytest.mark.slow
def test_rows_past_2_31_elements_equal_those_of_compact_tensors():
    """Every tensor is a view whose rows lie 2^16 elements apart: row 32,768 is the first past 2^31. Bitwise against copies."""
    stride, heads, head_dim = 1 << 16, 2, 64
    rows = (1 << 31) // stride + 130
    if torch.cuda.get_device_properties(0).total_memory < 64 << 30:
        pytest.skip("needs 64 GiB of device memory")

    def wide(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        buffer, size = torch.empty((1, rows, stride), dtype=dtype, device=DEVICE), heads * head_dim
        return [buffer[..., stride - (i + 1) * size: stride - i * size].unflatten(-1, (heads, head_dim)) for i in range(count)]

    q, k, v, out = wide(torch.bfloat16, 4)
    state, = wide(torch.float32, 1)
    for x in (q, k, v):
        x.normal_()
    hi = torch.arange(1, rows + 1, dtype=torch.int32)
    intervals = Intervals.from_rows((hi - 300).clamp(min=0), hi, rows, DEVICE)

    def visits(q, k, v, state, out):
        lse = torch.empty((1, heads, rows), device=DEVICE)
        for last in (False, True):
            hopper.forward(q, k, v, intervals, softmax_scale=0.125, state=state, lse=lse, out=out if last else None,
                           first=not last)
        return dict(lse=lse, state=state, out=out)

    far = visits(q, k, v, state, out)
    fresh = [torch.empty(x.shape, dtype=x.dtype, device=DEVICE) for x in (state, out)]
    near = visits(*(x.contiguous() for x in (q, k, v)), *fresh)
    for name, want in near.items():
        assert torch.equal(far[name], want), name
