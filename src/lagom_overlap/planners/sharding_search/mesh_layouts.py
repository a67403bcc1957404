"""A mesh of ranks, and how a tensor lies on it: cut along a dimension, whole, or as parts of a sum, per mesh dimension.

Two mesh dimensions may cut the same tensor dimension: the first one cuts coarsely, the second each part again.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.tensor_program import Value

MAX_MESH_DIMS: Final = 2
"""Between nodes and within one; the program grows with every pair of layouts."""


class Held(StrEnum):
    """A tensor that a mesh dimension does not cut: the same on all its ranks, or each holds a part of every number."""

    WHOLE = "whole"
    PARTIAL = "partial"


Placement = int | Held
"""On one mesh dimension: the tensor dimension that is cut, or how it is held."""
Layout = tuple[Placement, ...]
"""One placement for each mesh dimension."""


@dataclass(frozen=True, slots=True)
class SearchMesh:
    """Ranks as a line or a rectangle, row by row; the last dimension's neighbours are consecutive ranks.

    The first dimension of a rectangle goes between nodes where its rows fill nodes.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.shape) <= MAX_MESH_DIMS or min(self.shape) < 2:
            raise JobError(
                f"mesh is {'x'.join(map(str, self.shape))}: must be one or two dimensions of at least 2 ranks, as 2x4"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return prod(self.shape)

    @property
    def whole(self) -> Layout:
        """The layout of a tensor that every rank has."""
        return (Held.WHOLE,) * len(self.shape)

    def name_of(self, dims: tuple[int, ...]) -> str:
        """The communicator over these mesh dimensions."""
        return "mesh" if len(dims) == len(self.shape) else f"mesh{dims[0]}"

    def ranks_of(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        """The group of rank 0 along these mesh dimensions."""
        if len(dims) == len(self.shape):
            return tuple(range(self.num_ranks))
        stride = prod(self.shape[dims[0] + 1 :])
        return tuple(range(0, stride * self.shape[dims[0]], stride))

    def num_nodes_of(self, dims: tuple[int, ...], cluster: Cluster) -> int | None:
        """Nodes that such a group spans, None where its ranks are consecutive."""
        ranks = self.ranks_of(dims)
        if ranks[1] == 1:
            return None
        nodes = len({rank // cluster.gpus_per_node for rank in ranks})
        return nodes if len(ranks) % nodes == 0 else None


def num_shards(layout: Layout, mesh: SearchMesh) -> int:
    """How many different parts a tensor is cut into."""
    return prod(n for place, n in zip(layout, mesh.shape, strict=True) if isinstance(place, int))


def local_bytes(value: Value, layout: Layout, mesh: SearchMesh) -> int:
    """Bytes of a tensor on one rank."""
    return value.num_bytes // num_shards(layout, mesh)


def layouts_of(value: Value, mesh: SearchMesh) -> tuple[Layout, ...]:
    """Every way to lay a finished tensor out: dimensions that the ranks divide, or whole."""
    layouts: list[Layout] = [()]
    for size in mesh.shape:
        longer = []
        for layout in layouts:
            longer.append((*layout, Held.WHOLE))
            for dim, length in enumerate(value.shape):
                cut = prod(n for place, n in zip(layout, mesh.shape, strict=False) if place == dim)
                if length % (cut * size) == 0:
                    longer.append((*layout, dim))
        layouts = longer
    return tuple(layouts)
