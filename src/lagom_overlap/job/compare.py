"""`lagom compare`: several tuners search the same job; what they end with is measured again side by side."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from lagom_overlap.backends.base import Assignment, Backend, BackendRequest, Measurement
from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.job.build import entry_point_names, groups_of, make_tuner, open_backend, request_of
from lagom_overlap.job.result import CompareJson
from lagom_overlap.job.spec import JobSpec
from lagom_overlap.report.model import CompareRow
from lagom_overlap.tune.base import Problems
from lagom_overlap.tune.study import Study

DEFAULT_TUNERS = ("default", "fixed_min", "fixed_max", "static_cap", "autoccl", "lagom")

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

    Raises:
        LagomError: for a user's mistake or a machine that failed.
    """
    if not tuners:
        raise JobError(f"no tuner to compare; allowed: {', '.join(entry_point_names('lagom_overlap.tuners'))}")
    if len(set(tuners)) != len(tuners):
        raise JobError(f"a tuner is named twice: {', '.join(tuners)}")
    seed = spec.tune.seed if seed is None else seed
    groups = groups_of(spec)
    request: BackendRequest = request_of(spec, groups, seed=seed, bundle=bundle)
    backend = open_backend(spec, backend_name or spec.job.backend, request)
    try:
        problems = tuple(backend.problem(group) for group in groups)
        studies = {name: _study(spec, name, problems, seed) for name in tuners}
        for name, study in studies.items():
            note(f"search: {name}")
            _search(study, backend, problems, spec.tune.budget.seconds)
        arms = {name: dict(study.recommended) for name, study in studies.items()}
        reference = {problem.group.name: problem.default for problem in problems}
        note("measuring the results side by side")
        makespans = _rounds(backend, problems, {"": reference, **arms}, spec.tune.pairs, seed)
    finally:
        backend.close()
    best_s = min(median(makespans[name]) for name in tuners)
    rows = [
        CompareRow(
            tuner=name,
            num_measurements=studies[name].num_measurements,
            makespan_s=median(makespans[name]),
            speedup_over_default=median(d / z for d, z in zip(makespans[""], makespans[name], strict=True)),
            regret_over_best=median(makespans[name]) / best_s - 1,
        )
        for name in tuners
    ]
    return CompareJson(job=spec.job.name, rows=rows)


def _study(spec: JobSpec, name: str, problems: Problems, seed: int) -> Study:
    options = spec.tune.options if name == spec.tune.tuner else {}
    tuner = make_tuner(name, problems, seed=seed, options=options, guarded=False)
    return Study(problems, tuner, seed=seed, num_pairs=3, max_measurements=spec.tune.budget.measurements)


def _search(study: Study, backend: Backend, problems: Problems, max_seconds: float) -> None:
    study.skip_verdict()
    groups = {problem.group.name: problem.group for problem in problems}
    deadline = time.monotonic() + max_seconds
    while (step := study.next()) is not None:
        if time.monotonic() > deadline:
            study.stop_search()
            continue
        study.report(step, {name: backend.measure(groups[name], a) for name, a in step.assignments.items()})


def _rounds(
    backend: Backend,
    problems: Problems,
    arms: Mapping[str, Mapping[str, Assignment]],
    num_rounds: int,
    seed: int,
) -> dict[str, list[float]]:
    """The iteration's makespan of every arm in every round, arms shuffled within a round."""
    rng = random.Random(seed)
    order = list(arms)
    makespans: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(num_rounds):
        rng.shuffle(order)
        for name in order:
            makespans[name].append(_iteration_s(backend, problems, arms[name], name))
    return makespans


def _iteration_s(backend: Backend, problems: Problems, assignments: Mapping[str, Assignment], name: str) -> float:
    total = 0.0
    for problem in problems:
        outcome = backend.measure(problem.group, assignments[problem.group.name])
        if not isinstance(outcome, Measurement):
            raise BackendError(f"what {name or 'default'!r} ended with cannot run: {outcome.reason}")
        total += problem.group.count * outcome.makespan_s
    return total
