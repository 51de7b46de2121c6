"""Who can copy to whom, which carrier a call takes, and what is said of it; without GPUs."""
import dataclasses
import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringflash import Layout, Mask
from ringflash.ring import carriers, stream_memory, symmetric, watchdog
from ringflash.ring.exchange import DistributedExchange
from ringflash.ring.plan import build_plan
from ringflash.ring.symmetric import Domain, Facts, hosts_of, obstacles, roomy

UUIDS = ("a", "b", "c", "d")
CUDA = torch.device("cuda", 0)


def facts(index, host="one", **changes):
    plain = Facts(host=host, device_index=index, device_uuid=UUIDS[index], reachable=UUIDS, indices=UUIDS, may_share=False)
    return dataclasses.replace(plain, **changes)


def test_ranks_with_a_card_each_on_one_host_can_copy():
    assert obstacles([facts(rank) for rank in range(4)]) == []


def test_ranks_of_several_hosts_can_copy_inside_each():
    ring = [facts(0), facts(1), facts(0, "two", device_uuid="e", indices=("e", "f"), reachable=("e", "f")),
            facts(1, "two", device_uuid="f", indices=("e", "f"), reachable=("e", "f"))]
    assert obstacles(ring) == [] and hosts_of(ring) == [(0, 1), (2, 3)]
    assert hosts_of([facts(0), facts(0, "two"), facts(1)]) == [(0, 2), (1,)]


@pytest.mark.parametrize(("ring", "said"), [
    ([facts(0), facts(0)], "cp ranks 0 and 1 share one device"),
    ([facts(0), facts(0, device_uuid="b", indices=("b",))], "both call their device cuda:0.*CUDA_VISIBLE_DEVICES"),
    ([facts(0), facts(1, indices=("x", "b"))], "see different lists of devices"),
    ([facts(0, reachable=("a",)), facts(1)], "cuda:0 and cuda:1 have no direct access"),
    ([facts(0), facts(1, reachable=("b",))], "no direct access"),
    ([facts(0), facts(1, "two")], "each of the 2 ranks is on a host of its own"),
    ([facts(0), facts(1, problem="no libcuda")], "^cp rank 1: no libcuda$"),
])
def test_what_stands_in_the_way_is_named(ring, said):
    import re

    found = obstacles(ring)
    assert len(found) == 1 and re.search(said, found[0]), found


def test_ranks_that_share_a_card_can_copy_where_torch_was_told_to_allow_it():
    assert obstacles([facts(0, may_share=True), facts(0, may_share=True)]) == []
    assert obstacles([facts(0, may_share=True), facts(0)])


def test_arenas_grow_by_at_most_an_eighth_over_what_is_needed():
    for needed in (1, 5_000_000, 33_554_432, 33_554_433, 1_234_567_890):
        assert needed <= roomy(needed) <= max(needed * 1.125, needed + symmetric._GRANULE_BYTES)
        assert roomy(roomy(needed)) == roomy(needed) and roomy(needed) % symmetric._GRANULE_BYTES == 0


def test_a_machine_without_the_driver_says_what_is_missing():
    stream_memory.driver.cache_clear()
    try:
        with mock.patch("ctypes.CDLL", side_effect=OSError("libcuda.so.1: not found")):
            with pytest.raises(RuntimeError, match="stream memory operations.*libcuda.so.1"):
                stream_memory.driver()
        with mock.patch("ctypes.CDLL", return_value=SimpleNamespace()):
            with pytest.raises(RuntimeError, match="cuStreamWriteValue32_v2"):
                stream_memory.driver()
    finally:
        stream_memory.driver.cache_clear()


def test_values_are_written_and_awaited_modulo_32_bits_and_errors_are_named():
    calls, library = [], SimpleNamespace()

    def function(name, result=0):
        def call(*arguments):
            calls.append((name, *arguments))
            return result

        return call

    for name in ("cuStreamWriteValue32_v2", "cuMemcpyDtoDAsync_v2", "cuGetErrorName"):
        setattr(library, name, function(name))
    library.cuStreamWaitValue32_v2 = function("wait", 719)
    driver = stream_memory.Driver(library)
    driver.write(7, 4096, 2**32 + 5)
    driver.copy(7, 100, 200, 32)
    assert calls == [("cuStreamWriteValue32_v2", 7, 4096, 5, 0), ("cuMemcpyDtoDAsync_v2", 100, 200, 32, 7)]
    with pytest.raises(RuntimeError, match=r"cuStreamWaitValue32 failed: unknown \(719\)"):
        driver.wait_at_least(7, 4096, 1)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def make(exchange, group, found, device=CUDA, captured=False):
    """The carrier for CUDA tensors where the handshake gives `found`."""
    with mock.patch.object(carriers, "warm_up"), mock.patch.object(carriers, "domain_of", return_value=found), \
            mock.patch.object(carriers, "CopyExchange", return_value="copies"), \
            mock.patch.object(carriers, "_timeout_s", return_value=600.0), \
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=captured):
        return carriers.make_carrier(exchange, group, build_plan(Mask(), Layout("zigzag", 8, 2)), "forward", {}, device)


def domain(spans_ring=True):
    found = object.__new__(Domain)
    found.spans_ring = spans_ring
    return found


def test_auto_takes_the_copy_engines_where_the_handshake_succeeds_and_logs_each_choice_once(group, caplog):
    caplog.set_level(logging.INFO, logger="ringflash")
    try:
        assert make("auto", group, domain()) == make("auto", group, domain()) == "copies"
        assert make("auto", group, domain(spans_ring=False)) == "copies"
        assert isinstance(make("auto", group, "cp ranks 0 and 1 share one device"), DistributedExchange)
        assert make("copy", group, domain()) == "copies"
    finally:
        watchdog.stop()
    said = [record.message for record in caplog.records]
    assert said == ["exchange=auto: the copy engines of this host's devices",
                    "exchange=auto: the copy engines of this host's devices, and nccl to those of other hosts",
                    "exchange=auto: nccl, as the copy engines cannot be used: cp ranks 0 and 1 share one device"]


def test_auto_takes_nccl_for_a_call_that_is_captured_in_a_cuda_graph(group, caplog):
    caplog.set_level(logging.INFO, logger="ringflash")
    assert isinstance(make("auto", group, domain(), captured=True), DistributedExchange)
    assert [record.message for record in caplog.records] == ["exchange=auto: nccl, as this call is captured in a CUDA graph"]


def test_copy_by_name_raises_what_is_missing_and_nccl_by_name_asks_nobody(group):
    with pytest.raises(RuntimeError, match="exchange='copy': no NVLink; use exchange='nccl' or 'auto'"):
        make("copy", group, "no NVLink")
    with mock.patch.object(carriers, "domain_of", side_effect=AssertionError), mock.patch.object(carriers, "warm_up"):
        plan = build_plan(Mask(), Layout("zigzag", 8, 2))
        assert isinstance(carriers.make_carrier("nccl", group, plan, "forward", {}, CUDA), DistributedExchange)
        assert isinstance(carriers.make_carrier("auto", group, plan, "forward", {}, torch.device("cpu")), DistributedExchange)


def test_copies_are_watched_even_if_nobody_started_a_watchdog_and_a_real_one_takes_over(group):
    try:
        make("copy", group, domain())
        assert watchdog._watching.is_implied
        watchdog.start(60.0)
        assert not watchdog._watching.is_implied
        make("copy", group, domain())
        assert not watchdog._watching.is_implied
        with pytest.raises(RuntimeError, match="running already"):
            watchdog.start(60.0)
    finally:
        watchdog.stop()


def test_a_group_without_options_of_its_own_has_torchs_timeout(group):
    assert carriers._timeout_s(group, torch.device("cpu")) > 0
