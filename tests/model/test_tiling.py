"""train.tile_rows: norms and MLP by tiles of rows are the same function; nothing wide is ever there for all rows, and weight
gradients are fp32 sums. train.residual_dtype and train.loss beside it."""
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ringflash.model import tiled as tiled_module
from ringflash.model.liger_loss import require_liger
from ringflash.model.rowwise import linear, rms_norm
from ringflash.model.tiled import row_gradients, tiled, tiles
from ringflash.tests.support.activation_cases import PLAIN, POLICIES, RICH, batch, model, step


def worst(a, b):
    """The largest difference of a gradient, as a part of its largest element."""
    return max(float((a.gradients[n] - g).abs().max() / g.abs().max()) for n, g in b.gradients.items())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("tile_rows", [3, 16, 50, 1000])
def test_tiles_of_any_size_give_the_loss_and_the_gradients_of_all_rows_at_once(tile_rows, bf16):
    tokens, labels = batch(50, rows=2)
    found = [step(model(RICH, tile_rows=n), tokens, torch.arange(50), labels, "contiguous", bf16=bf16) for n in (0, tile_rows)]
    # Products of bf16 are exact in fp32 whatever the tile: even there only the order of fp32 sums differs.
    assert abs(found[0].loss - found[1].loss) <= 1e-6 * abs(found[0].loss)
    assert worst(found[1], found[0]) < 3e-6


@pytest.mark.parametrize("num_rows, tile_rows, expected", [
    (0, 4, [(0, 0)]), (1, 4, [(0, 1)]), (8, 4, [(0, 4), (4, 8)]), (9, 4, [(0, 4), (4, 8), (8, 9)]), (9, 0, [(0, 9)]),
    (0, 0, [(0, 0)])])
def test_tiles_cover_every_row_once_and_are_never_none(num_rows, tile_rows, expected):
    assert [(rows.start, rows.stop) for rows in tiles(num_rows, tile_rows)] == expected


@pytest.mark.parametrize("policy", ["none", "block"])
def test_a_rank_without_rows_has_loss_zero_and_gradients_of_zeros(policy):
    made = model(replace(RICH, sinks=False), lambda q, k, v, **_: q, activations=policy, tile_rows=4)
    empty = torch.empty(1, 0, dtype=torch.int64)
    done = step(made, empty, empty[0], empty, "contiguous", bf16=True)
    assert done.loss == 0 and all(not g.any() for g in done.gradients.values())


def test_rows_know_which_they_are_and_outputs_may_be_several():
    x = torch.randn(2, 11, 3, requires_grad=True)
    w = torch.randn(3, requires_grad=True)

    def function(rows, x):
        places = torch.arange(11.0)[rows, None]
        return x * w * places, (x.sum(-1), )[0]

    for n in (0, 4):
        outputs = tiled(function, n, (x,), [w])
        assert torch.equal(outputs[0], x * w * torch.arange(11.0)[:, None]) and torch.equal(outputs[1], x.sum(-1))
        found = torch.autograd.grad((outputs[0].square().sum() + outputs[1].sum()), (x, w))
        expected = torch.autograd.grad((x * w * torch.arange(11.0)[:, None]).square().sum() + x.sum(), (x, w))
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(found, expected))


class Largest(TorchDispatchMode):
    """The most elements of one tensor that any operator returned; parameters and attention aside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and not func.name().startswith("ringflash::"):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("policy", POLICIES)
def test_with_tiles_nothing_wider_than_the_model_is_there_for_all_rows(policy):
    config = replace(PLAIN, num_layers=2, ffn_dim=160, loss_chunk_rows=64)
    tokens, labels = batch(300)
    largest = {}
    for tile_rows in (0, 50):
        made = model(config, activations=policy, tile_rows=tile_rows, residual_dtype=torch.bfloat16)
        with Largest() as seen:
            step(made, tokens, torch.arange(300), labels, "contiguous", bf16=True)
        largest[tile_rows] = seen.elements
    assert largest[50] == 300 * config.dim, "rows of the residual stream"
    assert largest[0] == 300 * config.ffn_dim, "without tiles the MLP's"


def test_of_all_rows_nothing_is_fp32_where_the_residual_stream_is_bf16():
    config, kinds = replace(PLAIN, num_layers=2, loss_chunk_rows=32), set()

    class Kinds(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() >= 200 * config.dim:
                kinds.add((func.name().split(".")[0], out.dtype))
            return out

    made = model(config, activations="block_save_attention", tile_rows=50, residual_dtype=torch.bfloat16)
    tokens, labels = batch(200)
    with Kinds():
        step(made, tokens, torch.arange(200), labels, "contiguous", bf16=True)
    # The table's own dtype, at both ends.
    assert {name for name, dtype in kinds if dtype == torch.float32} <= {"aten::embedding", "aten::_to_copy"}
    assert {dtype for _, dtype in kinds} == {torch.float32, torch.bfloat16}


# Weight gradients

def _products(num_rows):
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(1, num_rows, 8, generator=g) + 0.5, torch.randn(6, 8, generator=g)
    return x.bfloat16(), w, (torch.randn(1, num_rows, 6, generator=g) + 0.5).bfloat16()


def test_weight_gradients_of_bf16_products_are_summed_over_tiles_in_fp32_and_never_rounded(monkeypatch):
    x, w, dy = _products(4096)
    exact = dy[0].double().t() @ x[0].double()

    def error(tile_rows, function=linear):
        leaf = w.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            found = row_gradients(lambda rows, x: function(x, leaf), tile_rows, (x,), [leaf], (dy,))[1]
        assert found.dtype == torch.float32
        return float((found.double() - exact).abs().max() / exact.abs().max())

    assert max(error(n) for n in (0, 64, 1000)) < 4e-6
    # What torch's own autocast does: rounds the product of every tile to bf16.
    assert error(64, F.linear) > 1e-4
    zeros = torch.zeros_like
    monkeypatch.setattr(tiled_module.torch, "zeros_like", lambda x, dtype: zeros(x, dtype=torch.bfloat16))
    assert error(64) > 1e-3, "a sum in bf16 must show"


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
def test_linear_has_the_values_and_gradient_dtypes_of_autocast(x_dtype, weight_dtype):
    x, w, dy = _products(40)
    found = {}
    for name, function in (("ours", linear), ("torch", F.linear)):
        leaves = x.to(x_dtype).requires_grad_(), w.to(weight_dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(*leaves)
        found[name] = (y, *torch.autograd.grad(y, leaves, dy))
    for a, b in zip(found["ours"], found["torch"], strict=True):
        assert a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=1e-2)
    assert torch.equal(found["ours"][0], found["torch"][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_keeps_its_input_alone_and_has_the_gradients_of_fp64(dtype):
    g = torch.Generator().manual_seed(1)
    x, w, dy = torch.randn(2, 9, 16, generator=g), torch.rand(16, generator=g) + 0.5, torch.randn(2, 9, 16, generator=g)
    leaves = x.to(dtype).requires_grad_(), w.clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = rms_norm(*leaves, 1e-5)
    assert y.dtype == dtype and {t.data_ptr() for t in saved} == {leaf.data_ptr() for leaf in leaves}
    found = torch.autograd.grad(y, leaves, dy.to(dtype))
    exact = leaves[0].detach().double().requires_grad_(), w.double().requires_grad_()
    expected = exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]
    eps = torch.finfo(dtype).eps
    assert (y.double() - expected).abs().max() <= eps * expected.abs().max()
    for a, leaf, b in zip(found, leaves, torch.autograd.grad(expected, exact, dy.to(dtype).double()), strict=True):
        assert a.dtype == leaf.dtype and (a.double() - b).abs().max() <= 2 * torch.finfo(a.dtype).eps * b.abs().max() + 1e-6


# The residual stream

def test_a_bf16_residual_stream_stays_within_twice_the_error_of_bf16_products():
    """In eight layers, against the same step in fp32. The products' own roundings make most of the error either way."""
    config = replace(PLAIN, num_layers=8, init_std=0.1)
    tokens, labels = batch(64, rows=4)
    exact = step(model(config), tokens, torch.arange(64), labels, "contiguous")
    errors = {}
    for residual in (None, torch.bfloat16):
        found = step(model(config, residual_dtype=residual), tokens, torch.arange(64), labels, "contiguous", bf16=True)
        errors[residual] = {n: float((found.gradients[n] - g).norm() / g.norm()) for n, g in exact.gradients.items()}
    for name, error in errors[torch.bfloat16].items():
        assert 0 < error <= 2 * errors[None][name] + 2 * 2**-8, (name, error, errors[None][name])


def test_a_bf16_residual_stream_without_bf16_products_is_refused():
    tokens, labels = batch(8)
    with pytest.raises(ValueError, match="train.residual_dtype=bf16: activations are fp32 here"):
        step(model(residual_dtype=torch.bfloat16), tokens, torch.arange(8), labels, "contiguous")


# Liger's loss

def test_ligers_loss_is_refused_by_name_where_it_cannot_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ValueError, match="train.loss=liger: the package liger-kernel cannot be imported"):
        model(loss="liger")
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="train.loss=liger: its kernels need a GPU"):
        require_liger()
