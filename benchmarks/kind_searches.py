"""Ways to find the right implementation of each collective; see `subspaces.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drawn_kinds import Kind
from lagom_overlap.collective import ConfigSpace, Subspace
from lagom_overlap.tuners.autoccl import AutoCcl
from lagom_overlap.tuners.groupwise import Probe
from lagom_overlap.tuners.model_based.effort import EFFORTS
from lagom_overlap.tuners.model_based.posterior import Pool
from lagom_overlap.tuners.model_based.search import DOUBT, GroupSearch
from lagom_overlap.tuners.model_based.search_space import Surfaces
from lagom_overlap.tuners.model_based.surrogate import Allocation, Surrogate
from lagom_overlap.tuners.model_based.tuner import earlier_pool
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement, Outcome
from lagom_overlap.tuners.warm_start import WarmStart

MOST_SCOUTS, HOPELESS = 3, 1.25


class Scouting(GroupSearch):
    """The rule before halving: at most three looks at kinds never measured, each at its best by the surrogate."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scouted: set[int] = set()

    def _scout(self, surrogate: Surrogate) -> Probe | None:
        best, lattice = self._best(), self._search_space.lattices[0]
        if best is None or len(self._scouted) >= MOST_SCOUTS:
            return None
        seen = {kind for _, kind in self._measured_kinds()} | self._scouted
        looks = []
        for kind in set(range(len(lattice.kinds))) - seen:
            places = Allocation(surrogate, self._excluded, DOUBT).best_of_kind(kind)
            if places is not None:
                looks.append((float(surrogate.makespans(places[None])[0]), kind, places))
        if not looks or min(look[0] for look in looks) > HOPELESS * self._estimate_s(best):
            return None
        _, kind, places = min(looks, key=lambda look: look[:2])
        self._scouted.add(kind)
        assignment = self._search_space.assignment_at(places.tolist())
        return None if self._arms.knows(assignment) else Probe(assignment=assignment, reason="scout")


class Unscouted(GroupSearch):
    """No look at a kind that no surrogate favours."""

    def _scout(self, surrogate: Surrogate) -> Probe | None:
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
    return Found(search.incumbent, count)


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
