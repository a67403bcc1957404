"""Channels that NCCL launches, logged from the host code of NCCL 2.30.7 on emulated H100s behind an NVSwitch."""

import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl.choice import launched_channels
from lagom_overlap.cost.nccl.machines import default_choice
from lagom_overlap.hardware import load_preset

K = CollectiveKind
LOGGED = [
    (K.ALL_REDUCE, 2, 262_144, 22),
    (K.ALL_GATHER, 2, 262_144, 16),
    (K.BROADCAST, 2, 262_144, 16),
    (K.REDUCE, 2, 524_288, 22),
    (K.REDUCE_SCATTER, 2, 1_048_576, 22),
    (K.ALL_REDUCE, 2, 3_000_000, 23),
    (K.ALL_TO_ALL, 2, 1024, 2),
    (K.ALL_TO_ALL, 2, 524_288, 8),
    (K.ALL_TO_ALL, 4, 65_536, 4),
    (K.ALL_TO_ALL, 4, 1_048_576, 16),
    (K.ALL_TO_ALL, 8, 131_072, 8),
    (K.ALL_TO_ALL, 8, 1_048_576, 16),
    (K.ALL_TO_ALL, 8, 2_097_152, 32),
]


@pytest.mark.parametrize(("kind", "num_ranks", "num_bytes", "channels"), LOGGED)
def test_as_many_channels_as_nccl_launched(kind: CollectiveKind, num_ranks: int, num_bytes: int, channels: int) -> None:
    choice = default_choice(Collective(kind, num_bytes, num_ranks), load_preset("h100_dgx"))
    assert choice.config.num_channels == channels


def test_the_least_traffic_of_a_channel_grew_with_the_releases() -> None:
    """128 KiB of an LL all-gather of two ranks, by hand: 1 MiB of traffic in cells of 32 KiB, of 16 KiB, undivided."""
    collective = Collective(K.ALL_GATHER, 262_144, 2)
    releases = (23007, 22900, 22899, 22300, 22299)
    launched = [launched_channels(collective, Algorithm.RING, Protocol.LL, 24, each) for each in releases]
    assert launched == [16, 16, 22, 22, 24]
