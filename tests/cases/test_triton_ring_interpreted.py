"""The whole ring with the triton kernels on Triton's CPU interpreter: known answers, dead rows, offsets past 2^31 elements, and
that a warm-up has compiled what a run launches. In a process of its own, as the interpreter is chosen before triton is imported.
"""
from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the triton package")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:
    from ringflash.kernels.triton_support import interpreter_problem

    @pytest.mark.skipif(interpreter_problem() is not None, reason=str(interpreter_problem()))
    @pytest.mark.timeout(300)
    def test_the_ring_with_triton_kernels_keeps_its_promises_on_the_interpreter():
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
                              env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                              timeout=280)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout

else:
    import torch

    from ringflash import simulate
    from ringflash.kernels import triton_backend, triton_dq, triton_forward
    from ringflash.kernels.intervals import Intervals
    from ringflash.tests.support.ring_cases import LAYOUTS, differing, judge, make_inputs, masks, run

    @pytest.mark.parametrize("index, name", list(enumerate(("documents + window", "full", "causal", "window", "documents"))))
    def test_masks_layouts_and_group_sizes_in_turn_are_within_budget(index, name):
        # every pair of them: launch/check.py --interpreter
        mask, ratio = masks(13)[name], (4, 1, 7, 8, 1)[index]
        inputs = make_inputs(13, heads=ratio, kv_heads=1, dtype=torch.bfloat16, head_dim=16, seed=index)
        ours = run(simulate, inputs, cp_size=3, layout=LAYOUTS[index % 3], kernel="triton", deterministic=index % 2 == 1, **mask)
        assert not judge(ours, inputs, **mask)

    @pytest.mark.parametrize("head_dim, head_dim_v, softcap, deterministic", [(16, 24, 1.5, False), (24, 16, 0.0, True)])
    def test_softcap_sinks_and_values_of_another_head_dim_are_within_budget(head_dim, head_dim_v, softcap, deterministic):
        for cp_size, dtype in ((1, torch.float16), (3, torch.float32)):
            inputs = make_inputs(13, heads=4, kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype,
                                 sinks=torch.float32)
            options = dict(softcap=softcap, cu_seqlens=[0, 4, 4, 11])
            ours = run(simulate, inputs, cp_size=cp_size, kernel="triton", deterministic=deterministic, **options)
            assert not judge(ours, inputs, **options)

    @pytest.mark.parametrize("cp_size", [1, 3])
    def test_rows_without_keys_have_known_answers(cp_size):
        for seq_len, seq_len_k, want, want_lse in (
                (5, 2, [0, 0, 0, 1, 1.5], [-math.inf] * 3 + [0, math.log(2)]), (2, 5, [2.5, 3], [math.log(4), math.log(5)])):
            q, k = torch.zeros(1, seq_len, 1, 4, requires_grad=True), torch.zeros(1, seq_len_k, 1, 4, requires_grad=True)
            v = torch.arange(1.0, seq_len_k + 1).reshape(1, -1, 1, 1).repeat(1, 1, 1, 4).requires_grad_()
            out, lse = simulate(q, k, v, cp_size=cp_size, kernel="triton", return_lse=True)
            dout = torch.ones(1, seq_len, 1, 4)
            dout[:, : max(0, seq_len - seq_len_k)] = math.nan
            out.backward(dout)
            assert out[0, :, 0, 0].tolist() == pytest.approx(want) and lse[0, 0].tolist() == pytest.approx(want_lse)
            assert not q.grad[:, : max(0, seq_len - seq_len_k)].any()
            assert k.grad.isfinite().all() and v.grad.isfinite().all() and v.grad.sum().item() == pytest.approx(4 * min(5, 2))

    def test_each_document_returns_its_own_number():
        number = torch.repeat_interleave(torch.arange(1.0, 5), torch.tensor([4, 8, 6, 10]))
        q, v = torch.zeros(1, 28, 1, 16), number.reshape(1, -1, 1, 1).expand(1, 28, 1, 16)
        for causal in (True, False):
            out = simulate(q, q, v, cp_size=4, layout="zigzag", cu_seqlens=[0, 4, 12, 18, 28], causal=causal, kernel="triton")
            assert float((out - v).abs().max()) < 1e-5

    @pytest.mark.parametrize("layout, deterministic", [("zigzag", False), ("striped", True)])
    def test_nan_in_dead_rows_reaches_nothing(layout, deterministic):
        options = dict(cp_size=2, layout=layout, kernel="triton", cu_seqlens=[0, 0, 6, 11], deterministic=deterministic)
        expected = run(simulate, make_inputs(16, heads=2, kv_heads=1), **options)
        poisoned = make_inputs(16, heads=2, kv_heads=1)
        for x in (poisoned.q, poisoned.k, poisoned.v, poisoned.dout):
            x[:, 11:] = math.nan
        poisoned.dlse[:, :, 11:] = math.nan
        ours = run(simulate, poisoned, **options)
        assert not differing(ours, expected)
        assert not any(ours[name][:, 11:].any() for name in ("out", "dq", "dk", "dv"))

    @pytest.mark.parametrize("head_dim", [80, 96, 256])
    def test_large_and_odd_head_dims_are_within_budget(head_dim):
        inputs = make_inputs(17, head_dim=head_dim, heads=2, kv_heads=1, dtype=torch.float16)
        assert not judge(run(simulate, inputs, cp_size=2, kernel="triton"), inputs)

    FAR = 1 << 28  # elements between neighbours of the far dim: index 8 is the first past 2^31

    def wide(path, count: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`count` tensors of this shape, neighbours in dim FAR elements apart, in a sparse file that takes no room."""
        buffer = torch.from_file(str(path), shared=True, size=shape[dim] * FAR, dtype=dtype).view(shape[dim], FAR)
        rest = [n for i, n in enumerate(shape) if i != dim]
        size = math.prod(rest)
        return [buffer[:, FAR - (i + 1) * size: FAR - i * size].unflatten(1, rest).movedim(0, dim) for i in range(count)]

    @pytest.mark.parametrize("dim, deterministic", [(1, False), (1, True), (2, True), (0, True)],
                             ids=["rows-atomic", "rows", "heads", "batch"])
    def test_offsets_past_2_31_elements_reach_the_same_numbers(dim, deterministic, tmp_path):
        """The row (head, batch) before, on and after the edge in q, k, v, dout, the running result, out, lse, dq, dk, dv."""
        shape = tuple(10 if i == dim else n for i, n in enumerate((1, 3, 1, 16)))
        batch, rows, heads, _ = shape
        lo, hi = torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)
        intervals = Intervals.from_rows(lo, hi, rows, "cpu")
        generator = torch.Generator().manual_seed(dim)
        given = [torch.randn(shape, generator=generator).half() for _ in range(4)]
        dlse = torch.randn(batch, heads, rows, generator=generator)

        def visit(q, k, v, dout, out, state, dq, dk, dv, lse, dlse):
            forward = dict(softmax_scale=0.25, state=state, lse=lse)
            triton_backend.forward(q, k, v, intervals, out=None, first=True, **forward)
            triton_backend.forward(q, k, v, intervals, out=out, first=False, **forward)
            delta = triton_backend.delta(dout, out, dlse)
            for accumulate in (False, True):
                triton_backend.backward(dout, q, k, v, lse, delta, intervals, softmax_scale=0.25, dq=dq, dk=dk, dv=dv,
                                        accumulate_dq=accumulate, accumulate_dkv=accumulate, deterministic=deterministic)
            return dict(out=out, state=state, lse=lse, delta=delta, dq=dq, dk=dk, dv=dv)

        fresh = [torch.empty(shape) for _ in range(4)]
        near = visit(*given, torch.empty(shape).half(), *fresh, torch.empty(batch, heads, rows), dlse)
        half = wide(tmp_path / "16", 5, shape, dim, torch.half)
        single = wide(tmp_path / "32", 4, shape, dim, torch.float32)
        for target, source in zip(half, given):
            target.copy_(source)
        lse, far_dlse = torch.empty(batch, heads, rows), dlse
        if dim != 1:  # the rows of lse are neighbours by contract
            lse, far_dlse = wide(tmp_path / "lse", 2, (batch, heads, rows), {0: 0, 2: 1}[dim], torch.float32)
            far_dlse.copy_(dlse)
        assert max(x.stride(dim) * 9 for x in half) > 1 << 31
        far = visit(*half, *single, lse, far_dlse)
        for name, want in near.items():
            assert torch.equal(far[name], want), name

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_a_row_whose_merged_lse_is_minus_infinity_gives_nothing_though_the_visit_shows_it_keys(deterministic):
        q, k, v, dout = (torch.randn(1, 32, 1, 16, generator=torch.Generator().manual_seed(i)) for i in range(4))
        ends = torch.zeros(32, dtype=torch.int32), torch.full((32,), 32, dtype=torch.int32)
        lse, delta = torch.full((1, 1, 32), 4.0), torch.ones(1, 1, 32)
        lse[..., 5] = -math.inf
        dq, dk, dv = (torch.full((1, 32, 1, 16), math.nan) for _ in range(3))
        triton_backend.backward(dout, q, k, v, lse, delta, Intervals.from_rows(*ends, 32, "cpu"), softmax_scale=0.25,
                                dq=dq, dk=dk, dv=dv, accumulate_dq=False, accumulate_dkv=False, deterministic=deterministic)
        assert all(x.isfinite().all() for x in (dq, dk, dv))
        assert not dq[:, 5].any() and dq[:, 4].any()

    def _variants(monkeypatch) -> set:
        """Collects what triton would compile apart: constants, which arguments are None, strides that are multiples of 16."""
        seen = set()

        def watch(module, name):
            plain = getattr(module, name)

            def recorded(*args):
                grid, arguments, options = plain(*args)
                classes = []
                for key, value in arguments.items():
                    if key.isupper() or value is None or isinstance(value, (bool, str)):
                        classes.append((key, value))
                    elif key[-3:] in ("_sb", "_ss", "_sh") and not key.startswith("lse"):
                        classes.append((key, value == 1, value % 16 == 0))
                seen.add((name, tuple(classes)))
                return grid, arguments, options

            monkeypatch.setattr(module, name, recorded)

        for module, name in ((triton_forward, "forward_launch"), (triton_dq, "dq_launch"), (triton_backend, "backward_launch")):
            watch(module, name)
        return seen

    @pytest.mark.parametrize("batch, heads, kv_heads, head_dim, head_dim_v, softcap, deterministic", [
        (2, 2, 1, 16, 16, 0.0, False), (1, 1, 1, 24, 24, 0.0, True), (1, 2, 1, 16, 32, 2.0, True)])
    def test_a_warm_up_compiles_every_variant_that_a_run_launches(
            monkeypatch, batch, heads, kv_heads, head_dim, head_dim_v, softcap, deterministic):
        seen = _variants(monkeypatch)
        triton_backend.warmup(torch.bfloat16, head_dim, "cpu", batch=batch, num_heads=heads, num_kv_heads=kv_heads,
                              deterministic=deterministic, head_dim_v=head_dim_v, softcap=softcap)
        compiled = set(seen)
        seen.clear()
        for layout, cp_size, mask, rotate in (("zigzag", 1, {}, "kv"), ("zigzag", 3, {"window_size": (3, 0)}, "kv"),
                                              ("contiguous", 2, {"causal": False}, "kv"), ("zigzag", 3, {"causal": False}, "q")):
            # Sinks begin with a state: a single rank then launches what else only a ring does.
            inputs = make_inputs(16 if cp_size == 2 else 31, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
                                 head_dim_v=head_dim_v, dtype=torch.bfloat16, sinks=torch.float32 if softcap else None)
            run(simulate, inputs, cp_size=cp_size, layout=layout, kernel="triton", deterministic=deterministic, softcap=softcap,
                rotate=rotate, **mask)
        # What depends on S, which a warm-up cannot know: the batch stride where heads * head_dim is no multiple of 16, and there
        # also a visit of a single row.
        assert len(compiled) >= 6 and seen <= compiled, seen - compiled
