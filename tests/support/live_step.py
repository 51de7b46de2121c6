"""The live bytes of a training step as a GPU would have them, on a CPU: the model's, the ring's and the optimizer's own code,
with kernels that allocate what GPU kernels do and compute nothing."""
from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ringflash import Layout, Mask, ops
from ringflash.config import Config
from ringflash.kernels.dispatch import accumulate_dtype
from ringflash.mesh import Ranks
from ringflash.model import rowwise
from ringflash.model import Transformer
from ringflash.model.build import model_config
from ringflash.model.host_store import HostStore
from ringflash.planning.live_bytes import LiveBytes
from ringflash.ring import loop
from ringflash.ring.cache import BoundedCache
from ringflash.train.gradients import clip_gradients, gradient_norm, sum_gradients
from ringflash.train.optim import build_optimizer


class Kernels:
    """A backend (kernels/dispatch.py) with the allocations of `hopper`."""

    name = "none"

    @staticmethod
    def forward(q, k, v, intervals, **options) -> None:
        pass

    @staticmethod
    def delta(dout: Tensor, out: Tensor, dlse=None) -> Tensor:
        return out.new_zeros((out.shape[0], out.shape[2], out.shape[1]), dtype=accumulate_dtype(out.dtype))

    @staticmethod
    def backward(dout, q, k, v, lse, delta, intervals, *, dq, dk, dv, **options) -> None:
        _ = torch.empty_like(lse), torch.empty_like(delta)  # hopper_backward_prepare.py


class NoExchange:
    """A carrier (ring/exchange.py) whose messages arrive at once, with whatever the buffers held."""

    def post(self, step, sends, recvs):
        return None

    def receive_buffer(self, message, row_shape, dtype):
        return None


class Store(HostStore):
    """Copies through chunks as on a GPU; host memory does not count."""

    live: LiveBytes

    def chunk(self, pinned: bool) -> Tensor:
        with _disable_current_modes():
            chunk = super().chunk(pinned)
        self.live.ignore(chunk)
        return chunk


class _Norm(torch.autograd.Function):
    """One fused kernel each way, as torch has it for GPUs; on a CPU it is a dozen operators with as many temporaries."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """A GPU's product of 16 bit operands into fp32; on a CPU the operands are widened first."""
    return a.new_zeros((a.shape[0], b.shape[1]), dtype=dtype)


class NoHeadExchange:
    """Of ring/head_exchange.py, likewise."""

    def __init__(self, *args):
        pass

    def post(self, send, send_words, recv, recv_words):
        return self

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def as_on_gpu(ring_size: int, rank: int, ulysses_size: int = 1):
    """Around everything: this process is the first Ulysses rank of place `rank` of a ring, tensors are allocated as on a GPU."""
    ranks = Ranks(ring=object() if ring_size > 1 else None, ulysses=object() if ulysses_size > 1 else None, ring_rank=rank,
                  ring_size=ring_size, ulysses_size=ulysses_size)
    with mock.patch.object(ops, "DistributedHeadExchange", NoHeadExchange), \
            mock.patch.object(ops, "ranks_by_name", lambda *names: ranks), \
            mock.patch.object(ops, "select", lambda *a, **k: Kernels), \
            mock.patch.object(ops, "check_carrier", lambda *a: None), mock.patch.object(ops, "must_compare", lambda *a: False), \
            mock.patch.object(ops, "make_carrier", lambda *a: NoExchange()), \
            mock.patch.object(loop, "_intervals", BoundedCache(max_weight=256 << 20)), \
            mock.patch.object(rowwise, "_matmul", _matmul), mock.patch("ringflash.loss._matmul", _matmul), \
            mock.patch.object(rowwise, "_rms_norm", lambda x, weight, eps: _Norm.apply(x, weight)):
        yield


def attention(q: Tensor, k: Tensor, v: Tensor, *, layout: Layout, mask: Mask | None = None, **options) -> Tensor:
    """What Transformer calls, on the patched ring."""
    arguments = ops.RingArguments(
        mask=None if mask is None else mask.spec, causal=-1, left=-1, right=-1, layout=layout.spec, layout_kind="",
        masks=[allowed.spec for allowed in layout.masks], layout_k=None, layout_k_kind="", softmax_scale=1.0, softcap=0.0,
        group_name="", ulysses_name="", kernel="auto", exchange="auto", rotate="auto", routing="auto", deterministic=False,
        is_agreed=True, needs_gradients=True)
    return ops.attention_forward(q, k, v, None, *arguments.flatten())[0]


def peaks_of_step(cfg: Config, ring_size: int = 1, rank: int = 0, dtype: torch.dtype | None = torch.bfloat16,
                  ulysses_size: int = 1) -> dict[str, int]:
    """Peak live bytes of the forward, the backward and the rest of the second training step, and those between steps.

    dtype: of autocast, None for none. The second step: the optimizer has its state.
    """
    with as_on_gpu(ring_size, rank, ulysses_size):
        model = Transformer(model_config(cfg), attention, activations=cfg.train.activations, tile_rows=cfg.train.tile_rows,
                            residual_dtype=torch.bfloat16 if cfg.train.residual_dtype == "bf16" else None)
        model.store = Store(chunk_bytes=1 << 20, copies=True)
        for block in model.blocks:
            block.store = model.store
        layout = Layout(cfg.attention.layout, cfg.data.seq_len, ring_size, Mask(), ulysses_size)
        rows = layout.shard_len(rank * ulysses_size)
        parameters = list(model.parameters())
        optimizer = build_optimizer(cfg.optim, parameters)
        for group in optimizer.param_groups:
            group["foreach"] = True  # its default on GPUs
        tokens = torch.zeros(cfg.data.batch_size, rows, dtype=torch.int64)
        positions, labels = torch.arange(rows), torch.zeros_like(tokens)
        found: dict[str, int] = {}
        with LiveBytes([*parameters, tokens, positions, labels]) as live:
            model.store.live = live
            for _ in range(2):
                optimizer.zero_grad(set_to_none=True)
                found = {"between": live.current}
                live.reset_peak()
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = model(tokens, positions, labels, layout=layout)
                found["forward"], found["kept"] = live.peak, live.current
                live.reset_peak()
                (loss / 7).backward()
                found["backward"] = live.peak
                del loss
                live.reset_peak()
                sum_gradients(parameters, None)
                clip_gradients(parameters, 1e9, cfg.optim.grad_clip)
                optimizer.step()
                found["optimizer"] = live.peak
        return found
