"""The graphs of machines with an NVSwitch, or of rings over PCIe, derived from link speeds instead of searched for.

Behind a switch every ring is as good as any other, so NCCL's search (src/graph/search.cc, 2.30.7) comes down to
arithmetic: take the fastest speed of its list for which channels of that speed fit the GPU's links, prefer a slower one
only if more bandwidth is used in all, then split wide channels in two. With several nodes each card is a channel at
the fastest speed of the other list that the card carries; trees may then be faster inside the node.

    GPU       NVLink (GB/s, topo.h)   ring on one node   NVLS heads at (intra, inter)
    A100      12 x 20.0 = 240         12 x 20            -
    H100      18 x 20.6 = 370.8       12 x 30            8 at (40, 60)

Both rows, and two and four nodes of either with a card per GPU on a switch shared in pairs, agree with NCCL's own
search (golden graphs of 2.30.7). Blackwell's rows follow the same rule and were not compared. Over PCIe a ring goes at
the fastest speed that the narrowest part of the host carries (AMD sockets 16: 15, Intel Skylake 10: 10 GB/s, as in the
golden graphs of eight A40). Not derived: bridged pairs and PCIe hosts over several nodes; `topologies.toml` has some.

Departure, read off the golden graphs: an NVLS head takes the switch once more than there are heads (40 and not 42 GB/s
for 8 heads of 370.8).
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from lagom_overlap.cost.nccl.topology import CpuVendor, Graph, PathType, Topology
from lagom_overlap.units import GB_PER_S

_INTRA: Final = {
    80: (40.0, 30.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0),
    90: (60.0, 50.0, 40.0, 30.0, 24.0, 20.0, 15.0, 12.0, 11.0, 6.0, 3.0),
    100: (90.0, 80.0, 70.0, 60.0, 50.0, 45.0, 40.0, 30.0, 24.0, 20.0, 19.0, 18.0),
}
"""Speeds that the search tries inside a node (GB/s), by least compute capability."""
_INTER: Final = {
    80: (48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    90: (48.0, 45.0, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2, 0.24, 0.12),
    100: (96.0, 86.0, 80.0, 48.0, 45.1, 42.0, 40.0, 30.0, 24.0, 22.0, 20.0, 17.5, 15.0, 12.0, 6.0, 3.0, 2.4, 1.2),
}
"""Speeds that the search tries over several nodes (GB/s)."""
_MAX_SEARCH_CHANNELS: Final = 32
"""NCCL's own limit, `ringGraph->maxChannels = MAXCHANNELS / 2` (init.cc)."""
_SPLIT_FROM: Final = 25.0
"""Channels at least that fast (GB/s) are split in two..."""
_SPLIT_WIDE: Final = 50.0
"""...from Hopper on only those at least that fast, unless there are at most four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvswitchMachine:
    """Nodes of GPUs behind an NVSwitch.

    `nic_bytes_per_s` is what one card carries through its PCIe slot, `nic_path` the path from a GPU to its card.
    """

    name: str
    compute_capability: int
    cpu_vendor: CpuVendor
    nvlink_bytes_per_s: float
    num_nics: int
    nic_bytes_per_s: float
    nic_path: PathType = PathType.PIX

    def __post_init__(self) -> None:
        if self.compute_capability < 80:
            raise ValueError(f"machine {self.name!r}: compute_capability is {self.compute_capability}, at least 80")
        for field in ("nvlink_bytes_per_s", "num_nics", "nic_bytes_per_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(f"machine {self.name!r}: {field} is {getattr(self, field)}, must be positive")


def nvswitch_topology(machine: NvswitchMachine, num_ranks: int, num_nodes: int) -> Topology:
    """The topology of `num_ranks` ranks spread evenly over `num_nodes` such nodes.

    Raises:
        ValueError: if the ranks do not spread evenly, or a single rank per node has no ring inside it.
    """
    if num_nodes < 1 or num_ranks % num_nodes or num_ranks < 2:
        raise ValueError(f"{num_ranks} ranks on {num_nodes} nodes; there must be at least 2, equally many per node")
    local = num_ranks // num_nodes
    ring, tree = _one_node(machine) if num_nodes == 1 else _several_nodes(machine, local)
    return Topology(
        name=f"{machine.name}/{num_ranks}/{num_nodes}",
        compute_capability=machine.compute_capability,
        cpu_vendor=machine.cpu_vendor,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        ring=ring,
        tree=tree,
        nvls=_nvls(machine, local, num_nodes),
        fallback_tree=num_nodes > 1 and _settles_for_plain_tree(machine.compute_capability, local, tree),
    )


def pcie_topology(
    name: str, num_ranks: int, bus_bytes_per_s: float, *, compute_capability: int, cpu_vendor: CpuVendor
) -> Topology:
    """One node whose GPUs meet over PCIe: one ring at the fastest speed that its narrowest part carries.

    Raises:
        ValueError: if that part carries nothing, or there are fewer than two ranks.
    """
    if not 0 < bus_bytes_per_s < float("inf"):
        raise ValueError(f"bus_bytes_per_s is {bus_bytes_per_s}, must be positive and finite")
    speeds = _row(_INTRA, max(80, compute_capability))
    speed = max((speed for speed in speeds if speed * GB_PER_S <= bus_bytes_per_s), default=speeds[-1])
    graph = Graph(
        num_channels=1,
        intra_bytes_per_s=speed * GB_PER_S,
        inter_bytes_per_s=speed * GB_PER_S,
        intra_type=PathType.SYS,
        same_channels=True,
    )
    return Topology(
        name=name,
        compute_capability=compute_capability,
        cpu_vendor=cpu_vendor,
        num_nodes=1,
        num_ranks=num_ranks,
        ring=graph,
        tree=graph,
    )


def _row(table: dict[int, tuple[float, ...]], capability: int) -> tuple[float, ...]:
    return table[max(least for least in table if least <= capability)]


def _one_node(machine: NvswitchMachine) -> tuple[Graph, Graph]:
    total = machine.nvlink_bytes_per_s / GB_PER_S
    speeds = [speed for speed in _row(_INTRA, machine.compute_capability) if speed <= total]
    best_speed, best_count = speeds[0], _fitting(total, speeds[0])
    for speed in speeds[1:]:
        if best_speed * best_count >= total or speed / best_speed <= 0.49:
            break
        if speed * _fitting(total, speed) > best_speed * best_count:
            best_speed, best_count = speed, _fitting(total, speed)
    keep = machine.compute_capability > 80 and best_speed < _SPLIT_WIDE and best_count > 4
    if best_speed >= _SPLIT_FROM and not keep and 2 * best_count <= _MAX_SEARCH_CHANNELS:
        best_speed, best_count = best_speed / 2, 2 * best_count
    graph = _graph(best_count, best_speed, best_speed, same=True)
    return graph, graph


def _several_nodes(machine: NvswitchMachine, local: int) -> tuple[Graph, Graph]:
    total, card = machine.nvlink_bytes_per_s / GB_PER_S, machine.nic_bytes_per_s / GB_PER_S
    speeds = _row(_INTER, machine.compute_capability)
    speed = max((s for s in speeds if s <= card), default=speeds[-1])
    count = max(1, min(machine.num_nics, local))
    inside = speed
    for slower, faster in pairwise(sorted(s for s in speeds if s >= speed)):
        if faster * count > total or slower >= 2 * speed:
            break
        inside = faster
    tree_inside = speed if local == 1 else inside
    return _graph(count, speed, speed, path=machine.nic_path), _graph(count, tree_inside, speed, path=machine.nic_path)


def _settles_for_plain_tree(capability: int, local: int, tree: Graph) -> bool:
    """One GPU per node has no other tree; since Hopper the plain one also wins where a balanced one is no faster."""
    return local == 1 or (capability >= 90 and tree.intra_bytes_per_s <= tree.inter_bytes_per_s)


def _nvls(machine: NvswitchMachine, local: int, num_nodes: int) -> Graph | None:
    """One head per GPU, where there are at least two and the switch reduces (Hopper)."""
    if machine.compute_capability < 90 or local < 2:
        return None
    capability, total = machine.compute_capability, machine.nvlink_bytes_per_s / GB_PER_S
    speeds = _row(_INTRA if num_nodes == 1 else _INTER, capability)
    intra = max((speed for speed in speeds if speed * (local + 1) <= total), default=speeds[-1])
    if num_nodes > 1:
        card = machine.nic_bytes_per_s / GB_PER_S
        return _graph(local, intra, max((speed for speed in speeds if speed <= card), default=intra))
    return _graph(local, intra, max(speed for speed in speeds if speed < 2 * intra))


def _fitting(total: float, speed: float) -> int:
    return min(_MAX_SEARCH_CHANNELS, int(total // speed))


def _graph(count: int, intra: float, inter: float, *, same: bool = False, path: PathType = PathType.PIX) -> Graph:
    return Graph(
        num_channels=count,
        intra_bytes_per_s=intra * GB_PER_S,
        inter_bytes_per_s=inter * GB_PER_S,
        intra_type=PathType.NVL,
        inter_type=path,
        same_channels=same,
    )
