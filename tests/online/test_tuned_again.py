"""A job that is tuned again begins with what it knows, and believes it only as far as it still measures it."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import job_of_threads
import pytest
from job_of_threads import Job
from test_online_loop import best_layer_s, options

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.online.journal import JournalFile
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.ranks.search import StudyFactory
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.ours import OurSearch
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.warm_start import WarmStart

STEPS, DRIFT_AT = 420, 170


@pytest.fixture
def warms(monkeypatch: pytest.MonkeyPatch) -> list[WarmStart | None]:
    """What each search of the job could begin with; the tuner "cold" does not."""
    given: list[WarmStart | None] = []

    def study_of(chosen: OnlineOptions) -> StudyFactory:
        def make(problems: Problems, warm: WarmStart | None, _: int) -> Study:
            given.append(warm)
            use = None if chosen.tuner == "cold" else warm
            return Study(problems, OurSearch(problems, seed=0, warm=use), num_pairs=chosen.num_pairs)

        return make

    monkeypatch.setattr(job_of_threads, "study_of", study_of)
    return given


def drifting(
    slower: float, *, communication: float = 1.0, tuner: str = "warm", started: tuple[SiteSetting, ...] = ()
) -> Job:
    """A job whose computation and communication take longer from a step on."""
    job = Job(options=options(watch_steps=8, tuner=tuner, timeout_s=20.0), started=started)
    for route in job.routes:
        original = route.run

        def run(route: object = route, original: Callable[[], object] = original) -> object:
            is_late = route.step + 1 >= DRIFT_AT
            route.alone_s = 0.05 * (slower if is_late else 1.0)
            route.delay = lambda step: communication if is_late else 1.0
            return original()

        route.run = run
    return job


def searched(job: Job) -> int:
    """Settings that the last search measured."""
    return sum(entry.step.kind is StepKind.SEARCH for entry in job.leader.study.entries)


def test_a_job_that_drifted_begins_with_what_its_earlier_search_measured(warms: list[WarmStart | None]) -> None:
    counts, took_s = {}, {}
    for tuner in ("cold", "warm"):
        job = drifting(1.0, communication=1.5, tuner=tuner)
        job.run(STEPS)
        assert job.plans[0][-1][0] == SwitchState.WATCH
        assert not job.meeting.mismatches
        counts[tuner], took_s[tuner] = searched(job), job.routes[0].record.duration_s
    assert took_s["warm"] == took_s["cold"]
    first, again = warms[-2:]
    assert first is None
    (held,) = again.earlier
    assert sum(len(done) for done in held.runs.values()) >= 6
    assert held.best not in (None, held.problem.default)
    assert counts["warm"] < counts["cold"], "the wire is slower for all settings alike: what was best still is"


def test_what_no_longer_holds_is_refused_by_what_is_measured_now(warms: list[WarmStart | None]) -> None:
    """After the drift few channels are best: the computation became much longer, and channels slow it."""
    job = drifting(8.0)
    job.run(STEPS)
    assert warms[-1].earlier[0].best is not None
    assert job.plans[0][-1][0] == SwitchState.WATCH
    now = job.routes[0].record.duration_s / 3
    alone = 0.05 * 8.0
    assert now <= alone * (1 + 0.03 * 4) * (1 + 1e-9), "as good as untouched, which has two channels each"


def test_saved_settings_join_the_first_probes_of_a_search_that_comes_all_the_same(
    warms: list[WarmStart | None], caplog: pytest.LogCaptureFixture
) -> None:
    first = drifting(1.0)
    first.run(DRIFT_AT)
    found = first.members[0].settings
    assert found
    job = drifting(1.3, started=found)
    job.run(STEPS)
    (held,) = warms[-1].earlier
    assert not held.runs
    assert held.best == (found[0].config, found[-1].config)
    assert {tuple(entry.step.assignments.values()) for entry in job.leader.study.entries[:2]} >= {(held.best,)}
    site = found[0].site
    foreign = SiteSetting(replace(site, call=replace(site.call, num_bytes=12_345)), found[0].config)
    with caplog.at_level(logging.WARNING):
        other = Job(options=options(), started=(*found, foreign))
        other.run(40)
    assert "searching instead" in caplog.text
    assert warms[-1].earlier[0].best == held.best, "what it has of the job's sites is still a first probe"


def test_a_journal_of_before_is_not_replayed_after_a_drift(tmp_path: Path, warms: list[WarmStart | None]) -> None:
    path = tmp_path / "journal.jsonl"
    first = Job(options=options(tuner="cold", timeout_s=20.0), journals=(JournalFile(path), None))
    first.run(200)
    job = drifting(1.3, tuner="cold", started=first.members[0].settings)
    job.journals = (JournalFile(path), None)
    job.run(DRIFT_AT + 150)
    states = [state for state, _ in job.plans[0]]
    assert states.count("search") > 3, "the journal's verdict is of the job before it drifted"


def test_what_was_measured_before_a_freeze_is_not_lost(warms: list[WarmStart | None]) -> None:
    job = Job(options=options())
    original = job.routes[1].run

    def run() -> object:
        record = original()
        if 40 <= job.routes[1].step < 60:
            job.routes[1].record = type(record)(duration_s=record.duration_s, calls=record.calls[:-1])
        return record

    job.routes[1].run = run
    job.run(260)
    states = [state for state, _ in job.plans[0]]
    assert "frozen" in states
    assert states[-1] == SwitchState.WATCH
    assert warms[0] is None
    assert warms[-1].earlier[0].runs
    assert best_layer_s() * 0.99 < job.routes[0].record.duration_s / 3
