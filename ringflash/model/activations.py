"""What a layer keeps between its forward and its backward: `train.activations` (Note [Activations] in DESIGN.md).

A layer is rows -> (q, k, v), attention, (x, out) -> rows. All but attention is cheap to compute again; attention is most of the
work at long lengths, and with a ring it is messages too. So its outputs are kept where they can be: the backward makes q, k and v
again and hands the kept (out, lse) to the autograd formula of the op, which never runs twice.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from .host_store import HostStore
from .tiled import Autocast, row_gradients

ATTENTION_OP = "ringflash::attention_forward"               # (q, k, v, ...) -> (out, lse), a functional op with its own backward


class Recomputable(Protocol):
    """A layer in three parts. before: of x [B, S, dim], q, k, v; attend: attention of these; after: of x and out, the next x."""

    tile_rows: int

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: Any, mask: Any) -> Tensor: ...
    def after(self, x: Tensor, out: Tensor) -> Tensor: ...
    def after_rows(self, rows: slice, x: Tensor, out: Tensor) -> Tensor: ...  # what after does to a tile of rows
    def weights(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]: ...  # of before, of attend, of after


def recomputed(layer: Recomputable, policy: str, store: HostStore, x: Tensor, cos: Tensor, sin: Tensor, layout: Any,
               mask: Any) -> Tensor:
    """The layer's output for x [B, S, dim], of which is kept: x (policy block); x, out and lse of attention
    (block_save_attention); the same in pinned host memory (offload). Gradients have the bits that they have without.

    Gradients have no graph of their own, and with offload a graph has one backward: RuntimeError. An attention that is not the op
    `ringflash::attention_forward` raises it too, unless the policy is block.
    """
    before, attend, after = layer.weights()
    return _Recomputed.apply(layer, policy, store, (cos, sin, layout, mask), len(before + attend), x, *before, *attend, *after)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: Recomputable, policy: str, store: HostStore, call: tuple, num_before: int, x: Tensor,
                *weights: Tensor):
        cos, sin, layout, mask = call
        ctx.layer, ctx.call, ctx.num_before, ctx.weights, ctx.autocast = layer, call, num_before, weights, Autocast(x.device)
        projected = layer.before(x, cos, sin)
        with _Attention(()) as attention:
            out = layer.attend(*projected, layout, mask)
        del projected
        if policy != "block" and not attention.results:
            raise RuntimeError(f"train.activations={policy}: keeps what the op {ATTENTION_OP} gives, and the attention of this "
                               "model does not call it; nearest: block")
        kept = (x, *(attention.results if policy != "block" else ()))
        ctx.handle = store.put(kept) if policy == "offload" else None
        if ctx.handle is None:
            ctx.save_for_backward(*kept)
        return layer.after(x, out)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        layer, (cos, sin, layout, mask) = ctx.layer, ctx.call
        x, *kept = ctx.saved_tensors if ctx.handle is None else ctx.handle.take()
        before, after = ctx.weights[:ctx.num_before], ctx.weights[ctx.num_before:]
        source = x.detach().requires_grad_()

        def attend() -> Tensor:
            with torch.enable_grad():
                projected = layer.before(source, cos, sin)
                with _Attention(kept):
                    return layer.attend(*projected, layout, mask)

        with ctx.autocast():
            # Without kept outputs attention comes first, as what follows needs them; else last, so that less is there at a time.
            out = attend() if not kept else None
            dx, dout, *dafter = row_gradients(layer.after_rows, layer.tile_rows, (x, kept[0] if kept else out), after, (dy,))
            out = attend() if kept else out
            needed = [weight for weight in before if weight.requires_grad]
            dsource, *found = torch.autograd.grad(out, [source, *needed], dout)
        dx += dsource
        in_order = iter(found)
        dbefore = [next(in_order) if weight.requires_grad else None for weight in before]
        return None, None, None, None, None, dx, *dbefore, *dafter


class _Attention(TorchDispatchMode):
    """Around calls of attention: notes what its op gives (results), or gives what it is handed, and does not run it."""

    def __init__(self, given: Sequence[Tensor]):
        super().__init__()
        self.given, self.results = tuple(given), ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() != ATTENTION_OP:
            return func(*args, **(kwargs or {}))
        if self.given:
            # New tensors on the same memory: autograd will make them results of this call.
            return tuple(tensor.detach() for tensor in self.given)
        if self.results:
            raise RuntimeError(f"a layer called {ATTENTION_OP} twice: train.activations keeps the result of one call")
        made = func(*args, **(kwargs or {}))
        self.results = tuple(tensor.detach() for tensor in made)
        return made
