"""Time of a collective alone over the ranks of a parallel group.

Inside a node whose link was measured (`nccl.links`): NCCL's choice, latency and bytes on that link (`nccl.wire`).
Elsewhere a ring by its wire bytes and its steps:

    t = base + steps hop + wire bytes / (efficiency x narrowest link)

Channels (SMs) are NCCL's own choice for the group's part of the cluster.

Ranks are laid out as Megatron does: tensor parallelism inside a node first, then data, then pipeline. A ring over
several nodes shares its nodes' network with the other groups that cross it at the same time: with r of a group's ranks
in a node of g GPUs, g / r rings share the node's ports. A ring crosses them once; in an all-to-all each of the r ranks
sends (n - r) / n of its own bytes through them.

`base_s`, `hop_s` and the efficiencies come from the GPU's data file; link rates from the cluster's preset.
"""

from dataclasses import dataclass

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.nccl.links import link_of
from lagom_overlap.cost.nccl.machines import default_choice, on_topology
from lagom_overlap.cost.nccl.wire import wire_terms
from lagom_overlap.hardware import Cluster
from lagom_overlap.workload.parallel import GroupKind, ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """Latency terms in seconds and what a ring reaches of a preset's link rate, where no link was measured."""

    base_s: float
    hop_s: float
    network_hop_s: float
    intra_efficiency: float
    inter_efficiency: float

    def __post_init__(self) -> None:
        for field in ("base_s", "hop_s", "network_hop_s"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"links: {field} is {getattr(self, field)}, must be finite and not negative")
        for field in ("intra_efficiency", "inter_efficiency"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"links: {field} is {getattr(self, field)}, must be positive and finite")


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks of a group, and how many of them share a node."""

    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes that the group crosses."""
        return -(-self.num_ranks // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTerms:
    """What a collective over a group takes: start, bytes past each rank and their rate, channels (SMs)."""

    latency_s: float
    wire_bytes: float
    bytes_per_s: float
    num_channels: int

    @property
    def seconds(self) -> float:
        """The whole, alone."""
        return self.latency_s + self.wire_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """The groups of a layout on a cluster, and what their collectives take."""

    cluster: Cluster
    layout: ParallelLayout
    constants: LinkConstants

    def shape(self, group: GroupKind) -> GroupShape:
        """Where the ranks of a group lie."""
        layout, per_node = self.layout, self.cluster.gpus_per_node
        stride, num = {
            GroupKind.TENSOR: (1, layout.tensor),
            GroupKind.DATA: (layout.tensor, layout.data),
            GroupKind.EXPERT: (layout.tensor, layout.expert),
            GroupKind.PIPELINE: (layout.tensor * layout.data, layout.pipeline),
        }[group]
        return GroupShape(num, max(1, min(num, per_node // stride)))

    def bytes_per_s(self, group: GroupKind, kind: CollectiveKind | None = None) -> float:
        """Wire bytes per second and rank of a collective of the group, one direction; without a kind, of a ring."""
        shape, cluster, c = self.shape(group), self.cluster, self.constants
        intra = cluster.intra.bytes_per_s * c.intra_efficiency
        if shape.num_nodes == 1:
            return intra
        share = shape.ranks_per_node / cluster.gpus_per_node
        if kind is CollectiveKind.ALL_TO_ALL:
            away = shape.num_ranks - shape.ranks_per_node
            share *= (shape.num_ranks - 1) / (shape.ranks_per_node * away)
        return min(intra, cluster.inter.bytes_per_s * c.inter_efficiency * share)

    def latency_s(self, kind: CollectiveKind, group: GroupKind) -> float:
        """What a collective of no bytes takes."""
        shape, c = self.shape(group), self.constants
        if kind is CollectiveKind.SEND_RECV:
            return c.base_s + (c.hop_s if shape.num_nodes == 1 else c.network_hop_s)
        passes = 2 if kind is CollectiveKind.ALL_REDUCE else 1
        between = passes * (shape.num_nodes - 1)
        return c.base_s + (passes * (shape.num_ranks - 1) - between) * c.hop_s + between * c.network_hop_s

    def terms(self, kind: CollectiveKind, num_bytes: int, group: GroupKind) -> GroupTerms:
        """The terms of a collective over a group of at least two ranks."""
        shape, cluster = self.shape(group), self.cluster
        pair = kind is CollectiveKind.SEND_RECV
        one_node = shape.num_nodes == 1
        ranks, nodes = (2, min(2, shape.num_nodes)) if pair else (shape.num_ranks, shape.num_nodes)
        measured = link_of(cluster, ranks) if one_node else None
        if measured is not None:
            collective = Collective(kind, num_bytes, ranks)
            terms = wire_terms(*on_topology(collective, cluster))
            return GroupTerms(
                latency_s=terms.fixed_s + measured.latency_scale * terms.scaled_s,
                wire_bytes=terms.wire_bytes,
                bytes_per_s=measured.bytes_per_s,
                num_channels=_channels(collective, cluster),
            )
        per_node = 1 if pair and nodes > 1 else shape.ranks_per_node
        filled = Collective(kind, num_bytes, ranks if one_node else nodes * per_node, None if one_node else nodes)
        return GroupTerms(
            latency_s=self.latency_s(kind, group),
            wire_bytes=Collective(kind, num_bytes, shape.num_ranks).wire_bytes,
            bytes_per_s=self.bytes_per_s(group, kind),
            num_channels=_channels(filled, cluster),
        )

    def seconds(self, kind: CollectiveKind, num_bytes: int, group: GroupKind) -> float:
        """The time alone of a collective over the group; 0 where the group has one rank."""
        return 0.0 if self.shape(group).num_ranks == 1 else self.terms(kind, num_bytes, group).seconds


def _channels(collective: Collective, cluster: Cluster) -> int:
    return default_choice(collective, cluster).config.num_channels or 1
