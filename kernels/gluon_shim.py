"""Gluon's names, whichever triton is installed: 3.6, 3.7, 3.8 and 3.9 call the same things differently.

Importing this imports triton, and raises ImportError where Gluon or a piece of it is missing: `hopper.unavailable` asks first
(`problem`). What the versions changed:

    tma_load, tma_store     async_copy_global_to_shared / async_copy_shared_to_global up to 3.7, async_load / async_store from 3.8
                            (3.9 keeps the old names only to raise)
    reinterpret             a method of shared memory, _reinterpret up to 3.8
    tma_reduce_add          async_atomic_add from 3.8; before, the builder's call is there but no function that makes it
"""
from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["ALIGNMENT_BYTES", "ELEMENTS", "TensorDescriptor", "describable", "describe", "fence_async_shared", "gl", "gluon",
           "mbarrier", "reinterpret", "tma_load", "tma_reduce_add", "tma_store", "tma_store_wait", "warpgroup_mma",
           "warpgroup_mma_wait"]

ALIGNMENT_BYTES = 16  # of a descriptor's base and strides, in the hardware
ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait  # until the engine has read the shared memory; global memory is complete at the kernel's end

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:
    from triton._C.libtriton import ir

    @builtin
    def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
        """Add a block in shared memory to global memory, asynchronously; ends like a store (tma_store_wait)."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as another dtype, shape and layout: a method of its own name only from 3.9."""
    method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)


def describable(x: Tensor) -> bool:
    """Whether a tensor map may describe x (any number of dims up to 5): contiguous last dim, base and strides in 16 bytes,
    rising addresses (an expanded dim has stride 0)."""
    size = x.element_size()
    if 0 in x.shape or x.stride(-1) != 1 or x.data_ptr() % ALIGNMENT_BYTES:
        return False
    return all(n == 1 or (0 < s and s * size % ALIGNMENT_BYTES == 0 and s * size < 1 << 40)
               for n, s in zip(x.shape[:-1], x.stride()[:-1]))


def describe(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of x with blocks of that shape, in the layout that wgmma reads. It ends at the last real row and column: past
    them loads give 0 and stores do nothing."""
    # the stride of a dim of size 1 is never used but must be legal
    steps = [step if n > 1 else ALIGNMENT_BYTES for n, step in zip(x.shape[:-1], x.stride()[:-1])]
    return TensorDescriptor(x, list(x.shape), [*steps, 1], block, _layout(tuple(block), x.dtype))


@lru_cache(maxsize=None)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    # kept: making it takes a quarter of a launch's time on the host
    return gl.NVMMASharedLayout.get_default_for(list(block), ELEMENTS[dtype])
