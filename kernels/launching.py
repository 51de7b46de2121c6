"""Launches that cost little host time: descriptors of tensors, and a launch that finds its compiled kernel by itself.
Note [Launches].

Triton binds the arguments of every launch anew, hashes what it specialises on, and compares the kernel's globals; its descriptors
check themselves when made. That is most of a launch's time on the host, which a GPU waits for where visits are short (below about
4,096 rows). Here a launch looks at each argument once. What a compiled kernel depends on is Triton's own rule: constants by value,
numbers by size and divisibility, tensors by dtype and alignment, descriptors by block, dtype and layout.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import triton
from torch import Tensor

from .visits import ALIGNMENT_BYTES

OPTIONS = {"enable_fp_fusion": True}  # of every launch: the default up to triton 3.9, which announces another
# Neither the interpreter, which compiles nothing, nor HIP, where a tensor's size counts too.
DIRECT: bool = not triton.knobs.runtime.interpret and torch.version.hip is None
_INT32 = 1 << 31
_kernels: dict[int, _Kernel] = {}


@dataclass(frozen=True)
class _Places:
    """Where the arguments of one sequence of types stand: those that count by value, by size, by divisibility too, by dtype, by
    alignment too, and by form. known: whether that is all of them."""

    constants: tuple[int, ...]
    numbers: tuple[int, ...]
    divisible: tuple[int, ...]
    tensors: tuple[int, ...]
    aligned: tuple[int, ...]
    descriptors: tuple[int, ...]
    known: bool


class _Kernel:
    """The parameters of a kernel, and its variants that were compiled so far."""

    def __init__(self, kernel: triton.JITFunction):
        self.kernel = kernel  # kept alive: it is found by its id
        self.values = itemgetter(*(p.name for p in kernel.params))
        self.places: dict[tuple[type, ...], _Places] = {}
        self.variants: dict[tuple, Any] = {}

    def key(self, values: tuple) -> tuple | None:
        """What decides which compiled kernel serves these arguments; None where that is left to Triton."""
        kinds = tuple(map(type, values))
        at = self.places.get(kinds)
        if at is None:
            at = self.places[kinds] = self._places(values)
        if not at.known:
            return None
        numbers = [values[i] for i in at.numbers]
        return (
            kinds, *[values[i] for i in at.constants],
            not numbers or (max(numbers) < _INT32 and min(numbers) >= -_INT32) or tuple([-_INT32 <= n < _INT32 for n in numbers]),
            *[values[i] == 1 or (2 if values[i] % 16 else 0) for i in at.divisible],
            *[values[i].dtype for i in at.tensors], *[values[i].data_ptr() % ALIGNMENT_BYTES == 0 for i in at.aligned],
            *[values[i].form for i in at.descriptors])

    def _places(self, values: tuple) -> _Places:
        parameters = list(enumerate(self.kernel.params))
        constants = tuple(i for i, p in parameters if p.is_constexpr)
        given = [(i, p) for i, p in parameters if not p.is_constexpr]
        numbers = tuple(i for i, _ in given if type(values[i]) is int)
        tensors = tuple(i for i, _ in given if isinstance(values[i], Tensor))
        descriptors = tuple(i for i, _ in given if hasattr(values[i], "form"))
        other = sum(values[i] is None or type(values[i]) is float for i, _ in given)
        return _Places(
            constants, numbers, tuple(i for i in numbers if not self.kernel.params[i].do_not_specialize), tensors,
            tuple(i for i in tensors if not self.kernel.params[i].do_not_specialize
                  and not self.kernel.params[i].do_not_specialize_on_alignment),
            descriptors, other + len(numbers) + len(tensors) + len(descriptors) == len(given))


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """kernel[grid](**arguments, **options) on the current device and stream, with OPTIONS. Every argument by its name; descriptors
    are those of a `Form`. A variant's first launch is Triton's own; knobs that change the compilation are read only then."""
    key = None
    if DIRECT:
        known = _kernels.get(id(kernel))
        if known is None:
            known = _kernels[id(kernel)] = _Kernel(kernel)
        values = known.values(arguments)
        key = known.key(values)
    if key is None:
        kernel[grid](**arguments, **OPTIONS, **options)
        return
    variant = torch.cuda.current_device(), *options.values(), key
    compiled = known.variants.get(variant)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*values)
    else:
        known.variants[variant] = kernel[grid](**arguments, **OPTIONS, **options)


class Form:
    """What descriptors of one block shape, dtype and layout have in common. make(x, shape, strides): Triton's constructor."""

    def __init__(self, make: Callable[[Tensor, list[int], list[int]], Any]):
        self.make = make
        self.fields: dict[str, Any] | None = None

    def describe(self, x: Tensor, shape: list[int], strides: list[int]) -> Any:
        """The descriptor of x, whose base and strides `describable` has looked at. The first one is checked by Triton."""
        if self.fields is None:
            made = self.make(x, shape, strides)
            self.kind, self.fields = type(made), {**vars(made), "form": self}
        made = self.kind.__new__(self.kind)
        made.__dict__.update(self.fields)
        made.base, made.shape, made.strides = x, shape, strides
        return made
