import pytest

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig
from lagom_overlap.engines.gloo_space import check_collective, check_config, gloo_space, whole_message
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.units import KIB, MIB


def test_a_32_mib_message_is_offered_slices_from_512_kib_to_a_quarter_of_it() -> None:
    subspace = gloo_space(Collective(CollectiveKind.ALL_GATHER, 32 * MIB, 2)).subspaces[0]
    assert subspace.num_channels == (1, 2, 4, 8)
    assert subspace.chunk_bytes == (512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
    assert (subspace.algorithm, subspace.protocol, subspace.transport) == (None, None, None)
    assert subspace.num_threads == (None,)


def test_a_small_message_still_has_one_slice_size() -> None:
    assert gloo_space(Collective(CollectiveKind.ALL_REDUCE, 4, 2)).subspaces[0].chunk_bytes == (512 * KIB,)


def test_the_engines_default_is_one_slice_on_one_channel() -> None:
    collective = Collective(CollectiveKind.ALL_GATHER, 3 * MIB, 2)
    config = whole_message(collective)
    assert gloo_space(collective).default == config
    assert (config.num_channels, config.chunk_bytes) == (1, 3 * MIB)
    check_config(whole_message(Collective(CollectiveKind.ALL_GATHER, 8, 2)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CommConfig(algorithm=Algorithm.RING), "algorithm is ring"),
        (CommConfig(num_threads=64), "num_threads is 64"),
        (CommConfig(num_channels=9), "num_channels is 9, gloo offers 1 to 8"),
        (CommConfig(chunk_bytes=512 * KIB - 1), "chunk_bytes is 524287"),
    ],
)
def test_what_gloo_cannot_set_is_refused_by_name_and_value(config: CommConfig, message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        check_config(config)


def test_other_kinds_and_unequal_parts_are_refused() -> None:
    with pytest.raises(BackendError, match="cannot run broadcast"):
        check_collective(Collective(CollectiveKind.BROADCAST, 64, 2))
    with pytest.raises(BackendError, match=r"100 bytes over 3 ranks.*multiple of 12"):
        check_collective(Collective(CollectiveKind.ALL_GATHER, 100, 3))
    check_collective(Collective(CollectiveKind.ALL_REDUCE, 100, 3))
