"""Waits between streams, worked by hand from CUDA's rules."""

from lagom_overlap.workload.clock import StreamClock


def test_an_event_holds_what_its_stream_was_told_before_it() -> None:
    clock = StreamClock()
    clock.issue(0, "a")
    clock.record("a", 7)
    clock.issue(1, "a")
    clock.wait_event("b", 7)
    assert clock.issue(2, "b") == {0}


def test_a_wait_is_paid_once() -> None:
    clock = StreamClock()
    clock.issue(0, "a")
    clock.wait_stream("b", "a")
    assert clock.issue(1, "b") == {0}
    assert clock.issue(2, "b") == set()


def test_waits_of_an_idle_stream_are_handed_on() -> None:
    clock = StreamClock()
    clock.issue(0, "a")
    clock.wait_stream("b", "a")
    clock.wait_stream("c", "b")
    assert clock.issue(1, "c") == {0}


def test_an_event_that_was_never_recorded_holds_nothing() -> None:
    clock = StreamClock()
    clock.wait_event("a", 1)
    assert clock.issue(0, "a") == set()


def test_a_communicator_runs_one_collective_at_a_time() -> None:
    clock = StreamClock()
    assert clock.communicate(3, "fsdp") == set()
    assert clock.communicate(5, "tp") == set()
    assert clock.communicate(8, "fsdp") == {3}
