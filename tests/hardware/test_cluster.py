from dataclasses import replace

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind

GPU = Gpu(name="g", num_sms=84, gemm_flops=1e14, hbm_bytes_per_s=6e11, l2_bytes=6, memory_bytes=48)
WIDE = Link(kind=LinkKind.NVLINK, bytes_per_s=44e9, hop_s=1e-6)
NARROW = Link(kind=LinkKind.NETWORK, bytes_per_s=11e9, hop_s=5e-6)
CLUSTER = Cluster(name="c", gpu=GPU, gpus_per_node=8, num_nodes=3, intra=WIDE, inter=NARROW)


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (24, 3)])
def test_consecutive_ranks_fill_one_node_after_the_other(num_ranks: int, num_nodes: int) -> None:
    assert CLUSTER.num_nodes_of(num_ranks) == num_nodes
    assert CLUSTER.link_between(num_ranks) is (WIDE if num_nodes == 1 else NARROW)


@pytest.mark.parametrize(
    ("num_ranks", "num_nodes", "per_node"), [(2, 2, 1), (6, 3, 2), (8, 2, 4), (16, 2, 8), (24, 3, 8)]
)
def test_ranks_spread_over_nodes_share_the_ports_with_their_neighbours(
    num_ranks: int, num_nodes: int, per_node: int
) -> None:
    assert CLUSTER.num_nodes_of(num_ranks, num_nodes) == num_nodes
    assert CLUSTER.link_between(num_ranks, num_nodes).bytes_per_s == pytest.approx(11e9 * per_node / 8)
    seen = CLUSTER.part(num_ranks, num_nodes)
    assert (seen.num_nodes, seen.gpus_per_node) == (num_nodes, per_node)
    assert seen.inter == CLUSTER.link_between(num_ranks, num_nodes)


def test_ranks_on_one_node_keep_the_wire_inside_it() -> None:
    assert CLUSTER.link_between(4, 1) is WIDE
    assert CLUSTER.part(4).num_gpus == 4


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(4, 4), (18, 2)])
def test_ranks_that_their_nodes_cannot_hold_are_refused(num_ranks: int, num_nodes: int) -> None:
    with pytest.raises(JobError, match=f"{num_ranks} ranks on {num_nodes} nodes do not fit"):
        CLUSTER.num_nodes_of(num_ranks, num_nodes)


def test_more_ranks_than_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(JobError, match=r"25 ranks do not fit: cluster 'c' has 24 GPUs \(3 x 8\)"):
        CLUSTER.num_nodes_of(25)


@pytest.mark.parametrize("field", ["num_sms", "gemm_flops", "hbm_bytes_per_s", "l2_bytes", "memory_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_gpu_needs_positive_finite_numbers(field: str, value: float) -> None:
    with pytest.raises(JobError, match=field):
        replace(GPU, **{field: value})


@pytest.mark.parametrize("field", ["bytes_per_s", "hop_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_link_needs_positive_finite_numbers(field: str, value: float) -> None:
    with pytest.raises(JobError, match=field):
        replace(WIDE, **{field: value})


@pytest.mark.parametrize("field", ["gpus_per_node", "num_nodes"])
def test_a_cluster_has_at_least_one_of_each(field: str) -> None:
    with pytest.raises(JobError, match=f"{field} is 0"):
        replace(CLUSTER, **{field: 0})
