"""What one attention layer costs on N ranks: as a ring, as Ulysses x ring of every shape, or with all K and V gathered at once.

    python -m ringflash.ring.cost --seq-len 131072 --ranks 8 --heads 32 8 128

A pure function of the plans (who computes which pairs, what travels, in which step) and of a machine's rates; it times nothing.
Note [Cost model] in DESIGN.md. No torch.
"""
from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from ringflash.layout import KINDS, LAYOUTS, Layout
from ringflash.mask import Mask
from ringflash.ring.documents import parse_documents
from ringflash.ring.gathered import own_keys_of, pairs_of, visits_of
from ringflash.ring.heads import HeadSplit, valid_degrees
from ringflash.ring.plan import Plan, build_plan
from ringflash.ring.ranges import num_rows
from ringflash.ring.rotate import Heads, choose

# The share of a rank's own visit that its backward leaves for the last step (Note [A kernel for the last hop]).
_DEFERRED_CAUSAL, _DEFERRED_FULL = 0.25, 0.5


@dataclass(frozen=True)
class Machine:
    """Rates. What each default rests on stands in `sources`: some are measured, some assumed."""

    forward_tflops: float = 547.0
    backward_tflops: float = 426.0
    inside_gb_s: float = 355.0
    alltoall_gb_s: float = 200.0
    across_gb_s: float = 45.0
    exchange_us: float = 30.0
    visit_us: float = 20.0
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (value >= 0 if each.name.endswith("_us") else value > 0):
                raise ValueError(f"{each.name}={value}: must be {'at least 0' if each.name.endswith('_us') else 'above 0'}")

    @property
    def sources(self) -> dict[str, str]:
        """Per field, where its default comes from; "given" for a value that is not the default."""
        known = {
            "forward_tflops": "measured: one H200, triton, 32 q / 8 kv heads x 32,768 causal, D = 128 (README)",
            "backward_tflops": "measured likewise",
            "inside_gb_s": "assumed from two H200s: copy engines, one direction (launch/bench.py multi measures yours)",
            "alltoall_gb_s": "assumed from the same: NCCL, one direction; what Ulysses' all-to-all uses inside a host",
            "across_gb_s": "assumed: one 400 Gb/s port per GPU, unmeasured",
            "exchange_us": "assumed: launch and rendezvous of a step's exchange, unmeasured",
            "visit_us": "assumed: launch, ramp and tail of one kernel, unmeasured",
            "ranks_per_host": "assumed",
        }
        return {each.name: known[each.name] if getattr(self, each.name) == each.default else "given" for each in fields(self)}


@dataclass(frozen=True)
class Pass:
    """One direction of one layer, in milliseconds. kernels_ms: those of the busiest rank, step by step (each step waits for the
    slowest). exposed_ms: what a step's messages take longer than its kernels. alltoall_ms: Ulysses', which hides behind nothing.
    slow_steps: steps that wait for messages. sent_gb: by the busiest rank."""

    kernels_ms: float
    exposed_ms: float
    alltoall_ms: float
    slow_steps: int
    num_steps: int
    sent_gb: float

    @property
    def total_ms(self) -> float:
        return self.kernels_ms + self.exposed_ms + self.alltoall_ms


@dataclass(frozen=True)
class Estimate:
    """One way to run a layer. kv_repeats: how often each KV head stands on the Ulysses ranks of a place, on average. held_gb: of K
    and V of others that a rank holds at once in the forward."""

    ring: int
    ulysses: int
    routing: str
    forward: Pass
    backward: Pass
    rotates: str
    kv_repeats: float
    held_gb: float

    @property
    def total_ms(self) -> float:
        return self.forward.total_ms + self.backward.total_ms

    @property
    def name(self) -> str:
        if self.ring == 1:
            return f"ulysses {self.ulysses}" if self.ulysses > 1 else "one rank"
        way = {"allgather": "all-gather", "ring": "ring", "direct": "direct"}[self.routing]
        return f"{way} {self.ring}" + (f" x ulysses {self.ulysses}" if self.ulysses > 1 else "")

    @property
    def why(self) -> str:
        """One line: where the time goes beside kernels."""
        said = []
        for name, of_pass in (("forward", self.forward), ("backward", self.backward)):
            if of_pass.slow_steps:
                said.append(f"{name}: messages outlast kernels in {of_pass.slow_steps} of {of_pass.num_steps} steps, "
                            f"{of_pass.exposed_ms:.2f} ms")
        hidden = self.forward.alltoall_ms + self.backward.alltoall_ms
        if hidden:
            said.append(f"all-to-alls {hidden:.2f} ms, behind no kernel")
        if self.kv_repeats > 1:
            said.append(f"KV heads {self.kv_repeats:g}x")
        if self.rotates == "q":
            said.append("the Q side rotates in the backward")
        return "; ".join(said) or ("all messages hide behind kernels" if self.ring > 1 else "nothing travels")


def compare(
    mask: Mask, seq_len: int, num_ranks: int, heads: Heads, *, layout: str = "zigzag", machine: Machine = Machine(),
) -> list[Estimate]:
    """Every way to spread one layer over num_ranks, cheapest first (forward and backward together).

    ring x ulysses for each Ulysses degree that divides num_ranks and the query heads, with the plan's own routing and with all
    that is read gathered in one step. layout: kind of Layout. Raises ValueError for what cannot be.
    """
    if num_ranks < 1:
        raise ValueError(f"ranks={num_ranks}: must be at least 1")
    found = []
    for degree in valid_degrees(heads.num_heads):
        if num_ranks % degree:
            continue
        made = Layout(layout, seq_len, num_ranks // degree, mask, degree)
        for routing in ("auto", "allgather") if made.cp_size > 1 else ("auto",):
            found.append(estimate(build_plan(mask, made, routing=routing), made, heads, machine))
    return sorted(found, key=lambda each: each.total_ms)


def estimate(plan: Plan, layout: Layout, heads: Heads, machine: Machine) -> Estimate:
    """plan: of layout.ring. heads: of the whole layer."""
    split = HeadSplit(heads.num_heads, heads.num_kv_heads, layout.ulysses_size)
    local = split.local(heads)
    rotation = choose(plan, local, "auto")
    moved_in, moved_out = _alltoall_bytes(split, heads)
    passes = [
        _pass(plan, "forward", layout, local, machine, machine.forward_tflops, 1.0, moved_in["forward"], moved_out["forward"]),
        _pass(rotation.plan, "backward", layout, local, machine, machine.backward_tflops, 2.5, moved_in["backward"],
              moved_out["backward"])]
    rows = [(m.dst, m.step, m.num_rows) for m in plan.messages("forward")]
    rows += [(rank, 0, num_rows(own_keys_of(plan, rank, 1, "forward")[0])) for rank in range(plan.cp_size)]
    received = _per_rank_and_step((rank, step, count * local.row_bytes["kv"]) for rank, step, count in rows)
    most = max(received.values(), default=0)
    held = most if plan.routing == "allgather" else 2 * most
    repeats = split.local_kv_heads * split.size / heads.num_kv_heads
    return Estimate(layout.cp_size, layout.ulysses_size, plan.routing, *passes, rotation.plan.rotates, repeats, held / 1e9)


def _pass(plan: Plan, pass_: str, layout: Layout, heads: Heads, machine: Machine, tflops: float, work: float, moved_in: float,
          moved_out: float) -> Pass:
    """work: FLOPs in units of a forward's. moved_in, moved_out: bytes per row that a Ulysses rank sends to all others."""
    wide = heads.head_dim if heads.head_dim_v is None else heads.head_dim_v
    flops_per_pair = 2 * (heads.head_dim + wide) * heads.batch * heads.num_heads * work
    num_steps = plan.num_steps if pass_ == "forward" else plan.num_backward_steps
    inside, across = _sent(plan, pass_, layout.ulysses_size, heads, machine)
    kernels_ms = exposed_ms = 0.0
    slow_steps = 0
    share = 0.0
    if num_steps > plan.num_steps and plan.rotates == "kv":
        share = _DEFERRED_CAUSAL if getattr(plan.mask, "causal", False) else _DEFERRED_FULL
    for step in range(num_steps):
        kernel, whole = 0.0, 0.0
        for rank in range(plan.cp_size):
            at = 0 if share and step == num_steps - 1 else step
            pairs, visits = float(pairs_of(plan, rank, at, pass_)), len(visits_of(plan, rank, at, pass_))
            if share and step in (0, num_steps - 1):
                pairs *= share if step else 1 - share
            busy = pairs * flops_per_pair / (tflops * 1e9) + visits * machine.visit_us / 1e3
            hop = max(inside.get((rank, step), 0) / machine.inside_gb_s, across.get((rank, step), 0) / machine.across_gb_s) / 1e6
            hop += machine.exchange_us / 1e3 if plan.sends(rank, step, pass_) or plan.recvs(rank, step, pass_) else 0.0
            kernel, whole = max(kernel, busy), max(whole, busy, hop)
        kernels_ms += kernel
        exposed_ms += whole - kernel
        slow_steps += whole > kernel
    sent = defaultdict(float)
    for table in (inside, across):
        for (rank, _), num_bytes in table.items():
            sent[rank] += num_bytes
    rows = layout.shard_len(0)
    shared = rows * (moved_in + moved_out)
    return Pass(kernels_ms, exposed_ms, _alltoall_ms(layout, rows, (moved_in, moved_out), machine), slow_steps, num_steps,
                (max(sent.values(), default=0.0) + shared) / 1e9)


def _sent(plan: Plan, pass_: str, degree: int, heads: Heads, machine: Machine) -> tuple[dict, dict]:
    """Per (ring rank, step), bytes that it sends or that it receives, whichever is more, to its own host and to others; of the
    Ulysses rank of a place that has the most of each."""
    found = []
    row_bytes = heads.row_bytes
    for is_across in (False, True):
        tables = []
        for end in ("src", "dst"):
            table: dict[tuple[int, int], float] = defaultdict(float)
            for message in plan.messages(pass_):
                hosts = [[(ring_rank * degree + part) // machine.ranks_per_host for part in range(degree)]
                         for ring_rank in (message.src, message.dst)]
                if any((a != b) == is_across for a, b in zip(*hosts)):
                    table[getattr(message, end), message.step] += message.num_rows * row_bytes[message.kind]
            tables.append(table)
        keys = tables[0].keys() | tables[1].keys()
        found.append({key: max(table.get(key, 0.0) for table in tables) for key in keys})
    return found[0], found[1]


def _alltoall_bytes(split: HeadSplit, heads: Heads) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes per row that a Ulysses rank sends to all others before the ring, and after it, by pass (the most that any sends)."""
    wide = heads.head_dim if heads.head_dim_v is None else heads.head_dim_v
    narrow, item, acc = heads.head_dim, heads.itemsize, heads.grad_itemsize
    before, after = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    for rank in range(split.size):
        peers = [peer for peer in range(split.size) if peer != rank]
        queries = len(peers) * split.per_rank * heads.batch
        keys = sum(stop - start for start, stop in map(split.keys, peers)) * heads.batch
        own_keys = len(peers) * (split.keys(rank)[1] - split.keys(rank)[0]) * heads.batch
        kv_item = acc if split.is_replicated else item
        qkv = queries * narrow * item + keys * (narrow + wide) * item
        results = {
            "forward": (qkv, queries * (wide * item + acc)),
            # Besides q, k and v: dout, out and lse; back come dq, dk and dv.
            "backward": (qkv + queries * (2 * wide * item + acc), queries * narrow * item + own_keys * (narrow + wide) * kv_item)}
        for pass_, (there, back) in results.items():
            before[pass_], after[pass_] = max(before[pass_], there), max(after[pass_], back)
    return before, after


def _alltoall_ms(layout: Layout, rows: int, bytes_per_row: Sequence[float], machine: Machine) -> float:
    degree = layout.ulysses_size
    if degree == 1:
        return 0.0
    far = 0.0                                               # share of a rank's peers that are on other hosts
    for start in range(0, layout.num_ranks, degree):        # the place whose ranks are spread over most hosts
        hosts = [rank // machine.ranks_per_host for rank in range(start, start + degree)]
        far = max(far, max(sum(host != other for other in hosts) for host in hosts) / (degree - 1))
    return sum(rows * each * max((1 - far) / machine.alltoall_gb_s, far / machine.across_gb_s) / 1e6 + machine.exchange_us / 1e3
               for each in bytes_per_row)


def _per_rank_and_step(entries: Iterable[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    table: dict[tuple[int, int], float] = defaultdict(float)
    for rank, step, amount in entries:
        table[rank, step] += amount
    return table


def text(estimates: Sequence[Estimate], machine: Machine) -> str:
    """A table, the verdict with its reason, and what it all rests on."""
    rows = [("", "forward ms", "backward ms", "both", "sent GB", "held GB", "why")]
    for each in estimates:
        rows.append((each.name, f"{each.forward.total_ms:.2f}", f"{each.backward.total_ms:.2f}", f"{each.total_ms:.2f}",
                     f"{each.forward.sent_gb + each.backward.sent_gb:.2f}", f"{each.held_gb:.2f}", each.why))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) if i in (0, 6) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
             for row in rows]
    best, *others = estimates
    kernels = best.forward.kernels_ms + best.backward.kernels_ms
    verdict = f"cheapest: {best.name}, {best.total_ms:.2f} ms, of which kernels {kernels:.2f} ({best.why})"
    if others:
        margin = others[0].total_ms / best.total_ms - 1
        verdict += f"\nnext: {others[0].name}, {100 * margin:.1f}% more ({others[0].why})"
        if margin < 0.05:
            verdict += "; a difference below 5% says nothing: measure"
    lines += [verdict, "rests on:"]
    lines += [f"  {name} = {getattr(machine, name):g}  ({source})" for name, source in machine.sources.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ringflash.ring.cost", description="Which way to spread attention is cheaper.")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--heads", type=int, nargs=3, metavar=("HQ", "HKV", "D"), required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default=KINDS[1])
    parser.add_argument("--mask", choices=("causal", "full"), default="causal")
    parser.add_argument("--window-size", type=int, nargs=2, default=(-1, -1), metavar=("LEFT", "RIGHT"))
    parser.add_argument("--documents", help="packed documents, e.g. lognormal:sigma=1.0,seed=0 (see ringflash.ring.show)")
    parser.add_argument("--itemsize", type=int, default=2, help="bytes of an element of q, k, v")
    for each in fields(Machine):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=type(each.default), default=each.default)
    options = parser.parse_args(arguments)
    try:
        documents = None if options.documents is None else parse_documents(options.documents, options.seq_len)
        mask = Mask(causal=options.mask == "causal", window_size=tuple(options.window_size), cu_seqlens=documents)
        machine = replace(Machine(), **{each.name: getattr(options, each.name) for each in fields(Machine)})
        heads = Heads(1, *options.heads, itemsize=options.itemsize)
        if heads.num_kv_heads < 1 or heads.num_heads % heads.num_kv_heads:
            raise ValueError(f"--heads {heads.num_heads} {heads.num_kv_heads}: KV heads must divide query heads")
        found = compare(mask, options.seq_len, options.ranks, heads, layout=options.layout, machine=machine)
    except ValueError as error:
        parser.error(str(error))
    print(text(found, machine))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
