"""Concerto as a planner (ASPLOS 2025; spec, planners section 1): cut critical communications, schedule, fuse.

The ablation of the paper's Table 3 and 4: `decompose` off is S, on is S + AD; `fuse` adds fusion. `paper()` is the
paper to the letter: cost by equation 5 with 1.2, isolated blocks. By default strategies are simulated, blocks have
heads and tails (never worse), and what is cut is kept only if the predicted step gets shorter.

Departures: the cut step is scheduled from the order found without cuts (the paper's from program order, `paper()` too);
a chain that two communications want is cut for the cheaper one (`choice.without_overlap`); with the printed test of
criticality nothing in a whole step is critical, so its use is a choice of its own.

Communications are critical that nothing independent of them can hide (section 4.5; spec, planners 1.5).

With P the ancestors, S the descendants and I the rest, communication D is critical iff

    (sum of T over computations in I) - (sum of T over communications in I) < T_D

The paper's text says "exceeds"; its formula and its Fig. 7 have "<", which is what makes sense.

Over a whole training step I is huge (later micro-batches, the optimizer), so that nothing is critical. Mended: I holds
only what can run while D can, whose window [head, bound - tail] meets D's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.concerto.fusion import FusionLimits, fused
from lagom_overlap.planners.concerto.strategies import ConcertoStrategy, CostMode, Pricing, Slowdown, constant_slowdown
from lagom_overlap.planners.concerto.strategy_choice import choose, without_overlap
from lagom_overlap.planners.cpsat import BlockMode, odd_even
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.exact import adds_numbers
from lagom_overlap.planners.finish import Issue, finished, kept_waits, order_by
from lagom_overlap.planners.memory import fits
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import simulate, task_graph
from lagom_overlap.planners.schedule.bounds import heads, lower_bound, tails
from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.planners.schedule.of_problem import reorder_of
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.planners.times import ModelTimes, origin_name
from lagom_overlap.workload import CommOp, Iteration, Op
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Rewrite


class Independence(StrEnum):
    """Which operators may hide a communication: all that are independent of it, or those near it in time."""

    PRINTED = "printed"
    WINDOW = "window"


_AT_ONCE = 512
"""Communications whose ancestors and descendants are held in memory together."""


def critical_communications(graph: TaskGraph, which: Independence = Independence.WINDOW) -> frozenset[int]:
    """Tasks that are critical communications; the first resource is that of computations."""
    comms = [task for task in range(len(graph)) if graph.resource[task] != 0]
    ticks = np.array(graph.ticks, dtype=np.float64)
    signed = np.where(np.array(graph.resource) == 0, ticks, -ticks)
    begin = np.array(heads(graph), dtype=np.int64)
    end = lower_bound(graph) - np.array(tails(graph), dtype=np.int64)
    numbers: list[int] = []
    for first in range(0, len(comms), _AT_ONCE):
        block = comms[first : first + _AT_ONCE]
        independent = ~(_reached(graph, block, ahead=True) | _reached(graph, block, ahead=False))
        if which is Independence.WINDOW:
            independent &= (begin[:, None] < end[block][None, :]) & (begin[block][None, :] < end[:, None])
        slack = signed @ independent.astype(np.float64)
        numbers += [task for place, task in enumerate(block) if slack[place] < ticks[task]]
    return frozenset(numbers)


def _reached(graph: TaskGraph, comms: list[int], *, ahead: bool) -> NDArray[np.bool_]:
    """[task, communication]: whether the task follows the communication (`ahead`) or leads to it; itself included."""
    is_reached = np.zeros((len(graph), len(comms)), dtype=np.bool_)
    for place, task in enumerate(comms):
        is_reached[task, place] = True
    neighbours = graph.preds if ahead else graph.succs
    for task in graph.topological if ahead else reversed(graph.topological):
        for neighbour in neighbours[task]:
            is_reached[task] |= is_reached[neighbour]
    return is_reached


_RESERVE = 0.4
"""Share of the budget that pricing strategies leaves to scheduling; what was not priced by then is not cut."""
_PRICING_STEPS = 400
"""Steps of planning that pricing one strategy counts for."""
BLOCK_SIZE = 50
"""Operators of a block of odd-even scheduling."""
ROUNDS = 4
"""Rounds of odd-even scheduling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concerto:
    """The planner; `contention` takes the slowdown of computations from the cost model instead of 1.2."""

    decompose: bool = True
    fuse: bool = True
    cost_mode: CostMode = CostMode.SIMULATED
    independence: Independence = Independence.WINDOW
    block_mode: BlockMode = BlockMode.HEADS_TAILS
    contention: bool = False
    num_rounds: int = ROUNDS
    block_size: int = BLOCK_SIZE
    limits: FusionLimits = FusionLimits()  # noqa: RUF009  frozen and without arguments

    def plan(self, problem: PlanProblem) -> Plan:
        """The plan found within the budget: shares for the order without cuts, with cuts, for the better one again.

        Raises:
            JobError: if nothing fits the memory limit, or `contention` is asked of times without a cost model.
        """
        deadline = problem.deadline()
        base = self._scheduled(problem, (), deadline.within(deadline.budget_s * (0.3 if self.decompose else 0.5)))
        best, rewrites = base, list[Rewrite]()
        notes: list[str] = []
        if self.decompose:
            strategies = self._strategies(problem, deadline)
            splits = [step for strategy in strategies if (step := strategy.rewrite) is not None]
            if splits and not fits(rewritten(problem.iteration, splits), problem.memory_limit_bytes):
                notes.append(f"{len(splits)} communications to cut, for which the memory limit leaves no room")
            elif splits:
                cut = self._scheduled(problem, splits, deadline.within(0.5 * deadline.left_s), base)
                better = _makespan(problem, cut) <= _makespan(problem, base)
                if better or self.cost_mode is not CostMode.SIMULATED:
                    best, rewrites = cut, list(splits)
                notes.append(f"{len(splits)} communications cut" + ("" if better else ", which is no shorter"))
        if self.block_mode is BlockMode.HEADS_TAILS:
            best = self._in_blocks(problem, best, deadline.within(0.6 * deadline.left_s))
        if self.fuse:
            fusions, best = fused(problem, rewritten(problem.iteration, rewrites), best, self.limits, deadline)
            rewrites += fusions
            notes.append(f"{len(fusions)} fusions")
        return finished(
            problem, "concerto", rewrites, _issue_of(problem, rewrites, best), (*notes, *deadline.remarks())
        )

    def _strategies(self, problem: PlanProblem, deadline: Deadline) -> list[ConcertoStrategy]:
        """Strategies of the critical communications, chosen together."""
        index = StepIndex(problem.iteration)
        critical = critical_communications(task_graph(problem), self.independence)
        pricing = Pricing(index, problem.times, self.cost_mode, self._slowdown(problem))
        options = {}
        for number, op in enumerate(problem.iteration.ops):
            if deadline.left_s < _RESERVE * deadline.budget_s:
                break
            if number in critical and isinstance(op, CommOp) and not (problem.exact and adds_numbers(op)):
                options[op.name] = pricing.strategies(op)
                deadline.spend(_PRICING_STEPS * len(options[op.name]))
        component_s = min(1.0, max(0.1, deadline.left_s / 4))
        return without_overlap(choose(options, index, problem.times, deadline, component_s))

    def _slowdown(self, problem: PlanProblem) -> Slowdown:
        if not self.contention:
            return constant_slowdown
        if not isinstance(problem.times, ModelTimes):
            raise JobError("concerto: contention needs times of the cost model, these were measured")
        return _ModelSlowdown(problem.times.model)

    def _scheduled(
        self, problem: PlanProblem, splits: Sequence[Rewrite], deadline: Deadline, like: Iteration | None = None
    ) -> Iteration:
        """The cut iteration in the order that odd-even blocks find, waits for memory included.

        The first order is the program's, or `like` another iteration's, pieces where their operators are.
        """
        iteration = rewritten(problem.iteration, splits)
        waits = kept_waits(problem, iteration)
        ranks = _ranks_like(like, iteration) if like is not None and self.cost_mode is CostMode.SIMULATED else {}
        start = Issue(order=order_by(iteration, ranks, waits), streams={}, waits=waits)
        return self._in_blocks(problem, rewritten(iteration, (start.rewrite,)), deadline)

    def _in_blocks(self, problem: PlanProblem, iteration: Iteration, deadline: Deadline) -> Iteration:
        """The iteration in the order that odd-even blocks find from its own."""
        graph = task_graph(problem, iteration)
        order = odd_even(
            graph,
            range(len(graph)),
            mode=self.block_mode,
            block_size=self.block_size,
            num_rounds=self.num_rounds,
            deadline=deadline,
            seed=problem.seed,
        )
        step = reorder_of(iteration, graph, simulate(graph, order))
        return rewritten(iteration, (replace(step, order=tuple(graph.names[task] for task in order)),))


def _ranks_like(ordered: Iteration, cut: Iteration) -> dict[str, float]:
    """Places of a cut iteration's operators in the order of the one that it was cut from."""
    place = {op.name: number for number, op in enumerate(ordered.ops)}
    ranks = {op.name: float(place[origin_name(op.name, place)]) for op in cut.ops}
    needed: dict[str, float] = {}
    for op in cut.ops:
        for dep in op.deps:
            needed[dep] = min(needed.get(dep, ranks[op.name]), ranks[op.name])
    joins = [op.name for op in cut.ops if op.name.endswith("#join")]
    return ranks | {name: needed.get(name, ranks[name]) - 0.5 for name in joins}


class _ModelSlowdown:
    """The stretch of a computation during a communication in the contention model, by shape."""

    def __init__(self, model: ContentionModel) -> None:
        self._model = model
        self._known: dict[object, float] = {}

    def __call__(self, op: Op, comm: CommOp) -> float:
        assert not isinstance(op, CommOp), op.name
        key = (op.work, comm.collective)
        if key not in self._known:
            kernel = self._model.kernel(op.work)
            cost = self._model.collective(comm.collective, self._model.default_config(comm.collective))
            stretched_s = self._model.running_times([kernel], [cost]).kernel_s[0]
            self._known[key] = max(1.0, stretched_s / self._model.kernel_seconds(kernel))
        return self._known[key]


def from_options(
    *,
    decompose: bool = True,
    fuse: bool = True,
    cost: str = "simulated",
    independence: str = "window",
    blocks: str = "heads_tails",
    contention: bool = False,
    num_rounds: int = ROUNDS,
    block_size: int = BLOCK_SIZE,
) -> Concerto:
    """The Concerto paper's planner, with options from the job file.

    Raises:
        ValueError: if a word or a number is not allowed.
    """
    if num_rounds < 0 or block_size < 2:
        raise ValueError(f"num_rounds is {num_rounds} and block_size {block_size}, must be at least 0 and 2")
    return Concerto(
        decompose=decompose,
        fuse=fuse,
        cost_mode=CostMode(cost),
        independence=Independence(independence),
        block_mode=BlockMode(blocks),
        contention=contention,
        num_rounds=num_rounds,
        block_size=block_size,
    )


def paper() -> Concerto:
    """The Concerto paper's planner as printed, but with its test of criticality corrected."""
    return Concerto(cost_mode=CostMode.PAPER, block_mode=BlockMode.ISOLATED)


def _makespan(problem: PlanProblem, iteration: Iteration) -> int:
    return predict(problem, iteration).schedule.makespan


def _issue_of(problem: PlanProblem, rewrites: list[Rewrite], best: Iteration) -> Issue:
    """How the best iteration is issued, seen from the rewritten program."""
    plain = {op.name: op for op in rewritten(problem.iteration, rewrites).ops}
    streams = {op.name: op.stream for op in best.ops if plain[op.name].stream != op.stream}
    waits = tuple((op.name, dep) for op in best.ops for dep in op.deps if dep not in plain[op.name].deps)
    return Issue(order=tuple(op.name for op in best.ops), streams=streams, waits=waits)
