"""Calls that never return hold nobody up."""

import gc
import subprocess
import sys
import threading

import pytest

from lagom_overlap.engines.bounded import BoundedCalls, Overdue


def test_a_call_gives_what_it_returns_or_raises() -> None:
    calls = BoundedCalls("test")
    assert calls.call(lambda: 7, 30) == 7
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0, 30)
    calls.close()


def test_an_asker_leaves_a_call_that_never_returns_and_the_next_one_does_not_wait_behind_it() -> None:
    calls, never = BoundedCalls("test"), threading.Event()
    with pytest.raises(Overdue, match=r"within 0\.05 s"):
        calls.call(never.wait, 0.05)
    assert calls.call(lambda: "answer", 30) == "answer"
    never.set()
    calls.close()


def test_a_timeout_that_the_call_itself_raises_is_its_own() -> None:
    def fail() -> None:
        raise TimeoutError("wait timeout")

    calls = BoundedCalls("test")
    with pytest.raises(TimeoutError, match="wait timeout"):
        calls.call(fail, 30)
    calls.close()


def test_a_thread_that_cannot_be_started_is_an_error_each_time_and_never_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = BoundedCalls("test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                calls.call(lambda: 7, 30)
    assert calls.call(lambda: 7, 30) == 7
    calls.close()


def test_who_ends_the_process_can_still_ask() -> None:
    """What `atexit` runs last may ask once more: its call is made, and not waited for in vain."""
    program = """
import atexit, weakref
from lagom_overlap.engines.bounded import BoundedCalls

calls = BoundedCalls("test")
atexit.register(lambda: print(calls.call(lambda: "answer", 20)))
calls.call(lambda: None, 30)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (ended.stdout, ended.stderr) == ("answer\n", "")


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_thread_ends_with_its_owner(*, is_closed: bool) -> None:
    calls = BoundedCalls("test-of-the-end")
    calls.call(lambda: None, 30)
    thread = next(thread for thread in threading.enumerate() if thread.name == "test-of-the-end")
    if is_closed:
        calls.close()
    del calls
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
