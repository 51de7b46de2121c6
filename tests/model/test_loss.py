"""Claims about the chunked cross-entropy."""
import math

import pytest
import torch
import torch.nn.functional as F

import ringflash.loss as loss_module
from ringflash.loss import chunked_cross_entropy


def make(rows, dim=24, vocab=37, dtype=torch.float32, device="cpu", ignored=(), seed=0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, dim, generator=g) / 4).to(device, dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,), generator=g)
    labels[list(ignored)] = -100
    return hidden, weight, labels.to(device)


def eager_gradients(hidden, weight, labels, dtype, scale=1.0):
    """Loss and gradients of the whole-matrix computation in dtype."""
    h, w = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
    loss = F.cross_entropy(h @ w.t(), labels, reduction="sum") * scale
    return (loss, *torch.autograd.grad(loss, (h, w)))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 101])
@pytest.mark.parametrize("chunk_rows", [1, 8, 1024])
def test_loss_and_gradients_equal_whole_matrix_cross_entropy(rows, chunk_rows):
    hidden, weight, labels = make(rows, ignored=[0, rows - 1] if rows > 2 else ())
    loss, num_valid = chunked_cross_entropy(hidden, weight, labels, chunk_rows=chunk_rows)
    got = (loss, *torch.autograd.grad(loss * 0.37, (hidden, weight)))
    expected = eager_gradients(hidden, weight, labels, torch.float64, 0.37)
    assert num_valid.item() == (labels != -100).sum() and num_valid.dtype == torch.int64
    assert loss.dtype == torch.float32
    assert abs(loss.item() * 0.37 - expected[0].item()) <= 1e-6 * abs(expected[0].item())
    for g, e in zip(got[1:], expected[1:]):
        assert (g.double() - e).abs().max() <= 1e-6 * e.abs().max()
    theirs = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    assert abs(loss.item() - theirs.item()) <= 1e-6 * theirs.item()


def test_gradients_pass_gradcheck_in_fp64():
    hidden, weight, labels = make(5, dim=3, vocab=4, dtype=torch.float64, ignored=[2])
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, labels, chunk_rows=2)[0], (hidden, weight))


def test_uniform_logits_over_1024_classes_cost_6_931472_per_token():
    labels = torch.arange(50)
    loss, num_valid = chunked_cross_entropy(torch.zeros(50, 4), torch.ones(1024, 4), labels, chunk_rows=16)
    assert abs((loss / num_valid).item() - 6.931472) < 1e-6


@pytest.mark.parametrize("ignore_all", [False, True])
def test_no_valid_row_gives_exactly_zero_loss_and_zero_gradients(ignore_all):
    hidden, weight, labels = make(6 if ignore_all else 0, ignored=range(6) if ignore_all else ())
    loss, num_valid = chunked_cross_entropy(hidden, weight, labels, chunk_rows=4)
    loss.backward()
    assert loss.item() == 0.0 and num_valid.item() == 0
    assert hidden.grad.shape == hidden.shape and not hidden.grad.any()
    assert weight.grad.shape == weight.shape and not weight.grad.any()


def test_ignored_rows_may_hold_nan():
    hidden, weight, labels = make(9, ignored=[4])
    clean = chunked_cross_entropy(hidden, weight, labels, chunk_rows=4)[0]
    poisoned = hidden.detach().clone()
    poisoned[4] = math.nan
    poisoned.requires_grad_()
    loss = chunked_cross_entropy(poisoned, weight, labels, chunk_rows=4)[0]
    dhidden, dweight = torch.autograd.grad(loss, (poisoned, weight))
    expected = torch.autograd.grad(clean, (hidden, weight))
    assert loss.item() == clean.item()
    assert torch.equal(dhidden, expected[0]) and not dhidden[4].any()
    assert torch.equal(dweight, expected[1])


def test_logits_of_thousands_do_not_overflow():
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[5000.0], [-5000.0]], requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.tensor([0, 1]))[0]
    assert loss.item() == 10000.0
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def needs(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_within_twice_that_of_eager_with_fp32_logits(dtype, device):
    needs(device)
    hidden, weight, labels = make(300, dim=64, vocab=129, dtype=dtype, device=device, ignored=[7])
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_rows=32)[0]
    got = (loss, *torch.autograd.grad(loss, (hidden, weight)))
    eager_loss = F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")
    eager = (eager_loss, *torch.autograd.grad(eager_loss, (hidden, weight)))
    exact = eager_gradients(hidden, weight, labels, torch.float64)
    assert loss.dtype == torch.float32
    for g, b, e, like in zip(got, eager, exact, (loss, hidden, weight)):
        assert g.dtype == like.dtype and g.isfinite().all()
        budget = 2 * (b.double() - e).abs().max() + 2 * torch.finfo(like.dtype).eps * e.abs().max()
        assert (g.double() - e).abs().max() <= budget


def test_weight_gradient_of_many_chunks_is_summed_in_fp32():
    # 4,096 equal contributions: in bf16 a running sum stops growing at 256 times the addend.
    rows, dtype = 4096, torch.bfloat16
    hidden = torch.ones(rows, 1, dtype=dtype)
    weight = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.int64), chunk_rows=1)[0]
    loss.backward()
    assert weight.grad.tolist() == [[-rows / 2], [rows / 2]]


def test_fp16_gradients_survive_division_by_a_million_tokens():
    # The scale is applied after the products, in fp32. A defect that scales dlogits first rounds every one of them to 0.
    hidden = torch.full((64, 1), 1000.0, dtype=torch.float16)
    weight = torch.zeros(1024, 1, dtype=torch.float16, requires_grad=True)
    labels = torch.arange(1, 65)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_rows=16)[0] / 2**20
    loss.backward()
    exact = 64 * 1000 / 1024 / 2**20  # of class 0, which no label names: the sum of its probabilities times hidden
    assert abs(weight.grad[0].item() / exact - 1) < 2e-3


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_rounds_the_operands_and_nothing_else(device):
    needs(device)
    hidden, weight, labels = make(200, dim=64, vocab=129, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_rows=64)[0]
    got = torch.autograd.grad(loss, (hidden, weight))
    rounded = [t.detach().bfloat16().float() for t in (hidden, weight)]
    expected = eager_gradients(*rounded, labels, torch.float64)
    assert loss.dtype == torch.float32 and abs(loss.item() / expected[0].item() - 1) < 1e-6
    for g, e in zip(got, expected[1:]):
        assert g.dtype == torch.float32
        # On a GPU dlogits is a 16-bit operand too; elsewhere it is not, and the gradient is that of the rounded operands.
        assert (g.double() - e).abs().max() <= (1e-6 if device == "cpu" else 2**-8) * e.abs().max()


def test_16_bit_hidden_with_fp32_weights_loses_no_digit_of_the_weights():
    hidden, weight, labels = make(60)
    narrow = hidden.detach().bfloat16().requires_grad_()
    loss = chunked_cross_entropy(narrow, weight, labels)[0]
    dhidden, dweight = torch.autograd.grad(loss, (narrow, weight))
    expected = eager_gradients(narrow, weight, labels, torch.float64)
    assert abs(loss.item() / expected[0].item() - 1) < 1e-6 and dhidden.dtype == torch.bfloat16
    assert (dweight.double() - expected[2]).abs().max() <= 1e-6 * expected[2].abs().max()


def test_logits_exist_one_chunk_at_a_time_and_are_not_kept(monkeypatch):
    """Every product with the vocabulary has at most chunk_rows rows, and only inputs are saved for the backward."""
    shapes = []
    matmul = loss_module._matmul

    def spy(a, b, dtype):
        out = matmul(a, b, dtype)
        shapes.append(tuple(out.shape))
        return out

    monkeypatch.setattr(loss_module, "_matmul", spy)
    hidden, weight, labels = make(100, dim=24, vocab=37)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_rows=16)[0]
    assert sorted(t.numel() for t in saved) == sorted([hidden.numel(), weight.numel(), labels.numel()])
    assert len(shapes) == 7 and max(shapes) == (16, 37)
    shapes.clear()
    loss.backward()
    assert set(shapes) == {(16, 37), (4, 37), (16, 24), (4, 24), (37, 24)}


def peak_elements(rows, backward):
    """Largest number of elements of any tensor that the loss makes, hidden-sized ones apart."""
    from torch.utils._python_dispatch import TorchDispatchMode

    hidden, weight, labels = make(rows, dim=8, vocab=64)

    class Largest(TorchDispatchMode):
        value = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(t, torch.Tensor) and t.shape not in (hidden.shape, labels.shape):
                    self.value = max(self.value, t.numel())
            return out

    with Largest() as largest:
        loss = chunked_cross_entropy(hidden, weight, labels, chunk_rows=32)[0]
        if backward:
            loss.backward()
    return largest.value


@pytest.mark.parametrize("backward", [False, True])
def test_no_tensor_of_head_and_loss_grows_with_the_sequence(backward):
    assert peak_elements(256, backward) == peak_elements(4096, backward) == 32 * 64


@pytest.mark.gpu
def test_peak_memory_beyond_hidden_and_its_gradient_does_not_grow_with_the_sequence():
    needs("cuda")

    def extra(rows):
        hidden, weight, labels = make(rows, dim=256, vocab=8192, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        chunked_cross_entropy(hidden, weight, labels, chunk_rows=1024)[0].backward()
        return torch.cuda.max_memory_allocated() - before - hidden.numel() * hidden.element_size()

    assert extra(65536) - extra(8192) <= 65536  # the mask of valid labels, a byte a row


def test_gradients_are_made_only_where_they_are_needed():
    hidden, weight, labels = make(5)
    chunked_cross_entropy(hidden.detach(), weight, labels)[0].backward()
    assert hidden.grad is None and weight.grad is not None


@pytest.mark.parametrize("hidden, weight, labels, word", [
    (torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.int64), "share D"),
    (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64), "leading dims"),
    (torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int32), "int64"),
])
def test_what_does_not_fit_is_refused(hidden, weight, labels, word):
    with pytest.raises(ValueError, match=word):
        chunked_cross_entropy(hidden, weight, labels)
    with pytest.raises(ValueError, match="chunk_rows=0"):
        chunked_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.int64), chunk_rows=0)
