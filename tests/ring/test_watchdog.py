"""The record of the ring's position (ending a process that is stuck: test_distributed.py)."""
import pytest
import torch

from ringflash.ring import watchdog

_POSITION = watchdog.Position("backward", 12, 3, "cp rank 1 (global rank 5)",
                              ("receiving kv of cp rank 0 from cp rank 2 (global rank 6)", "sending dkv of cp rank 0 to cp rank 0 (global rank 4)"))


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
