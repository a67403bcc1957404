import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind
from lagom_overlap.cost.nccl.machines import default_choice, topology_of
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind, load_preset
from lagom_overlap.units import MIB


def test_cluster_presets_give_the_channels_that_public_logs_and_the_paper_give() -> None:
    assert topology_of(load_preset("a100_dgx"), 8).num_channels == 24
    assert topology_of(load_preset("h100_dgx", 2), 16).num_channels == 16
    # The Lagom paper, section 4.3: NC=8 by default on eight A40.
    for name in ("a40_nvlink", "a40_pcie"):
        assert topology_of(load_preset(name), 8).num_channels == 8
        assert topology_of(load_preset(name), 16).num_channels == 8


def test_every_collective_has_a_full_default_on_every_preset() -> None:
    for name in ("a100_dgx", "a40_nvlink", "a40_pcie", "h100_dgx", "h200"):
        cluster = load_preset(name, 4)
        for num_ranks in (2, 3, 5, 8, 12, 16, 32):
            for kind in CollectiveKind:
                choice = default_choice(Collective(kind, 8 * MIB, num_ranks), cluster)
                config = choice.config
                assert None not in (config.protocol, config.num_channels, config.num_threads, config.chunk_bytes)
                assert 0 < choice.seconds < 1


def test_the_default_of_an_h100_node_is_the_switch() -> None:
    choice = default_choice(Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 8), load_preset("h100_dgx"))
    assert choice.config.algorithm is Algorithm.NVLS
    # Four GPUs have four heads: rings are faster.
    choice = default_choice(Collective(CollectiveKind.ALL_REDUCE, 32 * MIB, 4), load_preset("h100_dgx"))
    assert choice.config.algorithm is Algorithm.RING


def test_an_unknown_gpu_over_pcie_gets_one_ring_at_its_links_speed() -> None:
    gpu = Gpu(name="X1", num_sms=10, gemm_flops=1e12, hbm_bytes_per_s=1e11, l2_bytes=10**6, memory_bytes=10**9)
    cluster = Cluster(
        name="x",
        gpu=gpu,
        gpus_per_node=4,
        num_nodes=2,
        intra=Link(kind=LinkKind.PCIE, bytes_per_s=13e9, hop_s=1e-6),
        inter=Link(kind=LinkKind.NETWORK, bytes_per_s=6e9, hop_s=5e-6),
    )
    assert topology_of(cluster, 4).ring.intra_bytes_per_s == 12e9
    assert topology_of(cluster, 8).ring.inter_bytes_per_s == 6e9
    assert topology_of(cluster, 6).num_ranks == 8


def test_too_many_or_too_few_ranks_are_refused() -> None:
    with pytest.raises(JobError, match="do not fit"):
        topology_of(load_preset("a100_dgx"), 16)
    with pytest.raises(ValueError, match="at least 2"):
        topology_of(load_preset("a100_dgx"), 1)
