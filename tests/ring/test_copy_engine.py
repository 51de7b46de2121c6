"""The copy-engine carrier on the CPU: ranks are threads, each with a second thread for its copies; memory, words and waits are
real. Same bits as the loopback ring, also when copies are slow, calls share buffers, and some ranks are on another host."""
import contextlib
import ctypes
import queue
import random
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ringflash import Layout, Mask
from ringflash.kernels import dispatch
from ringflash.ops import empty_outputs, heads_of
from ringflash.ring import copy_engine, loop, signals
from ringflash.ring.copy_engine import CopyExchange
from ringflash.ring.plan import build_plan
from ringflash.ring.rotate import choose
from ringflash.simulation import SimulatedRing
from ringflash.tests.support.ring_cases import make_inputs

DEVICE = torch.device("cpu")
TIMEOUT_S = 30.0


class Stream:
    """A thread that carries out what is queued, in order."""

    def __init__(self, clock, max_delay_ms):
        self._queue, self._clock, self._max_delay_ms = queue.SimpleQueue(), clock, max_delay_ms
        self.cuda_stream = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work):
        self._queue.put(work)

    def wait_stream(self, other):
        """What the other stream held is done: threads of ranks compute at once."""

    def _run(self):
        while (work := self._queue.get()) is not None:
            time.sleep(self._clock.uniform(0, self._max_delay_ms) / 1e3)
            work()

    def close(self):
        self.put(None)
        self._thread.join()


class Current:
    """The stream of a rank's own thread: waits block it."""

    cuda_stream = None

    def wait_event(self, event):
        assert event.done.wait(TIMEOUT_S), "copies did not end"


class Event:
    def __init__(self):
        self.done = threading.Event()

    def record(self, stream):
        stream.put(self.done.set)


class Driver:
    """Host memory in the place of device memory. deaf: the word parity (0 arrived, 1 free) whose waits do nothing."""

    def __init__(self, failures, deaf=None):
        self._failures, self._deaf = failures, deaf

    def write(self, stream, address, value):
        stream.put(lambda: ctypes.memmove(address, value.to_bytes(4, "little"), 4))

    def copy(self, stream, target, source, num_bytes):
        half = num_bytes // 2               # in two parts, so that a block can be seen torn

        def work():
            ctypes.memmove(target, source, half)
            time.sleep(0)
            ctypes.memmove(target + half, source + half, num_bytes - half)

        stream.put(work)

    def wait_at_least(self, stream, address, value):
        if stream is None:
            self._spin(address, value)
        else:
            stream.put(lambda: self._spin(address, value))

    def _spin(self, address, value):
        deadline = time.monotonic() + TIMEOUT_S
        if self._deaf is not None and address // 4 % 2 == self._deaf:
            return
        while ctypes.c_uint32.from_address(address).value < value:
            if time.monotonic() > deadline:
                self._failures.append(f"word at {address} stayed below {value}")
                return
            time.sleep(1e-5)


class Hosts:
    """Arenas of all ranks, and a network for messages between hosts."""

    def __init__(self, hosts, num_bytes):
        self.hosts, size = hosts, sum(map(len, hosts))
        self.memory = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in range(size)]
        for local in self.memory:
            assert local.data_ptr() % 64 == 0
            local[:signals.words_bytes(size)].zero_()
        self._mail, self._lock = {}, threading.Lock()

    def box(self, message):
        with self._lock:
            return self._mail.setdefault(message, queue.SimpleQueue())

    def domain(self, rank, stream):
        ranks = next(ranks for ranks in self.hosts if rank in ranks)
        arena = SimpleNamespace(local=self.memory[rank], ledger=signals.Ledger(), num_bytes=len(self.memory[rank]),
                                address=lambda peer, offset: self.memory[peer].data_ptr() + offset)

        def make(num_bytes):
            assert num_bytes <= arena.num_bytes
            return arena

        return SimpleNamespace(device=DEVICE, rank=rank, ranks=ranks, cp_size=len(self.memory), stream=stream, reader=None,
                               is_alone=len(ranks) == 1, spans_ring=len(ranks) == len(self.memory), arena=make)


class Network:
    def __init__(self, hosts, pass_, call):
        self._hosts = hosts

    def post(self, step, sends, recvs):
        if not sends and not recvs:
            return None
        for message, tensor in sends:
            self._hosts.box(message).put(tensor.clone())

        def wait():
            for message, buffer in recvs:
                buffer.copy_(self._hosts.box(message).get(timeout=TIMEOUT_S))

        return SimpleNamespace(wait=wait)


@contextlib.contextmanager
def faked(hosts, failures, deaf=None):
    driver = Driver(failures, deaf)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(
            torch.cuda, current_stream=lambda device=None: Current(), Event=Event, is_current_stream_capturing=lambda: False))
        stack.enter_context(mock.patch.multiple(
            copy_engine, driver=lambda: driver, describe_rank=lambda group, rank: f"cp rank {rank}",
            describe_hop=lambda group, message, is_recv: str(message),
            DistributedExchange=lambda group, pass_, call: Network(hosts, pass_, call)))
        yield


class Slow:
    """A kernel that reads its block late, on rank 0."""

    def __init__(self, plain, rank, seconds):
        self._plain, self._seconds = plain, seconds if rank == 0 else 0.0

    def __getattr__(self, name):
        work = getattr(self._plain, name)

        def late(*arguments, **options):
            time.sleep(self._seconds)
            return work(*arguments, **options)

        return late


def run_ring(mask, layout, inputs, hosts=None, *, calls=2, max_delay_ms=0.3, rotate="kv", deaf=None, kernel_s=0.0):
    """out, lse, dq, dk, dv of every rank, of the last of `calls` calls on the same buffers."""
    size = layout.cp_size
    plan = build_plan(mask, layout)
    heads = heads_of(inputs.q, inputs.k, inputs.v)
    back = choose(plan, heads, rotate).plan
    ring = Hosts(hosts or [tuple(range(size))], 1 << 20)
    plain = dispatch.select("reference", device=DEVICE, dtype=inputs.q.dtype, head_dim=inputs.q.shape[3])
    results, failures = [None] * size, []

    def body(rank):
        stream = Stream(random.Random(f"{rank}"), max_delay_ms)
        try:
            domain, backend = ring.domain(rank, stream), Slow(plain, rank, kernel_s)
            rows = torch.from_numpy(layout.positions(rank))
            q, k, v, dout = (x[:, rows] for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
            for call in range(calls):
                out, lse = empty_outputs(q, v)
                loop.drive(loop.forward(plan, rank, q, k, v, backend, CopyExchange(None, domain, plan, "forward", call,
                           heads.row_bytes), softmax_scale=0.3, out=out, lse=lse))
                gradients = []
                loop.drive(loop.backward(back, rank, dout, None, q, k, v, out, lse, backend, CopyExchange(
                    None, domain, back, "backward", call, heads.row_bytes), softmax_scale=0.3, deterministic=True,
                    gradients=gradients))
            results[rank] = (out, lse, *gradients)
        except Exception as error:
            failures.append(f"rank {rank}: {type(error).__name__}: {error}")
        finally:
            stream.close()

    with faked(ring, failures, deaf):
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results, failures


def expected(mask, layout, inputs):
    backend = dispatch.select("reference", device=DEVICE, dtype=inputs.q.dtype, head_dim=inputs.q.shape[3])
    ring = SimulatedRing(build_plan(mask, layout), layout, layout, backend, 0.3, deterministic=True)
    out, lse = ring.forward(inputs.q, inputs.k, inputs.v)
    return out, lse, *ring.backward(inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse)


def same(results, whole, layout):
    for rank, parts in enumerate(results):
        rows = torch.from_numpy(layout.positions(rank))
        for name, part, full in zip(("out", "lse", "dq", "dk", "dv"), parts, whole):
            assert torch.equal(part, full.index_select(2 if name == "lse" else 1, rows)), (rank, name)


MASKS = [Mask(), Mask(causal=False), Mask(window_size=(5, 0)), Mask(cu_seqlens=[0, 3, 3, 17, 29])]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("kind", "size"), [("zigzag", 2), ("contiguous", 3), ("striped", 4)])
def test_a_ring_over_copies_has_the_bits_of_the_loopback_ring(mask, kind, size):
    layout, inputs = Layout(kind, 31, size), make_inputs(31)
    results, failures = run_ring(mask, layout, inputs)
    assert not failures
    same(results, expected(mask, layout, inputs), layout)


@pytest.mark.parametrize("hosts", [[(0, 1), (2, 3)], [(0,), (1, 2, 3)], [(0, 2), (1, 3)]], ids=str)
def test_ranks_of_several_hosts_copy_inside_a_host_and_send_the_rest(hosts):
    layout, inputs = Layout("zigzag", 31, 4), make_inputs(31)
    results, failures = run_ring(Mask(), layout, inputs, hosts)
    assert not failures
    same(results, expected(Mask(), layout, inputs), layout)


def test_the_query_side_travels_over_copies_too():
    layout, inputs = Layout("zigzag", 31, 3), make_inputs(31)
    results, failures = run_ring(Mask(), layout, inputs, rotate="q")
    assert not failures
    kv, _ = run_ring(Mask(), layout, inputs)
    for ours, theirs in zip(results, kv):
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("deaf", [0, 1])
def test_a_ring_that_does_not_wait_for_a_word_is_wrong(deaf):
    # Four ranks: the third block of a pass takes the buffer of the first, in which the slow rank still reads.
    layout, inputs = Layout("contiguous", 31, 4), make_inputs(31)
    whole = expected(Mask(causal=False), layout, inputs)
    wrong = 0
    for _ in range(3):
        results, _ = run_ring(Mask(causal=False), layout, inputs, calls=1, deaf=deaf, kernel_s=0.02)
        try:
            same(results, whole, layout)
        except (AssertionError, TypeError):
            wrong += 1
    assert wrong > 0
