"""One GPU spelled out, so that nothing here depends on a preset."""

import pytest
from hypothesis import settings

from lagom_overlap.cost import ContentionModel, Profile, load_profile
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def a40() -> Gpu:
    return Gpu(
        name="A40",
        num_sms=84,
        gemm_flops=115e12,
        hbm_bytes_per_s=600e9,
        l2_bytes=6_000_000,
        memory_bytes=48_000_000_000,
    )


@pytest.fixture(scope="session")
def pcie(a40: Gpu) -> Cluster:
    """Two nodes of eight A40 on PCIe, 100 Gb/s between the nodes."""
    return Cluster(
        name="pcie",
        gpu=a40,
        gpus_per_node=8,
        num_nodes=2,
        intra=Link(kind=LinkKind.PCIE, bytes_per_s=24e9, hop_s=2e-6),
        inter=Link(kind=LinkKind.NETWORK, bytes_per_s=11.5e9, hop_s=5e-6),
    )


@pytest.fixture(scope="session")
def nvlink(a40: Gpu) -> Cluster:
    """One node of eight A40 on NVLink."""
    return Cluster(
        name="nvlink",
        gpu=a40,
        gpus_per_node=8,
        num_nodes=1,
        intra=Link(kind=LinkKind.NVLINK, bytes_per_s=44e9, hop_s=1e-6, measured=False),
        inter=Link(kind=LinkKind.NETWORK, bytes_per_s=44e9, hop_s=5e-6),
    )


@pytest.fixture(scope="session")
def plausible() -> Profile:
    return load_profile("plausible")


@pytest.fixture(scope="session")
def pcie_model(pcie: Cluster, plausible: Profile) -> ContentionModel:
    return ContentionModel(pcie, plausible)


@pytest.fixture(scope="session")
def nvlink_model(nvlink: Cluster, plausible: Profile) -> ContentionModel:
    return ContentionModel(nvlink, plausible)
