"""Run collectives of one kind, group and element type as one: one latency instead of several.

Each tensor is laid out as one row per rank, so that what belongs to a rank stays together when rows are put side by
side; sums add the same numbers in the same order of ranks as before.
"""

from collections.abc import Sequence
from math import prod

from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.groups import Groups
from lagom_overlap.engines.fx.nodes import Editor, collective_of, op_name, replace, value_of
from lagom_overlap.errors import JobError


def fuse(graph: fx.Graph, nodes: Sequence[fx.Node], groups: Groups) -> None:
    """Makes one collective of several; it stands for `<first>+<number of others>`.

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
    editor = Editor(graph)
    num_ranks = len(groups.ranks(what[0].group))
    kind = what[0].kind
    rows_in = 1 if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_REDUCE) else num_ranks
    rows_out = 1 if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE) else num_ranks
    shapes = [list(value_of(one.source).shape) for one in what]
    columns = [prod(shape) // rows_in for shape in shapes]
    sources = [editor.reshape(one.source, [rows_in, width]) for one, width in zip(what, columns, strict=True)]
    joined = editor.reshape(editor.concatenated(sources, 1), [rows_in * sum(columns)])
    name = f"{op_name(nodes[0])}+{len(nodes) - 1}"
    done = editor.reshape(editor.collective(what[0], joined, num_ranks, name=name), [rows_out, sum(columns)])
    start = 0
    for node, shape, width in zip(nodes, shapes, columns, strict=True):
        rows = shape[0] * rows_out // rows_in
        replace(node, editor.reshape(editor.narrow(done, 1, start, width), [rows, *shape[1:]]))
        start += width


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
