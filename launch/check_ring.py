"""The real ring under the check: N processes on this machine, over gloo (CPU) or NCCL (also several ranks on one card).

The parent starts the ranks, waits with a deadline, and reads their shards from files. It never joins the group itself, so a rank
that dies or hangs costs one message and a non-zero exit, not a hang.
"""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
import multiprocessing
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import torch

from ringflash import Layout, ring_attention, shard
from ringflash.launch.check_cells import TENSORS, Cell, make_inputs, make_mask
from ringflash.ring import watchdog
from ringflash.ring.exchange import DistributedExchange

STEP_TIMEOUT_S = 120.0                      # one batch of the ring: a cold compile on one rank fits in, a hang ends
CYCLES_PER_MS = 1_700_000
GRACE_S = 10.0                              # after the first rank failed the others may still say what they saw


class RingFailure(RuntimeError):
    """The ring of processes did not finish: a rank raised, died, or the deadline passed. The message names rank and cell."""


@dataclasses.dataclass(frozen=True)
class RingJob:
    """What every rank is told. Plain values, so that it can be pickled."""
    cells: tuple[Cell, ...]
    num_processes: int
    device_type: str                        # cpu: gloo; cuda: NCCL
    delay_ms: float                         # largest random pause of a rank before a call and before each of its batches; 0: none
    timeout_s: float
    folder: str

    @property
    def shares_card(self) -> bool:
        return self.device_type == "cuda" and torch.cuda.device_count() < self.num_processes


def run_ring(cells: Sequence[Cell], num_processes: int, *, device_type: str, delay_ms: float = 0.0,
             timeout_s: float = 600.0, say: Callable[[str], None] = lambda text: None) -> list[dict[str, torch.Tensor]]:
    """Computes the cells (their cp_size is num_processes) on a ring of processes; per cell the global out, lse, dq, dk, dv (CPU).

    Raises RingFailure when a rank fails or the ring is not done within timeout_s; no process outlives the call.
    """
    if any(cell.cp_size != num_processes for cell in cells):
        raise ValueError(f"every cell must have cp_size {num_processes}")
    with tempfile.TemporaryDirectory(prefix="ringflash-check-") as folder:
        job = RingJob(tuple(cells), num_processes, device_type, delay_ms, timeout_s, folder)
        _supervise(job, say)
        shards = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(num_processes)]
    results = []
    for index, cell in enumerate(cells):
        whole = {}
        for name in TENSORS:
            dim = 2 if name == "lse" else 1
            parts = [shard["results"][index][name] for shard in shards]
            order = torch.argsort(torch.cat([shard["results"][index]["positions"] for shard in shards]))
            whole[name] = torch.cat(parts, dim=dim).index_select(dim, order)
        results.append(whole)
    return results


def _supervise(job: RingJob, say: Callable[[str], None]) -> None:
    context = multiprocessing.get_context("spawn")
    progress = context.Array("i", [-1] * job.num_processes, lock=False)     # the cell that each rank works on
    ranks = [context.Process(target=_rank_main, args=(rank, job, progress), name=f"rank{rank}", daemon=True)
             for rank in range(job.num_processes)]
    deadline = time.monotonic() + job.timeout_s
    try:
        for process in ranks:
            process.start()
        failed = None
        while pending := [p for p in ranks if p.is_alive()]:
            wait([p.sentinel for p in pending], timeout=max(0.0, min(1.0, deadline - time.monotonic())))
            say(f"ring: {min(progress) + 1}/{len(job.cells)}")
            if failed is None and any(p.exitcode for p in ranks):
                failed = next(r for r, p in enumerate(ranks) if p.exitcode)
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() >= deadline:
                break
        failed = next((r for r, p in enumerate(ranks) if p.exitcode), failed)
        if failed is not None:
            raise RingFailure(_reason(job, failed, ranks[failed].exitcode, progress))
        if any(p.is_alive() for p in ranks):
            where = ", ".join(f"rank {r} at {_cell_name(job, progress[r])}" for r in range(job.num_processes) if ranks[r].is_alive())
            raise RingFailure(f"the ring of {job.num_processes} processes was not done after {job.timeout_s:g} s: {where}")
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()


def _cell_name(job: RingJob, index: int) -> str:
    return f"cell {index} ({job.cells[index]})" if 0 <= index < len(job.cells) else "its start"


def _reason(job: RingJob, rank: int, exitcode: int, progress) -> str:
    written = Path(job.folder) / f"rank{rank}.error"
    if written.exists():
        said = written.read_text().strip()
    elif exitcode == watchdog.EXIT_CODE:
        said = "ended by the ring's watchdog, whose message stands above"
    else:
        said = f"died with exit code {exitcode} and no message"
    return f"rank {rank} of {job.num_processes}, at {_cell_name(job, progress[rank])}: {said}"


def _rank_main(rank: int, job: RingJob, progress) -> None:
    try:
        results = _run_rank(rank, job, progress)
        torch.save({"results": results}, Path(job.folder) / f"rank{rank}.pt")
    except Exception as error:  # reported to the parent, which ends the whole ring with this one message
        (Path(job.folder) / f"rank{rank}.error").write_text(
            f"{type(error).__name__}: {error}\n" + "".join(traceback.format_tb(error.__traceback__)[-3:]))
        # At once: with peers gone, leaving through the group's destructors can wait for them.
        os._exit(1)


def _run_rank(rank: int, job: RingJob, progress) -> list[dict[str, torch.Tensor]]:
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device(job.device_type)
    if job.device_type == "cuda":
        device = torch.device("cuda", 0 if job.shares_card else rank)
        torch.cuda.set_device(device)
        if job.shares_card:
            # NCCL refuses two ranks on one device unless it believes that they sit on different hosts.
            os.environ.update(NCCL_HOSTID=f"ringflash-check-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.init_process_group(
        "nccl" if job.device_type == "cuda" else "gloo", init_method=f"file://{job.folder}/store", rank=rank,
        world_size=job.num_processes, timeout=datetime.timedelta(seconds=job.timeout_s))
    watchdog.start(min(job.timeout_s, STEP_TIMEOUT_S))
    clock = random.Random(f"delays of rank {rank}")
    results = []
    with delayed_batches(clock, job.delay_ms, device):
        for index, cell in enumerate(job.cells):
            progress[rank] = index
            pause(clock, job.delay_ms, device)
            results.append(ring_cell(cell, device, dist.group.WORLD))
    watchdog.stop()
    dist.destroy_process_group()
    return results


def ring_cell(cell: Cell, device: torch.device, group) -> dict[str, torch.Tensor]:
    """This rank's part of a cell through the public op: out, dq, dk, dv [B, S_local, H, D], lse [B, Hq, S_local], positions; on CPU."""
    mask = make_mask(cell.mask, cell.seq_len)
    layout = Layout(cell.layout, cell.seq_len, cell.cp_size, mask, group=group)
    q, k, v, dout = (shard(x, layout, group=group) for x in make_inputs(cell, device))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = ring_attention(q, k, v, mask=mask, layout=layout, group=group, kernel=cell.kernel,
                              deterministic=cell.deterministic, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    tensors = {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    rank = torch.distributed.get_rank(group)
    return {**{name: tensor.cpu() for name, tensor in tensors.items()}, "positions": torch.from_numpy(layout.positions(rank))}


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
    plain = DistributedExchange.post

    def post(self, step, sends, recvs):
        pause(clock, delay_ms, device)
        return plain(self, step, sends, recvs)

    DistributedExchange.post = post
    try:
        yield
    finally:
        DistributedExchange.post = plain
