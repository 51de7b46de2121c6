"""Cross-entropy of a linear head over rows, a chunk of fp32 logits at a time.

The extra memory of head and loss, beyond hidden and its gradient, is one chunk of logits and one fp32 weight gradient: it
depends on chunk_rows and the vocabulary, never on the sequence length. Logits are made again in the backward.
"""
import math

import torch
from torch import Tensor

IGNORE_INDEX = -100
CHUNK_ROWS = 1024


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_rows: int = CHUNK_ROWS,
                          ignore_index: int = IGNORE_INDEX, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Sum over valid rows of -log softmax(hidden @ weight.T)[label] + z_loss * logsumexp(hidden @ weight.T) ** 2.

    hidden  [..., D]  fp16, bf16, fp32 or fp64
    weight  [V, D]
    labels  [...]     int64, ignore_index where a row has no label; leading dims as in hidden

    Returns (loss_sum, num_valid): a scalar in fp32 (fp64 if hidden or weight is fp64) and an int64 scalar, on hidden's device.
    No row, or no valid one: loss_sum is exactly 0 and both gradients are exactly 0. The hidden of an ignored row is never
    used, whatever it holds, and gets gradient 0. Logits and softmax are fp32; weight's gradient is summed over chunks in fp32
    and rounded to its dtype once. Under autocast the operands of the products are rounded to its dtype, and nothing else.

    z_loss > 0 (PaLM: 1e-4) holds the logits' normaliser near 1, so that they do not drift.

    Raises ValueError for shapes that do not fit, labels that are no int64, chunk_rows < 1, z_loss that is no finite number >= 0.
    """
    if hidden.ndim < 1 or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden [..., D] and weight [V, D] must share D, got {tuple(hidden.shape)} and {tuple(weight.shape)}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels must have hidden's leading dims {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}")
    if labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64, got {labels.dtype}")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows={chunk_rows}: must be at least 1")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss}: must be a finite number >= 0")
    labels = labels.reshape(-1)
    loss_sum = _ChunkedCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, labels, chunk_rows, ignore_index,
                                          _operand_dtype(hidden, weight), z_loss)
    return loss_sum, (labels != ignore_index).sum()


def _operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """dtype to which both operands of a product are brought."""
    promoted = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and promoted != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    # fp16 with bf16 promotes to fp32, and so does either with fp32: no operand loses a digit.
    return promoted


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a [m, k] @ b [k, n] -> dtype, accumulated in it; 16-bit operands stay 16 bit on a GPU, elsewhere they are widened."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype.itemsize == 2:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden [N, D], weight [V, D], labels int64 [N] -> loss_sum scalar. See chunked_cross_entropy."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int, ignore_index: int,
                operand: torch.dtype, z_loss: float) -> Tensor:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk_rows, ctx.ignore_index, ctx.operand, ctx.z_loss = chunk_rows, ignore_index, operand, z_loss
        dtype = torch.float64 if operand == torch.float64 else torch.float32
        # fp64 across chunks: a million fp32 terms of the same sign would lose three digits of the mean.
        loss_sum = torch.zeros((), dtype=torch.float64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(operand)
            for rows in _chunks(hidden.shape[0], chunk_rows):
                _, target, valid, logits, lse = _chunk(hidden, w, labels, rows, ignore_index, dtype)
                loss = lse - logits.gather(1, target[:, None])[:, 0]
                if z_loss:
                    loss = loss + z_loss * lse.square()
                loss_sum += torch.where(valid, loss, 0.0).sum(dtype=torch.float64)
        return loss_sum.to(dtype)

    @staticmethod
    def backward(ctx, dloss: Tensor):
        hidden, weight, labels = ctx.saved_tensors
        dtype = torch.float64 if ctx.operand == torch.float64 else torch.float32
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        dhidden = torch.empty_like(hidden) if need_hidden else None
        dweight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            w = weight.to(ctx.operand)
            for rows in _chunks(hidden.shape[0], ctx.chunk_rows):
                real, target, valid, logits, lse = _chunk(hidden, w, labels, rows, ctx.ignore_index, dtype)
                dlogits = logits.sub_(lse[:, None]).exp_()
                if ctx.z_loss:
                    # d lse^2 = 2 lse softmax
                    dlogits.mul_((1 + 2 * ctx.z_loss * lse)[:, None])
                dlogits.scatter_add_(1, target[:, None], dlogits.new_full((len(target), 1), -1.0))
                dlogits = torch.where(valid[:, None], dlogits, 0.0)
                if dlogits.is_cuda:
                    dlogits = dlogits.to(ctx.operand)  # tensor cores want both operands in 16 bit
                # dloss is applied after the products, in fp32: dlogits / number of tokens would underflow in fp16.
                if need_hidden:
                    dhidden[rows] = (_matmul(dlogits, w, dtype) * dloss).to(hidden.dtype)
                if need_weight:
                    dweight += _matmul(dlogits.t(), real, dtype)
        return dhidden, (dweight * dloss).to(weight.dtype) if need_weight else None, None, None, None, None, None


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def _chunk(hidden: Tensor, w: Tensor, labels: Tensor, rows: slice, ignore_index: int, dtype: torch.dtype):
    """One chunk: (hidden rows in w.dtype with ignored ones zeroed [n, D], target int64 [n], valid bool [n], logits dtype [n, V],
    lse dtype [n])."""
    valid = labels[rows] != ignore_index
    target = torch.where(valid, labels[rows], 0)
    # Selected, not multiplied: an ignored row may hold NaN, and 0 * NaN would reach the weight gradient.
    real = torch.where(valid[:, None], hidden[rows], 0.0).to(w.dtype)
    logits = _matmul(real, w.t(), dtype)
    return real, target, valid, logits, torch.logsumexp(logits, dim=1)
