"""What warm starts save and what wrong ones cost `ours`, on the generator.

    python benchmarks/warm_starts.py --groups 60 --num-comms 1,4 --noise 0.02 --seed 79 [--json]

The frozen groups of `overlap_generator.py`, whose physics is its own. The search begins with nothing, with an earlier
run of the same group (another draw of the noise), with that run's settings alone, with the run of another group
(useless), and with two that mislead: the earlier run with collectives three times as long, or with its times dealt to
other assignments, both naming the worst assignment as best.

Regret, measurements, worse than default, right kind: as in `search_quality.py`. Nothing here was measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

from lagom_overlap.tuners.ours import OurSearch
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.warm_start import Earlier, WarmStart
from overlap_generator import SimulatedGroup, draw_group
from search_quality import WORSE, percentile_95

TOO_LONG = 3.0

Measure = Callable[[Assignment], Outcome]
Runs = Mapping[Assignment, tuple[Measurement, ...]]


@dataclass(frozen=True, slots=True)
class Found:
    """One search: its result, its measurements in order."""

    assignment: Assignment
    num_measurements: int
    runs: Runs

    @property
    def worst(self) -> Assignment:
        """What was slowest."""
        return max(self.runs, key=lambda arm: self.runs[arm][0].makespan_s)


def search(problem: GroupProblem, measure: Measure, *, seed: int, warm: WarmStart | None = None) -> Found:
    """One search to its end."""
    tuner, runs, count = OurSearch((problem,), seed=seed, warm=warm), dict[Assignment, list[Measurement]](), 0
    name = problem.group.name
    while (trial := tuner.ask()) is not None:
        outcome = measure(trial.assignments[name])
        if isinstance(outcome, Measurement):
            runs.setdefault(trial.assignments[name], []).append(outcome)
        tuner.tell(trial, {name: outcome})
        count += 1
    return Found(tuner.recommend()[name], count, {arm: tuple(done) for arm, done in runs.items()})


def noisy(group: SimulatedGroup, what: str, noise: float) -> Measure:
    """Measurements of a drawn group, with a stream of noise of their own."""
    rng = Random(f"{what}/{group.problem.group.name}/{noise}")
    return lambda assignment: group.measure(assignment, rng, noise)


def longer(runs: Runs) -> Runs:
    """The runs with collectives that take longer."""
    return {
        arm: tuple(
            Measurement(
                makespan_s=max(TOO_LONG * run.total_comm_s, run.comp_s),
                comp_s=run.comp_s,
                comm_s=tuple(TOO_LONG * time_s for time_s in run.comm_s),
            )
            for run in done
        )
        for arm, done in runs.items()
    }


def dealt_anew(runs: Runs) -> Runs:
    """The runs under each other's assignments, the first under the last."""
    return dict(zip(runs, reversed(list(runs.values())), strict=True))


def warm_starts(group: SimulatedGroup, seed: int, index: int, noise: float) -> Iterator[tuple[str, WarmStart | None]]:
    """Every way to begin, in words."""
    problem, num_comms = group.problem, group.num_comms
    earlier = search(problem, noisy(group, "earlier", noise), seed=index)
    stranger = draw_group(seed, index + 1, num_comms)
    strange = search(stranger.problem, noisy(stranger, "earlier", noise), seed=index)

    def one(runs: Runs, best: Assignment, of: GroupProblem = problem) -> WarmStart:
        return WarmStart(source="benchmark", earlier=(Earlier(problem=of, runs=runs, best=best),))

    yield "none", None
    yield "earlier run", one(earlier.runs, earlier.assignment)
    yield "its settings alone", one({}, earlier.assignment)
    yield "another group's run", one(strange.runs, strange.assignment, stranger.problem)
    yield "misleading: collectives x3, worst as best", one(longer(earlier.runs), earlier.worst)
    yield "misleading: times dealt anew, worst as best", one(dealt_anew(earlier.runs), earlier.worst)


@dataclass(frozen=True, slots=True)
class Run:
    """One search judged."""

    start: str
    regret: float
    num_measurements: int
    is_worse: bool
    right_kind_share: float


def judged(
    start: str, found: Found, exact: Callable[[Assignment], float], default: Assignment, best: Assignment
) -> Run:
    """A result against the best assignment, without noise."""
    seconds = exact(found.assignment)
    pairs = zip(found.assignment, best, strict=True)
    return Run(
        start=start,
        regret=seconds / exact(best) - 1,
        num_measurements=found.num_measurements,
        is_worse=seconds > WORSE * exact(default),
        right_kind_share=fmean((a.algorithm, a.protocol) == (b.algorithm, b.protocol) for a, b in pairs),
    )


def generator_runs(args: argparse.Namespace, num_comms: int) -> Iterator[Run]:
    """All starts on the frozen groups."""
    for index in range(args.groups):
        group = draw_group(args.seed, index, num_comms)
        best, default = group.oracle()[0], group.problem.default
        for start, warm in warm_starts(group, args.seed, index, args.noise):
            found = search(group.problem, noisy(group, "now", args.noise), seed=index, warm=warm)
            yield judged(start, found, lambda arm, of=group: of.exact(arm).makespan_s, default, best)


def row_of(name: str, start: str, runs: Sequence[Run]) -> dict[str, object]:
    """Means over the groups."""
    regrets = [run.regret for run in runs]
    return {
        "groups": name,
        "start": start,
        "num_groups": len(runs),
        "mean_regret": fmean(sorted(regrets)),
        "p95_regret": percentile_95(regrets),
        "mean_measurements": fmean(run.num_measurements for run in runs),
        "worse_than_default_share": fmean(run.is_worse for run in runs),
        "right_kind_share": fmean(run.right_kind_share for run in runs),
    }


def rows_of(name: str, runs: Iterator[Run]) -> list[dict[str, object]]:
    """A row per start, in the order in which they came."""
    cells: dict[str, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.start, []).append(run)
    return [row_of(name, start, cell) for start, cell in cells.items()]


def markdown(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """The rows as a table."""
    yield "| groups | start | regret, mean / p95 | measurements | worse | right kind |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        numbers = {key: float(str(value)) for key, value in row.items() if key not in ("groups", "start")}
        yield (
            f"| {row['groups']} ({row['num_groups']}) | {row['start']} | {100 * numbers['mean_regret']:.2f}"
            f" / {100 * numbers['p95_regret']:.1f} % | {numbers['mean_measurements']:.1f}"
            f" | {100 * numbers['worse_than_default_share']:.1f} % | {100 * numbers['right_kind_share']:.0f} % |"
        )


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=60, help="frozen groups per number of collectives")
    parser.add_argument("--num-comms", default="1,4", help="collectives of a frozen group, by comma")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=79)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    if args.groups < 1 or args.noise < 0:
        parser.error("--groups must be at least 1, --noise at least 0")
    rows = []
    for number in args.num_comms.split(","):
        rows += rows_of(f"generator, N = {number}", generator_runs(args, int(number)))
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if args.json else "\n".join(markdown(rows)) + "\n")


if __name__ == "__main__":
    main()
