"""Which steps of a job are measured where the profiler times them, and what a job's own profiler costs it."""

import itertools
from functools import partial

import pytest
from job_of_threads import Job

from lagom_overlap.online.options import LEAST_WINDOW, OnlineOptions
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan


def plan(num_steps: int, first: int, apart: int) -> list[int]:
    made = WindowPlan(
        window=0, state=SwitchState.RECORD, reason="", num_steps=num_steps, first_measured=first, steps_apart=apart
    )
    return [step for step in range(num_steps) if made.measures(step)]


def test_measured_steps_are_apart_as_the_plan_says() -> None:
    assert plan(5, 1, 1) == [1, 2, 3]
    assert plan(5, 1, 2) == [1, 3]
    assert plan(LEAST_WINDOW, 1, 2) == [1], "the shortest window still measures"
    assert plan(25, 21, 2) == [21, 23]


@pytest.mark.parametrize("window_steps", [4, 5, 8])
def test_two_steps_in_a_row_are_never_profiled_and_the_job_settles_all_the_same(
    monkeypatch: pytest.MonkeyPatch, window_steps: int
) -> None:
    monkeypatch.setattr("job_of_threads.Leader", partial(Leader, steps_apart=2))
    job = Job(options=OnlineOptions(timeout_s=20.0, num_pairs=3, window_steps=window_steps, watch_steps=4))
    measured: list[bool] = []
    job.routes[1].begin_step = lambda *, is_measured: measured.append(is_measured)
    job.run(60 * window_steps)
    assert job.plans[0][-1][0] == SwitchState.WATCH
    assert job.members[1].settings
    assert sum(measured) >= 2 * 3 + 4, "two steps of each of three pairs, and some of the search"
    assert not any(this and following for this, following in itertools.pairwise(measured))


def test_a_profiler_that_the_job_makes_once_it_is_settled_costs_it_no_setting() -> None:
    """Times that mean nothing are no drift: they end neither the watch nor what was found."""
    job = Job(options=OnlineOptions(timeout_s=20.0, num_pairs=3, watch_steps=6))
    job.run(220)
    assert job.plans[0][-1][0] == SwitchState.WATCH
    settings = job.members[1].settings
    assert settings
    job.members[1]._why_not = lambda: "the job has a profiler of its own"
    job.run(300)
    assert {state for state, _ in job.plans[0][220:]} == {"watch"}
    assert job.members[0].settings == job.members[1].settings == settings
