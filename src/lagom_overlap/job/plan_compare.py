"""`lagom compare --planners`: several planners on one problem, judged by one simulator."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from lagom_overlap.errors import JobError
from lagom_overlap.job.build import check_planner_name, planner_names
from lagom_overlap.job.plan import planned
from lagom_overlap.job.plan_problem import PlanInput
from lagom_overlap.plan.predict import predict
from lagom_overlap.report.plan_model import PlannerRow, TimesJson


class PlannersJson(msgspec.Struct, frozen=True, kw_only=True):
    """What `lagom compare --planners --json` prints; `partial` (else absent) says that the user ended it."""

    job: str
    rows: list[PlannerRow]
    times: TimesJson | msgspec.UnsetType = msgspec.UNSET
    partial: bool | msgspec.UnsetType = msgspec.UNSET


def check_planners(planners: Sequence[str]) -> None:
    """Refuses what cannot be compared; reading the step may take minutes of measuring.

    Raises:
        LagomError: if there are no planners, one is named twice, or one does not exist.
    """
    if not planners:
        raise JobError(f"no planner to compare; allowed: {', '.join(planner_names())}")
    if len(set(planners)) != len(planners):
        raise JobError(f"a planner is named twice: {', '.join(planners)}")
    for name in planners:
        check_planner_name(name)


def compare_planners(
    given: PlanInput, planners: Sequence[str], *, seed: int | None = None, note: Callable[[str], None] = lambda _: None
) -> PlannersJson:
    """One row per planner, in the order given; `seed` overrides the job's.

    Ctrl-C ends it with the planners that were done; the one that was at it had less time than they and is left out.

    Raises:
        KeyboardInterrupt: if the user ends it before one planner is done.
        LagomError: if a planner does not exist or none of them finds a plan.
    """
    check_planners(planners)
    if seed is not None:
        given = replace(given, problem=replace(given.problem, seed=seed))
    rows: list[PlannerRow] = []
    interrupted = False
    for name in planners:
        note(f"planning: {name}")
        try:
            rows.append(_row(given, name))
        except KeyboardInterrupt:
            if not rows:
                raise
            interrupted = True
            break
    if all(row.failure is not None for row in rows):
        raise JobError(f"no planner found a plan; {rows[0].planner}: {rows[0].failure}")
    return PlannersJson(
        job=given.name,
        rows=rows,
        times=msgspec.UNSET if given.times is None else given.times,
        partial=True if interrupted else msgspec.UNSET,
    )


def _row(given: PlanInput, planner: str) -> PlannerRow:
    try:
        found = planned(given, planner)
    except JobError as error:  # its plan does not fit the memory limit, another's may
        before = predict(given.problem, given.issued)
        return PlannerRow(planner=planner, before_s=before.overlap.makespan_s, failure=str(error))
    if found.interrupted:
        raise KeyboardInterrupt
    return PlannerRow(
        planner=planner,
        before_s=found.before.overlap.makespan_s,
        after_s=found.after.overlap.makespan_s,
        lower_bound_s=found.plan.lower_bound_s,
        exposed_comm_s=found.after.overlap.exposed_s,
        peak_memory_bytes=found.after.peak_bytes,
        solve_s=found.solve_s,
    )
