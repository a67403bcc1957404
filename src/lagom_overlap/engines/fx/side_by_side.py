"""How a collective and computations slow each other on one rank: run side by side, and each alone, in turn.

A rank on a processor core has no other unit for its collectives: copies, sums and the sockets of gloo take time of the
core that computes. What is measured is the program's own collectives next to its own computations, on threads as
`streams` runs them, so that the interpreter's lock and the load of other processes are in it, too.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from time import perf_counter
from typing import Any, Final, Protocol

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import OP_NAME, is_collective, is_wait, op_name

MAX_COLLECTIVES: Final = 16
"""Shapes that are measured, those with most time first."""
REPEATS: Final = 3
"""Per repeat of an operator alone: a rate is a difference of times, so it scatters more than they do."""


class RankMaxima(Protocol):
    """Agreement between ranks, on a group that carries no measured traffic."""

    def barrier(self) -> None:
        """Returns when every rank has come."""

    def maxima(self, values: list[float]) -> list[float]:
        """Each value's maximum over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySideTimes:
    """Seconds of a collective and of some computations, each alone, and of both begun at the same moment, by repeat."""

    collective_s: Sequence[float]
    computations_s: Sequence[float]
    together_s: Sequence[float]

    def rate(self) -> float:
        """Progress of each while both run, relative to running alone; what is left over runs at its own speed.

        1 on separate units, 1/2 where the two share one and nothing is gained. One rate for both: how they share it
        depends on the moment, what both take together does not. Every repeat of one is held against every repeat of the
        other, for the mean of the longer of two noisy times is more than the longer mean.
        """
        pairs = list(product(self.collective_s, self.computations_s))
        left_over_s = fmean(abs(one - other) for one, other in pairs)
        both_s = fmean(self.together_s) - left_over_s
        shorter_s = fmean(min(pair) for pair in pairs)
        return 1.0 if both_s <= shorter_s else max(_LEAST_RATE, shorter_s / both_s)


_LEAST_RATE: Final = 0.25
"""Twice as slow as one after the other; less is noise of other processes."""


def rates_side_by_side(
    module: fx.GraphModule,
    values: Mapping[fx.Node, Any],
    seconds: Mapping[str, float],
    shapes: Mapping[str, object],
    *,
    ranks: RankMaxima,
    repeats: int,
) -> dict[str, float]:
    """The rate of every collective by name; those of one shape are measured once, next to what follows in the program.

    `values` are those of a run, `seconds` of each operator alone, `repeats` of these, the same on all ranks. Every rank
    calls it.
    """
    nodes = [node for node in module.graph.nodes if OP_NAME in node.meta and node.op == "call_function"]
    spent: dict[object, float] = {}
    first: dict[object, fx.Node] = {}
    for node in nodes:
        if is_collective(node):
            shape = shapes[op_name(node)]
            first.setdefault(shape, node)
            spent[shape] = spent.get(shape, 0.0) + seconds[op_name(node)]
    chosen = sorted(spent, key=lambda shape: -spent[shape])[:MAX_COLLECTIVES]
    rates: dict[object, float] = {}
    with ThreadPoolExecutor(max_workers=1, initializer=torch.set_grad_enabled, initargs=(False,)) as stream:
        for shape in chosen:
            work = _computations_behind(first[shape], nodes, seconds)
            if work:
                collective = _call(first[shape], values)
                computations = [_call(node, values) for node in work]
                rates[shape] = _measured(collective, computations, stream, ranks, REPEATS * repeats).rate()
    return {name: rates[shape] for name, shape in shapes.items() if shape in rates}


def _computations_behind(collective: fx.Node, nodes: Sequence[fx.Node], seconds: Mapping[str, float]) -> list[fx.Node]:
    """The computations that come next in the program, and after its end from its begin, as long as the collective."""
    place = nodes.index(collective)
    behind = [node for node in (*nodes[place:], *nodes[:place]) if not is_collective(node)]
    wanted_s, whole_s = seconds[op_name(collective)], sum(seconds[op_name(node)] for node in behind)
    if not whole_s:
        return []
    behind *= min(8, 1 + int(wanted_s / whole_s))
    computations: list[fx.Node] = []
    for node in behind:
        computations.append(node)
        wanted_s -= seconds[op_name(node)]
        if wanted_s <= 0:
            break
    return computations


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Callable[[], object]:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if not is_collective(node):
        return lambda: node.target(*args, **kwargs)  # type: ignore[operator]  # an operator
    wait = torch.ops._c10d_functional.wait_tensor.default
    is_waited = any(is_wait(user) for user in node.users)
    return lambda: wait(node.target(*args, **kwargs)) if is_waited else node.target(*args, **kwargs)  # type: ignore[operator]


def _measured(
    collective: Callable[[], object],
    computations: Sequence[Callable[[], object]],
    stream: ThreadPoolExecutor,
    ranks: RankMaxima,
    repeats: int,
) -> SideBySideTimes:
    """Of the slowest rank in every repeat; the first does not count."""

    def ended(call: Callable[[], object]) -> float:
        call()
        return perf_counter()

    def compute() -> None:
        for each in computations:
            each()

    rows = []
    for _ in range(repeats + 1):
        ranks.barrier()
        begin = perf_counter()
        computed_s = ended(compute) - begin
        ranks.barrier()
        begin = perf_counter()
        carried_s = stream.submit(ended, collective).result() - begin
        ranks.barrier()
        begin = perf_counter()
        carried = stream.submit(ended, collective)
        rows.append((computed_s, carried_s, max(ended(compute), carried.result()) - begin))
    slowest = ranks.maxima([seconds for row in rows[1:] for seconds in row])
    return SideBySideTimes(computations_s=slowest[::3], collective_s=slowest[1::3], together_s=slowest[2::3])
