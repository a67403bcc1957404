"""What `lagom tune --from-trace` may try is what a route of ours can set in the job that was traced."""

from dataclasses import replace

import pytest

from lagom_overlap.backends.traced import settable
from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.nccl_plugin.support import NcclVersion
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.units import MIB

MODEL = ContentionModel(load_preset("h100_dgx"), load_profile("plausible"))
RELEASES: tuple[NcclVersion, ...] = ((2, 21, 5), (2, 27, 5), (2, 28, 9), (2, 30, 7), (2, 31, 2))


def tried(
    kind: CollectiveKind, reach: KnobReach, nccl: NcclVersion, channels: int = 24, most: int = 24
) -> tuple[CommConfig, set[CommConfig]]:
    """What the trace ran, with this many channels on a communicator of so many, and everything that may be tried."""
    collective = Collective(kind, 64 * MIB, 8)
    default = replace(MODEL.default_config(collective), num_threads=None, num_channels=channels)
    space = settable(MODEL.space(collective), default, reach=reach, most_channels=most, nccl=nccl)
    return default, {config for part in space.subspaces for config in part}


@pytest.mark.parametrize("nccl", RELEASES)
def test_of_an_all_to_all_nothing_but_fewer_channels_is_tried(nccl: NcclVersion) -> None:
    default, configs = tried(CollectiveKind.ALL_TO_ALL, KnobReach.P2P_CHANNELS, nccl)
    assert {replace(config, num_channels=24) for config in configs} <= {default}
    counts = {config.num_channels for config in configs} - {24}
    assert counts == {1, 2, 4, 8, 16}  # NCCL rounds a cap up to a power of two


@pytest.mark.parametrize("nccl", RELEASES)
def test_no_collective_gets_more_channels_than_its_communicator_has(nccl: NcclVersion) -> None:
    _, configs = tried(CollectiveKind.ALL_GATHER, KnobReach.TUNER, nccl)
    assert max(config.num_channels or 0 for config in configs) <= 24
    assert len({config.num_channels for config in configs}) > 3
    _, configs = tried(CollectiveKind.ALL_GATHER, KnobReach.TUNER, nccl, channels=4, most=8)
    assert max(config.num_channels or 0 for config in configs) <= 8  # the model's own space has 24


def test_from_2_31_on_a_tuner_can_only_lower_the_channels() -> None:
    for nccl, most in (((2, 30, 7), 24), ((2, 31, 2), 8)):
        _, configs = tried(CollectiveKind.ALL_GATHER, KnobReach.TUNER, nccl, channels=8)
        assert max(config.num_channels or 0 for config in configs) == most


def test_a_chunk_is_tried_only_where_nccl_asks_a_tuner_for_it_and_then_no_larger_one() -> None:
    for nccl, is_asked in (((2, 27, 5), False), ((2, 28, 9), False), ((2, 30, 7), True)):
        default, configs = tried(CollectiveKind.ALL_GATHER, KnobReach.TUNER, nccl)
        way = (default.algorithm, default.protocol)
        own = {config.chunk_bytes for config in configs if (config.algorithm, config.protocol) == way}
        assert (own != {default.chunk_bytes}) is is_asked
        assert max(size or 0 for size in own) <= (default.chunk_bytes or 0)


def test_what_no_knob_reaches_and_a_release_without_routes_stay_as_they_were() -> None:
    for kind, reach, nccl in (
        (CollectiveKind.ALL_GATHER, KnobReach.NONE, (2, 30, 7)),
        (CollectiveKind.ALL_GATHER, KnobReach.TUNER, (2, 16, 0)),
        (CollectiveKind.ALL_TO_ALL, KnobReach.P2P_CHANNELS, (2, 16, 0)),
    ):
        default, configs = tried(kind, reach, nccl)
        assert configs == {default}
