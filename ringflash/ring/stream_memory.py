"""Stream memory operations and copies of the CUDA driver: a stream writes a word, waits for a word, copies bytes. No SM is used.

torch has a write (`_SymmetricMemory.stream_write_value32`) but no wait; its put_signal and wait_signal are kernels that spin on
an SM, and attention kernels that fill every SM leave them none. So libcuda is called directly. The calls are asynchronous,
ordered as any other work of the stream, and go to the context that is current in the calling thread.
"""
from __future__ import annotations

import ctypes
import functools

_WAIT_AT_LEAST = 0                                          # CU_STREAM_WAIT_VALUE_GEQ: the cyclic difference is not negative
_WRITE_DEFAULT = 0                                          # CU_STREAM_WRITE_VALUE_DEFAULT: behind a fence of the whole system
_WORD = 1 << 32


class Driver:
    """The entry points. Made by driver()."""

    def __init__(self, library: ctypes.CDLL):
        pointer, size, word, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint
        self._write = self._bind(library, "cuStreamWriteValue32_v2", pointer, ctypes.c_uint64, word, flags)
        self._wait = self._bind(library, "cuStreamWaitValue32_v2", pointer, ctypes.c_uint64, word, flags)
        self._copy = self._bind(library, "cuMemcpyDtoDAsync_v2", ctypes.c_uint64, ctypes.c_uint64, size, pointer)
        self._name = self._bind(library, "cuGetErrorName", ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    @staticmethod
    def _bind(library: ctypes.CDLL, name: str, *kinds: type):
        function = getattr(library, name)                   # AttributeError: a driver older than CUDA 11.7
        function.argtypes, function.restype = kinds, ctypes.c_int
        return function

    def write(self, stream: int, address: int, value: int) -> None:
        """*address = value, when everything before it in the stream is done and visible to all devices. 32 bits."""
        self._check("cuStreamWriteValue32", self._write(stream, address, value % _WORD, _WRITE_DEFAULT))

    def wait_at_least(self, stream: int, address: int, value: int) -> None:
        """The stream goes on once *address has come to value, counting cyclically in 32 bits."""
        self._check("cuStreamWaitValue32", self._wait(stream, address, value % _WORD, _WAIT_AT_LEAST))

    def copy(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Between device addresses, of any device that is mapped here: by a copy engine where the two devices differ."""
        self._check("cuMemcpyDtoDAsync", self._copy(target, source, num_bytes, stream))

    def _check(self, what: str, result: int) -> None:
        if result != 0:
            name = ctypes.c_char_p()
            self._name(result, ctypes.byref(name))
            raise RuntimeError(f"{what} failed: {(name.value or b'unknown').decode()} ({result})")


@functools.lru_cache(maxsize=None)
def driver() -> Driver:
    """Raises RuntimeError, naming what is missing, where there is no such driver."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the CUDA driver's stream memory operations are not to be had: {error}") from error
