"""Runs a Gluon kernel on the CPU, since Triton has no interpreter for Gluon: values are torch tensors, every partition of
`gl.warp_specialize` is a thread, barriers and the copy engine do what the hardware would.

What it finds: wrong indices, masks and tables, a barrier that nobody arrives at (Deadlock), shared memory that is read before it was
written (it starts as NaN). What it cannot see: layouts, registers, asynchrony (copies and products are done when they are asked for),
and whatever is written in inline assembly, for which the caller gives stand-ins.
"""
from __future__ import annotations

import importlib
import itertools
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 20.0
_program = threading.local()
_packages = itertools.count()


class Deadlock(AssertionError):
    """A partition waited longer than TIMEOUT_S for a barrier."""


class Pointer:
    """Elements of a flat tensor: base and offsets."""

    def __init__(self, flat: Tensor, offset: Any = 0):
        self.flat, self.offset = flat, offset

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.flat, self.offset + other)


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor):
        self.data, self.dtype, self.shape = data, data.dtype, tuple(data.shape)

    def index(self, i: Any) -> Memory:
        return Memory(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.data.permute(order))

    def slice(self, start: Any, length: int, dim: int = 0) -> Memory:
        return Memory(self.data.narrow(dim, int(start), length))

    def reshape(self, shape: list[int]) -> Memory:
        return Memory(self.data.reshape(shape))

    def load(self, layout: Any = None) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)


class Barrier:
    """An mbarrier: a phase ends when as many have arrived as it was made for, and all bytes that were announced have come."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0

    def _arrive(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier was made for"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase ^ 1
                self.changed.notify_all()


class Barriers:
    """Shared memory that holds barriers."""

    def __init__(self, count: int):
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Descriptor:
    """A tensor map: blocks of x, zero outside it; stores stay inside. Rows begin at whole 16 bytes (from others a GPU stops with an
    illegal instruction)."""

    def __init__(self, x: Tensor, block: tuple[int, ...]):
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None
        self.block_type = types.SimpleNamespace(nbytes=torch.Size(block).numel() * x.element_size())

    def _inside(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Where the block lies in x, and where that part lies in the block."""
        assert int(at[-1]) * self.x.element_size() % 16 == 0, "the copy engine reads from whole 16 bytes on"
        start = [max(0, int(i)) for i in at]
        stop = [max(a, min(int(i) + n, size)) for i, n, size, a in zip(at, self.block, self.x.shape, start)]
        of_x = tuple(slice(min(a, size), min(b, size)) for a, b, size in zip(start, stop, self.x.shape))
        return of_x, tuple(slice(s.start - int(i), s.stop - int(i)) if s.start < s.stop else slice(0, 0) for s, i in zip(of_x, at))

    def read(self, at: list[int]) -> Tensor:
        block = torch.zeros(self.block, dtype=self.dtype)
        of_x, of_block = self._inside(at)
        block[of_block] = self.x[of_x]
        return block

    def write(self, at: list[int], block: Tensor) -> None:
        of_x, of_block = self._inside(at)
        self.x[of_x] = block[of_block]

    def add(self, at: list[int], block: Tensor) -> None:
        of_x, of_block = self._inside(at)
        self.x[of_x] += block[of_block]


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Tensor:
    offset = _tensor(pointer.offset).long()
    offset, mask = torch.broadcast_tensors(offset, _tensor(mask))
    assert not mask.any() or 0 <= int(offset[mask].min()) <= int(offset[mask].max()) < pointer.flat.numel(), "a load past a tensor"
    value = pointer.flat[torch.where(mask, offset, 0)]
    return torch.where(mask, value, torch.tensor(other, dtype=value.dtype))


def _store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    offset, mask, value = torch.broadcast_tensors(_tensor(pointer.offset).long(), _tensor(mask), _tensor(value))
    assert not mask.any() or 0 <= int(offset[mask].min()) <= int(offset[mask].max()) < pointer.flat.numel(), "a store past a tensor"
    pointer.flat[offset[mask]] = value[mask].to(pointer.flat.dtype)


def _atomic_add(pointer: Pointer, value: int) -> Tensor:
    old = pointer.flat[0].clone()
    pointer.flat[0] += value
    return old


def _warp_specialize(partitions: list, warps: list, registers: list) -> None:
    failures, program = [], _program.__dict__.copy()

    def work(function: Any, arguments: tuple) -> None:
        _program.__dict__.update(program)
        try:
            function(*arguments)
        except BaseException as error:  # told by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=work, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    if failures:
        raise next((e for e in failures if not isinstance(e, Deadlock)), failures[0])


def _wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    with barrier.changed:
        if pred and not barrier.changed.wait_for(lambda: barrier.phase != int(phase), TIMEOUT_S):
            raise Deadlock(f"nobody ends phase {int(phase)}: {barrier.pending} arrivals and {barrier.bytes} bytes are missing")


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


def _mma(a: Any, b: Memory, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Tensor:
    product = (a.data if isinstance(a, Memory) else a).float() @ b.data.float()
    return acc + product if use_acc else product


def _tma_load(desc: Descriptor, at: list, barrier: Barrier, memory: Memory) -> None:
    memory.data.copy_(desc.read(at).view(memory.shape))
    barrier._arrive(0, -desc.block_type.nbytes)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(shape[0])
    fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min // 2
    return Memory(torch.full(shape, fill, dtype=dtype))


def _reinterpret(memory: Memory, dtype: torch.dtype, shape: list[int], layout: Any) -> Memory:
    data = memory.data if memory.dtype == dtype else memory.data.view(-1).view(dtype)
    return Memory(data.view(shape))


def _full(shape: list[int], x: Any, dtype: torch.dtype, layout: Any = None) -> Tensor:
    return torch.full(shape, float(x) if dtype.is_floating_point else int(x), dtype=dtype)


def _ignored(*_args: Any, **_kwargs: Any) -> None:
    return None


def _jit(function: Any = None, **_options: Any) -> Any:
    return (lambda given: given) if function is None else function


class _Constant:
    """gl.constexpr: an annotation, and a function that gives back what it is given."""

    def __new__(cls, value: Any) -> Any:
        return value


class _Layout:
    """A layout that nobody asks for anything."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        return None

    get_default_for = staticmethod(_ignored)


def shim() -> types.ModuleType:
    """What stands in for kernels/gluon_shim.py."""
    gl = types.SimpleNamespace(
        constexpr=_Constant, float32=torch.float32, int32=torch.int32, int64=torch.int64, int16=torch.int16,
        bfloat16=torch.bfloat16, float16=torch.float16, to_tensor=lambda x: _tensor(x), static_range=range, static_assert=_ignored,
        arange=lambda a, b, layout=None: torch.arange(a, b, dtype=torch.int32),
        full=_full, exp2=torch.exp2, abs=torch.abs, expand_dims=torch.unsqueeze, broadcast=torch.broadcast_tensors,
        zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype), full_like=torch.full_like,
        where=lambda c, a, b: torch.where(_tensor(c), _tensor(a), _tensor(b)), sum=lambda x, axis: x.sum(axis).to(x.dtype),
        max=lambda x, axis: x.amax(axis), log2=torch.log2, maximum=lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)), convert_layout=lambda x, layout: x, load=_load, store=_store,
        atomic_add=_atomic_add, program_id=lambda axis: torch.tensor(_program.index), num_programs=lambda axis: _program.count,
        allocate_shared_memory=_allocate, warp_specialize=_warp_specialize, BlockedLayout=_ignored, SliceLayout=_ignored,
        NVMMADistributedLayout=_ignored, DotOperandLayout=_ignored, NVMMASharedLayout=_Layout, SwizzledSharedLayout=_ignored)
    module = types.ModuleType("gluon_shim")
    module.__dict__.update(
        gl=gl, gluon=types.SimpleNamespace(jit=_jit), fence_async_shared=_ignored, tma_load=_tma_load,
        tma_store=lambda desc, at, memory: desc.write(at, memory.data.reshape(desc.block)), tma_store_wait=_ignored,
        tma_reduce_add=lambda desc, at, memory: desc.add(at, memory.data.reshape(desc.block)),
        reinterpret=_reinterpret, warpgroup_mma=_mma,
        warpgroup_mma_wait=lambda pending, deps: deps[0] if len(deps) == 1 else tuple(deps),
        describe=lambda x, block, swizzled=True: Descriptor(x, block),
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=lambda: "barrier", init=_init, wait=_wait, arrive=lambda barrier, count=1: barrier._arrive(count, 0),
            expect=lambda barrier, num_bytes: barrier._arrive(1, num_bytes)))
    return module


def interpreted(name: str, **stand_ins: types.ModuleType) -> types.ModuleType:
    """The module kernels/<name>.py with kernels that `run` can run. stand_ins: of modules beside it, by name."""
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    package = types.ModuleType(f"interpreted_kernels_{next(_packages)}")
    package.__path__ = [str(kernels)]
    sys.modules[package.__name__] = package
    for of_module, module in {"gluon_shim": shim(), **stand_ins}.items():
        sys.modules[f"{package.__name__}.{of_module}"] = module
    return importlib.import_module(f"{package.__name__}.{name}")


def run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], order: Sequence[int] | None = None) -> None:
    """kernel[grid](**arguments), one program after the other, in `order` where it is given. Tensors among the arguments become
    pointers to their elements; those that are written must be contiguous."""
    given = {name: Pointer(x.view(-1) if x.is_contiguous() else x.reshape(-1)) if isinstance(x, Tensor) else x
             for name, x in arguments.items()}
    _program.count = grid[0]
    for index in range(grid[0]) if order is None else order:
        _program.index = index
        kernel(**given)
