"""AdamW whose moments live in pinned host memory and pass through the device a few at a time (ZeRO-Offload, Ren et al. 2021, but
for the arithmetic, which stays on the device): optim.offload.

The moments are read and written once a step, 16 bytes a parameter over the host link: a step of minutes does not notice, and 8
bytes a parameter of device memory are free for activations.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ringflash.model.host_store import SideStreams

BUCKET_ELEMENTS = 32 << 20  # of each moment: 256 MiB of both, three times on the device
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Bucket:
    """Parts of parameters that are stepped together: flat views, of equal length one by one. moments: on the host, [2][parts]."""

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: tuple[list[Tensor], list[Tensor]]
    steps: list[Tensor]

    def of(self, buffer: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Parts like those of the moments in buffer [2, BUCKET_ELEMENTS]."""
        lengths = [len(part) for part in self.parameters]
        return tuple(list(row[:sum(lengths)].split(lengths)) for row in buffer)


class OffloadedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, to the bit. state: exp_avg and exp_avg_sq on the CPU, pinned where the parameters are on a GPU; as
    DTensors of the parameter's placement where that is one. step() returns when they are written.

    Raises ValueError for a closure, and for parameters that are no contiguous fp32.
    """

    def __init__(self, groups: Iterable[Any], *, bucket_elements: int = BUCKET_ELEMENTS, **options: Any):
        super().__init__(groups, **options)
        self.bucket_elements = bucket_elements
        self._streams = SideStreams()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dtype != torch.float32 or not _local(parameter).is_contiguous():
                    raise ValueError(f"optim.offload=true: takes contiguous fp32 parameters, got {parameter.dtype} with strides "
                                     f"{tuple(parameter.stride())}")

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        if closure is not None:
            raise ValueError("optim.offload=true: step() takes no closure")
        waiting = list(self._buckets())
        if not waiting:
            return
        device = waiting[0].parameters[0].device
        stream = self._streams.of(device)
        compute = None if stream is None else torch.cuda.current_stream(device)
        # A bucket computes while the next one comes and the last one goes. What a buffer held has left on the stream on which its
        # next moments come.
        buffers = torch.empty((min(3, len(waiting)), 2, self.bucket_elements), device=device)
        if stream is not None:
            stream.wait_stream(compute)
        arrived = self._fetch(waiting[0], buffers[0], stream)
        for index, bucket in enumerate(waiting):
            moments, ready = arrived
            if index + 1 < len(waiting):
                arrived = self._fetch(waiting[index + 1], buffers[(index + 1) % 3], stream)
            if stream is not None:
                compute.wait_event(ready)
            self._compute(bucket, moments)
            if stream is not None:
                stream.wait_stream(compute)
            with torch.cuda.stream(stream):
                for host, part in zip(bucket.moments[0] + bucket.moments[1], moments[0] + moments[1], strict=True):
                    host.copy_(part, non_blocking=True)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
        if stream is not None:
            stream.synchronize()                            # whoever reads the state next, a checkpoint, reads it on the host

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch puts them where the parameter is.
        for parameter, state in self.state.items():
            for name in MOMENTS:
                loaded, state[name] = state[name], _moment(parameter)
                _local(state[name]).copy_(_local(loaded))

    def _buckets(self) -> Iterator[_Bucket]:
        for group in self.param_groups:
            bucket, room = _Bucket(group, [], [], ([], []), []), self.bucket_elements
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state.update({name: _moment(parameter) for name in MOMENTS})
                flat = [_local(x).reshape(-1) for x in (parameter, parameter.grad, *(state[name] for name in MOMENTS))]
                start = 0
                while start < len(flat[0]):
                    part = slice(start, min(start + room, len(flat[0])))
                    bucket.parameters.append(flat[0][part])
                    bucket.gradients.append(flat[1][part])
                    bucket.moments[0].append(flat[2][part])
                    bucket.moments[1].append(flat[3][part])
                    # A copy for each part: adamw counts it up.
                    bucket.steps.append(state["step"].clone())
                    room -= part.stop - start
                    start = part.stop
                    if room == 0:
                        yield bucket
                        bucket, room = _Bucket(group, [], [], ([], []), []), self.bucket_elements
            if bucket.parameters:
                yield bucket

    def _fetch(self, bucket: _Bucket, buffer: Tensor, stream: torch.cuda.Stream | None):
        """Starts the copies of a bucket's moments to the device: (where they will be, the event after them)."""
        moments = bucket.of(buffer)
        with torch.cuda.stream(stream):
            for part, host in zip(moments[0] + moments[1], bucket.moments[0] + bucket.moments[1], strict=True):
                part.copy_(host, non_blocking=True)
        return moments, None if stream is None else stream.record_event()

    def _compute(self, bucket: _Bucket, moments: tuple[list[Tensor], list[Tensor]]) -> None:
        group = bucket.group
        beta1, beta2 = group["betas"]
        adamw(bucket.parameters, bucket.gradients, *moments, [], bucket.steps, foreach=group["foreach"], amsgrad=False,
              beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _moment(parameter: Tensor) -> Tensor:
    """Zeros like the parameter, on the host."""
    local = _local(parameter)
    zeros = torch.zeros(local.shape, pin_memory=local.is_cuda)
    return DTensor(zeros, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else zeros
