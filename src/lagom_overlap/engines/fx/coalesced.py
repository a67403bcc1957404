"""Collectives of several tensors become collectives of one, which every rewrite knows.

`all_gather_into_tensor_coalesced` and its like start one collective per tensor in one call. Here the tensors are put
side by side, one row per rank, and travel as one: a copy before and views after, one latency as before. Gathers are
equal bit for bit; a sum may add ranks in another order, for a library's order depends on where an element lies.
"""

from collections.abc import Sequence
from math import prod
from operator import getitem
from typing import Final

import torch
from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.nodes import Editor, FxCollective, is_wait, lint, op_name, value_of
from lagom_overlap.errors import JobError

_C10D = torch.ops._c10d_functional
_KINDS: Final[dict[object, CollectiveKind]] = {
    _C10D.all_gather_into_tensor_coalesced.default: CollectiveKind.ALL_GATHER,
    _C10D.reduce_scatter_tensor_coalesced.default: CollectiveKind.REDUCE_SCATTER,
    _C10D.all_reduce_coalesced.default: CollectiveKind.ALL_REDUCE,
}


def one_tensor_each(graph: fx.Graph) -> bool:
    """Replaces the graph's collectives of several tensors, in place; whether there were any.

    Raises:
        JobError: if tensors of one call differ in element type, or a result is used before it is awaited.
    """
    several = [node for node in graph.nodes if node.op == "call_function" and node.target in _KINDS]
    for node in several:
        _replace(graph, node)
    if several:
        lint(graph)
    return bool(several)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    kind, sources = _KINDS[node.target], node.args[0]
    assert isinstance(sources, Sequence), "coalesced collectives take a list first"
    tensors = [source for source in sources if isinstance(source, fx.Node)]
    if len({value_of(tensor).dtype for tensor in tensors}) != 1:
        raise JobError(f"{op_name(node)!r} moves tensors of several element types at once, which cannot be planned")
    waits = _waits(node)
    with graph.inserting_before(node):
        parts = _as_one(Editor(graph), node, kind, tensors)
    for number, waited in waits:
        waited.replace_all_uses_with(parts[number])
    for _, waited in waits:
        graph.erase_node(waited)
    for element in list(node.users):
        graph.erase_node(element)
    graph.erase_node(node)


def _waits(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The waits of a call's results, each with the number of its tensor."""
    waits: list[tuple[int, fx.Node]] = []
    for element in node.users:
        if element.target is not getitem or not all(is_wait(user) for user in element.users):
            raise JobError(f"collective {op_name(node)!r} is used before it is awaited")
        number = element.args[1]
        assert isinstance(number, int), "an index"
        waits += [(number, waited) for waited in element.users]
    return waits


def _as_one(editor: Editor, node: fx.Node, kind: CollectiveKind, tensors: list[fx.Node]) -> list[fx.Node]:
    """What each tensor becomes, from one collective of all."""
    reduces = kind.traits.adds
    reduce_op = str(node.args[1]) if reduces else None
    num_ranks = 1 if kind is CollectiveKind.ALL_REDUCE else int(str(node.args[2 if reduces else 1]))
    rows_in = num_ranks if kind.traits.leaves_part else 1
    rows_out = num_ranks if kind.traits.takes_part else 1
    shapes = [list(value_of(tensor).shape) for tensor in tensors]
    widths = [prod(shape) // rows_in for shape in shapes]
    rows = [editor.reshape(tensor, [rows_in, width]) for tensor, width in zip(tensors, widths, strict=True)]
    flat = editor.reshape(editor.concatenated(rows, 1), [rows_in * sum(widths)])
    what = FxCollective(kind, flat, str(node.args[-1]), reduce_op)
    waited = editor.collective(what, flat, num_ranks)
    _take_place(waited.all_input_nodes[0], node)
    done = editor.reshape(waited, [rows_out, sum(widths)])
    parts, start = [], 0
    for shape, width in zip(shapes, widths, strict=True):
        part = editor.narrow(done, 1, start, width)
        parts.append(editor.reshape(part, [shape[0] * rows_out // rows_in, *shape[1:]]))
        start += width
    return parts


def _take_place(call: fx.Node, node: fx.Node) -> None:
    """Gives a new call the short name of what it does, and where the old one comes from."""
    call._rename(str(call.target).split(".")[-2])
    call.meta |= {key: value for key, value in node.meta.items() if key not in call.meta}
