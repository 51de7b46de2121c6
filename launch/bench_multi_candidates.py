"""What the ring section of bench multi times: our op, its visits alone, torch's context_parallel and the package ring-flash-attn.

Each has forward() and both(), which queue one repetition, and may have around(), entered before a sample and left after it.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from itertools import product

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringflash import Layout, ring_attention
from ringflash.kernels import dispatch
from ringflash.launch.bench_multi_links import DTYPE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS
from ringflash.mesh import ranks_of
from ringflash.ring import loop
from ringflash.ring.plan import build_plan
from ringflash.ring.rotate import Heads, choose

HEADS = (NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
# torch.distributed.tensor.experimental.context_parallel: how K and V get round, and which SDPA kernel computes.
TORCH_PEERS = {f"{rotate}-{name}": (rotate, backend) for (rotate, (name, backend)) in product(
    ("allgather", "alltoall"), (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)))}
RING_FLASH_ATTN = "ring-flash-attn"
PEERS = (*TORCH_PEERS, RING_FLASH_ATTN)


def draw(rows: int, device: torch.device, heads: tuple[int, int, int] = HEADS) -> tuple[torch.Tensor, ...]:
    """q [1, rows, Hq, D], k, v [1, rows, Hkv, D], dout like q: random, never zeros (zeros run faster). heads: (Hq, Hkv, D)."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    num_heads, num_kv_heads, head_dim = heads
    return tuple(torch.randn(1, rows, n, head_dim, generator=generator, device=device, dtype=torch.float32).to(DTYPE)
                 for n in (num_heads, num_kv_heads, num_kv_heads, num_heads))


class Ours:
    """The public op on this rank's rows of layout. group: of all its ranks, or their mesh; None: one GPU alone."""

    def __init__(self, layout: Layout, device: torch.device, kernel: str, exchange: str = "auto", group=None,
                 heads: tuple[int, int, int] = HEADS, routing: str = "auto"):
        rows = layout.positions(0 if group is None else ranks_of(group).rank).size
        q, k, v, self.dout = draw(rows, device, heads)
        self.inputs = tuple(x.requires_grad_() for x in (q, k, v))
        # The ranks agree here, once.
        agreed = Layout(layout.kind, layout.seq_len, layout.cp_size, layout.masks, layout.ulysses_size, group=group)
        self.attend = functools.partial(ring_attention, layout=agreed, group=group, kernel=kernel, exchange=exchange,
                                        routing=routing)
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

    def __init__(self, layout: Layout, device: torch.device, kernel: str):
        self.rank = dist.get_rank()
        self.q, self.k, self.v, self.dout = draw(layout.positions(self.rank).size, device)
        self.plan = build_plan(layout.masks[0], layout)
        self.backward_plan = choose(self.plan, Heads(1, *HEADS, itemsize=DTYPE.itemsize), "auto").plan
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
        loop.drive(loop.backward(self.backward_plan, self.rank, self.dout, None, self.q, self.k, self.v, out, lse, self.backend,
                                 self.carrier, softmax_scale=HEAD_DIM ** -0.5, deterministic=False, gradients=[]))


class _Peer:
    """Another implementation of causal attention on the zigzag shards that `ours` has."""

    def __init__(self, ours: Ours):
        self.inputs, self.dout = tuple(x.detach().requires_grad_() for x in ours.inputs), ours.dout
        self.grads: tuple[torch.Tensor, ...] = ()

    def around(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def attend(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.attend()

    def both(self) -> None:
        self.grads = torch.autograd.grad(self.attend(), self.inputs, self.dout)

    def rows_first(self, x: torch.Tensor) -> torch.Tensor:
        """x as [1, rows, H, D]."""
        return x

    def difference(self, ours: Ours) -> float:
        """Largest difference from our out, dq, dk, dv over the largest value; after both have run."""
        with self.around():
            self.both()
            theirs = (self.forward(), *self.grads)
        ours.both()
        pairs = zip((ours.forward(), *ours.grads), map(self.rows_first, theirs))
        return max(float((a.float() - b.float()).abs().max() / a.float().abs().max()) for a, b in pairs)


class TorchPeer(_Peer):
    """torch's context_parallel around scaled_dot_product_attention. name: a key of TORCH_PEERS."""

    def __init__(self, name: str, seq_len: int, device: torch.device, ours: Ours):
        super().__init__(ours)
        self.rotate, self.backend = TORCH_PEERS[name]
        self.inputs = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in self.inputs)
        self.dout = self.dout.transpose(1, 2).contiguous()
        self.mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        self.length = torch.empty(1, seq_len, device=device)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self.rotate)
        with context_parallel(self.mesh, buffers=[self.length.clone()], buffer_seq_dims=[1]), sdpa_kernel(self.backend):
            yield

    def attend(self) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*self.inputs, is_causal=True, enable_gqa=True)

    def rows_first(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class RingFlashAttn(_Peer):
    """zigzag_ring_flash_attn_func of the package ring-flash-attn, which computes with flash-attn. RuntimeError without it."""

    def __init__(self, ours: Ours):
        try:
            from ring_flash_attn import zigzag_ring_flash_attn_func
        except ImportError as error:
            raise RuntimeError(f"not installed ({error})") from error
        super().__init__(ours)
        self._attend = functools.partial(zigzag_ring_flash_attn_func, causal=True, group=dist.group.WORLD)

    def attend(self) -> torch.Tensor:
        return self._attend(*self.inputs)


def peer(name: str, seq_len: int, device: torch.device, ours: Ours) -> _Peer:
    """name: of PEERS. What it raises, it raises on all ranks alike."""
    return RingFlashAttn(ours) if name == RING_FLASH_ATTN else TorchPeer(name, seq_len, device, ours)
