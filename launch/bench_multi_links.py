"""What a hop costs: bandwidth between neighbours by carrier and size; a hop, a kernel, and both at once."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.launch.bench_multi_timing import Task, Timing, interleaved
from ringflash.ring import loop
from ringflash.ring.carriers import make_carrier
from ringflash.ring.exchange import warm_up
from ringflash.ring.plan import build_plan

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
ROW_BYTES = NUM_KV_HEADS * 2 * HEAD_DIM * 2                 # of K and V of one row, in bf16
# Of work before a sample, at about that speed; kernels at most, as the host must keep ahead.
LEAD_MS, LEAD_TFLOPS, LEAD_RUNS = 12.0, 700.0, 24
Say = Callable[[dict], None]


_high: list[dist.ProcessGroup] = []


def carrier_of(name: str) -> tuple[str, dist.ProcessGroup]:
    """(exchange, group) of a carrier's name: nccl, copy, or nccl-high, NCCL on a stream of high priority."""
    if name != "nccl-high":
        return name, dist.group.WORLD
    if not _high:
        _high.append(dist.new_group(pg_options=dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)))
    return "nccl", _high[0]


class Hop:
    """Every rank sends `rows` rows of K and V to the next one, again and again, over one carrier."""

    def __init__(self, name: str, rows: int, device: torch.device, group: dist.ProcessGroup | None = None):
        exchange, group = carrier_of(name) if group is None else (name, group)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        plan = build_plan(Mask(causal=False), Layout("contiguous", size * rows, size), lanes=(1,))
        self.carrier = make_carrier(exchange, group, plan, "forward", {"kv": ROW_BYTES, "dkv": 2 * ROW_BYTES}, device)
        row_shape = (1, NUM_KV_HEADS, 2 * HEAD_DIM)
        self.sends = [(m, torch.randn(m.num_rows, *row_shape, dtype=DTYPE, device=device))
                      for m in plan.sends(rank, 0, "forward")]
        self.recvs = []
        for message in plan.recvs(rank, 0, "forward"):
            buffer = self.carrier.receive_buffer(message, row_shape, DTYPE)
            self.recvs.append((message, torch.empty(message.num_rows, *row_shape, dtype=DTYPE, device=device)
                               if buffer is None else buffer))

    def post(self):
        return self.carrier.post(0, self.sends, self.recvs)

    def run(self) -> None:
        self.post().wait()


def bandwidth(exchanges: Sequence[str], sizes_mib: Sequence[int], device: torch.device, say: Say, *, repeats: int) -> list[dict]:
    """GB/s that each rank sends to the next while it receives as much from the last."""
    records = []
    for size in sizes_mib:
        rows = (size << 20) // ROW_BYTES
        tasks = {name: Task(Hop(name, rows, device).run) for name in exchanges}
        for name, found in interleaved(tasks, device, repeats=repeats, at_least_ms=4.0).items():
            records.append({"section": "link", "carrier": name, "bytes": rows * ROW_BYTES, "rows": rows, "ms": found.gpu_ms,
                            "host_ms": found.host_ms, "gb_per_s": rows * ROW_BYTES / found.gpu_ms / 1e6})
            say(records[-1])
    return records


class Kernel:
    """A forward visit of a zigzag causal ring, that of step 1: all queries of `rows` rows against what has arrived."""

    def __init__(self, kernel: str, rows: int, device: torch.device):
        rank, size = dist.get_rank(), dist.get_world_size()
        plan = build_plan(Mask(), Layout("zigzag", size * rows, size))
        visit = plan.visits(rank, 1)[0]
        self.backend = dispatch.select(kernel, device=device, dtype=DTYPE, head_dim=HEAD_DIM)
        self.intervals = loop.intervals_of(plan, visit, device)
        self.q = torch.randn(1, rows, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device=device)
        block = torch.randn(visit.num_rows, 1, NUM_KV_HEADS, 2 * HEAD_DIM, dtype=DTYPE, device=device).transpose(0, 1)
        self.k, self.v = block[..., :HEAD_DIM], block[..., HEAD_DIM:]
        self.state = torch.zeros(self.q.shape, dtype=torch.float32, device=device)
        self.lse = torch.zeros(1, NUM_HEADS, rows, dtype=torch.float32, device=device)
        self.flops = 4.0 * visit.num_pairs * HEAD_DIM * NUM_HEADS

    def run(self, spare_sms: int = 0) -> None:
        self.backend.forward(self.q, self.k, self.v, self.intervals, softmax_scale=HEAD_DIM ** -0.5, state=self.state,
                             lse=self.lse, out=None, first=False, spare_sms=spare_sms)

    def lead(self) -> None:
        """About as much work as LEAD_MS take: after it a card's clocks are those of steady work."""
        for _ in range(max(1, min(LEAD_RUNS, round(LEAD_MS * LEAD_TFLOPS * 1e9 / self.flops)))):
            self.run()


def overlap(exchanges: Sequence[str], rows_list: Sequence[int], kernel: str, device: torch.device, say: Say, *, repeats: int,
            at_least_ms: float = 12.0) -> list[dict]:
    """Per carrier and rows: a hop of all rows, a kernel, both of a step, and what part of the hop hides behind the kernel."""
    records = []
    for rows in rows_list:
        compute = Kernel(kernel, rows, device)
        hops = {name: Hop(name, rows, device) for name in exchanges}
        tasks = {"kernel": Task(compute.run, lead=compute.lead)}
        for name, hop in hops.items():
            tasks[f"hop {name}"] = Task(hop.run)
            tasks[f"both {name}"] = Task(_both(hop, compute), lead=compute.lead)
        found = interleaved(tasks, device, repeats=repeats, at_least_ms=at_least_ms, most=24)
        for name in exchanges:
            records.append(_record("overlap", name, rows, compute, found["kernel"], found[f"hop {name}"], found[f"both {name}"]))
            say(records[-1])
    return records


def _both(hop: Hop, compute: Kernel, spare_sms: int = 0) -> Callable[[], None]:
    def run() -> None:
        pending = hop.post()
        compute.run(spare_sms)
        pending.wait()

    return run


def _record(section: str, name: str, rows: int, compute: Kernel, kernel: Timing, hop: Timing, both: Timing) -> dict:
    added_ms = both.gpu_ms - kernel.gpu_ms
    return {"section": section, "carrier": name, "rows": rows, "kernel": compute.backend.name, "kernel_ms": kernel.gpu_ms,
            "hop_ms": hop.gpu_ms, "both_ms": both.gpu_ms, "added": added_ms / kernel.gpu_ms,
            "hidden": 1 - max(0.0, added_ms) / hop.gpu_ms, "kernel_tflops": compute.flops / kernel.gpu_ms / 1e9,
            "host_ms": {"kernel": kernel.host_ms, "hop": hop.host_ms, "both": both.host_ms}}


def nccl_sweep(channels: Sequence[int], rows: int, kernel: str, device: torch.device, say: Say, *, repeats: int,
               spare_sms: Sequence[int] = (0,)) -> list[dict]:
    """NCCL groups held to so many channels (0: its own choice), with and without a high-priority stream: hop, kernel, both.

    These are what a process group takes when it is made; NCCL's other settings are environment variables of a whole process.
    What came out stands in Note [NCCL beside kernels].
    """
    compute, records = Kernel(kernel, rows, device), []
    for count in channels:
        for high in (False, True) if count == 0 else (False,):
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high)
            if count:
                options.config.min_ctas = options.config.max_ctas = count
            group = dist.new_group(pg_options=options)
            with contextlib.ExitStack() as stack:
                stack.callback(dist.destroy_process_group, group)
                warm_up(group, device)
                hop = Hop("nccl", rows, device, group)
                tasks = {"kernel": Task(compute.run, lead=compute.lead), "hop": Task(hop.run)}
                tasks |= {f"both {spare}": Task(_both(hop, compute, spare), lead=compute.lead) for spare in spare_sms}
                found = interleaved(tasks, device, repeats=repeats, at_least_ms=12.0, most=24)
                for spare in spare_sms:
                    record = _record("nccl", f"{count or 'default'} channels", rows, compute, found["kernel"], found["hop"],
                                     found[f"both {spare}"])
                    records.append({**record, "high_priority": high, "spare_sms": spare})
                    say(records[-1])
    return records
