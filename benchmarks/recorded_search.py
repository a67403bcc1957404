"""Tuners on recorded surfaces, many searches each: what they end with where the noise is a real machine's.

    python benchmarks/recorded_search.py examples/overlaps/gloo_fsdp.toml examples/overlaps/workers_moe.toml \
        --surfaces benchmarks/results/surfaces --searches 100 --tuners ours,lagom [--noise 1,0.3] [--json]

With two CSV files of the shared measured data instead, other people's surfaces are replayed (`measured_replay.py`):

    python benchmarks/recorded_search.py overlap_surface_nvidia_shown.csv noise_iterations_shown.csv --searches 50

Each job has a surface of its name (`paired_tuners.py` measures them). `recorded_world.py` makes a world of it, with a
smoothed truth and the recorded residuals as noise; `--noise` scales these. Every search of every tuner meets another
stretch of the residuals, the same for all tuners. Regret is the true makespan of what it ends with over the best of the
surface, minus one; *worse* and *kept* are the shares that end more than 0.5 % above the default, and with the default.
Tuners are guarded as `lagom tune` guards them; `NAME+bare` is as `lagom compare` runs them. Searches end at the job's
budget of measurements.

A surface of two noisy passes says only so much. *found* is an honest look at that: the best by the first half of the
measurements, smoothed, against the default, on the second half, smoothed, and the other way round: the mean share by
which it is faster. Where that is about nothing, so is what any tuner could gain.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean

from rich.console import Console
from rich.table import Table

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.tuners.registry import check_tuner_name
from measured_choices import read_choices, read_noise
from measured_replay import print_rows, replay
from measured_rows import exit_code_of, report_named
from recorded_world import Pass, World, read_surface
from search_quality import WORSE, percentile_95

TUNERS = ("default", "fixed_max", "random", "autoccl", "lagom", "ours")
BARE = "+bare"
MOST_NOISE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tuner on one surface at one noise."""

    surface: str
    noise: float
    tuner: str
    mean_regret: float
    p95_regret: float
    mean_measurements: float
    worse_share: float
    kept_share: float


@dataclass(frozen=True, slots=True)
class Surface:
    """A job, its group's problem, and what was recorded of it."""

    spec: JobSpec
    problem: GroupProblem
    seen: Pass

    @classmethod
    def read(cls, job: Path, surfaces: Path) -> "Surface":
        """The surface in the folder of the job's name."""
        spec = read_job(job)
        groups = Job(spec).groups
        if len(groups) != 1:
            raise JobError(f"{job}: {len(groups)} groups; this benchmark takes jobs of one")
        bundle = surfaces / spec.job.name
        backend = Job(spec).open("recorded", Job(spec).request_for(groups, bundle=bundle))
        try:
            problem = backend.problem(groups[0])
        finally:
            backend.close()
        return cls(spec, problem, read_surface(bundle, problem))

    def found(self) -> float:
        """By how much the best of either half is faster than the default on the other."""
        halves = [World(self.seen.half(second)).makespans_s for second in (False, True)]
        default = self.problem.default
        gains = []
        for mine, other in (halves, halves[::-1]):
            both = [arm for arm in mine if arm in other]
            best = min(both, key=mine.__getitem__)
            gains.append(other[default] / other[best] - 1)
        return fmean(gains)


def search(surface: Surface, world: World, name: str, number: int, *, in_order: bool) -> tuple[float, int, bool, bool]:
    """Regret, measurements, whether worse than the default, whether it is the default."""
    spec, key, default = surface.spec, surface.problem.group.name, surface.problem.default
    tuner = make_tuner(
        name.removesuffix(BARE), (surface.problem,), seed=number, options={}, guarded=not name.endswith(BARE)
    )
    rows, num_told = world.rows(Random(f"rows/{spec.job.name}/{number}"), in_order=in_order), 0
    while num_told < spec.tune.budget.measurements and (trial := tuner.ask()) is not None:
        tuner.tell(trial, {key: world.measure(trial.assignments[key], next(rows))})
        num_told += 1
    found, true_s = tuner.recommend()[key], world.makespans_s
    return true_s[found] / true_s[world.best] - 1, num_told, true_s[found] > WORSE * true_s[default], found == default


def rows_of(surface: Surface, tuners: Sequence[str], num_searches: int, scale: float, *, in_order: bool) -> list[Row]:
    """One row per tuner."""
    world, rows = World(surface.seen, scale=scale), []
    for name in tuners:
        runs = [search(surface, world, name, number, in_order=in_order) for number in range(num_searches)]
        regrets, nums, worse, kept = zip(*runs, strict=True)
        rows.append(
            Row(
                surface=surface.spec.job.name,
                noise=world.noise,
                tuner=name,
                mean_regret=fmean(regrets),
                p95_regret=percentile_95(list(regrets)) if len(regrets) > 1 else regrets[0],
                mean_measurements=fmean(nums),
                worse_share=fmean(worse),
                kept_share=fmean(kept),
            )
        )
    return rows


def print_table(rows: Sequence[Row], founds: dict[str, float]) -> None:
    """For people, in percent."""
    table = Table(title="searches on recorded surfaces, percent")
    for column in ("surface (found)", "noise", "tuner", "mean regret", "p95", "measured", "worse", "kept"):
        table.add_column(column)
    for row in rows:
        shares = (row.mean_regret, row.p95_regret)
        table.add_row(
            f"{row.surface} ({100 * founds[row.surface]:.1f})",
            f"{100 * row.noise:.1f}",
            row.tuner,
            *(f"{100 * share:.1f}" for share in shares),
            f"{row.mean_measurements:.1f}",
            *(f"{100 * share:.0f}" for share in (row.worse_share, row.kept_share)),
        )
    Console(width=120).print(table)


def _replayed(args: argparse.Namespace) -> int:
    """Other people's surfaces; what was left out of the files is named with the reason, what is wrong at once."""
    (choices, unused), (noise, bad) = read_choices(args.jobs[0]), read_noise(args.jobs[1])
    named = [(path, one) for path, rows in zip(args.jobs, (unused, bad), strict=True) for one in rows]
    report_named(args.jobs[0], unused, num_judged=len(choices))
    report_named(args.jobs[1], bad, num_judged=1)
    replayed = replay(choices, noise, args.searches, num_workers=args.workers)
    if args.json:
        left_out = [{"file": str(path), "line": one.line, "why": one.why} for path, one in named]
        print(json.dumps({"rows": replayed, "left_out": left_out}, indent=1))
        return 0
    print_rows(replayed)
    for why, count in Counter(one.why for _, one in named if not one.is_wrong).most_common():
        path, first = next((path, one.line) for path, one in named if one.why == why)
        print(f"left out ({count}): {why} [first: {path}:{first}]")
    if num_wrong := sum(one.is_wrong for _, one in named):
        print(f"bad rows ({num_wrong}): named on standard error")
    return 0


def _check_replayed(args: argparse.Namespace) -> None:
    """Refuses what has no meaning with other people's surfaces."""
    if len(args.jobs) != 2:
        raise JobError(f"{len(args.jobs)} CSV files; a surface and its raw noise are two")
    for flag in ("surfaces", "tuners", "noise", "independent"):
        if getattr(args, flag) not in (None, False):
            raise JobError(f"--{flag} is for job files: two CSV files are replayed by all tuners, with their own noise")


def _tuners_and_scales(args: argparse.Namespace) -> tuple[list[str], list[float]]:
    """The tuners and scales of noise that job files are searched with."""
    for path in args.jobs:
        if path.suffix == ".csv":
            raise JobError(f"{str(path)!r} is a CSV file among job files; give job files, or two CSV files")
    if args.surfaces is None:
        raise JobError("--surfaces is needed with job files: a folder with one bundle per job's name")
    tuners = list(TUNERS) if args.tuners is None else args.tuners.split(",")
    for name in tuners:
        check_tuner_name(name.removesuffix(BARE))
    scales = []
    for text in ("1" if args.noise is None else args.noise).split(","):
        try:
            scale = float(text)
        except ValueError:
            scale = -1.0
        if not 0 <= scale <= MOST_NOISE:
            raise JobError(f"--noise has {text!r}, must be numbers from 0 to {MOST_NOISE:g}")
        scales.append(scale)
    return tuners, scales


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and prints its rows; exit code 2 for files of which nothing can be replayed."""
    return exit_code_of("recorded_search", lambda: _main(argv), LagomError)


def _main(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", nargs="+", type=Path, help="job files; or a measured surface and its raw noise, as CSV")
    parser.add_argument("--surfaces", type=Path, help="folder with one bundle per job's name")
    parser.add_argument("--searches", type=int, default=100, help="per tuner and surface")
    parser.add_argument("--tuners", help=f"names by comma (default: {','.join(TUNERS)}); job files only")
    parser.add_argument("--noise", help="scales of the recorded noise, by comma (default: 1); job files only")
    parser.add_argument(
        "--independent", action="store_true", help="draw residuals one by one, not in their order; job files only"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    if args.searches < 1:
        raise JobError(f"--searches is {args.searches}, must be at least 1")
    if args.workers < 1:
        raise JobError(f"--workers is {args.workers}, must be at least 1")
    if all(path.suffix == ".csv" for path in args.jobs):
        _check_replayed(args)
        return _replayed(args)
    tuners, scales = _tuners_and_scales(args)
    surfaces = [Surface.read(job, args.surfaces) for job in args.jobs]
    rows: list[Row] = []
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        given = [(surface, scale) for surface in surfaces for scale in scales]
        waiting = [pool.submit(rows_of, s, tuners, args.searches, x, in_order=not args.independent) for s, x in given]
        for (surface, scale), done in zip(given, waiting, strict=True):
            rows += done.result()
            sys.stderr.write(f"{surface.spec.job.name}: noise times {scale:g} done\n")
        founds = dict(zip((s.spec.job.name for s in surfaces), pool.map(Surface.found, surfaces), strict=True))
    if args.json:
        print(json.dumps({"found": founds, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print_table(rows, founds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
