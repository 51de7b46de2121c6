"""The CPU kernel against the oracle, within budget, on the shapes, views and flags that a ring uses."""
import pytest
import torch

from ringflash.kernels import cpu, reference
from ringflash.kernels.intervals import Intervals
from ringflash.tests.support.budgets import assert_within_budget
from ringflash.tests.support.masks import allowed_pairs, interval_mask, random_intervals, split_keys
from ringflash.tests.support.oracle import attention_oracle, eager_attention
from ringflash.tests.support.visits import attend_in_visits, random_inputs

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def judge(q, k, v, dout, k_lo, k_hi, key_blocks, dlse=None, backend=cpu, **scores):
    ours = attend_in_visits(backend, q, k, v, k_lo, k_hi, key_blocks, dout=dout, dlse=dlse, **scores)
    mask = dict(allowed=interval_mask(k_lo, k_hi, k.shape[1]), dout=dout, dlse=dlse, **scores)
    assert_within_budget(ours, attention_oracle(q, k, v, **mask), eager_attention(q, k, v, **mask))


def ends_of(Sq: int, Sk: int, **mask):
    allowed = allowed_pairs(torch.arange(Sq), torch.arange(Sk), seq_len_q=Sq, seq_len_k=Sk, **mask)
    counts = allowed.sum(1).to(torch.int32)
    k_lo = allowed.int().argmax(1).to(torch.int32)
    k_hi = torch.where(counts > 0, k_lo + counts, 0).cummax(0).values
    return torch.where(counts > 0, k_lo, k_hi), k_hi  # empty rows keep the ends monotone


@pytest.fixture(params=["one chunk", "chunks of few rows"])
def chunking(request, monkeypatch):
    if request.param == "chunks of few rows":
        monkeypatch.setattr(cpu, "_MAX_ROWS", 8)
        monkeypatch.setattr(cpu, "_MIN_ROWS", 2)
        monkeypatch.setattr(cpu, "_TILE_ELEMENTS", 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("Hq, Hkv", [(2, 2), (4, 1), (7, 1), (8, 1)])
def test_random_intervals_in_one_to_four_visits(chunking, dtype, Hq, Hkv):
    for seed, (Sq, Sk) in enumerate([(1, 1), (37, 37), (41, 13), (13, 41), (64, 64), (1, 53), (53, 1), (31, 33)]):
        inputs = random_inputs(Sq, Sk, Hq, Hkv, 16, dtype, seed, B=1 + seed % 2)
        judge(*inputs, *random_intervals(Sq, Sk, seed), split_keys(Sk, 1 + seed % 4, seed))


@pytest.mark.parametrize("Sq, Sk", [(23, 23), (23, 9), (9, 23)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("D", [4, 32, 80])
def test_gradients_for_queries_fewer_as_many_and_more_than_keys(chunking, Sq, Sk, causal, D):
    inputs = random_inputs(Sq, Sk, 4, 2, D, torch.float32, seed=D)
    judge(*inputs, *ends_of(Sq, Sk, causal=causal), split_keys(Sk, 2, seed=1))


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 20.0, 50.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_capped_scores_large_and_small_with_sinks_and_empty_rows(chunking, backend, dtype, softcap, sinks):
    for seed, scale in enumerate((0.02, 1.0, 16.0)):
        inputs = random_inputs(19, 23, 4, 2, 16, dtype, seed, B=1 + seed % 2)
        dlse = torch.randn(1 + seed % 2, 4, 19, generator=torch.Generator().manual_seed(seed))
        judge(*inputs, *random_intervals(19, 23, seed), split_keys(23, 1 + seed, seed), dlse, backend, softmax_scale=scale,
              softcap=softcap, sinks=torch.tensor([-1.0, 0.0, 2.5, 60.0]) if sinks else None)


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D, Dv", [(16, 8), (16, 32), (16, 1), (1, 16), (24, 16)])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_values_have_a_head_dim_of_their_own(chunking, backend, dtype, D, Dv, softcap):
    for seed in range(4):
        inputs = random_inputs(29, 35, 8, 2, D, dtype, seed, Dv=Dv)
        judge(*inputs, *random_intervals(29, 35, seed), split_keys(35, 1 + seed, seed), backend=backend, softcap=softcap)


def test_windows_documents_and_the_gradient_of_lse(chunking):
    for seed, mask in enumerate([dict(window_size=(5, 0)), dict(window_size=(0, 0)), dict(cu_seqlens=[0, 0, 11, 12, 40]),
                                 dict(cu_seqlens=[0, 20, 44], window_size=(3, 0)), dict(causal=False, window_size=(2, 3))]):
        inputs = random_inputs(47, 47, 4, 2, 8, torch.float32, seed)
        dlse = torch.randn(1, 4, 47, generator=torch.Generator().manual_seed(seed))
        judge(*inputs, *ends_of(47, 47, **mask), split_keys(47, 3, seed), dlse=dlse)


def test_a_sequence_of_many_chunks():
    inputs = random_inputs(700, 700, 2, 1, 16, torch.float32, seed=0)
    judge(*inputs, *ends_of(700, 700), [torch.arange(350), torch.arange(350, 700)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_expanded_and_strided_views_give_the_same_bits_as_contiguous_ones(dtype):
    q, k, v, dout = random_inputs(19, 19, 4, 2, 8, dtype, seed=2)
    dout[:] = dout[:, :1]
    ends = ends_of(19, 19)
    plain = attend_in_visits(cpu, q, k, v, *ends, [torch.arange(19)], dout=dout)
    fused = torch.zeros(1, 19, 3, 4, 8, dtype=dtype)
    fused[:, :, 0], fused[:, :, 1, ::2], fused[:, :, 2, :2] = q, k, v
    views = (
        fused[:, :, 0],  # a slice of a fused buffer
        fused[:, :, 1, ::2],  # every other head
        v.transpose(1, 3).contiguous().transpose(1, 3),  # last stride is not 1
        dout[:, :1].expand(1, 19, 4, 8),  # row stride 0
    )
    strided = attend_in_visits(cpu, *views[:3], *ends, [torch.arange(19)], dout=views[3])
    assert all(torch.equal(plain[name], strided[name]) for name in plain)


def test_first_visit_reads_no_state_and_last_visit_writes_every_row():
    q, k, v, _ = random_inputs(6, 6, 2, 1, 4, torch.float32, seed=5)
    k_lo, k_hi = torch.tensor([0, 0, 0, 3, 3, 3], dtype=torch.int32), torch.tensor([0, 0, 2, 3, 3, 3], dtype=torch.int32)
    some, none = Intervals.from_rows(k_lo, k_hi, 6, "cpu"), Intervals.from_rows(k_lo, k_lo, 6, "cpu")
    for backend in (cpu, reference):
        nan = [torch.full(shape, torch.nan) for shape in ((1, 6, 2, 4), (1, 2, 6), (1, 8, 6, 4))]
        state, lse, wide = nan
        out = wide[:, 1:7, 2:4]  # strided; what lies around it stays as it was
        backend.forward(q, k, v, some, softmax_scale=0.5, state=state, lse=lse, out=None, first=True)
        assert bool((state[:, [0, 1, 3, 4, 5]] == 0).all())
        assert lse[0, 0].isinf().tolist() == [True, True, False, True, True, True]
        before = state.clone(), lse.clone()
        backend.forward(q, k, v, none, softmax_scale=0.5, state=state, lse=lse, out=out, first=False)
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1])
        assert int(wide.isnan().sum()) == wide.numel() - out.numel()


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_accumulate_adds_and_otherwise_every_row_is_written(backend, empty, softcap):
    q, k, v, dout = random_inputs(12, 9, 4, 2, 8, torch.float32, seed=6, Dv=6)
    k_lo, k_hi = random_intervals(12, 9, seed=0)
    intervals = Intervals.from_rows(k_lo, k_lo if empty else k_hi, 9, "cpu")
    lse, out = torch.empty(1, 4, 12), torch.empty_like(dout)
    backend.forward(q, k, v, intervals, softmax_scale=0.3, softcap=softcap, state=None, lse=lse, out=out, first=True)
    delta = backend.delta(dout, out)

    def grads(fill, accumulate_dq, accumulate_dkv):
        dq, dkv = torch.full((1, 12, 4, 8), fill[0]), torch.full((9, 1, 2, 14), fill[1])
        dk, dv = dkv.transpose(0, 1).split((8, 6), -1)
        backend.backward(dout, q, k, v, lse, delta, intervals, softmax_scale=0.3, softcap=softcap, dq=dq, dk=dk, dv=dv,
                         accumulate_dq=accumulate_dq, accumulate_dkv=accumulate_dkv, deterministic=True)
        return dq, dk, dv

    fresh = grads((torch.nan, torch.nan), False, False)
    assert all(bool(x.isfinite().all()) for x in fresh) and (not empty or all(bool((x == 0).all()) for x in fresh))
    added = grads((0.5, torch.nan), True, False)
    assert torch.equal(added[0], 0.5 + fresh[0]) and torch.equal(added[1], fresh[1]) and torch.equal(added[2], fresh[2])
    added = grads((torch.nan, 0.5), False, True)
    assert torch.equal(added[0], fresh[0]) and torch.equal(added[1], 0.5 + fresh[1]) and torch.equal(added[2], 0.5 + fresh[2])


@pytest.mark.parametrize("backend", [cpu, reference])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_rows_without_keys_contribute_nothing_whatever_their_delta_holds(backend, softcap):
    q, k, v, dout = random_inputs(4, 4, 1, 1, 4, torch.float32, seed=8)
    intervals = Intervals.from_rows(*ends_of(4, 4), 4, "cpu")
    lse, delta = torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)
    lse[..., 2], delta[..., 2] = -torch.inf, torch.nan
    dq, dk, dv = (torch.full((1, 4, 1, 4), torch.nan) for _ in range(3))
    backend.backward(dout, q, k, v, lse, delta, intervals, softmax_scale=0.1, softcap=softcap, dq=dq, dk=dk, dv=dv,
                     accumulate_dq=False, accumulate_dkv=False, deterministic=True)
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv)) and bool((dq[:, 2] == 0).all()) and bool((dq[:, 3] != 0).any())


@pytest.mark.parametrize("Sq, Sk", [(0, 4), (4, 0), (0, 0)])
def test_lengths_of_zero_are_legal(Sq, Sk):
    q, k, v, dout = random_inputs(Sq, Sk, 2, 1, 4, torch.bfloat16, seed=0)
    ends = torch.zeros(Sq, dtype=torch.int32)
    for blocks in ([torch.arange(Sk)], [torch.arange(Sk), torch.arange(0)]):
        ours = attend_in_visits(cpu, q, k, v, ends, ends, blocks, dout=dout)
        assert bool((ours["lse"] == -torch.inf).all()) and ours["out"].dtype == torch.bfloat16
        assert all(bool((ours[name] == 0).all()) for name in ("out", "dq", "dk", "dv"))


def test_two_runs_give_the_same_bits():
    inputs = random_inputs(130, 130, 4, 2, 16, torch.float32, seed=9)
    ends, blocks = ends_of(130, 130), split_keys(130, 3, seed=9)
    runs = [attend_in_visits(cpu, *inputs[:3], *ends, blocks, dout=inputs[3]) for _ in range(3)]
    assert all(torch.equal(runs[0][name], run[name]) for run in runs[1:] for name in run)


def test_no_tensor_has_as_many_elements_as_pairs(monkeypatch):
    rows = 4096
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(cpu.torch, "empty", lambda *shape, **kw: sizes.append(empty(*shape, **kw).numel()) or empty(*shape, **kw))
    ends = torch.zeros(rows, dtype=torch.int32), torch.arange(1, rows + 1, dtype=torch.int32)
    intervals = Intervals.from_rows(*ends, rows, "cpu")
    cpu._buffer(cpu._chunks(intervals, 1), 1)
    assert 0 < max(sizes) <= cpu._TILE_ELEMENTS < rows * rows / 32
    assert max(chunk.stop - chunk.start for chunk in cpu._chunks(intervals, 1)) <= cpu._MAX_ROWS


def test_relaxed_matmul_precision_and_autocast_do_not_reach_the_kernel():
    q, k, v, dout = random_inputs(16, 16, 2, 1, 32, torch.float32, seed=3)
    ends = ends_of(16, 16)
    plain = attend_in_visits(cpu, q, k, v, *ends, [torch.arange(16)], dout=dout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = attend_in_visits(cpu, q, k, v, *ends, [torch.arange(16)], dout=dout)
    assert all(torch.equal(plain[name], under[name]) for name in plain)
