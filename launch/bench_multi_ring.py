"""Ring attention over several GPUs: forward and backward by carrier, against one GPU's kernel at equal work and torch's own."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash import Layout, Mask, ring_attention
from ringflash.kernels import dispatch
from ringflash.launch.bench_kernels import BACKWARD_FLOPS
from ringflash.launch.bench_multi_links import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, Say, carrier_of
from ringflash.launch.bench_multi_timing import Task, interleaved
from ringflash.ring import loop
from ringflash.ring.plan import build_plan

# torch.distributed.tensor.experimental.context_parallel: how K and V get round, and which SDPA kernel computes.
PEERS = {f"{rotate}-{name}": (rotate, backend) for (rotate, (name, backend)) in product(
    ("allgather", "alltoall"), (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)))}


def draw(rows: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q [1, rows, Hq, D], k, v [1, rows, Hkv, D], dout like q: random, never zeros (zeros run faster)."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    return tuple(torch.randn(1, rows, heads, HEAD_DIM, generator=generator, device=device, dtype=torch.float32).to(DTYPE)
                 for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS))


class Ours:
    """The public op on `rows` local rows, causal; group None: one GPU alone."""

    def __init__(self, rows: int, device: torch.device, kernel: str, exchange: str = "auto",
                 group: dist.ProcessGroup | None = None):
        q, k, v, self.dout = draw(rows, device)
        self.inputs = tuple(x.requires_grad_() for x in (q, k, v))
        size = 1 if group is None else dist.get_world_size(group)
        layout = Layout("zigzag", rows * size, size, group=group)
        self.attend = functools.partial(ring_attention, layout=layout, group=group, kernel=kernel, exchange=exchange)
        self.grads: tuple[torch.Tensor, ...] = ()

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.attend(*self.inputs)

    def both(self) -> None:
        self.grads = torch.autograd.grad(self.attend(*self.inputs), self.inputs, self.dout)


class _Silent:
    """A carrier that moves nothing: what arrives is whatever its buffers hold, which is random numbers."""

    def __init__(self, device: torch.device):
        self._device, self._buffers = device, {}

    def post(self, step, sends, recvs):
        return None

    def receive_buffer(self, message, row_shape, dtype):
        key = (message, tuple(row_shape), dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.randn(message.num_rows, *row_shape, dtype=dtype, device=self._device)
        return self._buffers[key]


class Visits:
    """The visits of one rank of the ring, copies and sums included, and nothing sent: the ring if communication cost nothing."""

    def __init__(self, rows: int, device: torch.device, kernel: str):
        self.q, self.k, self.v, self.dout = draw(rows, device)
        self.rank, size = dist.get_rank(), dist.get_world_size()
        self.plan = build_plan(Mask(), Layout("zigzag", rows * size, size))
        self.backend = dispatch.select(kernel, device=device, dtype=DTYPE, head_dim=HEAD_DIM)
        self.carrier = _Silent(device)
        # Gradients need the lse of these very inputs, or p overflows.
        self.out, self.lse = self._forward()

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(self.q), self.q.new_empty((1, NUM_HEADS, self.q.shape[1]), dtype=torch.float32)
        loop.drive(loop.forward(self.plan, self.rank, self.q, self.k, self.v, self.backend, self.carrier,
                                softmax_scale=HEAD_DIM ** -0.5, out=out, lse=lse))
        return out, lse

    def forward(self) -> None:
        self._forward()

    def both(self) -> None:
        out, lse = self._forward()
        loop.drive(loop.backward(self.plan, self.rank, self.dout, None, self.q, self.k, self.v, out, lse, self.backend,
                                 self.carrier, softmax_scale=HEAD_DIM ** -0.5, deterministic=False, gradients=[]))


class Peer:
    """torch's context_parallel around scaled_dot_product_attention, on the same zigzag shards."""

    def __init__(self, rows: int, device: torch.device, rotate: str, backend: SDPBackend, ours: Ours):
        self.rotate, self.backend = rotate, backend
        self.inputs = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in ours.inputs)
        self.dout = ours.dout.transpose(1, 2).contiguous()
        self.mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        self.length = torch.empty(1, rows * dist.get_world_size(), device=device)
        self.grads: tuple[torch.Tensor, ...] = ()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self.rotate)
        with context_parallel(self.mesh, buffers=[self.length.clone()], buffer_seq_dims=[1]), sdpa_kernel(self.backend):
            yield

    def attend(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.inputs, is_causal=True, enable_gqa=True)

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.attend()

    def both(self) -> None:
        self.grads = torch.autograd.grad(self.attend(), self.inputs, self.dout)

    def difference(self, ours: Ours) -> float:
        """Largest difference from our out, dq, dk, dv over the largest value; after both have run."""
        with self.around():
            self.both()
            theirs = (self.forward(), *self.grads)
        ours.both()
        pairs = zip((ours.forward(), *ours.grads), (x.transpose(1, 2) for x in theirs))
        return max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in pairs)


def bench(exchanges: Sequence[str], rows_list: Sequence[int], kernel: str, device: torch.device, say: Say, *, repeats: int,
          peers: Sequence[str], peers_up_to: int, at_least_ms: float = 50.0) -> list[dict]:
    """One record per rows and candidate: milliseconds, TFLOP/s per GPU, and the share of one GPU's kernel at equal work."""
    records, size = [], dist.get_world_size()
    for rows in rows_list:
        # As many pairs as each rank of the ring has: a causal square of rows * sqrt(W).
        alone = max(128, round(rows * size ** 0.5 / 128) * 128)
        runs: dict = {"one GPU": Ours(alone, device, kernel), "visits": Visits(rows, device, kernel)}
        runs |= {name: Ours(rows, device, kernel, *carrier_of(name)) for name in exchanges}
        failures, differs = {}, {}
        for name in (f"torch {peer}" for peer in (peers if rows <= peers_up_to else ())):
            try:
                peer = Peer(rows, device, *PEERS[name.removeprefix("torch ")], runs[exchanges[0]])
                differs[name] = peer.difference(runs[exchanges[0]])
                runs[name] = peer
            except Exception as error:  # torch's prototype may refuse a combination; all ranks alike
                failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        tasks = {(name, which): Task(getattr(run, which), getattr(run, "around", None))
                 for name, run in runs.items() for which in ("forward", "both")}
        found = interleaved(tasks, device, repeats=repeats, at_least_ms=at_least_ms)
        base = {}
        for name in (*runs, *failures):
            record = {"section": "ring", "candidate": name, "rows": rows, "cp_size": size, "failure": failures.get(name)}
            if name not in failures:
                pairs = alone * (alone + 1) / 2 if name == "one GPU" else rows * size * (rows * size + 1) / 2 / size
                flops = 4.0 * pairs * HEAD_DIM * NUM_HEADS
                forward, both = (found[name, which].gpu_ms for which in ("forward", "both"))
                rates = {"forward": flops / forward / 1e9, "both": (1 + BACKWARD_FLOPS) * flops / both / 1e9,
                         "backward": BACKWARD_FLOPS * flops / (both - forward) / 1e9}
                base = base or rates
                record |= {"forward_ms": forward, "both_ms": both, **{f"{k}_tflops": rate for k, rate in rates.items()},
                           **{f"{k}_of_one_gpu": rate / base[k] for k, rate in rates.items()}}
                record["kernel"] = name.split("-")[-1] if name.startswith("torch ") else runs["visits"].backend.name
                record |= {"difference": differs.get(name), "host_ms": found[name, "both"].host_ms}
            records.append(record)
            say(record)
        del runs, tasks
        torch.cuda.empty_cache()
    return records


def trace(exchanges: Sequence[str], rows: int, kernel: str, device: torch.device, prefix: str) -> None:
    """PREFIX-CARRIER.json of rank 0: a Chrome trace of three forwards and backwards in a row, with kernels, copies and ranges."""
    for name in exchanges:
        run = Ours(rows, device, kernel, *carrier_of(name))
        run.both()
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            for call in range(3):
                with torch.profiler.record_function(f"ring {name} call {call}"):
                    run.both()
            torch.cuda.synchronize(device)
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(f"{prefix}-{name}.json")
