"""Tuners side by side on real runs: default, best fixed setting, AutoCCL, Lagom, ours, paired; and the whole surface.

    python benchmarks/paired_tuners.py examples/overlaps/gloo_*.toml [--pairs 15] [--surface 3] [--searches 3]
        [--guarded] [--tuners autoccl,lagom,ours] [--round-seconds 120] [--out DIR] [--json]

Per job file, on one set of rank processes:

1. The surface: every assignment of the job's space, in `--surface` shuffled passes, to DIR/JOB/measurements.jsonl: a
   bundle that `lagom compare JOB --backend recorded --bundle DIR/JOB` replays, with any tuner, without these ranks.
   With `--surface 0` only those that give every collective the same are measured, twice.
2. The best fixed setting: of those that give every collective the same, the one with the lowest median.
3. Each tuner searches `--searches` times with other seeds, unguarded as published, or `--guarded` as users run them.
   The first search of every tuner comes before the second of any.
4. Every distinct result, the default, the default once more (how far a setting is from itself: the noise of a ratio)
   and the baselines run in `--pairs` shuffled rounds; ratios within a round.
5. With a whole surface, the same tuners on the recording: regret over its best assignment (lowest median).

A job's table is written to DIR/JOB/table.json as soon as it is done. A lost rank is replaced and its measurement made
again; where a job fails for good, or the user ends it, its complete rounds make the table. Exit code 2 then.
Two ranks on two cores: figures are of this machine and its load during these minutes.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Final

from lagom_overlap.errors import BackendError, JobError, LagomError
from lagom_overlap.interrupts import held_back
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.record import (
    create_folder,
    write_private,
)
from lagom_overlap.tuners.problem import Assignment, GroupProblem
from lagom_overlap.tuners.registry import check_tuner_name
from lagom_overlap.verbs.compare import IterationTimes, measured_rounds, search
from paired_rows import JobTable, Row, TunerRow, encoded, print_table, row_of
from paired_surface import Sturdy, Surface, assignments_of, check_size, is_fixed, measure_surface, start_journal

TUNERS: Final = ("autoccl", "lagom", "ours")
FIXED_PASSES: Final = 2
"""Passes over the settings that are the same everywhere, where the whole surface is not asked for."""
LEAST_ROUNDS: Final = 3
"""Complete rounds that make a table."""
EXIT_INTERRUPTED: Final = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is asked for, the same for every job; rounds end after `round_s`."""

    num_pairs: int
    num_passes: int
    num_searches: int
    guarded: bool
    tuners: tuple[str, ...]
    round_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """What one search ended with."""

    tuner: str
    assignment: Assignment
    num_measurements: int


def surface_of(spec: JobSpec, backend: Sturdy, problem: GroupProblem, folder: Path, settings: Settings) -> Surface:
    """The whole surface, or the settings that are the same everywhere; the folder becomes a bundle."""
    order, whole = assignments_of(problem), settings.num_passes > 0
    if whole:
        check_size(problem)
    else:
        order = [assignment for assignment in order if is_fixed(assignment)]
    note = f"{'A whole surface' if whole else 'The fixed settings'}, measured by benchmarks/paired_tuners.py."
    journal = start_journal(folder, spec, Job(spec).request_for((problem.group,)), backend, problem, note=note)
    passes = settings.num_passes or FIXED_PASSES
    return measure_surface(backend, problem, order, num_passes=passes, keep=journal.keep, seed=spec.tune.seed)


def searches_of(spec: JobSpec, backend: Sturdy, problem: GroupProblem, settings: Settings) -> Iterator[Found]:
    """Every tuner's searches, each round of them before the next."""
    for number in range(settings.num_searches):
        for tuner in settings.tuners:
            print(f"{spec.job.name}: {tuner}, search {number + 1}", file=sys.stderr)
            study = search(spec, tuner, (problem,), backend, spec.tune.seed + number, guarded=settings.guarded)
            yield Found(tuner, study.recommended[problem.group.name], study.num_measurements)


def arms_of(problem: GroupProblem, surface: Surface, found: Sequence[Found], *, whole: bool) -> dict[str, Assignment]:
    """The contenders by name: what is always run, then the tuners' results that are not among them, numbered."""
    arms = {"default": problem.default, "default again": problem.default, **problem.baselines}
    arms["best fixed"] = surface.best_fixed()
    if whole:
        arms["surface's best"] = surface.best()
    for each in found:
        if each.assignment not in arms.values():
            num = sum(arm.split(" #")[0] == each.tuner for arm in arms)
            arms[f"{each.tuner} #{num + 1}" if num else each.tuner] = each.assignment
    return arms


def replayed(spec: JobSpec, folder: Path, tuner: str, surface: Surface, settings: Settings) -> float:
    """The regret, over the surface's best, of what a tuner ends with when it sees nothing but the recording."""
    job = Job(spec)
    groups = job.groups
    backend = job.open("recorded", job.request(bundle=folder))
    try:
        problems = tuple(backend.problem(group) for group in groups)
        study = search(spec, tuner, problems, backend, spec.tune.seed, guarded=settings.guarded)
    finally:
        backend.close()
    (found,) = study.recommended.values()
    return surface.median_s(found) / surface.median_s(surface.best()) - 1


def tuner_row(
    tuner: str, found: Sequence[Found], arms: dict[str, Assignment], rows: Mapping[str, Row], regret: float | None
) -> TunerRow:
    """A tuner's searches, each by the arm that ran its result."""
    name_of = {assignment: name for name, assignment in reversed(arms.items())}
    own = [each for each in found if each.tuner == tuner]
    ended = [rows[name_of[each.assignment]] for each in own]
    ratios = [row.over_default for row in ended]
    return TunerRow(
        tuner=tuner,
        num_searches=len(own),
        num_kept_default=sum(row.arm == "default" for row in ended),
        median_over_default=median(ratios),
        worst_over_default=min(ratios),
        best_over_default=max(ratios),
        mean_measurements=fmean(each.num_measurements for each in own),
        comp_share=median(row.comp_s / row.makespan_s for row in ended),
        comm_share=median(row.comm_s / row.makespan_s for row in ended),
        regret_on_surface=regret,
        arms=[row.arm for row in ended],
    )


def rounds_of(
    spec: JobSpec, backend: Sturdy, problem: GroupProblem, arms: Mapping[str, Assignment], settings: Settings
) -> tuple[list[dict[str, IterationTimes]], str]:
    """The complete rounds, and what ended them early, in words, or nothing."""
    rounds: list[dict[str, IterationTimes]] = []
    by_group = {arm: {problem.group.name: assignment} for arm, assignment in arms.items()}
    deadline = time.monotonic() + settings.round_s
    try:
        for times in measured_rounds(backend, (problem,), by_group, settings.num_pairs, spec.tune.seed):
            rounds.append(times)
            if time.monotonic() > deadline and len(rounds) >= LEAST_ROUNDS:
                return rounds, "time" if len(rounds) < settings.num_pairs else ""
    except (BackendError, KeyboardInterrupt) as error:
        if len(rounds) < LEAST_ROUNDS:
            raise
        return rounds, "the user" if isinstance(error, KeyboardInterrupt) else str(error)
    return rounds, ""


def run_job(spec: JobSpec, folder: Path, settings: Settings) -> JobTable:
    """All five steps for one job of one group.

    Raises:
        LagomError: if it fails before there are `LEAST_ROUNDS` complete rounds.
    """
    job = Job(spec)
    groups = job.groups
    if len(groups) != 1:
        raise JobError(f"{spec.job.name}: {len(groups)} groups; this benchmark takes jobs of one")
    before, whole = os.getloadavg()[0], settings.num_passes > 0
    backend = Sturdy(lambda: job.open(spec.job.backend, job.request()))
    try:
        problem = backend.problem(groups[0])
        print(f"{spec.job.name}: {'surface' if whole else 'fixed settings'}", file=sys.stderr)
        surface = surface_of(spec, backend, problem, folder, settings)
        found = list(searches_of(spec, backend, problem, settings))
        arms = arms_of(problem, surface, found, whole=whole)
        print(f"{spec.job.name}: {settings.num_pairs} rounds of {len(arms)} arms", file=sys.stderr)
        rounds, ended_by = rounds_of(spec, backend, problem, arms, settings)
    finally:
        backend.close()
    default = [times["default"] for times in rounds]
    rows = {arm: row_of(arm, arms[arm], [times[arm] for times in rounds], default) for arm in arms}
    regrets = {name: replayed(spec, folder, name, surface, settings) if whole else None for name in settings.tuners}
    return JobTable(
        job=spec.job.name,
        backend=spec.job.backend,
        guarded=settings.guarded,
        num_assignments=len(surface.makespans_s),
        num_passes=settings.num_passes or FIXED_PASSES,
        num_pairs=len(rounds),
        num_lost_ranks=backend.num_lost,
        ended_by=ended_by,
        oracle_over_default=surface.median_s(problem.default) / surface.median_s(surface.best()),
        loads=(before, os.getloadavg()[0]),
        rows=list(rows.values()),
        tuners=[tuner_row(name, found, arms, rows, regrets[name]) for name in settings.tuners],
    )


def run_jobs(specs: Sequence[JobSpec], out: Path, settings: Settings, *, show: bool) -> tuple[list[JobTable], int]:
    """The tables of the jobs that could be measured, each written when it is done, and the exit code."""
    tables: list[JobTable] = []
    code = 0
    for spec in specs:
        folder = out / spec.job.name
        create_folder(folder)
        try:
            table = run_job(spec, folder, settings)
        except LagomError as error:
            print(f"{spec.job.name}: {error}", file=sys.stderr)
            code = 2
            continue
        except KeyboardInterrupt:
            print(f"{spec.job.name}: ended before its rounds", file=sys.stderr)
            return tables, EXIT_INTERRUPTED
        with held_back():
            tables.append(table)
            write_private(folder / "table.json", encoded([table]))
            if show:
                print_table(table)
        if table.ended_by == "the user":
            return tables, EXIT_INTERRUPTED
        code = 2 if table.ended_by not in ("", "time") else code
    return tables, code


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--surface", type=int, default=3, help="passes over the whole space; 0: fixed settings alone")
    parser.add_argument("--searches", type=int, default=1, help="searches of every tuner, each with another seed")
    parser.add_argument("--tuners", default=",".join(TUNERS), help="names by comma")
    parser.add_argument("--guarded", action="store_true", help="tuners under the guard, as lagom tune runs them")
    parser.add_argument("--round-seconds", type=float, default=3600.0, help="rounds of a job end after so long")
    parser.add_argument("--out", type=Path, default=Path("lagom-runs/paired-tuners"), help="new folder for the bundles")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    try:
        for name, value, least in (
            ("pairs", given.pairs, LEAST_ROUNDS),
            ("surface", given.surface, 0),
            ("searches", given.searches, 1),
        ):
            if value < least:
                raise JobError(f"--{name} is {value}, must be at least {least}")
        settings = Settings(
            num_pairs=given.pairs,
            num_passes=given.surface,
            num_searches=given.searches,
            guarded=given.guarded,
            tuners=tuple(given.tuners.split(",")),
            round_s=given.round_seconds,
        )
        for name in settings.tuners:
            check_tuner_name(name)
        specs = [read_job(path) for path in given.jobs]
        if len({spec.job.name for spec in specs}) < len(specs):
            raise JobError(f"two jobs have one name: {', '.join(spec.job.name for spec in specs)}")
        given.out.parent.mkdir(parents=True, exist_ok=True)
        create_folder(given.out)
        tables, code = run_jobs(specs, given.out, settings, show=not given.json)
    except LagomError as error:
        print(f"paired_tuners.py: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(encoded(tables).decode(), end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
