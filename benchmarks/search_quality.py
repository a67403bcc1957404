"""How good and how cheap each tuner's search is, on random simulated groups whose best assignment is known.

    python benchmarks/search_quality.py --groups 200 --seed 1,2,3 --noise 0,0.02,0.05 --num-comms 1,2,4,8 --json

Regret is the noise-free makespan of what the tuner recommends over the oracle's, minus one (`overlap_generator.py` says
what the groups are). Tuners run as published, unguarded; `NAME+guard` is the same inside `Guarded`; `optuna_gp` and
`optuna_tpe` (pip install optuna) and `random` take as many measurements as their name says. A measurement is one told
trial; `--generator measured` takes the groups of `measured_generator.py`, `producers` those of `producer_generator.py`
(several by comma). A figure is the median over the seeds of each seed's mean or percentile.
*Right kind* is the share of collectives that
end with the algorithm and protocol of the oracle's assignment. The oracle is a multi-start coordinate search: a tuner
that beats it has a negative regret.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import entry_points
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean, median, quantiles
from time import process_time
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import measured_generator
import overlap_generator
import producer_generator
from lagom_overlap.tuners.base import Tuner
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.problem import Assignment
from measured_generator import MeasuredGroup
from overlap_generator import SPACE, SimulatedGroup

GENERATORS = {"formula": overlap_generator, "measured": measured_generator, "producers": producer_generator}
GUARD = "+guard"
GUARDED = ("lagom", "autoccl")
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "ours_anytime": ("ours", {"job_measurements": 5000}),
    "lagom_lr": ("lagom", {"step": "lr"}),
    "random_12": ("random", {"num_measurements": 12}),
    "random_40": ("random", {"num_measurements": 40}),
    "optuna_gp_10": ("optuna", {"method": "gp", "num_measurements": 10}),
    "optuna_gp_40": ("optuna", {"method": "gp", "num_measurements": 40}),
    "optuna_tpe_40": ("optuna", {"method": "tpe", "num_measurements": 40}),
}
"""Variants: name here -> (entry point, options)."""
OUTSIDE = {"optuna": "optuna_search:OptunaSearch"}
"""Tuners that are no part of the package; they run when they are named, not under `all`."""
EXHAUSTIVE_LIMIT = 2000
"""Assignments above which `exhaustive` is left out."""
WORSE = 1.005
"""Worse than default: a noise-free makespan more than 0.5 % above the default's."""
MAX_TRIALS = 10_000
CURVE = 48
"""Measurements after which the regret on the way is noted no more."""
GROUPS_PER_TASK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One tuner on one group."""

    tuner: str
    num_comms: int
    noise: float
    regret: float
    num_measurements: int
    worse_than_default: bool
    right_kind_share: float
    generator: str = "formula"
    seed: int = 0
    index: int = 0
    decisions_s: tuple[float, ...] = ()
    """CPU seconds of each answer to a measurement, the next question included."""
    curve: tuple[float, ...] = ()
    """The regret of what would be recommended after each measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Some groups with one number of collectives, every noise, every tuner: what a worker process does at once."""

    seed: int
    indices: tuple[int, ...]
    num_comms: int
    noises: tuple[float, ...]
    tuners: tuple[str, ...]
    generator: str = "formula"


def tuner_paths() -> dict[str, str]:
    """Import path by tuner name: the installed entry points, else the table in pyproject.toml next to this folder."""
    installed = {entry.name: entry.value for entry in entry_points(group="lagom_overlap.tuners")}
    if installed:
        return installed
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    table: dict[str, str] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["entry-points"][
        "lagom_overlap.tuners"
    ]
    return table


def all_tuners() -> list[str]:
    """The names that `--tuners` knows: every entry point, the variants, the guarded ones."""
    names = list(tuner_paths())
    variants = [name for name, (base, _) in OPTIONS.items() if base in (*names, *OUTSIDE)]
    return [*names, *variants, *(f"{name}{GUARD}" for name in GUARDED if name in names)]


def build_tuner(name: str, group: SimulatedGroup | MeasuredGroup, seed: int) -> Tuner:
    """The tuner of that name over one group."""
    problems = (group.problem,)
    if name.endswith(GUARD):
        return Guarded(build_tuner(name.removesuffix(GUARD), group, seed), problems)
    base, options = OPTIONS.get(name, (name, {}))
    module, _, attribute = (tuner_paths() | OUTSIDE)[base].partition(":")
    make: Callable[..., Tuner] = getattr(import_module(module), attribute)
    return make(problems, seed=seed, **options)


def run_tuner(
    name: str, group: SimulatedGroup | MeasuredGroup, oracle: tuple[Assignment, float], *, seed: int, noise: float
) -> Run:
    """Lets one tuner search one group to its end.

    Raises:
        RuntimeError: if it asks without end.
    """
    key = group.problem.group.name
    tuner, rng = build_tuner(name, group, seed), Random(f"noise/{key}/{noise}")
    num_measurements, decisions_s, curve, best_s = 0, [], [], oracle[1]
    trial = tuner.ask()
    while trial is not None:
        outcomes = {asked: group.measure(assignment, rng, noise) for asked, assignment in trial.assignments.items()}
        began_s = process_time()
        tuner.tell(trial, outcomes)
        trial = tuner.ask()
        decisions_s.append(process_time() - began_s)
        num_measurements += 1
        if num_measurements <= CURVE:
            curve.append(group.exact(tuner.recommend()[key]).makespan_s / best_s - 1)
        if num_measurements > MAX_TRIALS:
            raise RuntimeError(f"{name} asked for more than {MAX_TRIALS} trials on {key}")
    found, best = tuner.recommend()[key], oracle[0]
    makespan_s = group.exact(found).makespan_s
    kinds = [(a.algorithm, a.protocol) == (b.algorithm, b.protocol) for a, b in zip(found, best, strict=True)]
    return Run(
        tuner=name,
        num_comms=group.num_comms,
        noise=noise,
        regret=makespan_s / best_s - 1,
        num_measurements=num_measurements,
        worse_than_default=makespan_s > WORSE * group.exact(group.problem.default).makespan_s,
        right_kind_share=fmean(kinds),
        decisions_s=tuple(decisions_s),
        curve=tuple(curve),
    )


def do_task(task: Task) -> list[Run]:
    """Every run of a task."""
    runs = []
    for index in task.indices:
        group = GENERATORS[task.generator].draw_group(task.seed, index, task.num_comms)
        oracle = group.oracle()
        for noise in task.noises:
            for name in task.tuners:
                run = run_tuner(name, group, oracle, seed=index, noise=noise)
                runs.append(replace(run, generator=task.generator, seed=task.seed, index=index))
    return runs


def make_tasks(args: argparse.Namespace) -> list[Task]:
    """The work in pieces, the longest first; says what is left out."""
    tasks = []
    for num_comms, generator, seed in product(sorted(args.num_comms, reverse=True), args.generator, args.seed):
        tuners = list(args.tuners)
        if "exhaustive" in tuners and len(SPACE) ** num_comms > EXHAUSTIVE_LIMIT:
            tuners.remove("exhaustive")
            num_assignments = f"{len(SPACE)}^{num_comms}"
            sys.stderr.write(f"exhaustive is left out for {num_comms} collectives: {num_assignments} assignments\n")
        for start in range(0, args.groups, GROUPS_PER_TASK):
            tasks.append(
                Task(
                    seed=seed,
                    indices=tuple(range(start, min(start + GROUPS_PER_TASK, args.groups))),
                    num_comms=num_comms,
                    noises=tuple(args.noise),
                    tuners=tuple(tuners),
                    generator=generator,
                )
            )
    return tasks


def all_runs(tasks: list[Task], workers: int) -> Iterator[Run]:
    """The runs of all tasks, over `workers` processes, with a bar where stderr is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("search quality", total=len(tasks))
        if workers == 1:
            for task in tasks:
                yield from do_task(task)
                progress.advance(bar)
            return
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for done in as_completed([pool.submit(do_task, task) for task in tasks]):
                yield from done.result()
                progress.advance(bar)


def summarise(runs: Iterable[Run], order: list[str]) -> list[dict[str, object]]:
    """One row per (generator, collectives, noise, tuner): medians over the seeds; shares and regrets are fractions."""
    cells: dict[tuple[str, int, float, int], dict[int, list[Run]]] = {}
    for run in runs:
        cell = cells.setdefault((run.generator, run.num_comms, run.noise, order.index(run.tuner)), {})
        cell.setdefault(run.seed, []).append(run)
    rows: list[dict[str, object]] = []
    for (generator, num_comms, noise, place), by_seed in sorted(cells.items()):
        seeds = list(by_seed.values())
        rows.append(
            {
                "generator": generator,
                "tuner": order[place],
                "num_comms": num_comms,
                "noise": noise,
                "mean_regret": median(fmean(sorted(run.regret for run in cell)) for cell in seeds),
                "p95_regret": median(percentile_95([run.regret for run in cell]) for cell in seeds),
                "mean_measurements": median(fmean(run.num_measurements for run in cell) for cell in seeds),
                "worse_than_default_share": median(fmean(run.worse_than_default for run in cell) for cell in seeds),
                "right_kind_share": median(fmean(run.right_kind_share for run in cell) for cell in seeds),
            }
        )
    return rows


def percentile_95(values: list[float]) -> float:
    """The 95th percentile, linear between neighbours as numpy's default."""
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def print_table(rows: list[dict[str, object]]) -> None:
    """The rows for people, in percent."""
    table = Table(title="search quality, percent")
    for column in (
        "generator",
        "comms",
        "noise",
        "tuner",
        "mean regret",
        "p95 regret",
        "measured",
        "worse than default",
        "right kind",
    ):
        table.add_column(column, justify="left" if column == "tuner" else "right", no_wrap=column == "tuner")
    for row in rows:
        table.add_row(
            f"{row['generator']} ({GENERATORS[str(row['generator'])].FROZEN})",
            f"{row['num_comms']}",
            f"{row['noise']:g}",
            f"{row['tuner']}",
            f"{100 * float(str(row['mean_regret'])):.2f}",
            f"{100 * float(str(row['p95_regret'])):.1f}",
            f"{row['mean_measurements']:.1f}",
            f"{100 * float(str(row['worse_than_default_share'])):.0f}",
            f"{100 * float(str(row['right_kind_share'])):.0f}",
        )
    Console().print(table)


def numbers(kind: type[int] | type[float], least: float) -> Callable[[str], list[float]]:
    """The type of a flag that takes numbers by comma."""

    def number_list(text: str) -> list[float]:
        values = [kind(part) for part in text.split(",")]
        if any(value < least for value in values):
            raise argparse.ArgumentTypeError(f"{text!r}: each value must be at least {least}")
        return values

    return number_list


def count(text: str) -> int:
    """The type of a flag that takes a positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 1")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; exits with 2 on a bad one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=count, default=200, help="groups per number of collectives")
    parser.add_argument("--seed", type=numbers(int, 0), default=[1], help="seeds of groups, by comma")
    parser.add_argument("--generator", default="formula", help=f"whose groups, by comma: {', '.join(GENERATORS)}")
    parser.add_argument("--noise", type=numbers(float, 0.0), default=[0.0, 0.02, 0.05], help="sigmas, by comma")
    parser.add_argument("--num-comms", type=numbers(int, 1), default=[1, 2, 4, 8], help="collectives, by comma")
    parser.add_argument("--tuners", default="all", help="all, or names by comma")
    parser.add_argument("--workers", type=count, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    args.generator = args.generator.split(",")
    if strange := [name for name in args.generator if name not in GENERATORS]:
        parser.error(f"unknown generator {strange[0]!r}; allowed: {', '.join(GENERATORS)}")
    known = all_tuners()
    packaged = [name for name in known if OPTIONS.get(name, (name, {}))[0] not in OUTSIDE]
    args.tuners = packaged if args.tuners == "all" else args.tuners.split(",")
    unknown = [name for name in args.tuners if name.removesuffix(GUARD) not in known]
    if unknown:
        parser.error(f"unknown tuner {unknown[0]!r}; allowed: {', '.join(known)}")
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    args = parse_arguments(argv)
    rows = summarise(all_runs(make_tasks(args), args.workers), args.tuners)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
