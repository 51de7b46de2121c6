"""The rows of a table by token, with a gradient whose bits do not change from run to run."""
import torch
import torch.nn.functional as F
from torch import Tensor


class _Embedding(torch.autograd.Function):
    """torch's backward adds the rows of one token with atomics on a GPU, in whatever order they come; here they are brought together
    by a stable sort and added one after the other, in fp32."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = weight.shape[0], weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        tokens, = ctx.saved_tensors
        flat = tokens.reshape(-1)
        rows = grad.reshape(len(flat), grad.shape[-1]).index_select(0, torch.argsort(flat, stable=True)).float()
        # Counts are whole numbers: atomics cannot change them.
        counts = torch.bincount(flat, minlength=ctx.rows)
        # unsafe: without a check of the counts, which would wait for the device.
        return None, torch.segment_reduce(rows, "sum", lengths=counts, axis=0, initial=0.0, unsafe=True).to(ctx.dtype)


def deterministic_embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """F.embedding(tokens int64 [...], weight [V, dim]) -> [..., dim]. A token with n rows costs n dependent additions in its
    gradient: slower than torch's where one token is most of the text."""
    return _Embedding.apply(tokens, weight)
