"""The steady state of repeated layers: a modulo schedule of one layer, solved exactly, repeated as priorities.

Spec, planners section 5.3, tier T2. Task i of a layer starts at tau_i + II k_i with 0 <= tau_i < II; layer after layer
follows II later. Arcs: s_j + II distance >= s_i + ticks_i; on each resource the tau (and tau + II) do not overlap. The
least II is at least the load of each resource and the greatest ratio of a cycle. Times are medians over the layers; the
result is a priority only, so that it need not be exact: schedule generation makes a legal schedule of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from ortools.sat.python import cp_model

from lagom_overlap.planners.cpsat.solver import new_solver, solve
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.layers import LayerStage
from lagom_overlap.planners.schedule.graph import TaskGraph

MAX_TASKS: Final = 150
"""Kernels of more tasks are not solved in seconds."""
_MAX_AHEAD: Final = 4
"""k_i at most: how many layers ahead of the slowest task of a layer the others may run."""
_LOOSE: Final = (1.02, 1.1, 1.3, 1.6)
"""Intervals tried first, over their lower bound, until one has a schedule; from there on it is bisected."""
_NEAR: Final = 1.002
"""An interval so near to its bound is short enough."""
_GOOD_TURN: Final = 1.01
"""Within this of the bound, microbatches in turn are taken without looking further."""
_TURN_PROBE_S: Final = 1.0
"""For one interval of the pipeline's turn. Chosen."""
_GRAIN: Final = 0.1
"""Operators are chained up to this share of the fullest resource's time: a microbatch gets in between longer ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuloKernel:
    """One layer: tasks with `ticks` and `resource`; `arcs` (from, to, distance in layers).

    A task is a chain of operators on one resource that nothing else enters or leaves, not too long a one; `members`
    lists, per place in a layer's row, the task and the ticks from its start.
    """

    ticks: tuple[int, ...]
    resource: tuple[int, ...]
    arcs: tuple[tuple[int, int, int], ...]
    members: tuple[tuple[int, int], ...] = ()

    @property
    def bound(self) -> int:
        """No modulo schedule has a shorter interval."""
        loads = [0] * (max(self.resource) + 1)
        for resource, ticks in zip(self.resource, self.ticks, strict=True):
            loads[resource] += ticks
        return max(*loads, *self.ticks, _cycle_bound(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A modulo schedule: starts of a layer's tasks relative to the layer's own, one layer every `interval` ticks."""

    interval: int
    starts: tuple[int, ...]


def kernel_of(stage: LayerStage, graph: TaskGraph) -> ModuloKernel:
    """The kernel of a stage: the arcs of its middle layer, the median times of all."""
    rows = [[task for part in parts for task in part] for parts in stage.rows]
    middle = len(rows) // 2
    medians = [round(median(graph.ticks[row[place]] for row in rows)) for place in range(len(rows[middle]))]
    position = {task: place for place, task in enumerate(rows[middle])}
    loads = [0] * len(graph.resources)
    for task, length in zip(rows[middle], medians, strict=True):
        loads[graph.resource[task]] += length
    longest = _GRAIN * max(loads)
    ticks: list[int] = []
    resource: list[int] = []
    members: list[tuple[int, int]] = []
    for place, task in enumerate(rows[middle]):
        before = _only_before(graph, task)
        chain = -1
        if before is not None and before in position and position[before] < place:
            chain = members[position[before]][0]
        if chain >= 0 and ticks[chain] + medians[place] <= longest:
            members.append((chain, ticks[chain]))
            ticks[chain] += medians[place]
        else:
            members.append((len(ticks), 0))
            ticks.append(medians[place])
            resource.append(graph.resource[task])
    arcs = _arcs(rows, middle, graph, [chain for chain, _ in members])
    return ModuloKernel(ticks=tuple(ticks), resource=tuple(resource), arcs=arcs, members=tuple(members))


def _only_before(graph: TaskGraph, task: int) -> int | None:
    """The task that this one alone waits for, if nothing else waits for that and both are on one resource."""
    preds = graph.preds[task]
    if len(preds) != 1 or len(graph.succs[preds[0]]) != 1 or graph.resource[preds[0]] != graph.resource[task]:
        return None
    return preds[0]


def _arcs(
    rows: Sequence[Sequence[int]], middle: int, graph: TaskGraph, chains: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    """Arcs between chains, within the middle layer and from the two layers before it."""
    source: dict[int, tuple[int, int]] = {}
    for distance in (2, 1, 0):
        if middle >= distance:
            source.update((task, (place, distance)) for place, task in enumerate(rows[middle - distance]))
    arcs: dict[tuple[int, int, int], None] = {}
    for place, task in enumerate(rows[middle]):
        for pred in graph.preds[task]:
            if pred in source:
                at, distance = source[pred]
                if distance or chains[at] != chains[place]:
                    arcs[chains[at], chains[place], distance] = None
    return tuple(arcs)


def _cycle_bound(kernel: ModuloKernel) -> int:
    """The greatest sum of ticks over sum of distances of a cycle, rounded up: by bisection, Bellman-Ford inside."""
    low, high = 0, sum(kernel.ticks)
    while low < high:
        middle = (low + high) // 2
        if _has_positive_cycle(kernel, middle):
            low = middle + 1
        else:
            high = middle
    return low


def _has_positive_cycle(kernel: ModuloKernel, interval: int) -> bool:
    longest = [0] * len(kernel.ticks)
    for _ in range(len(longest) + 1):
        changed = False
        for source, target, distance in kernel.arcs:
            value = longest[source] + kernel.ticks[source] - interval * distance
            if value > longest[target]:
                longest[target] = value
                changed = True
        if not changed:
            return False
    return True


def modulo_schedule(kernel: ModuloKernel, interval: int, deadline: Deadline, seed: int = 0) -> Steady | None:
    """A modulo schedule with this interval; None if none was found in time.

    Turning a schedule makes another one: the longest task of the most loaded resource starts at offset 0.
    """
    model = cp_model.CpModel()
    count = len(kernel.ticks)
    anchor, full = _anchor(kernel)
    offsets = [model.new_int_var(0, interval - 1 if task != anchor else 0, "") for task in range(count)]
    ahead = [model.new_int_var(0, _MAX_AHEAD, "") for _ in range(count)]
    for source, target, distance in kernel.arcs:
        model.add(
            offsets[target] + interval * ahead[target] + interval * distance
            >= offsets[source] + interval * ahead[source] + kernel.ticks[source]
        )
    for resource in set(kernel.resource):
        intervals = []
        for task in range(count):
            if kernel.resource[task] != resource:
                continue
            intervals.append(model.new_fixed_size_interval_var(offsets[task], kernel.ticks[task], ""))
            if resource == full:  # the anchor starts each turn: nothing runs across its end
                model.add(offsets[task] <= interval - kernel.ticks[task])
            else:
                intervals.append(model.new_fixed_size_interval_var(offsets[task] + interval, kernel.ticks[task], ""))
        model.add_no_overlap(intervals)
    solver = new_solver(deadline, seed=seed)
    if not solve(solver, model, deadline):
        return None
    starts = [solver.value(o) + interval * solver.value(k) for o, k in zip(offsets, ahead, strict=True)]
    return Steady(interval=interval, starts=tuple(starts))


def _anchor(kernel: ModuloKernel) -> tuple[int, int]:
    """The longest task of the most loaded resource, and that resource."""
    loads: dict[int, int] = {}
    for resource, ticks in zip(kernel.resource, kernel.ticks, strict=True):
        loads[resource] = loads.get(resource, 0) + ticks
    full = max(loads, key=lambda resource: loads[resource])
    tasks = [task for task, resource in enumerate(kernel.resource) if resource == full]
    return max(tasks, key=lambda task: kernel.ticks[task]), full


def steady_state(kernel: ModuloKernel, deadline: Deadline, *, probe_s: float = 2.0, seed: int = 0) -> Steady | None:
    """The modulo schedule of the shortest interval found until the deadline."""
    if len(kernel.ticks) > MAX_TASKS:
        return None
    bound = kernel.bound
    failed, best = bound - 1, None
    for factor in _LOOSE:
        if deadline.left_s <= 0:
            return None
        interval = int(bound * factor) + 1
        best = modulo_schedule(kernel, interval, deadline.within(probe_s), seed)
        if best is not None:
            break
        failed = interval
    while best is not None and best.interval > max(bound * _NEAR, failed + 1) and deadline.left_s > 0:
        interval = bound if failed < bound else (failed + best.interval) // 2
        if best.interval - interval < bound * _NEAR - bound:
            break
        schedule = modulo_schedule(kernel, interval, deadline.within(probe_s), seed)
        best, failed = (schedule, failed) if schedule is not None else (best, interval)
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rhythm:
    """Starts of the operators of a stage's row, relative to the layer's own; one layer every `interval` ticks."""

    interval: int
    starts: tuple[int, ...]


def _rhythm(kernel: ModuloKernel, steady: Steady) -> _Rhythm:
    return _Rhythm(
        interval=steady.interval,
        starts=tuple(steady.starts[chain] + within for chain, within in kernel.members),
    )


def _in_turn(stage: LayerStage, graph: TaskGraph, deadline: Deadline, seed: int) -> _Rhythm | None:
    """The rhythm of microbatches that do the same, each an equal part of the interval after the one before.

    Then one of them alone has a modulo schedule whose interval is that part: a kernel of a fraction of the tasks.
    """
    num = len(stage.microbatches)
    alone = [
        replace(stage, microbatches=(batch,), rows=tuple((parts[place],) for parts in stage.rows))
        for place, batch in enumerate(stage.microbatches)
    ]
    kernels = [kernel_of(each, graph) for each in alone]
    shapes = {(kernel.arcs, kernel.resource) for kernel in kernels}
    if num < 2 or len(shapes) > 1:
        return None
    turn = replace(
        kernels[0], arcs=tuple((source, target, distance * num) for source, target, distance in kernels[0].arcs)
    )
    steady = steady_state(turn, deadline, probe_s=_TURN_PROBE_S, seed=seed)
    if steady is None:
        return None
    one = _rhythm(turn, steady).starts
    return _Rhythm(
        interval=num * steady.interval,
        starts=tuple(start + place * steady.interval for place in range(num) for start in one),
    )


def _stage_rhythm(
    stage: LayerStage, kernel: ModuloKernel, graph: TaskGraph, deadline: Deadline, seed: int
) -> _Rhythm | None:
    """The shorter of the microbatches in turn and of all of them freely."""
    in_turn = _in_turn(stage, graph, deadline.within(0.4 * deadline.left_s), seed)
    if in_turn is not None and in_turn.interval <= kernel.bound * _GOOD_TURN:
        return in_turn
    steady = steady_state(kernel, deadline, seed=seed)
    if steady is None:
        return in_turn
    freely = _rhythm(kernel, steady)
    return in_turn if in_turn is not None and in_turn.interval <= freely.interval else freely


def steady_priorities(
    graph: TaskGraph, stages: Sequence[LayerStage], deadline: Deadline, seed: int = 0
) -> list[float] | None:
    """A priority per task from the steady states of the stages, one after the other; None if a stage has none.

    Tasks outside of the stages come as soon as what they wait for is done, or just before what waits for them.
    """
    priority: list[float | None] = [None] * len(graph)
    known: dict[ModuloKernel, _Rhythm] = {}
    begin = 0
    for number, stage in enumerate(stages):
        kernel = kernel_of(stage, graph)
        rhythm = known.get(kernel) or _like(kernel, known)
        if rhythm is None:
            share = deadline.within(deadline.left_s / max(1, min(2, len(stages) - number)))
            rhythm = _stage_rhythm(stage, kernel, graph, share, seed)
        if rhythm is None:
            return None
        known[kernel] = rhythm
        for turn, parts in enumerate(stage.rows):
            row = [task for part in parts for task in part]
            for task, start in zip(row, rhythm.starts, strict=True):
                priority[task] = begin + turn * rhythm.interval + start
        begin += len(stage.rows) * rhythm.interval
    return _completed(graph, priority)


def _like(kernel: ModuloKernel, known: dict[ModuloKernel, _Rhythm]) -> _Rhythm | None:
    """The rhythm of a kernel with the same arcs and resources: another microbatch, slightly other times."""
    for other, rhythm in known.items():
        if (other.arcs, other.resource, len(other.members)) == (kernel.arcs, kernel.resource, len(kernel.members)):
            return rhythm
    return None


def _completed(graph: TaskGraph, priority: Sequence[float | None]) -> list[float]:
    order = list(priority)
    for task in reversed(graph.topological):
        after = [value for succ in graph.succs[task] if (value := order[succ]) is not None]
        if order[task] is None and not graph.preds[task] and after:
            order[task] = min(after) - graph.ticks[task]
    for task in graph.topological:
        if order[task] is None:
            order[task] = max(((order[pred] or 0.0) + graph.ticks[pred] for pred in graph.preds[task]), default=0.0)
    return [value or 0.0 for value in order]
