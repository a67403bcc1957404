"""Let operators behind an all-reduce work on this rank's part, and gather what leaves (Centauri, section 3.1.1).

Element-wise operators, and those that keep rows apart, give bit for bit the rows that they give of the whole; only the
order of the reduction's sum may change, as all-reduce and reduce-scatter may sum in different orders.

That holds where ranks hold the same of everything else that those operators read: the residual, weights and states of
the optimizer. A graph of one rank does not say so. Its inputs that must be equal are marked, and `check_replicated`
compares them before anything runs; what other ranks have drawn or scattered is refused here.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx import cuts
from lagom_overlap.engines.fx.cuts import GraphCut
from lagom_overlap.engines.fx.nodes import Editor, FxCollective, collective_of, ended, is_collective, op_name, value_of
from lagom_overlap.engines.fx.process_groups import Groups
from lagom_overlap.engines.fx.split import Chains, Pieces, call_axis, drop_unused_views, part_of, results_of
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Op
from lagom_overlap.workload.rewrite.slide import gather_name, part_name, scatter_name
from lagom_overlap.workload.rewrite.steps import Slide
from lagom_overlap.workload.sharding import Gather

_REPLICATED: Final = "lagom_replicated"
"""Key of an input's meta: sets of ranks, this one among them, that must hold the same of it."""
_ALIKE: Final = (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.BROADCAST)
"""Collectives that leave the same on every rank of their group."""


def slide(graph: fx.Graph, step: Slide, ops: Mapping[str, Op], groups: Groups) -> None:
    """Applies the step; every rank works on the part of its place in the group.

    Raises:
        JobError: if a tensor does not lie in equal parts along its first dimension, or an operator cannot be cut so.
    """
    editor, pieces = Editor(graph), Pieces()
    chains = Chains(editor, ops)
    comms = [chains.node_of(name) for name in step.comms]
    group = collective_of(comms[0]).group
    num_ranks, mine = len(groups.ranks(group)), groups.position(group)
    for node, name in zip(comms, step.comms, strict=True):
        what = collective_of(node)
        if what.kind is not CollectiveKind.ALL_REDUCE:
            raise JobError(f"{name!r} is a {what.kind}: only an all_reduce slides")
        shape = value_of(what.source).shape
        if not shape or shape[0] % num_ranks:
            raise JobError(f"{name!r} cannot slide: its first dimension does not lie in {num_ranks} equal parts")
        scatter = FxCollective(CollectiveKind.REDUCE_SCATTER, what.source, what.group, what.reduce_op)
        part = editor.collective(scatter, what.source, num_ranks, name=scatter_name(name))
        pieces.made[ended(node)] = [part] * num_ranks  # only this rank's place is ever read
        pieces.cut[ended(node)] = cuts.equal_parts(0, shape[0], num_ranks)
    members = chains.in_order(step.ops)
    for node, number in members:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise JobError(
                f"{op_name(node)!r} draws random numbers, of a part others than of the whole: it cannot slide"
            )
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise JobError(f"{op_name(node)!r} makes several tensors: it cannot slide")
        axis = call_axis(node, number, ops)
        if not isinstance(axis.combine, Gather):
            raise JobError(f"{op_name(node)!r}: its pieces along axis {number} are summed, so it cannot work on a part")
        owner = chains.owner_from(node, axis, pieces)
        _mark_replicated([arg for arg in axis.args if arg not in pieces.made], pieces, group, groups.ranks(group))
        parts = [
            arg if dim is None else part_of(editor, arg, GraphCut(dim, owner), mine, pieces)
            for arg, dim in zip(axis.args, axis.dims, strict=True)
        ]
        pieces.made[node] = [chains.like(node, parts, part_name(op_name(node)))] * num_ranks
        pieces.cut[node] = GraphCut(axis.combine.dim, owner)
    for node in [*(node for node, _ in reversed(members)), *reversed(comms)]:
        for result in _read_whole(node):
            cut = pieces.cut[result]
            if cut is None or cut.dim:
                raise JobError(f"{op_name(node)!r}: its parts do not lie along the first dimension and are read whole")
            part = pieces.made[result][0]
            gather = FxCollective(CollectiveKind.ALL_GATHER, part, group)
            gathered = editor.collective(gather, part, num_ranks, name=gather_name(step, op_name(node)))
            result.replace_all_uses_with(gathered)
        for old in dict.fromkeys((ended(node) if is_collective(node) else node, node)):
            graph.erase_node(old)


def _mark_replicated(nodes: Iterable[fx.Node], pieces: Pieces, group: str, ranks: tuple[int, ...]) -> None:
    """Marks the inputs of the graph that nodes are made of.

    Raises:
        JobError: if ranks of the group cannot hold the same of one: it was scattered, exchanged or drawn.
    """
    left, seen = list(nodes), set[fx.Node]()
    while left:
        node = left.pop()
        if node in seen or node in pieces.made:
            continue
        seen.add(node)
        if node.op in ("placeholder", "get_attr"):
            node.meta[_REPLICATED] = {*node.meta.get(_REPLICATED, ()), ranks}
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise JobError(f"{op_name(node)!r} draws random numbers, which differ between ranks: nothing slides by it")
        if is_collective(node):
            what = collective_of(node)
            if what.kind in _ALIKE and what.group == group:
                continue
            raise JobError(f"{op_name(node)!r} leaves other values on every rank: nothing slides by it")
        left += node.all_input_nodes


def replicated_inputs(graph: fx.Graph) -> dict[fx.Node, tuple[int, list[tuple[int, ...]]]]:
    """The inputs that must be equal: their numbers, and the sets of ranks, this one among them, that must agree."""
    nodes = (node for node in graph.nodes if node.op in ("placeholder", "get_attr"))
    return {
        node: (number, sorted(node.meta[_REPLICATED])) for number, node in enumerate(nodes) if _REPLICATED in node.meta
    }


def check_replicated(module: fx.GraphModule, inputs: Sequence[Any], gather: Callable[[int], tuple[int, ...]]) -> None:
    """Refuses a graph with slid gathers whose ranks hold different inputs where they must be equal.

    `gather` brings every rank's number, by rank. Every rank calls it with its own inputs, and only after
    `check_agreement`: that says whether all compare the same ones.

    Raises:
        JobError: on all ranks if the members of one group differ; those name the first input that does.
    """
    compared = replicated_inputs(module.graph)
    if not compared:
        return
    given = iter(inputs)
    reason = ""
    for node in module.graph.nodes:
        value = next(given) if node.op == "placeholder" else None
        if node not in compared:
            continue
        number, groups = compared[node]
        try:
            digest = _digest(getattr(module, str(node.target)) if node.op == "get_attr" else value)
        except (RuntimeError, TypeError) as error:  # torch's and numpy's, of a type without plain bytes
            digest, reason = 0, reason or f"input {number} ({node.name}) cannot be compared: {error}"
        digests = gather(digest)
        for ranks in groups:
            other = next((rank for rank in ranks if digests[rank] != digests[ranks[0]]), None)
            if other is not None:
                reason = reason or (
                    f"the plan lets ranks work on parts of what input {number} ({node.name}) is part of, but ranks "
                    f"{ranks[0]} and {other} hold different ones; plan without the option evolve"
                )
    alike = gather(int(not reason))  # a rank knows its own groups only
    if not all(alike):
        raise JobError(
            reason
            or f"rank {alike.index(0)} works on parts of inputs of which its group's ranks hold different ones; "
            "plan without the option evolve"
        )


def _digest(value: Any) -> int:
    text = repr(value).encode()
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous().cpu()
        text = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "big")


def _read_whole(node: fx.Node) -> list[fx.Node]:
    """The operator's result, if something still reads it; views that nobody reads any more are dropped."""
    whole = ended(node) if is_collective(node) else node
    drop_unused_views(whole)
    return results_of(whole)
