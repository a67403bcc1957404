"""Hierarchical all-gathers and reduce-scatters that bring, or take in, their tensor in parts (Centauri, Algorithm 1).

A mesh [N1, N2] of W ranks, this rank at (i1, i2); the tensor has a block of rows per rank. Steps of an all-gather and
the blocks that each brings:

    order (1, 0)        inner: (i1, *)               outer: all others
    order (0, 1)        outer: (*, i2)               inner: all others
    order (1, 0, 1)     inner: (i1, *)   outer: (j1, i2), j1 != i1   inner again: (j1, j2), j1 != i1, j2 != i2

A reduce-scatter takes blocks in by the same steps backwards: it sends on what others need first, with zeros in its own
place, and adds its own part between the steps; so its sums come in another order than the flat collective's. Only sums
can be put together so: averages are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.cuts import GraphCut, joined, piece_of
from lagom_overlap.engines.fx.nodes import Editor, FxCollective, collective_of, ended, value_of
from lagom_overlap.engines.fx.split import Chains, Pieces, part_of, retire
from lagom_overlap.errors import JobError
from lagom_overlap.workload import Op
from lagom_overlap.workload.rewrite.steps import TWICE, PartitionGroups


@dataclass(frozen=True, slots=True)
class StagedMesh:
    """Where this rank is on a mesh of two axes, and the names of its sub-groups."""

    sizes: tuple[int, int]
    place: tuple[int, int]
    groups: tuple[str, str]

    def owner(self, order: tuple[int, ...]) -> tuple[int, ...]:
        """The step of an all-gather in this order that brings each block."""
        (outer, inner), (i1, i2) = self.sizes, self.place
        blocks = [(j1, j2) for j1 in range(outer) for j2 in range(inner)]
        if order == TWICE:
            return tuple(0 if j1 == i1 else 1 if j2 == i2 else 2 for j1, j2 in blocks)
        first = order[0]
        return tuple(int(block[1 - first] != self.place[1 - first]) for block in blocks)


def staged(editor: Editor, node: fx.Node, step: PartitionGroups, ops: Mapping[str, Op], mesh: StagedMesh) -> None:
    """Applies a step with a chain, or in three steps.

    Raises:
        JobError: if the collective has no parts, averages, or its chain does not hang together.
    """
    what = collective_of(node)
    chains = Chains(editor, ops)
    pieces = Pieces()
    if what.kind is CollectiveKind.ALL_GATHER:
        waited = ended(node)
        parts = _gathered(editor, node, step, mesh)
        pieces.made[waited], pieces.cut[waited] = parts, _cut(value_of(node), mesh, step.order)
        chains.cut_after(step.chain, pieces)
        retire(editor, [*chains.last_first(step.chain), node], pieces)
        return
    if what.kind is not CollectiveKind.REDUCE_SCATTER:
        raise JobError(f"{step.comm!r} is a {what.kind}, which neither brings nor takes in its tensor in parts")
    if what.reduce_op != "sum":
        raise JobError(f"{step.comm!r} reduces by {what.reduce_op!r}: only sums can be put together from parts")
    order = tuple(reversed(step.order))
    cut = _cut(value_of(what.source), mesh, order)
    backwards = GraphCut(cut.dim, tuple(cut.num_pieces - 1 - piece for piece in cut.owner))
    chains.cut_before(step.chain, {what.source: backwards}, pieces)
    parts = [part_of(editor, what.source, backwards, number, pieces) for number in range(backwards.num_pieces)]
    result = _scattered(editor, node, step, mesh, parts)
    ended(node).replace_all_uses_with(result)
    waited = ended(node)
    pieces.made[waited], pieces.cut[waited] = [result], None
    retire(editor, [node, *chains.last_first(step.chain)], pieces)


def _cut(whole: torch.Tensor, mesh: StagedMesh, order: tuple[int, ...]) -> GraphCut:
    rows = whole.shape[0] // (mesh.sizes[0] * mesh.sizes[1])
    return GraphCut(0, tuple(step for step in mesh.owner(order) for _ in range(rows)))


def _run(editor: Editor, node: fx.Node, source: fx.Node, at: tuple[StagedMesh, int], name: str) -> fx.Node:
    what = collective_of(node)
    mesh, axis = at
    stage = FxCollective(what.kind, source, mesh.groups[axis], what.reduce_op)
    return editor.collective(stage, source, mesh.sizes[axis], name=name)


def _all_but(place: int, size: int, rows: int) -> GraphCut:
    """Blocks of `rows` rows: piece 1 is every block but one."""
    return GraphCut(0, tuple(int(index != place) for index in range(size) for _ in range(rows)))


def _swapped(editor: Editor, source: fx.Node, first: int, second: int) -> fx.Node:
    """Blocks (a, b), a first, become blocks (b, a)."""
    shape = list(value_of(source).shape)
    blocks = editor.reshape(source, [first, second, shape[0] // (first * second), *shape[1:]])
    order = [1, 0, *range(2, len(shape) + 2)]
    return editor.reshape(editor.permute(blocks, order), shape)


def _gathered(editor: Editor, node: fx.Node, step: PartitionGroups, mesh: StagedMesh) -> list[fx.Node]:
    """What each step brings: its blocks in order."""
    source = collective_of(node).source
    rows = value_of(source).shape[0]
    (outer, inner), (i1, i2) = mesh.sizes, mesh.place
    if step.order == TWICE:
        near = _run(editor, node, source, (mesh, 1), f"{step.comm}/g1")
        across = _run(editor, node, source, (mesh, 0), f"{step.comm}/g0")
        mine = piece_of(editor, across, _all_but(i1, outer, rows), 1)
        far = _run(editor, node, mine, (mesh, 1), f"{step.comm}/g1r")
        others = piece_of(editor, far, _all_but(i2, inner, rows * (outer - 1)), 1)
        return [near, mine, _swapped(editor, others, inner - 1, outer - 1)]
    first, second = step.order
    near = _run(editor, node, source, (mesh, first), f"{step.comm}/g{first}")
    whole = _run(editor, node, near, (mesh, second), f"{step.comm}/g{second}")
    others = piece_of(editor, whole, _all_but(mesh.place[second], mesh.sizes[second], rows * mesh.sizes[first]), 1)
    return [near, others if second == 0 else _swapped(editor, others, inner - 1, outer)]


def _with_zeros(editor: Editor, others: fx.Node, place: int, size: int) -> fx.Node:
    """All blocks but one become all, zeros in the place of that one."""
    shape = list(value_of(others).shape)
    rows = shape[0] // (size - 1)
    cut = _all_but(place, size, rows)
    zeros = editor.call(torch.ops.aten.mul.Tensor, editor.narrow(others, 0, 0, rows), 0)
    return joined(editor, [zeros, others], cut, name=None)


def _scattered(editor: Editor, node: fx.Node, step: PartitionGroups, mesh: StagedMesh, parts: list[fx.Node]) -> fx.Node:
    """This rank's block of the sum, from the parts as the steps take them in."""
    (outer, inner), (i1, i2) = mesh.sizes, mesh.place
    if step.order == TWICE:
        far, across, near = parts
        sent = _with_zeros(editor, _swapped(editor, far, outer - 1, inner - 1), i2, inner)
        relayed = _run(editor, node, sent, (mesh, 1), f"{step.comm}/g1r")
        crossing = _with_zeros(editor, editor.summed((relayed, across)), i1, outer)
        from_others = _run(editor, node, crossing, (mesh, 0), f"{step.comm}/g0")
        return editor.summed((_run(editor, node, near, (mesh, 1), f"{step.comm}/g1"), from_others))
    first, second = step.order
    far, near = parts
    sent = far if first == 0 else _swapped(editor, far, outer, inner - 1)
    relayed = _run(
        editor,
        node,
        _with_zeros(editor, sent, mesh.place[first], mesh.sizes[first]),
        (mesh, first),
        f"{step.comm}/g{first}",
    )
    return _run(editor, node, editor.summed((relayed, near)), (mesh, second), f"{step.comm}/g{second}")
