import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost.nccl.copy_engine import copy_engine_available, copy_engine_limits
from lagom_overlap.cost.nccl.topology import load_topology
from lagom_overlap.cost.nccl.wire import FittedLink
from lagom_overlap.units import MIB


def test_copy_engines_carry_copies_inside_an_nvlink_node_only() -> None:
    node = load_topology("h100_dgx")
    able = {kind for kind in CollectiveKind if copy_engine_available(kind, node)}
    assert able == {CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL}
    for name in ("h100_2_nodes", "a40_8_amd"):
        assert not copy_engine_available(CollectiveKind.ALL_GATHER, load_topology(name))


def test_a_gather_moves_each_part_to_every_peer_and_waits_twice() -> None:
    terms = copy_engine_limits(Collective(CollectiveKind.ALL_GATHER, 64 * MIB, 8), load_topology("h100_dgx"))
    # Two waits of two hops of 3.4 us, 7/8 of 64 MiB at 360 GB/s.
    assert terms.seconds(FittedLink(360e9)) == pytest.approx(13.6e-6 + 7 / 8 * 64 * MIB / 360e9)


def test_sums_and_other_ranks_are_refused() -> None:
    node = load_topology("h100_dgx")
    for collective in (Collective(CollectiveKind.ALL_REDUCE, MIB, 8), Collective(CollectiveKind.ALL_GATHER, MIB, 4)):
        with pytest.raises(ValueError, match="copy engines do not carry"):
            copy_engine_limits(collective, node)
