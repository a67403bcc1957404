"""Apply the rewrites of a plan to an FX graph with functional collectives.

Names are those of `workload.rewrite.steps`: an operator of the iteration is the node of that name, and what a rewrite
makes is called as there, so that a plan made on the iteration fits the graph.
"""

import copy
from collections.abc import Sequence

from torch import fx

from lagom_overlap.engines.fx.fuse import fuse
from lagom_overlap.engines.fx.groups import Groups
from lagom_overlap.engines.fx.nodes import OP_NAME, is_collective, lint
from lagom_overlap.engines.fx.partition import partition_groups
from lagom_overlap.engines.fx.reorder import STREAM, WAITS, reorder
from lagom_overlap.engines.fx.slide import slide
from lagom_overlap.engines.fx.split import split
from lagom_overlap.engines.fx.substitute import substitute
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, Iteration
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Fuse, PartitionGroups, Reorder, Rewrite, Slide, Split, Substitute


def apply_rewrites(
    module: fx.GraphModule, iteration: Iteration, rewrites: Sequence[Rewrite], groups: Groups
) -> fx.GraphModule:
    """The graph that the plan makes of `module`; `iteration` is its capture, whose operators are named like its nodes.

    Collective: every rank applies the same rewrites in the same order, for they may make process groups.

    Raises:
        JobError: if the plan is for another graph or world size, or asks for what cannot be done to it.
    """
    copied = copy.deepcopy(module)
    rewrite_graph(copied.graph, iteration, rewrites, groups)
    copied.recompile()
    return copied


def rewrite_graph(graph: fx.Graph, iteration: Iteration, rewrites: Sequence[Rewrite], groups: Groups) -> None:
    """As `apply_rewrites`, in place; the caller recompiles."""
    name_operators(graph, iteration)
    now = iteration
    ordered = False
    for step in rewrites:
        nodes = {str(node.meta[OP_NAME]): node for node in graph.nodes if OP_NAME in node.meta}
        ops = {op.name: op for op in now.ops}
        match step:
            case Substitute():
                substitute(graph, _collective(nodes, step.comm), step, groups)
            case PartitionGroups():
                reorder(graph, list(ops))
                partition_groups(graph, _collective(nodes, step.comm), step, ops, groups)
            case Split():
                reorder(graph, list(ops))
                split(graph, _node(nodes, step.comm), step, ops, groups)
            case Slide():
                reorder(graph, list(ops))
                slide(graph, step, ops, groups)
            case Fuse():
                fuse(graph, [_collective(nodes, name) for name in step.comms], groups)
            case Reorder():
                reorder(graph, step.order)
                ordered = True
        now = rewritten(now, (step,))
    if not ordered:
        reorder(graph, [op.name for op in now.ops])
    _mark(graph, now)
    lint(graph)


def _mark(graph: fx.Graph, iteration: Iteration) -> None:
    """Writes on the nodes what their order does not say: streams of collectives, waits for collectives."""
    comms = {op.name for op in iteration.comms}
    ops = {op.name: op for op in iteration.ops}
    for node in graph.nodes:
        op = ops.get(str(node.meta.get(OP_NAME)))
        if op is None:
            continue
        node.meta[WAITS] = tuple(dep for dep in op.deps if dep in comms)
        if op.name in comms:
            node.meta[STREAM] = op.stream


def name_operators(graph: fx.Graph, iteration: Iteration) -> None:
    """Marks the nodes that are operators of the iteration, collectives with their streams.

    Raises:
        JobError: if one of them is not in the graph.
    """
    nodes = {node.name: node for node in graph.nodes}
    for op in iteration.ops:
        if op.name not in nodes:
            raise JobError(f"operator {op.name!r} of iteration {iteration.name!r} is no node of this graph")
        nodes[op.name].meta[OP_NAME] = op.name
        if isinstance(op, CommOp):
            nodes[op.name].meta[STREAM] = op.stream


def _node(nodes: dict[str, fx.Node], name: str) -> fx.Node:
    if name not in nodes:
        raise JobError(f"the plan rewrites {name!r}, no operator of this graph: it was made for another one")
    return nodes[name]


def _collective(nodes: dict[str, fx.Node], name: str) -> fx.Node:
    node = _node(nodes, name)
    if not is_collective(node):
        raise JobError(f"the plan rewrites {name!r}, which is no collective")
    return node
