"""A call is waited for once, and what follows it is done once, by whoever waits."""

import threading
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.online.routes.gloo_clock import CallClock, ClockMark  # noqa: E402
from lagom_overlap.online.routes.gloo_work import RunWork  # noqa: E402

pytestmark = pytest.mark.torch


class OnceOnly:
    """As gloo's receives: a second wait would never return."""

    def __init__(self, error: Exception | None = None) -> None:
        self.release = threading.Event()
        self.num_waits = 0
        self.error = error

    def wait(self) -> None:
        self.num_waits += 1
        assert self.num_waits == 1, "waited for twice"
        self.release.wait(10)
        if self.error is not None:
            raise self.error


def test_the_clock_waits_once_and_the_computation_waits_for_the_clock() -> None:
    clock, handle, mark, done = CallClock(), OnceOnly(), ClockMark(), []
    work = RunWork(clock.watch(handle, mark, time.perf_counter()), mark, lambda: done.append(mark.ended_s))
    handle.release.set()
    assert work.wait()
    assert work.wait()
    assert clock.is_idle()
    assert handle.num_waits == 1
    assert len(done) == 1
    assert mark.issued_s <= mark.began_s <= mark.ended_s
    assert mark.joined_s is not None
    assert mark.joined_s <= mark.resumed_s
    clock.close()


def test_shares_of_one_group_do_not_overlap() -> None:
    clock, handles, marks = CallClock(), [OnceOnly(), OnceOnly()], [ClockMark(), ClockMark()]
    for handle, mark in zip(handles, marks, strict=True):
        clock.watch(handle, mark, time.perf_counter())
    handles[1].release.set()
    handles[0].release.set()
    assert clock.is_idle()
    assert marks[1].issued_s < marks[0].ended_s == marks[1].began_s <= marks[1].ended_s
    clock.close()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_of_the_call_is_raised_where_it_is_waited_for(kind: type[Exception]) -> None:
    clock, handle = CallClock(), OnceOnly(kind("Connection closed by peer"))
    work = RunWork(clock.watch(handle, ClockMark(), 0.0), None, None)
    handle.release.set()
    for _ in range(2):
        with pytest.raises(kind, match="Connection closed by peer"):
            work.wait()
    assert clock.is_idle()
    clock.close()


def test_an_error_of_any_kind_reaches_whoever_waits_for_the_future() -> None:
    handle = OnceOnly(ValueError("not a slice"))
    handle.release.set()
    future = RunWork(handle, results=lambda: [torch.zeros(1)]).get_future()
    deadline = time.monotonic() + 10
    while not future.done():
        assert time.monotonic() < deadline, "nobody was told"
    with pytest.raises(Exception, match="not a slice"):
        future.wait()


@pytest.mark.parametrize("error", [None, RuntimeError("Connection closed by peer")])
def test_a_loop_that_only_asks_ends_and_a_wait_after_it_waits_no_second_time(error: Exception | None) -> None:
    handle, done, mark = OnceOnly(error), [], ClockMark()
    work = RunWork(handle, mark, lambda: done.append(1))
    assert not work.is_completed(), "asking does not wait"
    handle.release.set()
    deadline = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < deadline, "asked in vain"
    assert work.is_success() is (error is None)
    if error is None:
        assert work.wait()
        assert mark.joined_s is not None, "a step has the same joins whether or not it asked"
    else:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            work.wait()
    assert (handle.num_waits, len(done)) == (1, int(error is None))


def test_a_wait_with_a_timeout_ends_in_time_and_a_later_one_still_gets_the_result() -> None:
    handle = OnceOnly()
    work = RunWork(handle)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=1))
    handle.release.set()
    assert work.wait(timedelta(seconds=50))
    assert handle.num_waits == 1


def test_the_clocks_thread_ends_with_a_clock_that_nobody_closed() -> None:
    before = set(threading.enumerate())
    clock = CallClock()
    (thread,) = set(threading.enumerate()) - before
    del clock
    thread.join(30)
    assert not thread.is_alive()


def test_where_no_thread_can_be_had_whoever_asks_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job at its limit of threads trains on."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    handles = [OnceOnly() for _ in range(4)]
    for handle in handles:
        handle.release.set()
    asked, timed, promised, dropped = (RunWork(each, results=list, is_owed=True) for each in handles)
    assert asked.is_completed()
    assert timed.wait(timedelta(seconds=60))
    assert promised.get_future().value() == []
    del dropped
    assert [each.num_waits for each in handles] == [1, 1, 1, 1]
