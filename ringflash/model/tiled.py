"""Functions of rows, computed a tile of rows at a time and again in the backward (ALST, Bekman et al. 2025, arXiv 2506.13996).

What is wide inside the function (the MLP, norms in fp32) then exists for one tile only; what goes in and comes out is whole.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# function(rows, *inputs' rows [B, n, ...]) -> one tensor or several, [B, n, ...]; rows: which of them these are
RowFunction = Callable[..., Tensor | tuple[Tensor, ...]]


class Autocast:
    """The autocast of where this was made, to be entered again in a backward, whose thread has none."""

    def __init__(self, device: torch.device):
        kind = device.type
        self.options = dict(device_type=kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))

    def __call__(self) -> torch.autocast:
        # Uncached: a copy of a weight that was made without grad mode must not be found by who needs its gradient.
        return torch.autocast(**self.options, cache_enabled=False)


def tiled(function: RowFunction, tile_rows: int, inputs: Sequence[Tensor], weights: Sequence[Tensor]):
    """function(slice(0, S), *inputs), in tiles of tile_rows (0: as it is, at once). Only inputs are kept for the backward.

    inputs [B, S, ...], differentiable; weights: what else in the function needs gradients. These are summed over tiles in fp32,
    and rounded to the weight's dtype once.
    """
    if tile_rows == 0:
        return function(slice(0, inputs[0].shape[1]), *inputs)
    return _Tiled.apply(function, tile_rows, len(inputs), *inputs, *weights)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: RowFunction, tile_rows: int, num_inputs: int, *tensors: Tensor):
        inputs, ctx.weights = tensors[:num_inputs], tensors[num_inputs:]
        ctx.save_for_backward(*inputs)
        ctx.function, ctx.tile_rows, ctx.autocast = function, tile_rows, Autocast(inputs[0].device)
        outputs = None
        for rows in tiles(inputs[0].shape[1], tile_rows):
            made = function(rows, *(x[:, rows] for x in inputs))
            parts = made if isinstance(made, tuple) else (made,)
            if outputs is None:
                outputs = [part.new_empty((part.shape[0], inputs[0].shape[1], *part.shape[2:])) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[:, rows] = part
        return tuple(outputs) if isinstance(made, tuple) else outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *douts: Tensor):
        with ctx.autocast():
            found = row_gradients(ctx.function, ctx.tile_rows, ctx.saved_tensors, ctx.weights, douts)
        return None, None, None, *found


def row_gradients(function: RowFunction, tile_rows: int, inputs: Sequence[Tensor], weights: Sequence[Tensor],
                  douts: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of inputs and weights, in their dtypes, from those of the function's outputs [B, S, ...]; the function is run
    again, tile by tile (tile_rows 0: all rows are one)."""
    num_rows, gradients, sums = inputs[0].shape[1], None, None
    for rows in tiles(num_rows, tile_rows):
        with torch.enable_grad():
            leaves = [x[:, rows].detach().requires_grad_() for x in inputs]
            made = function(rows, *leaves)
        outputs = made if isinstance(made, tuple) else (made,)
        needed = [weight for weight in weights if weight.requires_grad]
        found = torch.autograd.grad(outputs, [*leaves, *needed], [dout[:, rows] for dout in douts])
        del made, outputs
        if leaves[0].shape[1] == num_rows:
            gradients, sums = list(found[:len(inputs)]), list(found[len(inputs):])
            break
        if gradients is None:
            gradients = [torch.empty_like(x) for x in inputs]
            sums = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in needed]
        for gradient, part in zip(gradients, found):
            gradient[:, rows] = part
        for total, part in zip(sums, found[len(inputs):], strict=True):
            total += part
    in_order = iter(sums)
    return [*gradients, *(next(in_order).to(weight.dtype) if weight.requires_grad else None for weight in weights)]


def tiles(num_rows: int, tile_rows: int) -> list[slice]:
    """Of num_rows rows: at least one, which is empty where there are no rows (it has a shape, and weights their zeros)."""
    step = tile_rows or max(num_rows, 1)
    return [slice(start, min(start + step, num_rows)) for start in range(0, max(num_rows, 1), step)]
