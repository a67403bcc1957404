"""Tuners side by side on real runs: default, best fixed setting, AutoCCL, Lagom, ours, paired; and the whole surface.

    python benchmarks/paired_tuners.py examples/overlaps/gloo_*.toml [--pairs 15] [--surface 3] [--out DIR] [--json]

Per job file, on one set of rank processes:

1. The surface: every assignment of the job's space, in `--surface` shuffled passes, to DIR/JOB/measurements.jsonl: a
   bundle that `lagom compare JOB --backend recorded --bundle DIR/JOB` replays, with any tuner, without these ranks.
2. The best fixed setting: of those that give every collective the same, the one with the lowest median on the surface.
3. Each tuner searches, unguarded, as published.
4. Every result, the default and the baselines run in `--pairs` shuffled rounds; ratios within a round.
5. The same tuners on the recorded surface: regret over its best assignment (lowest median of its passes).

Two ranks on two cores: figures are of this machine and its load during these minutes.
"""

import argparse
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from lagom_overlap.backends.base import Assignment, Backend, BackendRequest, GroupProblem, Measurement
from lagom_overlap.backends.bundle import header_line
from lagom_overlap.job.build import groups_of, open_backend, request_of
from lagom_overlap.job.compare import IterationTimes, measure_rounds, search
from lagom_overlap.job.run_folder import Journal
from lagom_overlap.job.spec import JobSpec, read_job
from lagom_overlap.record import create_folder, describe_machine, package_versions, utc_now
from lagom_overlap.tune.base import Problems
from lagom_overlap.tune.journal import Entry, Step, StepKind
from lagom_overlap.tune.verdict import PairedRatio
from lagom_overlap.units import MS

TUNERS: Final = ("autoccl", "lagom", "just_enough")
MAX_SURFACE: Final = 600
"""Assignments; a larger space is refused."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """An arm: what it measured to get there, medians over the rounds, ratio of the default to it."""

    arm: str
    num_measurements: int
    setting: str
    makespan_s: float
    comp_s: float
    comm_s: float
    over_default: float
    q25: float
    q75: float
    num_wins: int
    regret_on_surface: float | None


class JobTable(msgspec.Struct, frozen=True, kw_only=True):
    """One job's arms; `oracle_over_default` is the best of the surface, `loads` the load average before and after."""

    job: str
    backend: str
    num_assignments: int
    num_passes: int
    num_pairs: int
    oracle_over_default: float
    loads: tuple[float, float]
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Surface:
    """Makespans of every assignment, one per pass; a pass that failed is missing."""

    makespans_s: Mapping[Assignment, Sequence[float]]

    def median_s(self, assignment: Assignment) -> float:
        """Of its passes."""
        return median(self.makespans_s[assignment])

    def best(self) -> Assignment:
        """The lowest median."""
        return min(self.makespans_s, key=self.median_s)

    def best_fixed(self) -> Assignment:
        """The best of those that give every collective the same setting."""
        return min((found for found in self.makespans_s if len(set(found)) == 1), key=self.median_s)


def assignments_of(problem: GroupProblem) -> list[Assignment]:
    """The product of the spaces, each with the collective's default, and the baselines."""
    offered = (dict.fromkeys((*space, default)) for space, default in zip(problem.spaces, problem.default, strict=True))
    found = list(dict.fromkeys((*product(*offered), *problem.baselines.values())))
    if len(found) > MAX_SURFACE:
        raise SystemExit(f"{problem.group.name}: {len(found)} assignments, the surface takes at most {MAX_SURFACE}")
    return found


def measure_surface(backend: Backend, problem: GroupProblem, num_passes: int, journal: Journal, seed: int) -> Surface:
    """Every assignment `num_passes` times, each pass in another order; the journal keeps each."""
    order, rng, numbers = assignments_of(problem), random.Random(seed), count()
    group = problem.group
    makespans_s: dict[Assignment, list[float]] = {assignment: [] for assignment in order}
    for _ in range(num_passes):
        rng.shuffle(order)
        for assignment in order:
            outcome = backend.measure(group, assignment)
            step = Step(number=next(numbers), kind=StepKind.SEARCH, assignments={group.name: assignment})
            journal.keep(Entry(step=step, outcomes={group.name: outcome}))
            if isinstance(outcome, Measurement):
                makespans_s[assignment].append(outcome.makespan_s)
    return Surface({assignment: times for assignment, times in makespans_s.items() if times})


def start_journal(
    folder: Path, spec: JobSpec, request: BackendRequest, backend: Backend, problems: Problems
) -> Journal:
    """The bundle's file with its header."""
    create_folder(folder)
    journal = Journal(folder / "measurements.jsonl", problems)
    header = header_line(
        request.job_fingerprint,
        spec.job.backend,
        problems,
        description=backend.description,
        notes=("A whole surface, measured by benchmarks/paired_tuners.py.",),
        limits=request.limits,
    )
    journal.start(header)
    return journal


def words(assignment: Assignment) -> str:
    """Channels x KiB per collective."""
    if len(set(assignment)) == 1:
        assignment = assignment[:1]
    parts = []
    for config in assignment:
        chunk = "whole" if config.chunk_bytes is None else f"{config.chunk_bytes >> 10}K"
        protocol = f" {config.protocol.value}" if config.protocol else ""
        parts.append("untouched" if config.num_channels is None else f"{config.num_channels}x{chunk}{protocol}")
    return ", ".join(parts)


def replayed(spec: JobSpec, folder: Path, name: str, surface: Surface) -> float:
    """The regret, over the surface's best, of what a tuner ends with when it sees nothing but the recording."""
    groups = groups_of(spec)
    backend = open_backend(spec, "recorded", request_of(spec, groups, bundle=folder))
    try:
        problems = tuple(backend.problem(group) for group in groups)
        study = search(spec, name, problems, backend, spec.tune.seed)
    finally:
        backend.close()
    (found,) = study.recommended.values()
    return surface.median_s(found) / surface.median_s(surface.best()) - 1


def row_of(arm: str, runs: Sequence[IterationTimes], default: Sequence[IterationTimes], **given: object) -> Row:
    """Medians and paired ratios."""
    ratio = PairedRatio.of([run.makespan_s for run in default], [run.makespan_s for run in runs])
    fields = {
        "arm": arm,
        "makespan_s": median(run.makespan_s for run in runs),
        "comp_s": median(run.comp_s for run in runs),
        "comm_s": median(run.comm_s for run in runs),
        "over_default": ratio.median_ratio,
        "q25": ratio.q25,
        "q75": ratio.q75,
        "num_wins": ratio.num_wins,
        **given,
    }
    return msgspec.convert(fields, Row)


def run_job(path: Path, out: Path, num_pairs: int, num_passes: int) -> JobTable:
    """All five steps for one job of one group."""
    spec = read_job(path)
    groups = groups_of(spec)
    if len(groups) != 1:
        raise SystemExit(f"{path}: {len(groups)} groups; this benchmark takes jobs of one")
    before = os.getloadavg()[0]
    request = request_of(spec, groups)
    backend = open_backend(spec, spec.job.backend, request)
    folder = out / spec.job.name
    try:
        problems = tuple(backend.problem(group) for group in groups)
        (problem,) = problems
        name = problem.group.name
        journal = start_journal(folder, spec, request, backend, problems)
        print(f"{spec.job.name}: surface", file=sys.stderr)
        surface = measure_surface(backend, problem, num_passes, journal, spec.tune.seed)
        arms = {"default": problem.default, **problem.baselines, "best fixed": surface.best_fixed()}
        used = dict.fromkeys(arms, 0)
        used["best fixed"] = num_passes * sum(len(set(found)) == 1 for found in surface.makespans_s)
        for tuner in TUNERS:
            print(f"{spec.job.name}: {tuner}", file=sys.stderr)
            study = search(spec, tuner, problems, backend, spec.tune.seed)
            arms[tuner], used[tuner] = study.recommended[name], study.num_measurements
        arms["surface's best"] = surface.best()
        used["surface's best"] = num_passes * len(surface.makespans_s)
        print(f"{spec.job.name}: {num_pairs} rounds", file=sys.stderr)
        times = measure_rounds(backend, problems, {a: {name: s} for a, s in arms.items()}, num_pairs, spec.tune.seed)
    finally:
        backend.close()
    rows = [
        row_of(
            arm,
            runs,
            times["default"],
            num_measurements=used[arm],
            setting=words(arms[arm]),
            regret_on_surface=replayed(spec, folder, arm, surface) if arm in TUNERS else None,
        )
        for arm, runs in times.items()
    ]
    return JobTable(
        job=spec.job.name,
        backend=spec.job.backend,
        num_assignments=len(surface.makespans_s),
        num_passes=num_passes,
        num_pairs=num_pairs,
        oracle_over_default=surface.median_s(problem.default) / surface.median_s(surface.best()),
        loads=(before, os.getloadavg()[0]),
        rows=rows,
    )


def print_table(table: JobTable) -> None:
    """Markdown."""
    before, after = table.loads
    print(f"\n### {table.job} ({table.backend})\n")
    print(
        f"{table.num_assignments} assignments in {table.num_passes} passes, {table.num_pairs} rounds; load "
        f"{before:.1f} before, {after:.1f} after; on the surface the default takes {table.oracle_over_default:.2f} "
        "times the best.\n"
    )
    print("| arm | setting | meas. | Z ms | Y ms | X ms | default / this [quartiles] | wins | regret, replayed |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in table.rows:
        times = " | ".join(f"{time_s / MS:.1f}" for time_s in (row.makespan_s, row.comp_s, row.comm_s))
        regret = "" if row.regret_on_surface is None else f"{100 * row.regret_on_surface:.1f} %"
        print(
            f"| {row.arm} | {row.setting} | {row.num_measurements} | {times} | "
            f"{row.over_default:.3f} [{row.q25:.3f}, {row.q75:.3f}] | {row.num_wins}/{table.num_pairs} | {regret} |"
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--surface", type=int, default=3, help="passes over the whole space")
    parser.add_argument("--out", type=Path, default=Path("lagom-runs/paired-tuners"), help="new folder for the bundles")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    tables = []
    for job in arguments.jobs:
        tables.append(run_job(job, arguments.out, arguments.pairs, arguments.surface))
        if not arguments.json:
            print_table(tables[-1])
    if arguments.json:
        found = {"date": utc_now(), "machine": describe_machine(), "versions": package_versions(), "jobs": tables}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())


if __name__ == "__main__":
    main()
