"""A run that no longer moves says where, in which layer and for whom it waits, and leaves stacks and recordings of all ranks."""
import dataclasses
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from train_ranks import tiny

from ringflash.config import DataConfig
from ringflash.ring import exchange, post_mortem, watchdog
from ringflash.train import loop
from ringflash.train.places import tell_layers
from ringflash.train.stopping import StopRequest

RANKS = 2
PATIENCE_S = {"cpu": 2.0, "cuda": 8.0}


def asleep_here() -> None:
    time.sleep(3600)


def one_rank(rank: int, folder: Path, pass_: str, layer: str, device: str) -> None:
    torch.set_num_threads(1)
    # One card is enough: NCCL takes two ranks on it when each has a host id of its own.
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", NCCL_HOSTID=f"ringflash-test-{rank}", NCCL_SOCKET_IFNAME="lo",
                      NCCL_IB_DISABLE="1")
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    plain = exchange.DistributedExchange.post

    def post(self, step, sends, recvs):
        if watchdog._record.stage == "optimizer step 2":
            # Not before: the first step starts communicators and may compile.
            watchdog._watching._timeout_s = PATIENCE_S[device]
        here = (self._pass, watchdog._record.stage, watchdog._record.layer)
        if rank == 1 and here == (pass_, "optimizer step 2", layer):
            asleep_here()
        return plain(self, step, sends, recvs)

    exchange.DistributedExchange.post = post
    data = DataConfig(path=str(folder / "text.txt"), cache_dir=str(folder / "cache"), seq_len=45)
    cfg = dataclasses.replace(tiny(steps=4), data=data)
    cfg = dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, timeout_s=90.0),
                              attention=dataclasses.replace(cfg.attention, kernel="auto",
                                                            exchange="auto" if device == "cpu" else "nccl"),
                              run=dataclasses.replace(cfg.run, progress=False, device=device))
    store = dist.FileStore(str(folder / "store"), RANKS)
    os._exit(loop.run(cfg, store=store, rank=rank, world_size=RANKS, folder=folder / "run", stop=StopRequest()))


def stalled(folder: Path, pass_: str, layer: str, device: str = "cpu") -> tuple[list[int], list[str]]:
    """(exit codes, what each rank said) of a run whose rank 1 falls asleep."""
    (folder / "run").mkdir(parents=True)
    (folder / "text.txt").write_text("all work and no play. " * 200)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "ringflash.train.loop"])
    ranks = [context.Process(target=one_rank, args=(rank, folder, pass_, layer, device), daemon=True) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(110.0 if device == "cpu" else 170.0)
        if rank.is_alive():
            rank.kill()
            rank.join()
    return [rank.exitcode for rank in ranks], [(folder / f"log-{rank}").read_text() for rank in range(RANKS)]


@pytest.mark.parametrize(("pass_", "layer"), [("forward", "layer 1"), ("backward", "layer 0")])
def test_a_stall_names_rank_layer_step_hop_and_peer_and_leaves_stacks_and_recordings_of_all_ranks(tmp_path, pass_, layer):
    codes, said = stalled(tmp_path, pass_, layer)
    # The first to tell waits for the others to read it, and may meet their end in the ring meanwhile, which is a crash.
    assert codes[1] == watchdog.EXIT_CODE and codes[0] in (watchdog.EXIT_CODE, 1), said
    place = rf"cp rank 0 \(global rank 0\), {pass_} call \d+, step \d \(optimizer step 2, {re.escape(layer)}\): "
    peer = r"receiving (kv|dkv) of cp rank [01] from cp rank 1 \(global rank 1\)"
    assert re.search(rf"no progress for \d.*: {place}.*{peer}", said[0]), said[0]
    assert "ended because another rank reported: no progress for" in said[1]
    for rank in range(RANKS):
        assert f"stacks in {tmp_path / 'run'}/stacks_rank_{rank}.txt" in said[rank]
    stacks = [(tmp_path / "run" / f"stacks_rank_{rank}.txt").read_text() for rank in range(RANKS)]
    assert stacks[0].startswith("rank 0, process ") and "no progress for" in stacks[0].splitlines()[0]
    assert "asleep_here" in stacks[1] and "asleep_here" not in stacks[0] and 'exchange.py", line' in stacks[0]
    for rank in range(RANKS):
        recorded = pickle.loads((tmp_path / "run" / f"flight_recorder_gloo_rank_{rank}").read_bytes())
        assert recorded["entries"] and any("ringflash" in frame["filename"] for e in recorded["entries"] for frame in e["frames"])


needs_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def over_nccl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    return folder, *stalled(folder, "forward", "layer 1", "cuda")


def check_nccl(folder: Path, codes: list[int], said: list[str], pass_: str, layer: str) -> None:
    # Rank 1 is told and leaves; NCCL may then end rank 0 itself, in the two seconds that it gives the others to read its report.
    assert codes[1] == watchdog.EXIT_CODE and codes[0] not in (0, None), (codes, said)
    place = rf"cp rank 0.*{pass_} call \d+, step \d \(optimizer step 2, {layer}\): .*from cp rank 1"
    assert re.search(rf"no progress for \d.*{place}", said[0]), said[0]
    assert "asleep_here" in (folder / "run" / "stacks_rank_1.txt").read_text()
    for rank in range(RANKS):
        recorded = pickle.loads((folder / "run" / f"flight_recorder_nccl_rank_{rank}").read_bytes())
        assert any("nccl:" in entry["profiling_name"] for entry in recorded["entries"])


@pytest.mark.gpu
@needs_a_card
@pytest.mark.timeout(240)
def test_a_stall_over_nccl_leaves_its_flight_recorder_too(over_nccl):
    check_nccl(*over_nccl, "forward", "layer 1")


@pytest.mark.gpu
@needs_a_card
@pytest.mark.timeout(240)
def test_a_stall_over_nccl_in_the_backward_names_its_layer(tmp_path):
    check_nccl(tmp_path, *stalled(tmp_path, "backward", "layer 0", "cuda"), "backward", "layer 0")


@pytest.mark.gpu
@needs_a_card
def test_torchs_own_tool_prints_the_recordings_of_nccl(over_nccl):
    shown = subprocess.run([sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", "-j", str(over_nccl[0] / "run"),
                            "-p", "flight_recorder_nccl_rank_"], capture_output=True, text=True, timeout=60.0)
    said = shown.stdout + shown.stderr
    assert shown.returncode == 0 and "coalesced" in said and "state=" in said, said[-2000:]


def test_without_a_folder_or_with_one_that_is_gone_nothing_is_written_and_nothing_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(post_mortem, "_folder", None)
    assert post_mortem.write("why") is None
    monkeypatch.setattr(post_mortem, "_folder", tmp_path / "gone")
    assert post_mortem.write("why") is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("there", "added"), [
    ({}, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": "f/flight_recorder_nccl_rank_",
          "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
    ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_FR_DUMP_TEMP_FILE": "mine"}, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
    ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "mine", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}, {}),
])
def test_what_the_environment_says_about_the_recorder_stays_under_either_name(monkeypatch, there, added):
    monkeypatch.setattr(os, "environ", dict(there))
    monkeypatch.setattr(post_mortem, "_folder", None)
    monkeypatch.setattr(post_mortem, "_rank", 0)
    post_mortem.keep_in(Path("f"), 3)
    assert os.environ == there | added


def test_a_collective_that_is_none_of_the_rings_is_told_without_a_layer():
    watchdog.at(stage="optimizer step 3", layer="layer 1")
    try:
        with watchdog.collective("adding up", 1, 4):
            position, _ = watchdog.oldest_wait()
    finally:
        watchdog.at(stage="")
    said = r"global rank 1, collective call \d+, step 0 \(optimizer step 3\): adding up with all 4 ranks"
    assert re.fullmatch(said, position.describe())


def test_layers_are_told_forward_and_backward():
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            seen.append(watchdog._place())
            x = super().forward(x)
            x.register_hook(lambda g: seen.append(watchdog._place()))
            return x

    blocks = [Spy(3, 3), Spy(3, 3)]
    tell_layers(blocks)
    x = torch.ones(2, 3)
    for block in blocks:
        x = block(x)
    x.sum().backward()
    watchdog.at(stage="")
    # The spies' hooks came first on each output: in the backward they see what was told before.
    assert seen == ["layer 0", "layer 1", "layer 1", "layer 1"]
