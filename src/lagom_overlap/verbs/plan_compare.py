"""`lagom compare --planners`: several planners on one problem, judged by one simulator."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.registry import check_planner_name, planner_names
from lagom_overlap.planners.simulated import simulated, simulation_of
from lagom_overlap.results.compare_planners import ComparePlannersResult, PlannerRow
from lagom_overlap.verbs.plan import own_order, planned
from lagom_overlap.verbs.plan_problem import PlanInput


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
) -> ComparePlannersResult:
    """One row per planner, in the order given; `seed` overrides the job's.

    Ctrl-C ends it with the planners that were done; the one that was at it had less time than they and is left out.

    Raises:
        KeyboardInterrupt: if the user ends it before one planner is done.
        LagomError: if a planner does not exist or none of them finds a plan.
    """
    check_planners(planners)
    given = replace(given, problem=replace(given.problem, whole=None))  # others plan one step, which all are judged by
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
    return ComparePlannersResult(
        job=given.name,
        baseline=own_order(given),
        simulation=simulation_of(given.problem),
        rows=tuple(rows),
        times=given.times,
        interrupted=interrupted,
        notes=() if given.times is None else given.notes,
    )


def _row(given: PlanInput, planner: str) -> PlannerRow:
    try:
        plan = planned(given, planner)
    except JobError as error:  # its plan does not fit the memory limit, another's may
        before = simulated(given.problem, given.issued)
        return PlannerRow(planner=planner, before_s=before.makespan_s, failure=str(error))
    if plan.interrupted:
        raise KeyboardInterrupt
    return PlannerRow(
        planner=planner,
        before_s=plan.before.makespan_s,
        after_s=plan.after.makespan_s,
        lower_bound_s=plan.plan.lower_bound_s,
        exposed_comm_s=plan.after.exposed_s,
        peak_memory_bytes=plan.after.peak_bytes,
        solve_s=plan.solve_s,
    )
