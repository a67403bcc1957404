"""One table of every search on every family of groups, the curve of `ours` in a long job, and what a decision takes.

    python benchmarks/search_tables.py --seed 9301,9302,9303 --groups 5 \
        --surface overlap_surface_nvidia_shown.csv --iterations noise_iterations_shown.csv \
        > benchmarks/results/search_tables_DATE.md

The families are those of `search_quality.py`; with the two files also other people's surfaces, replayed under their
own noise (`measured_replay.py`). Nothing may have been chosen on the seeds that are reported. Ctrl-C ends it with the
table of what was run.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median, quantiles, stdev

from lagom_overlap.record import utc_now
from measured_choices import read_choices, read_noise
from measured_replay import JUDGED, replay
from measured_rows import report_named
from search_quality import CURVE, GENERATORS, Run, Task, all_runs, count, make_tasks, numbers

NOISE = 0.02
NUM_COMMS = (1, 4, 8)
ANYTIME = "ours_anytime"
TUNERS = {
    "ours": "`ours`",
    ANYTIME: "`ours`, long job",
    "lagom": "Lagom",
    "autoccl": "AutoCCL, from its sources",
    "static_cap": "Liger's cap of 3 channels",
    "threads_only": "Libra: threads only",
    "random_12": "random, 12 drawn",
    "default": "the default",
}
"""Tuners as the rows name them. The spaces of the drawn groups list no threads, so Libra has nothing to choose."""
CURVE_AT = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, CURVE)


def regret(runs: Sequence[Run]) -> str:
    """The median over the seeds of the mean regret, and the standard error over all groups, in percent."""
    by_seed = {seed: [run.regret for run in runs if run.seed == seed] for seed in {run.seed for run in runs}}
    centre = median(fmean(values) for values in by_seed.values())
    every = [run.regret for run in runs]
    error = stdev(every) / sqrt(len(every)) if len(every) > 1 else 0.0
    return f"{100 * centre:.2f} ± {100 * error:.2f}"


def after(run: Run, num_measurements: int) -> float:
    """The regret of what a search would recommend after so many measurements; what it ended with once it is over."""
    return run.curve[min(num_measurements, len(run.curve)) - 1]


def family(name: str, runs: Sequence[Run]) -> Iterator[str]:
    """A family's tables."""
    cells = {
        (tuner, num): [run for run in runs if (run.tuner, run.num_comms) == (tuner, num)]
        for tuner in TUNERS
        for num in NUM_COMMS
    }
    num_groups = len({(run.seed, run.index) for run in runs})
    yield from ("", f"## {name}: {num_groups} groups for each number of collectives", "")
    yield "| search | regret, 1 | 4 | 8 collectives, % | measurements | worse than the default, % of groups |"
    yield "|---|---|---|---|---|---|"
    for tuner, words in TUNERS.items():
        of_tuner = [cells[tuner, num] for num in NUM_COMMS]
        if not all(of_tuner):
            continue
        asked = " / ".join(f"{fmean(run.num_measurements for run in cell):.1f}" for cell in of_tuner)
        worse = " / ".join(f"{100 * fmean(run.worse_than_default for run in cell):.0f}" for cell in of_tuner)
        yield f"| {words} | {' | '.join(map(regret, of_tuner))} | {asked} | {worse} |"
    long = [cells[ANYTIME, num] for num in NUM_COMMS]
    if all(long):
        yield from ("", "Regret of `ours` after so many measurements of a long job, 1 / 4 / 8 collectives, %:", "")
        yield f"| measurements | {' | '.join(map(str, CURVE_AT))} |"
        yield f"|---|{'---|' * len(CURVE_AT)}"
        for num, cell in zip(NUM_COMMS, long, strict=True):
            values = (f"{100 * fmean(after(run, at) for run in cell):.2f}" for at in CURVE_AT)
            yield f"| {num} collectives | {' | '.join(values)} |"


def decisions(runs: Sequence[Run]) -> Iterator[str]:
    """What a decision of `ours` takes in the search of a short job."""
    yield from ("", "## CPU time of a decision of `ours`, a group of 8 collectives", "")
    yield "From an answer to the next question, one thread of the machine named above; the machine was shared."
    yield from ("", "| family | median, ms | 90th percentile, ms | decisions |", "|---|---|---|---|")
    for name in GENERATORS:
        of_family = [run for run in runs if (run.generator, run.tuner, run.num_comms) == (name, "ours", NUM_COMMS[-1])]
        taken_s = [taken for run in of_family for taken in run.decisions_s]
        if len(taken_s) > 1:
            p90 = quantiles(taken_s, n=10, method="inclusive")[-1]
            yield f"| {name} | {1000 * median(taken_s):.0f} | {1000 * p90:.0f} | {len(taken_s)} |"


def surfaces(rows: Iterable[dict[str, object]]) -> Iterator[str]:
    """Other people's surfaces: a search alone, and followed by the verdict that a user's job gets."""
    yield from ("", "## Other people's surfaces", "")
    yield "One collective. *Judged*: after the verdict of online tuning, without which nothing is adopted in a job."
    yield from ("", "| choice | search | regret, % | iterations | worse than the default beyond the null test, % |")
    yield "|---|---|---|---|---|"
    for row in rows:
        name = str(row["tuner"])
        words = TUNERS.get(name.removesuffix(JUDGED), name.removesuffix(JUDGED)) + (", judged" * name.endswith(JUDGED))
        figures = [float(str(row[key])) for key in ("mean_regret", "mean_iterations", "worse_beyond_null_share")]
        what = f"{row['kind']} ({row['num_choices']})"
        yield f"| {what} | {words} | {100 * figures[0]:.2f} | {figures[1]:.0f} | {100 * figures[2]:.1f} |"


def document(runs: Sequence[Run], replayed: Iterable[dict[str, object]], words: Iterable[str]) -> Iterator[str]:
    """The file, line by line."""
    yield from ("# Every search on every family of groups", "")
    yield from words
    for name in GENERATORS:
        of_family = [run for run in runs if run.generator == name]
        if of_family:
            yield from family(name, of_family)
    yield from decisions(runs)
    rows = list(replayed)
    if rows:
        yield from surfaces(rows)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits with 2 on a bad one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=count, default=5, help="groups per seed and number of collectives")
    parser.add_argument("--seed", type=numbers(int, 0), required=True, help="seeds of groups, by comma")
    parser.add_argument("--generator", default=",".join(GENERATORS), help="whose groups, by comma")
    parser.add_argument("--workers", type=count, default=1, help="processes")
    parser.add_argument("--surface", type=Path, help="a measured surface (CSV), with --iterations")
    parser.add_argument("--iterations", type=Path, help="raw lists of iterations (CSV), with --surface")
    parser.add_argument("--searches", type=count, default=3, help="searches of each choice of the surface")
    args = parser.parse_args(argv)
    if (args.surface is None) != (args.iterations is None):
        parser.error("--surface and --iterations belong together")
    args.generator = args.generator.split(",")
    if strange := [name for name in args.generator if name not in GENERATORS]:
        parser.error(f"unknown generator {strange[0]!r}; allowed: {', '.join(GENERATORS)}")
    args.noise, args.num_comms, args.tuners = [NOISE], list(NUM_COMMS), list(TUNERS)
    return args


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """The work, seed by seed, so that what an interruption leaves is whole seeds and groups."""
    return sorted(make_tasks(args), key=lambda task: (task.indices, args.seed.index(task.seed)))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the file."""
    args = parse_arguments(argv)
    runs: list[Run] = []
    replayed: list[dict[str, object]] = []
    ended = "The run was interrupted: what is missing was not run."
    with contextlib.suppress(KeyboardInterrupt):
        for run in all_runs(tasks_of(args), args.workers):
            runs.append(run)
        if args.surface is not None:
            (choices, unused), (noise, bad) = read_choices(args.surface), read_noise(args.iterations)
            report_named(args.surface, unused, num_judged=len(choices))
            report_named(args.iterations, bad, num_judged=1)
            replayed = replay(choices, noise, args.searches, num_workers=args.workers)
        ended = ""
    seeds = ", ".join(map(str, args.seed))
    words = [
        f"Written by `python benchmarks/search_tables.py`, {utc_now()[:10]}; seeds {seeds}: none chosen on them.",
        f"Noise {100 * NOISE:g} %. Groups are drawn, times simulated: **nothing here was measured on a GPU of ours**.",
        "Regret is the noise-free makespan of what a search recommends over the oracle's: the median over the seeds of",
        "each seed's mean, with the standard error over all groups. Searches run alone, without guard and verdict.",
        *([ended] if ended else []),
    ]
    print("\n".join(document(runs, replayed, words)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
