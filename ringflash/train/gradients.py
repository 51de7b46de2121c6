"""The one place where gradients meet: summed over all ranks in fp32, measured, clipped."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringflash.ring import watchdog
from ringflash.train.world import World

BUCKET_ELEMENTS = 16 * 2**20  # 64 MiB of fp32: large enough for full bandwidth, small beside the weights


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replaces every gradient by its sum over the ranks of `group`, added in fp32 in flat buckets; in place.

    SUM, never a mean: the loss was already divided by the valid count of the whole optimizer step. A parameter that got no
    gradient here (a rank whose labels are all ignored) counts as zeros, so all ranks send the same bytes. Those of sharded
    parameters were added when they were reduced to shards.
    """
    for bucket in _buckets(p for p in parameters if not isinstance(p, DTensor)):
        for parameter in bucket:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if group is None:
            continue
        flat = torch.cat([parameter.grad.reshape(-1).float() for parameter in bucket])
        with watchdog.collective("summing gradients", dist.get_rank(), dist.get_world_size(group)):
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group)
        for parameter, summed in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad.copy_(summed.view_as(parameter))


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], world: World | None = None) -> float:
    """The global L2 norm, in fp64. Gradients are summed already, so every rank finds the same norm without asking; the squares of
    shards are added over all ranks of world first."""
    own, shards = [], []
    for parameter in parameters:
        squares_of = shards if isinstance(parameter.grad, DTensor) else own
        # Piece by piece: there is never an fp64 copy of a whole gradient.
        squares_of += [piece.double().square().sum() for piece in _local(parameter.grad).flatten().split(BUCKET_ELEMENTS)]
    squares = float(torch.stack(own).sum()) if own else 0.0
    if shards:
        # Of equal copies the first speaks for all, and all hear the same number.
        squares += world.sum(float(torch.stack(shards).sum()) if world.rank < world.shard else 0.0)[0]
    return math.sqrt(squares)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm where the norm exceeds max_norm; max_norm 0 leaves them alone."""
    if max_norm > 0 and norm > max_norm:
        factor = max_norm / norm
        for parameter in parameters:
            _local(parameter.grad).mul_(factor)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket
