"""The record of the ring's position (ending a process that is stuck: test_distributed.py)."""
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from ringflash.ring import watchdog

_POSITION = watchdog.Position("backward", 12, 3, "cp rank 1 (global rank 5)",
                              ("receiving kv of cp rank 0 from cp rank 2 (global rank 6)",
                               "sending dkv of cp rank 0 to cp rank 0 (global rank 4)"))


def test_a_position_names_pass_call_step_and_hops():
    text = _POSITION.describe()
    assert text.startswith("cp rank 1 (global rank 5), backward call 12, step 3: receiving kv of cp rank 0 from cp rank 2")
    assert _POSITION.describe(_POSITION.hops[1:]).endswith("step 3: sending dkv of cp rank 0 to cp rank 0 (global rank 4)")


def test_describe_follows_a_wait_and_its_end():
    with watchdog.waiting(_POSITION):
        assert "waiting for 0.0 s at cp rank 1" in watchdog.describe()
        position, seconds = watchdog.oldest_wait()
        assert position is _POSITION and seconds < 5
    watchdog.passed(_POSITION, torch.device("cpu"))
    assert watchdog.oldest_wait() is None
    assert "last complete one was cp rank 1 (global rank 5), backward call 12, step 3" in watchdog.describe()


def test_calls_are_numbered_per_pass():
    first = watchdog.next_call("test")
    assert [watchdog.next_call("test"), watchdog.next_call("other test")] == [first + 1, 0]


def test_start_is_refused_twice_and_without_a_timeout():
    with pytest.raises(ValueError, match="timeout_s=0"):
        watchdog.start(0)
    watchdog.start(60, poll_s=0.01)
    try:
        with pytest.raises(RuntimeError, match="running already"):
            watchdog.start(60)
    finally:
        watchdog.stop()
    watchdog.stop()                                         # a second stop is harmless


def test_sigterm_prints_the_position_also_when_the_main_thread_sits_in_cpp():
    program = textwrap.dedent("""
        import threading, torch
        from ringflash.ring import watchdog
        watchdog.start(60, on_sigterm=True, poll_s=0.05)
        with watchdog.waiting(watchdog.Position("forward", 7, 2, "cp rank 0 (global rank 0)", ("receiving kv",))):
            print("ready", flush=True)
            torch.distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False).wait(["never"])
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          cwd=Path(watchdog.__file__).parents[2]) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "terminated: waiting for" in said and "forward call 7, step 2: receiving kv" in said
