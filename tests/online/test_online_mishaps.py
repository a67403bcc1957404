"""One rank alone is interrupted, cannot measure or fails in a report: all ranks still run the same."""

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from job_of_threads import Job
from test_online_loop import options

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.errors import BackendError
from lagom_overlap.online.journal import JournalFile
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import MAX_VOID, Leader
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan
from lagom_overlap.online.ranks.watch import WATCHED_WINDOWS
from lagom_overlap.online.routes.base import StepRecord


@pytest.mark.parametrize("has_answer", [True, False])
def test_an_interrupt_while_ranks_agree_waits_until_this_rank_has_done_as_all(has_answer: bool) -> None:
    job = Job(options=options())
    job.start()
    exchange, first, original = job.members[1]._exchange, job.members[0]._exchange, Job.one_step
    why_missing, settle, meet, interrupted, waits = (
        exchange._why_missing,
        exchange._settle,
        first._meet,
        [],
        threading.Event(),
    )

    reached: list[int] = []

    def interrupt(keys: list[str], timeout_s: float) -> str:
        if keys[0].startswith("go/") and not interrupted:
            if has_answer:
                waits.set()
            interrupted.append(has_answer and not why_missing(keys, timeout_s))
            raise KeyboardInterrupt
        return why_missing(keys, timeout_s)

    def settled(key: str, word: str) -> str:
        said = settle(key, word)
        if key.startswith("go/"):
            waits.set()
        return said

    def last(window: int) -> str:
        """Rank 0 gives its last word when rank 1 waits for the answer, or has given up."""
        said = meet(window)
        waits.wait(20)
        return said

    def one_step(rank: int) -> StepRecord:
        try:
            return original(job, rank)
        except KeyboardInterrupt:  # as of a user who goes on
            reached.append(rank)
            return original(job, rank)

    exchange._why_missing, exchange._settle, first._meet, job.one_step = interrupt, settled, last, one_step
    job.run(40)
    assert interrupted == [has_answer]
    assert reached == [1]  # once, and not kept from the one who pressed it
    assert not job.meeting.mismatches
    assert job.plans[0] == job.plans[1]
    assert (job.members[0].plan.state is SwitchState.OFF) is not has_answer


def test_ranks_that_all_want_to_stop_before_anything_was_recorded_wait_for_nothing() -> None:
    job = Job(options=options(timeout_s=1e5))  # whoever waits for a program that nobody shares, waits until the timeout
    job.run(12, lambda rank, step: job.members[rank].stop("frozen by the job") if step == 2 else None)
    assert job.plans[0][5:] == job.plans[1][5:] == [("off", 0)] * 7
    assert "frozen by the job" in job.members[1].plan.reason


@pytest.mark.parametrize("watch_steps", [0, 8])
def test_saved_settings_that_a_rank_cannot_make_ready_switch_all_off(
    found: tuple[SiteSetting, ...], watch_steps: int
) -> None:
    job = Job(options=options(watch_steps=watch_steps), started=found)
    job.routes[1].fails_at = 1
    job.run(20)
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert all("no space left on device" in member.plan.reason for member in job.members)
    assert all(route.is_closed for route in job.routes)
    assert not job.meeting.mismatches


def test_saved_settings_of_another_model_are_refused_and_the_job_is_searched(
    found: tuple[SiteSetting, ...], caplog: pytest.LogCaptureFixture
) -> None:
    site = found[0].site
    foreign = SiteSetting(replace(site, call=replace(site.call, num_bytes=12_345)), found[0].config)
    with caplog.at_level(logging.WARNING):
        job = Job(options=options(), started=(*found, foreign))
        job.run(220)
    words = f"belong to another job (1 of {len(found) + 1} sites are not in this one)"
    assert any(words in record.getMessage() for record in caplog.records)
    assert "search" in {state for state, _ in job.plans[1]}
    assert job.members[1].settings == found


def test_saved_settings_of_a_job_that_can_never_be_measured_are_used_unchecked(found: tuple[SiteSetting, ...]) -> None:
    job = Job(options=options(), started=found)
    job.start()
    for member in job.members:
        member._why_not = lambda: "the job has a profiler of its own"
    job.run(5 * (MAX_VOID + 1) + 8)
    assert job.members[1].plan.state is SwitchState.WATCH
    assert "unchecked: rank 0: the job has a profiler" in job.members[1].plan.reason
    assert job.members[1].settings == found


def test_a_step_that_only_one_rank_could_measure_is_no_different_call() -> None:
    job = Job(options=options())
    job.start()
    job.members[1]._why_not = lambda: "another profiler runs" if job.routes[1].step in (12, 60, 100) else ""
    end_step = job.routes[0].end_step

    def cut() -> StepRecord:
        record = end_step()
        return replace(record, calls=record.calls[:-1], is_timed=False) if job.routes[0].step == 31 else record

    job.routes[0].end_step = cut
    job.run(260)
    assert "frozen" not in {state for state, _ in job.plans[0]}
    assert job.plans[0][-1][0] == SwitchState.WATCH
    assert job.members[0].settings


def test_a_profiler_that_runs_for_long_does_not_take_proven_settings_away(found: tuple[SiteSetting, ...]) -> None:
    job = Job(options=options(), started=found)
    job.run(5)
    for member in job.members:
        member._why_not = lambda: "another profiler runs"
    seen: list[float] = []
    job.run(1)
    watcher = job.leader._watch._watcher
    see = watcher.see
    watcher.see = lambda steps_s: seen.extend(steps_s) or see(steps_s)
    job.run(4 * WATCHED_WINDOWS * 8 - 1)
    assert {state for state, _ in job.plans[0][5:]} == {"watch"}
    assert job.members[0].settings == found
    assert len(seen) == 4 * WATCHED_WINDOWS * 7, "the times of steps count also where calls could not be measured"


def test_a_wish_to_stop_that_comes_when_nothing_is_agreed_on_any_more_is_answered_once(
    found: tuple[SiteSetting, ...], caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(options=options(watch_steps=0), started=found)
    job.run(8)
    assert job.members[1].plan.state is SwitchState.DONE
    with caplog.at_level(logging.WARNING):
        job.run(3, lambda rank, step: job.members[rank].stop("LAGOM_DISABLE is set") if rank == 1 else None)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "too late for 'LAGOM_DISABLE is set': what is set stays, because the ranks no longer agree on changes"
    ]
    assert job.members[1].settings == found


def test_a_route_that_cannot_say_what_may_be_tried_is_a_wish_to_stop() -> None:
    job = Job(options=options())

    def space(key: object) -> None:
        raise BackendError("the record is damaged")

    job.routes[1].space = space
    job.routes[0].space = space
    job.run(12)
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert "no report: the record is damaged" in job.members[1].plan.reason


def test_whatever_a_store_raises_does_not_end_the_job(found: tuple[SiteSetting, ...]) -> None:
    job = Job(options=options(timeout_s=0.3), started=found)
    job.run(12)

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise OSError("Broken pipe")

    job.members[1]._exchange._store = Broken()
    job.run(30)
    assert all(member.is_over for member in job.members)
    assert not job.meeting.mismatches


def test_the_error_of_a_measured_step_is_not_held_up_by_ending_the_measurement() -> None:
    job = Job(options=options())
    original, end_step, ended = Job.one_step, job.routes[1].end_step, []
    job.routes[1].end_step = lambda: ended.append(job.routes[1].step) or end_step()

    def one_step(rank: int) -> StepRecord:
        if rank == 0 or job.routes[1].step != 1:
            return original(job, rank)
        job.members[1].begin_step()
        record = job.routes[1].run()
        job.members[1].fail_step("its step ended with OutOfMemoryError")
        assert ended == [1], "the step before"
        return record

    job.one_step = one_step
    job.run(10)
    assert ended[:2] == [1, 2]
    assert "OutOfMemoryError" in job.members[0].plan.reason


def test_starting_and_ending_a_measurement_is_part_of_what_tuning_costs() -> None:
    job = Job(options=options())
    end_step, reports = job.routes[0].end_step, []
    job.routes[0].begin_step = lambda *, is_measured: time.sleep(0.02 if is_measured else 0)
    job.routes[0].end_step = lambda: time.sleep(0.03) or end_step()
    job.start()
    decide = job.leader.next
    job.leader.next = lambda report, *rest: reports.append(report) or decide(report, *rest)
    job.run(5)
    assert reports[0].exchange_s >= 3 * 0.05


def test_a_journal_that_several_ranks_wrote_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Job(options=options(), journals=(JournalFile(path), None)).run(60)
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" * 2 for line in lines))
    job = Job(options=options(), journals=(JournalFile(path), None))
    job.run(6)
    assert path.read_text().splitlines()[: len(lines)] == lines


_OF_RANK_0, _OF_RANK_1 = ("reports", "propose", "is_decided"), ("report",)
_OF_BOTH = ("plan", "get_ready", "_meet", "_settle", "_why_missing", "forget")


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    ("name", "rank"),
    [*((name, 0) for name in _OF_BOTH + _OF_RANK_0), *((name, 1) for name in _OF_BOTH + _OF_RANK_1)],
)
def test_a_bug_of_ours_between_the_ranks_ends_the_tuning_and_not_the_job(name: str, number: int, rank: int) -> None:
    """In the `number`-th call that makes a switch possible, or any other."""
    job = Job(options=options(timeout_s=0.5))
    job.start()
    exchange = job.members[rank]._exchange
    original, calls = getattr(exchange, name), []

    def fail(*words: object, **more: object) -> object:
        calls.append(words)
        if len(calls) == number + 1:
            raise AttributeError("a bug")
        return original(*words, **more)

    setattr(exchange, name, fail)
    job.run(60)
    assert not job.meeting.mismatches
    assert len(calls) > number
    assert all(member.is_over for member in job.members)
    assert not job.members[0].settings
    assert all(route.is_closed for route in job.routes)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["begin_step", "mark_end", "end_step", "communicators", "space", "prepare"])
def test_a_route_that_fails_between_two_steps_ends_the_tuning_and_not_the_job(name: str, rank: int) -> None:
    """A record that cannot be read, a table that is refused: none of it is raised into the training loop."""
    job = Job(options=options(timeout_s=20.0))
    job.start()
    route = job.routes[rank]
    original, calls = getattr(route, name), []

    def fail(*words: object, **more: object) -> object:
        calls.append(words)
        if len(calls) == 2:
            raise BackendError("the record cannot be read")
        return original(*words, **more)

    setattr(route, name, fail)
    job.run(60)
    assert len(calls) >= 2
    assert not job.meeting.mismatches
    assert all(member.is_over for member in job.members)
    assert not job.members[0].settings
    assert all(route.is_closed for route in job.routes)


@pytest.mark.parametrize("is_leaders", [True, False])
def test_a_bug_of_ours_before_the_first_plan_is_out_keeps_no_rank_waiting(
    is_leaders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, propose, why_missing, calls, waits = Job(options=options()), Exchange.propose, Exchange._why_missing, [], []

    def fail(*words: object) -> WindowPlan:
        calls.append(words)
        if len(calls) == 1:
            raise AttributeError("a bug")
        return propose(*words)

    def appear(*words: object) -> str:
        waits.append(why_missing(*words))
        return waits[-1]

    monkeypatch.setattr(*((Leader, "first") if is_leaders else (Exchange, "propose")), fail)
    monkeypatch.setattr(Exchange, "_why_missing", appear)
    job.run(10)
    assert waits == ["", ""], "each rank asked for the first plan, and it was there"
    assert not job.meeting.mismatches
    assert {plan for plans in job.plans for plan in plans} == {("off", 0)}
    assert all("a bug" in member.plan.reason for member in job.members)
    assert all(route.is_closed for route in job.routes)
