"""The best sharding as an integer program: Alpa's intra-operator formulation (arXiv 2201.12023, 4.2), on CP-SAT.

| paper | here |
|---|---|
| one-hot strategy vector s_v | `_Model.option[kind][k]` |
| computing and communication, c_v + d_v | `Option.seconds`; sums are finished by conversions, not by the call |
| resharding matrix R_vu, linearised by e_vu | `_Model.way`: a needed layout is made from one that its tensor has |
| memory (Alpa's code, not in the formula) | a linear bound at each moment of the step that could break it |

A needed layout costs once, however many calls need it. Per tensor, need and layout that it may be made in,
`way <= made in that layout` and `sum of ways >= needed`; and every reader is served from the layout that the tensor is
made in, which whole numbers imply and their relaxation does not.

Nodes of the same kind in several layers share their decision: layers are alike, and a program of 24 has
the variables of one. Memory is bounded at the moments where the last solution broke the limit, until none does.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ortools.sat.python import cp_model

from lagom_overlap.errors import JobError
from lagom_overlap.planners.cpsat.solver import new_solver, solve
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.sharding_search.held_memory import TensorLifetimes
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, local_bytes
from lagom_overlap.planners.sharding_search.sharding_problem import ShardingProblem, made_layouts, needed
from lagom_overlap.units import format_memory

_TICK_S: Final = 1e-8
"""CP-SAT counts in whole numbers: 10 ns, far below any collective."""
_LIMIT_S: Final = 30.0
"""Of a search that nobody limits."""
_MAX_ROUNDS: Final = 12
"""Times that the limit is bounded at more moments before what is left counts as not to be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSharding:
    """An option for every node of a problem; `is_optimal` as proved, layers tied or not as asked.

    No combination takes less than `bound_s`, as far as that was proved.
    """

    problem: ShardingProblem
    choice: tuple[int, ...]
    is_optimal: bool
    peak_bytes: int
    bound_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Computing and communication one after the other."""
        return self.problem.seconds(self.choice)

    @property
    def gap(self) -> float:
        """How much of its time might be saved at most by another combination; 0 if none is cheaper."""
        return 0.0 if self.is_optimal else max(0.0, 1.0 - self.bound_s / self.seconds)


def choose_sharding(
    problem: ShardingProblem,
    *,
    memory_limit_bytes: int | None = None,
    starts: Sequence[tuple[int, ...]] = (),
    deadline: Deadline | None = None,
    seed: int = 0,
) -> FoundSharding:
    """The cheapest combination that fits: found here or one of `starts`, from the cheapest of which the solver begins.

    The first option of every node (every rank does everything) is always a start.

    Raises:
        JobError: if nothing fits the memory limit (says by how much), or nothing was found in time.
    """
    deadline = deadline or Deadline(_LIMIT_S)
    lifetimes = TensorLifetimes(problem)
    best = _cheapest(problem, lifetimes, [(0,) * len(problem.nodes), *starts], memory_limit_bytes)
    moments = lifetimes.likely_peaks()
    for _ in range(_MAX_ROUNDS):
        model = _Model(problem)
        if memory_limit_bytes is not None:
            for moment in moments:
                model.bound_memory(lifetimes, moment, memory_limit_bytes)
        if best is not None:
            model.begin_with(best.choice)
        solution = model.solved(deadline, seed)
        if solution is None and best is not None:
            return replace(best, bound_s=model.bound_s)
        if solution is None:
            lean = _Model(problem)
            lean.minimise_memory(lifetimes, moments)
            leanest = lean.solved(deadline, seed)
            raise JobError(
                _why_none(problem, None if leanest is None else lifetimes.peak(leanest[0])[0], memory_limit_bytes)
            )
        choice, is_optimal = solution
        peak, moment = lifetimes.peak(choice)
        if memory_limit_bytes is None or peak <= memory_limit_bytes:
            latest = FoundSharding(
                problem=problem, choice=choice, is_optimal=is_optimal, peak_bytes=peak, bound_s=model.bound_s
            )
            return latest if best is None or latest.seconds <= best.seconds else replace(best, bound_s=model.bound_s)
        if moment in moments:
            break
        moments = [*moments, moment]
    if best is not None:
        return best
    raise JobError(f"no sharding was found that fits the memory limit {format_memory(memory_limit_bytes or 0)} in time")


def _cheapest(
    problem: ShardingProblem, lifetimes: TensorLifetimes, starts: Sequence[tuple[int, ...]], limit_bytes: int | None
) -> FoundSharding | None:
    """The cheapest of some combinations that can be had and fits."""
    costs = [
        FoundSharding(problem=problem, choice=choice, is_optimal=False, peak_bytes=lifetimes.peak(choice)[0])
        for choice in starts
        if problem.seconds(choice) < float("inf")
    ]
    fitting = [one for one in costs if limit_bytes is None or one.peak_bytes <= limit_bytes]
    return min(fitting, key=lambda one: one.seconds, default=None)


def _why_none(problem: ShardingProblem, leanest_bytes: int | None, limit_bytes: int | None) -> str:
    """By how much the leanest sharding misses the limit."""
    if limit_bytes is None or leanest_bytes is None or leanest_bytes <= limit_bytes:
        return "no sharding was found in time: give the search more seconds"
    shape = "x".join(map(str, problem.mesh.shape))
    return (
        f"memory_limit is {format_memory(limit_bytes)}: the leanest sharding found over a mesh of {shape} ranks takes "
        f"{format_memory(leanest_bytes)}, {format_memory(leanest_bytes - limit_bytes)} too much"
    )


class _Model:
    """The integer program of one problem."""

    def __init__(self, problem: ShardingProblem) -> None:
        self._problem = problem
        self._model = cp_model.CpModel()
        self._kind_of = [node.kind for node in problem.nodes]
        self._cost: list[cp_model.LinearExprT] = []
        self._preferred = 0  # ticks of the objective that are no time, at most
        self.bound_s = 0.0
        self.option: dict[object, list[cp_model.IntVar]] = {}
        self._made: dict[str, dict[Layout, cp_model.LinearExpr]] = {}
        self.way: dict[tuple[str, object, Layout], dict[Layout, cp_model.IntVar]] = {}
        self._options()
        self._conversions()
        self._model.minimize(sum(self._cost))

    def _options(self) -> None:
        variables_of: dict[str, dict[Layout, list[cp_model.IntVar]]] = defaultdict(lambda: defaultdict(list))
        for node, kind in zip(self._problem.nodes, self._kind_of, strict=True):
            if kind not in self.option:
                self.option[kind] = [self._model.new_bool_var("") for _ in node.options]
                self._model.add_exactly_one(self.option[kind])
                for place, variable in enumerate(self.option[kind]):  # every rank does everything: always possible
                    self._model.add_hint(variable, place == 0)
            for variable, option in zip(self.option[kind], node.options, strict=True):
                ticks = round(option.seconds / _TICK_S)
                if not node.calls:  # between layouts that cost the same, a parameter is cut as finely as can be
                    uncut = sum(Held.WHOLE in layout for _, layout in option.makes)
                    ticks += uncut
                    self._preferred += uncut
                self._cost.append(ticks * variable)
                for value, layout in option.makes:
                    variables_of[value][layout].append(variable)
        self._made = {
            value: {layout: cp_model.LinearExpr.sum(variables) for layout, variables in layouts.items()}
            for value, layouts in variables_of.items()
        }

    def _conversions(self) -> None:
        """Ways of tensors that are alike (made by one kind in one place, read by the same kinds) are one variable."""
        readers = self._readers()
        makers = {
            value: (kind, place)
            for node, kind in zip(self._problem.nodes, self._kind_of, strict=True)
            for place, (value, _) in enumerate(node.options[0].makes)
        }
        known: dict[object, dict[Layout, dict[Layout, cp_model.IntVar]]] = {}
        for (value, part), of_kind in readers.items():
            alike = (makers[value], part, frozenset((kind, tuple(sorted(places))) for kind, places in of_kind.items()))
            if alike not in known:
                known[alike] = self._ways_of(value, part, list(of_kind))
            for layout, ways in known[alike].items():
                self.way[value, part, layout] = ways
                for before, variable in ways.items():
                    conversion = self._problem.conversions.between(self._problem.program.values[value], before, layout)
                    assert conversion is not None
                    self._cost.append(round(conversion.seconds / _TICK_S) * variable)

    def _readers(self) -> dict[tuple[str, object], dict[object, set[int]]]:
        """For each tensor and part of the step the kinds that read it, and where among their needs."""
        readers: dict[tuple[str, object], dict[object, set[int]]] = defaultdict(lambda: defaultdict(set))
        for node, kind in zip(self._problem.nodes, self._kind_of, strict=True):
            for option in node.options:
                for place, need in enumerate(option.needs):
                    readers[need.value, need.part][kind].add(place)
        return readers

    def _ways_of(
        self, value: str, part: object, kinds: Sequence[object]
    ) -> dict[Layout, dict[Layout, cp_model.IntVar]]:
        asking: dict[Layout, list[cp_model.LinearExprT]] = defaultdict(list)
        asked: list[tuple[Layout, ...]] = []
        wanted = set(kinds)
        for node, kind in zip(self._problem.nodes, self._kind_of, strict=True):
            if kind not in wanted or not any(
                n.value == value and n.part == part for o in node.options for n in o.needs
            ):
                continue
            by_layout: dict[Layout, list[cp_model.IntVar]] = defaultdict(list)
            for variable, option in zip(self.option[kind], node.options, strict=True):
                for layout in dict.fromkeys(n.layout for n in option.needs if n.value == value and n.part == part):
                    by_layout[layout].append(variable)
            for layout, variables in by_layout.items():
                asking[layout].append(cp_model.LinearExpr.sum(variables))
            asked.append(tuple(by_layout))
        whole = self._problem.program.values[value]
        ways_into: dict[Layout, dict[Layout, cp_model.IntVar]] = {}
        for layout, askers in asking.items():
            ways = {
                before: self._model.new_bool_var("")
                for before in self._made[value]
                if self._problem.conversions.between(whole, before, layout) is not None
            }
            for before, variable in ways.items():
                self._model.add(variable <= self._made[value][before])
            for asker in askers:
                self._model.add(sum(ways.values()) >= asker)
            ways_into[layout] = ways
        for layouts in asked:  # implied for whole numbers, not for the relaxation: each reader is served by some way
            for before, from_before in self._made[value].items():
                self._model.add(
                    sum(ways_into[layout][before] for layout in layouts if before in ways_into[layout]) >= from_before
                )
        return ways_into

    def begin_with(self, choice: Sequence[int]) -> None:
        """Gives the solver a whole solution."""
        options = [node.options[number] for node, number in zip(self._problem.nodes, choice, strict=True)]
        layouts = made_layouts(options)
        asked = {(need.value, need.part, need.layout) for need in needed(options)}
        hints: dict[int, tuple[cp_model.IntVar, bool]] = {}
        for kind, number in zip(self._kind_of, choice, strict=True):
            for place, variable in enumerate(self.option[kind]):
                hints[variable.index] = (variable, place == number)
        for key, ways in self.way.items():
            for before, variable in ways.items():
                hints[variable.index] = (variable, key in asked and before == layouts[key[0]])
        self._model.clear_hints()  # type: ignore[no-untyped-call]  # so in OR-Tools
        for variable, value in hints.values():
            self._model.add_hint(variable, value)

    # Memory.

    def bound_memory(self, lifetimes: TensorLifetimes, moment: int, limit_bytes: int) -> None:
        """At one moment of the step no more is held than the limit."""
        self._model.add(self._held(lifetimes, moment) <= limit_bytes >> 10)

    def minimise_memory(self, lifetimes: TensorLifetimes, moments: Sequence[int]) -> None:
        """The most that is held, in place of the time."""
        most = self._model.new_int_var(0, 1 << 50, "")
        for moment in moments:
            self._model.add(self._held(lifetimes, moment) <= most)
        self._model.minimize(most)

    def _held(self, lifetimes: TensorLifetimes, moment: int) -> cp_model.LinearExprT:
        """KiB held, rounded up."""
        terms: list[cp_model.LinearExprT] = []
        program, mesh = self._problem.program, self._problem.mesh

        def kib(value: str, layout: Layout) -> int:
            return -(-local_bytes(program.values[value], layout, mesh) // 1024)

        for node, kind in zip(self._problem.nodes, self._kind_of, strict=True):
            for variable, option in zip(self.option[kind], node.options, strict=True):
                if option.resident_bytes:
                    terms.append(-(-option.resident_bytes // 1024) * variable)
        for value in lifetimes.held(moment):
            terms += [kib(value, layout) * layout_variable for layout, layout_variable in self._made[value].items()]
        for value, part in lifetimes.copies_held(moment):
            for (of_value, of_part, layout), ways in self._ways(value, part):
                del of_value, of_part
                terms += [kib(value, layout) * way for before, way in ways.items() if before != layout]
        return sum(terms)

    def _ways(self, value: str, part: object) -> list[tuple[tuple[str, object, Layout], dict[Layout, cp_model.IntVar]]]:
        return [(key, ways) for key, ways in self.way.items() if key[0] == value and key[1] == part]

    def solved(self, deadline: Deadline, seed: int) -> tuple[tuple[int, ...], bool] | None:
        """The number of the option of every node, and whether it was proved best; None if none was found."""
        solver = new_solver(deadline, num_workers=1, seed=seed)
        solver.parameters.linearization_level = 2  # the bound comes from the relaxation, see above
        has_solution = solve(solver, self._model, deadline)
        # every term of the objective was rounded, by half a tick at most
        ticks = solver.best_objective_bound - self._preferred - 0.5 * len(self._cost)
        self.bound_s = max(0.0, ticks * _TICK_S)
        if not has_solution:
            return None
        taken = {
            kind: next(number for number, variable in enumerate(variables) if solver.value(variable))
            for kind, variables in self.option.items()
        }
        is_optimal = solver.objective_value <= solver.best_objective_bound + 1
        return tuple(taken[kind] for kind in self._kind_of), is_optimal
