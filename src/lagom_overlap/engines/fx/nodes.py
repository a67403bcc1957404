"""Collectives of an FX graph, and new nodes that know their shapes and the operator they stand for.

A functional collective is two nodes: the call, which starts it, and `wait_tensor`, which ends it. An operator of an
iteration is the call; its wait is auxiliary, as are views: nodes that carry no operator's name.

Names of operators hold characters that FX does not allow in names of nodes (`mm#0`), so they are kept next to the node,
in `meta[OP_NAME]`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.process_groups import process_group
from lagom_overlap.errors import JobError

OP_NAME: Final = "lagom_op"
"""Key of a node's meta: the name of the operator that it is."""

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@torch.library.custom_op("lagom_overlap::reduce", mutates_args=())
def reduce(source: torch.Tensor, reduce_op: str, root: int, group: str) -> torch.Tensor:
    """The sum over ranks, on the group's rank `root`: PyTorch's functional collectives have no reduce to one rank.

    It is complete when it returns; a rank other than the root gets memory that holds nothing of meaning.
    """
    result = source.clone()
    dist.reduce(result, group_dst=root, op=_OPS[reduce_op], group=process_group(group))
    return result


@reduce.register_fake
def _(source: torch.Tensor, reduce_op: str, root: int, group: str) -> torch.Tensor:
    return torch.empty_like(source)


C10D = torch.ops._c10d_functional
_OURS = torch.ops.lagom_overlap

_KINDS: Final[dict[object, CollectiveKind]] = {
    C10D.all_gather_into_tensor.default: CollectiveKind.ALL_GATHER,
    C10D.reduce_scatter_tensor.default: CollectiveKind.REDUCE_SCATTER,
    C10D.all_reduce.default: CollectiveKind.ALL_REDUCE,
    C10D.all_to_all_single.default: CollectiveKind.ALL_TO_ALL,
    C10D.broadcast.default: CollectiveKind.BROADCAST,
    _OURS.reduce.default: CollectiveKind.REDUCE,
}
_OTHER_COLLECTIVES: Final = (
    C10D.all_gather_into_tensor_coalesced.default,
    C10D.reduce_scatter_tensor_coalesced.default,
    C10D.all_reduce_coalesced.default,
)
"""Collectives of several tensors at once: `program.one_tensor_each` replaces them before anything is rewritten."""


@dataclass(frozen=True, slots=True)
class FxCollective:
    """A functional collective of one tensor: what it does, on what, over which group.

    `reduce_op` is None where nothing is reduced. `uneven` are an all-to-all's rows by rank, those that come and those
    that go, where they are not all equal; other ranks have others.
    """

    kind: CollectiveKind
    source: fx.Node
    group: str
    reduce_op: str | None = None
    uneven: tuple[tuple[int, ...], tuple[int, ...]] | None = None


def is_collective(node: fx.Node) -> bool:
    """Whether the node starts a collective."""
    return node.op == "call_function" and (node.target in _KINDS or node.target in _OTHER_COLLECTIVES)


def is_wait(node: fx.Node) -> bool:
    """Whether the node ends a collective."""
    return node.op == "call_function" and node.target is C10D.wait_tensor.default


def collective_of(node: fx.Node) -> FxCollective:
    """What a collective does.

    Raises:
        JobError: if the node is none, or one of several tensors.
    """
    kind = _KINDS.get(node.target) if node.op == "call_function" else None
    if kind is None:
        raise JobError(f"{op_name(node)!r} is {node.target}, no collective that can be rewritten")
    source = node.args[0]
    assert isinstance(source, fx.Node), "functional collectives take their tensor first"
    match kind:
        case CollectiveKind.ALL_GATHER:
            return FxCollective(kind, source, str(node.args[2]))
        case CollectiveKind.REDUCE_SCATTER:
            return FxCollective(kind, source, str(node.args[3]), str(node.args[1]))
        case CollectiveKind.ALL_REDUCE:
            return FxCollective(kind, source, str(node.args[2]), str(node.args[1]))
        case CollectiveKind.ALL_TO_ALL:
            rows_in, rows_out = (tuple(map(int, sizes)) for sizes in node.args[1:3])  # type: ignore[arg-type]  # lists of sizes
            uneven = (rows_in, rows_out) if len({*rows_in, *rows_out}) > 1 else None
            return FxCollective(kind, source, str(node.args[3]), uneven=uneven)
        case _:
            raise JobError(f"{op_name(node)!r} is a {kind}, which cannot be rewritten")


def op_name(node: fx.Node) -> str:
    """The name of the operator that the node stands for; its own name where none was given."""
    return str(node.meta.get(OP_NAME, node.name))


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node makes.

    Raises:
        JobError: if the graph was traced without one.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise JobError(f"node {node.name!r} of the graph holds no tensor (meta['val']); trace it with fake tensors")
    return value


def lint(graph: fx.Graph) -> None:
    """Checks the graph's own rules: no use before its definition, no node without an owner."""
    check: Callable[[], None] = graph.lint  # untyped up to PyTorch 2.12
    check()


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode of the graph's fake tensors; a new one where it has none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


class Editor:
    """Adds nodes to a graph, each with its fake value; the order of nodes is left to `reorder`."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._mode = fake_mode_of(graph)

    def call(self, target: Callable[..., Any], *args: Any, name: str | None = None) -> fx.Node:  # FX arguments
        """A new node at the end of the graph; `name` is the operator that it stands for, None if auxiliary."""
        node = self.graph.create_node("call_function", target, args)
        if name is not None:
            node.meta[OP_NAME] = name
        values = fx.map_arg(args, lambda used: used.meta["val"])
        with self._mode:
            node.meta["val"] = target(*values)
        return node

    def call_like(self, node: fx.Node, args: Any, kwargs: Any, *, name: str | None) -> fx.Node:  # FX arguments
        """A new node that does what `node` does, on other arguments."""
        node_made = self.graph.create_node("call_function", node.target, args, kwargs)
        if name is not None:
            node_made.meta[OP_NAME] = name
        if "stack_trace" in node.meta:
            node_made.meta["stack_trace"] = node.meta["stack_trace"]
        values, named = fx.map_arg((args, kwargs), lambda used: used.meta["val"])
        with self._mode:
            node_made.meta["val"] = node.target(*values, **named)  # type: ignore[operator]  # an operator
        return node_made

    def collective(self, what: FxCollective, source: fx.Node, group_size: int, *, name: str | None = None) -> fx.Node:
        """The wait of a new collective over `group_size` ranks that does what `what` does on `source`."""
        source = self.contiguous(source)
        match what.kind:
            case CollectiveKind.ALL_GATHER:
                args: tuple[Any, ...] = (group_size, what.group)
            case CollectiveKind.REDUCE_SCATTER:
                args = (what.reduce_op, group_size, what.group)
            case CollectiveKind.ALL_REDUCE:
                args = (what.reduce_op, what.group)
            case CollectiveKind.ALL_TO_ALL if what.uneven is not None:
                args = (list(what.uneven[0]), list(what.uneven[1]), what.group)
            case CollectiveKind.ALL_TO_ALL:
                part = value_of(source).shape[0] // group_size
                args = ([part] * group_size, [part] * group_size, what.group)
            case _:
                raise ValueError(f"no functional collective for {what.kind}")
        target = next(target for target, kind in _KINDS.items() if kind is what.kind)
        return self.wait(self.call(target, source, *args, name=name))  # type: ignore[arg-type]  # an operator overload

    def collective_of_all(
        self, what: FxCollective, sources: Sequence[fx.Node], num_ranks: int, *, name: str | None = None
    ) -> tuple[fx.Node, list[fx.Node]]:
        """The wait of one new collective that does what `what` does on all the tensors, and what each becomes.

        Each is laid out as one row per rank, so that what belongs to a rank stays together when rows are put side by
        side.
        """
        traits, exchanges = what.kind.traits, what.kind is CollectiveKind.ALL_TO_ALL
        rows_in = num_ranks if traits.leaves_part or exchanges else 1
        rows_out = num_ranks if traits.takes_part or exchanges else 1
        shapes = [list(value_of(source).shape) for source in sources]
        widths = [prod(shape) // rows_in for shape in shapes]
        rows = [self.reshape(source, [rows_in, width]) for source, width in zip(sources, widths, strict=True)]
        flat = self.reshape(self.concatenated(rows, 1), [rows_in * sum(widths)])
        waited = self.collective(what, flat, num_ranks, name=name)
        done = self.reshape(waited, [rows_out, sum(widths)])
        parts, start = [], 0
        for shape, width in zip(shapes, widths, strict=True):
            part = self.narrow(done, 1, start, width)
            parts.append(self.reshape(part, [shape[0] * rows_out // rows_in, *shape[1:]]))
            start += width
        return waited, parts

    def broadcast(self, source: fx.Node, root: int, group: str, *, name: str) -> fx.Node:
        """The wait of a broadcast from the group's rank `root`."""
        return self.wait(self.call(C10D.broadcast.default, self.contiguous(source), root, group, name=name))

    def reduce(self, source: fx.Node, reduce_op: str, root: int, group: str, *, name: str) -> fx.Node:
        """A reduce to the group's rank `root`; complete when it returns."""
        return self.call(_OURS.reduce.default, self.contiguous(source), reduce_op, root, group, name=name)

    def wait(self, started: fx.Node) -> fx.Node:
        """The end of a collective."""
        return self.call(C10D.wait_tensor.default, started)

    def contiguous(self, source: fx.Node) -> fx.Node:
        """The tensor with its elements in order in memory; the node itself where they are."""
        if value_of(source).is_contiguous():
            return source
        node = self.graph.create_node(
            "call_function", torch.ops.aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
        )
        with self._mode:
            node.meta["val"] = value_of(source).clone(memory_format=torch.contiguous_format)
        return node

    def reshape(self, source: fx.Node, shape: Iterable[int]) -> fx.Node:
        """The tensor in another shape, copied where its memory does not allow a view."""
        wanted = list(shape)
        if list(value_of(source).shape) == wanted:
            return source
        return self.call(torch.ops.aten.view.default, self.contiguous(source), wanted)

    def permute(self, source: fx.Node, dims: Iterable[int]) -> fx.Node:
        """The tensor with its dimensions in another order."""
        wanted = list(dims)
        return source if wanted == sorted(wanted) else self.call(torch.ops.aten.permute.default, source, wanted)

    def narrow(self, source: fx.Node, dim: int, start: int, length: int) -> fx.Node:
        """A part of the tensor along a dimension."""
        return self.call(torch.ops.aten.slice.Tensor, source, dim, start, start + length)

    def concatenated(self, parts: Iterable[fx.Node], dim: int, *, name: str | None = None) -> fx.Node:
        """The tensors one after the other along a dimension."""
        return self.call(torch.ops.aten.cat.default, list(parts), dim, name=name)

    def summed(self, parts: Iterable[fx.Node], *, name: str | None = None) -> fx.Node:
        """The tensors added, the first two first; the last addition has the name."""
        first, *others = parts
        for number, other in enumerate(others, 1):
            first = self.call(torch.ops.aten.add.Tensor, first, other, name=name if number == len(others) else None)
        return first


def ended(started: fx.Node) -> fx.Node:
    """The wait of a collective; the node itself where it is complete when it returns.

    Raises:
        JobError: if the graph uses what is not awaited, or awaits it twice.
    """
    if not any(is_wait(user) for user in started.users):
        if started.target is _OURS.reduce.default:
            return started
        raise JobError(f"collective {op_name(started)!r} is never awaited")
    waits = list(started.users)
    if len(waits) != 1:
        raise JobError(f"collective {op_name(started)!r} is used {len(waits)} times, must be awaited once")
    return waits[0]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Lets everything that uses the wait of a collective use another node; removes the collective and its wait."""
    waited = ended(old)
    waited.replace_all_uses_with(new)
    new.meta.setdefault("val", waited.meta.get("val"))
    graph = old.graph
    graph.erase_node(waited)
    if waited is not old:
        graph.erase_node(old)
