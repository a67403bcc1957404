"""The store is lost, by one rank or by all, at any of their calls: no step ever runs under different settings."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
from job_of_threads import BrokenBarrierError, FakeStore, Job
from test_online_loop import options

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.online.ranks.exchange import Exchange, InDoubt, StoreLost
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan


@dataclass
class LosingStore:
    """A rank's end of a store that answers `num_calls` calls, then none; `is_heard`: the first that fails arrives."""

    store: FakeStore
    num_calls: int
    is_heard: bool = False

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*words: object) -> object:
            self.num_calls -= 1
            if self.num_calls == -1 and self.is_heard and name != "wait":
                getattr(self.store, name)(*words)
            if self.num_calls < 0:
                raise RuntimeError("Connection reset by peer")
            return getattr(self.store, name)(*words)

        return call


class CallsAtOnce:
    """In place of `BoundedCalls`: this store answers or raises, and a busy machine must not look like a lost one."""

    def start(self, work: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        try:
            future.set_result(work())
        except RuntimeError as error:
            future.set_exception(error)
        return future

    def call(self, work: Callable[[], object], timeout_s: float) -> object:
        return work()

    def close(self) -> None:
        pass


def begun(job: Job, rank: int, num_calls: int, *, is_heard: bool = False) -> Job:
    """The job, of which one rank will lose the store after this many calls."""
    job.start()
    for member in job.members:
        member._exchange._calls = CallsAtOnce()
    job.members[rank]._exchange._store = LosingStore(job.store, num_calls, is_heard)
    return job


CALLS = (*range(3, 34), *range(34, 160, 9))
"""Every call of the first trials, and of later ones every ninth."""


def lost() -> None:
    raise StoreLost("the job's store does not answer: Connection reset by peer")


def doubts(job: Job, rank: int, steps: int, work: Callable[[int, int], None] | None = None) -> int:
    """Runs the job; 1 if the rank ended it because it could not know an answer."""
    try:
        job.run(steps, work)
    except (InDoubt, BrokenBarrierError):
        assert isinstance(job.lives[rank].exception(), InDoubt)
        assert not isinstance(job.lives[1 - rank].exception(), InDoubt)
        return 1
    finally:
        assert not job.meeting.mismatches
    return 0


def searching(rank: int, num_calls: int, *, is_heard: bool) -> Job:
    """Ten trials and windows of a verdict among them, and a rank that loses the store after this many calls."""
    job = Job(options=options(timeout_s=0.05, max_steps=90))
    return begun(job, rank, num_calls, is_heard=is_heard)


@pytest.mark.parametrize(
    ("rank", "is_heard"),
    [
        (0, False),
        (1, True),
        pytest.param(0, True, marks=pytest.mark.long),
        pytest.param(1, False, marks=pytest.mark.long),
    ],
)
def test_whenever_a_rank_loses_the_store_in_a_search_all_run_the_same_or_the_job_ends(
    rank: int, is_heard: bool
) -> None:
    num_doubts, num_off = 0, 0
    for num_calls in CALLS:
        job = searching(rank, num_calls, is_heard=is_heard)
        is_in_doubt = doubts(job, rank, 70)
        num_doubts += is_in_doubt
        if not is_in_doubt and job.members[rank].plan.state is SwitchState.OFF:
            num_off += 1
            assert all(route.in_force.is_over for route in job.routes)
            assert all(member.settings == () for member in job.members)
    assert num_off > 15
    assert 0 < num_doubts < 20


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_that_finds_the_store_again_is_never_in_doubt(rank: int) -> None:
    for num_calls in CALLS:
        job = searching(rank, num_calls, is_heard=False)
        exchange = job.members[rank]._exchange
        exchange._timeout_s = 1.0
        exchange._reopen = lambda job=job: job.store
        assert not doubts(job, rank, 70)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trial_is_kept_to_the_end_of_its_window_and_not_a_step_longer(rank: int) -> None:
    """Lost in the first step of a trial's second window, of four steps, which both ranks then make to its end."""
    job = Job(options=options(timeout_s=2.0))
    job.start()
    seen: list[list[bool]] = [[], []]
    at = {"step": -1}

    def work(number: int, step: int) -> None:
        seen[number].append(bool(job.members[number].settings))
        plan = job.members[number].plan
        is_second = plan.state is SwitchState.SEARCH and plan.num_steps == 4 and job.members[number]._window.step == 1
        if number == rank and at["step"] < 0 and is_second and job.members[number].settings:
            at["step"] = step
            job.members[number]._exchange._ask = lambda question: lost()

    job.run(40, work)
    lost_at = at["step"]
    assert lost_at > 0
    assert seen[0] == seen[1]
    assert seen[0][lost_at : lost_at + 5] == [True, True, True, True, False]
    assert not any(seen[0][lost_at + 4 :])
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert not job.meeting.mismatches


def test_a_trial_goes_on_only_with_the_word_of_all_although_nothing_changes(found: tuple[SiteSetting, ...]) -> None:
    """Both windows of a trial have one epoch: a rank that reported the first one and cannot hear of the second."""
    job = Job(options=options(timeout_s=0.2))
    job.start()

    def work(rank: int, step: int) -> None:
        plan = job.members[rank].plan
        if rank == 1 and plan.state is SwitchState.SEARCH and plan.num_steps == 3 and job.members[1]._window.step == 2:
            report = job.members[1]._exchange.report
            job.members[1]._exchange.report = lambda *told: (report(*told), go())

    def go() -> None:
        job.members[1]._exchange._ask = lambda question: lost()

    job.run(40, work)
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert not job.meeting.mismatches


def test_a_store_that_is_gone_for_all_ends_a_search_untouched_and_leaves_what_is_settled(
    found: tuple[SiteSetting, ...],
) -> None:
    job = Job(options=options())
    job.run(50)
    assert job.members[0].plan.state in (SwitchState.SEARCH, SwitchState.VERDICT)
    job.store.is_gone = True
    job.run(30)
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert not job.meeting.mismatches
    settled = Job(options=options(), started=found)
    settled.run(50)
    settled.store.is_gone = True
    settled.run(30)
    assert settled.members[0].settings == settled.members[1].settings == found
    assert [member.plan.state for member in settled.members] == [SwitchState.DONE] * 2
    assert not settled.meeting.mismatches


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_loses_the_store_while_all_is_settled_runs_on_as_the_others_do(
    found: tuple[SiteSetting, ...], rank: int
) -> None:
    job = Job(options=options(timeout_s=2.0), started=found)
    job.run(15)
    assert job.members[0].plan.state is SwitchState.WATCH
    job.members[rank]._exchange._ask = lambda question: lost()
    job.run(40)
    assert not job.meeting.mismatches
    assert job.members[0].settings == job.members[1].settings == found
    assert not any(route.is_closed for route in job.routes)
    other = job.members[1 - rank].plan
    assert other.state is SwitchState.DONE
    assert "what is set stays for good" in other.reason


def test_a_rank_deep_in_the_tree_that_loses_the_store_runs_on_as_the_others_do(
    found: tuple[SiteSetting, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tuple(
        SiteSetting(replace(setting.site, call=replace(setting.site.call, num_ranks=6)), setting.config)
        for setting in found
    )
    monkeypatch.setattr("lagom_overlap.online.ranks.tree.MOST_CHILDREN", 2)
    job = Job(num_ranks=6, options=options(timeout_s=2.0), started=started)
    job.run(15)
    job.members[5]._exchange._ask = lambda question: lost()
    job.run(40)
    assert not job.meeting.mismatches
    assert all(member.settings == started for member in job.members)
    assert job.members[1].plan.state is SwitchState.DONE
    assert "rank 5 did not report" in job.members[1].plan.reason


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("wish", ["stop", "leave", "raise"])
def test_settled_a_wish_to_stop_beside_a_lost_store_parts_nobody(
    found: tuple[SiteSetting, ...], rank: int, wish: str
) -> None:
    """The other rank wants to stop in the third window; the store is lost before, during or after that."""
    num_doubts = 0
    for num_calls in range(8, 40, 2):
        job = begun(Job(options=options(timeout_s=0.05), started=found), rank, num_calls)
        original = job.one_step

        def one_step(number: int, job: Job = job, original: Callable[[int], object] = original) -> object:
            member = job.members[number]
            if number == rank or member.num_steps != 15:
                return original(number)
            if wish == "raise":
                member.begin_step()
                record = job.routes[number].run()
                member.fail_step("its step ended with OutOfMemoryError")
                return record
            member.stop("frozen by the job") if wish == "stop" else member.leave("the job closed its tuner")
            return original(number)

        job.one_step = one_step
        num_doubts += doubts(job, rank, 50)
    assert num_doubts <= 6, "two switches of three calls each"


def test_whenever_a_rank_loses_the_store_around_a_tuning_again_all_run_the_same(found: tuple[SiteSetting, ...]) -> None:
    """Recorded, settled, and recorded untouched again: two switches, and the store is lost before, between or after."""
    num_doubts = 0
    for rank, num_calls in ((rank, num_calls) for rank in (0, 1) for num_calls in range(6, 46, 2)):
        job = begun(Job(options=options(timeout_s=0.05), started=found), rank, num_calls)
        leader, watched, recorded = job.leader, job.leader._watch.watched, job.leader._recorded
        leader._watch.watched = lambda told, leader=leader, watched=watched: (
            watched(told) if leader._plans.next_window < 4 else "drift"
        )
        leader._recorded = lambda *told, leader=leader, recorded=recorded: (
            recorded(*told) if leader._plans.next_window < 4 else leader._record("no search")
        )
        num_doubts += doubts(job, rank, 5 + 3 * 8 + 3 * 5)
    assert num_doubts <= 12


def test_a_store_lost_right_after_all_agreed_does_not_keep_rank_0_from_switching(
    found: tuple[SiteSetting, ...],
) -> None:
    job = Job(options=options(timeout_s=2.0), started=found)
    job.start()
    job.members[0]._exchange.forget = lambda window: lost()
    while not job.members[0].is_over:
        job.run(1)
    assert job.members[0].settings == job.members[1].settings
    assert not job.meeting.mismatches


@pytest.mark.parametrize("is_out", [False, True])
def test_a_rank_that_leaves_what_is_settled_takes_it_from_nobody(found: tuple[SiteSetting, ...], is_out: bool) -> None:
    """Before the first step of the third window, whose plan may be out already."""
    job = Job(options=options(timeout_s=20.0), started=found)

    def work(rank: int, step: int) -> None:
        if (rank, step) == (1, 13):
            assert not is_out or job.store.get("plan/2")
            job.members[1].leave("it closed")

    job.run(45, work)
    assert [member.plan.state for member in job.members] == [SwitchState.DONE] * 2
    assert "rank 1: it closed" in job.members[0].plan.reason
    assert job.members[0].settings == job.members[1].settings == found
    assert not job.meeting.mismatches


def test_nobody_waits_for_the_word_of_a_rank_that_left_when_a_switch_was_out_already() -> None:
    job = Job(options=options(timeout_s=1e5))  # whoever waits, waits until the test's timeout
    job.run(1)
    one, other = job.members
    while job.leader.plan.window == one.plan.window or not job.leader.plan.settings:
        job.run(1)
    other.leave("its process ends")
    one.begin_step()
    assert one.plan.state is SwitchState.OFF
    assert "its process ends" in one.plan.reason


def test_a_last_word_that_was_heard_counts_although_the_rank_could_not_hear_so() -> None:
    store = FakeStore()
    one = Exchange(LosingStore(store, 4, is_heard=True), rank=0, num_ranks=1, timeout_s=1.0, reopen=lambda: store)
    assert one.agree(3) == "", "it was the last one: ready, met, sure, and then its own yes"
    two = Exchange(LosingStore(FakeStore(), 0), rank=0, num_ranks=1, timeout_s=0.1)
    with pytest.raises(StoreLost):
        two.agree(3)
    three = Exchange(LosingStore(FakeStore(), 2), rank=0, num_ranks=1, timeout_s=0.1)
    with pytest.raises(InDoubt, match="cannot know whether the others switch"):
        three.agree(3)


def test_off_is_a_switch_like_any_other_once_all_is_settled(found: tuple[SiteSetting, ...]) -> None:
    """A rank that is not there for it keeps the others from taking away what it goes on with."""
    job = Job(options=options(timeout_s=0.2), started=found)
    job.run(13)
    job.store.set("plan/2", "unreadable")
    agree = job.members[1]._exchange.agree
    job.members[1]._exchange.agree = lambda window, **what: agree(window, refusal="rank 1 has no mind to")
    job.run(10)
    assert [member.plan.state for member in job.members] == [SwitchState.DONE] * 2
    assert isinstance(job.members[0].plan, WindowPlan)
    assert job.members[0].settings == found
