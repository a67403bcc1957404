"""From a cluster preset to NCCL's graphs: which topology a collective on that many of its ranks sees.

What the graphs need of a machine beyond a cluster preset is the table `[nccl]` of its GPU's file (`hardware.gpu_file`).
GPUs behind an NVSwitch get `derived_graphs`, bridged A40 the presets of `topologies.toml`, anything else
one ring at its own link's speed. Departures: ranks that do not fill their nodes evenly are taken as if they did; the
number of network cards is the node's bandwidth in cards of the machine's kind; without a preset, nodes without a switch
are taken as one ring over their cards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from lagom_overlap.collective import Collective
from lagom_overlap.cost.nccl.choice import NcclChoice, choose, launched_channels
from lagom_overlap.cost.nccl.derived_graphs import NvswitchMachine, nvswitch_topology, pcie_topology
from lagom_overlap.cost.nccl.point_to_point import choose_point_to_point
from lagom_overlap.cost.nccl.topology import CpuVendor, PathType, Topology, load_topology
from lagom_overlap.cost.nccl.wire import FittedLink
from lagom_overlap.hardware import Cluster, Gpu, LinkKind
from lagom_overlap.hardware.gpu_file import table_of
from lagom_overlap.toml_tables import from_table


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The link of that many ranks on one node, fitted to published measurements."""

    num_ranks: int
    bytes_per_s: float
    latency_scale: float

    def __post_init__(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"nccl.links: num_ranks is {self.num_ranks}, must be at least 2")
        _ = self.fitted

    @property
    def fitted(self) -> FittedLink:
        """The same as prices take it."""
        return FittedLink(self.bytes_per_s, self.latency_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclMachine:
    """What NCCL's graphs need of a machine, by its GPU.

    `compute_capability` is 10 major + minor, `nvlink_bytes_per_s` what all NVLinks of a GPU carry as NCCL counts them,
    `nvswitch` whether they meet in a switch, `card_bytes_per_s` a network card through its slot. `graphs` names
    topologies (`topology.load_topology`) by ranks per node, of one node and of several. `links` are measured.
    """

    compute_capability: int
    cpu_vendor: CpuVendor
    nvlink_bytes_per_s: float
    nvswitch: bool
    card_bytes_per_s: float
    graphs: Mapping[str, str] = field(default_factory=dict)
    graphs_of_several_nodes: Mapping[str, str] = field(default_factory=dict)
    links: tuple[MeasuredLink, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_capability < 60:
            raise ValueError(f"nccl.compute_capability is {self.compute_capability}, must be at least 60")
        for rate in ("nvlink_bytes_per_s", "card_bytes_per_s"):
            value = getattr(self, rate)
            if not 0 < value < float("inf"):
                raise ValueError(f"nccl.{rate} is {value}, must be positive and finite")


@cache
def nccl_of(gpu: Gpu) -> NcclMachine:
    """What the GPU's file says for NCCL.

    Raises:
        JobError: if the table of a user's own file is none.
    """
    own = table_of(gpu, "nccl")
    assert own is not None, "gpus/any.toml has one for all"
    return from_table(own[0], NcclMachine, own[1], "nccl.")


@lru_cache(maxsize=256)
def topology_of(cluster: Cluster, num_ranks: int, num_nodes: int | None = None) -> Topology:
    """The topology of `num_ranks` ranks of a cluster: consecutive ones, or as many on each of `num_nodes` nodes.

    Raises:
        JobError: if the cluster has fewer GPUs or nodes.
        ValueError: if there are fewer than two ranks.
    """
    if num_ranks < 2:
        raise ValueError(f"num_ranks is {num_ranks}, a collective has at least 2")
    seen = cluster.part(num_ranks, num_nodes)
    nodes, local = seen.num_nodes, seen.gpus_per_node
    machine = nccl_of(cluster.gpu)
    nvlink = cluster.intra.kind is LinkKind.NVLINK
    named = (machine.graphs if nodes == 1 else machine.graphs_of_several_nodes).get(str(local))
    preset = None if named is None else load_topology(named)
    if preset is not None and (nvlink or preset.ring.intra_type > PathType.NVB):
        return preset if nodes == 1 else preset.with_nodes(nodes)
    if machine.nvswitch and nvlink:
        return nvswitch_topology(_switched(seen, machine), nodes * local, nodes)
    narrowest = seen.link_between(nodes * local)
    ring = pcie_topology(
        f"{cluster.name}/{nodes * local}/{nodes}",
        nodes * local,
        narrowest.bytes_per_s,
        compute_capability=machine.compute_capability,
        cpu_vendor=machine.cpu_vendor,
    )
    if nodes == 1:
        return ring
    graph = replace(ring.ring, inter_type=PathType.PHB)
    return replace(ring, num_nodes=nodes, ring=graph, tree=graph)


def is_guessed(cluster: Cluster) -> bool:
    """Whether nobody knows the graph between the cluster's nodes: GPUs with links of their own, without a switch."""
    machine = nccl_of(cluster.gpu)
    is_known = machine.nvswitch or str(cluster.gpus_per_node) in machine.graphs_of_several_nodes
    return cluster.num_nodes > 1 and cluster.intra.kind is LinkKind.NVLINK and not is_known


def on_topology(collective: Collective, cluster: Cluster) -> tuple[Collective, Topology]:
    """The topology that a collective sees, and the collective with as many ranks as the topology has.

    Raises:
        JobError: if the cluster has fewer GPUs or nodes than the collective has.
    """
    topology = topology_of(cluster, collective.num_ranks, collective.num_nodes)
    return Collective(collective.kind, collective.num_bytes, topology.num_ranks), topology


@lru_cache(maxsize=4096)
def default_choice(collective: Collective, cluster: Cluster) -> NcclChoice:
    """What NCCL does untouched for a collective on a cluster, every knob set, and the time that its model expects.

    Raises:
        JobError: if the cluster has fewer GPUs than the collective has ranks.
    """
    filled, topology = on_topology(collective, cluster)
    if filled.kind.traits.is_point_to_point:
        return choose_point_to_point(filled, topology)
    choice = choose(filled, topology)
    algorithm, protocol, channels = choice.config.algorithm, choice.config.protocol, choice.config.num_channels
    assert algorithm is not None
    assert protocol is not None
    assert channels is not None
    launched = launched_channels(filled, algorithm, protocol, channels)
    return replace(choice, config=replace(choice.config, num_channels=launched))


def _switched(cluster: Cluster, machine: NcclMachine) -> NvswitchMachine:
    cards = max(1, min(cluster.gpus_per_node, round(cluster.inter.bytes_per_s / machine.card_bytes_per_s)))
    return NvswitchMachine(
        name=cluster.name,
        compute_capability=machine.compute_capability,
        cpu_vendor=machine.cpu_vendor,
        nvlink_bytes_per_s=machine.nvlink_bytes_per_s,
        num_nics=cards,
        nic_bytes_per_s=cluster.inter.bytes_per_s if cards == 1 else machine.card_bytes_per_s,
    )
