"""Our planner: near the lower bound on steps of 20,000 operators within seconds (spec, planners section 5.3).

    T0  lower bounds
    T1  portfolio of priorities (`schedule.portfolio`)
    T4  cuts of operators that are too coarse to fill gaps (`cut_search`), then T1 on what they make
    T2  steady state of the repeated layers as a priority (`kernel`), with the cuts if they serve
    T3  windows of the orders found: many schedules tried of each (`schedule.window_search`), then, where nothing is
        gained any more, solved exactly (`cpsat.windows`); a small step is solved whole

Each tier starts from what is known; the best schedule is never lost; all stop at the bound. Memory is in the graph as
arcs (`memory`), so that no tier knows of it. Of the last orders found, the shortest with contention is the plan, where
the cost model prices it: the shortest without need not be.

Where times are uncertain, the order of least regret under scaled communication is chosen (section 5.9): noise of single
operators is harmless, a common error of all collectives is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.cpsat import improve_by_windows, solve_graph
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.framework import framework_arcs
from lagom_overlap.planners.layers import stages_of
from lagom_overlap.planners.memory import fits, with_memory
from lagom_overlap.planners.modulo_schedule import steady_priorities
from lagom_overlap.planners.ours.cut_search import search_cuts
from lagom_overlap.planners.ours.cuts import Cutter, splits_of
from lagom_overlap.planners.schedule import check, reorder_of, task_graph
from lagom_overlap.planners.schedule.bounds import lower_bound, two_chain_bound
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.incumbent import NUM_KEPT, Incumbent, PlanProgress
from lagom_overlap.planners.schedule.portfolio import run_portfolio
from lagom_overlap.planners.schedule.simulate import decode, simulate
from lagom_overlap.planners.schedule.window_search import race
from lagom_overlap.planners.simulated import Simulation, simulated, simulation_of
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Reorder, Rewrite, Split

COMM_SCALES: Final = (0.85, 1.0, 1.15)
"""Factors on the times of all communications under which an order is judged."""


def scaled(graph: TaskGraph, factor: float) -> TaskGraph:
    """The graph with the durations of all but the first resource's tasks multiplied."""
    ticks = [
        ticks if resource == 0 else max(1, round(ticks * factor))
        for ticks, resource in zip(graph.ticks, graph.resource, strict=True)
    ]
    return replace(graph, ticks=tuple(ticks))


def most_robust(graph: TaskGraph, schedules: Sequence[Schedule]) -> Schedule:
    """The schedule whose order has the least greatest makespan over lower bound under the scales."""
    graphs = [scaled(graph, factor) for factor in COMM_SCALES]
    bounds = [lower_bound(each) for each in graphs]

    def regret(schedule: Schedule) -> float:
        order = decode(graph, schedule)
        return max(simulate(each, order).makespan / bound for each, bound in zip(graphs, bounds, strict=True))

    return min(schedules, key=regret)


TOLERANCE: Final = 0.0005
"""A schedule so near to the bound is not improved."""
_GOOD: Final = 0.001
"""Within this of the bound neither a steady state nor cuts are looked for."""
_SMALL: Final = 150
"""Graphs of this many tasks are solved whole."""
_RESERVE: Final = 0.08
"""Share of the budget for rewriting and checking at the end, at least."""
_MAX_RESERVE: Final = 0.3
_SIMULATED_OPERATORS: Final = 80_000
"""Operators in all orders that are simulated with contention at the end: about two seconds of a core."""
_FINISH_OVER_BEGIN: Final = 2.0
"""Rewriting one order at the end takes about this many times what making the first graph took, on a busy CPU too."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A rewritten step with its graph (memory arcs included) and the search on it."""

    rewrites: tuple[Rewrite, ...]
    iteration: Iteration
    graph: TaskGraph
    search: Incumbent
    made: list[Schedule]  # starts of the window search


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """The planner. `robust` chooses among the orders found the one that bears errors of the times best.

    `split` allows operators to be cut. `on_progress` is told every better schedule with the bound.
    """

    robust: bool = False
    split: bool = True
    on_progress: Callable[[PlanProgress], None] | None = None

    def plan(self, problem: PlanProblem) -> Plan:
        """The best plan found within the problem's budget.

        Raises:
            JobError: if no schedule fits the memory limit; says by how much.
        """
        begun = problem.deadline()
        base = task_graph(problem)
        bound = lower_bound(base)
        deadline = begun.within(begun.left_s - _reserve_s(begun, _num_orders(problem, len(base))))
        whole = self._searched(problem, (), bound, deadline, base)
        beyond = () if _is_near_bound(whole.search) else _out_of_reach(base, bound)
        best = whole
        if self.split and not _is_near_bound(whole.search):
            best = self._with_cuts(problem, whole, bound, deadline)
        if not _is_near_bound(best.search) and not best.search.is_done:
            _offer_steady(best, deadline.within(0.5 * deadline.left_s), problem.seed)
        if not best.search.is_done and len(best.graph) > _SMALL:
            race(best.graph, best.made, best.search, deadline=deadline, seed=problem.seed)
        if not best.search.is_done and len(best.graph) > _SMALL:
            improve_by_windows(best.graph, best.search, seed=problem.seed)
        best = min(best, whole, key=lambda candidate: candidate.search.best.makespan)
        remarks = (*(() if _is_near_bound(best.search) else beyond), *begun.remarks())
        return self._finished(problem, best, bound, begun, remarks)

    def replan(self, problem: PlanProblem, previous: Plan) -> Plan:
        """The plan for other times of the same step (another batch size), from a plan that exists: in under a second.

        Cuts and order are kept as far as they still serve; the problem's budget bounds the time.
        """
        begun = problem.deadline()
        deadline = begun.within(min(begun.left_s, 1.0) * (1.0 - _RESERVE))
        kept = tuple(step for step in previous.rewrites if not isinstance(step, Reorder))
        bound = lower_bound(task_graph(problem))
        iteration = rewritten(problem.iteration, kept) if kept else problem.iteration
        graph = _with_arcs(problem, iteration, task_graph(problem, iteration))
        search = Incumbent(bound, deadline, tolerance=TOLERANCE, on_progress=self.on_progress)
        place = {op.name: float(number) for number, op in enumerate(previous.iteration.ops)}
        priority = [place.get(name, float(number)) for number, name in enumerate(graph.names)]
        _offer_priority(graph, priority, "the previous plan's order", search, deadline)
        if not search.is_done:
            run_portfolio(graph, search, deadline, max_rounds=4)
        return self._finished(problem, _Candidate(kept, iteration, graph, search, []), bound, begun)

    def _searched(
        self,
        problem: PlanProblem,
        rewrites: tuple[Rewrite, ...],
        bound: int,
        deadline: Deadline,
        base: TaskGraph | None = None,
    ) -> _Candidate:
        """T1 on the step after some rewrites, whose graph `base` is if it is known; a small graph is solved whole."""
        iteration = rewritten(problem.iteration, rewrites) if rewrites else problem.iteration
        base = base or task_graph(problem, iteration)
        graph = _with_arcs(problem, iteration, base)
        search = Incumbent(bound, deadline, tolerance=TOLERANCE, on_progress=self.on_progress)
        made = run_portfolio(graph, search, deadline.within(0.35 * deadline.left_s), max_rounds=8)
        if not search.is_done and len(graph) <= _SMALL:
            solved, proved = solve_graph(
                graph, search.best, bound=bound, deadline=deadline.within(0.4 * deadline.left_s), seed=problem.seed
            )
            search.offer(solved, "solved whole")
            if proved == search.best.makespan:
                search.prove()
        return _Candidate(rewrites, iteration, graph, search, made)

    def _with_cuts(self, problem: PlanProblem, whole: _Candidate, bound: int, deadline: Deadline) -> _Candidate:
        """The step with cuts, if some were found to serve, else without."""
        cutter = Cutter(problem)
        cuts = search_cuts(
            problem,
            whole.graph,
            cutter,
            deadline=deadline.within(0.4 * deadline.left_s),
        )
        splits = splits_of(cuts)
        if not splits or deadline.left_s <= 0 or not _cut_fits(problem, splits):
            return whole
        return self._searched(problem, splits, bound, deadline)

    def _finished(
        self, problem: PlanProblem, best: _Candidate, bound: int, ends: Deadline, remarks: tuple[str, ...] = ()
    ) -> Plan:
        graph = best.graph
        schedule = (
            most_robust(graph, best.search.latest) if self.robust else _shortest_with_contention(problem, best, ends)
        )
        check(graph, schedule)
        reorder = reorder_of(best.iteration, graph, schedule)
        rewrites = (*best.rewrites, reorder)
        place = {name: number for number, name in enumerate(graph.names)}
        issued = simulate(graph, [place[name] for name in reorder.order])
        assert issued.makespan <= schedule.makespan, "issue order is slower than its schedule"
        return Plan(
            planner="ours",
            rewrites=rewrites,
            iteration=rewritten(best.iteration, (reorder,)),
            lower_bound_s=graph.seconds(bound),
            is_optimal=_is_shortest(best, issued, bound),
            notes=(*_notes(best, schedule), *remarks),
        )


def _num_orders(problem: PlanProblem, num_operators: int) -> int:
    """How many orders are simulated with contention at the end; 1 is the shortest alone, which needs no simulation."""
    if simulation_of(problem) is Simulation.ALONE:
        return 1
    return min(NUM_KEPT, max(1, _SIMULATED_OPERATORS // max(1, num_operators)))


def _shortest_with_contention(problem: PlanProblem, best: _Candidate, ends: Deadline) -> Schedule:
    """Of the last orders found, the one that takes least with contention, where the problem's times price it.

    The shortest without goes first; where the clock ends planning, no simulation is begun that would not end in time.
    """
    latest = best.search.latest[-_num_orders(problem, len(best.graph)) :]
    if len(latest) < 2:
        return best.search.best
    found: list[tuple[float, Schedule]] = []
    longest_s = 0.0
    for schedule in reversed(latest):
        if not ends.counts_work and ends.left_s < _FINISH_OVER_BEGIN * longest_s:
            break
        begin_s = ends.elapsed_s
        reorder = reorder_of(best.iteration, best.graph, schedule)
        found.append((simulated(problem, rewritten(best.iteration, (reorder,))).makespan_s, schedule))
        longest_s = max(longest_s, ends.elapsed_s - begin_s)
    # The clock may have ended planning before the first simulation: then the shortest without contention stands.
    return min(found, key=lambda one: one[0])[1] if found else best.search.best


def _reserve_s(begun: Deadline, num_orders: int) -> float:
    """What is kept for the end; none of the work, which is counted in the searches only."""
    if begun.counts_work:
        return 0.0
    by_begin_s = num_orders * _FINISH_OVER_BEGIN * begun.elapsed_s
    return max(_RESERVE * begun.budget_s, min(_MAX_RESERVE * begun.budget_s, by_begin_s))


def _offer_steady(best: _Candidate, deadline: Deadline, seed: int) -> None:
    """T2 on a candidate."""
    stages = stages_of(best.iteration, best.graph)
    if stages:
        priority = steady_priorities(best.graph, stages, deadline.within(0.7 * deadline.left_s), seed=seed)
        if priority is not None:
            best.made.extend(_offer_priority(best.graph, priority, "steady state", best.search, deadline))


def _is_shortest(best: _Candidate, issued: Schedule, bound: int) -> bool:
    """Nothing is cut, and no schedule is shorter: proved by the bound, or by solving the step whole."""
    proved = best.search.is_proved and issued.makespan == best.search.best.makespan
    return not best.rewrites and (issued.makespan <= bound or proved)


def _is_near_bound(search: Incumbent) -> bool:
    return search.best.makespan <= search.bound * (1.0 + _GOOD)


def _cut_fits(problem: PlanProblem, splits: tuple[Split, ...]) -> bool:
    limit = problem.memory_limit_bytes
    return limit is None or fits(rewritten(problem.iteration, splits), limit)


def _with_arcs(problem: PlanProblem, iteration: Iteration, base: TaskGraph) -> TaskGraph:
    """The graph with the arcs of the framework and the prefetch depth, of the limit unless all buffers keep it."""
    arcs = framework_arcs(iteration) if problem.framework is not None else []
    graph = with_memory(base, iteration, depth=problem.prefetch, limit_bytes=None, more=arcs)
    limit = problem.memory_limit_bytes
    if limit is None:
        return graph
    everything = iteration.resident_bytes + sum(buffer.num_bytes for buffer in iteration.buffers)
    if everything <= limit:
        return graph  # no order can hold more
    return with_memory(graph, iteration, depth=None, limit_bytes=limit)


def _offer_priority(
    graph: TaskGraph, priority: Sequence[float], name: str, search: Incumbent, deadline: Deadline
) -> list[Schedule]:
    """Offers the schedules of a priority, improved; returns them."""
    generation = ScheduleGeneration(graph)
    found: list[Schedule] = []
    for kind in Kind:
        made = generation.schedule(kind, priority, deadline=deadline)
        search.offer(made, name)
        for back in Kind:
            better = generation.improved(made, (kind, back), max_rounds=8, target=search.target, deadline=deadline)
            search.offer(better, f"{name}, improved")
            found.append(better)
            if search.is_done:
                return found
    return found


def _out_of_reach(graph: TaskGraph, bound: int) -> tuple[str, ...]:
    """What no schedule of the uncut step goes below, if that is known to be more than the lower bound."""
    least = two_chain_bound(graph)
    return (f"no schedule of the uncut step is below {least / bound:.4f} of the lower bound",) if least > bound else ()


def _notes(best: _Candidate, schedule: Schedule) -> tuple[str, ...]:
    ratio = schedule.makespan / best.search.bound if best.search.bound else 1.0
    found_by = next(step.found_by for step in best.search.history if step.makespan == schedule.makespan)
    notes = [f"{ratio:.4f} of the lower bound without contention; schedule by: {found_by}"]
    if schedule.makespan > best.search.best.makespan:
        shortest = best.search.best.makespan / best.search.bound
        notes.append(f"shorter with contention than the shortest order without ({shortest:.4f} of the bound)")
    cuts = [step for step in best.rewrites if isinstance(step, Split)]
    if cuts:
        notes.append(f"{len(cuts)} operators are cut")
    return tuple(notes)
