"""The whole loop on threads and formulas: record, search, verdict, settle, watch, drift, failures."""

import logging
import sys
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace

import job_of_threads
import pytest
from job_of_threads import (
    CHANNELS,
    CHUNKS,
    GATHERED,
    SCATTERED,
    BrokenBarrierError,
    FakeStore,
    Job,
    SimulatedRoute,
    comm_s,
    comp_s,
    study_of,
)
from torch import distributed as dist

from lagom_overlap.collective import CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.errors import BackendError
from lagom_overlap.online.journal import JournalFile
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan
from lagom_overlap.online.ranks.search import study_factory
from lagom_overlap.online.routes.compute import BothSidesRoute, NoComputeRoute
from lagom_overlap.online.routes.gloo import GlooRoute
from lagom_overlap.online.step_clock import HostClock
from lagom_overlap.online.tuner import _Step
from lagom_overlap.report.contest import contest_lines
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.fixed import Default
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.ours import MOST_MEASURED
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.warm_start import WarmStart
from lagom_overlap.verbs.show import _searched


def options(**changes: object) -> OnlineOptions:
    """Short windows; saved settings are trusted, unless a test is of checks."""
    return OnlineOptions(**{"timeout_s": 20.0, "num_pairs": 3, "watch_steps": 8, "check_share": 0.0, **changes})


def layer_s(gather: CommConfig, scatter: CommConfig, alone_s: float = 0.05) -> float:
    """A window's makespan by the formulas."""
    took = comm_s(CollectiveKind.ALL_GATHER, GATHERED, gather)
    took += comm_s(CollectiveKind.REDUCE_SCATTER, SCATTERED, scatter)
    return max(comp_s(alone_s, [gather, scatter]), took)


def best_layer_s() -> float:
    configs = [CommConfig(num_channels=nc, chunk_bytes=c) for nc, c in product(CHANNELS, CHUNKS)]
    return min(layer_s(one, two) for one, two in product(configs, configs))


def test_it_settles_on_what_is_faster_and_all_ranks_run_the_same_at_every_step() -> None:
    job = Job(options=options())
    records = job.run(220)
    assert not job.meeting.mismatches
    assert job.plans[0] == job.plans[1]
    assert [state for state, _ in job.plans[0]][-1] == SwitchState.WATCH
    before, after = records[0][0].duration_s, records[0][-1].duration_s
    assert before == pytest.approx(3 * layer_s(CommConfig(), CommConfig()))
    assert after < 0.9 * before
    assert after <= 3 * best_layer_s() * 1.2
    assert "new settings save " in job.members[1].plan.reason


def test_ranks_that_report_through_others_settle_on_the_same_as_those_that_report_to_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = Job(num_ranks=6, options=options())
    flat.run(220)
    monkeypatch.setattr("lagom_overlap.online.ranks.tree.MOST_CHILDREN", 2)
    deep = Job(num_ranks=6, options=options())
    deep.run(220)
    assert deep.members[1]._exchange.post.children
    assert not deep.meeting.mismatches
    assert deep.plans[5] == deep.plans[0] == flat.plans[0]
    assert deep.members[5].settings == flat.members[0].settings


def test_a_rank_deep_in_the_tree_that_wants_to_stop_or_is_missing_stops_all_at_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lagom_overlap.online.ranks.tree.MOST_CHILDREN", 2)
    job = Job(num_ranks=6, options=options())
    job.run(40, lambda rank, step: job.members[5].stop("enough") if rank == 5 and step == 12 else None)
    assert len({tuple(plans) for plans in job.plans}) == 1
    assert job.members[0].plan.reason == "rank 5: enough"
    silent = Job(num_ranks=6, options=options(timeout_s=0.5))
    silent.start()
    monkeypatch.setattr(silent.members[5]._exchange, "report", lambda window, report: None)
    silent.run(12)
    assert len({tuple(plans) for plans in silent.plans}) == 1
    assert silent.plans[0][-1][0] == SwitchState.OFF
    assert "rank 5 did not report" in silent.members[1].plan.reason


def test_the_states_come_in_order() -> None:
    job = Job(options=options())
    job.run(220)
    states = list(dict.fromkeys(state for state, _ in job.plans[1]))
    assert states == ["record", "search", "verdict", "watch"]


def test_ours_searches_on_in_a_long_job_and_stops_at_twelve_where_the_length_is_unknown() -> None:
    """Many settings and steps that differ by 2 % for no reason: after twelve trials there is still something to win."""
    space = ConfigSpace((Subspace(num_channels=tuple(range(1, 17)), chunk_bytes=tuple(2**n for n in range(15, 23))),))

    def run(job_steps: int) -> tuple[int, str]:
        chosen = options(tuner="ours", job_steps=job_steps)
        job = Job(options=chosen, make_study=study_factory(chosen))
        for route in job.routes:
            route.num_layers, route.space = 1, lambda key: space
            route.delay = lambda step: 1 + 0.02 * Random(step).gauss(0, 1)
        job.run(120)
        assert job.leader is not None
        assert job.leader.study is not None
        searched = [entry for entry in job.leader.study.entries if entry.step.kind == StepKind.SEARCH]
        return len(searched), job.plans[0][-1][0]

    num_short, state = run(0)
    assert num_short <= MOST_MEASURED
    assert state != SwitchState.SEARCH
    num_long, state = run(10**6)
    assert num_long > MOST_MEASURED
    assert state == SwitchState.SEARCH, "it has not had enough"


def test_tuners_search_one_after_the_other_and_what_each_found_is_judged_against_the_default() -> None:
    chosen = options(tuner="lagom", compare=("autoccl", "fixed_min"))
    job = Job(options=chosen, make_study=study_factory(chosen))
    for route in job.routes:
        route.num_layers = 1
    job.run(900)
    assert not job.meeting.mismatches
    assert job.leader is not None
    contest = job.leader.contest
    assert contest is not None
    assert [each.name for each in contest.tuners] == ["lagom", "autoccl", "fixed_min"]
    for each in contest.tuners[:3]:
        ((gather, scatter),) = [tuple(configs.values()) for configs in each.settings.values()]
        assert each.judgement is not None
        by_hand = layer_s(CommConfig(), CommConfig()) / layer_s(gather, scatter)
        assert each.judgement.ratio == pytest.approx(by_hand)
        assert each.judgement.is_faster == (by_hand >= 1.005)
    assert contest.tuners[2].num_measurements == 1
    assert contest.tuners[2].num_steps == 7, "three that may end it, four that measure"
    assert contest.adopted == ("lagom" if contest.tuners[0].judgement.is_faster else None)
    assert contest.best is not None
    assert f"{contest.best.name} is best: proven faster in 3 pairs" in contest_lines(contest)[-1]


def test_h_of_the_collective_that_climbs_is_live_and_in_the_journal(tmp_path: Path) -> None:
    chosen = options(tuner="lagom")
    job = Job(
        options=chosen,
        make_study=study_factory(chosen),
        journals=tuple(JournalFile(tmp_path / f"journal.{rank}.jsonl") for rank in range(2)),
    )
    said: dict[str, dict[str, float]] = {}

    def note(rank: int, step: int) -> None:
        if rank == 0 and (leader := job.leader) is not None and leader.priorities:
            ((_, metrics),) = list(leader.priorities.items())[:1]
            said.setdefault(job.members[0].plan.reason, dict(metrics))  # later the next plan may be made

    for route in job.routes:
        route.num_layers = 1
    job.run(120, note)
    climbs = [(reason, metrics) for reason, metrics in said.items() if "smallest H = " in reason]
    assert climbs
    for reason, metrics in climbs:
        comm, _, words = reason.partition(": ")
        if comm in metrics:
            assert f"smallest H = {metrics[comm]:.3g}" in reason
            assert metrics[comm] == min(metrics.values()), words
    shown = _searched(tmp_path)
    assert sum("; H: " in line for line in shown) >= len(climbs)
    assert any(
        f"{metrics['0:all_gather']:.3g}" in line for line in shown for _, metrics in climbs if "0:all_gather" in metrics
    )


def test_a_search_after_a_drift_knows_how_much_of_the_job_is_left() -> None:
    chosen = options(job_steps=1000, drift_steps=8, max_rearms=1)
    left: list[int] = []

    def make_study(problems: Problems, warm: WarmStart | None, steps_left: int) -> Study:
        left.append(steps_left)
        return study_of(chosen)(problems, warm, steps_left)

    job = Job(options=chosen, make_study=make_study)
    for route in job.routes:
        route.delay = lambda step: 1.0 if step < 220 else 1.5
    job.run(320)
    assert left == [995, pytest.approx(750, abs=30)]


def test_a_slower_candidate_leaves_the_job_as_it_was() -> None:
    """All settings but the untouched one are slower: the search finds nothing, the default comes back."""
    job = Job(options=options())
    for route in job.routes:
        original = route.run

        def run(original=original, route=route):
            route.delay = lambda step: 3.0 if route.table else 1.0
            return original()

        route.run = run
    records = job.run(220)
    assert job.plans[0][-1][0] == SwitchState.WATCH
    assert not job.members[0].settings
    assert records[0][-1].duration_s == pytest.approx(records[0][0].duration_s)
    assert not job.meeting.mismatches


def test_a_trial_that_costs_too_much_is_abandoned_after_one_measured_step() -> None:
    job = Job(options=options(max_slowdown=1.2))
    for route in job.routes:
        original = route.run

        def run(original=original, route=route):
            few = any(config.num_channels == 1 for _, config in route.table)
            route.delay = lambda step: 10.0 if few else 1.0
            return original()

        route.run = run
    records = job.run(300)
    lengths = [round(record.duration_s / records[0][0].duration_s, 2) for record in records[0]]
    slow = [index for index, ratio in enumerate(lengths) if ratio > 5]
    assert slow, "the tuner begins with the least resources"
    runs = [index for index in slow if index - 1 not in slow]
    assert all(sum(first <= index < first + 4 for index in slow) <= 3 for first in runs)
    failures = [
        outcome
        for entry in job.leader.study.entries
        for outcome in entry.outcomes.values()
        if hasattr(outcome, "reason")
    ]
    assert failures
    assert "abandoned after one step" in failures[0].reason
    # What was read before: the paper's own search, which abandons nothing, goes on from it.
    assert failures[0].measured is not None
    assert failures[0].measured.makespan_s > 0


def test_deterministic_never_sets_what_would_change_a_reduction() -> None:
    job = Job(options=options(deterministic=True))
    job.run(220)
    assert {config for kind, config in job.meeting.used if kind == "reduce_scatter"} == {CommConfig()}
    assert len({config for kind, config in job.meeting.used if kind == "all_gather"}) > 1


def test_the_budget_of_steps_bounds_search_and_verdict_together() -> None:
    job = Job(options=options(max_steps=100))
    job.run(180)
    states = [state for state, _ in job.plans[0]]
    assert {"search", "verdict"} <= set(states)
    assert 30 <= sum(state in ("search", "verdict") for state in states) <= 100 + 5


def test_a_search_that_ends_with_the_default_compares_it_with_nothing() -> None:
    """A budget that is enough for a verdict and for no setting to try."""
    job = Job(options=options(max_steps=60))
    job.run(140)
    assert [str(state) for state in dict.fromkeys(state for state, _ in job.plans[0])] == ["record", "watch"]
    assert job.plans[0][-1][0] == SwitchState.WATCH
    assert "no setting was tried, because its budget leaves no steps for one" in job.members[1].plan.reason


def test_where_computation_hides_everything_the_search_says_that_this_is_why_it_tried_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_of_threads, "comm_s", lambda *_: 1e-5)
    job = Job(options=options(), make_study=lambda problems, *_: Study(problems, Default(problems), num_pairs=3))
    job.run(140)
    why = "no setting was tried, because computation hides the communication: a step waits for it 0.0 % of its time"
    assert why in job.members[1].plan.reason


def test_a_budget_that_holds_no_verdict_changes_nothing() -> None:
    job = Job(options=options(max_steps=10))
    job.run(30)
    assert {state for state, _ in job.plans[0]} == {"record", "watch"}
    assert {config for _, config in job.meeting.used} == {CommConfig()}
    assert "budget is too small" in job.members[1].plan.reason


def test_without_a_watch_it_is_done_and_asks_the_store_nothing_more() -> None:
    job = Job(options=options(watch_steps=0))
    job.run(220)
    assert job.plans[0][-1][0] == SwitchState.DONE
    assert all(member.is_over for member in job.members)
    job.store.is_gone = True
    job.run(20)
    assert job.members[0].settings
    assert not job.meeting.mismatches


def test_drift_tunes_again_and_no_more_often_than_allowed() -> None:
    job = Job(options=options(max_rearms=1))
    for route in job.routes:
        route.delay = lambda step: 1.0 if step < 300 else 1.2 if step < 700 else 1.5
    job.run(860)
    states = [state for state, _ in job.plans[0]]
    again = [a for a, b in zip(states[1:], states, strict=False) if a == "record" and b != "record"]
    assert len(again) == 1
    assert states[-1] == SwitchState.DONE
    assert not job.meeting.mismatches


def test_a_neighbour_that_comes_and_goes_is_told_and_tunes_nothing_again() -> None:
    job = Job(options=options())
    for route in job.routes:
        route.delay = lambda step: 1.0 if step < 400 or step % 100 >= 30 else 1.2
    job.run(320)
    settled = job.members[0].plan.reason
    assert "slow phase" not in settled
    job.run(480)
    assert {state for state, _ in job.plans[0][320:]} == {SwitchState.WATCH}
    # The last step of a window of 8 is not among those that rank 0 hears of: 26 of 30.
    words = "4 slow phases ended by themselves (median 26 steps, longest 27; steps took 1.20 times as long)"
    assert {member.plan.reason for member in job.members} == {f"{settled}; {words}"}
    assert not job.meeting.mismatches


def test_the_journal_takes_a_restart_to_where_it_was_also_when_rank_0_moved(tmp_path: Path) -> None:
    """Two nodes with a disk each; after the restart the journal of node 0 is gone."""
    paths = tmp_path / "node0.jsonl", tmp_path / "node1.jsonl"
    first = Job(options=options(), journals=tuple(JournalFile(path) for path in paths))
    first.run(60)
    number = len(first.leader.study.entries)
    assert number > 3
    assert paths[0].stat().st_mode & 0o777 == 0o600
    kept = paths[1].read_text().count("\n") - 1
    assert number - 2 <= kept <= number
    paths[0].unlink()
    second = Job(options=options(), journals=tuple(JournalFile(path) for path in paths))
    second.run(10)
    assert len(second.leader.study.entries) >= kept
    assert second.plans[0][5][0] in ("search", "verdict")
    second.run(210)
    assert second.plans[0][-1][0] == SwitchState.WATCH
    assert paths[0].read_text() == paths[1].read_text()
    third = Job(options=options(), journals=tuple(JournalFile(path) for path in paths))
    third.run(8)
    assert third.plans[0][-1][0] == SwitchState.WATCH, "a finished journal settles at once"
    assert third.members[1].settings == second.members[1].settings


def test_a_torn_last_line_of_the_journal_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Job(options=options(), journals=(JournalFile(path), None)).run(60)
    whole = path.read_text()
    path.write_text(whole[:-40])
    job = Job(options=options(), journals=(JournalFile(path), None))
    job.run(10)
    assert len(job.leader.study.entries) >= whole.count("\n") - 2


@pytest.mark.parametrize("what", ["garbage", "header", "middle", "another job"])
def test_a_damaged_or_foreign_journal_is_refused_in_words_and_begun_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path = tmp_path / "journal.jsonl"
    if what == "another job":
        Job(num_ranks=3, options=options(), journals=(JournalFile(path), None, None)).run(60)
    else:
        Job(options=options(), journals=(JournalFile(path), None)).run(60)
        lines = path.read_text().splitlines()
        lines = {
            "garbage": ["\x00\xff nonsense"],
            "header": ["{}", *lines[1:]],
            "middle": [*lines[:2], "{}", *lines[2:]],
        }[what]
        path.write_text("".join(f"{line}\n" for line in lines))
    with caplog.at_level(logging.WARNING):
        job = Job(options=options(), journals=(JournalFile(path), None))
        job.run(220)
    assert any("starting anew" in record.getMessage() for record in caplog.records)
    assert job.plans[0][-1][0] == SwitchState.WATCH
    assert not job.meeting.mismatches


def test_a_journal_that_cannot_be_written_costs_one_warning_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        job = Job(options=options(), journals=(JournalFile(tmp_path / "no" / "folder" / "j.jsonl"), None))
        job.run(220)
    assert sum("without a journal" in record.getMessage() for record in caplog.records) == 1
    assert job.plans[0][-1][0] == SwitchState.WATCH


def test_a_rank_that_cannot_prepare_keeps_all_ranks_from_switching() -> None:
    """A full disk on rank 1 from the third switch on."""
    job = Job(options=options())
    job.routes[1].fails_at = 3
    job.run(120)
    assert not job.meeting.mismatches
    assert job.plans[0][-1][0] == job.plans[1][-1][0] == SwitchState.OFF
    assert "no space left on device" in job.members[0].plan.reason
    assert all(route.is_closed for route in job.routes)


def test_a_rank_that_asks_to_stop_stops_all_at_one_step() -> None:
    job = Job(options=options())

    def work(rank: int, step: int) -> None:
        if rank == 1 and step == 23:
            job.members[1].stop("LAGOM_DISABLE is set")

    job.run(60, work)
    assert not job.meeting.mismatches
    assert job.plans[0] == job.plans[1]
    assert "rank 1: LAGOM_DISABLE is set" in job.members[0].plan.reason


def test_times_that_mean_nothing_are_measured_again() -> None:
    job = Job(options=options())
    job.start()
    void = {"until": 40}
    for member, route in zip(job.members, job.routes, strict=True):
        member._why_not = lambda route=route: "another profiler runs" if route.step < void["until"] else ""
    job.run(280)
    assert job.plans[0][30][0] == "record"
    assert job.plans[0][-1][0] == SwitchState.WATCH
    assert not job.meeting.mismatches


def test_ranks_at_different_steps_freeze_the_tuning() -> None:
    job = Job(options=options())

    def work(rank: int, step: int) -> None:
        if rank == 1 and step == 12:
            job.members[1]._totals.num_steps += 1

    job.run(60, work)
    assert not job.meeting.mismatches
    assert job.plans[0][-1][0] == SwitchState.FROZEN
    assert "different steps" in job.members[1].plan.reason
    assert not job.members[0].settings


def test_different_calls_on_one_communicator_freeze_the_tuning_until_they_agree_again() -> None:
    job = Job(options=options())
    original = job.routes[1].run

    def run():
        record = original()
        if 10 <= job.routes[1].step < 60:
            job.routes[1].record = type(record)(duration_s=record.duration_s, calls=record.calls[:-1])
        return record

    job.routes[1].run = run
    job.run(500)
    states = [state for state, _ in job.plans[0]]
    assert "frozen" in states
    assert states[-1] == SwitchState.WATCH
    assert not job.meeting.mismatches


def test_saved_settings_are_in_force_after_one_recorded_window_and_are_not_searched_again() -> None:
    first = Job(options=options())
    first.run(220)
    second = Job(options=options(), started=first.members[0].settings)
    records = second.run(40)
    assert [state for state, _ in second.plans[0]] == ["record"] * 5 + ["watch"] * 35
    assert records[0][5].duration_s == pytest.approx(first.routes[0].record.duration_s)
    assert second.members[1].settings == first.members[1].settings


def test_nothing_is_left_in_the_store_but_the_last_windows() -> None:
    job = Job(options=options(), store=FakeStore())
    job.run(220)
    windows = {
        int(key.split("/")[1])
        for key in job.store.values
        if key.startswith(("plan/", "report/", "ready/", "met/", "sure/", "go/"))
    }
    assert max(windows) - min(windows) <= 3


def test_a_route_with_a_bug_of_its_own_switches_the_tuning_off_and_the_job_goes_on() -> None:
    job = Job(options=options())

    def prepare(table: object, epoch: int) -> None:
        raise KeyError("never thought of")

    job.routes[0].prepare = prepare
    job.run(60)
    assert job.plans[0][-1][0] == job.plans[1][-1][0] == SwitchState.OFF
    assert "rank 0 cannot switch" in job.members[1].plan.reason
    assert not job.meeting.mismatches


@pytest.mark.parametrize("is_half_done", [False, True])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_commit_that_fails_is_taken_back_on_all_ranks_and_ends_the_tuning_only(
    epoch: int, is_half_done: bool
) -> None:
    job = Job(options=options())
    route = job.routes[1]
    original = route.commit

    def commit(number: int) -> None:
        if number == epoch and not is_half_done:
            raise OSError("the table vanished")
        original(number)
        if number == epoch:
            raise OSError("the table vanished")

    route.commit = commit
    job.run(60)
    assert [member.plan.state for member in job.members] == [SwitchState.OFF] * 2
    assert all("the table vanished" in member.plan.reason for member in job.members)
    assert not job.meeting.mismatches


def test_a_commit_that_fails_later_leaves_settled_settings_in_force_on_all_ranks() -> None:
    job = Job(options=options(check_share=0.5))
    job.run(220)
    settings = job.members[0].settings
    assert settings
    epoch = max(job.routes[0].epochs)
    original = job.routes[1].commit

    def commit(number: int) -> None:
        original(number)
        if number > epoch:
            raise OSError("the table vanished")

    job.routes[1].commit = commit
    job.run(600)
    for member, route in zip(job.members, job.routes, strict=True):
        assert (member.plan.state, member.settings) == (SwitchState.DONE, settings)
        assert len(route.table) == len(settings)
    assert not job.meeting.mismatches


def test_a_rank_that_can_neither_switch_nor_go_back_to_settled_settings_ends_the_job_in_words() -> None:
    job = Job(options=options(check_share=0.5))
    job.run(220)
    assert job.members[0].settings

    def broken(epoch: int) -> None:
        raise OSError("the table vanished")

    job.routes[1].commit = job.routes[1].take_back = broken
    job.meeting.timeout_s = 1.0
    with pytest.raises((BackendError, BrokenBarrierError)):
        job.run(600)
    with pytest.raises(BackendError, match="could not go back to the settings before a switch that failed"):
        job.lives[1].result()


def test_a_step_whose_collectives_follow_its_update_ends_where_the_next_one_begins() -> None:
    """Else a verdict would not see gathered parameters that a setting slows down."""
    now_s = [0.0]
    route = SimulatedRoute(0, 2)
    steps = HostClock(lambda: now_s[0])
    exchange = Exchange(FakeStore(), rank=0, num_ranks=1, timeout_s=1.0)
    exchange.propose(WindowPlan(window=0, state=SwitchState.VERDICT, reason="", num_steps=9, first_measured=9))
    member = Member(exchange, route, steps=steps)
    for goes_on, length_s in ((False, 1.0), (True, 4.0)):
        route.goes_on = lambda goes_on=goes_on: goes_on
        member.begin_step()
        now_s[0] += 1.0
        member.mark_end()
        now_s[0] += 3.0  # data, or gathered parameters
        member.end_step()
        assert steps.times_s()[-1] == length_s


def test_a_settled_job_is_measured_so_seldom_that_it_costs_a_thousandth() -> None:
    """PyTorch's profiler takes a good part of a second in each measured step; every eighth window had it."""
    job = Job(options=options(watch_steps=25))
    job.run(150)
    assert job.members[0].plan.state is SwitchState.WATCH
    measured: list[int] = []
    each_s = 0.1

    def begin_step(*, is_measured: bool) -> None:
        if is_measured:
            measured.append(job.members[1].num_steps)
            job.members[1]._totals.exchange_s += each_s

    job.routes[1].begin_step = begin_step
    began_s, num_steps = job.now_s[1], 2500
    job.run(num_steps)
    job_s = job.now_s[1] - began_s
    window_s = 3 * each_s
    assert num_steps / 200 * window_s > 0.005 * job_s, "what every eighth window would have cost"
    assert window_s <= each_s * len(measured) <= 0.001 * job_s + 2 * window_s  # the first one, and one under way


@pytest.mark.parametrize(("shortened", "at_least", "at_most"), [(1.0, 25, 25), (0.1, 30, 60), (0.001, 100, 100)])
def test_settled_windows_are_longer_where_steps_are_short(shortened: float, at_least: int, at_most: int) -> None:
    """So that agreeing costs at most 0.05 % of a step, or 5 us; and never more than four times what was asked for."""
    job = Job(options=options(watch_steps=25))
    for route in job.routes:
        route.delay = lambda step: shortened
    job.run(400)
    plan = job.members[1].plan
    assert plan.state is SwitchState.WATCH
    assert at_least <= plan.num_steps <= at_most
    assert job.plans[0] == job.plans[1]


def test_a_settled_step_runs_few_functions_of_ours() -> None:
    """Counted, for on a shared machine no clock tells; cold, each takes about a microsecond."""
    exchange = Exchange(FakeStore(), rank=0, num_ranks=1, timeout_s=1.0)
    exchange.propose(WindowPlan(window=0, state=SwitchState.WATCH, reason="", num_steps=25, first_measured=25))
    route = BothSidesRoute(GlooRoute(dist.HashStore()), NoComputeRoute("a test"))
    member = Member(exchange, route, why_stop=lambda: pytest.fail("asked in every step"))
    tuner = SimpleNamespace(_announcer=None, _is_in_step=False)
    called: list[str] = []
    for number in range(20):
        if number:
            sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
        with _Step(tuner, member):  # type: ignore[arg-type]
            pass
        sys.setprofile(None)
        assert not number or 0 < len(called) <= 19, called
        called.clear()


def test_a_failure_of_ours_while_a_step_is_measured_is_a_wish_to_stop() -> None:
    job = Job(options=options())

    def end_step() -> None:
        raise RuntimeError("the timer broke")

    job.routes[1].end_step = end_step
    job.run(30)
    assert job.plans[0][-1][0] == job.plans[1][-1][0] == SwitchState.OFF
    assert "rank 1: failed: the timer broke" in job.members[0].plan.reason


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("step", [0, 5, 17, 18, 19])
def test_a_rank_that_leaves_and_goes_on_is_untouched_at_the_same_step_as_the_others(leaver: int, step: int) -> None:
    job = Job(options=options(timeout_s=1e5))  # whoever waits for the rank that left, waits until the test's timeout

    def work(rank: int, number: int) -> None:
        if rank == leaver and number == step:
            job.members[rank].leave("the job closed its tuner")

    job.run(60, work)
    assert job.plans[0] == job.plans[1]
    assert job.members[1 - leaver].plan.state is SwitchState.OFF
    assert all(route.is_closed for route in job.routes)
    assert not job.meeting.mismatches


def test_a_step_that_raises_on_all_ranks_ends_the_tuning_not_the_job() -> None:
    job = Job(options=options(timeout_s=20.0))
    original = Job.one_step

    def one_step(rank: int):
        if job.members[rank].num_steps == 16:
            job.members[rank].begin_step()
            job.plans[rank].append((str(job.members[rank].plan.state), job.members[rank].plan.epoch))
            record = job.routes[rank].run()
            job.members[rank].fail_step("its step ended with OutOfMemoryError")
            return record
        return original(job, rank)

    job.one_step = one_step
    job.run(60)
    assert job.plans[0] == job.plans[1]
    assert "OutOfMemoryError" in job.members[0].plan.reason
    assert not job.meeting.mismatches


def test_a_step_whose_calls_change_in_the_search_is_recorded_anew_and_none_of_its_times_count() -> None:
    """From step 24 on the job has two layers, not three: what those steps take says nothing of what was searched."""
    job = Job(options=options())
    job.start()
    reasons: list[str] = []
    seen: list[tuple[str, int]] = []

    def work(rank: int, step: int) -> None:
        if step == 24:
            job.routes[rank].num_layers = 2
        if rank == 0 and step > 24:
            plan = job.members[0].plan
            reasons.append(plan.reason)
            seen.append((str(plan.state), plan.epoch))

    job.run(400, work)
    assert job.plans[0][23][0] == "search"
    assert "the step's calls changed" in reasons
    assert not job.meeting.mismatches
    states = list(dict.fromkeys(state for state, _ in seen))
    # Nothing more is searched or judged by the old program: only a record leads on.
    assert states.index("record") < min((states.index(one) for one in ("verdict", "watch") if one in states), default=9)
    occurrences = {setting.site.occurrence for setting in job.members[0].settings}
    assert occurrences <= {0, 1}
    assert occurrences, states
