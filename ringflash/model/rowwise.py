"""Linear layers and norms, row by row, with no more roundings and no more kept for the backward than they need.

Under autocast fp32 weights are rounded to its dtype for the products, but the gradient of such a weight is fp32 from the product
on: it is added to others (of more tiles of rows, of more micro-batches) without ever having been rounded.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from ..loss import _matmul, _operand_dtype


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K], weight [N, K] -> x @ weight.T [..., N] in the products' dtype: autocast's, or what x and weight promote to."""
    dtype = _operand_dtype(x, weight)
    if weight.dtype == dtype:
        return F.linear(x.to(dtype), weight)
    return _Linear.apply(x, weight, dtype)


class _Linear(torch.autograd.Function):
    """x and weight rounded to dtype, products in it; dx in x's dtype, dweight unrounded in weight's."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        rounded = x.to(dtype)
        # The weight itself, which is there anyway: rounding it again costs less than keeping a copy of every weight.
        ctx.save_for_backward(rounded, weight)
        ctx.x_dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(rounded, weight.to(dtype))

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            dx = (dy @ weight.to(x.dtype)).to(ctx.x_dtype) if ctx.needs_input_grad[0] else None
            dweight = None
            if ctx.needs_input_grad[1]:
                dweight = _matmul(dy.flatten(0, -2).t(), x.flatten(0, -2), weight.dtype)
        return dx, dweight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K] / rms(x) * weight [K] over the last dim: fp32 inside, one rounding at the end, to autocast's dtype (it feeds
    products) or else to x's."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    if torch.compiler.is_compiling():
        # What is kept is the compiler's choice there, and a backward that calls autograd cannot be traced.
        return _rms_norm(x.float(), weight.float(), eps).to(dtype)
    return _RMSNorm.apply(x, weight, eps, dtype)


class _RMSNorm(torch.autograd.Function):
    """Keeps x as it came (16 bit where the residual stream is), and no fp32 copy of it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _rms_norm(x.float(), weight.float(), eps).to(dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            leaves = x.float().requires_grad_(), weight.float().requires_grad_()
            y = _rms_norm(*leaves, ctx.eps)
        dx, dweight = torch.autograd.grad(y, leaves, dy.float())
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, weight.shape, weight, eps)
