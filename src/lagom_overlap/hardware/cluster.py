"""Nodes of equal GPUs, the wires inside a node and between nodes."""

from dataclasses import dataclass

from lagom_overlap.errors import JobError
from lagom_overlap.hardware.gpu import Gpu
from lagom_overlap.hardware.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_nodes` nodes of `gpus_per_node` equal GPUs."""

    name: str
    gpu: Gpu
    gpus_per_node: int
    num_nodes: int
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        for field in ("gpus_per_node", "num_nodes"):
            value = getattr(self, field)
            if value < 1:
                raise JobError(f"cluster {self.name!r}: {field} is {value}, must be at least 1")

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.num_nodes * self.gpus_per_node

    def num_nodes_of(self, num_ranks: int) -> int:
        """Nodes that `num_ranks` consecutive ranks cover.

        Raises:
            JobError: if the cluster has fewer GPUs.
        """
        if num_ranks > self.num_gpus:
            raise JobError(
                f"{num_ranks} ranks do not fit: cluster {self.name!r} has {self.num_gpus} GPUs "
                f"({self.num_nodes} x {self.gpus_per_node})"
            )
        return -(-num_ranks // self.gpus_per_node)

    def link_between(self, num_ranks: int) -> Link:
        """The narrowest wire on a ring of `num_ranks` consecutive ranks."""
        return self.intra if self.num_nodes_of(num_ranks) == 1 else self.inter
