"""Fixed parallel methods as restrictions of the search: data parallelism with ZeRO's stages on any traced program.

What a stage leaves open the search decides: how each call is shared out. Products read parameters whole and everything
else in shares, which is the batch's. Stage 0 keeps parameters and optimizer whole (DDP), 1 and 2 share the optimizer
out (gradients are reduce-scattered, new parameters gathered; stage 2 frees the rest of a gradient at once, as any
buffer here is), 3 cuts the parameters too. A parameter that the ranks do not divide stays whole.
"""

from dataclasses import replace

from lagom_overlap.errors import JobError
from lagom_overlap.planners.sharding_search.layouts import Held, Layout
from lagom_overlap.planners.sharding_search.problem import Node, Option, ShardingProblem
from lagom_overlap.planners.sharding_search.strategies import Views
from lagom_overlap.workload import Attention, Gemm, Phase
from lagom_overlap.workload.tensor_program import ValueKind

MAX_STAGE = 3


def data_parallel(problem: ShardingProblem, zero_stage: int) -> ShardingProblem:
    """The problem with the options that a ZeRO stage allows.

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
