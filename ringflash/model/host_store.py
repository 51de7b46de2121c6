"""Tensors that wait in pinned host memory for their backward, moved by the copy engines beside the compute stream."""
from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_PINNING_THREADS = 8
CHUNK_BYTES = 64 << 20  # a power of two, to which torch's pinned allocator rounds up anyway


class SideStreams:
    """One stream per device, made when it is first asked for; None for a device that has none."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class HostStore:
    """put(tensors) -> Handle; handle.take() gives them back, once, in the opposite order of putting (any order is right).

    On a GPU: each put starts its copies to host memory on a stream of the store's own, and first lets the compute stream wait for
    those of the put before, whose device memory it then lets go: so at most one put is on its way. Each take starts the copies of
    the put before it back to the device: they run while the caller computes with what it took. Host memory is pinned once, in
    chunks of one size that are used again, as many as were ever needed at a time (`host_bytes`). The host waits for nothing.

    CPU tensors are kept as they are, unless copies=True (for tests), which copies them through chunks in the same way.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES, copies: bool = False):
        self.chunk_bytes, self.copies = chunk_bytes, copies
        self.free: list[Tensor] = []
        self.num_chunks = 0
        self._last: Handle | None = None
        self._streams = SideStreams()

    @property
    def host_bytes(self) -> int:
        """Pinned so far."""
        return self.num_chunks * self.chunk_bytes

    def reserve(self, num_chunks: int, device: torch.device) -> None:
        """Pins so many chunks now, where put would one by one as it needs them: pinning takes a third of a second per GiB, and stops
        the device's streams. RuntimeError where the host has not so much."""
        missing = num_chunks - self.num_chunks
        if device.type != "cuda" or missing <= 0:
            return
        with ThreadPoolExecutor(_PINNING_THREADS, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
            made = [pool.submit(torch.empty, self.chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(missing)]
        try:
            self.free += [chunk.result() for chunk in made]
        except RuntimeError as error:
            raise RuntimeError(f"train.activations=offload: {num_chunks * self.chunk_bytes / 2**30:.0f} GiB of pinned host memory "
                               f"cannot be had ({error})") from error
        self.num_chunks += missing

    def put(self, tensors: Sequence[Tensor]) -> Handle:
        """tensors: of one device, not written to until they are taken."""
        last, device = self._last, tensors[0].device
        if last is not None:
            last.leave_device()
        handle = Handle(self, tensors, last)
        if device.type == "cuda" or self.copies:
            handle.start_leaving()
        self._last = handle
        return handle

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The one on which all copies of a device run, so that a chunk's next use comes after its last."""
        return self._streams.of(device)

    def chunk(self, pinned: bool) -> Tensor:
        if self.free:
            return self.free.pop()
        self.num_chunks += 1
        return torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=pinned)


class Handle:
    """What one put has put."""

    def __init__(self, store: HostStore, tensors: Sequence[Tensor], before: Handle | None):
        self.store, self.device = store, tensors[0].device
        self.tensors: list[Tensor] | None = [tensor.detach().contiguous() for tensor in tensors]  # on the device, or None
        self.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.chunks: list[Tensor] = []
        self.copied: torch.cuda.Event | None = None  # after the last copy, to the host or back
        self.is_taken = False
        # Weak: a chain of all puts of a run would never end.
        self._before = weakref.ref(before) if before is not None else lambda: None

    def __del__(self):
        # A graph that is dropped without a backward, or in the midst of it.
        if not self.is_taken:
            self._await_copies()
            self._give_back()

    def start_leaving(self) -> None:
        self._copy(self.tensors, to_host=True)

    def leave_device(self) -> None:
        """Lets the device memory go, once the copies are done on the device's own clock."""
        if self.chunks and self.tensors is not None and not self.is_taken:
            self._await_copies()
            self.tensors = None

    def start_returning(self) -> None:
        if self.tensors is None and not self.is_taken:
            self.tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self.shapes]
            self._copy(self.tensors, to_host=False)

    def take(self) -> list[Tensor]:
        """The tensors. Raises RuntimeError the second time."""
        if self.is_taken:
            raise RuntimeError("train.activations=offload: a second backward through one graph; what it kept went with the first")
        self.start_returning()
        self._await_copies()
        taken, self.tensors, self.is_taken = self.tensors, None, True
        self._give_back()
        before = self._before()
        if before is not None:
            before.start_returning()
        return taken

    def _give_back(self) -> None:
        """The chunks: whoever gets them next writes to them on the stream that has still to read them."""
        self.store.free.extend(self.chunks)
        self.chunks = []

    def _await_copies(self) -> None:
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def _copy(self, tensors: Sequence[Tensor], to_host: bool) -> None:
        stream, size = self.store.stream(self.device), self.store.chunk_bytes
        if stream is not None:
            # Behind whatever made these tensors, or last used the memory that they are to get.
            stream.wait_stream(torch.cuda.current_stream(self.device))
        used = 0
        with torch.cuda.stream(stream):
            for tensor in tensors:
                flat = tensor.view(-1).view(torch.uint8)
                for piece in flat.split(size) if len(flat) else ():
                    if to_host:
                        self.chunks.append(self.store.chunk(pinned=stream is not None))
                        self.chunks[-1][:len(piece)].copy_(piece, non_blocking=True)
                    else:
                        piece.copy_(self.chunks[used][:len(piece)], non_blocking=True)
                    used += 1
            if stream is not None:
                self.copied = stream.record_event()
