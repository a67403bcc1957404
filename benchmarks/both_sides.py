"""What it is worth to tune the computation's side too: random overlaps with persistent kernels, simulated.

    python benchmarks/both_sides.py --groups 60 --noise 0,0.02 --ground rates --json

A group is part of a transformer layer of random shape with 1, 2 or 4 concurrent collectives, on one node of H100s or
H200s; its matrix products are persistent kernels. Communication alone, at NCCL's own choice, takes 0.1 to 1.2
of computation alone. Times come from our own simulator: `rates` (average rates, what `--backend simulated` uses) or
`blocks` (every wave of blocks, `tests/sim/block_dispatch.py`). It is the ground on which the carve-out's cost was
modelled: this says what a search finds there, not what a GPU does.

    collectives         ours:        channels and chunk, the computation untouched
    carve-out alone     NCCL's own choice with the carve-out that holds its channels, or the default: what is faster
    both sides          both_sides, guarded, carve-outs only
    with order          the same, launch order and stream priority allowed too
    best collectives    the best known assignment with the computation untouched (no measurements counted)

Regret is over the best known pair of both sides: per launch, coordinate searches over the whole space from the default
and from the best setting that is equal for all. *worse* is the share of groups that end more than 0.5 % slower than the
default. Noise is log-normal, one factor per timing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from random import Random
from statistics import fmean, median, quantiles

from lagom_overlap.collective import (
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    LaunchConfig,
    LaunchOrder,
    LaunchSpace,
    Protocol,
    SpaceLimits,
    StreamPriority,
    launch_of,
    launched,
)
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.base import Tuner
from lagom_overlap.tuners.both_sides import BothSides, channels_needed
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.ours import OurSearch
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.units import KIB
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, MemoryBound, OverlapGroup, Work

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "sim"))
from block_dispatch import DispatchSimulator  # the tests' oracle

CHANNELS = (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32)
CHUNKS = tuple(size * KIB for size in (128, 256, 512, 1024, 2048))
CARVED = (0, 2, 4, 8, 12, 16, 24, 32)
CARVE_OUTS = LaunchSpace(sm_carveouts=CARVED)
WITH_ORDER = LaunchSpace(
    sm_carveouts=CARVED, orders=(LaunchOrder.COMPUTATION_FIRST,), priorities=(StreamPriority.NORMAL,)
)
PRESETS = ("h100_dgx", "h200")
NUM_RANKS = 8
GROUNDS = {"rates": GroupSimulator, "blocks": DispatchSimulator}
WORSE = 1.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One search on one group."""

    who: str
    noise: float
    num_comms: int
    regret: float
    gain: float
    num_measurements: int


class Ground:
    """A drawn group on a simulated machine; times are kept."""

    def __init__(self, seed: int, index: int, num_comms: int, kind: str) -> None:
        draw = Random(f"both sides/{seed}/{index}/{num_comms}")
        self._model = ContentionModel(load_preset(PRESETS[index % len(PRESETS)]), load_profile("plausible"), 0)
        self._simulate = GROUNDS[kind]
        self.group = _group(draw, self._model, num_comms)
        self._simulators: dict[LaunchConfig, GroupSimulator | DispatchSimulator] = {}
        self._known: dict[Assignment, Measurement] = {}
        spaces = tuple(self._space(op.collective) for op in self.group.comms)
        default = tuple(self._untouched(op.collective) for op in self.group.comms)
        self.problem = GroupProblem(group=self.group, spaces=spaces, default=default, launches=CARVE_OUTS)

    def _space(self, collective: Collective):
        limits = SpaceLimits(
            algorithms=(Algorithm.RING,), protocols=(Protocol.SIMPLE,), num_channels=CHANNELS, chunk_bytes=CHUNKS
        )
        return self._model.space(collective, limits)

    def _untouched(self, collective: Collective) -> CommConfig:
        return replace(self._model.default_config(collective), num_threads=None)

    def exact(self, assignment: Assignment) -> Measurement:
        """The times without noise."""
        if assignment not in self._known:
            launch = launch_of(assignment)
            if launch not in self._simulators:
                self._simulators[launch] = self._simulate(self.group, self._model, launch)
            times = self._simulators[launch].evaluate(assignment)
            self._known[assignment] = Measurement(makespan_s=times.makespan_s, comp_s=times.comp_s, comm_s=times.comm_s)
        return self._known[assignment]

    def measure(self, assignment: Assignment, random: Random, noise: float) -> Measurement:
        """The times as one measurement gives them."""
        clean = self.exact(assignment)
        if not noise:
            return clean
        comp_factor = exp(random.gauss(0, noise))
        comm_s = tuple(x * exp(random.gauss(0, noise)) for x in clean.comm_s)
        longer = comp_factor if clean.comp_s >= clean.total_comm_s else sum(comm_s) / clean.total_comm_s
        comp_s = clean.comp_s * comp_factor
        return Measurement(makespan_s=max(comp_s, clean.makespan_s * longer), comp_s=comp_s, comm_s=comm_s)

    def best(self, launch: LaunchConfig) -> float:
        """The best known makespan under one launch."""
        spaces = [list(space) for space in self.problem.spaces]
        alike = min(zip(*spaces, strict=True), key=lambda arm: self._under(arm, launch))
        return min(self._descend(list(start), spaces, launch) for start in (self.problem.default, alike))

    def _descend(self, place: list[CommConfig], spaces: list[list[CommConfig]], launch: LaunchConfig) -> float:
        best_s, since, j = self._under(place, launch), 0, 0
        while since < len(place):
            tried = [[*place[:j], config, *place[j + 1 :]] for config in spaces[j]]
            found = min(tried, key=lambda arm: self._under(arm, launch))
            since += 1
            if self._under(found, launch) < best_s * (1 - 1e-9):
                best_s, place, since = self._under(found, launch), found, 1
            j = (j + 1) % len(place)
        return best_s

    def _under(self, arm: Sequence[CommConfig], launch: LaunchConfig) -> float:
        return self.exact(launched(tuple(arm), launch)).makespan_s


def _group(draw: Random, model: ContentionModel, num_comms: int) -> OverlapGroup:
    """Part of a layer, and collectives whose time alone is a drawn share of it."""
    tokens, hidden = draw.choice((2048, 4096, 8192)), draw.choice((2048, 4096, 5120, 8192))
    tensor, ffn = draw.choice((1, 2, 4)), draw.choice((8, 11, 14)) * hidden // 4
    heads = max(1, hidden // 128 // tensor)
    works: list[Work] = [
        MemoryBound(6 * tokens * hidden),
        Gemm(tokens, 3 * hidden // tensor, hidden),
        Attention(batch=max(1, tokens // 2048), num_heads=heads, seq_len=2048, head_dim=128),
        Gemm(tokens, hidden, hidden // tensor),
        MemoryBound(10 * tokens * hidden),
        Gemm(tokens, 2 * ffn // tensor, hidden),
        MemoryBound(6 * tokens * ffn // tensor),
        Gemm(tokens, hidden, ffn // tensor),
    ]
    first = draw.choice((0, 0, 3, 5))
    works = works[first:]
    alone_s = sum(model.running_times([model.kernel(work)], []).kernel_s[0] for work in works)
    ratio, shares = draw.uniform(0.1, 1.2), [draw.uniform(1, 3) for _ in range(num_comms)]
    comms = []
    for j, share in enumerate(shares):
        kind = draw.choice((CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE))
        wanted_s = ratio * alone_s * share / sum(shares)
        comms.append(CommOp(name=f"c{j}", collective=Collective(kind, _size(model, kind, wanted_s), NUM_RANKS)))
    return OverlapGroup(
        name="g",
        computations=tuple(CompOp(name=f"k{i}", work=work) for i, work in enumerate(works)),
        comms=tuple(comms),
    )


def _size(model: ContentionModel, kind: CollectiveKind, wanted_s: float) -> int:
    """Bytes that take so long at NCCL's own choice, by bisection between 64 KiB and 16 GiB."""
    low, high = 64 * KIB, 1 << 34
    while high - low > low // 100 + 1:
        middle = (low + high) // 2
        collective = Collective(kind, middle, NUM_RANKS)
        slower = model.collective(collective, model.default_config(collective)).seconds() > wanted_s
        low, high = (low, middle) if slower else (middle, high)
    return low


def _search(ground: Ground, tuner: Tuner, random: Random, noise: float) -> tuple[Assignment, int]:
    num = 0
    while (trial := tuner.ask()) is not None:
        tuner.tell(trial, {name: ground.measure(arm, random, noise) for name, arm in trial.assignments.items()})
        num += 1
    return tuner.recommend()["g"], num


def _tuners(ground: Ground, seed: int) -> dict[str, Tuner]:
    plain = replace(ground.problem, launches=LaunchSpace())
    ordered = replace(ground.problem, launches=WITH_ORDER)
    return {
        "collectives": OurSearch((plain,), seed=seed),
        "both sides": Guarded(BothSides((ground.problem,), seed=seed), (ground.problem,)),
        "with order": Guarded(BothSides((ordered,), seed=seed), (ordered,)),
    }


def run_group(ground: Ground, noises: Sequence[float], seed: int) -> tuple[list[Run], dict[str, float]]:
    """Every search on one group, and which launch the best known pair has."""
    problem, default_s = ground.problem, ground.exact(ground.problem.default).makespan_s
    by_launch = {launch: ground.best(launch) for launch in CARVE_OUTS}
    ordered_s = min(
        ground.best(launch) for launch in WITH_ORDER if launch.sm_carveout in (None, *_best_carved(by_launch))
    )
    best_s = min(*by_launch.values(), ordered_s)
    runs = []

    def note(who: str, noise: float, makespan_s: float, num: int) -> None:
        num_comms = len(problem.group.comms)
        regret, gain = makespan_s / best_s - 1, default_s / makespan_s - 1
        runs.append(Run(who=who, noise=noise, num_comms=num_comms, regret=regret, gain=gain, num_measurements=num))

    carved = problem.launches.carveout_for(channels_needed(problem, problem.default) or 0)
    matched_s = ground.exact(launched(problem.default, LaunchConfig(sm_carveout=carved))).makespan_s
    for noise in noises:
        note("default", noise, default_s, 0)
        note("carve-out alone", noise, min(default_s, matched_s), 2)
        note("best collectives", noise, by_launch[LaunchConfig()], 0)
        for who, tuner in _tuners(ground, seed).items():
            found, num = _search(ground, tuner, Random(f"noise/{seed}/{noise}/{who}"), noise)
            note(who, noise, ground.exact(found).makespan_s, num)
    facts = {
        "carve-out is best": float(min(by_launch, key=by_launch.__getitem__).sm_carveout not in (None, 0)),
        "order or priority gains 1 %": float(ordered_s < 0.99 * min(by_launch.values())),
    }
    return runs, facts


def _best_carved(by_launch: dict[LaunchConfig, float]) -> list[int | None]:
    """The two best carve-outs: with these the orders are looked at."""
    return [launch.sm_carveout for launch in sorted(by_launch, key=by_launch.__getitem__)[:2]]


WHO = ("default", "carve-out alone", "collectives", "best collectives", "both sides", "with order")


def rows_of(runs: Sequence[Run]) -> list[dict[str, object]]:
    """One row per noise, number of collectives and search; shares, regrets and gains are fractions."""
    rows: list[dict[str, object]] = []
    for noise, num_comms in sorted({(run.noise, run.num_comms) for run in runs}):
        for who in WHO:
            cell = [run for run in runs if (run.who, run.noise, run.num_comms) == (who, noise, num_comms)]
            regrets = [run.regret for run in cell]
            rows.append(
                {
                    "noise": noise,
                    "num_comms": num_comms,
                    "who": who,
                    "mean_regret": fmean(regrets),
                    "p95_regret": quantiles(regrets, n=20, method="inclusive")[-1] if len(cell) > 1 else regrets[0],
                    "median_gain": median(run.gain for run in cell),
                    "mean_measurements": fmean(run.num_measurements for run in cell),
                    "worse_share": fmean(run.gain < 1 / WORSE - 1 for run in cell),
                }
            )
    return rows


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", type=int, default=60, help="groups per number of collectives")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--noise", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.02])
    parser.add_argument("--num-comms", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--ground", choices=GROUNDS, default="rates")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    runs: list[Run] = []
    facts: dict[str, list[float]] = {}
    for num_comms in args.num_comms:
        for index in range(args.groups):
            found, known = run_group(Ground(args.seed, index, num_comms, args.ground), args.noise, index)
            runs += found
            for name, value in known.items():
                facts.setdefault(f"{name}, {num_comms} collectives", []).append(value)
        sys.stderr.write(f"{num_comms} collectives: {args.groups} groups done\n")
    rows, shares = rows_of(runs), {name: fmean(values) for name, values in facts.items()}
    if args.json:
        print(json.dumps({"ground": args.ground, "seed": args.seed, "rows": rows, "shares": shares}, indent=1))
        return
    print("| noise | collectives | search | mean regret | p95 | median gain | measurements | worse |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [f"{100 * float(str(row[key])):.1f} %" for key in ("mean_regret", "p95_regret", "median_gain")]
        numbers = [
            *cells,
            f"{float(str(row['mean_measurements'])):.1f}",
            f"{100 * float(str(row['worse_share'])):.0f} %",
        ]
        print(f"| {row['noise']:g} | {row['num_comms']} | {row['who']} | {' | '.join(numbers)} |")
    print()
    for name, share in shares.items():
        print(f"- {name}: {share:.0%} of the groups")


if __name__ == "__main__":
    main()
