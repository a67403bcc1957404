"""Which implementation is right under overlap, found how cheaply: groups with three to nine algorithms and protocols.

    python benchmarks/subspaces.py [drawn] [nccl] --groups 20 --kinds 3,6,9 --num-comms 1,4 --noise 0.02 --seed 1

`drawn`: kernels, sensitivities and the law of progress are those of `overlap_generator.py`; of implementations (kinds)
each has a wire of its own: latency, link, rate of a channel, half chunk, and what it costs the computation beside it:
SMs per channel, pressure on the memory per byte, bytes in flight per chunk. A kind that is fast alone presses more, so
that often the fastest alone is not the best beside computations.

`nccl`: single collectives on DGX presets, algorithms and protocols as NCCL has them, from `warm_starts.py`; the truth
is `SimulatedBackend`.

    right kind     share of collectives that end with the implementation of the best assignment
    kind's cost    best makespan with the implementations it ended with over the best of all, minus one
    regret, measurements, worse    as in `search_quality.py`

Ways to search: `just_enough` with its successive halving; with the scouts that it had before (at most three looks at
kinds never measured, each once); with neither; with a table of the kinds' latencies and rates as a prior, as
`--warm-start nccl` gives (drawn: 20 % off at random); every kind once at the default's resources, then `just_enough`
inside the kind with the shortest collective (AutoCCL's criterion) or with the shortest makespan; AutoCCL as published;
and `just_enough` told the right kinds, which no choice of kinds can beat. *(fastest alone)* is the share of collectives
whose best kind is also the fastest with nothing beside it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, inf, sqrt
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from lagom_overlap.backends.base import Assignment, GroupProblem, Measurement, Outcome
from lagom_overlap.backends.simulated import SimulatedBackend
from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace
from lagom_overlap.tune.autoccl import AutoCcl
from lagom_overlap.tune.groupwise import Probe
from lagom_overlap.tune.just_enough.allocate import Allocation
from lagom_overlap.tune.just_enough.effort import EFFORTS
from lagom_overlap.tune.just_enough.forecast import Forecast
from lagom_overlap.tune.just_enough.pool import Pool
from lagom_overlap.tune.just_enough.search import DOUBT, GroupSearch
from lagom_overlap.tune.just_enough.sight import Surfaces
from lagom_overlap.tune.just_enough.warm import earlier_pool
from lagom_overlap.tune.warm_start import ExpectedWay, WarmStart, Ways
from lagom_overlap.workload import OverlapGroup
from overlap_generator import FORMS, FROZEN, IN_FLIGHT_BYTES, Body, Draw, Wire, _draw_body, _draw_wire, draw_group
from search_quality import WORSE, percentile_95
from warm_starts import way_groups

VERSION = "1"
"""Of the draws and the physics of the kinds."""
KIB = 1024
CHANNELS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
CHUNKS = {
    Protocol.SIMPLE: tuple(size * KIB for size in (64, 128, 256, 512, 1024, 1366, 2048)),
    Protocol.LL128: tuple(size * KIB for size in (32, 64, 128, 256, 512)),
    Protocol.LL: tuple(size * KIB for size in (8, 16, 32)),
}
MOST_SCOUTS, HOPELESS = 3, 1.25
MOST_OF_FEW = 3
"""Of NCCL's choices those with fewer kinds are left out: there is nothing to halve."""
TABLE_ERROR = 0.2
"""Sigma of the logarithm of each ratio in the table of kinds."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Kind = tuple[Algorithm | None, Protocol | None]
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """What a kind's constants are drawn from: ratios to ring/simple's."""

    link: Span = (1.0, 1.0)
    channel: Span = (1.0, 1.0)
    latency: Span = (1.0, 1.0)
    half_chunk: Span = (1.0, 1.0)
    sms: Span = (1.0, 1.0)
    pressure: Span = (1.0, 1.0)
    flight: Span = (1.0, 1.0)


ALGORITHMS: Mapping[Algorithm, Spans] = {
    Algorithm.RING: Spans(),
    Algorithm.TREE: Spans(
        link=(0.7, 1.05), channel=(0.6, 1.1), latency=(0.3, 0.9), sms=(0.8, 1.3), pressure=(0.7, 1.3), flight=(0.4, 0.9)
    ),
    Algorithm.NVLS: Spans(
        link=(0.9, 1.5), channel=(1.0, 2.5), latency=(0.5, 1.2), sms=(1.0, 1.8), pressure=(0.8, 2.0), flight=(0.5, 1.5)
    ),
    Algorithm.NVLS_TREE: Spans(
        link=(0.8, 1.4), channel=(0.9, 2.0), latency=(0.6, 1.4), sms=(1.0, 1.8), pressure=(0.7, 1.8), flight=(0.5, 1.5)
    ),
    Algorithm.COLLNET_CHAIN: Spans(
        link=(0.7, 1.3), channel=(0.6, 1.2), latency=(0.6, 1.6), sms=(0.5, 1.1), pressure=(0.5, 1.2), flight=(0.6, 1.6)
    ),
}
PROTOCOLS: Mapping[Protocol, Spans] = {
    Protocol.SIMPLE: Spans(),
    Protocol.LL128: Spans(
        link=(0.75, 0.97), channel=(0.4, 0.9), latency=(0.3, 0.8), half_chunk=(0.25, 0.25), pressure=(0.9, 1.3)
    ),
    Protocol.LL: Spans(
        link=(0.4, 0.6), channel=(0.3, 0.7), latency=(0.15, 0.5), half_chunk=(0.05, 0.1), pressure=(1.2, 2.0)
    ),
}
KINDS: tuple[tuple[Algorithm, Protocol], ...] = (
    (Algorithm.RING, Protocol.SIMPLE),
    *((Algorithm.RING, protocol) for protocol in (Protocol.LL128, Protocol.LL)),
    *((Algorithm.TREE, protocol) for protocol in PROTOCOLS),
    *((algorithm, Protocol.SIMPLE) for algorithm in (Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.COLLNET_CHAIN)),
)
"""The default's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnKind:
    """One implementation: its wire, and what it costs the computation beside it."""

    algorithm: Algorithm
    protocol: Protocol
    wire: Wire
    sms: float
    pressure: float
    flight: float

    @property
    def name(self) -> Kind:
        """Its algorithm and protocol."""
        return self.algorithm, self.protocol

    @property
    def subspace(self) -> Subspace:
        """What may be tried with it."""
        chunks = CHUNKS[self.protocol]
        return Subspace(
            algorithm=self.algorithm,
            protocol=self.protocol,
            num_channels=CHANNELS,
            num_threads=(512,),
            chunk_bytes=chunks if self.algorithm is Algorithm.RING else tuple(c for c in chunks if c <= 1024 * KIB),
        )


def draw_kind(draw: Draw, wire: Wire, algorithm: Algorithm, protocol: Protocol) -> DrawnKind:
    """A kind beside ring/simple, whose wire is given. A faster link presses more: memory is touched as fast."""

    def ratio(name: str) -> float:
        return draw.between(*getattr(ALGORITHMS[algorithm], name)) * draw.between(*getattr(PROTOCOLS[protocol], name))

    return DrawnKind(
        algorithm=algorithm,
        protocol=protocol,
        wire=replace(
            wire,
            link=wire.link * ratio("link"),
            channel=wire.channel * ratio("channel"),
            latency_s=wire.latency_s * ratio("latency"),
            half_chunk=wire.half_chunk * ratio("half_chunk"),
            ll128_link=1.0,
            ll128_channel=1.0,
            ll128_latency=1.0,
        ),
        sms=ratio("sms"),
        pressure=ratio("pressure"),
        flight=ratio("flight"),
    )


class KindGroup:
    """A drawn group whose collectives may be carried out in many ways: the problem, and its true times."""

    def __init__(self, seed: int, index: int, num_kinds: int, num_comms: int) -> None:
        name = f"kinds {VERSION}/{seed}/{index}/{num_kinds}/{num_comms}"
        base, draw = draw_group(seed, index, num_comms), Draw(name)
        again = Draw(f"{FROZEN}/{seed}/{index}/{num_comms}")
        wire, body = _draw_wire(again, FORMS[index % 2]), _draw_body(again)
        others = list(KINDS[1:])
        chosen = [KINDS[0], *(others.pop(draw.whole(0, len(others) - 1)) for _ in range(num_kinds - 1))]
        self.kinds = [draw_kind(draw, wire, *kind) for kind in chosen]
        space = ConfigSpace(tuple(kind.subspace for kind in self.kinds))
        self.num_comms = num_comms
        self.problem = replace(
            base.problem,
            group=replace(base.problem.group, name=name),
            spaces=(space,) * num_comms,
        )
        self.configs = tuple(space)
        self.place = {config: place for place, config in enumerate(self.configs)}
        self.kind_of = np.repeat(np.arange(num_kinds), [len(kind.subspace) for kind in self.kinds])
        self._tabulate(body)

    def ways(self, error: float) -> Ways:
        """The kinds as a table; `error` is the sigma of each ratio's logarithm."""
        rng = Random(f"table/{self.problem.group.name}")
        return {
            kind.name: ExpectedWay(
                kind.wire.latency_s * exp(rng.gauss(0.0, error)), kind.wire.link * exp(rng.gauss(0.0, error))
            )
            for kind in self.kinds
        }

    # True times

    def _tabulate(self, body: Body) -> None:
        """Times of kernels and collectives at every place; the last column is "no collective", the last row "none"."""
        most = max(self.kinds[0].wire.rate(config) for config in self.kinds[0].subspace)
        kernels = [body.kernel_s(i, None, 0.0) for i in range(len(body.kernels))]
        self._kernel_s = np.full((len(kernels) + 1, len(self.configs) + 1), np.inf)
        self._comm_s = np.full((self.num_comms + 1, len(self.configs) + 1), np.inf)
        self._kernel_s[:-1, -1] = kernels
        self._slow = np.array([1 + body.comm_slowdown * m for m in body.sensitivity] + [1.0])
        for place, config in enumerate(self.configs):
            kind = self.kinds[self.kind_of[place]]
            as_ring = replace(config, protocol=Protocol.SIMPLE)  # the ratios of LL128 are in the wire already
            use = kind.wire.rate(as_ring) / most
            for i in range(len(kernels)):
                self._kernel_s[i, place] = self._beside(body, i, kind, config, use)
            for j, comm in enumerate(self.problem.group.comms):
                self._comm_s[j, place] = kind.wire.alone_s(as_ring, comm.collective.wire_bytes)

    @staticmethod
    def _beside(body: Body, i: int, kind: DrawnKind, config: CommConfig, use: float) -> float:
        """Kernel i beside a collective: the generator's law, with the kind's SMs, pressure and bytes in flight."""
        kernel, channels = body.kernels[i], config.num_channels or 0
        waves = ceil(kernel.num_blocks / ((body.num_sms - kind.sms * channels) * kernel.blocks_per_sm))
        flight = kind.flight * channels * (config.chunk_bytes or 1)
        pollution = body.pollution * flight / (flight + IN_FLIGHT_BYTES)
        pressed = body.sensitivity[i] * body.pressure * kind.pressure * use * sqrt(use)
        return waves * kernel.wave_s * (1 + pressed + pollution)

    def run(self, places: Ints) -> tuple[Floats, Floats]:
        """X (A, N) and Y (A,) of many assignments (A, N) at once; progress as in the generator."""
        count, num_kernels = len(places), len(self._kernel_s) - 1
        padded = np.concatenate([places, np.full((count, 1), len(self.configs))], axis=1)
        rows = np.arange(count)
        i, j = np.zeros(count, dtype=np.intp), np.zeros(count, dtype=np.intp)
        kernel_left, comm_left = np.ones(count), np.ones(count)
        comm_s, comp_s = np.zeros((count, self.num_comms + 1)), np.zeros(count)
        for _ in range(num_kernels + self.num_comms):
            place = padded[rows, j]
            kernel_s, alone_s = self._kernel_s[i, place], self._comm_s[j, place] * self._slow[i]
            to_kernel_end, to_comm_end = kernel_left * kernel_s, comm_left * alone_s
            step = np.minimum(to_kernel_end, to_comm_end)
            over = np.isinf(step)
            kernel_ends, comm_ends = (to_kernel_end <= step) & ~over, (to_comm_end <= step) & ~over
            step[over] = 0.0
            comm_s[rows, j] += step
            comp_s += np.where(i < num_kernels, step, 0.0)
            kernel_left = np.where(kernel_ends, 1.0, kernel_left - step / kernel_s)
            comm_left = np.where(comm_ends, 1.0, comm_left - step / alone_s)
            i, j = i + kernel_ends, j + comm_ends
        return comm_s[:, : self.num_comms], comp_s

    def makespans(self, places: Ints) -> Floats:
        """Z of many assignments (A, N)."""
        comm_s, comp_s = self.run(places)
        return np.asarray(np.maximum(comm_s.sum(axis=1), comp_s))

    def makespan_s(self, assignment: Assignment) -> float:
        """Z of one, without noise."""
        return float(self.makespans(self._places(assignment))[0])

    def measure(self, assignment: Assignment, rng: Random, noise: float) -> Measurement:
        """The times as one measurement would give them."""
        comm, comp = self.run(self._places(assignment))
        comm_s = tuple(x * exp(rng.gauss(0.0, noise)) for x in comm[0].tolist())
        comp_s = float(comp[0]) * exp(rng.gauss(0.0, noise))
        return Measurement(makespan_s=max(sum(comm_s), comp_s), comp_s=comp_s, comm_s=comm_s)

    def _places(self, assignment: Assignment) -> Ints:
        return np.array([[self.place[config] for config in assignment]], dtype=np.intp)

    # The truth

    @cached_property
    def best(self) -> tuple[Assignment, float]:
        """The best assignment known, by coordinate search from several starts."""
        everywhere = [np.arange(len(self.configs))] * self.num_comms
        draw = Draw(f"oracle/{self.problem.group.name}")
        starts = [[draw.whole(0, len(self.configs) - 1) for _ in range(self.num_comms)] for _ in range(3)]
        equal = np.repeat(np.arange(len(self.configs))[:, None], self.num_comms, axis=1)
        makespans = self.makespans(equal)
        for kind in range(len(self.kinds)):
            starts.append(equal[np.where(self.kind_of == kind, makespans, np.inf).argmin()].tolist())
        best_s, places = min(self._descend(start, everywhere) for start in starts)
        return tuple(self.configs[place] for place in places), best_s

    def kinds_cost(self, assignment: Assignment) -> float:
        """How far the best assignment with the same kinds is above the best of all, as a share."""
        places = self._places(assignment)[0]
        inside = [np.flatnonzero(self.kind_of == self.kind_of[place]) for place in places]
        best_places = self._places(self.best[0])[0]
        near = [b if b in held else p for b, p, held in zip(best_places.tolist(), places.tolist(), inside, strict=True)]
        found_s = min(self._descend(start, inside)[0] for start in (places.tolist(), near))
        return max(0.0, found_s / self.best[1] - 1)

    @cached_property
    def fastest_alone(self) -> tuple[Kind, ...]:
        """Per collective the kind that is fastest with nothing beside it."""
        return tuple(self.kinds[self.kind_of[int(self._comm_s[j, :-1].argmin())]].name for j in range(self.num_comms))

    def _descend(self, start: list[int], candidates: Sequence[Ints]) -> tuple[float, list[int]]:
        places, best_s, since_better, j = list(start), np.inf, 0, 0
        while since_better < self.num_comms:
            tried = np.repeat(np.array([places]), len(candidates[j]), axis=0)
            tried[:, j] = candidates[j]
            makespans = self.makespans(tried)
            found = int(makespans.argmin())
            if makespans[found] < best_s * (1 - 1e-12):
                best_s, places[j], since_better = float(makespans[found]), int(candidates[j][found]), 0
            since_better += 1
            j = (j + 1) % self.num_comms
        return best_s, places


# Ways to search


class Scouting(GroupSearch):
    """The rule before halving: at most three looks at kinds never measured, each at its best by the forecast."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scouted: set[int] = set()

    def _scout(self, forecast: Forecast) -> Probe | None:
        best, lattice = self._best(), self._sight.lattices[0]
        if best is None or len(self._scouted) >= MOST_SCOUTS:
            return None
        seen = {kind for _, kind in self._measured_kinds()} | self._scouted
        looks = []
        for kind in set(range(len(lattice.kinds))) - seen:
            places = Allocation(forecast, self._barred, DOUBT).best_of_kind(kind)
            if places is not None:
                looks.append((float(forecast.makespans(places[None])[0]), kind, places))
        if not looks or min(look[0] for look in looks) > HOPELESS * self._estimate_s(best):
            return None
        _, kind, places = min(looks, key=lambda look: look[:2])
        self._scouted.add(kind)
        assignment = self._sight.assignment_at(places.tolist())
        return None if self._arms.knows(assignment) else Probe(assignment=assignment, reason="scout")


class Unscouted(GroupSearch):
    """No look at a kind that no forecast favours."""

    def _scout(self, forecast: Forecast) -> Probe | None:
        return None


Measure = Callable[[Assignment], Outcome]


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ended with, and how many measurements it took."""

    assignment: Assignment
    num_measurements: int


def hunt(
    kind: type[GroupSearch], problem: GroupProblem, measure: Measure, *, seed: int, warm: WarmStart | None = None
) -> Found:
    """One group's search to its end."""
    surfaces = Surfaces()
    pool = Pool(None if warm is None else earlier_pool(warm, (problem,), surfaces))
    search = kind(problem, EFFORTS["normal"], confidence=1.8, seed=seed, pool=pool, surfaces=surfaces)
    count = 0
    while search.probe is not None:
        search.tell(measure(search.probe.assignment))
        search.plan()
        count += 1
    return Found(search.stand, count)


def kinds_of(assignment: Assignment) -> tuple[Kind, ...]:
    """Algorithm and protocol of each collective."""
    return tuple((config.algorithm, config.protocol) for config in assignment)


def within(problem: GroupProblem, kinds: Sequence[Kind]) -> GroupProblem:
    """The problem with one kind per collective; the default stays, alone of its kind where that is another."""
    spaces = []
    for space, kind, default in zip(problem.spaces, kinds, problem.default, strict=True):
        kept = [part for part in space.subspaces if (part.algorithm, part.protocol) == kind]
        if kinds_of((default,)) != (kind,):
            kept.append(
                Subspace(
                    algorithm=default.algorithm,
                    protocol=default.protocol,
                    num_channels=(default.num_channels,),
                    num_threads=(default.num_threads,),
                    chunk_bytes=(default.chunk_bytes,),
                )
            )
        spaces.append(ConfigSpace(tuple(kept)))
    return replace(problem, spaces=tuple(spaces))


def first_choose(problem: GroupProblem, measure: Measure, *, seed: int, by_makespan: bool) -> Found:
    """Every kind once at the default's resources, all collectives alike; then a search inside the kinds chosen."""
    seen: dict[Assignment, Measurement] = {}
    kinds = list(dict.fromkeys((part.algorithm, part.protocol) for part in problem.spaces[0].subspaces))
    for kind in kinds:
        assignment = tuple(
            next(
                (p.at(p.nearest(default)) for p in space.subspaces if (p.algorithm, p.protocol) == kind),
                default,
            )
            for space, default in zip(problem.spaces, problem.default, strict=True)
        )
        outcome = measure(assignment)
        if isinstance(outcome, Measurement):
            seen[assignment] = outcome
    if by_makespan:
        chosen = kinds_of(min(seen, key=lambda arm: seen[arm].makespan_s))
    else:
        chosen = tuple(
            kinds_of(min(seen, key=lambda arm, j=j: seen[arm].comm_s[j]))[j] for j in range(len(problem.default))
        )
    first = [seen[problem.default]] if problem.default in seen else []
    num_first = len(kinds) - len(first)

    def or_known(assignment: Assignment) -> Outcome:
        return first.pop() if first and assignment == problem.default else measure(assignment)

    found = hunt(Unscouted, within(problem, chosen), or_known, seed=seed)
    return Found(found.assignment, num_first + found.num_measurements)


def autoccl(problem: GroupProblem, measure: Measure, *, seed: int) -> Found:
    """The tuner as published."""
    tuner, count, name = AutoCcl((problem,), seed=seed), 0, problem.group.name
    while (trial := tuner.ask()) is not None:
        tuner.tell(trial, {name: measure(trial.assignments[name])})
        count += 1
    return Found(tuner.recommend()[name], count)


# The table


@dataclass(frozen=True, slots=True)
class Run:
    """One search judged."""

    way: str
    regret: float
    num_measurements: int
    right_kind_share: float
    kinds_cost: float
    is_worse: bool


Hunt = Callable[[GroupProblem, Measure, int], Found]


def ways_to_search(table: WarmStart, best: Assignment, asked: Sequence[str]) -> dict[str, Hunt]:
    """Those asked for by name; all of them if none is."""
    ways: dict[str, Hunt] = {
        "halving": lambda p, m, seed: hunt(GroupSearch, p, m, seed=seed),
        "scouts": lambda p, m, seed: hunt(Scouting, p, m, seed=seed),
        "neither": lambda p, m, seed: hunt(Unscouted, p, m, seed=seed),
        "halving, with a table": lambda p, m, seed: hunt(GroupSearch, p, m, seed=seed, warm=table),
        "scouts, with a table": lambda p, m, seed: hunt(Scouting, p, m, seed=seed, warm=table),
        "kinds first, by communication": lambda p, m, seed: first_choose(p, m, seed=seed, by_makespan=False),
        "kinds first, by makespan": lambda p, m, seed: first_choose(p, m, seed=seed, by_makespan=True),
        "AutoCCL": lambda p, m, seed: autoccl(p, m, seed=seed),
        "told the right kinds": lambda p, m, seed: hunt(Unscouted, within(p, kinds_of(best)), m, seed=seed),
    }
    return {way: search for way, search in ways.items() if not asked or way in asked}


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
    parser.add_argument("--every", type=int, default=1, help="only each so many of the groups of nccl")
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
