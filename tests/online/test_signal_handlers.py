"""What the job's own signal handlers raise while our code waits reaches the job, as it was."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from job_of_threads import Job
from test_online_loop import options

from lagom_overlap.engines.bounded import BoundedCalls, Overdue
from lagom_overlap.online.guest import safely
from lagom_overlap.signal_handlers import handing_over, waiting


class Preempted(Exception):  # noqa: N818 - as jobs name it
    """What a job's handler raises."""


def preempt(*_: object) -> None:
    raise Preempted("in two minutes") from ValueError("the cluster said so")


def signalled() -> None:
    """A wait in which the signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, preempt)
    yield
    assert signal.signal(signal.SIGUSR1, before) is preempt, "the handler stays the job's"


def swallowing(work: Callable[[], object]) -> None:
    """As our code does with failures of its own."""
    with suppress(Exception):
        work()


def test_it_passes_through_all_of_ours_and_is_raised_once_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Preempted, match="in two minutes") as caught:
        safely(lambda: safely(lambda: swallowing(lambda: handing_over(lambda: waiting(signalled)))))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__context__ is None
    assert capsys.readouterr().err == ""


def test_where_nothing_of_ours_is_around_a_wait_and_of_what_is_no_exception_nothing_is_made() -> None:
    with pytest.raises(Preempted):
        waiting(signalled)
    with pytest.raises(KeyboardInterrupt):
        handing_over(lambda: waiting(lambda: signal.raise_signal(signal.SIGINT)))
    assert handing_over(lambda: waiting(lambda: 5)) == 5


def test_a_call_in_a_thread_of_ours_is_told_from_a_handler_that_raises_a_timeout_meanwhile() -> None:
    def out_of_time(*_: object) -> None:
        raise TimeoutError("of the job")

    def fail() -> None:
        raise TimeoutError("of the call")

    signal.signal(signal.SIGUSR1, out_of_time)
    calls, asked, ends = BoundedCalls("lagom-test"), threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        ends.wait(60)

    main = threading.main_thread().ident
    assert main is not None
    sender = threading.Thread(target=lambda: asked.wait(60) and signal.pthread_kill(main, signal.SIGUSR1))
    sender.start()
    with pytest.raises(TimeoutError, match="of the job"):
        handing_over(lambda: swallowing(lambda: calls.call(ask, 60)))
    sender.join()
    ends.set()
    with pytest.raises(TimeoutError, match="of the call"):
        handing_over(lambda: calls.call(fail, 60))
    with pytest.raises(Overdue):
        calls.call(threading.Event().wait, 0.0)
    signal.signal(signal.SIGUSR1, preempt)


@pytest.mark.parametrize("prefix", ["plan/", "go/"])
def test_one_that_comes_while_a_rank_waits_for_the_others_is_raised_after_it_has_done_as_they(prefix: str) -> None:
    """At the begin of a window, and in a switch, where ours once ended the job."""
    job = Job(options=options())
    job.start()
    member, came, caught = job.members[1], [], []
    why_missing, begin = member._exchange._why_missing, member.begin_step

    def wait(keys: list[str], timeout_s: float) -> str:
        missing = why_missing(keys, timeout_s)
        if keys[0].startswith(prefix) and not came:
            came.append(keys[0])
            waiting(signalled)
        return missing

    def begin_step() -> None:
        try:
            begin()
        except Preempted as error:  # the job goes on, as one that only saves a checkpoint does
            caught.append(error)
            begin()

    member._exchange._why_missing = wait  # type: ignore[method-assign]
    member.begin_step = begin_step  # type: ignore[method-assign]
    other = threading.Thread(target=lambda: [job.one_step(0) for _ in range(40)])
    other.start()
    for _ in range(40):  # in the main thread, where Python runs handlers
        job.one_step(1)
    other.join()
    assert len(came) == len(caught) == 1
    assert not job.meeting.mismatches
    assert job.plans[0] == job.plans[1]
