"""Run a collective over the axes of a mesh laid over its group, one after the other (Centauri, tree level 2).

The flat collective's tensor has one part per rank; seen over the mesh, one part per index of each axis. An all-gather
puts the axis that it gathers first in front, so that after all axes the parts lie in the reverse of `order` and are
put back. A reduce-scatter takes the parts in `order` and hands them out axis by axis. An all-to-all exchanges one axis
at a time. An all-reduce sums axis by axis. Sums over axes are sums in another order: results of reductions may differ
from the flat collective's in the last bits; gathers and exchanges are equal bit for bit.
"""

from collections.abc import Mapping
from math import prod

from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.nodes import Editor, FxCollective, collective_of, op_name, replace, value_of
from lagom_overlap.engines.fx.process_groups import Groups, mesh_subgroup
from lagom_overlap.engines.fx.staged import StagedMesh, staged
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Op
from lagom_overlap.workload.rewrite.steps import TWICE, PartitionGroups


def partition_groups(
    graph: fx.Graph, node: fx.Node, step: PartitionGroups, ops: Mapping[str, Op], groups: Groups
) -> None:
    """Applies the step to the collective `node`; `ops` are the operators by name.

    Raises:
        JobError: if the mesh does not fill the group, or parts are unequal.
    """
    what = collective_of(node)
    ranks = groups.ranks(what.group)
    if step.num_ranks != len(ranks):
        raise JobError(
            f"{step.comm!r}: mesh {list(step.mesh)} is for {step.num_ranks} ranks, its group has {len(ranks)}"
        )
    if what.uneven:
        raise JobError(f"{step.comm!r} is an all-to-all of unequal parts, which has no mesh form")
    position = groups.position(what.group)
    names = [
        groups.made_of(mesh_subgroup(ranks, position, step.mesh, axis), f"mesh {step.mesh} axis {axis}")
        for axis in range(len(step.mesh))
    ]
    if step.chain or step.order == TWICE:
        outer, inner = step.mesh
        mesh = StagedMesh((outer, inner), divmod(position, inner), (names[0], names[1]))
        staged(Editor(graph), node, step, ops, mesh)
        return
    stages = _Stages(Editor(graph), op_name(node), what, step, names)
    match what.kind:
        case CollectiveKind.ALL_GATHER:
            result = stages.gathered()
        case CollectiveKind.REDUCE_SCATTER:
            result = stages.scattered()
        case CollectiveKind.ALL_REDUCE:
            result = stages.reduced()
        case CollectiveKind.ALL_TO_ALL:
            result = stages.exchanged()
        case _:
            raise JobError(f"{step.comm!r} is a {what.kind}, which has no mesh form")
    replace(node, result)


class _Stages:
    """A collective in stages, one per axis of the mesh."""

    def __init__(
        self, editor: Editor, name: str, what: FxCollective, step: PartitionGroups, group_names: list[str]
    ) -> None:
        self._editor = editor
        self._name = name
        self._what = what
        self._mesh = step.mesh
        self._order = step.order
        self._groups = group_names

    def _stage(self, source: fx.Node, axis: int) -> fx.Node:
        what = FxCollective(self._what.kind, source, self._groups[axis], self._what.reduce_op)
        return self._editor.collective(what, source, self._mesh[axis], name=f"{self._name}/g{axis}")

    def gathered(self) -> fx.Node:
        """[n, ...] -> [W n, ...]."""
        node = self._what.source
        part = list(value_of(node).shape)
        for axis in self._order:
            node = self._stage(node, axis)
        placed = tuple(reversed(self._order))
        parts = self._editor.reshape(node, [*(self._mesh[axis] for axis in placed), *part])
        back = [placed.index(axis) for axis in range(len(placed))]
        parts = self._editor.permute(parts, [*back, *range(len(back), len(back) + len(part))])
        return self._editor.reshape(parts, [prod(self._mesh) * part[0], *part[1:]])

    def scattered(self) -> fx.Node:
        """[W n, ...] -> [n, ...]."""
        whole = list(value_of(self._what.source).shape)
        part = [whole[0] // prod(self._mesh), *whole[1:]]
        num_axes = len(self._mesh)
        node = self._editor.reshape(self._what.source, [*self._mesh, *part])
        node = self._editor.permute(node, [*self._order, *range(num_axes, num_axes + len(part))])
        for place, axis in enumerate(self._order):
            node = self._stage(node, axis)
            node = self._editor.reshape(node, [*(self._mesh[later] for later in self._order[place + 1 :]), *part])
        return node

    def reduced(self) -> fx.Node:
        """The same shape."""
        node = self._what.source
        for axis in self._order:
            node = self._stage(node, axis)
        return node

    def exchanged(self) -> fx.Node:
        """[W n, ...] -> [W n, ...], parts by destination -> parts by source."""
        whole = list(value_of(self._what.source).shape)
        parts = [*self._mesh, whole[0] // prod(self._mesh), *whole[1:]]
        node = self._editor.reshape(self._what.source, parts)
        for axis in self._order:
            in_front = [axis, *(dim for dim in range(len(parts)) if dim != axis)]
            node = self._stage(self._editor.permute(node, in_front), axis)
            node = self._editor.permute(node, [in_front.index(dim) for dim in range(len(parts))])
        return self._editor.reshape(node, whole)
