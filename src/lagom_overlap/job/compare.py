"""`lagom compare`: several tuners search the same job; what they end with is measured again side by side."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from lagom_overlap.backends.base import Assignment, Backend, BackendRequest, Measurement
from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.job.build import check_tuner_name, entry_point_names, groups_of, make_tuner, open_backend, request_of
from lagom_overlap.job.result import CompareJson
from lagom_overlap.job.spec import JobSpec
from lagom_overlap.report.model import CompareRow
from lagom_overlap.tune.base import Problems
from lagom_overlap.tune.study import Study

DEFAULT_TUNERS = ("default", "fixed_min", "fixed_max", "static_cap", "autoccl", "lagom", "just_enough")


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Sums over groups, each times its count: makespan, computation, communication."""

    makespan_s: float
    comp_s: float
    comm_s: float


Note = Callable[[str], None]
"""Called with one line before each stage."""


def run_compare(
    spec: JobSpec,
    tuners: Sequence[str],
    *,
    backend_name: str | None = None,
    seed: int | None = None,
    bundle: Path | None = None,
    note: Note = lambda _: None,
) -> CompareJson:
    """One row per tuner, in the order given.

    Tuners run as published, unguarded. Their searches are counted; then every result, and the default, is measured in
    `pairs` shuffled rounds: `makespan_s` is the median, `speedup_over_default` the median of the paired ratios.

    Ctrl-C ends it with what there is: the tuners whose search was done, times from the rounds that were complete.

    Raises:
        KeyboardInterrupt: if the user ends it before one search is done.
        LagomError: for a user's mistake or a machine that failed.
    """
    if not tuners:
        raise JobError(f"no tuner to compare; allowed: {', '.join(entry_point_names('lagom_overlap.tuners'))}")
    if len(set(tuners)) != len(tuners):
        raise JobError(f"a tuner is named twice: {', '.join(tuners)}")
    for name in tuners:
        check_tuner_name(name)
    seed = spec.tune.seed if seed is None else seed
    groups = groups_of(spec)
    request: BackendRequest = request_of(spec, groups, seed=seed, bundle=bundle)
    backend = open_backend(spec, backend_name or spec.job.backend, request)
    studies: dict[str, Study] = {}
    times: dict[str, list[IterationTimes]] = {}
    interrupted = False
    try:
        problems = tuple(backend.problem(group) for group in groups)
        for name in tuners:
            note(f"search: {name}")
            studies[name] = search(spec, name, problems, backend, seed)
        arms = {name: dict(study.recommended) for name, study in studies.items()}
        reference = {problem.group.name: problem.default for problem in problems}
        note("measuring the results side by side")
        for row in measured_rounds(backend, problems, {"": reference, **arms}, spec.tune.pairs, seed):
            for name, held in row.items():
                times.setdefault(name, []).append(held)
    except KeyboardInterrupt:
        if not studies:
            raise
        interrupted = True
    finally:
        backend.close()
    rows = _rows(studies, times)
    return CompareJson(job=spec.job.name, rows=rows, partial=True if interrupted else msgspec.UNSET)


def _rows(studies: Mapping[str, Study], times: Mapping[str, Sequence[IterationTimes]]) -> list[CompareRow]:
    """One row per finished search; without a complete round only its measurements are known."""
    makespans = {name: [run.makespan_s for run in runs] for name, runs in times.items()}
    best_s = min((median(makespans[name]) for name in studies if name in makespans), default=0.0)
    rows = []
    for name, study in studies.items():
        runs = makespans.get(name)
        pairs = zip(makespans[""], runs, strict=True) if runs else ()
        rows.append(
            CompareRow(
                tuner=name,
                num_measurements=study.num_measurements,
                makespan_s=median(runs) if runs else None,
                speedup_over_default=median(d / z for d, z in pairs) if runs else None,
                regret_over_best=median(runs) / best_s - 1 if runs else None,
            )
        )
    return rows


def _study(spec: JobSpec, name: str, problems: Problems, seed: int, *, guarded: bool) -> Study:
    options = spec.tune.options if name == spec.tune.tuner else {}
    tuner = make_tuner(name, problems, seed=seed, options=options, guarded=guarded)
    return Study(problems, tuner, seed=seed, num_pairs=3, max_measurements=spec.tune.budget.measurements)


def search(
    spec: JobSpec, name: str, problems: Problems, backend: Backend, seed: int, *, guarded: bool = False
) -> Study:
    """A tuner's search over all groups within the job's budget, as published or under the guard; no verdict."""
    study = _study(spec, name, problems, seed, guarded=guarded)
    study.skip_verdict()
    groups = {problem.group.name: problem.group for problem in problems}
    deadline = time.monotonic() + spec.tune.budget.seconds
    while (step := study.next()) is not None:
        if time.monotonic() > deadline:
            study.stop_search()
            continue
        study.report(step, {name: backend.measure(groups[name], a) for name, a in step.assignments.items()})
    return study


def measure_rounds(
    backend: Backend,
    problems: Problems,
    arms: Mapping[str, Mapping[str, Assignment]],
    num_rounds: int,
    seed: int,
) -> dict[str, list[IterationTimes]]:
    """The iteration's times of every arm in every round, arms shuffled within a round.

    Raises:
        BackendError: if an arm cannot run.
    """
    rounds = list(measured_rounds(backend, problems, arms, num_rounds, seed))
    return {name: [held[name] for held in rounds] for name in arms}


def measured_rounds(
    backend: Backend,
    problems: Problems,
    arms: Mapping[str, Mapping[str, Assignment]],
    num_rounds: int,
    seed: int,
) -> Iterator[dict[str, IterationTimes]]:
    """The same, a round at a time as it is complete."""
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
