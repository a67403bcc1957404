"""`lagom compare`: several tuners search the same job; what they end with is measured again side by side."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log, pi, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Final

from lagom_overlap.backends.base import Backend
from lagom_overlap.backends.recorded import Recorded, Visit
from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.interrupts import received
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.registry import check_planner_name, planner_names
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.whole_step import WholeStep
from lagom_overlap.planners.simulated import simulated, simulation_of
from lagom_overlap.registry import entry_point_names
from lagom_overlap.results.compare import ComparePlannersResult, CompareResult, CompareRow, PlannerRow
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.tuners.registry import (
    OURS,
    check_takes_warm_start,
    check_tuner_name,
    search_measurements,
    takes_warm_start,
)
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.verdict import compared
from lagom_overlap.tuners.warm_start import WarmStart
from lagom_overlap.verbs.plan import own_order, planned
from lagom_overlap.verbs.plan_problem import PlanInput
from lagom_overlap.verbs.warm_start import check_run, warm_start_of

CONFIDENCE_SIGMAS: Final = 1.96
"""95 % of a normal distribution lie within this many standard deviations."""
DEFAULT_TUNERS = ("default", "fixed_min", "fixed_max", "static_cap", "autoccl", "lagom", OURS)
REPLAYED: Final = (
    "Ratios are of recorded values, pass by pass or round by round, not of runs side by side; their intervals rest on "
    "how far all recorded repeats scatter. The searches saw the same values, so luck flatters what was chosen by it."
)
COLD: Final = "Every search began cold: the job's tune.warm_start is not for comparisons, --warm-start is."


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Sums over groups, each times its count: makespan, computation, communication."""

    makespan_s: float
    comp_s: float
    comm_s: float


Note = Callable[[str], None]
"""Called with one line before each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What `lagom compare` was asked to do; None leaves the job's own word, but searches begin cold unless told."""

    job: Job
    tuners: Sequence[str]
    backend: str | None = None
    seed: int | None = None
    bundle: Path | None = None
    warm_start: str | None = None

    @property
    def backend_name(self) -> str:
        """The backend that will run."""
        return self.job.backend_name(self.backend)

    @property
    def effective_seed(self) -> int:
        """The seed of the tuners, the noise and the shuffling."""
        return self.job.spec.tune.seed if self.seed is None else self.seed

    def check(self) -> None:
        """Refuses what a user can get wrong, before anything is started.

        Raises:
            LagomError: in words.
        """
        if not self.tuners:
            raise JobError(f"no tuner to compare; allowed: {', '.join(entry_point_names('lagom_overlap.tuners'))}")
        if len(set(self.tuners)) != len(self.tuners):
            raise JobError(f"a tuner is named twice: {', '.join(self.tuners)}")
        for name in self.tuners:
            check_tuner_name(name)
        if self.warm_start is not None:
            check_run(self.warm_start)
            check_takes_warm_start(*self.tuners)


def run_compare(request: CompareRequest, note: Note = lambda _: None) -> CompareResult:
    """One row per tuner, in the order given.

    Tuners run as published, unguarded. Their searches are counted; then every result, and the default, is measured in
    `pairs` shuffled rounds: `makespan_s` is the median, `speedup_over_default` the median of the paired ratios. On a
    recording there are no rounds: see `makespans_of`. A warm start is for the tuners that take one.

    Ctrl-C ends it with what there is: the tuners whose search was done, times from the rounds that were complete.

    Raises:
        KeyboardInterrupt: if the user ends it before one search is done.
        LagomError: for a user's mistake or a machine that failed.
    """
    request.check()
    job, spec, seed, source = request.job, request.job.spec, request.effective_seed, request.warm_start
    job.check_fits(request.backend_name)
    groups, step = job.groups, WholeStep.of(job, request.backend_name)
    backend = job.open(request.backend_name, job.request(seed=seed, bundle=request.bundle))
    notes = [*job.notes(request.backend_name, backend), *(step.notes if step else ())]
    studies: dict[str, Study] = {}
    contenders = Contenders()
    interrupted = False
    try:
        problems = tuple(backend.problem(group) for group in groups)
        warm = None if source is None else warm_start_of(source, problems)
        if warm is not None:
            begun = ", ".join(name for name in request.tuners if takes_warm_start(name))
            notes.append(f"The search of {begun} began with {warm.source}; every other began cold.")
        elif spec.tune.warm_start is not None:
            notes.append(COLD)
        for name in request.tuners:
            note(f"search: {name}")
            studies[name] = search(spec, name, problems, backend, seed, warm=warm if takes_warm_start(name) else None)
        arms = {"": {p.group.name: p.default for p in problems}}
        arms |= {name: dict(study.recommended) for name, study in studies.items()}
        if isinstance(backend, Recorded):
            notes.append(REPLAYED)
            contenders.replay(backend, problems, arms)
        else:
            note("measuring the results side by side")
            for number, row in enumerate(measured_rounds(backend, problems, arms, spec.tune.pairs, seed)):
                contenders.add_round(number, row)
    except (KeyboardInterrupt, BackendError) as error:
        if not studies or (isinstance(error, BackendError) and not received()):
            raise
        interrupted = True
    finally:
        backend.close()
    return CompareResult(
        job=spec.job.name,
        backend=request.backend_name,
        seed=seed,
        rows=_rows(studies, contenders, _steps_s(step, problems, studies)),
        step_s=step.untouched_s if step else None,
        notes=tuple(notes),
        interrupted=interrupted,
    )


def _steps_s(step: WholeStep | None, problems: Problems, studies: Mapping[str, Study]) -> dict[str, float | None]:
    """The whole step under what each finished search ended with; empty where the step has no price."""
    return {} if step is None else {name: step.seconds(problems, study.recommended) for name, study in studies.items()}


@dataclass(slots=True)
class Contenders:
    """Makespans of every arm (the default is "") by visit: a round, or a visit of the recording.

    `sigma` is the noise of a recorded makespan's logarithm; None for what was measured now, or where it is not known.
    """

    makespans_s: dict[str, dict[Visit, float]] = field(default_factory=dict)
    sigma: float | None = None
    is_replayed: bool = False

    def add_round(self, number: int, times: Mapping[str, IterationTimes]) -> None:
        """A complete round."""
        for name, round_s in times.items():
            self.makespans_s.setdefault(name, {})["round", number] = round_s.makespan_s

    def replay(self, backend: Recorded, problems: Problems, arms: Mapping[str, Mapping[str, Assignment]]) -> None:
        """Everything that was recorded of every arm."""
        self.makespans_s = {name: makespans_of(backend, problems, own, name) for name, own in arms.items()}
        self.sigma, self.is_replayed = noise_of(backend, problems), True

    def over_default(self, name: str) -> tuple[float | None, tuple[float, float] | None]:
        """The median of the ratios within a visit, and its 95 % interval; None where there is none."""
        default, own = self.makespans_s[""], self.makespans_s[name]
        common = [visit for visit in own if visit in default]
        if not common:
            return None, None
        pairs = [default[visit] for visit in common], [own[visit] for visit in common]
        ratio = compared(*pairs)
        if self.is_replayed:
            if pairs[0] == pairs[1]:
                return 1.0, (1.0, 1.0)
            return ratio.ratio, None if self.sigma is None else interval_of(ratio.ratio, len(common), self.sigma)
        return ratio.ratio, (ratio.low, ratio.high) if isfinite(ratio.high) else None


def _rows(
    studies: Mapping[str, Study], found: Contenders, steps_s: Mapping[str, float | None]
) -> tuple[CompareRow, ...]:
    """One row per finished search; without a complete round only its measurements and its step are known."""
    makespans = {name: median(times.values()) for name, times in found.makespans_s.items()}
    best_s = min((makespans[name] for name in studies if name in makespans), default=0.0)
    rows = []
    for name, study in studies.items():
        makespan_s = makespans.get(name)
        ratio, interval = (None, None) if makespan_s is None else found.over_default(name)
        rows.append(
            CompareRow(
                tuner=name,
                num_measurements=study.num_measurements,
                makespan_s=makespan_s,
                speedup_over_default=ratio,
                speedup_interval=interval,
                regret_over_best=None if makespan_s is None else makespan_s / best_s - 1,
                step_s=steps_s.get(name),
            )
        )
    return tuple(rows)


def search(
    spec: JobSpec,
    name: str,
    problems: Problems,
    backend: Backend,
    seed: int,
    *,
    guarded: bool = False,
    warm: WarmStart | None = None,
) -> Study:
    """A tuner's search over all groups within the job's budget, as published or under the guard; no verdict."""
    options = spec.tune.options if name == spec.tune.tuner else {}
    tuner = make_tuner(name, problems, seed=seed, options=options, guarded=guarded, warm=warm)
    max_measurements = search_measurements(spec.tune.budget.measurements, name)
    study = Study(problems, tuner, seed=seed, num_pairs=3, max_measurements=max_measurements)
    study.skip_verdict()
    groups = {problem.group.name: problem.group for problem in problems}
    deadline = time.monotonic() + spec.tune.budget.seconds
    while (step := study.next()) is not None:
        if time.monotonic() > deadline:
            study.stop_search()
            continue
        study.report(step, {name: backend.measure(groups[name], a) for name, a in step.assignments.items()})
    return study


def measured_rounds(
    backend: Backend,
    problems: Problems,
    arms: Mapping[str, Mapping[str, Assignment]],
    num_rounds: int,
    seed: int,
) -> Iterator[dict[str, IterationTimes]]:
    """The iteration's times of every arm, arms shuffled within a round, a round at a time as it is complete.

    Raises:
        BackendError: if an arm cannot run.
    """
    rng = random.Random(seed)
    order = list(arms)
    for _ in range(num_rounds):
        rng.shuffle(order)
        yield {name: _iteration_times(backend, problems, arms[name], name) for name in order}


def _iteration_times(
    backend: Backend, problems: Problems, assignments: Mapping[str, Assignment], name: str
) -> IterationTimes:
    makespan_s = comp_s = comm_s = 0.0
    for problem in problems:
        outcome = backend.measure(problem.group, assignments[problem.group.name])
        if not isinstance(outcome, Measurement):
            raise BackendError(f"what {name or 'default'!r} ended with cannot run: {outcome.reason}")
        makespan_s += problem.group.count * outcome.makespan_s
        comp_s += problem.group.count * outcome.comp_s
        comm_s += problem.group.count * outcome.total_comm_s
    return IterationTimes(makespan_s, comp_s, comm_s)


def makespans_of(
    backend: Recorded, problems: Problems, assignments: Mapping[str, Assignment], name: str
) -> dict[Visit, float]:
    """The iteration's makespan (s) in every visit that all groups have: a pass of the surface or a recorded round.

    A replay hands out an assignment's recorded values in turn. Rounds of such values would compare the first pass of
    one tuner with the second of another. So ratios are taken within a visit: a tuner that kept the default gets 1.

    Raises:
        BackendError: if there is none.
    """
    by_group = []
    for problem in problems:
        recorded = backend.visits(problem.group).get(assignments[problem.group.name], {})
        by_group.append({visit: run.makespan_s for visit, run in recorded.items() if isinstance(run, Measurement)})
    common = [visit for visit in by_group[0] if all(visit in makespans for makespans in by_group)]
    if not common:
        raise BackendError(f"what {name or 'default'!r} ended with is not in the recording")
    counts = [problem.group.count for problem in problems]
    return {
        visit: sum(count * makespans[visit] for count, makespans in zip(counts, by_group, strict=True))
        for visit in common
    }


def noise_of(backend: Recorded, problems: Problems) -> float | None:
    """Sigma of a makespan's logarithm from visit to visit; None if nothing was recorded twice.

    A few passes say little about one assignment, so the scatter of all assignments is pooled:

        sigma^2 = sum (ln z_ak - mean_k ln z_ak)^2 / sum (n_a - 1)    z_ak: makespan of assignment a in its k-th visit

    This assumes normal noise, equal in all assignments. The search saw these values too, so luck flatters its choice.
    """
    squares, num_free = 0.0, 0
    for problem in problems:
        for recorded in backend.visits(problem.group).values():
            runs = [run for run in recorded.values() if isinstance(run, Measurement) and run.makespan_s > 0]
            if runs:
                logs = [log(run.makespan_s) for run in runs]
                squares += sum((each - fmean(logs)) ** 2 for each in logs)
                num_free += len(logs) - 1
    return sqrt(squares / num_free) if num_free else None


def interval_of(ratio: float, num_visits: int, sigma: float) -> tuple[float, float]:
    """The 95 % interval of the true ratio, given the median of `num_visits` ratios.

    The logarithm of the median lies within 1.96 sigma sqrt(2 v / n) of the true one; v is 1 for the mean of two and
    pi / 2, the asymptotic variance of a normal median, for more.
    """
    factor = 1.0 if num_visits <= 2 else pi / 2
    reach = exp(CONFIDENCE_SIGMAS * sigma * sqrt(2 * factor / num_visits))
    return ratio / reach, ratio * reach


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
