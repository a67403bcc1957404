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

All of it is one search from several starts (`starts`): the step itself; the step with the times that operators took
under contention; the plans of the papers' planners and of the frameworks' rules, with their groups, chains, fusions and
launches. Each is judged with contention, and the tiers go on from the best. So the plan is behind none of them. Of a
step of FSDP2 it is FSDP2's settings where these are shorter still.

Where times are uncertain, the order of least regret under scaled communication is chosen (section 5.9): noise of single
operators is harmless, a common error of all collectives is not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.cpsat import improve_by_windows, solve_graph
from lagom_overlap.planners.deadline import STEPS_PER_S, WORK_NOTE, Deadline
from lagom_overlap.planners.framework_waits import framework_arcs
from lagom_overlap.planners.layers import stages_of
from lagom_overlap.planners.memory import fits, with_memory
from lagom_overlap.planners.modulo_schedule import steady_priorities
from lagom_overlap.planners.ours.cut_search import search_cuts
from lagom_overlap.planners.ours.cuts import Cutter, splits_of
from lagom_overlap.planners.ours.starts import other_plans, settings_plan
from lagom_overlap.planners.schedule import check, reorder_of, task_graph
from lagom_overlap.planners.schedule.bounds import lower_bound, two_chain_bound
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.planners.schedule.incumbent import NUM_KEPT, Incumbent, PlanProgress
from lagom_overlap.planners.schedule.portfolio import run_portfolio
from lagom_overlap.planners.schedule.simulate import decode, simulate
from lagom_overlap.planners.schedule.window_search import race
from lagom_overlap.planners.simulated import Simulation, simulated, simulation_of
from lagom_overlap.planners.times import NamedTimes, origin_name
from lagom_overlap.units import format_percent, format_seconds
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.ops import is_host_read
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
"""Of the budget, the most that is kept for what follows the search."""
_SIMULATED_OPERATORS: Final = 80_000
"""Operators in all orders that are simulated with contention at the end: about two seconds of a core."""
_FINISH_OVER_BEGIN: Final = 2.0
"""Rewriting one order at the end takes about this many times what making the first graph took, on a busy CPU too."""


_OWN_SHARE: Final = 0.25
"""Of the budget: the search that begins with the step itself, before others are asked."""
_SETTINGS_SHARE: Final = 0.3
"""Of what is left then: FSDP2's settings, of its own step."""
_OTHERS_SHARE, _HURRIED_SHARE = 0.8, 0.2
"""Of what is left then: all other planners together; where they would not come to an end, all the same."""
_OTHERS_STEPS: Final = 20_000
"""Per operator, of all other planners until nothing is left to try; measured on steps of 200 to 400 operators."""
_ROUNDS, _ROUND_SHARE = 3, 0.6
"""Of planning again under contention: how often at most, and what of the time left each takes at most."""
_SEARCHED: Final = 25
"""The least that a search takes, in times of making the graph: all members of the portfolio, rewriting, simulating."""
_NO_ORDER: Final = "No order that was found is faster than the step as it is issued."
_LEAST_GAIN: Final = 1e-6
"""Relative: a shorter step than that is the same one, of sums in another order."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A rewritten step with its graph (memory arcs included) and the search on it."""

    rewrites: tuple[Rewrite, ...]
    iteration: Iteration
    graph: TaskGraph
    search: Incumbent
    made: list[Schedule]  # starts of the window search


@dataclass(frozen=True, slots=True)
class _Judged:
    """A plan and what it takes in the simulation that judges all (s); whether it fits the GPU as the step did."""

    plan: Plan
    makespan_s: float
    fits: bool

    def is_better_than(self, other: "_Judged") -> bool:
        """Whether it is to be preferred."""
        if self.fits != other.fits:
            return self.fits
        return self.makespan_s < other.makespan_s * (1.0 - _LEAST_GAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Our planner; `robust` takes the order that errors in the times change least.

    `split` allows operators to be cut. With `starts` the other planners' plans are starts of the search, and it is
    behind none of those that ended within its budget. `on_progress` is told every better schedule of the search that
    begins with the step itself, with the bound.
    """

    robust: bool = False
    split: bool = True
    starts: bool = True
    on_progress: Callable[[PlanProgress], None] | None = None

    def plan(self, problem: PlanProblem) -> Plan:
        """The best plan found within the problem's budget.

        Raises:
            JobError: if no schedule fits the memory limit; says by how much.
        """
        begun = problem.deadline()
        has_starts = self.starts and not self.robust and bool(problem.iteration.comms)
        base, graph_s = _graph_of(problem, begun)
        ends = begun.within(_OWN_SHARE * begun.left_s) if has_starts else begun
        own = self._searched(problem, ends, base=base, graph_s=graph_s)
        plan = self._finished(problem, own, ends)
        if has_starts:
            plan = self._from_starts(problem, own, plan, begun, graph_s)
        return replace(plan, notes=(*plan.notes, *begun.remarks()))

    def _from_starts(self, problem: PlanProblem, own: _Candidate, plan: Plan, begun: Deadline, graph_s: float) -> Plan:
        """The best of a plan, the other planners' plans and what the search makes of the best of those.

        Making the step's graph took `graph_s`: nothing is begun that would not end in time.
        """
        best = first = _judged(problem, plan)
        settings = settings_plan(problem, begun.within(_SETTINGS_SHARE * begun.left_s))
        wanted_s = _OTHERS_STEPS * len(problem.iteration.ops) / STEPS_PER_S
        share = _OTHERS_SHARE if wanted_s <= 2 * begun.left_s else _HURRIED_SHARE
        ends = begun.within(share * begun.left_s)
        for other in other_plans(problem, split=self.split, deadline=ends, graph_s=graph_s):
            best = _better(best, _judged(problem, other))
        for _ in range(_ROUNDS):
            before = best
            has_other = best is not first or simulation_of(problem) is Simulation.CONTENTION
            if begun.left_s > _SEARCHED * graph_s and has_other:
                ends = begun.within(_ROUND_SHARE * begun.left_s)
                best = _better(best, _judged(problem, self._from_start(problem, best.plan, ends)))
            if best is before:
                break
        if best is first and begun.left_s > 0:
            orders = _num_orders(problem, len(own.graph))
            searching = begun.within(begun.left_s - orders * _FINISH_OVER_BEGIN * graph_s)
            own.search.go_on(searching)
            _improve(own, searching, problem.seed)
            best = _better(best, _judged(problem, self._finished(problem, own, begun.within(begun.left_s))))
        unplanned = Plan(planner="ours", rewrites=(), iteration=problem.unplanned, lower_bound_s=plan.lower_bound_s)
        left = _judged(problem, unplanned)
        is_worse = left.is_better_than(best) and simulation_of(problem) is Simulation.CONTENTION
        if settings is not None and _judged(problem, settings).is_better_than(left if is_worse else best):
            gain = 1.0 - best.makespan_s / left.makespan_s
            note = f"The best order found takes {format_percent(gain)} off the step." if gain > 0 else _NO_ORDER
            return replace(settings, notes=(note, *_without_work(settings)))
        if is_worse:
            took = f"{format_seconds(best.makespan_s)}, the step as it is issued {format_seconds(left.makespan_s)}"
            return replace(unplanned, notes=(f"No gain: with contention the best order found takes {took}.",))
        if best.plan.planner != "ours":
            notes = (f"Found by planner {best.plan.planner}.", *_without_work(best.plan))
            return replace(best.plan, planner="ours", lower_bound_s=plan.lower_bound_s, is_optimal=False, notes=notes)
        return best.plan

    def _from_start(self, problem: PlanProblem, start: Plan, ends: Deadline) -> Plan:
        """What the search makes of a plan's operators, from its order on, for the times that they took in it."""
        rewrites = tuple(step for step in start.rewrites if not isinstance(step, Reorder))
        begun = replace(problem, iteration=rewritten(problem.iteration, rewrites), issued=None)
        if simulation_of(problem) is Simulation.CONTENTION:
            begun = replace(begun, times=_contended_times(problem, start))
        finished = self._finished(begun, self._searched(begun, ends, start, is_told=False), ends)
        steps = (*rewrites, *finished.rewrites)
        notes = (*(() if start.planner == "ours" else (f"begun with the plan of {start.planner}",)), *finished.notes)
        return replace(
            finished, rewrites=steps, iteration=rewritten(problem.iteration, steps), is_optimal=False, notes=notes
        )

    def _searched(
        self,
        problem: PlanProblem,
        begun: Deadline,
        start: Plan | None = None,
        *,
        base: TaskGraph | None = None,
        graph_s: float = 0.0,
        is_told: bool = True,
    ) -> _Candidate:
        """All tiers on a step, whose graph `base` was made in `graph_s`; from a plan's order on, if one is given."""
        if base is None:
            base, graph_s = _graph_of(problem, begun)
        bound = lower_bound(base)
        deadline = begun.within(begun.left_s - _reserve_s(begun, _num_orders(problem, len(base)), graph_s))
        teller = self.on_progress if is_told else None
        whole = _portfolio(
            problem, (), Incumbent(bound, deadline, tolerance=TOLERANCE, on_progress=teller), base, start
        )
        best = whole
        if self.split and not _is_near_bound(whole.search):
            best = self._with_cuts(problem, whole, deadline, teller)
        if not _is_near_bound(best.search) and not best.search.is_done:
            _offer_steady(best, deadline.within(0.5 * deadline.left_s), problem.seed)
        _improve(best, deadline, problem.seed)
        return min(best, whole, key=lambda candidate: candidate.search.best.makespan)

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
        return self._finished(problem, _Candidate(kept, iteration, graph, search, []), begun)

    def _with_cuts(
        self,
        problem: PlanProblem,
        whole: _Candidate,
        deadline: Deadline,
        teller: Callable[[PlanProgress], None] | None,
    ) -> _Candidate:
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
        search = Incumbent(whole.search.bound, deadline, tolerance=TOLERANCE, on_progress=teller)
        return _portfolio(problem, splits, search)

    def _finished(self, problem: PlanProblem, best: _Candidate, ends: Deadline) -> Plan:
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
        beyond = () if _is_near_bound(best.search) else _out_of_reach(problem, best.search.bound)
        return Plan(
            planner="ours",
            rewrites=rewrites,
            iteration=rewritten(best.iteration, (reorder,)),
            lower_bound_s=graph.seconds(best.search.bound),
            is_optimal=_is_shortest(best, issued),
            notes=(*_notes(best, schedule), *beyond),
        )


def _portfolio(
    problem: PlanProblem,
    rewrites: tuple[Rewrite, ...],
    search: Incumbent,
    base: TaskGraph | None = None,
    start: Plan | None = None,
) -> _Candidate:
    """T1 on the step after some rewrites, whose graph `base` is if it is known; a small graph is solved whole."""
    deadline = search.deadline
    iteration = rewritten(problem.iteration, rewrites) if rewrites else problem.iteration
    graph = _with_arcs(problem, iteration, base or task_graph(problem, iteration))
    schedules = run_portfolio(graph, search, deadline.within(0.35 * deadline.left_s), max_rounds=8)
    if start is not None and not search.is_reached:
        place = {op.name: float(number) for number, op in enumerate(start.iteration.ops)}
        priority = [place[name] for name in graph.names]
        schedules = [*schedules, *_offer_priority(graph, priority, f"{start.planner}'s order", search, deadline)]
    if not search.is_done and len(graph) <= _SMALL:
        ends = deadline.within(0.4 * deadline.left_s)
        solved, proved = solve_graph(graph, search.best, bound=search.bound, deadline=ends, seed=problem.seed)
        search.offer(solved, "solved whole")
        if proved == search.best.makespan:
            search.prove()
    return _Candidate(rewrites, iteration, graph, search, schedules)


def _improve(best: _Candidate, deadline: Deadline, seed: int) -> None:
    """T3 on a candidate that is too large to be solved whole."""
    if len(best.graph) > _SMALL:
        if not best.search.is_done:
            race(best.graph, best.made, best.search, deadline=deadline, seed=seed)
        if not best.search.is_done:
            improve_by_windows(best.graph, best.search, seed=seed)


def _judged(problem: PlanProblem, plan: Plan) -> _Judged:
    step = simulated(problem, plan.iteration, plan.configs)
    most = problem.memory_limit_bytes or problem.cluster.gpu.memory_bytes
    return _Judged(plan, step.makespan_s, step.peak_bytes <= most)


def _without_work(plan: Plan) -> tuple[str, ...]:
    """Another planner's notes but those on the work that it was given, which are not the search's."""
    return tuple(note for note in plan.notes if not note.startswith(WORK_NOTE))


def _better(one: _Judged, other: _Judged) -> _Judged:
    return other if other.is_better_than(one) else one


def _contended_times(problem: PlanProblem, plan: Plan) -> NamedTimes:
    """What each operator took in a plan under contention, its pieces together (s)."""
    known = {op.name: 0.0 for op in problem.iteration.ops}
    for span in simulated(problem, plan.iteration, plan.configs).timeline.spans:
        whole = origin_name(span.name, known)
        if whole in known:
            known[whole] += span.end_s - span.start_s
    took = {name: seconds for name, seconds in known.items() if seconds > 0}
    return NamedTimes(took, problem.iteration, problem.times)


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
    timed: list[tuple[float, Schedule]] = []
    longest_s = 0.0
    for schedule in reversed(latest):
        if not ends.counts_work and ends.left_s < _FINISH_OVER_BEGIN * longest_s:
            break
        begin_s = ends.elapsed_s
        reorder = reorder_of(best.iteration, best.graph, schedule)
        timed.append((simulated(problem, rewritten(best.iteration, (reorder,))).makespan_s, schedule))
        longest_s = max(longest_s, ends.elapsed_s - begin_s)
    # The clock may have ended planning before the first simulation: then the shortest without contention stands.
    return min(timed, key=lambda one: one[0])[1] if timed else best.search.best


def _graph_of(problem: PlanProblem, begun: Deadline) -> tuple[TaskGraph, float]:
    """The step's graph, and the seconds that it took; none where work counts, which is counted in the searches only."""
    begun_s = begun.elapsed_s
    graph = task_graph(problem)
    return graph, begun.elapsed_s - begun_s


def _reserve_s(begun: Deadline, num_orders: int, graph_s: float) -> float:
    """What is kept for the end; none of the work."""
    if begun.counts_work:
        return 0.0
    by_begin_s = num_orders * _FINISH_OVER_BEGIN * graph_s
    return max(_RESERVE * begun.budget_s, min(_MAX_RESERVE * begun.budget_s, by_begin_s))


def _offer_steady(best: _Candidate, deadline: Deadline, seed: int) -> None:
    """T2 on a candidate."""
    stages = stages_of(best.iteration, best.graph)
    if stages:
        priority = steady_priorities(best.graph, stages, deadline.within(0.7 * deadline.left_s), seed=seed)
        if priority is not None:
            best.made.extend(_offer_priority(best.graph, priority, "steady state", best.search, deadline))


def _is_shortest(best: _Candidate, issued: Schedule) -> bool:
    """Nothing is cut, and no schedule is shorter: proved by the bound, or by solving the step whole.

    Behind a read of the host more waits in the order than in the graph: then nothing is proved.
    """
    proved = best.search.is_proved and issued.makespan == best.search.best.makespan
    is_free = not best.rewrites and not any(map(is_host_read, best.iteration.ops))
    return is_free and (issued.makespan <= best.search.bound or proved)


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
    schedules: list[Schedule] = []
    for kind in Kind:
        schedule = generation.schedule(kind, priority, deadline=deadline)
        search.offer(schedule, name)
        for back in Kind:
            better = generation.improved(schedule, (kind, back), max_rounds=8, target=search.target, deadline=deadline)
            search.offer(better, f"{name}, improved")
            schedules.append(better)
            if search.is_done:
                return schedules
    return schedules


def _out_of_reach(problem: PlanProblem, bound: int) -> tuple[str, ...]:
    """What no schedule of the uncut step goes below, if that is known to be more than the lower bound."""
    least = two_chain_bound(task_graph(problem))
    return (f"no schedule of the uncut step is below {least / bound:.4f} of the lower bound",) if least > bound else ()


def _notes(best: _Candidate, schedule: Schedule) -> tuple[str, ...]:
    ratio = schedule.makespan / best.search.bound if best.search.bound else 1.0
    found_by = next(step.found_by for step in best.search.history if step.makespan == schedule.makespan)
    notes = [f"The schedule takes {ratio:.4f} times the lower bound without contention; found by: {found_by}."]
    if schedule.makespan > best.search.best.makespan:
        shortest = best.search.best.makespan / best.search.bound
        notes.append(f"shorter with contention than the shortest order without ({shortest:.4f} of the bound)")
    cuts = [step for step in best.rewrites if isinstance(step, Split)]
    if cuts:
        notes.append(f"{len(cuts)} operators are cut")
    return tuple(notes)
