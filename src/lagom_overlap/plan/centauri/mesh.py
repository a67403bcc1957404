"""Meshes over a group, and which of them a topology allows (Centauri, section 3.1.2; spec, planners 2.2).

A rank's index k in a mesh [N1 .. Nd] is (r // prod(N_k+1 .. N_d)) % N_k; its k-th sub-group holds the ranks that differ
from it in index k only. Pruned are meshes with a sub-group that mixes link classes (some ranks share a node, some do
not), and, unless the links inside a node are known to bear it, meshes that cut a node finer than the node.
"""

from collections.abc import Iterator
from math import prod

MAX_DIMENSIONS = 3


def factorisations(size: int, max_dimensions: int = MAX_DIMENSIONS) -> Iterator[tuple[int, ...]]:
    """The ordered factorisations of `size` in at least two factors of at least 2."""

    def grow(rest: int, dimensions: int) -> Iterator[tuple[int, ...]]:
        yield (rest,)
        if dimensions > 1:
            for first in range(2, rest // 2 + 1):
                if rest % first == 0:
                    for others in grow(rest // first, dimensions - 1):
                        yield (first, *others)

    for mesh in grow(size, max_dimensions):
        if len(mesh) > 1:
            yield mesh


def index_of(rank: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the group's r-th rank."""
    return tuple(rank // prod(mesh[axis + 1 :]) % size for axis, size in enumerate(mesh))


def sub_groups(mesh: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], ...]:
    """The sub-groups along one axis; together they are a partition of the ranks."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(mesh)):
        index = index_of(rank, mesh)
        groups.setdefault((*index[:axis], *index[axis + 1 :]), []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def allowed_meshes(num_ranks: int, num_nodes: int, *, finer_in_node: bool = False) -> list[tuple[int, ...]]:
    """The meshes that are left for a group that spans so many nodes evenly, ranks in order; normally [nodes, rest]."""
    in_node = num_ranks // num_nodes
    return [
        mesh
        for mesh in factorisations(num_ranks)
        if not any(_mixes(mesh, axis, in_node) for axis in range(len(mesh)))
        and (finer_in_node or _inner_axes(mesh, in_node) <= 1)
        and len(mesh) - _inner_axes(mesh, in_node) <= 1
    ]


def _mixes(mesh: tuple[int, ...], axis: int, in_node: int) -> bool:
    stride = prod(mesh[axis + 1 :])
    return stride < in_node < stride * mesh[axis]


def _inner_axes(mesh: tuple[int, ...], in_node: int) -> int:
    """Axes whose sub-groups lie in one node."""
    return sum(prod(mesh[axis:]) <= in_node for axis in range(len(mesh)))
