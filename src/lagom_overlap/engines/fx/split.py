"""Cut a collective and the computations around it, so that one piece is on its way while another is worked on.

An axis of an operator's `ShardSpec` says how the pieces of its output make the whole; which dimensions of its own
arguments that cuts follows from what the operator is (`capturing.shard_rules`). A tensor that an operator of the chain
reads is the piece that another member made, followed through the views between the two, or a slice of a whole tensor.

Pieces of matrix products add the same numbers in the same order in exact arithmetic, but a library may choose another
kernel for another shape: split computations are equal within rounding, not bit for bit. Split collectives are exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from lagom_overlap.capturing.shard_rules import ShardRule, shard_rule
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx import cuts
from lagom_overlap.engines.fx.cuts import GraphCut
from lagom_overlap.engines.fx.nodes import OP_NAME, Editor, collective_of, ended, is_collective, op_name, value_of
from lagom_overlap.engines.fx.process_groups import Groups
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Combine, Op
from lagom_overlap.workload.rewrite.steps import ChainLink, Split
from lagom_overlap.workload.sharding import Gather, Reduce


@dataclass(frozen=True, slots=True)
class CallAxis:
    """An axis of one call: per tensor argument the dimension that it cuts (None: whole), and how pieces combine."""

    args: tuple[fx.Node, ...]
    dims: tuple[int | None, ...]
    combine: Combine


def call_axis(node: fx.Node, axis: int, ops: Mapping[str, Op]) -> CallAxis:
    """Which dimensions of its arguments the shard axis `axis` of the operator that the node is cuts.

    The `ShardSpec` of an iteration's operator speaks of the operators that made its inputs; a graph has views between
    the two. So the axis is looked up again among those of the call itself (`capturing.shard_rules`): the one whose
    pieces make the output in the same way.

    Raises:
        JobError: if it has no such axis.
    """
    op = ops.get(op_name(node))
    rule = _rule(node)
    if op is None or op.shards is None or rule is None:
        raise JobError(f"{op_name(node)!r} cannot be cut: it has no shard axes")
    if not 0 <= axis < len(op.shards.combine):
        raise JobError(f"{op_name(node)!r}: shard axis is {axis}, must be 0 to {len(op.shards.combine) - 1}")
    combine, size = op.shards.combine[axis], op.shards.sizes[axis]
    alike = [number for number, other in enumerate(rule.combine) if other == combine]
    if len(alike) > 1:
        alike = [number for number in alike if rule.sizes[number] == size]
    if len(alike) != 1:
        raise JobError(f"{op_name(node)!r} cannot be cut along axis {axis}: the call has no one axis like it")
    args = tensor_args(node)
    return CallAxis(tuple(args), tuple(_dims(args, rule, alike[0])), combine)


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node reads, in the order of its arguments, repeated ones too."""
    nodes: list[fx.Node] = []

    def note(arg: fx.Node) -> fx.Node:
        if isinstance(arg.meta.get("val"), torch.Tensor):
            nodes.append(arg)
        return arg

    fx.map_arg((node.args, node.kwargs), note)
    return nodes


def _rule(node: fx.Node) -> ShardRule | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    arguments: dict[str, Any] = {}
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(args):
            arguments[argument.name] = args[place]
        elif argument.name in kwargs:
            arguments[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    value = node.meta["val"]
    outputs = [value] if isinstance(value, torch.Tensor) else [one for one in value if isinstance(one, torch.Tensor)]
    return shard_rule(node.target, arguments, outputs)


def _dims(args: list[fx.Node], rule: ShardRule, axis: int) -> list[int | None]:
    """The rule's inputs come in the order of the arguments; what it does not name stays whole."""
    left = list(rule.inputs)
    dims: list[int | None] = []
    for arg in args:
        place = next((number for number, (tensor, _) in enumerate(left) if tensor is arg.meta["val"]), None)
        axes = () if place is None else left.pop(place)[1]
        dims.append(axes.index(axis) if axis in axes else None)
    return dims


_LINEAR = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
"""Operators whose pieces along a contracted axis may be summed: they add nothing of their own."""


@dataclass(slots=True)
class Pieces:
    """The pieces made so far: by the node that makes the whole tensor, its pieces and their cut (None: summands)."""

    cut: dict[fx.Node, GraphCut | None] = field(default_factory=dict)
    made: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def split(graph: fx.Graph, node: fx.Node, step: Split, ops: Mapping[str, Op], groups: Groups) -> None:
    """Applies the step to the collective `node`, or to a computation alone; `ops` are the operators by name.

    Raises:
        JobError: if an operator cannot be cut along its axis, or the chain does not hang together.
    """
    if not is_collective(node):
        _split_computation(graph, node, step, ops)
        return
    what = collective_of(node)
    num_ranks = len(groups.ranks(what.group))
    taken, given = _cuts_of_collective(node, step, ops.get(step.comm), num_ranks)
    editor = Editor(graph)
    chains = Chains(editor, ops)
    pieces = Pieces()
    chains.cut_before(step.before, {what.source: taken}, pieces)
    parts = [
        editor.collective(
            what, part_of(editor, what.source, taken, number, pieces), num_ranks, name=f"{step.comm}#{number}"
        )
        for number in range(step.num_chunks)
    ]
    waited = ended(node)
    pieces.cut[waited], pieces.made[waited] = given, parts
    chains.cut_after(step.after, pieces)
    retire(editor, [*chains.last_first(step.after), node, *chains.last_first(step.before)], pieces)


def _split_computation(graph: fx.Graph, node: fx.Node, step: Split, ops: Mapping[str, Op]) -> None:
    if step.before or step.after:
        raise JobError(f"{step.comm!r} is no collective: a computation is cut without chains")
    axis = call_axis(node, step.axis, ops)
    lengths = {value_of(arg).shape[dim] for arg, dim in zip(axis.args, axis.dims, strict=True) if dim is not None}
    if len(lengths) != 1:
        raise JobError(f"{step.comm!r} cannot be cut along axis {step.axis}: its inputs have lengths {sorted(lengths)}")
    editor, pieces = Editor(graph), Pieces()
    Chains(editor, ops).cut_alone(node, axis, cuts.equal_parts(0, lengths.pop(), step.num_chunks), pieces)
    retire(editor, [node], pieces)


def _cuts_of_collective(node: fx.Node, step: Split, op: Op | None, num_ranks: int) -> tuple[GraphCut, GraphCut]:
    """How the tensor that a collective takes is cut, and the one that it gives."""
    what = collective_of(node)
    kind, dim = what.kind, step.axis
    if op is not None and op.shards is not None:
        if step.axis >= len(op.shards.combine):
            why = ": its parts are unequal on this rank" if what.uneven else ""
            raise JobError(f"{step.comm!r} has no axis {step.axis} to be cut along{why}")
        combine = op.shards.combine[step.axis]
        dim = combine.dim if isinstance(combine, Gather) else -1
    taken, given = value_of(what.source).shape, value_of(node).shape
    if not 0 <= dim < len(taken):
        raise JobError(f"{step.comm!r} has no dimension {dim} to be cut along")
    if dim == 0 and what.uneven:
        raise JobError(
            f"{step.comm!r} is an all-to-all of unequal parts: its rows cannot be cut, for pieces must be alike on all "
            "ranks; its other dimensions can"
        )
    per_rank = dim == 0 and kind is not CollectiveKind.ALL_REDUCE
    if not per_rank:
        return (
            cuts.equal_parts(dim, taken[dim], step.num_chunks),
            cuts.equal_parts(dim, given[dim], step.num_chunks),
        )
    length = min(taken[0], given[0]) if kind is not CollectiveKind.ALL_TO_ALL else taken[0] // num_ranks
    part = cuts.equal_parts(0, length, step.num_chunks)
    whole = cuts.repeated(part, num_ranks)
    match kind:
        case CollectiveKind.ALL_GATHER:
            return part, whole
        case CollectiveKind.REDUCE_SCATTER:
            return whole, part
        case _:
            return whole, whole


def _origin(arg: fx.Node, among: Iterable[fx.Node]) -> list[fx.Node] | None:
    """The views from one of `among` (not included) to `arg`, first view first; None if it comes from elsewhere."""
    members = set(among)
    path: list[fx.Node] = []
    while arg not in members:
        if not cuts.is_followed(arg):
            return None
        path.append(arg)
        arg = arg.all_input_nodes[0]
    return [arg, *reversed(path)]


def part_of(editor: Editor, whole: fx.Node, cut: GraphCut, number: int, pieces: Pieces) -> fx.Node:
    """Piece `number` of a tensor: as the chain made it, or a slice of the whole."""
    path = _origin(whole, pieces.made)
    if path is None:
        return cuts.piece_of(editor, whole, cut, number)
    maker, *views = path
    piece_nodes = pieces.cut[maker]
    if piece_nodes is None:
        raise JobError(f"{op_name(maker)!r} makes summands, which cannot be worked on one by one")
    node = pieces.made[maker][number]
    for view in views:
        piece_nodes = cuts.after(view, piece_nodes)
        node = cuts.of_piece(editor, view, node, piece_nodes, number)
    if piece_nodes != cut:
        raise JobError(f"{op_name(maker)!r} is cut otherwise than what follows needs")
    return node


class Chains:
    """Cuts the computations around a collective."""

    def __init__(self, editor: Editor, ops: Mapping[str, Op]) -> None:
        self._editor = editor
        self._ops = ops
        self._place = {node: number for number, node in enumerate(editor.graph.nodes)}
        self._nodes: dict[str, fx.Node] = {op_name(node): node for node in editor.graph.nodes if OP_NAME in node.meta}

    def node_of(self, name: str) -> fx.Node:
        """The node of an operator.

        Raises:
            JobError: if the graph has none.
        """
        if name not in self._nodes:
            raise JobError(f"the plan cuts {name!r}, no operator of this graph")
        return self._nodes[name]

    def last_first(self, chain: Sequence[ChainLink]) -> list[fx.Node]:
        """The nodes of a chain, each before those that it reads."""
        return [node for node, _ in reversed(self.in_order(chain))]

    def in_order(self, chain: Sequence[ChainLink]) -> list[tuple[fx.Node, int]]:
        """The nodes of a chain with their axes, each behind those that it reads."""
        return sorted(((self.node_of(link.op), link.axis) for link in chain), key=lambda link: self._place[link[0]])

    def cut_before(self, chain: Sequence[ChainLink], wanted: dict[fx.Node, GraphCut], pieces: Pieces) -> None:
        """Cuts what leads to a tensor; `wanted` is how each tensor has to come out."""
        producers: list[tuple[fx.Node, CallAxis, tuple[int, ...]]] = []
        for node, number in reversed(self.in_order(chain)):
            axis = call_axis(node, number, self._ops)
            cut = self._wanted_of(node, wanted)
            if axis.combine != Gather(cut.dim):
                raise JobError(
                    f"{op_name(node)!r} cannot be cut along axis {number}: what follows needs dimension {cut.dim}"
                )
            wanted.update(
                (arg, GraphCut(dim, cut.owner))
                for arg, dim in zip(axis.args, axis.dims, strict=True)
                if dim is not None
            )
            producers.append((node, axis, cut.owner))
        for node, axis, owner in reversed(producers):
            self._cut(node, axis, owner, pieces)

    def cut_after(self, chain: Sequence[ChainLink], pieces: Pieces) -> None:
        """Cuts what follows from the pieces made so far."""
        for node, number in self.in_order(chain):
            axis = call_axis(node, number, self._ops)
            self._cut(node, axis, self.owner_from(node, axis, pieces), pieces)

    def cut_alone(self, node: fx.Node, axis: CallAxis, cut: GraphCut, pieces: Pieces) -> None:
        """Cuts one computation between whole tensors."""
        self._cut(node, axis, cut.owner, pieces)

    def _wanted_of(self, node: fx.Node, wanted: Mapping[fx.Node, GraphCut]) -> GraphCut:
        """The cut in which a member has to come out, followed back through views."""
        for tensor, cut in wanted.items():
            path = _origin(tensor, [node])
            if path is not None:
                for view in reversed(path[1:]):
                    cut = cuts.before(view, cut)  # noqa: PLW2901
                return cut
        raise JobError(f"{op_name(node)!r} does not lead to the collective that it is cut with")

    def owner_from(self, node: fx.Node, axis: CallAxis, pieces: Pieces) -> tuple[int, ...]:
        """The pieces that the indices of an operator's axis belong to, from those of what it reads.

        Raises:
            JobError: if it reads none.
        """
        for arg, dim in zip(axis.args, axis.dims, strict=True):
            path = _origin(arg, pieces.made)
            cut = pieces.cut[path[0]] if path else None
            if path is None or cut is None:
                continue
            for view in path[1:]:
                cut = cuts.after(view, cut)
            if cut.dim == dim:
                return cut.owner
        raise JobError(f"{op_name(node)!r} does not work on the pieces of what it follows")

    def _cut(self, node: fx.Node, axis: CallAxis, owner: tuple[int, ...], pieces: Pieces) -> None:
        """Makes the pieces of one member."""
        if isinstance(axis.combine, Reduce) and node.target not in _LINEAR:
            raise JobError(f"{op_name(node)!r} is {node.target}: its pieces along what it sums over cannot be summed")
        cut_nodes = []
        for number in range(max(owner) + 1):
            parts = [
                arg if dim is None else part_of(self._editor, arg, GraphCut(dim, owner), number, pieces)
                for arg, dim in zip(axis.args, axis.dims, strict=True)
            ]
            cut_nodes.append(self.like(node, parts, f"{op_name(node)}#{number}"))
        pieces.made[node] = cut_nodes
        pieces.cut[node] = GraphCut(axis.combine.dim, owner) if isinstance(axis.combine, Gather) else None

    def like(self, node: fx.Node, tensors: Sequence[fx.Node], name: str) -> fx.Node:
        """The operator again, on other tensors in the places of its own."""
        left = iter(tensors)

        def other(arg: fx.Node) -> fx.Node:
            return next(left) if isinstance(arg.meta.get("val"), torch.Tensor) else arg

        args, kwargs = fx.map_arg((node.args, node.kwargs), other)
        return self._editor.call_like(node, args, kwargs, name=name)


def retire(editor: Editor, nodes: Iterable[fx.Node], pieces: Pieces) -> None:
    """Takes whole operators, last first, out of the graph; what else needs their results reads the pieces joined."""
    for node in nodes:
        whole = ended(node) if is_collective(node) else node
        drop_unused_views(whole)
        for result in results_of(whole):
            join = _join(editor, result, f"{op_name(node)}#join", whole, pieces)
            result.replace_all_uses_with(join)
            if result is not whole:
                editor.graph.erase_node(result)
        for old in dict.fromkeys((whole, node)):
            editor.graph.erase_node(old)


def results_of(whole: fx.Node) -> list[fx.Node]:
    """The tensors of an operator that are read: itself, or the elements of its tuple."""
    if isinstance(whole.meta["val"], torch.Tensor):
        return [whole] if whole.users else []
    return list(whole.users)


def _join(editor: Editor, result: fx.Node, name: str, whole: fx.Node, pieces: Pieces) -> fx.Node:
    joined, cut = pieces.made[whole], pieces.cut[whole]
    if result is not whole:
        joined = [editor.call(getitem, piece, result.args[1]) for piece in joined]
        name = name if result.args[1] == 0 else f"{name}.{result.args[1]}"
    if cut is None:
        return editor.summed(joined, name=name)
    if value_of(result).shape[cut.dim] != len(cut.owner):
        raise JobError(f"{op_name(whole)!r} cannot be cut: its result {result.name!r} does not lie along the cut")
    return cuts.joined(editor, joined, cut, name=name)


def drop_unused_views(node: fx.Node) -> None:
    """Erases the views of a tensor that nobody reads any more."""
    for user in list(node.users):
        if cuts.is_followed(user):
            drop_unused_views(user)
            if not user.users:
                user.graph.erase_node(user)
