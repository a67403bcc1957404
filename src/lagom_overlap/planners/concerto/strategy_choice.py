"""Which strategy each communication takes: Concerto's integer program (section 4.5; spec, planners 1.8).

    minimise  sum_i s_i . cost_i  +  sum_{i < j} s_i' M_ij s_j,   s_i one-hot

M_ij(m, n) is what two strategies both count on: over the computations U that both cut,

    the same axis:   sum_U T max(0, (N_m - 1)/N_m + (N_n - 1)/N_n - 1)
    another axis:    sum_U T min((N_m - 1)/N_m, (N_n - 1)/N_n)

(the paper has one N; these are its formulas for two). Communications that share no computation are independent; along a
chain of layers each shares with the one before and the one after, and dynamic programming is exact. CP-SAT decides the
rest.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ortools.sat.python import cp_model

from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.concerto.strategies import ConcertoStrategy
from lagom_overlap.planners.cpsat.solver import new_solver, solve
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.step_index import StepIndex

_UNITS_PER_S = 1e9
"""CP-SAT counts in whole nanoseconds."""

Options = Mapping[str, Sequence[ConcertoStrategy]]


def interaction_s(one: ConcertoStrategy, other: ConcertoStrategy, seconds: Mapping[str, float]) -> float:
    """M: the time of shared computations that two strategies both count on (s)."""
    mine, theirs = one.axes, other.axes
    share, other_share = (s.num_chunks - 1.0 for s in (one, other))
    share, other_share = share / one.num_chunks, other_share / other.num_chunks
    total = 0.0
    for name in sorted(mine.keys() & theirs.keys()):
        same = mine[name] == theirs[name]
        total += seconds[name] * (max(0.0, share + other_share - 1.0) if same else min(share, other_share))
    return total


def choose(
    options: Options, index: StepIndex, times: OpTimes, deadline: Deadline, component_s: float = 1.0
) -> dict[str, ConcertoStrategy]:
    """The cheapest combination; `component_s` bounds what CP-SAT may take for one component."""
    names = {name for strategies in options.values() for strategy in strategies for name in strategy.axes}
    seconds = {name: times.seconds(index.ops[name]) for name in names}
    neighbours = _neighbours(options)
    chosen: dict[str, ConcertoStrategy] = {}
    for component in _components(options, neighbours):
        path = _as_path(component, neighbours)
        if path is not None:
            chosen |= _along_path(path, options, seconds)
        else:
            chosen |= _by_cpsat(component, options, seconds, neighbours, deadline.within(component_s))
    return chosen


def _neighbours(options: Options) -> dict[str, set[str]]:
    """Communications some of whose strategies share a computation."""
    users: dict[str, set[str]] = defaultdict(set)
    for comm, strategies in options.items():
        for strategy in strategies:
            for name in strategy.axes:
                users[name].add(comm)
    neighbours: dict[str, set[str]] = {comm: set() for comm in options}
    for comms in users.values():
        for comm in comms:
            neighbours[comm] |= comms - {comm}
    return neighbours


def _components(options: Options, neighbours: Mapping[str, set[str]]) -> list[list[str]]:
    components: list[list[str]] = []
    seen: set[str] = set()
    for start in options:
        if start in seen:
            continue
        component, stack = [], [start]
        seen.add(start)
        while stack:
            comm = stack.pop()
            component.append(comm)
            for other in sorted(neighbours[comm] - seen):
                seen.add(other)
                stack.append(other)
        components.append(component)
    return components


def _as_path(component: Sequence[str], neighbours: Mapping[str, set[str]]) -> list[str] | None:
    """The component as a chain, or None if it is none."""
    ends = [comm for comm in component if len(neighbours[comm]) < 2]
    if len(component) > 1 and (len(ends) != 2 or any(len(neighbours[comm]) > 2 for comm in component)):
        return None
    path = [ends[0] if ends else component[0]]
    while len(path) < len(component):
        following = [comm for comm in neighbours[path[-1]] if comm not in path[-2:]]
        if len(following) != 1:
            return None
        path.append(following[0])
    return path


def _along_path(path: Sequence[str], options: Options, seconds: Mapping[str, float]) -> dict[str, ConcertoStrategy]:
    """Dynamic programming: the best total up to each communication for each of its strategies."""
    best: list[list[tuple[float, int]]] = [[(strategy.cost_s, -1) for strategy in options[path[0]]]]
    for before, comm in pairwise(path):
        row = []
        for strategy in options[comm]:
            totals = [
                known[0] + interaction_s(earlier, strategy, seconds)
                for known, earlier in zip(best[-1], options[before], strict=True)
            ]
            place = min(range(len(totals)), key=totals.__getitem__)
            row.append((totals[place] + strategy.cost_s, place))
        best.append(row)
    place = min(range(len(best[-1])), key=lambda number: best[-1][number][0])
    chosen = {}
    for comm, row in zip(reversed(path), reversed(best), strict=True):
        chosen[comm] = options[comm][place]
        place = row[place][1]
    return chosen


def _by_cpsat(
    component: Sequence[str],
    options: Options,
    seconds: Mapping[str, float],
    neighbours: Mapping[str, set[str]],
    deadline: Deadline,
) -> dict[str, ConcertoStrategy]:
    model = cp_model.CpModel()
    picks = {comm: [model.new_bool_var("") for _ in options[comm]] for comm in component}
    terms: list[cp_model.LinearExpr] = []
    for comm, variables in picks.items():
        model.add_exactly_one(variables)
        model.add_hint(variables[0], True)
        for strategy, variable in zip(options[comm], variables, strict=True):
            terms.append(round(strategy.cost_s * _UNITS_PER_S) * variable)
        for other in sorted(neighbours[comm]):
            if other > comm:
                terms += _pair_terms(model, (options[comm], variables), (options[other], picks[other]), seconds)
    model.minimize(sum(terms))
    solver = new_solver(deadline)
    if not solve(solver, model, deadline):
        return {comm: options[comm][0] for comm in component}
    return {
        comm: next(s for s, variable in zip(options[comm], variables, strict=True) if solver.value(variable))
        for comm, variables in picks.items()
    }


def _pair_terms(
    model: cp_model.CpModel,
    one: tuple[Sequence[ConcertoStrategy], Sequence[cp_model.IntVar]],
    other: tuple[Sequence[ConcertoStrategy], Sequence[cp_model.IntVar]],
    seconds: Mapping[str, float],
) -> list[cp_model.LinearExpr]:
    """Y >= s_m + s_n - 1 for every pair with a price."""
    terms: list[cp_model.LinearExpr] = []
    for mine, variable in zip(*one, strict=True):
        for theirs, other_variable in zip(*other, strict=True):
            price = round(interaction_s(mine, theirs, seconds) * _UNITS_PER_S)
            if price:
                both = model.new_bool_var("")
                model.add(both >= variable + other_variable - 1)
                terms.append(price * both)
    return terms


def without_overlap(chosen: Mapping[str, ConcertoStrategy]) -> list[ConcertoStrategy]:
    """What is cut, no computation twice: the cheapest first, chains of the others end where a computation is taken.

    The program prices shared computations, a graph has each of them once.
    """
    taken: set[str] = set()
    kept = []
    for strategy in sorted(chosen.values(), key=lambda s: (s.cost_s, s.comm)):
        if strategy.num_chunks == 1:
            continue
        before = strategy.before
        for place, link in enumerate(strategy.before):
            if link.op in taken:
                before = strategy.before[place + 1 :]
        after = strategy.after
        for place, link in enumerate(strategy.after):
            if link.op in taken:
                after = strategy.after[:place]
                break
        if before or after:
            taken |= {link.op for link in (*before, *after)}
            kept.append(
                ConcertoStrategy(strategy.comm, strategy.num_chunks, strategy.cost_s, strategy.axis, before, after)
            )
    return kept
