"""Bytes of the tensors that are alive: what torch.cuda.max_memory_allocated counts, on any device, also meta."""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_INSIDE = ("ringflash::attention_forward", "ringflash::attention_backward")


class LiveBytes(TorchDispatchMode):
    """Counts storages from the moment an operator returns them inside the `with` until their last reference goes.

    current, peak: bytes. known: tensors that were there before and are to count, weights say. What an operator of torch allocates
    and frees within itself is not seen; the attention ops of ringflash are run under the same eyes.
    """

    def __init__(self, known: Any = ()):
        super().__init__()
        self.current = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._ignored: set[int] = set()
        for tensor in known:
            self._note(tensor)

    def reset_peak(self) -> None:
        self.peak = self.current

    def ignore(self, tensor: Tensor) -> None:
        """Does not count this tensor's memory: it stands for another device's."""
        self._ignored.add(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        if name in _INSIDE:
            from ringflash import ops

            op = getattr(ops, name.split("::")[1])
            with self:
                return op._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            # What wraps another tensor (a DTensor) has no memory of its own.
            if isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._ignored:
            return
        self._sizes[key] = size = storage.nbytes()
        self.current += size
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)
