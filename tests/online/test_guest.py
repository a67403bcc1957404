"""What the job's own signal handlers raise while our code runs reaches the job, as it was."""

import signal
import threading
from collections.abc import Iterator

import pytest
from job_of_threads import Job
from test_online_loop import options

from lagom_overlap.online.guest import carrying, handing_over, safely


class Preempted(Exception):  # noqa: N818 - as jobs name it
    """What a job's handler raises."""


def preempt(*_: object) -> None:
    raise Preempted("in two minutes") from ValueError("the cluster said so")


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, preempt)
    yield
    assert signal.signal(signal.SIGUSR1, before) is preempt, "the handler stays the job's"


def waits() -> None:
    """Code of ours that waits, and takes any exception for a failure of its own."""
    with carrying():
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception as error:
            raise AssertionError("swallowed") from error


def test_it_passes_through_all_of_ours_and_is_raised_once_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Preempted, match="in two minutes") as caught:
        safely(lambda: safely(lambda: handing_over(waits)))
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__context__ is None
    assert capsys.readouterr().err == ""


def test_a_handler_that_raises_nothing_runs_at_once_and_may_put_another_one_in_its_place() -> None:
    seen = []

    def note(number: int, _: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGUSR1, preempt)

    def work() -> int:
        with carrying():
            signal.raise_signal(signal.SIGUSR1)
            return len(seen)

    signal.signal(signal.SIGUSR1, note)
    assert handing_over(work) == 1
    assert seen == [signal.SIGUSR1]


def test_an_interrupt_passes_as_it_is() -> None:
    def interrupted() -> None:
        with carrying():
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        handing_over(interrupted)


def test_where_nothing_hands_over_and_in_other_threads_the_handlers_are_left_alone() -> None:
    seen = []

    def look() -> None:
        with carrying():
            seen.append(signal.getsignal(signal.SIGUSR1))

    look()
    thread = threading.Thread(target=handing_over, args=(look,))
    thread.start()
    thread.join()
    assert seen == [preempt, preempt]


@pytest.mark.parametrize("prefix", ["plan/", "go/"])
def test_one_that_comes_while_a_rank_waits_for_the_others_is_raised_after_it_has_done_as_they(prefix: str) -> None:
    """At the begin of a window, and in a switch, where ours once ended the job."""
    job = Job(options=options())
    job.start()
    member, caught = job.members[1], []
    why_missing, begin, end = member._exchange._why_missing, member.begin_step, member.end_step
    came: list[str] = []

    def wait(keys: list[str], timeout_s: float) -> str:
        missing = why_missing(keys, timeout_s)
        if keys[0].startswith(prefix) and not came:
            came.append(keys[0])
            signal.raise_signal(signal.SIGUSR1)
        return missing

    def begin_step() -> None:
        try:
            handing_over(begin)
        except Preempted as error:  # the job goes on, as one that only saves a checkpoint does
            caught.append(error)
            begin()

    member._exchange._why_missing = wait  # type: ignore[method-assign]
    member.begin_step, member.end_step = begin_step, lambda: handing_over(end)  # type: ignore[method-assign]
    other = threading.Thread(target=lambda: [job.one_step(0) for _ in range(40)])
    other.start()
    for _ in range(40):  # in the main thread, where Python runs handlers
        job.one_step(1)
    other.join()
    assert len(came) == len(caught) == 1
    assert not job.meeting.mismatches
    assert job.plans[0] == job.plans[1]
