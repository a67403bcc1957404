"""What one decision step of `ours` costs where an iteration has many groups: tell and ask, on one core.

    python benchmarks/decision_scale.py --seed 1 --iterations 3 --shapes 1x8,50x1,50x8,50x16,1x64

A shape is groups x collectives in each. The groups of an iteration share one wire and one GPU, as a job's do; kernels
and sizes are drawn for each (`overlap_generator.py`). All are searched together to the end at 2 % noise. A step's time
is CPU time of `tell` and the `ask` after it (`time.process_time`: other work on the machine stretches it by what it
takes from caches and hyperthreads, not by waiting), and its ratio to a yardstick that is timed with every step: the
columns of a 256 x 256 matrix sorted ten times. Regret is over the oracle of each group, where `--regret` is given (slow
for many collectives).
"""

import argparse
import json
import time
from dataclasses import replace
from random import Random
from statistics import fmean, median

import numpy as np
from rich.console import Console
from rich.table import Table

from lagom_overlap.tuners.ours import OurSearch
from overlap_generator import FORMS, FROZEN, Draw, SimulatedGroup, _draw_body, _draw_wire, group_of
from search_quality import percentile_95

NOISE = 0.02
YARD = np.random.default_rng(0).random((256, 256))


def draw_iteration(seed: int, number: int, num_groups: int, num_comms: int) -> list[SimulatedGroup]:
    """Groups of one job: one wire, one GPU; drawn as `draw_group` draws."""
    draw = Draw(f"{FROZEN}/iteration/{seed}/{number}/{num_groups}x{num_comms}")
    wire, machine = _draw_wire(draw, FORMS[number % 2]), _draw_body(draw)
    groups = []
    for index in range(num_groups):
        drawn = _draw_body(draw)
        body = replace(machine, kernels=drawn.kernels, sensitivity=drawn.sensitivity)
        groups.append(group_of(draw, f"group-{index}", wire, body, num_comms))
    return groups


def yardstick_s() -> float:
    """CPU seconds of the yardstick now."""
    began = time.process_time()
    for _ in range(10):
        np.sort(YARD, axis=0)
    return time.process_time() - began


def search(groups: list[SimulatedGroup], seed: int) -> tuple[OurSearch, list[float], list[float], list[int]]:
    """Searches all groups together: the tuner, each decision step in seconds and in yardsticks, the groups asked."""
    tuner = OurSearch(tuple(group.problem for group in groups), seed=seed)
    rng, by_name = Random(f"scale/{seed}"), {group.problem.group.name: group for group in groups}
    steps_s, yards, num_asked = [], [], []
    while (trial := tuner.ask()) is not None:
        outcomes = {name: by_name[name].measure(asked, rng, NOISE) for name, asked in trial.assignments.items()}
        yard_s = yardstick_s()
        began = time.process_time()
        tuner.tell(trial, outcomes)
        tuner.ask()
        steps_s.append(time.process_time() - began)
        yards.append(steps_s[-1] / yard_s)
        num_asked.append(len(trial.assignments))
    return tuner, steps_s, yards, num_asked


def measure(seed: int, iterations: int, num_groups: int, num_comms: int, *, with_regret: bool) -> dict[str, float]:
    """One row of the table."""
    steps_s: list[float] = []
    yards: list[float] = []
    per_group, regrets, worse = [], [], []
    for number in range(iterations):
        groups = draw_iteration(seed, number, num_groups, num_comms)
        tuner, took_s, in_yards, num_asked = search(groups, number)
        steps_s += took_s
        yards += in_yards
        per_group.append(sum(num_asked) / num_groups)
        for group in groups if with_regret else []:
            found_s = group.exact(tuner.recommend()[group.problem.group.name]).makespan_s
            regrets.append(found_s / group.oracle()[1] - 1)
            worse.append(found_s > 1.005 * group.exact(group.problem.default).makespan_s)
    row = {
        "num_groups": num_groups,
        "num_comms": num_comms,
        "num_steps": len(steps_s),
        "median_s": median(steps_s),
        "p95_s": percentile_95(steps_s),
        "longest_s": max(steps_s),
        "median_yards": median(yards),
        "longest_yards": max(yards),
        "measurements_per_group": fmean(per_group),
    }
    if with_regret:
        row |= {"mean_regret": fmean(regrets), "p95_regret": percentile_95(regrets), "worse_share": fmean(worse)}
    return row


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=3, help="iterations per shape")
    parser.add_argument("--shapes", default="1x1,1x8,1x64,50x1,50x8", help="groups x collectives, by comma")
    parser.add_argument("--regret", action="store_true", help="against each group's oracle")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    rows = []
    for shape in args.shapes.split(","):
        num_groups, _, num_comms = shape.partition("x")
        rows.append(measure(args.seed, args.iterations, int(num_groups), int(num_comms or 1), with_regret=args.regret))
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    table = Table(title="decision steps, milliseconds of CPU")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        milli = {name: 1e3 if name.endswith("_s") else 1 for name in row}
        table.add_row(*(f"{milli[name] * value:.4g}" for name, value in row.items()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
