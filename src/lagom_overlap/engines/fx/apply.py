"""Apply the rewrites of a plan to an FX graph with functional collectives.

Names are those of `workload.rewrite.steps`: an operator of the iteration is the node of that name, and what a rewrite
makes is called as there, so that a plan made on the iteration fits the graph.
"""

import copy
from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.nodes import (
    OP_NAME,
    Editor,
    FxCollective,
    collective_of,
    is_collective,
    lint,
    op_name,
    replace,
    value_of,
)
from lagom_overlap.engines.fx.partition import partition_groups
from lagom_overlap.engines.fx.process_groups import Groups
from lagom_overlap.engines.fx.reorder import STREAM, WAITS, reorder
from lagom_overlap.engines.fx.slide import slide
from lagom_overlap.engines.fx.split import split
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, Iteration
from lagom_overlap.workload.rewrite.apply import REPLACED, rewritten
from lagom_overlap.workload.rewrite.steps import (
    Fuse,
    PartitionGroups,
    Reorder,
    Rewrite,
    Slide,
    Split,
    Substitute,
    Substitution,
)


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


def fuse(graph: fx.Graph, nodes: Sequence[fx.Node], groups: Groups) -> None:
    """Makes one collective of several, with one latency; it stands for `<first>+<number of others>`.

    Sums add the same numbers in the same order of ranks as before.

    Raises:
        JobError: if they differ in kind, group, reduction or element type, one depends on another, or ranks' parts are
            unequal.
    """
    what = [collective_of(node) for node in nodes]
    alike = {(one.kind, one.group, one.reduce_op, value_of(one.source).dtype) for one in what}
    if len(alike) != 1:
        raise JobError(f"fuse {[op_name(node) for node in nodes]}: they differ in kind, group, reduction or type")
    if any(one.uneven for one in what):
        raise JobError(f"fuse {[op_name(node) for node in nodes]}: all-to-alls of unequal parts cannot be fused")
    _check_independent(nodes)
    num_ranks = len(groups.ranks(what[0].group))
    name = f"{op_name(nodes[0])}+{len(nodes) - 1}"
    _, parts = Editor(graph).collective_of_all(what[0], [one.source for one in what], num_ranks, name=name)
    for node, part in zip(nodes, parts, strict=True):
        replace(node, part)


def _check_independent(nodes: Sequence[fx.Node]) -> None:
    members = set(nodes)
    for node in nodes:
        seen: set[fx.Node] = set()
        open_nodes = list(node.all_input_nodes)
        while open_nodes:
            current = open_nodes.pop()
            if current in members:
                raise JobError(f"fuse: {op_name(node)!r} depends on {op_name(current)!r}")
            if current not in seen:
                seen.add(current)
                open_nodes += current.all_input_nodes


def substitute(graph: fx.Graph, node: fx.Node, step: Substitute, groups: Groups) -> None:
    """Replaces the collective `node` by others that together do the same (Centauri, tree level 1).

    Raises:
        JobError: if a collective of its kind cannot be replaced so.
    """
    what = collective_of(node)
    if what.kind is not REPLACED[step.into]:
        raise JobError(f"{step.comm!r} is a {what.kind}: {step.into} replaces a {REPLACED[step.into]}")
    editor = Editor(graph)
    num_ranks = len(groups.ranks(what.group))
    match step.into:
        case Substitution.REDUCE_SCATTER_ALL_GATHER:
            result = _scatter_and_gather(editor, node, what, num_ranks)
        case Substitution.REDUCES:
            result = _reduces(editor, node, what, num_ranks, groups.position(what.group))
        case Substitution.BROADCASTS:
            result = _broadcasts(editor, node, what, num_ranks)
    replace(node, result)


def _scatter_and_gather(editor: Editor, node: fx.Node, what: FxCollective, num_ranks: int) -> fx.Node:
    """All-reduce as reduce-scatter and all-gather of the flat tensor, padded to a multiple of the ranks."""
    shape = list(value_of(what.source).shape)
    num_elements = prod(shape)
    flat = editor.reshape(what.source, [num_elements])
    if missing := -num_elements % num_ranks:
        flat = editor.call(torch.ops.aten.constant_pad_nd.default, flat, [0, missing], 0)
    scatter = FxCollective(CollectiveKind.REDUCE_SCATTER, flat, what.group, what.reduce_op)
    gather = FxCollective(CollectiveKind.ALL_GATHER, flat, what.group)
    part = editor.collective(scatter, flat, num_ranks, name=f"{op_name(node)}.rs")
    whole = editor.collective(gather, part, num_ranks, name=f"{op_name(node)}.ag")
    if missing:
        whole = editor.narrow(whole, 0, 0, num_elements)
    return editor.reshape(whole, shape)


def _reduces(editor: Editor, node: fx.Node, what: FxCollective, num_ranks: int, position: int) -> fx.Node:
    """Reduce-scatter as one reduce to each rank; this rank keeps the one that came to it."""
    part = value_of(what.source).shape[0] // num_ranks
    reduced = [
        editor.reduce(
            editor.narrow(what.source, 0, root * part, part),
            what.reduce_op or "sum",
            root,
            what.group,
            name=f"{op_name(node)}.{root}",
        )
        for root in range(num_ranks)
    ]
    return reduced[position]


def _broadcasts(editor: Editor, node: fx.Node, what: FxCollective, num_ranks: int) -> fx.Node:
    """All-gather as one broadcast from each rank."""
    return editor.concatenated(
        (editor.broadcast(what.source, root, what.group, name=f"{op_name(node)}.{root}") for root in range(num_ranks)),
        0,
    )
