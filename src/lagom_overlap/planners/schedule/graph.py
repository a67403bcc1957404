"""What a scheduler sees of an iteration: tasks with integer durations, a resource each, and arcs between them.

Spec, planners section 0: time counts in ticks, every duration is at least one, so that a schedule's starts order the
tasks of a path strictly. A resource runs one task at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks in program order; `preds[i]` are the numbers of those that task i waits for.

    `ticks` are durations in units of `tick_s` seconds, `resource[i]` is the place of task i's resource in `resources`.
    Arcs may point against program order (memory arcs do), but not in a circle. `succs` and `topological` (program order
    wherever the arcs allow it) follow from the arcs.
    """

    names: tuple[str, ...]
    ticks: tuple[int, ...]
    resource: tuple[int, ...]
    preds: tuple[tuple[int, ...], ...]
    resources: tuple[str, ...]
    tick_s: float
    succs: tuple[tuple[int, ...], ...] = field(init=False)
    topological: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        num = len(self.names)
        if not len(self.ticks) == len(self.resource) == len(self.preds) == num:
            raise ValueError("names, ticks, resource and preds must be equally long")
        if num and (min(self.ticks) < 1 or not 0 <= min(self.resource) <= max(self.resource) < len(self.resources)):
            raise ValueError("every task needs at least one tick and one of the resources")
        succs: list[list[int]] = [[] for _ in range(num)]
        for task, preds in enumerate(self.preds):
            for pred in preds:
                succs[pred].append(task)
        set_field: Callable[[str, object], None] = partial(object.__setattr__, self)
        set_field("succs", tuple(map(tuple, succs)))
        set_field("topological", self._sorted())

    def __len__(self) -> int:
        return len(self.names)

    def _sorted(self) -> tuple[int, ...]:
        if all(pred < task for task, preds in enumerate(self.preds) for pred in preds):
            return tuple(range(len(self)))
        waits = [len(preds) for preds in self.preds]
        order = [task for task, count in enumerate(waits) if not count]
        for task in order:
            for succ in self.succs[task]:
                waits[succ] -= 1
                if not waits[succ]:
                    order.append(succ)
        if len(order) < len(self):
            raise JobError(f"the graph has a cycle: {' -> '.join(self._a_cycle(waits))}")
        return tuple(order)

    def _a_cycle(self, waits: Sequence[int]) -> list[str]:
        """Names along one circle of arcs; `waits` is positive exactly on and behind circles."""
        task = next(task for task, count in enumerate(waits) if count)
        place: dict[int, int] = {}
        walk: list[int] = []
        while task not in place:
            place[task] = len(walk)
            walk.append(task)
            task = next(pred for pred in self.preds[task] if waits[pred])
        return [self.names[t] for t in reversed([*walk[place[task] :], task])]

    def with_arcs(self, arcs: Iterable[tuple[int, int]]) -> "TaskGraph":
        """The graph with more arcs (from, to).

        Raises:
            JobError: if they close a circle.
        """
        preds = [list(tasks) for tasks in self.preds]
        for source, target in arcs:
            preds[target].append(source)
        return replace(self, preds=tuple(tuple(sorted(set(tasks))) for tasks in preds))

    def seconds(self, ticks: float) -> float:
        """Ticks in seconds."""
        return ticks * self.tick_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each task starts, and when the last one ends (ticks)."""

    starts: tuple[int, ...]
    makespan: int
