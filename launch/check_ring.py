"""The matrix on a real ring of processes, with random delays, put together for the judge."""
from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch

from ringflash import ring_attention, shard
from ringflash.kernels import dispatch
from ringflash.launch.check_judge import differentiate
from ringflash.launch.check_problem import DTYPES, TENSORS, Cell, call_options, make_dlse, make_inputs
from ringflash.launch.check_spawn import Rank, run_ranks
from ringflash.ring.copy_engine import CopyExchange
from ringflash.ring.exchange import DistributedExchange

CYCLES_PER_MS = 1_700_000


def run_ring(cells: Sequence[Cell], num_processes: int, *, device_type: str, delay_ms: float = 0.0, timeout_s: float = 600.0,
             exchange: str = "auto", say: Callable[[str], None] = lambda text: None) -> list[dict[str, torch.Tensor]]:
    """Computes the cells (their cp_size is num_processes) on a ring of processes; per cell the global out, lse and gradients,
    on the CPU.

    delay_ms: the largest random pause of every rank before each call and each batch. Raises RingFailure (check_spawn).
    """
    if any(cell.cp_size != num_processes for cell in cells):
        raise ValueError(f"every cell must have cp_size {num_processes}")
    shards = run_ranks(ring_cells, num_processes, tuple(cells), delay_ms, exchange, device_type=device_type, timeout_s=timeout_s,
                       say=say, name_of=lambda index: f"cell {index} ({cells[index]})")
    return assemble(cells, shards)


def assemble(cells: Sequence[Cell], shards: Sequence[Sequence[dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    """Per cell the global tensors, from what ring_cells returned on each rank."""
    results = []
    for index in range(len(cells)):
        parts = [shard[index] for shard in shards]
        order, order_k = (torch.argsort(torch.cat([part[name] for part in parts])) for name in ("positions", "positions_k"))
        whole = {name: torch.cat([part[name] for part in parts], dim=_dim(name)).index_select(
            _dim(name), order_k if name in ("dk", "dv") else order) for name in TENSORS}
        if cells[index].has_sinks:
            whole["dsinks"] = torch.stack([part["dsinks"] for part in parts]).sum(0)     # each rank has its rows' share
        results.append(whole)
    return results


def _dim(name: str) -> int:
    """Where the rows are: out, dq, dk, dv [B, S, H, D], lse [B, Hq, S]."""
    return 2 if name == "lse" else 1


def ring_cells(rank: Rank, cells: Sequence[Cell], delay_ms: float, exchange: str = "auto") -> list[dict[str, torch.Tensor]]:
    """The work of one rank: its part of every cell."""
    warm_up(cells, rank.device)
    clock = random.Random(f"delays of rank {rank.rank}")
    results = []
    with delayed_batches(clock, delay_ms, rank.device):
        for index, cell in enumerate(cells):
            rank.at(index)
            pause(clock, delay_ms, rank.device)
            results.append(ring_cell(cell, rank.device, torch.distributed.group.WORLD, exchange))
    return results


def warm_up(cells: Sequence[Cell], device: torch.device) -> None:
    """Compiles what the cells need before the first message: a compile in mid-run looks like a hang to the other ranks."""
    kinds = {(c.kernel, c.dtype, c.head_dim, c.head_dim_v, c.softcap, c.batch, c.num_kv_heads * c.ratio, c.num_kv_heads,
              c.deterministic) for c in cells}
    for kernel, dtype, head_dim, head_dim_v, softcap, batch, num_heads, num_kv_heads, deterministic in sorted(kinds):
        backend = dispatch.select(kernel, device=device, dtype=DTYPES[dtype], head_dim=head_dim, deterministic=deterministic,
                                  head_dim_v=head_dim_v)
        backend.warmup(DTYPES[dtype], head_dim, device, batch=batch, num_heads=num_heads, num_kv_heads=num_kv_heads,
                       deterministic=deterministic, head_dim_v=head_dim_v, softcap=softcap)


def ring_cell(cell: Cell, device: torch.device, group, exchange: str = "auto") -> dict[str, torch.Tensor]:
    """This rank's part of a cell through the public op, on the CPU: out, dq, dk, dv [B, rows, H, D or Dv], lse [B, Hq, rows],
    positions of its queries and positions_k of its keys [rows], and with sinks dsinks [Hq]."""
    layouts = cell.layouts(group)
    layout, layout_k = layouts["layout"], layouts.get("layout_k", layouts["layout"])
    q, k, v, dout = make_inputs(cell, device)
    q, dout = (shard(x, layout, group=group) for x in (q, dout))
    k, v = (shard(x, layout_k, group=group) for x in (k, v))
    dlse = make_dlse(cell, device)
    tensors = differentiate(
        ring_attention, q, k, v, dout, None if dlse is None else shard(dlse, layout, group=group, dim=2), mask=cell.make_mask(),
        group=group, exchange=exchange, **layouts, **cell.how(), **call_options(cell, device))
    rank = torch.distributed.get_rank(group)
    return {**{name: tensor.cpu() for name, tensor in tensors.items()}, "positions": torch.from_numpy(layout.positions(rank)),
            "positions_k": torch.from_numpy(layout_k.positions(rank))}


def pause(clock: random.Random, delay_ms: float, device: torch.device) -> None:
    """Holds this rank up for a random time of at most delay_ms, on the host and, on CUDA, on the stream as well."""
    if delay_ms <= 0:
        return
    time.sleep(clock.uniform(0.0, delay_ms) / 1e3)
    if device.type == "cuda":
        torch.cuda._sleep(int(clock.uniform(0.0, delay_ms) * CYCLES_PER_MS))


@contextlib.contextmanager
def delayed_batches(clock: random.Random, delay_ms: float, device: torch.device) -> Iterator[None]:
    """While it lasts, a random pause stands before every batch that this process posts."""
    with contextlib.ExitStack() as stack:
        for carrier in (DistributedExchange, CopyExchange):
            stack.enter_context(mock.patch.object(carrier, "post", _delayed(carrier.post, clock, delay_ms, device)))
        yield


def _delayed(post: Callable, clock: random.Random, delay_ms: float, device: torch.device) -> Callable:
    def delayed(self, step, sends, recvs):
        pause(clock, delay_ms, device)
        return post(self, step, sends, recvs)

    return delayed
