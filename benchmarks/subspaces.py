"""Which implementation is right under overlap, found how cheaply: groups with three to nine algorithms and protocols.

    python benchmarks/subspaces.py [drawn] [nccl] --groups 20 --kinds 3,6,9 --num-comms 1,4 --noise 0.02 --seed 1

`drawn`: kernels, sensitivities and the law of progress are those of `overlap_generator.py`; of implementations (kinds)
each has a wire of its own: latency, link, rate of a channel, half chunk, and what it costs the concurrent computation:
SMs per channel, pressure on the memory per byte, bytes in flight per chunk. A kind that is fast alone presses more, so
that often the fastest alone is not the best during computations.

`nccl`: single collectives on DGX presets, algorithms and protocols as NCCL has them, from `warm_starts.py`; the truth
is `SimulatedBackend`.

    right kind     share of collectives that end with the implementation of the best assignment
    kind's cost    best makespan with the implementations it ended with over the best of all, minus one
    regret, measurements, worse    as in `search_quality.py`

Ways to search: `model_based` with its successive halving; with the scouts that it had before (at most three looks at
kinds never measured, each once); with neither; with a table of the kinds' latencies and rates as a prior, as
`--warm-start nccl` gives (drawn: 20 % off at random); every kind once at the default's resources, then `model_based`
inside the kind with the shortest collective (AutoCCL's criterion) or with the shortest makespan; AutoCCL as published;
and `model_based` told the right kinds, which no choice of kinds can beat. *(fastest alone)* is the share of collectives
whose best kind is also the fastest running alone.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from statistics import fmean

from drawn_kinds import KINDS, KindGroup
from kind_searches import kinds_of, ways_to_search
from lagom_overlap.backends.simulated import SimulatedBackend
from lagom_overlap.collective import ConfigSpace
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.warm_start import WarmStart
from lagom_overlap.workload import OverlapGroup
from search_quality import WORSE, percentile_95
from warm_starts import way_groups

MOST_OF_FEW = 3
"""Of NCCL's choices those with fewer kinds are left out: there is nothing to halve."""
TABLE_ERROR = 0.2
"""Sigma of the logarithm of each ratio in the table of kinds."""


@dataclass(frozen=True, slots=True)
class Run:
    """One search judged."""

    way: str
    regret: float
    num_measurements: int
    right_kind_share: float
    kinds_cost: float
    is_worse: bool


def drawn_runs(args: argparse.Namespace, num_kinds: int, num_comms: int) -> Iterator[Run]:
    """Every way on the drawn groups."""
    for index in range(args.groups):
        group = KindGroup(args.seed, index, num_kinds, num_comms)
        problem, (best, best_s) = uneven(group) if args.uneven else group.problem, group.best
        name, wanted = problem.group.name, kinds_of(best)
        yield Run("default", group.makespan_s(problem.default) / best_s - 1, 1, *_right(group, problem.default), False)
        alone = fmean(a == b for a, b in zip(group.fastest_alone, wanted, strict=True))
        yield Run("(fastest alone)", 0.0, 0, alone, 0.0, False)
        table = WarmStart(source="benchmark", ways={name: group.ways(TABLE_ERROR)})
        for way, search in ways_to_search(table, best, args.ways).items():
            rng = Random(f"noise/{name}/{args.noise}")
            found = search(problem, lambda arm, of=group, rng=rng: of.measure(arm, rng, args.noise), index)
            seconds = group.makespan_s(found.assignment)
            is_worse = seconds > WORSE * group.makespan_s(problem.default)
            right = _right(group, found.assignment)
            yield Run(way, seconds / best_s - 1, found.num_measurements, *right, is_worse)


def uneven(group: KindGroup) -> GroupProblem:
    """The problem with one kind fewer for every second collective: not the default's, nor one that the best uses."""
    used = {*kinds_of(group.best[0]), kinds_of(group.problem.default)[0]}
    gone = next((kind.name for kind in group.kinds if kind.name not in used), None)
    fewer = tuple(part for part in group.problem.spaces[0].subspaces if (part.algorithm, part.protocol) != gone)
    spaces = [ConfigSpace(fewer) if j % 2 else space for j, space in enumerate(group.problem.spaces)]
    return replace(group.problem, spaces=tuple(spaces))


def _right(group: KindGroup, assignment: Assignment) -> tuple[float, float]:
    """Share of right kinds, and what the kinds cost."""
    pairs = zip(kinds_of(assignment), kinds_of(group.best[0]), strict=True)
    return fmean(a == b for a, b in pairs), group.kinds_cost(assignment)


def nccl_runs(args: argparse.Namespace) -> Iterator[Run]:
    """Every way on NCCL's choices, simulated."""
    for number, (problem, disturbed, exact, ways) in enumerate(way_groups(args.noise, args.seed)):
        if number % args.every or len(problem.spaces[0].subspaces) < MOST_OF_FEW:
            continue
        group = problem.group
        found_s = {(config,): _seconds(exact, group, (config,)) for config in problem.spaces[0]}
        found_s[problem.default] = _seconds(exact, group, problem.default)
        best = min(found_s, key=found_s.__getitem__)
        table = WarmStart(source="benchmark", ways={group.name: ways})
        for way, search in ways_to_search(table, best, args.ways).items():
            found = search(problem, lambda arm, of=group, by=disturbed: by.measure(of, arm), number)
            inside_s = min(s for arm, s in found_s.items() if kinds_of(arm) == kinds_of(found.assignment))
            yield Run(
                way,
                found_s[found.assignment] / found_s[best] - 1,
                found.num_measurements,
                float(kinds_of(found.assignment) == kinds_of(best)),
                inside_s / found_s[best] - 1,
                found_s[found.assignment] > WORSE * found_s[problem.default],
            )


def _seconds(exact: SimulatedBackend, group: OverlapGroup, assignment: Assignment) -> float:
    outcome = exact.measure(group, assignment)
    return outcome.makespan_s if isinstance(outcome, Measurement) else inf


def rows_of(groups: str, runs: Iterator[Run]) -> list[dict[str, object]]:
    """A row per way, in the order in which they came."""
    cells: dict[str, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.way, []).append(run)
    return [
        {
            "groups": groups,
            "way": way,
            "num_groups": len(cell),
            "right_kind_share": fmean(run.right_kind_share for run in cell),
            "mean_kinds_cost": fmean(run.kinds_cost for run in cell),
            "mean_regret": fmean(run.regret for run in cell),
            "p95_regret": percentile_95([run.regret for run in cell]),
            "mean_measurements": fmean(run.num_measurements for run in cell),
            "worse_than_default_share": fmean(run.is_worse for run in cell),
        }
        for way, cell in cells.items()
    ]


def markdown(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """The rows as a table."""
    yield "| groups | way | right kind | kind's cost | regret, mean / p95 | measurements | worse |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        share, cost, mean, p95, count, worse = (float(str(value)) for value in list(row.values())[3:])
        head = f"| {row['groups']} ({row['num_groups']}) | {row['way']} | {100 * share:.0f} %"
        if row["way"] == "(fastest alone)":
            yield f"{head} | | | | |"
        else:
            regret = f"{100 * mean:.2f} / {100 * p95:.1f} %"
            yield f"{head} | {100 * cost:.2f} % | {regret} | {count:.1f} | {100 * worse:.1f} % |"


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="of drawn, nccl (default: both)")
    parser.add_argument("--groups", type=int, default=20, help="drawn groups per numbers of kinds and collectives")
    parser.add_argument("--kinds", default="3,6,9", help="numbers of kinds, by comma (2 to 9)")
    parser.add_argument("--num-comms", default="1,4", help="numbers of collectives, by comma")
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--uneven", action="store_true", help="drawn: every second collective lacks one kind")
    parser.add_argument("--way", action="append", default=[], dest="ways", help="one of the ways (default: all)")
    parser.add_argument("--every", type=int, default=1, help="only every Nth group of nccl")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    parts = args.parts or ["drawn", "nccl"]
    kinds, comms = ([int(number) for number in text.split(",")] for text in (args.kinds, args.num_comms))
    if not set(parts) <= {"drawn", "nccl"} or args.groups < 1 or args.every < 1 or args.noise < 0:
        parser.error("parts are drawn and nccl; --groups and --every at least 1, --noise at least 0")
    if not all(1 < count <= len(KINDS) for count in kinds) or min(comms) < 1:
        parser.error(f"--kinds lie in 2..{len(KINDS)}, --num-comms are at least 1")
    rows = []
    if "drawn" in parts:
        for count in comms:
            for among in kinds:
                rows += rows_of(f"{among} kinds, N = {count}", drawn_runs(args, among, count))
    if "nccl" in parts:
        rows += rows_of("NCCL's, simulated", nccl_runs(args))
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if args.json else "\n".join(markdown(rows)) + "\n")


if __name__ == "__main__":
    main()
