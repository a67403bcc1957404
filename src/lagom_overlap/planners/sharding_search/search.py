"""A program, a mesh and a machine in; the cheapest sharding out.

The search over a rectangle begins with shardings of its lines, which are small programs and solved in seconds. Over all
ranks as one line, a choice becomes the same choice on both dimensions; over each dimension alone, the two choices
together. What the rectangle does not offer so is done as the first dimension alone would have it, or as the second, or
not at all; what then cannot be had is left out by whoever takes the starts.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.sharding_search.choice import FoundSharding, choose_sharding
from lagom_overlap.planners.sharding_search.clusters import sharding_problem
from lagom_overlap.planners.sharding_search.conversions import Conversions
from lagom_overlap.planners.sharding_search.emit import emit
from lagom_overlap.planners.sharding_search.layouts import Held, Placement, SearchMesh
from lagom_overlap.planners.sharding_search.methods import data_parallel, sharing_products
from lagom_overlap.planners.sharding_search.problem import Node, ShardingProblem
from lagom_overlap.workload.tensor_program import TensorProgram


def lines_of(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The lines of a rectangle: all its ranks, and each dimension alone, equal ones once."""
    return tuple(dict.fromkeys(((prod(shape),), *((size,) for size in shape))))


def starts_from(problem: ShardingProblem, lines: dict[tuple[int, ...], FoundSharding]) -> list[tuple[int, ...]]:
    """Combinations of a rectangle's problem made of what was found of its lines."""
    shape = problem.mesh.shape
    everywhere = [(prod(shape),)] * len(shape)
    starts = []
    for sources in (everywhere, [(size,) for size in shape]):
        if all(source in lines for source in sources):
            starts.append(_together(problem, [_chosen(lines[source]) for source in sources]))
    return starts


Chosen = dict[str, Placement]


def _chosen(line: FoundSharding) -> Chosen:
    """What a line does with each call, and how it holds each parameter, by name."""
    chosen: Chosen = {}
    for node, number in zip(line.problem.nodes, line.choice, strict=True):
        option = node.options[number]
        for call, strategy in zip(node.calls, option.strategies, strict=True):
            chosen[call.name] = strategy.choices[0]
        if not node.calls:
            chosen |= {value: layout[0] for value, layout in option.makes}
    return chosen


def _together(problem: ShardingProblem, lines: Sequence[Chosen]) -> tuple[int, ...]:
    """The options nearest to what the lines do, one for all nodes of a kind."""
    taken: dict[object, int] = {}
    choice = []
    for node in problem.nodes:
        if node.kind not in taken:
            taken[node.kind] = _nearest(node, [line.get(node.name, Held.WHOLE) for line in lines])
        choice.append(taken[node.kind])
    return tuple(choice)


def _nearest(node: Node, wanted: Sequence[Placement]) -> int:
    """The option that does what is wanted on the most mesh dimensions, the first ones before others."""

    def agreement(number: int) -> tuple[int, list[bool]]:
        option = node.options[number]
        does = option.strategies[0].choices if node.calls else option.makes[0][1] if option.makes else ()
        same = [one == other for one, other in zip(does, wanted, strict=False)]
        return sum(same), same

    return max(range(len(node.options)), key=agreement)


_LINE_SHARE: Final = 0.15
"""Of the time, for each line of a rectangle."""

__all__ = ["emit", "search_sharding"]


def search_sharding(
    program: TensorProgram,
    *,
    mesh_shape: tuple[int, ...],
    cluster: Cluster,
    times: OpTimes,
    memory_limit_bytes: int | None = None,
    zero_stage: int | None = None,
    limit_s: float = 30.0,
    seed: int = 0,
) -> FoundSharding:
    """The cheapest sharding found in `limit_s` seconds; `emit` makes a step of it.

    A mesh of two dimensions is searched from what was found of its lines (`starts`), which is the answer where nothing
    better is found in time.

    With `zero_stage` it is data parallelism of that stage (`methods`), else anything. On a mesh of two dimensions no
    rank repeats another's product where both dimensions can share it, as in Alpa, which keeps the program small.

    Raises:
        JobError: if the mesh is none, nothing fits the memory limit, or nothing was found in time.
    """
    deadline = Deadline(limit_s)
    search = partial(choose_sharding, memory_limit_bytes=memory_limit_bytes, seed=seed)

    def problem_of(shape: tuple[int, ...]) -> ShardingProblem:
        mesh = SearchMesh(shape)
        problem = sharding_problem(program, mesh, Conversions(mesh, cluster, times), times)
        if zero_stage is not None:
            return data_parallel(problem, zero_stage)
        return replace(problem, nodes=tuple(map(sharing_products, problem.nodes))) if len(mesh_shape) > 1 else problem

    problem = problem_of(mesh_shape)
    if len(mesh_shape) == 1:
        return search(problem, deadline=deadline)
    lines: dict[tuple[int, ...], FoundSharding] = {}
    for line in lines_of(mesh_shape):
        with contextlib.suppress(JobError):  # too little memory on so few ranks, or no time
            lines[line] = search(problem_of(line), deadline=deadline.within(_LINE_SHARE * limit_s))
    return search(problem, deadline=deadline, starts=starts_from(problem, lines))
