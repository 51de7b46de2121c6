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

from .launching import Form
from .visits import ALIGNMENT_BYTES

__all__ = ["ELEMENTS", "TensorDescriptor", "describe", "fence_async_shared", "gl", "gluon", "mbarrier", "reinterpret", "tma_load",
           "tma_reduce_add", "tma_store", "tma_store_wait", "warpgroup_mma", "warpgroup_mma_wait"]

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


def describe(x: Tensor, block: tuple[int, ...], swizzled: bool = True) -> TensorDescriptor:
    """Descriptor of x, `describable`, with blocks of that shape, in the layout that wgmma reads (or not swizzled: rows as they
    lie). It ends at the last real row and column: past them loads give 0 and stores do nothing."""
    shape, strides = list(x.shape), list(x.stride())
    for dim, n in enumerate(shape[:-1]):
        if n == 1:
            strides[dim] = ALIGNMENT_BYTES  # never used but must be legal
    return _form(block, x.dtype, swizzled).describe(x, shape, strides)


@lru_cache(maxsize=None)
def _form(block: tuple[int, ...], dtype: torch.dtype, swizzled: bool) -> Form:
    element = ELEMENTS[dtype]
    if swizzled:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    else:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=element.primitive_bitwidth, rank=len(block))
    return Form(lambda x, shape, strides: TensorDescriptor(x, shape, strides, list(block), layout))
