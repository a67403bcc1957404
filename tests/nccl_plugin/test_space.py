"""What may be tried through the plug-in: by what NCCL offers, and by what a map of the box refuses."""

import pytest

from lagom_overlap.collective import Algorithm, CollectiveKind, ConfigSpace, Protocol
from lagom_overlap.errors import SpaceError
from lagom_overlap.nccl_plugin.capability import CapabilityMap, Knobs, MapKey, MapRow, SettingOutcome
from lagom_overlap.nccl_plugin.space import tuner_space
from lagom_overlap.units import KIB, MIB

TREE, RING = (Algorithm.TREE, Protocol.SIMPLE), (Algorithm.RING, Protocol.SIMPLE)
OFFERED = (TREE, RING)
ALL_REDUCE = CollectiveKind.ALL_REDUCE


def map_of(*rows: tuple[Knobs, Knobs, SettingOutcome], max_channels: int = 24) -> CapabilityMap:
    return CapabilityMap(
        key=MapKey(nccl=(2, 30, 7), gpu="H100", num_gpus=8, ranks_per_gpu=1, topology="0" * 16),
        measured_on="2026-11-22",
        max_channels=max_channels,
        rows=tuple(
            MapRow(kind=ALL_REDUCE, num_bytes=16 * MIB, asked=asked, ran=ran, outcome=outcome)
            for asked, ran, outcome in rows
        ),
    )


def axis(space: ConfigSpace, way: tuple[Algorithm | None, Protocol | None], knob: str) -> tuple[int, ...]:
    (found,) = [each for each in space.subspaces if (each.algorithm, each.protocol) == way]
    values: tuple[int, ...] = getattr(found, knob)
    return values


def test_a_trees_simple_chunk_ends_at_512_kib_as_the_h100_clamped_it() -> None:
    space = tuner_space(OFFERED, 6, kind=ALL_REDUCE)
    assert axis(space, TREE, "chunk_bytes") == tuple(size * KIB for size in (64, 128, 256, 512))
    assert axis(space, RING, "chunk_bytes")[-1] == 2 * MIB
    asked = tuner_space(OFFERED, 6, kind=ALL_REDUCE, algorithms=[Algorithm.TREE], chunk_bytes=[512 * KIB, MIB])
    assert axis(asked, TREE, "chunk_bytes") == (512 * KIB,)


def test_a_chunk_below_the_protocols_grain_is_none_of_its_values() -> None:
    """The plug-in would round it up to the grain: two settings with one effect."""
    low = (Algorithm.RING, Protocol.LL)
    asked = [16, 512, 1920, 64 * KIB]
    space = tuner_space([RING, low], 6, kind=ALL_REDUCE, algorithms=[Algorithm.RING], chunk_bytes=asked)
    assert axis(space, RING, "chunk_bytes") == (512, 1920, 64 * KIB)
    assert axis(space, low, "chunk_bytes") == (16, 512, 1920)


def test_so_does_that_of_broadcast_and_reduce_whose_rings_have_one_step_a_chunk() -> None:
    for kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE):
        space = tuner_space([RING, (Algorithm.RING, Protocol.LL128)], 6, kind=kind)
        assert axis(space, RING, "chunk_bytes")[-1] == axis(space, (None, None), "chunk_bytes")[-1] == 512 * KIB
        assert axis(space, (Algorithm.RING, Protocol.LL128), "chunk_bytes")[-1] == 576000


def test_no_more_channels_than_the_communicator_of_this_box_has() -> None:
    space = tuner_space(OFFERED, 6, kind=ALL_REDUCE, capabilities=map_of())
    for way in (TREE, RING, (None, None)):
        assert axis(space, way, "num_channels") == (1, 2, 4, 8, 16)


def test_what_the_map_refuses_is_not_tried_for_its_kind_and_is_for_others() -> None:
    found = map_of(
        (Knobs(*RING, 8, 64 * KIB), Knobs(*RING, 8, 32 * KIB), SettingOutcome.CLAMPED),
        (Knobs(*TREE, 8), Knobs(*TREE, 8), SettingOutcome.WRONG),
    )
    space = tuner_space(OFFERED, 6, kind=ALL_REDUCE, capabilities=found)
    assert axis(space, RING, "chunk_bytes")[0] == 128 * KIB
    assert TREE not in {(each.algorithm, each.protocol) for each in space.subspaces}
    other = tuner_space(OFFERED, 6, kind=CollectiveKind.ALL_GATHER, capabilities=found)
    assert axis(other, RING, "chunk_bytes")[0] == 64 * KIB


def test_a_space_that_the_map_empties_is_refused_with_its_name() -> None:
    with pytest.raises(SpaceError, match="capability map"):
        tuner_space(OFFERED, 6, kind=ALL_REDUCE, num_channels=[32], capabilities=map_of())
    assert tuner_space(OFFERED, 6, kind=ALL_REDUCE, num_channels=[32])


@pytest.mark.parametrize("algorithm", [Algorithm.NVLS, Algorithm.NVLS_TREE])
def test_chunks_of_the_switchs_algorithms_end_at_128_kib_their_step(algorithm: Algorithm) -> None:
    """NCCL's buffers hold no more for them, and what it lets pass beyond runs over their end (2.30)."""
    way = (algorithm, Protocol.SIMPLE)
    space = tuner_space((RING, way), 6, kind=ALL_REDUCE)
    assert axis(space, way, "chunk_bytes") == tuple(size * KIB for size in (16, 32, 64, 128))
    asked = tuner_space((way,), 6, kind=ALL_REDUCE, algorithms=[algorithm], chunk_bytes=[128 * KIB, 256 * KIB])
    assert axis(asked, way, "chunk_bytes") == (128 * KIB,)
