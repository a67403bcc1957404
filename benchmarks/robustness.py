"""What each tuner still finds where measurements are disturbed: stragglers, two humps, warm-up, drift, neighbours.

    python benchmarks/robustness.py --groups 40 --seed 1 --num-comms 1,4 --json

Groups are `overlap_generator.py`'s. On top of 2 % noise per timing a disturbance changes what a tuner is told; regret
is the undisturbed, noise-free makespan of what it recommends over the oracle's, minus one. `late_shapes` changes the
group itself in the middle of the search (a batch of other shape), and regret is that of the group as it is at the end.

    none          2 % noise only
    stragglers    one measurement in eight: another rank is late by 20 to 60 % of the makespan; all times of it grow
    two_humps     one in three: the machine is in its slow mode, computation 15 % longer
    warm_up       the first three measurements are 40, 20 and 10 % longer
    drift         each measurement is 1 % longer than the one before it
    neighbour     runs of four measurements in which somebody else's traffic makes communication 60 % longer
    late_shapes   from the sixth measurement on, all computations are 1.5 times longer
"""

import argparse
import json
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from rich.console import Console
from rich.table import Table

from lagom_overlap.tuners.problem import Measurement
from overlap_generator import SimulatedGroup, draw_group
from search_quality import WORSE, all_tuners, build_tuner, percentile_95

NOISE = 0.02
TUNERS = ("ours+guard", "lagom+guard", "autoccl+guard")
Disturbance = Callable[[Measurement, int, Random], Measurement]


def stretched(told: Measurement, *, comp: float = 1.0, comm: float = 1.0) -> Measurement:
    """The measurement with its computation and its collectives longer by these factors."""
    comp_s, comm_s = told.comp_s * comp, tuple(x * comm for x in told.comm_s)
    return replace(told, makespan_s=max(sum(comm_s), comp_s), comp_s=comp_s, comm_s=comm_s)


def stragglers(told: Measurement, number: int, rng: Random) -> Measurement:
    """Now and then everything is late."""
    factor = rng.uniform(1.2, 1.6) if rng.random() < 1 / 8 else 1.0
    return stretched(told, comp=factor, comm=factor)


def two_humps(told: Measurement, number: int, rng: Random) -> Measurement:
    """A slow mode of the machine."""
    return stretched(told, comp=1.15 if rng.random() < 1 / 3 else 1.0)


def warm_up(told: Measurement, number: int, rng: Random) -> Measurement:
    """The first measurements are too long."""
    factor = (1.4, 1.2, 1.1)[number] if number < 3 else 1.0
    return stretched(told, comp=factor, comm=factor)


def drift(told: Measurement, number: int, rng: Random) -> Measurement:
    """The machine gets slower by a percent each time."""
    return stretched(told, comp=1.01**number, comm=1.01**number)


def neighbour(told: Measurement, number: int, rng: Random) -> Measurement:
    """Somebody else's traffic comes in runs of four."""
    return stretched(told, comm=1.6 if number // 4 % 2 else 1.0)


def undisturbed(told: Measurement, number: int, rng: Random) -> Measurement:
    """Nothing."""
    return told


DISTURBANCES: dict[str, Disturbance] = {
    "none": undisturbed,
    "stragglers": stragglers,
    "two_humps": two_humps,
    "warm_up": warm_up,
    "drift": drift,
    "neighbour": neighbour,
}
LATE_SHAPES = "late_shapes"
CHANGES_AT, LONGER = 5, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One tuner on one group under one disturbance."""

    tuner: str
    disturbance: str
    num_comms: int
    regret: float
    num_measurements: int
    worse_than_default: bool


def longer_computations(group: SimulatedGroup) -> SimulatedGroup:
    """The same group with computations LONGER times as long, under every configuration."""
    changed = copy(group)
    changed.__dict__.pop("_lists", None)  # made from the times that change
    changed._kernel_s = group._kernel_s * LONGER
    return changed


def run(name: str, disturbance: str, group: SimulatedGroup, seed: int) -> Run:
    """Lets one tuner search one group to its end."""
    key = group.problem.group.name
    tuner, rng = build_tuner(name, group, seed), Random(f"robust/{key}/{disturbance}")
    disturb = DISTURBANCES.get(disturbance, undisturbed)
    now, number = group, 0
    while (trial := tuner.ask()) is not None:
        if disturbance == LATE_SHAPES and number == CHANGES_AT:
            now = longer_computations(group)
        outcomes = {
            asked: disturb(now.measure(assignment, rng, NOISE), number, rng)
            for asked, assignment in trial.assignments.items()
        }
        tuner.tell(trial, outcomes)
        number += 1
    makespan_s = now.exact(tuner.recommend()[key]).makespan_s
    return Run(
        tuner=name,
        disturbance=disturbance,
        num_comms=group.num_comms,
        regret=makespan_s / now.oracle()[1] - 1,
        num_measurements=number,
        worse_than_default=makespan_s > WORSE * now.exact(group.problem.default).makespan_s,
    )


def rows_of(runs: list[Run], tuners: list[str]) -> list[dict[str, object]]:
    """One row per (collectives, disturbance, tuner)."""
    rows: list[dict[str, object]] = []
    for num_comms in sorted({run.num_comms for run in runs}):
        for disturbance in (*DISTURBANCES, LATE_SHAPES):
            for tuner in tuners:
                cell = [r for r in runs if (r.num_comms, r.disturbance, r.tuner) == (num_comms, disturbance, tuner)]
                regrets = [r.regret for r in cell]
                rows.append(
                    {
                        "num_comms": num_comms,
                        "disturbance": disturbance,
                        "tuner": tuner,
                        "mean_regret": fmean(regrets),
                        "p95_regret": percentile_95(regrets),
                        "mean_measurements": fmean(r.num_measurements for r in cell),
                        "worse_than_default_share": fmean(r.worse_than_default for r in cell),
                    }
                )
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    """The rows for people, in percent."""
    table = Table(title="search under disturbances, percent")
    for column in ("comms", "disturbance", "tuner", "mean regret", "p95", "measured", "worse"):
        table.add_column(column)
    for row in rows:
        shares = [100 * float(str(row[key])) for key in ("mean_regret", "p95_regret")]
        worse = 100 * float(str(row["worse_than_default_share"]))
        table.add_row(
            *(str(row[key]) for key in ("num_comms", "disturbance", "tuner")),
            *(f"{share:.1f}" for share in shares),
            f"{row['mean_measurements']:.1f}",
            f"{worse:.0f}",
        )
    Console().print(table)


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=40, help="groups per number of collectives")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-comms", default="1,4", help="collectives, by comma")
    parser.add_argument("--tuners", default=",".join(TUNERS), help="names by comma")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    tuners = args.tuners.split(",")
    unknown = [name for name in tuners if name not in all_tuners()]
    if unknown or args.groups < 1:
        parser.error(f"unknown tuner {unknown[0]!r}" if unknown else f"--groups is {args.groups}, must be at least 1")
    runs = []
    for num_comms in map(int, args.num_comms.split(",")):
        for index in range(args.groups):
            group = draw_group(args.seed, index, num_comms)
            for disturbance in (*DISTURBANCES, LATE_SHAPES):
                runs += [run(name, disturbance, group, index) for name in tuners]
        sys.stderr.write(f"{num_comms} collectives: {args.groups} groups done\n")
    rows = rows_of(runs, tuners)
    print(json.dumps({"rows": rows}, indent=1)) if args.json else print_table(rows)


if __name__ == "__main__":
    main()
