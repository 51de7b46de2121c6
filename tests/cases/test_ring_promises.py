"""What the ring promises in one process, where other systems went wrong: known answers, dead rows, views, which inputs need
gradients, memory, and what a carrier refuses."""
import inspect
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash import Layout, Mask, ring_attention, shard_batch, simulate
from ringflash.kernels.dispatch import select
from ringflash.launch.check_cells import CP_SIZES, LAYOUTS, MASKS, RATIOS, Cell
from ringflash.launch.check_judge import judge_loopback
from ringflash.ring import loop
from ringflash.ring.buffers import BufferPool
from ringflash.ring.loopback import Loopback, drive_all
from ringflash.ring.message import Message
from ringflash.ring.plan import build_plan
from ringflash.tests.support.ring_cases import differing, make_inputs, run

KERNELS = ("reference", "cpu")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_mask_with_every_group_size_is_within_budget_forward_and_backward(layout, kernel):
    cells = [Cell(kernel, ("fp32", "bf16", "fp16")[(m + r) % 3], mask, layout, CP_SIZES[(m + r) % 5], ratio, 19, 8)
             for m, mask in enumerate(MASKS) for r, ratio in enumerate(RATIOS)]
    assert len(cells) == 20
    assert not [f"{v.cell}: {v.why()}" for v in judge_loopback(cells, "cpu") if not v.ok]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cp_size", CP_SIZES)
def test_queries_before_the_first_key_have_known_answers_and_their_nan_gradients_reach_no_key(kernel, cp_size):
    for seq_len, seq_len_k, want, want_lse in (
            (5, 2, [0, 0, 0, 1, 1.5], [-math.inf] * 3 + [0, math.log(2)]), (2, 5, [2.5, 3], [math.log(4), math.log(5)])):
        dead = max(0, seq_len - seq_len_k)
        for layout in LAYOUTS:
            q, k = torch.zeros(1, seq_len, 1, 4, requires_grad=True), torch.zeros(1, seq_len_k, 1, 4, requires_grad=True)
            v = torch.arange(1.0, seq_len_k + 1).reshape(1, -1, 1, 1).repeat(1, 1, 1, 4).requires_grad_()
            out, lse = simulate(q, k, v, cp_size=cp_size, layout=layout, kernel=kernel, return_lse=True)
            dout = torch.ones_like(out)
            dout[:, :dead] = math.nan
            out.backward(dout)
            assert out[0, :, 0, 0].tolist() == pytest.approx(want) and lse[0, 0].tolist() == pytest.approx(want_lse)
            assert torch.equal(q.grad[:, :dead], torch.zeros(1, dead, 1, 4))
            # each of the two live rows spreads its gradient of ones over the keys that it sees
            assert v.grad[0, :, 0, 0].sum().item() == pytest.approx(2) and k.grad.isfinite().all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("causal", (True, False))
def test_each_document_returns_its_own_number_on_every_layout(kernel, causal):
    for lengths in ((4, 8, 6, 10), (1, 27), (3, 1, 1, 16, 7)):
        ends = [0, 0, *torch.tensor(lengths).cumsum(0).tolist(), 28]
        number = torch.repeat_interleave(torch.arange(1.0, len(lengths) + 1), torch.tensor(lengths))
        q, v = torch.zeros(1, 28, 1, 8), number.reshape(1, -1, 1, 1).expand(1, 28, 1, 8)
        for cp_size in (2, 4):
            for layout in LAYOUTS:
                out = simulate(q, q, v, cp_size=cp_size, layout=layout, cu_seqlens=ends, causal=causal, kernel=kernel)
                assert float((out - v).abs().max()) < 1e-5, (lengths, cp_size, layout)      # a leak is at least 1 / 28


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_reaches_exactly_as_far_as_two_layers_let_it_on_every_layout(layout):
    # float64: what two layers carry over 126 positions is below the rounding of float32
    x = torch.randn(1, 512, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 0] += 1

    def two_layers(x, cp_size):
        for _ in range(2):
            x = x + simulate(x, x, x, cp_size=cp_size, layout=layout, window_size=(63, 0), kernel="reference")
        return x

    for cp_size in (2, 8):
        changed = (two_layers(x, cp_size) != two_layers(other, cp_size)).any(-1).flatten().nonzero().flatten()
        assert changed.tolist() == list(range(127)), cp_size


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_transposed_expanded_and_sliced_tensors_give_the_bits_of_contiguous_ones(kernel, dtype):
    plain = make_inputs(12, batch=2, heads=2, kv_heads=2, dtype=dtype)
    row = plain.dout[:, :1, :, :1]
    wide = torch.full((2, 12, 2, 3 * 8), math.nan, dtype=dtype)
    wide[..., 8:16] = plain.dout
    layouts_of_dout = {
        "expanded": (row.expand(2, 12, 2, 8), row.expand(2, 12, 2, 8).contiguous()),
        "sliced": (wide[..., 8:16], plain.dout),
        "transposed": (plain.dout.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0), plain.dout),
    }

    def gradients(tensors, dout):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = simulate(*leaves, cp_size=3, kernel=kernel, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    contiguous = (plain.q, plain.k, plain.v)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in contiguous]
    dims_first = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in contiguous]
    for name, (view, dense) in layouts_of_dout.items():
        want = gradients(contiguous, dense)
        for given in (contiguous, heads_first, dims_first):
            assert all(torch.equal(x, y) for x, y in zip(gradients(given, view), want)), name


def test_an_expanded_key_collects_the_gradients_of_all_its_uses():
    plain = make_inputs(12, heads=2, kv_heads=2, dtype=torch.float64)
    one = plain.k[:, :, :1].clone().requires_grad_()
    out = simulate(plain.q, one.expand(1, 12, 2, 8), plain.v, cp_size=3, kernel="reference")
    out.backward(plain.dout)
    expanded = plain.k[:, :, :1].repeat(1, 1, 2, 1).requires_grad_()
    simulate(plain.q, expanded, plain.v, cp_size=3, kernel="reference").backward(plain.dout)
    torch.testing.assert_close(one.grad, expanded.grad.sum(2, keepdim=True))


@pytest.mark.parametrize("needed", (("q",), ("k",), ("v",), ("k", "v"), ("q", "v")))
def test_only_the_inputs_that_need_a_gradient_get_one_and_it_is_the_same(needed):
    inputs = make_inputs(11)
    for attend, options in ((ring_attention, {}), (simulate, {"cp_size": 3})):
        everything = run(attend, inputs, kernel="reference", **options)
        tensors = {name: getattr(inputs, name).detach().clone().requires_grad_(name in needed) for name in "qkv"}
        out, lse = attend(*tensors.values(), kernel="reference", return_lse=True, **options)
        torch.autograd.backward([out, lse], [inputs.dout, inputs.dlse])
        for name, x in tensors.items():
            assert (x.grad is None) == (name not in needed)
            assert x.grad is None or torch.equal(x.grad, everything[f"d{name}"])


class _Largest(TorchDispatchMode):
    """The most elements that any tensor made under it has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tensor_of_a_ring_grows_with_the_square_of_the_length(layout):
    def largest(seq_len):
        inputs = make_inputs(seq_len, heads=2, kv_heads=1)
        with _Largest() as found:
            run(simulate, inputs, cp_size=4, layout=layout, kernel="cpu")
        return found.elements

    # 2^18 is what the cpu kernel's tile of scores may take; q has 2 * 8 elements a row.
    assert largest(2048) <= max(2**18, 2048 * 16) and largest(4096) <= max(2**18, 4096 * 16)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_of_a_rank_are_a_few_blocks_whatever_the_size_of_the_ring(layout, causal, monkeypatch):
    pools = []
    plain = BufferPool.__init__
    monkeypatch.setattr(BufferPool, "__init__", lambda self, *arguments: pools.append(self) or plain(self, *arguments))
    for cp_size in (2, 4, 8):
        pools.clear()
        run(simulate, make_inputs(64 * cp_size), cp_size=cp_size, layout=layout, causal=causal, kernel="reference")
        assert len(pools) == 3 * cp_size                    # keys in both passes, and gradients
        for pool in pools:
            sizes = {slot: buffer.shape[0] for slot, buffer in pool._buffers.items()}
            assert all(rows <= 64 for rows in sizes.values()), sizes
            # keys: two to receive and one to send; gradients: two partial, two to receive, those on the way, those coming home
            assert len(sizes) <= (3 if not any(slot[0] in ("partial", "home") for slot in sizes) else 9), sizes


@pytest.mark.parametrize("target", (torch.zeros(2, 1, 1, 4), torch.zeros(3, 1, 1, 4, dtype=torch.bfloat16)))
def test_a_receive_of_another_size_or_dtype_is_an_error_that_names_the_message(target):
    message = Message(0, "kv", 0, 1, 0, 1, ((0, 3),))
    shared = Loopback("forward")
    shared.carrier(0).post(0, [(message, torch.zeros(3, 1, 1, 4))], [])
    with pytest.raises(RuntimeError, match=r"kv of rank 0 .*sent \(3, 1, 1, 4\) torch.float32, awaited"):
        shared.carrier(1).post(0, [], [(message, target)])


def test_an_end_that_reads_before_its_message_came_is_an_error():
    shared = Loopback("forward")
    pending = shared.carrier(0).post(0, [(Message(0, "kv", 0, 1, 0, 1, ((0, 1),)), torch.zeros(1))], [])
    with pytest.raises(RuntimeError, match="rank 0 at step 0 waits for messages that the other end has not posted"):
        pending.wait()


def test_gradients_travel_and_add_up_in_float32_for_16_bit_inputs():
    seen = []

    class Watched(Loopback):
        def deliver(self, message, source, target):
            seen.append((message.kind, source.dtype))
            super().deliver(message, source, target)

    layout = Layout("zigzag", 24, 3)
    plan, backend = build_plan(Mask(), layout), select("cpu", device="cpu", dtype=torch.bfloat16, head_dim=8)
    inputs = make_inputs(24, dtype=torch.bfloat16)
    shared, gradients = Watched("backward"), [[] for _ in range(3)]
    out, lse = simulate(inputs.q, inputs.k, inputs.v, cp_size=3, kernel="cpu", return_lse=True)
    rows = [torch.from_numpy(layout.positions(rank)) for rank in range(3)]
    drive_all([loop.backward(plan, rank, inputs.dout[:, rows[rank]], None,
                             *(x[:, rows[rank]] for x in (inputs.q, inputs.k, inputs.v, out)), lse[:, :, rows[rank]], backend,
                             shared.carrier(rank), softmax_scale=0.5, deterministic=True, gradients=gradients[rank])
               for rank in range(3)])
    assert set(seen) == {("kv", torch.bfloat16), ("dkv", torch.float32)}
    assert all(x.dtype == torch.bfloat16 for of_rank in gradients for x in of_rank)


def test_the_public_signatures_are_the_documented_ones_in_order():
    def names(function):
        return list(inspect.signature(function).parameters)

    options = ["mask", "layout", "group", "softmax_scale", "softcap", "sinks", "kernel", "exchange", "deterministic",
               "return_lse", "rotate", "layout_k", "causal", "window_size", "cu_seqlens", "routing"]
    assert names(ring_attention) == ["q", "k", "v", *options]
    defaults = [p.default for p in inspect.signature(ring_attention).parameters.values()][3:]
    assert defaults == [None, "zigzag", None, None, 0.0, None, "auto", "auto", False, False, "auto", None, None, None, None,
                        "auto"]
    assert set(options) - {"group"} | {"cp_size"} <= set(names(simulate))
    assert names(Mask) == ["causal", "window_size", "cu_seqlens", "cu_seqlens_k", "prefix_lens", "chunk_size", "first_tokens"]
    assert names(Layout)[:5] == ["kind", "seq_len", "cp_size", "masks", "ulysses_size"]
    assert names(shard_batch)[:2] == ["batch", "layout"]
