import tomllib
from dataclasses import fields, replace
from importlib import resources
from itertools import pairwise

import pytest

from lagom_overlap.errors import JobError, UnknownNameError
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind, gpu_names, load_preset, preset_names

NAMES = [
    "a100_dgx", "a100_hdr1", "a100_hdr4", "a10g_g5", "a40_bridged", "a40_nvlink", "a40_pcie", "b200", "b300", "gb200",
    "gb300", "h100_dgx", "h100_hbm2e", "h200", "mi300x", "mi350x", "mi355x",
]  # fmt: skip

# NVIDIA's and AMD's datasheets: SMs, dense bf16 peak, memory peak, GiB that the driver shows (PyTorch prints them so in
# its out-of-memory errors; datasheets round), one direction of the GPU's links or slot.
DATASHEET = {
    "a40_bridged": (84, 149.7e12, 696e9, 44.35, 31.5e9),  # the ring crosses PCIe
    "a40_nvlink": (84, 149.7e12, 696e9, 44.35, 56.25e9),
    "a40_pcie": (84, 149.7e12, 696e9, 44.35, 31.5e9),
    "a100_dgx": (108, 312e12, 2039e9, 79.14, 300e9),
    "a100_hdr1": (108, 312e12, 2039e9, 79.14, 300e9),
    "a100_hdr4": (108, 312e12, 2039e9, 79.14, 300e9),
    "h100_dgx": (132, 989.4e12, 3350e9, 79.18, 450e9),
    "h100_hbm2e": (132, 989.4e12, 2400e9, 94.99, 450e9),
    "h200": (132, 989.4e12, 4800e9, 139.80, 450e9),
    "b200": (148, 2250e12, 7700e9, 178.35, 900e9),
    "gb200": (148, 2500e12, 8000e9, 184.31, 900e9),
    "b300": (148, 2250e12, 8000e9, 267.69, 900e9),
    "gb300": (148, 2500e12, 8000e9, 276.50, 900e9),
    "a10g_g5": (80, 70e12, 600e9, 22.06, 31.5e9),
    "mi300x": (304, 1307.4e12, 5300e9, 191.98, 7 * 64e9),
    "mi350x": (256, 2307e12, 8000e9, 287.98, 7 * 76.8e9),
    "mi355x": (256, 2516e12, 8000e9, 287.98, 7 * 76.8e9),
}
POWER_LIMITED = {"h100_hbm2e", "mi300x", "mi350x", "mi355x"}
"""Their products run far below the datasheet's clock."""


def raw(package: str, name: str) -> dict[str, object]:
    return tomllib.loads((resources.files(package) / f"{name}.toml").read_text(encoding="utf-8"))


def test_the_presets_that_the_issue_names_exist() -> None:
    assert preset_names() == NAMES
    assert {raw("lagom_overlap.clusters", name)["gpu"] for name in NAMES} == set(gpu_names())


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_loads_and_is_called_like_its_file(name: str) -> None:
    assert load_preset(name).name == name


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_spells_out_every_field_and_no_other(name: str) -> None:
    data = raw("lagom_overlap.clusters", name)
    assert set(data) == {f.name for f in fields(Cluster)}
    hardware = raw("lagom_overlap.gpus", data["gpu"])["gpu"]  # type: ignore[arg-type]
    assert set(hardware) == {f.name for f in fields(Gpu)} - {"own"}  # type: ignore[call-overload]
    for link in ("intra", "inter"):
        names = {f.name for f in fields(Link)}
        assert set(data[link]) | {"measured"} == names  # type: ignore[call-overload]  # said where it is false


@pytest.mark.parametrize("name", NAMES)
def test_sms_are_the_datasheets_and_memory_the_drivers_and_rates_lie_below_the_peaks(name: str) -> None:
    num_sms, peak_flops, peak_hbm, memory, wire = DATASHEET[name]
    cluster = load_preset(name)
    gpu = cluster.gpu
    assert (gpu.num_sms, round(gpu.memory_bytes / 2**30, 2)) == (num_sms, memory)
    assert (0.5 if name in POWER_LIMITED else 0.6) * peak_flops < gpu.gemm_flops < peak_flops
    assert 0.75 * peak_hbm < gpu.hbm_bytes_per_s < peak_hbm
    if cluster.gpus_per_node > 1:
        assert 0.6 * wire < cluster.intra.bytes_per_s < wire


@pytest.mark.parametrize("name", NAMES)
def test_a_ring_over_nodes_is_never_wider_than_the_ring_inside_one(name: str) -> None:
    cluster = load_preset(name, num_nodes=2)
    one = cluster.gpus_per_node
    assert cluster.link_between(2 * one).bytes_per_s <= cluster.link_between(one).bytes_per_s
    assert cluster.link_between(2 * one).kind is LinkKind.NETWORK


def test_clusters_a_and_b_have_the_shape_of_the_papers_section_4_1() -> None:
    a, b = load_preset("a40_nvlink"), load_preset("a40_pcie")
    assert (a.num_nodes, a.gpus_per_node, a.num_gpus) == (b.num_nodes, b.gpus_per_node, b.num_gpus) == (2, 8, 16)
    assert a.gpu == b.gpu
    assert (a.intra.kind, b.intra.kind) == (LinkKind.NVLINK, LinkKind.PCIE)
    assert a.intra.bytes_per_s < 400e9 / 8  # achievable of 400 Gb/s
    assert b.inter.bytes_per_s < 100e9 / 8  # achievable of 100 Gb/s


def test_centauris_clusters_differ_in_their_network_alone() -> None:
    a, b, dgx = load_preset("a100_hdr1"), load_preset("a100_hdr4"), load_preset("a100_dgx")
    assert (a.gpu, a.intra, a.gpus_per_node) == (b.gpu, b.intra, b.gpus_per_node)
    assert (a.gpu, a.intra) == (dgx.gpu, dgx.intra)
    assert a.inter.bytes_per_s < 16e9  # PCIe 3.0 x16 before the one port of 25 GB/s
    assert 16e9 < b.inter.bytes_per_s < 4 * 25e9


def test_the_a40_agrees_with_measured_kernels_of_phi_2() -> None:
    # microsoft/vidur @513ddc1, 4096 tokens: medians 1.434 ms (qkv), 0.480 (o), 1.889 (up), 1.813 (down), 0.295 (GELU).
    gpu = load_preset("a40_nvlink").gpu
    for columns, depth, measured_s in (
        (7680, 2560, 1.434e-3),
        (2560, 2560, 0.480e-3),
        (10240, 2560, 1.889e-3),
        (2560, 10240, 1.813e-3),
    ):
        assert 2 * 4096 * columns * depth / gpu.gemm_flops == pytest.approx(measured_s, rel=0.05)
    assert 2 * 4096 * 10240 * 2 / gpu.hbm_bytes_per_s == pytest.approx(0.295e-3, rel=0.06)


def test_the_number_of_nodes_can_be_asked_for() -> None:
    assert load_preset("a40_nvlink", num_nodes=1).num_gpus == 8
    with pytest.raises(JobError, match="num_nodes is 0"):
        load_preset("a40_nvlink", num_nodes=0)


@pytest.mark.parametrize(("name", "most"), [("gb200", 72), ("gb300", 72), ("h100_dgx", 8), ("a10g_g5", 1)])
def test_a_node_has_at_most_the_gpus_that_its_links_join(name: str, most: int) -> None:
    plain, whole = load_preset(name), load_preset(name, 2, most)
    assert (whole.gpus_per_node, whole.num_nodes, whole.intra) == (most, 2, plain.intra)
    with pytest.raises(JobError, match=rf"gpus_per_node is {most + 1}, must be 1 to {most}$"):
        load_preset(name, 1, most + 1)


def test_network_cards_of_a_rack_are_as_many_per_gpu_as_a_trays() -> None:
    rack = load_preset("gb200", 2, 64)
    assert rack.inter.bytes_per_s == 16 * load_preset("gb200").inter.bytes_per_s
    assert rack.link_between(128).bytes_per_s == rack.inter.bytes_per_s
    assert rack.link_between(64).kind is LinkKind.NVLINK


def test_a_cluster_that_states_no_most_has_full_nodes() -> None:
    own = replace(load_preset("h100_dgx"), max_gpus_per_node=None)
    assert own.with_gpus_per_node(4).with_gpus_per_node(8).inter == own.inter
    with pytest.raises(JobError, match="must be 1 to 8"):
        own.with_gpus_per_node(16)


def test_an_unknown_preset_names_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match=r"'a40_nvlnk'.*did you mean 'a40_nvlink'.*allowed: a100_dgx"):
        load_preset("a40_nvlnk")


@pytest.mark.parametrize(("name", "per_die"), [("mi300x", 38), ("mi350x", 32), ("mi355x", 32)])
def test_amd_s_compute_units_lie_on_eight_dies(name: str, per_die: int) -> None:
    gpu = load_preset(name).gpu
    assert (gpu.num_xcds, gpu.num_sms) == (8, 8 * per_die)


def test_dies_must_divide_the_sms() -> None:
    with pytest.raises(JobError, match="num_xcds is 7, must divide num_sms, which is 304"):
        replace(load_preset("mi300x").gpu, num_xcds=7)
    with pytest.raises(JobError, match=r"channel_xcds is 9, must lie in 0\.\.8, its num_xcds"):
        replace(load_preset("mi300x").gpu, channel_xcds=9)


def test_gpus_grow_in_sms_from_generation_to_generation() -> None:
    sms = [load_preset(name).gpu.num_sms for name in ("a40_nvlink", "a100_dgx", "h100_dgx", "h200")]
    assert all(older <= newer for older, newer in pairwise(sms))
