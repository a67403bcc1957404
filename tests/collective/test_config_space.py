import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import Algorithm, CommConfig, ConfigSpace, Protocol, Subspace, common_space
from lagom_overlap.collective.config import UNTOUCHED
from lagom_overlap.errors import SpaceError

RING = Subspace(
    algorithm=Algorithm.RING,
    protocol=Protocol.SIMPLE,
    num_channels=(1, 2, 4),
    num_threads=(128,),
    chunk_bytes=(64, 256),
)
TREE = Subspace(algorithm=Algorithm.TREE, protocol=Protocol.LL128, num_channels=(2, 8), chunk_bytes=(64,))
SPACE = ConfigSpace((RING, TREE))

axes = st.lists(st.integers(1, 1000), min_size=1, max_size=5, unique=True).map(lambda values: tuple(sorted(values)))
knobs = st.one_of(st.just((None,)), axes)
subspaces = st.builds(Subspace, num_channels=knobs, num_threads=knobs, chunk_bytes=knobs)


@given(subspaces)
def test_iteration_visits_every_lattice_point_once_and_indices_lead_back(subspace: Subspace) -> None:
    configs = list(subspace)
    assert len(configs) == len(set(configs)) == len(subspace)
    for config in configs:
        assert config in subspace
        assert subspace.at(subspace.nearest(config)) == config


@given(subspaces, st.integers(1, 1000), st.integers(1, 1000))
def test_the_nearest_point_is_the_nearest_by_search_over_each_axis(
    subspace: Subspace, channels: int, chunk: int
) -> None:
    found = subspace.at(subspace.nearest(CommConfig(num_channels=channels, chunk_bytes=chunk)))
    for value, axis, wanted in (
        (found.num_channels, subspace.num_channels, channels),
        (found.chunk_bytes, subspace.chunk_bytes, chunk),
    ):
        if axis == (None,):
            assert value is None
        else:
            assert value is not None
            assert abs(value - wanted) == min(abs(v - wanted) for v in axis if v is not None)


def test_a_knob_left_to_the_engine_is_nearest_to_the_largest_value() -> None:
    assert RING.at(RING.nearest(UNTOUCHED)) == RING.maximum


def test_minimum_and_maximum_are_the_corners() -> None:
    assert (RING.minimum.num_channels, RING.minimum.chunk_bytes) == (1, 64)
    assert (RING.maximum.num_channels, RING.maximum.chunk_bytes) == (4, 256)


def test_a_space_is_the_union_of_its_subspaces_in_order() -> None:
    assert len(SPACE) == 3 * 1 * 2 + 2 * 1 * 1 == len(list(SPACE))
    assert list(SPACE)[: len(RING)] == list(RING)


def test_membership_minds_algorithm_and_protocol() -> None:
    inside = CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.LL128, num_channels=2, chunk_bytes=64)
    foreign = CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.SIMPLE, num_channels=2, chunk_bytes=64)
    assert inside in SPACE
    assert foreign not in SPACE
    assert UNTOUCHED not in SPACE
    assert "ring" not in SPACE


def test_the_subspace_of_a_configuration_is_found_by_implementation_else_the_first() -> None:
    assert SPACE.subspace_of(CommConfig(algorithm=Algorithm.TREE, protocol=Protocol.LL128)) is TREE
    assert SPACE.subspace_of(UNTOUCHED) is RING


@pytest.mark.parametrize("axis", [(2, 1), (1, 1), (0, 1), (1, None), (None, 1), (-3,)])
def test_an_axis_must_increase_from_one(axis: tuple[int | None, ...]) -> None:
    with pytest.raises(SpaceError, match=r"num_channels is .* must be increasing whole numbers"):
        Subspace(num_channels=axis)


def test_empty_axes_and_spaces_are_refused() -> None:
    with pytest.raises(SpaceError, match="chunk_bytes allows no value"):
        Subspace(chunk_bytes=())
    with pytest.raises(SpaceError, match="at least one subspace"):
        ConfigSpace(())


@pytest.mark.parametrize("field", ["num_channels", "num_threads", "chunk_bytes"])
def test_a_knob_is_absent_or_at_least_one(field: str) -> None:
    assert CommConfig(**{field: None}).is_untouched
    assert not CommConfig(**{field: 1}).is_untouched
    with pytest.raises(SpaceError, match=f"{field} is 0, must be at least 1"):
        CommConfig(**{field: 0})


def test_algorithms_and_protocols_stand_in_nccls_order() -> None:
    # The plug-in header of NCCL 2.30: NCCL_ALGO_TREE 0 ... NCCL_ALGO_PAT 6; NCCL_PROTO_LL 0, LL128 1, SIMPLE 2.
    numbers = {"tree": 0, "ring": 1, "collnet_direct": 2, "collnet_chain": 3, "nvls": 4, "nvls_tree": 5, "pat": 6}
    assert {a.value: i for i, a in enumerate(Algorithm)} == numbers
    assert [p.value for p in Protocol] == ["ll", "ll128", "simple"]


def test_of_defaults_that_differ_a_common_space_has_the_smallest_where_all_are_known() -> None:
    one = ConfigSpace((RING,), CommConfig(num_channels=24, chunk_bytes=64))
    other = ConfigSpace((RING,), CommConfig(num_channels=16))
    found = common_space([one, other, None]), common_space([one, other]), common_space([one, one])
    assert [None if space is None else space.default for space in found] == [
        None,
        CommConfig(num_channels=16),
        one.default,
    ]


def test_a_subspace_of_more_settings_than_can_be_listed_is_refused():
    """Random search lists them: 2,000 values of each knob, a file of 30 KB, were a MemoryError."""
    many = tuple(range(1, 2001))
    with pytest.raises(SpaceError, match="allow 2000 x 2000 x 2000 = 8000000000 settings, at most 4194304 may be"):
        Subspace(num_channels=many, num_threads=many, chunk_bytes=many)
    assert len(Subspace(num_channels=many, num_threads=many[:2000])) == 4_000_000
