"""A block of tasks as a CP-SAT model: fixed intervals, one NoOverlap per resource, release times and tails.

NoOverlap, not Cumulative with capacity 1: the latter finds nothing on 1,000 tasks in 10 s (spec, planners section 5.1).
The problem is Concerto's RCPSP (ASPLOS 2025, section 4.4) with intervals half open and the greatest end minimised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from lagom_overlap.planners.cpsat.solver import NUM_WORKERS, new_solver, solve
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tasks of a graph that are scheduled by themselves; arcs that leave the block are left out.

    `release` is the earliest start of a task (0 where absent), `tails` what must pass after its end, `hint` known
    starts; all in ticks. `upper` bounds the greatest end plus tail from above.
    """

    tasks: tuple[int, ...]
    upper: int
    release: Mapping[int, int] = field(default_factory=dict)
    tails: Mapping[int, int] = field(default_factory=dict)
    hint: Mapping[int, int] = field(default_factory=dict)
    lower: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What was found of a block: starts by task, the greatest end plus tail, the proved bound of it (ticks)."""

    starts: Mapping[int, int]
    objective: int
    bound: int


def solve_block(graph: TaskGraph, block: Block, *, deadline: Deadline, seed: int = 0) -> Solved | None:
    """The best schedule of a block found until the deadline; None if none was found within `block.upper`."""
    model = cp_model.CpModel()
    starts: dict[int, cp_model.IntVar] = {}
    intervals: dict[int, list[cp_model.IntervalVar]] = {}
    objective = model.new_int_var(block.lower, block.upper, "")
    for task in block.tasks:
        ticks, tail, release = graph.ticks[task], block.tails.get(task, 0), block.release.get(task, 0)
        latest = block.upper - ticks - tail
        if latest < release:
            return None
        starts[task] = model.new_int_var(release, latest, "")
        interval = model.new_fixed_size_interval_var(starts[task], ticks, "")
        intervals.setdefault(graph.resource[task], []).append(interval)
        model.add(objective >= starts[task] + ticks + tail)
    for task in block.tasks:
        for pred in graph.preds[task]:
            if pred in starts:
                model.add(starts[task] >= starts[pred] + graph.ticks[pred])
    for on_resource in intervals.values():
        model.add_no_overlap(on_resource)
    for task, start in block.hint.items():
        model.add_hint(starts[task], start)
    model.minimize(objective)
    solver = new_solver(deadline, num_workers=NUM_WORKERS, seed=seed)
    if not solve(solver, model, deadline):
        return None
    makespan, bound = round(solver.objective_value), round(solver.best_objective_bound)
    return Solved(
        starts={task: solver.value(start) for task, start in starts.items()},
        objective=makespan,
        bound=bound,
    )


def solve_graph(
    graph: TaskGraph, incumbent: Schedule, *, bound: int, deadline: Deadline, seed: int = 0
) -> tuple[Schedule, int]:
    """A schedule at least as short as the incumbent, and a lower bound of all (ticks); for small graphs."""
    tasks = tuple(range(len(graph)))
    block = Block(tasks=tasks, upper=incumbent.makespan, lower=bound, hint=dict(enumerate(incumbent.starts)))
    solved = solve_block(graph, block, deadline=deadline, seed=seed)
    if solved is None:
        return incumbent, bound
    schedule = Schedule(tuple(solved.starts[task] for task in tasks), solved.objective)
    return (schedule if schedule.makespan < incumbent.makespan else incumbent), max(bound, solved.bound)
