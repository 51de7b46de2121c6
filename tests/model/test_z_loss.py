"""The z-loss of the chunked cross-entropy: values and gradients of autograd on whole logits; off by default and in evaluation."""
import math

import pytest
import torch
import torch.nn.functional as F

from ringflash.loss import chunked_cross_entropy
from ringflash.model import ModelConfig, Transformer


def make(rows, dim, vocab, dtype, ignored=()):
    g = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[list(ignored)] = -100
    return hidden, weight, labels


def whole(hidden, weight, labels, z):
    """By autograd on all logits in fp64."""
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight.t()
    lse = logits.logsumexp(-1)
    loss = F.cross_entropy(logits, labels, reduction="sum") + z * (lse**2)[labels != -100].sum()
    return (loss, *torch.autograd.grad(loss * 0.37, (hidden, weight)))


@pytest.mark.parametrize("z", [1e-4, 0.3])
@pytest.mark.parametrize("rows", [1, 8, 101])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_value_and_gradients_equal_autograd_on_whole_logits(rows, z, dtype, bound):
    hidden, weight, labels = make(rows, 24, 37, dtype, ignored=[0, 5] if rows > 5 else ())
    loss, _ = chunked_cross_entropy(hidden, weight, labels, chunk_rows=8, z_loss=z)
    expected = whole(hidden, weight, labels, z)
    for got, want in zip((loss, *torch.autograd.grad(loss * 0.37, (hidden, weight))), expected):
        assert (got.double() - want).abs().max() <= bound * want.abs().max()
    plain = whole(hidden, weight, labels, 0.0)
    assert abs(expected[0] - plain[0]) > 1e-5 * plain[0] and not torch.allclose(expected[2], plain[2], rtol=0, atol=1e-6)


def test_gradients_pass_gradcheck():
    hidden, weight, labels = make(5, 3, 4, torch.float64, ignored=[2])
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, labels, chunk_rows=2, z_loss=0.2)[0],
                                    (hidden, weight))


def test_uniform_logits_over_1024_classes_cost_their_logarithm_squared_more():
    labels = torch.arange(50)
    loss, num_valid = chunked_cross_entropy(torch.zeros(50, 4), torch.ones(1024, 4), labels, chunk_rows=16, z_loss=0.01)
    assert (loss / num_valid).item() == pytest.approx(math.log(1024) + 0.01 * math.log(1024) ** 2, rel=1e-6)


def test_ignored_rows_have_no_z_loss_and_may_hold_nan():
    hidden, weight, labels = make(6, 4, 9, torch.float32, ignored=[3])
    with torch.no_grad():
        hidden[3] = math.nan
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_rows=4, z_loss=0.1)[0]
    dhidden, dweight = torch.autograd.grad(loss, (hidden, weight))
    assert loss.isfinite() and dweight.isfinite().all() and dhidden.isfinite().all() and not dhidden[3].any()


@pytest.mark.parametrize("rows", [0, 4])
def test_no_valid_row_gives_exactly_zero(rows):
    hidden, weight, labels = make(rows, 4, 9, torch.float32, ignored=range(rows))
    loss = chunked_cross_entropy(hidden, weight, labels, z_loss=0.1)[0]
    loss.backward()
    assert loss.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


def test_a_model_adds_it_in_training_and_reports_the_cross_entropy_in_evaluation():
    def model(z):
        return Transformer(ModelConfig(vocab_size=31, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, z_loss=z),
                           lambda q, k, v, *, layout, mask=None: q * k + v)

    tokens, positions = torch.arange(40)[None] % 7, torch.arange(40)
    labels = tokens.roll(-1)
    plain, other = model(0.0), model(0.01)
    assert ModelConfig.z_loss == 0.0
    extra = other(tokens, positions, labels) - plain(tokens, positions, labels)
    lse = (plain(tokens, positions) @ plain.head.weight.t()).logsumexp(-1)
    assert extra.item() == pytest.approx(0.01 * lse.square().sum().item(), rel=1e-4)
    assert other.eval()(tokens, positions, labels).item() == plain.eval()(tokens, positions, labels).item()


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf])
def test_what_is_no_finite_number_of_at_least_0_is_refused(z):
    with pytest.raises(ValueError, match="z_loss=.*finite number >= 0"):
        chunked_cross_entropy(*make(2, 3, 4, torch.float32), z_loss=z)
    with pytest.raises(ValueError, match="model.z_loss=.*nearest: 0"):
        ModelConfig(vocab_size=31, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=16, z_loss=z).validate()
