"""The triton kernels on Triton's CPU interpreter, against dense fp64. The interpreter is chosen before triton is first imported,
so these tests run in a process of their own: without TRITON_INTERPRET=1 the file starts pytest on itself with it.
"""
from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs the triton package")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:
    from ringflash.kernels.triton_support import interpreter_problem

    @pytest.mark.skipif(interpreter_problem() is not None, reason=str(interpreter_problem()))
    @pytest.mark.timeout(600)
    def test_triton_kernels_match_the_fp64_oracle_on_the_interpreter():
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
                              env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                              timeout=580)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    import torch
    import triton
    import triton.language as tl

    from ringflash.kernels import dispatch, triton_backend, triton_tiles
    from ringflash.kernels.intervals import Intervals
    from ringflash.kernels.triton_support import tanh_and_slope
    from ringflash.tests.support.triton_cases import BOUNDS, Case, check, errors, run

    HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32

    @pytest.mark.parametrize("bounds", sorted(BOUNDS))
    @pytest.mark.parametrize("visits", [1, 2, 3])
    def test_folded_visits_equal_the_whole_for_every_kind_of_mask(bounds, visits):
        check(triton_backend, Case(37, 41, bounds=bounds, visits=visits), "cpu")

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_backward_writes_or_adds_with_and_without_atomics(deterministic, accumulate):
        check(triton_backend, Case(33, 40, bounds="window", visits=2, deterministic=deterministic, accumulate=accumulate), "cpu")

    @pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 1), (7, 1), (8, 1), (4, 2)])
    def test_grouped_heads_share_keys_without_repeating_them(heads, kv_heads):
        check(triton_backend, Case(20, 23, heads=heads, kv_heads=kv_heads), "cpu")

    @pytest.mark.parametrize("head_dim", [4, 16, 40, 64])
    @pytest.mark.parametrize("dtype", [HALF, BF16, FULL])
    def test_head_dims_are_padded_by_masks(head_dim, dtype):
        deterministic = dtype == FULL
        check(triton_backend, Case(19, 24, head_dim=head_dim, dtype=dtype, visits=2, deterministic=deterministic), "cpu")

    @pytest.mark.parametrize("case", [
        Case(18, 33, batch=2, heads=4, kv_heads=2, strided=True, bounds="gaps", visits=2),
        Case(33, 18, batch=2, strided=True, dtype=FULL, deterministic=True),
        Case(24, 24, head_dim=40, strided=True, dtype=BF16, bounds="documents"),
    ], ids=["batch", "short_keys", "odd_head_dim"])
    def test_strided_views_keep_the_budget_of_contiguous_tensors(case):
        check(triton_backend, case, "cpu")
        check(triton_backend, replace(case, strided=False), "cpu")

    @pytest.mark.parametrize("num_q, num_k", [(1, 1), (1, 48), (48, 1), (16, 16), (17, 15), (32, 48), (5, 2), (2, 5)])
    def test_any_lengths_causal_bottom_right(num_q, num_k):
        check(triton_backend, Case(num_q, num_k), "cpu")
        check(triton_backend, Case(num_q, num_k, deterministic=True, visits=2), "cpu")

    @pytest.mark.parametrize("num_q, num_k", [(0, 5), (5, 0), (0, 0)])
    def test_no_queries_or_no_keys_is_legal(num_q, num_k):
        check(triton_backend, Case(num_q, num_k, bounds="full"), "cpu")

    def test_visits_that_see_nothing_leave_or_finish_the_running_result():
        # the second and third of three blocks of keys are seen by nobody
        ours, inputs = run(triton_backend, Case(20, 45, bounds="nothing", visits=3), torch.device("cpu"))
        assert not ours["out"].any() and (ours["lse"] == -float("inf")).all() and not ours["dq"].any()
        assert inputs["seen"].sum() == 0

    def test_tensor_descriptors_give_the_same_bits_as_pointers(monkeypatch):
        case = Case(37, 41, heads=2, kv_heads=1, head_dim=24, visits=2, bounds="window")
        pointers, _ = run(triton_backend, case, torch.device("cpu"))
        for kind, tile in triton_tiles.INTERPRETER_TILES.items():
            monkeypatch.setitem(triton_tiles.INTERPRETER_TILES, kind, replace(tile, tma=True))
        described, _ = run(triton_backend, case, torch.device("cpu"))
        for name, want in pointers.items():
            assert torch.equal(described[name], want), name

    @pytest.mark.parametrize("scale", [-0.3, 0.0])
    def test_scales_that_are_not_positive_are_exact_too(scale):
        check(triton_backend, Case(20, 20, scale=scale, visits=2), "cpu")

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("case", [
        Case(33, 40, softcap=0.5, scale=4.0, dtype=FULL, visits=2),
        Case(33, 40, softcap=20.0, scale=8.0, dtype=FULL, bounds="gaps", visits=2),
        Case(33, 40, softcap=50.0, scale=8.0, dtype=HALF, bounds="window"),
        Case(33, 40, softcap=50.0, scale=0.02, dtype=FULL, heads=4, kv_heads=2, accumulate=True),
        Case(33, 40, softcap=20.0, scale=1.0, dtype=BF16, bounds="documents", sinks=True, visits=3),
        Case(20, 20, softcap=3.0, scale=-1.0, dtype=HALF, strided=True),
        Case(20, 20, softcap=3.0, scale=0.0, dtype=HALF, visits=2),
    ], ids=str)
    def test_capped_scores_large_and_small_keep_their_budget(case, deterministic):
        check(triton_backend, replace(case, deterministic=deterministic), "cpu")

    @pytest.mark.parametrize("head_dim, head_dim_v", [(32, 16), (16, 32), (32, 1), (1, 16), (24, 40)])
    def test_values_have_a_head_dim_of_their_own(head_dim, head_dim_v, monkeypatch):
        case = Case(18, 21, head_dim=head_dim, head_dim_v=head_dim_v, bounds="gaps", visits=2)
        check(triton_backend, replace(case, dtype=FULL, deterministic=True, accumulate=True), "cpu")
        check(triton_backend, replace(case, strided=True, heads=4, kv_heads=2, softcap=20.0, sinks=True), "cpu")
        pointers, _ = run(triton_backend, case, torch.device("cpu"))
        for kind, tile in triton_tiles.INTERPRETER_TILES.items():
            monkeypatch.setitem(triton_tiles.INTERPRETER_TILES, kind, replace(tile, tma=True))
        described, _ = run(triton_backend, case, torch.device("cpu"))
        for name, want in pointers.items():
            assert torch.equal(described[name], want), name

    @triton.jit
    def _tanh_kernel(x, value, slope, BLOCK: tl.constexpr):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        t, s = tanh_and_slope(tl.load(x + rows))
        tl.store(value + rows, t)
        tl.store(slope + rows, s)

    def test_tanh_and_its_slope_are_accurate_relative_to_themselves_and_never_overflow():
        # 2^20 floats of all sizes from the smallest normal one to 88, either sign (Note [Softcap])
        count = 1 << 19
        x = torch.linspace(0x00800000, 0x42B00000, count, dtype=torch.float64).to(torch.int32).view(torch.float32)
        x[-4:] = torch.tensor([0.0, 0.6, 1e38, float("inf")])
        x = torch.cat([x, -x])
        value, slope = torch.empty_like(x), torch.empty_like(x)
        _tanh_kernel[(16,)](x, value, slope, BLOCK=count // 8)
        exact = x.double()
        t, s = torch.tanh(exact), 1 / torch.cosh(exact) ** 2
        assert bool(((value - t).abs() <= 3.0 * 2**-24 * t.abs()).all())
        normal = exact.abs() < 43  # beyond, the slope is below the smallest normal number
        assert bool(((slope - s).abs() <= (6 + 2.5 * exact.abs()) * 2**-24 * s)[normal].all())
        assert bool((slope[~normal] >= 0).all()) and float(slope[~normal].max()) < 1e-36

    def _visit(q, k, v, **given):
        rows, keys = q.shape[1], k.shape[1]
        bounds = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
        triton_backend.forward(q, k, v, Intervals.from_rows(*bounds, keys, "cpu"), **given)

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_scores_near_minus_60000_merge_without_loss(order):
        # softmax over -60000.0 and -60000.2: the weight of the second key is 1 / (1 + exp(0.2)) = 0.450166
        q = torch.ones(1, 1, 1, 4)
        k = torch.tensor([-3e4, -3.00001e4])[:, None].expand(2, 4).reshape(1, 2, 1, 4)
        v = torch.tensor([1.0, 3.0])[:, None].expand(2, 4).reshape(1, 2, 1, 4)
        state, lse, out = torch.full((1, 1, 1, 4), float("nan")), torch.full((1, 1, 1), float("nan")), torch.empty(1, 1, 1, 4)
        for visit, j in enumerate(order):
            _visit(q, k[:, j:j + 1], v[:, j:j + 1], softmax_scale=0.5, state=state, lse=lse, out=out if visit else None,
                   first=not visit)
        assert torch.allclose(out, torch.tensor(1.900332), atol=1e-2)
        assert torch.allclose(lse, torch.tensor(-59999.4019), atol=1e-2)

    @pytest.mark.parametrize("gap", [100.0, -100.0, float("inf")])
    def test_merging_far_apart_lse_takes_the_larger_exactly(gap):
        # the running lse is 0 (or -inf), the block's is the score q * k = gap
        q, k = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), gap if gap < float("inf") else 0.25)
        before = 0.0 if gap < float("inf") else -float("inf")
        state = torch.full((1, 1, 1, 1), 7.0 if before == 0 else 0.0)
        lse, out = torch.full((1, 1, 1), before), torch.empty(1, 1, 1, 1)
        _visit(q, k, torch.full((1, 1, 1, 1), 3.0), softmax_scale=1.0, state=state, lse=lse, out=out, first=False)
        assert (lse.item(), out.item()) == ((100.0, 3.0) if gap == 100 else (0.0, 7.0) if gap == -100 else (0.25, 3.0))

    def test_a_planted_defect_is_caught():
        case = Case(33, 40, visits=2)
        ours, inputs = run(triton_backend, case, torch.device("cpu"))

        def failing(**changed):
            return {name for name, verdict in errors({**ours, **changed}, inputs).items() if not verdict.ok}

        assert failing() == set()
        assert failing(lse=ours["lse"] * 1.4426950408889634) == {"lse"}  # base 2 for natural
        assert failing(dk=ours["dk"] * 0.97, out=ours["out"] + 0.02) == {"dk", "out"}

    def test_outputs_whose_rows_are_not_dense_are_refused():
        q = torch.zeros(1, 4, 1, 16)
        with pytest.raises(ValueError, match="state: strides"):
            _visit(q, q, q, softmax_scale=1.0, state=torch.zeros(1, 16, 1, 4).transpose(1, 3), lse=torch.zeros(1, 1, 4), out=None,
                   first=True)
        with pytest.raises(ValueError, match="first and the last"):
            _visit(q, q, q, softmax_scale=1.0, state=None, lse=torch.zeros(1, 1, 4), out=None, first=True)

    def test_warmup_and_dispatch_find_the_backend_under_the_interpreter():
        assert dispatch.select("triton", device="cpu", dtype=HALF, head_dim=80) is triton_backend
        with pytest.raises(RuntimeError, match="float64"):
            dispatch.select("triton", device="cpu", dtype=torch.float64, head_dim=64)
        with pytest.raises(RuntimeError, match="head_dim 288"):
            dispatch.select("triton", device="cpu", dtype=HALF, head_dim=288)
        for deterministic in (False, True):
            triton_backend.warmup(HALF, 16, "cpu", num_heads=2, num_kv_heads=1, deterministic=deterministic)
        triton_backend.warmup(HALF, 32, "cpu", num_heads=2, num_kv_heads=1, head_dim_v=16, softcap=20.0)
        with pytest.raises(ValueError, match="softcap=-1"):
            triton_backend.warmup(HALF, 16, "cpu", softcap=-1.0)
