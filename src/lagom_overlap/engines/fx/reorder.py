"""Put the nodes of a graph in the order of a plan.

Operators come in the order given. What carries no operator's name (waits, views, slices) comes as late as it can:
right before the first operator that needs it, so that a collective is awaited no sooner than its result is used. Nodes
that write into a tensor keep their place between its other readers, and nodes that draw random numbers their order.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import OP_NAME, is_collective, op_name
from lagom_overlap.errors import JobError

STREAM: Final = "lagom_stream"
"""Key of a node's meta: the stream that the operator runs on."""

WAITS: Final = "lagom_waits"
"""Key of a node's meta: names of collectives that must be complete before it starts, whether it reads them or not."""

_FIRST: Final = ("placeholder", "get_attr")


def reorder(graph: fx.Graph, order: Sequence[str]) -> None:
    """Orders the nodes by the operators' names.

    The order is the same on all ranks, so it names every collective: one that came where its result is needed could
    come elsewhere on another rank, for ranks need other parts. A computation that is left out comes where it is needed;
    a name ending in `#join` that the graph has no need of is passed over.

    Raises:
        JobError: if the order names what is no operator, leaves out a collective, or puts an operator before what it
            needs.
    """
    named = {op_name(node): node for node in graph.nodes if OP_NAME in node.meta}
    wanted = _wanted(named, order)
    _link(graph, _emitted(graph, wanted, _writes(graph)))


def _wanted(named: Mapping[str, fx.Node], order: Sequence[str]) -> list[fx.Node]:
    unknown = [name for name in order if name not in named and not name.endswith("#join")]
    if unknown:
        raise JobError(f"the plan orders {unknown[0]!r}, no operator of this graph: it was made for another one")
    listed = set(order)
    left_out = [name for name, node in named.items() if is_collective(node) and name not in listed]
    if left_out:
        raise JobError(f"the plan's order leaves out collective {left_out[0]!r}: it was made for another graph")
    return [named[name] for name in order if name in named]


def _writes(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """What must come first besides inputs: readers of a tensor before a write into it, the write before later ones.

    And what drew random numbers before.
    """
    needs: dict[fx.Node, set[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    writers: dict[fx.Node, fx.Node] = {}
    drawn: fx.Node | None = None
    for node in graph.nodes:
        if _draws(node):
            if drawn is not None:
                needs.setdefault(node, set()).add(drawn)
            drawn = node
        bases = {_base(used) for used in node.all_input_nodes}
        for base in bases:
            if base in writers:
                needs.setdefault(node, set()).add(writers[base])
        for base in _written(node):
            needs.setdefault(node, set()).update(readers.get(base, []))
            writers[base] = node
        for base in bases:
            readers.setdefault(base, []).append(node)
    return needs


def _draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers; attention does with dropout only."""
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in tags:
        return False
    schema = node.target._schema  # type: ignore[union-attr]  # an operator, which alone has tags
    names = [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return True
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(given.get("dropout_p"))


def _written(node: fx.Node) -> set[fx.Node]:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return set()
    pairs = zip(schema.arguments, node.args, strict=False)
    return {
        _base(value)
        for argument, value in pairs
        if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write
    }


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a view looks at."""
    while node.op == "call_function" and getattr(node.target, "is_view", False):
        node = node.all_input_nodes[0]
    return node


def _emitted(graph: fx.Graph, wanted: Sequence[fx.Node], extra: Mapping[fx.Node, set[fx.Node]]) -> list[fx.Node]:
    placed: dict[fx.Node, None] = {node: None for node in graph.nodes if node.op in _FIRST}
    pending = set(wanted)
    output = next(node for node in graph.nodes if node.op == "output")
    rest = [node for node in graph.nodes if node not in pending and node is not output]
    for target in (*wanted, *rest, output):
        _emit(target, placed, pending, extra)
    return list(placed)


def _emit(
    target: fx.Node, placed: dict[fx.Node, None], pending: set[fx.Node], extra: Mapping[fx.Node, set[fx.Node]]
) -> None:
    """Places a node after everything that it needs and that is not placed yet."""
    pending.discard(target)
    stack, entered = [target], set[fx.Node]()
    while stack:
        node = stack[-1]
        if node in placed:
            stack.pop()
            continue
        missing = [used for used in (*node.all_input_nodes, *extra.get(node, ())) if used not in placed]
        early = next((used for used in missing if used in pending), None)
        if early is not None:
            raise JobError(f"the plan puts {op_name(target)!r} before {op_name(early)!r}, which it needs")
        if not missing:
            placed[node] = None
            stack.pop()
            continue
        if node in entered:
            raise JobError(f"the graph has a cycle through {op_name(node)!r}")
        entered.add(node)
        stack += missing


def _link(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Puts the nodes of a graph in an order of all of them."""
    last = order[0]
    if next(iter(graph.nodes)) is not last:
        next(iter(graph.nodes)).prepend(last)
    for node in order[1:]:
        last.append(node)
        last = node
