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
from lagom_overlap.planners.sharding_search.call_strategies import Views
from lagom_overlap.planners.sharding_search.clusters import sharding_problem
from lagom_overlap.planners.sharding_search.conversions import Conversions
from lagom_overlap.planners.sharding_search.emit import emit
from lagom_overlap.planners.sharding_search.integer_program import FoundSharding, choose_sharding
from lagom_overlap.planners.sharding_search.mesh_layouts import Held, Layout, Placement, SearchMesh
from lagom_overlap.planners.sharding_search.sharding_problem import Node, Option, ShardingProblem
from lagom_overlap.workload import Attention, Gemm, Phase
from lagom_overlap.workload.tensor_program import TensorProgram, ValueKind


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

    With `zero_stage` it is data parallelism of that stage (`data_parallel`), else anything. On a mesh of two dimensions
    no rank repeats another's product where both dimensions can share it, as in Alpa, which keeps the program small.

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


MAX_STAGE = 3
"""ZeRO's last stage."""


def data_parallel(problem: ShardingProblem, zero_stage: int) -> ShardingProblem:
    """The problem with the options that data parallelism with a ZeRO stage allows, on any traced program.

    What a stage leaves open the search decides: how each call is shared out. Products read parameters whole and
    everything else in shares, which is the batch's. Stage 0 keeps parameters and optimizer whole (DDP), 1 and 2 share
    the optimizer out (gradients are reduce-scattered, new parameters gathered; stage 2 frees the rest of a gradient at
    once, as any buffer here is), 3 cuts the parameters too. A parameter that the ranks do not divide stays whole.

    Raises:
        JobError: if there is no such stage.
    """
    if not 0 <= zero_stage <= MAX_STAGE:
        raise JobError(f"zero_stage is {zero_stage}, must be 0 to {MAX_STAGE}")
    parameters = {name for name, v in problem.program.values.items() if v.kind is ValueKind.PARAMETER}
    nodes = tuple(_restricted(node, zero_stage, parameters, problem.views) for node in problem.nodes)
    return replace(problem, nodes=nodes)


def _restricted(node: Node, stage: int, parameters: set[str], views: Views) -> Node:
    if node.name == "results":
        return node
    if not node.calls:
        return _preferring(node, is_cut=stage == MAX_STAGE)
    if node.calls[0].updates is not None:
        return _preferring(node, is_cut=stage > 0)
    kept = tuple(option for option in node.options if _reads_whole(option, parameters))
    in_shares = tuple(option for option in kept if _works_on_shares(node, option, parameters, views))
    return replace(node, options=in_shares or kept)


def sharing_products(node: Node) -> Node:
    """The options under which all ranks share out every product and attention of a node, if there are such."""
    heavy = [number for number, call in enumerate(node.calls) if isinstance(call.work, Gemm | Attention)]
    shared = tuple(
        option
        for option in node.options
        if all(Held.WHOLE not in option.strategies[number].choices for number in heavy)
    )
    return replace(node, options=shared or node.options)


def _preferring(node: Node, *, is_cut: bool) -> Node:
    """Options that cut what is made over all ranks, or none; all that there is where a cut cannot be had."""
    cut = tuple(option for option in node.options if all(_is_cut(layout) for _, layout in option.makes))
    whole = tuple(option for option in node.options if not any(_is_touched(layout) for _, layout in option.makes))
    return replace(node, options=cut if is_cut and cut else whole)


def _is_cut(layout: Layout) -> bool:
    return all(isinstance(place, int) for place in layout)


def _is_touched(layout: Layout) -> bool:
    return any(isinstance(place, int) for place in layout)


def _reads_whole(option: Option, parameters: set[str]) -> bool:
    return all(
        need.part is Phase.OPTIMIZER or need.value not in parameters or set(need.layout) == {Held.WHOLE}
        for need in option.needs
    )


def _works_on_shares(node: Node, option: Option, parameters: set[str], views: Views) -> bool:
    """Every product and attention reads what is no parameter cut over all ranks."""
    return all(
        isinstance(place, int)
        for call, strategy in zip(node.calls, option.strategies, strict=True)
        if isinstance(call.work, Gemm | Attention)
        for operand in call.inputs
        if views.chain(operand.value)[0] not in parameters
        for place in strategy.layout(operand)
    )
