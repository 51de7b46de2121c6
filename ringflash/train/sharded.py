"""One copy of weights, gradients and optimizer state over several ranks (ZeRO, Rajbhandari et al. 2020; FSDP, Zhao et al. 2023),
through torch's fully_shard. Note [Sharded weights] in DESIGN.md.

Matrices are sharded by rows; every layer is a unit that is gathered when it is needed, in the dtype it computes in, and its
gradient is added over the ranks in fp32. Vectors (norm scales, sinks) are a few kilobytes: every rank keeps them, in fp32.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def build_sharded(build: Callable[[], nn.Module], mesh: DeviceMesh, device: torch.device, dtype: torch.dtype,
                  seed: int) -> nn.Module:
    """The model that build() makes, sharded over the last axis of mesh (and equal along its first, if it has two), with the
    weights that it has unsharded. It never exists whole: build() runs on the meta device, weights are made one at a time.

    dtype: in which the layers compute. The model has `blocks` (its layers) and init_weights(seed, write), and may have `head`.
    """
    with torch.device("meta"):
        model = build()
    shard_model(model, mesh, dtype)
    ties = _ties(model)
    model.to_empty(device=device)
    # to_empty makes two parameters of one that two modules share.
    for first, other in ties:
        module, _, attribute = other.rpartition(".")
        setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    model.init_weights(seed, write=write_shard)
    return model


def shard_model(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Makes every layer a unit, and the head where it has a weight of its own; what is left (embedding) is the root's."""
    # cast_forward_inputs would round the tables of RoPE and the residual stream.
    compute = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32,
                                   cast_forward_inputs=False)
    # fp32: thousands of rows of the embedding's gradient are added for one token, a tied weight has two gradients, and the loss
    # rounds the head itself.
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    vectors = {parameter for parameter in model.parameters() if parameter.ndim < 2}
    shared = {name.rpartition(".")[0] for pair in _ties(model) for name in pair}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=compute, ignored_params=vectors)
    if isinstance(getattr(model, "head", None), nn.Module) and "head" not in shared:
        # Its backward comes at once: gathered again it would be the first thing that the backward waits for.
        fully_shard(model.head, mesh=mesh, mp_policy=exact, ignored_params=vectors, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=exact, ignored_params=vectors)
    for module in _units(model):
        # Added, never averaged: the loss was divided by the valid count of the whole step. Without the second call gloo is asked
        # for a scaled sum, which it has not; without the first, a mean is taken after the sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def set_reduction(model: nn.Module, *, is_last: bool, each: bool) -> None:
    """Before the backward of a micro-batch: gradients are reduced in the last one of a step, or over the ranks of a copy in each;
    over the copies in the last. Does nothing to a model that is not sharded."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or each)
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)


def reshard(model: nn.Module) -> None:
    """After forwards that no backward follows: frees what is still gathered. Does nothing to a model that is not sharded."""
    for module in _units(model):
        module.reshard()


@torch.no_grad()
def write_shard(parameter: Tensor, value: Tensor) -> None:
    """Copies into parameter its part of value, which has all of it; no communication."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    mesh, axis = parameter.device_mesh, parameter.device_mesh.ndim - 1
    # fully_shard cuts rows as torch.chunk does: the last ranks may have fewer, or none.
    chunks, rank = value.chunk(mesh.size(axis)), mesh.get_local_rank(axis)
    if rank < len(chunks):
        parameter.to_local().copy_(chunks[rank])


def load_full_state_dict(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Weights as full_state_dict has them into a model, sharded or not. RuntimeError for names or shapes of another model."""
    found = dict(model.named_parameters(remove_duplicate=False))
    wrong = sorted(found.keys() ^ weights.keys()) or [name for name in found if found[name].shape != weights[name].shape]
    if wrong:
        raise RuntimeError(f"the weights are of another model: {', '.join(wrong[:3])} {'and more ' * (len(wrong) > 3)}differ")
    for name, parameter in found.items():
        write_shard(parameter, weights[name])


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded, on its device. All ranks call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """The model's state_dict in CPU memory (its own, where a parameter is there and whole) on rank 0, None on the others. All
    ranks call this together; on the device there is one whole parameter at a time."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    gathered: dict[int, Tensor | None] = {}
    state = {}
    # keep_vars: parameters are known again where two modules share one.
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in gathered:
            full = whole(value.detach())
            gathered[id(value)] = full.cpu() if is_first else None
        state[name] = gathered[id(value)]
    return state if is_first else None


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """(name, other name) of every parameter that is in the model more than once."""
    first: dict[nn.Parameter, str] = {}
    pairs = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            pairs.append((first[parameter], name))
    return pairs
