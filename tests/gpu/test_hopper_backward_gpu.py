"""The hopper backward on a GPU against the fp64 oracle, its forward taken from `reference`: every mask, length and option within
the project's budgets, whatever lies in memory behind the rows."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ringflash.kernels import reference
from ringflash.kernels.intervals import Intervals
from ringflash.tests.support.triton_cases import BOUNDS, Case, check

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"), pytest.mark.timeout(600)]
if HOPPER:
    from ringflash.kernels import hopper_backward

    BACKEND = SimpleNamespace(forward=reference.forward, backward=hopper_backward.backward, delta=hopper_backward.delta)

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
both = pytest.mark.parametrize("head_dim, dtype", [(d, t) for d in HEAD_DIMS for t in DTYPES], ids=str)


def case(*lengths: int, head_dim: int, **changes) -> Case:
    return Case(*lengths, **{"head_dim": head_dim, "heads": 2, "kv_heads": 1, "scale": head_dim ** -0.5, **changes})


@both
@pytest.mark.parametrize("bounds", list(BOUNDS))
def test_every_mask_keeps_its_budget_at_odd_lengths(bounds, head_dim, dtype):
    for lengths, heads, visits in (
        ((512, 512), (4, 2), 1), ((1000, 1000), (2, 2), 3), ((333, 777), (8, 1), 1), ((777, 3), (2, 1), 1), ((2, 300), (2, 2), 1),
        ((129, 2049), (4, 1), 2),
    ):
        check(BACKEND, case(*lengths, head_dim=head_dim, dtype=dtype, bounds=bounds, visits=visits, heads=heads[0],
                            kv_heads=heads[1]), "cuda")


@both
def test_every_option_keeps_its_budget(head_dim, dtype):
    """Also views of wider buffers, one of which no tensor map can describe (it is copied), a negative scale and one of 0."""
    for bounds in ("causal", "gaps"):
        for changes in (
            dict(deterministic=True), dict(accumulate=True), dict(deterministic=True, accumulate=True), dict(batch=3),
            dict(batch=2, strided=True), dict(softcap=1.5), dict(softcap=50.0), dict(softcap=0.02),
            dict(softcap=1.5, accumulate=True), dict(softcap=1.5, deterministic=True), dict(scale=-0.2), dict(scale=0.0),
        ):
            check(BACKEND, case(643, 515, head_dim=head_dim, dtype=dtype, bounds=bounds, visits=2, heads=4, kv_heads=2,
                                **changes), "cuda")


@both
def test_tiles_cut_along_the_queries_keep_their_budget(head_dim, dtype):
    """Full masks with fewer key tiles than SMs: several programs add to the same dk and dv."""
    for lengths, accumulate in (((2000, 900), False), ((2000, 900), True), ((5000, 130), False), ((700, 2100), False)):
        check(BACKEND, case(*lengths, head_dim=head_dim, dtype=dtype, bounds="full", accumulate=accumulate, heads=4, kv_heads=2),
              "cuda")


def test_p_rounded_to_16_bits_or_not_and_every_schedule_keep_the_budget(monkeypatch):
    for head_dim in HEAD_DIMS:
        for changes in (dict(packed=True), dict(packed=False), dict(late=True), dict(late=False), dict(init_dp=True),
                        dict(init_dp=False)):
            changed = replace(hopper_backward.VARIANTS[head_dim], **changes)
            monkeypatch.setitem(hopper_backward.VARIANTS, head_dim, changed)
            for dtype in DTYPES:
                check(BACKEND, case(1000, 777, head_dim=head_dim, dtype=dtype, visits=2), "cuda")
            monkeypatch.undo()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probabilities_below_the_normal_numbers_of_fp16_keep_the_budget(dtype):
    """At 16,384 even keys p is 6e-5; times the scale it would be among fp16's subnormal numbers."""
    check(BACKEND, case(16384, 16384, head_dim=64, dtype=dtype, bounds="full", heads=1, kv_heads=1, scale=0.01), "cuda")


def visit(head_dim: int, num_q: int, num_k: int, heads: int = 2, kv_heads: int = 1, behind: float | None = None) -> dict:
    """Random arguments of one causal visit; behind: what fills the 300 rows after the last one of each operand."""
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(count: int, heads: int) -> torch.Tensor:
        x = torch.randn((1, count + 300, heads, head_dim), generator=generator, device="cuda").to(torch.bfloat16)
        if behind is not None:
            x[:, count:] = behind
        return x[:, :count]

    q, dout, k, v = rows(num_q, heads), rows(num_q, heads), rows(num_k, kv_heads), rows(num_k, kv_heads)
    hi = (torch.arange(num_q, dtype=torch.int32) + 1 + num_k - num_q).clamp(0, num_k)
    intervals = Intervals.from_rows(torch.zeros_like(hi), hi, num_k, "cuda")
    state = torch.empty(q.shape, device="cuda")
    lse = torch.empty((1, heads, num_q), device="cuda")
    out = torch.empty_like(q)
    reference.forward(q, k, v, intervals, softmax_scale=0.1, state=state, lse=lse, out=out, first=True)
    return dict(dout=dout, q=q, k=k, v=v, lse=lse, delta=hopper_backward.delta(dout, out), intervals=intervals)


def gradients(arguments: dict, deterministic: bool = False) -> list[torch.Tensor]:
    """dq, dk, dv, written over NaN."""
    made = [torch.full(arguments[name].shape, float("nan"), device="cuda") for name in "qkv"]
    hopper_backward.backward(
        **arguments, softmax_scale=0.1, dq=made[0], dk=made[1], dv=made[2], accumulate_dq=False, accumulate_dkv=False,
        deterministic=deterministic)
    return made


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nan_behind_the_last_row_and_in_dead_rows_of_delta_reaches_nothing(head_dim):
    for num_q, num_k in ((300, 200), (129, 65), (190, 1)):
        arguments = visit(head_dim, num_q, num_k, behind=float("nan"))
        dead = arguments["lse"] == -float("inf")
        assert bool(dead.any())
        arguments["delta"] = torch.where(dead, float("nan"), arguments["delta"])
        for deterministic in (False, True):
            dq, dk, dv = gradients(arguments, deterministic=deterministic)
            assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))
            assert bool((dq.transpose(1, 2)[dead] == 0).all())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_rows_or_no_pairs_give_zeros_or_leave_what_is_there(head_dim):
    for num_q, num_k in ((0, 128), (128, 0), (0, 0), (200, 200)):
        q, k = (torch.randn((1, n, 2, head_dim), device="cuda", dtype=torch.bfloat16) for n in (num_q, num_k))
        none = torch.zeros(num_q, dtype=torch.int32)
        rows = torch.zeros((1, 2, num_q), device="cuda")
        for accumulate in (False, True):
            made = [torch.full(x.shape, 7.0, device="cuda") for x in (q, k, k)]
            hopper_backward.backward(
                q, q, k, k, rows, rows, Intervals.from_rows(none, none, num_k, "cuda"), softmax_scale=0.1, dq=made[0], dk=made[1],
                dv=made[2], accumulate_dq=accumulate, accumulate_dkv=accumulate, deterministic=False)
            assert all(bool((x == (7.0 if accumulate else 0.0)).all()) for x in made)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_that_no_tensor_map_can_describe_are_the_same(head_dim):
    arguments = visit(head_dim, 260, 260)
    want = gradients(arguments, deterministic=True)
    for accumulate in (False, True):
        wide = [torch.full((*x.shape[:-1], 2 * head_dim + 1), 1.0, device="cuda")[..., 1: head_dim + 1] for x in want]
        hopper_backward.backward(**arguments, softmax_scale=0.1, dq=wide[0], dk=wide[1], dv=wide[2], accumulate_dq=accumulate,
                                 accumulate_dkv=accumulate, deterministic=False)
        for got, expected in zip(wide, want):
            assert torch.allclose(got - float(accumulate), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_deterministic_gradients_are_bitwise_repeatable(head_dim):
    arguments = visit(head_dim, 2049, 2049, heads=4, kv_heads=2)
    want = gradients(arguments, deterministic=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(arguments, deterministic=True), want))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dk_and_dv_of_a_causal_visit_whose_programs_are_whole_are_bitwise_repeatable_anyway(head_dim):
    arguments = visit(head_dim, 2049, 2049, heads=16, kv_heads=16)  # 272 programs: none is cut
    want = gradients(arguments)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(gradients(arguments)[1:], want[1:]))


@both
def test_keys_of_one_tile_whose_queries_lie_apart_keep_their_budget(head_dim, dtype):
    """Several programs for such a key tile, and all that lies between its queries left out."""
    for visits, accumulate in ((1, False), (1, True), (3, False)):
        check(BACKEND, case(3000, 1800, head_dim=head_dim, dtype=dtype, bounds="apart", visits=visits, accumulate=accumulate,
                            heads=4, kv_heads=2), "cuda")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_past_2_31_elements_equal_those_of_compact_tensors(head_dim):
    """Views whose rows lie 2^16 elements apart: row 32,768 is the first past 2^31 elements."""
    stride, heads, rows = 1 << 16, 2, (1 << 15) + 130
    if torch.cuda.get_device_properties(0).total_memory < 64 << 30:
        pytest.skip("needs 64 GiB of device memory")

    def wide(dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        buffer = torch.empty((1, rows, stride), dtype=dtype, device="cuda")
        size = heads * head_dim
        return [buffer[..., stride - (i + 1) * size: stride - i * size].unflatten(-1, (heads, head_dim)) for i in range(count)]

    q, k, v, dout, out = wide(torch.bfloat16, 5)
    for x in (q, k, v, dout, out):
        x.normal_()
    dq, dk, dv = wide(torch.float32, 3)
    lo, hi = (torch.arange(rows, dtype=torch.int32) - 299).clamp(min=0), torch.arange(1, rows + 1, dtype=torch.int32)
    intervals = Intervals.from_rows(lo, hi, rows, "cuda")
    lse = torch.full((1, heads, rows), 6.0, device="cuda")
    given = dict(softmax_scale=0.1, accumulate_dq=False, accumulate_dkv=False, deterministic=False)
    hopper_backward.backward(dout, q, k, v, lse, hopper_backward.delta(dout, out), intervals, dq=dq, dk=dk, dv=dv, **given)
    near = [torch.empty(x.shape, device="cuda") for x in (dq, dk, dv)]
    q, k, v, dout, out = (x.contiguous() for x in (q, k, v, dout, out))
    delta = hopper_backward.delta(dout, out)
    hopper_backward.backward(dout, q, k, v, lse, delta, intervals, dq=near[0], dk=near[1], dv=near[2], **given)
    assert torch.equal(dk, near[1]) and torch.equal(dv, near[2])
    assert torch.allclose(dq, near[0], rtol=1e-3, atol=1e-3)
