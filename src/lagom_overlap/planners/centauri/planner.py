"""Centauri as a planner (ASPLOS 2024; spec, planners section 2): partition every collective, then three tiers of order.

1. Primitive: an all-reduce becomes a reduce-scatter and an all-gather where that takes no longer, a reduce-scatter one
   reduce to each rank and an all-gather one broadcast from each where they take less (`primitives`). In a program
   all-gathers also slide through the operators behind them (`evolution`), which then work on a rank's part, only with
   the option `evolve`: all ranks must hold the same of what these operators read. The user vouches for that, and the
   engine checks it before a run. A framework's step does so by a setting (`zero_stage`, `sequence_parallel`).
2. Operation tier: the leaf of every collective, greedily in program order, like ones alike (`leaf`).
3. Layer tier: data or weight gradients first, decided for each layer (`layer_tier`).
4. Model tier: micro-batches launched together (`model_tier`), layer by layer as long as gathers or scatters last; on a
   stage of a pipeline at least as many as it is deep.

`mode` PAPER takes Algorithm 1's leaf, Eq. 1's order and Eq. 2's numbers. By default leaves are simulated, and of
orders, launches and no partition at all the shortest predicted step is taken.

Independent computation of a collective (in_cost) is not defined in the paper; here: what program order has between the
moment at which it could start (its last dependence; for a parameter gather the first need of the one before) and its
first reader, less what depends on it; for gradients up to the next gradients' collective.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.centauri.costs import LAYER_PHASES, layer_costs, model_costs, num_batches
from lagom_overlap.planners.centauri.evolution import evolutions
from lagom_overlap.planners.centauri.layer_tier import FirstGradient, first_gradient
from lagom_overlap.planners.centauri.leaf import Leaves
from lagom_overlap.planners.centauri.model_tier import (
    GradientLaunch,
    breadth_first,
    depth_first,
    launch,
)
from lagom_overlap.planners.centauri.primitives import substitution
from lagom_overlap.planners.deadline import OPERATOR_STEPS, Deadline
from lagom_overlap.planners.exact import adds_numbers
from lagom_overlap.planners.finish import Issue, finished, kept_waits, order_by
from lagom_overlap.planners.memory import fits
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.resources import Resource, resource_of
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.planners.times import origin_name
from lagom_overlap.units import format_memory, format_seconds
from lagom_overlap.workload import CommOp, CompOp, Iteration, Op, Phase
from lagom_overlap.workload.gathers import copies_into, parameter_gathers
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Rewrite, Substitute, Substitution

_ROOTED = (Substitution.REDUCES, Substitution.BROADCASTS)
LayerOrders = Mapping[int, FirstGradient]
"""Which gradients are computed first, by layer."""


class CentauriMode(StrEnum):
    """The paper's closed forms, or all options simulated."""

    PAPER = "paper"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ordering:
    """Decisions of layer and model tier; a layer that `first` does not name keeps the program's order."""

    first: LayerOrders
    launch_forward: int
    launch_backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Space:
    """What of the partition space is used: primitives (rooted ones too), groups, chains, how much busy links weigh."""

    substitute: bool = True
    rooted: bool = False
    groups: bool = True
    chains: bool = True
    link_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A partition with an order of issue."""

    rewrites: Sequence[Rewrite]
    ordering: _Ordering
    issue: Issue

    @property
    def notes(self) -> tuple[str, ...]:
        order = self.ordering
        counts = ", ".join(f"{first} in {num} layers" for first, num in sorted(Counter(order.first.values()).items()))
        return (
            f"{len(self.rewrites)} rewrites",
            f"gradients first: {counts or 'as the program'}",
            f"micro-batches together: {order.launch_forward} forward, {order.launch_backward} backward",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Centauri:
    """The planner; `strict` takes Eq. 2 with the printed L1 + L2 <= micro-batches.

    The dimensions of the partition space (`primitive`, `group`, `workload`) and the tiers above the operation
    (`layer_tier`, `model_tier`) can be left out one by one. `evolve` lets all-gathers slide through what follows.
    """

    mode: CentauriMode = CentauriMode.SIMULATED
    strict: bool = False
    primitive: bool = True
    group: bool = True
    workload: bool = True
    layer_tier: bool = True
    model_tier: bool = True
    evolve: bool = False

    def plan(self, problem: PlanProblem) -> Plan:
        """The plan of the three tiers.

        Raises:
            JobError: if nothing fits the memory limit; says by how much.
        """
        deadline = problem.deadline()
        candidates: list[tuple[int, int, _Candidate]] = []
        for rewrites in self._partitions(problem, deadline):
            index = StepIndex(rewritten(problem.iteration, rewrites))
            if candidates and not fits(index.iteration, problem.memory_limit_bytes):
                continue  # the step without rewrites fits: it came first
            waits = kept_waits(problem, index.iteration)
            streams = _streams(problem, index.iteration)
            for ordering in self._orderings(problem, index):
                order = order_by(index.iteration, _ranks(problem, index, ordering), waits)
                issue = Issue(order=order, streams=streams, waits=waits)
                predicted = predict(problem, rewritten(index.iteration, (issue.rewrite,)))
                deadline.spend(2 * OPERATOR_STEPS * len(order))
                candidates.append((predicted.schedule.makespan, len(candidates), _Candidate(rewrites, ordering, issue)))
                if deadline.left_s <= 0:
                    break
            if deadline.left_s <= 0:
                break
        best = min(candidates)[2]
        notes = [*best.notes, *deadline.remarks()]
        if problem.pipeline > 1 and self.model_tier:
            notes += _pipeline_notes(problem, self.strict)
        return finished(problem, "centauri", best.rewrites, best.issue, tuple(notes))

    def _partitions(self, problem: PlanProblem, deadline: Deadline) -> Iterator[Sequence[Rewrite]]:
        """The paper's, or several: nothing, groups alone, chains too, what ends first by itself, no substitution."""
        if self.mode is CentauriMode.PAPER:
            yield self._partition(problem, self._within(_Space()))
            return
        yield ()
        seen: list[list[Rewrite]] = [[]]
        spaces = [_Space(chains=False), _Space(), _Space(link_weight=0.0), _Space(substitute=False)]
        spaces.append(_Space(substitute=False, chains=False))
        if self.primitive and any(step.into in _ROOTED for step in _substitutions(problem, rooted=True)):
            spaces.append(_Space(rooted=True))
        for space in spaces:
            if deadline.left_s <= 0:
                return
            deadline.spend(OPERATOR_STEPS * len(problem.iteration.ops))
            partitions = self._partition(problem, self._within(space))
            if partitions not in seen:
                seen.append(partitions)
                yield partitions
        if self.evolve and not problem.exact and problem.framework is None:
            yield from self._evolved(problem)

    def _evolved(self, problem: PlanProblem) -> Iterator[Sequence[Rewrite]]:
        """Parts behind all-reduces: each communicator's alone, and all; as they are, and partitioned in their turn."""
        steps = evolutions(problem.iteration)
        for slides in dict.fromkeys((*((step,) for step in steps), steps) if steps else ()):
            evolved = replace(problem, iteration=rewritten(problem.iteration, slides), issued=None)
            for space in (None, _Space(), _Space(chains=False)):
                yield (*slides, *(() if space is None else self._partition(evolved, self._within(space))))

    def _within(self, space: _Space) -> _Space:
        """A space without the dimensions that are left out."""
        return replace(
            space,
            substitute=space.substitute and self.primitive,
            groups=space.groups and self.group,
            chains=space.chains and self.workload,
        )

    def _partition(self, problem: PlanProblem, space: _Space) -> list[Rewrite]:
        """Primitives, groups and workloads of all collectives."""
        rewrites: list[Rewrite] = [*_substitutions(problem, rooted=space.rooted)] if space.substitute else []
        iteration = rewritten(problem.iteration, rewrites)
        index = StepIndex(iteration)

        def nodes(op: CommOp) -> int:
            listed = problem.groups.get(op.communicator)
            if op.collective.num_nodes is not None:
                return op.collective.num_nodes
            if listed is not None:
                return len({rank // problem.cluster.gpus_per_node for rank in listed})
            return problem.cluster.num_nodes_of(op.collective.num_ranks)

        leaves = Leaves(index, problem.times, nodes, chains=space.chains, groups=space.groups)
        free = _free_seconds(problem, index)
        for op in iteration.comms:
            if problem.exact and adds_numbers(op):
                continue
            paper_leaf = self.mode is CentauriMode.PAPER
            rewrites += leaves.choose(op, free[op.name], paper=paper_leaf, link_weight=space.link_weight).rewrites
        return rewrites

    def _orderings(self, problem: PlanProblem, index: StepIndex) -> list[_Ordering]:
        launched = _launch(problem, index, self.strict) if self.model_tier else GradientLaunch(1, 1, 0.0)
        costs = layer_costs(problem, index) if self.layer_tier else {}
        by_layer = {layer: first_gradient(layer_cost) for layer, layer_cost in costs.items()}
        if self.mode is CentauriMode.PAPER:
            return [_Ordering(first=by_layer, launch_forward=launched.forward, launch_backward=launched.backward)]
        pairs = {(1, 1), (launched.forward, launched.backward)}
        orders: list[LayerOrders] = [{}]
        for ordering in (*(dict.fromkeys(costs, first) for first in FirstGradient), by_layer):
            if ordering not in orders:
                orders.append(ordering)
        return [
            _Ordering(first=first, launch_forward=forward, launch_backward=backward)
            for first in orders
            for forward, backward in sorted(pairs)
        ]


def from_options(
    *,
    mode: str = "simulated",
    strict: bool = False,
    primitive: bool = True,
    group: bool = True,
    workload: bool = True,
    layer_tier: bool = True,
    model_tier: bool = True,
    evolve: bool = False,
) -> Centauri:
    """The Centauri paper's planner, with options from the job file.

    Raises:
        ValueError: if the mode is none.
    """
    return Centauri(
        mode=CentauriMode(mode),
        strict=strict,
        primitive=primitive,
        group=group,
        workload=workload,
        layer_tier=layer_tier,
        model_tier=model_tier,
        evolve=evolve,
    )


def paper() -> Centauri:
    """The Centauri paper's planner, with the paper's own formulas for times."""
    return Centauri(mode=CentauriMode.PAPER)


def _substitutions(problem: PlanProblem, *, rooted: bool) -> list[Substitute]:
    """All-reduces in halves where that scales; `rooted`: also reduces and broadcasts where they take less.

    Gathers of parameters stay what they are: the prefetch depth and the framework's rules count them.
    """
    gathers = {buffer.maker for buffer in parameter_gathers(problem.iteration)}
    substitutions = []
    for op in problem.iteration.comms:
        if op.name in gathers or (problem.exact and adds_numbers(op)):
            continue
        way = substitution(op, problem.times)
        if way is not None and way.pays and (rooted or not way.is_rooted):
            substitutions.append(Substitute(op.name, way.into))
    return substitutions


def _free_seconds(problem: PlanProblem, index: StepIndex) -> dict[str, float]:
    """in_cost of every collective."""
    seconds = problem.times.seconds
    total = [0.0]
    for op in index.iteration.ops:
        total.append(total[-1] + (seconds(op) if isinstance(op, CompOp) else 0.0))
    gathers = {buffer.maker for buffer in parameter_gathers(index.iteration)}
    gradients = {op.name for op in index.gradient_comms}
    free: dict[str, float] = {}
    last_need, waiting = 0, ""
    for op in index.iteration.comms:
        place = index.place[op.name]
        readers = [index.place[name] for name in index.followers[op.name]]
        need = min(readers, default=len(index.iteration.ops))
        if op.name in gathers:
            free[op.name] = max(0.0, total[need] - total[last_need])
            last_need = max(last_need, need)
        elif op.name in gradients:
            if waiting:
                free[waiting] = max(0.0, total[place] - total[index.place[waiting]])
            waiting, free[op.name] = op.name, max(0.0, total[-1] - total[place])
        else:
            ready = max((index.place[dep] + 1 for dep in op.deps), default=place)
            free[op.name] = max(0.0, total[max(need, ready)] - total[ready])
    return free


def _launch(problem: PlanProblem, index: StepIndex, strict: bool) -> GradientLaunch:
    """Eq. 2 on the iteration; in a pipeline L >= p."""
    if num_batches(index) < 2:
        return GradientLaunch(1, 1, 0.0)
    return launch(model_costs(problem, index), strict=strict)


def _pipeline_notes(problem: PlanProblem, strict: bool) -> list[str]:
    """What Eq. 2 launches together on all of an iteration's micro-batches, with what it holds, and the two extremes."""
    costs = model_costs(problem, StepIndex(problem.iteration))
    try:
        least = launch(costs, strict=strict)
    except JobError as error:
        return [str(error)]
    group = max(least.forward, least.backward)
    notes = [f"as Megatron-LM's --microbatch-group-size-per-virtual-pipeline-stage: {group}"]
    extremes = (("launched so", least), ("depth first", depth_first(costs)), ("breadth first", breadth_first(costs)))
    for words, launched in extremes:
        held_text, uncovered = format_memory(launched.held_bytes(costs)), format_seconds(launched.exposed_s)
        notes.append(f"{words}: {held_text} of activations, {uncovered} of Eq. 2's communication uncovered")
    return notes


def _streams(problem: PlanProblem, iteration: Iteration) -> dict[str, str]:
    """One stream per link: a gather inside nodes overlaps one between nodes."""
    streams = {}
    for op in iteration.comms:
        resource = resource_of(op, problem.cluster, problem.groups)
        stream = "comm" if resource is Resource.INTER_LINK else "comm_intra"
        if op.stream != stream:
            streams[op.name] = stream
    return streams


def _ranks(problem: PlanProblem, index: StepIndex, ordering: _Ordering) -> dict[str, float]:
    """Program order with layers in turn over the micro-batches launched together, gradients first as decided."""
    num = len(index.iteration.ops)
    ranks = {name: float(place) for name, place in index.place.items()}
    _launch_together(index, ordering, ranks)
    _gradients_first(index, ordering.first, ranks)
    depth = problem.prefetch or num
    copies = copies_into(index.iteration)
    firsts = {name: min(ranks[user] for user in index.followers[name]) for name in copies}
    gathers = sorted(copies, key=firsts.__getitem__)
    parts = _parts_of(problem, index)
    for number, name in enumerate(gathers):
        for part in (*copies[name], *parts[origin_name(name, parts)]):
            ranks[part] = firsts[gathers[max(0, number - depth)]] - 0.25
    for op in index.iteration.ops:
        if op.origin.phase is Phase.OPTIMIZER:
            ranks[op.name] = 2.0 * num + index.place[op.name]
    return ranks


def _parts_of(problem: PlanProblem, index: StepIndex) -> dict[str, list[str]]:
    """What became of each collective of the problem."""
    parts: dict[str, list[str]] = {op.name: [] for op in problem.iteration.comms}
    for op in index.iteration.comms:
        parts[origin_name(op.name, parts)].append(op.name)
    return parts


def _launch_together(index: StepIndex, ordering: _Ordering, ranks: dict[str, float]) -> None:
    """The first micro-batches' forwards and the last ones' backwards run layer by layer, not one after the other."""
    ops = index.iteration.ops
    batches = 1 + max((op.origin.microbatch for op in ops), default=0)
    layers = 1 + max((op.origin.layer or 0 for op in ops), default=0)
    if ordering.launch_forward > 1:
        members = [
            op for op in ops if op.origin.phase is Phase.FORWARD and op.origin.microbatch < ordering.launch_forward
        ]
        _interleave(index, members, layers, ranks, forward=True)
    if ordering.launch_backward > 1:
        first = batches - ordering.launch_backward
        members = [op for op in ops if op.origin.phase in LAYER_PHASES and op.origin.microbatch >= first]
        _interleave(index, members, layers, ranks, forward=False)


def _interleave(
    index: StepIndex, members: Sequence[Op], layers: int, ranks: dict[str, float], *, forward: bool
) -> None:
    """Ranks by layer, then micro-batch, between the first and the last member's place."""
    if not members:
        return

    def depth(op: Op) -> int:
        layer = op.origin.layer
        if layer is None:
            return -1 if ("embed" in op.name) == forward else layers
        return layer if forward else layers - 1 - layer

    begin = min(ranks[op.name] for op in members) if forward else max(ranks[op.name] for op in members) - len(members)
    ordered = sorted(members, key=lambda op: (depth(op), op.origin.microbatch, index.place[op.name]))
    for number, op in enumerate(ordered):
        ranks[op.name] = begin + number


def _gradients_first(index: StepIndex, first: LayerOrders, ranks: dict[str, float]) -> None:
    """Within a layer: weights' gradients before everything they do not need, or after everything."""
    spans: dict[tuple[int | None, int], list[float]] = {}
    for op in index.iteration.ops:
        if op.origin.phase in LAYER_PHASES and isinstance(op, CompOp):
            spans.setdefault((op.origin.layer, op.origin.microbatch), []).append(ranks[op.name])
    num = len(index.iteration.ops)
    for op in index.iteration.ops:
        chosen = None if op.origin.layer is None else first.get(op.origin.layer)
        if op.origin.phase is Phase.WEIGHT_GRAD and isinstance(op, CompOp) and chosen is not None:
            span = spans[op.origin.layer, op.origin.microbatch]
            shift = index.place[op.name] / (num + 1)
            ranks[op.name] = (max(span) if chosen is FirstGradient.DATA else min(span) - 1.0) + shift
