"""Which dimensions of its arguments an operator's shard axis cuts.

The `ShardSpec` of an iteration's operator speaks of the operators that made its inputs; a graph has views between the
two. So the axis is looked up again among those of the call itself (`capturing.shard_rules`): the one whose pieces make
the output in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lagom_overlap.capturing.shard_rules import ShardRule, shard_rule
from lagom_overlap.engines.fx.nodes import op_name
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Combine, Op


@dataclass(frozen=True, slots=True)
class CallAxis:
    """An axis of one call: per tensor argument the dimension that it cuts (None: whole), and how pieces combine."""

    args: tuple[fx.Node, ...]
    dims: tuple[int | None, ...]
    combine: Combine


def call_axis(node: fx.Node, axis: int, ops: Mapping[str, Op]) -> CallAxis:
    """The shard axis `axis` of the operator that the node is.

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
