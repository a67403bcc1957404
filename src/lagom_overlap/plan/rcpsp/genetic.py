"""A genetic search over orders of activities, every child improved forward and backward.

After V. Valls, F. Ballestin, S. Quintanilla, "A hybrid genetic algorithm for the resource-constrained project
scheduling problem", EJOR 185 (2008) 495-508: individuals are justified schedules read as lists by start; the crossover
keeps a stretch of one parent in which resources are well used, and takes the rest in the order of the other.

Departures: a steady population instead of generations; a child replaces the worst individual, and one with a makespan
and a list that exist already is dropped; when nothing improves for long all but the best are made anew.
"""

from random import Random
from typing import Final

from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.rcpsp.generation import Packed, justified, placed, serial
from lagom_overlap.plan.rcpsp.project import Project

_POPULATION: Final = 120
_STALE: Final = 25 * _POPULATION
"""Children without a better one after which the population is made anew."""

_Individual = tuple[int, list[int]]
"""Makespan and starts."""


class Genetic:
    """The search; `run` continues it for a while. `best` is the shortest schedule known (makespan, starts)."""

    def __init__(self, project: Project, packed: Packed, seed: int = 0) -> None:
        self._project = project
        self._ahead = packed
        self._back = packed.reversed()
        self._random = Random(seed)
        self._tails = _tails(packed)
        self._lists: set[tuple[int, ...]] = set()
        self._people: list[_Individual] = []
        self._since_better = 0
        starts, length = justified(packed, self._back, serial(packed, [-float(tail) for tail in self._tails]))
        self.best: _Individual = (length, starts)
        self._weights = [
            sum(need / c for need, c in zip(row, project.capacities, strict=True) if c) for row in project.demands
        ]
        self._take(starts)

    def run(self, deadline: Deadline, target: int) -> None:
        """Searches until the deadline, or a makespan of `target`."""
        while deadline.left_s > 0 and self.best[0] > target:
            if len(self._people) < _POPULATION:
                self._sampled()
            else:
                self._child()
            if self._since_better > _STALE:
                self._renew()

    def add(self, starts: list[int]) -> None:
        """Takes a schedule from elsewhere into the population."""
        self._take(starts)

    def _take(self, starts: list[int]) -> None:
        better, length = justified(self._ahead, self._back, starts)
        self._since_better += 1
        if length < self.best[0]:
            self.best = (length, better)
            self._since_better = 0
        key = tuple(better)
        if key in self._lists:
            return
        self._lists.add(key)
        self._people.append((length, better))
        self._people.sort(key=lambda individual: individual[0])
        if len(self._people) > _POPULATION:
            self._lists.discard(tuple(self._people.pop()[1]))

    def _sampled(self) -> None:
        """A schedule from longest tails with noise."""
        noise = self._random.choice((0.1, 0.2, 0.4)) * max(self._tails)
        self._take(serial(self._ahead, [self._random.uniform(0, noise) - tail for tail in self._tails]))

    def _renew(self) -> None:
        self._people = self._people[:2]
        self._lists = {tuple(starts) for _, starts in self._people}
        self._since_better = 0

    def _child(self) -> None:
        mother, father = self._chosen(), self._chosen()
        order = sorted(self._ahead.topological, key=mother[1].__getitem__)  # ties in topological order
        other = sorted(self._ahead.topological, key=father[1].__getitem__)
        begin, end = self._stretch(mother)
        kept = [a for a in order if begin <= mother[1][a] < end]
        inside = set(kept)
        # What the kept stretch waits for comes before it, in the father's order; the rest behind it.
        earlier = {a for a in order if mother[1][a] < begin}
        made = [a for a in other if a in earlier] + kept + [a for a in other if a not in earlier and a not in inside]
        if self._random.random() < 0.5:
            self._take(placed(self._ahead, made))
            return
        priority = [0.0] * len(made)
        for place, activity in enumerate(made):
            priority[activity] = float(place)
        self._mutate(priority)
        self._take(serial(self._ahead, priority))

    def _chosen(self) -> _Individual:
        """The better of two at random."""
        first, second = self._random.randrange(_POPULATION), self._random.randrange(_POPULATION)
        return self._people[min(first, second)]

    def _stretch(self, individual: _Individual) -> tuple[int, int]:
        """Of a few random stretches of a schedule, the one in which the most resource time is used."""
        length, starts = individual
        options = []
        for _ in range(3):
            span = max(1, int(length * self._random.uniform(0.15, 0.5)))
            begin = self._random.randint(0, max(0, length - span))
            options.append((self._use(starts, begin, begin + span) / span, begin, begin + span))
        _, begin, end = max(options)
        return begin, end

    def _use(self, starts: list[int], begin: int, end: int) -> float:
        durations = self._project.durations
        return sum(self._weights[a] * durations[a] for a, start in enumerate(starts) if begin <= start < end)

    def _mutate(self, priority: list[float]) -> None:
        for activity in range(len(priority)):
            if self._random.random() < 0.03:
                priority[activity] += self._random.gauss(0, len(priority) * 0.1)


def _tails(project: Packed) -> list[int]:
    """The longest path from the start of each activity to the end of the project."""
    after = [0] * len(project.durations)
    waits = [len(succs) for succs in project.succs]
    order = [activity for activity, count in enumerate(waits) if not count]
    for activity in order:
        after[activity] += project.durations[activity]
        for pred in project.preds[activity]:
            after[pred] = max(after[pred], after[activity])
            waits[pred] -= 1
            if not waits[pred]:
                order.append(pred)
    return after
