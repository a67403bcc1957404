from dataclasses import replace

import pytest

from lagom_overlap.cost.nccl import load_topology, topology_names
from lagom_overlap.cost.nccl.derived_graphs import NvswitchMachine, nvswitch_topology, pcie_topology
from lagom_overlap.cost.nccl.topology import CpuVendor, GpuGeneration, PathType
from lagom_overlap.errors import UnknownNameError

A100 = NvswitchMachine(
    name="a100",
    compute_capability=80,
    cpu_vendor=CpuVendor.AMD,
    nvlink_bytes_per_s=240e9,
    num_nics=8,
    nic_bytes_per_s=24e9,
)
H100 = replace(
    A100,
    name="h100",
    compute_capability=90,
    cpu_vendor=CpuVendor.INTEL,
    nvlink_bytes_per_s=370.8e9,
    nic_bytes_per_s=48e9,
)


def test_every_preset_loads_and_has_channels() -> None:
    for name in topology_names():
        topology = load_topology(name)
        assert topology.name == name
        assert 2 <= topology.num_channels <= 64


@pytest.mark.parametrize(
    ("name", "channels", "nvls_channels"),
    [
        ("a100_dgx", 24, 0),  # as public NCCL logs of such machines say: 24 coll channels
        ("h100_dgx", 24, 16),
        ("h100_2_nodes", 16, 16),
        ("a40_8_amd", 2, 0),
        ("h200_2_ranks_one_gpu", 64, 0),
    ],
)
def test_compute_channels_are_twice_the_search_channels(name: str, channels: int, nvls_channels: int) -> None:
    topology = load_topology(name)
    assert (topology.num_channels, topology.num_nvls_channels) == (channels, nvls_channels)


def test_few_wide_channels_over_nodes_are_doubled_again_since_hopper() -> None:
    assert nvswitch_topology(replace(H100, num_nics=4), 32, 4).num_channels == 16
    assert nvswitch_topology(replace(A100, num_nics=4), 32, 4).num_channels == 8


@pytest.mark.parametrize(
    ("machine", "nodes", "name"),
    [(A100, 1, "a100_dgx"), (A100, 2, "a100_2_nodes"), (H100, 1, "h100_dgx"), (H100, 2, "h100_2_nodes")],
)
def test_switched_machines_derive_to_what_the_search_found(machine: NvswitchMachine, nodes: int, name: str) -> None:
    derived, searched = nvswitch_topology(machine, 8 * nodes, nodes), load_topology(name)
    for graph in ("ring", "tree", "nvls"):
        mine, theirs = getattr(derived, graph), getattr(searched, graph)
        if theirs is None:
            assert mine is None
        else:
            assert mine == replace(theirs, same_channels=mine.same_channels)
    assert derived.fallback_tree == searched.fallback_tree
    assert derived.num_channels == searched.num_channels


@pytest.mark.parametrize(("host", "speed"), [(16e9, 15e9), (10e9, 10e9), (1e9, 3e9)])
def test_a_pcie_ring_goes_at_the_fastest_speed_its_host_carries(host: float, speed: float) -> None:
    topology = pcie_topology("pcie", 8, host, compute_capability=86, cpu_vendor=CpuVendor.AMD)
    assert (topology.ring.num_channels, topology.ring.intra_bytes_per_s) == (1, speed)
    assert topology.num_channels == 2


def test_more_nodes_keep_the_graphs_but_one_node_has_others() -> None:
    four = load_topology("h100_2_nodes").with_nodes(4)
    assert (four.num_ranks, four.ranks_per_node) == (32, 8)
    with pytest.raises(ValueError, match="graphs differ"):
        four.with_nodes(1)


@pytest.mark.parametrize(
    ("capability", "generation"),
    [(70, GpuGeneration.VOLTA), (86, GpuGeneration.AMPERE), (90, GpuGeneration.HOPPER), (103, GpuGeneration.BLACKWELL)],
)
def test_generations_begin_at_their_capability(capability: int, generation: GpuGeneration) -> None:
    assert replace(load_topology("a100_dgx"), compute_capability=capability).generation is generation


def test_impossible_values_are_refused() -> None:
    topology = load_topology("a100_dgx")
    for wrong in ({"num_ranks": 1}, {"num_nodes": 3}, {"num_nodes": 0}, {"compute_capability": 50}):
        with pytest.raises(ValueError, match="topology"):
            replace(topology, **wrong)
    for wrong in ({"num_channels": 0}, {"intra_bytes_per_s": float("nan")}, {"inter_latency_s": -1.0}):
        with pytest.raises(ValueError, match="graph"):
            replace(topology.ring, **wrong)
    with pytest.raises(ValueError, match="equally many"):
        nvswitch_topology(A100, 9, 2)
    with pytest.raises(ValueError, match="num_nics"):
        replace(A100, num_nics=0)
    with pytest.raises(ValueError, match="bus_bytes_per_s"):
        pcie_topology("pcie", 4, -1.0, compute_capability=80, cpu_vendor=CpuVendor.AMD)
    with pytest.raises(UnknownNameError, match="did you mean"):
        load_topology("a100_dgs")


def test_paths_are_ordered_by_distance() -> None:
    assert PathType.NVL < PathType.NVB < PathType.PIX < PathType.PXB < PathType.PXN < PathType.PHB < PathType.SYS
