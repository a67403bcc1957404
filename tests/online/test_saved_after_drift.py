"""What `save` writes of a job that was tuned, and is tuned again or switched off when it ends."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from job_of_threads import Job
from test_online_loop import options

from lagom_overlap.collective import ConfigTable
from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.export.saved import SavedSettings, read_saved
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.routes.base import TableCursor
from lagom_overlap.online.tuner import OnlineTuner

pytestmark = pytest.mark.torch

DRIFT_AT = 170


def drifting(*, is_deaf: bool = False, started: tuple[SiteSetting, ...] = ()) -> Job:
    """A job whose steps become longer; `is_deaf`: from then on, whatever is set, it runs as if untouched."""
    job = Job(options=options(timeout_s=20.0), started=started)
    for route in job.routes:
        original = route.run

        def run(route: object = route, original: object = original) -> object:
            is_late = route.step + 1 >= DRIFT_AT
            route.alone_s = 0.065 if is_late else 0.05
            in_force = route.in_force
            if is_late and is_deaf:
                route.in_force = TableCursor(ConfigTable({}), route.communicator)
            record = original()
            route.in_force = in_force
            return record

        route.run = run
    return job


def run_until(job: Job, state: SwitchState, *, most: int = 400) -> None:
    """Steps until rank 0 is in a state."""
    for _ in range(most):
        job.run(1)
        if job.members[0].plan.state is state:
            return
    pytest.fail(f"never at {state}")


def saved_by(job: Job, path: Path, rank: int = 0) -> SavedSettings | None:
    """What the rank's tuner writes; None if it has nothing to save."""
    tuner = OnlineTuner.__new__(OnlineTuner)
    tuner._member, tuner._rank, tuner._world_size = job.members[rank], rank, 2
    tuner._route, tuner._engine, tuner._adapters = SimpleNamespace(name="simulated"), "simulated", ()
    return read_saved(path) if tuner.save(path) and rank == 0 else None


@pytest.fixture
def tuned() -> tuple[Job, tuple[SiteSetting, ...]]:
    """A job that adopted settings, and is searched again after a drift."""
    job = drifting()
    job.run(DRIFT_AT)
    assert job.members[0].plan.state is SwitchState.WATCH
    adopted = job.members[0].settings
    assert adopted
    run_until(job, SwitchState.SEARCH)
    return job, adopted


def test_a_job_that_ends_while_it_is_tuned_again_saves_what_it_had_adopted(
    tuned: tuple[Job, tuple[SiteSetting, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, adopted = tuned
    job.run(10)  # a trial is set, which nobody has judged
    assert job.members[0].plan.state is SwitchState.SEARCH
    saved = saved_by(job, tmp_path / "lagom.json")
    assert saved is not None
    assert (saved.is_adopted, saved.settings) == (True, adopted)
    assert saved.verdict.startswith("new settings save ")
    assert "; a new search was under way, at 'search' (" in saved.verdict
    assert caplog.text.count("saving the settings adopted before: a new search was under way") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert saved_by(job, tmp_path / "other.json", rank=1) is None
    assert not caplog.records, "rank 0 says it"
    assert not (tmp_path / "other.json").exists()


def test_a_job_that_was_switched_off_later_still_saves_what_it_had_adopted(
    tuned: tuple[Job, tuple[SiteSetting, ...]], tmp_path: Path
) -> None:
    job, adopted = tuned
    job.members[1].stop("frozen by the job")
    run_until(job, SwitchState.OFF, most=20)
    saved = saved_by(job, tmp_path / "lagom.json")
    assert saved is not None
    assert saved.settings == adopted
    assert saved.verdict.endswith("; later online tuning was 'off' (rank 1: frozen by the job)")


def test_a_later_verdict_for_the_default_overturns_what_was_adopted(tmp_path: Path) -> None:
    job = drifting(is_deaf=True)
    job.run(DRIFT_AT)
    assert job.members[0].adopted is not None
    run_until(job, SwitchState.SEARCH)
    run_until(job, SwitchState.WATCH)
    saved = saved_by(job, tmp_path / "lagom.json")
    assert saved is not None
    assert (saved.is_adopted, saved.settings) == (False, ())
    assert saved.verdict.startswith("nothing was changed")
    assert [member.adopted for member in job.members] == [None, None]


def test_settings_of_an_earlier_job_are_not_saved_again_while_they_are_in_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = drifting()
    first.run(DRIFT_AT)
    job = drifting(started=first.members[0].settings)
    run_until(job, SwitchState.WATCH)
    assert saved_by(job, tmp_path / "lagom.json") is not None
    run_until(job, SwitchState.SEARCH)
    assert saved_by(job, tmp_path / "again.json") is None
    assert caplog.text.count("nothing to save: online tuning is at 'search'") == 1
    caplog.clear()
    assert saved_by(job, tmp_path / "again.json", rank=1) is None
    assert not caplog.records, "rank 0 says it"
