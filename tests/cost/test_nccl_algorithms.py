"""Which ways NCCL has for a collective, by cluster: its own table beyond rings, rings and trees under the paper's."""

import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl_algorithms import BEYOND_RINGS, algorithms_of, largest_chunk_bytes, protocols_of
from lagom_overlap.cost.profile import Collectives
from lagom_overlap.hardware import LinkKind, load_preset
from lagom_overlap.units import KIB, MIB

AR, AG, A2A = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL
RING, TREE, NVLS, NVLS_TREE, PAT = (
    Algorithm.RING, Algorithm.TREE, Algorithm.NVLS, Algorithm.NVLS_TREE, Algorithm.PAT
)  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "kind", "num_ranks", "num_nodes", "expected"),
    [
        ("a100_dgx", AR, 8, None, (RING, TREE)),  # no NVLS before Hopper
        ("a100_dgx", AG, 8, None, (RING,)),
        ("h100_dgx", AR, 8, None, (RING, TREE, NVLS)),
        ("h100_dgx", AR, 16, None, (RING, TREE, NVLS_TREE)),  # NVLS over nodes needs CollNet
        ("h100_dgx", AG, 2, 2, (RING, PAT)),  # one GPU per node
        ("h100_dgx", A2A, 8, None, (None,)),
        ("a40_pcie", AR, 8, None, (RING, TREE)),
    ],
)
def test_a_machine_offers_what_nccl_s_table_has_there(
    preset: str, kind: CollectiveKind, num_ranks: int, num_nodes: int | None, expected: tuple[Algorithm | None, ...]
) -> None:
    collective = Collective(kind, MIB, num_ranks, num_nodes)
    cluster = load_preset(preset, 2)
    assert set(algorithms_of(collective, cluster, Collectives.NCCL)) == set(expected)
    plain = tuple(way for way in expected if way not in BEYOND_RINGS)
    assert algorithms_of(collective, cluster, Collectives.PAPER) == plain


@pytest.mark.parametrize(
    ("preset", "num_nodes", "has_ll128", "paper_has_it"),
    [
        ("a100_dgx", 1, True, True),
        ("h100_dgx", 2, True, True),
        ("a40_nvlink", 1, False, True),  # bridged pairs meet over PCIe: NCCL's graphs say SYS
        ("a40_nvlink", 2, False, True),
        ("a40_pcie", 1, False, False),
    ],
)
def test_ll128_is_where_nccl_s_table_has_it(preset: str, num_nodes: int, has_ll128: bool, paper_has_it: bool) -> None:
    collective, cluster = Collective(AR, MIB, 8 * num_nodes), load_preset(preset, num_nodes)
    for collectives, expected in ((Collectives.NCCL, has_ll128), (Collectives.PAPER, paper_has_it)):
        for algorithm in (RING, TREE):
            assert (Protocol.LL128 in protocols_of(collective, algorithm, cluster, collectives)) == expected


def test_point_to_point_has_no_ll128_and_nvls_simple_only() -> None:
    cluster = load_preset("h100_dgx")
    assert Protocol.LL128 not in protocols_of(Collective(A2A, MIB, 8), None, cluster, Collectives.NCCL)
    assert protocols_of(Collective(AR, MIB, 8), NVLS, cluster, Collectives.NCCL) == (Protocol.SIMPLE,)


@pytest.mark.parametrize(
    ("kind", "algorithm", "protocol", "intra", "num_bytes"),
    [
        (AR, RING, Protocol.SIMPLE, LinkKind.NVLINK, 2 * MIB),
        (AR, TREE, Protocol.SIMPLE, LinkKind.NVLINK, 512 * KIB),
        (AR, NVLS, Protocol.SIMPLE, LinkKind.NVLINK, 128 * KIB),
        (AG, PAT, Protocol.SIMPLE, LinkKind.NVLINK, 512 * KIB),
        (AR, RING, Protocol.LL, LinkKind.PCIE, 32 * KIB),
        (AR, RING, Protocol.LL128, LinkKind.NVLINK, 576_000),
        (A2A, None, Protocol.SIMPLE, LinkKind.NVLINK, 512 * KIB),
        (A2A, None, Protocol.SIMPLE, LinkKind.PCIE, 128 * KIB),
        (CollectiveKind.BROADCAST, RING, Protocol.SIMPLE, LinkKind.NVLINK, 512 * KIB),
    ],
)
def test_the_largest_chunk_is_nccl_s_buffer(
    kind: CollectiveKind, algorithm: Algorithm | None, protocol: Protocol, intra: LinkKind, num_bytes: int
) -> None:
    """NCCL 2.30.7: steps of 512 KiB (Simple), 64 KiB (LL, half of it data), 600 KiB (LL128, 15/16 of it data)."""
    assert largest_chunk_bytes(kind, algorithm, protocol, intra) == num_bytes
