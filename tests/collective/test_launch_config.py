"""The computation's side as values: what may be set, and how it stands next to the collectives' configurations."""

import copy
import pickle

import pytest

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    CommConfig,
    LaunchConfig,
    LaunchedAssignment,
    LaunchOrder,
    LaunchSpace,
    StreamPriority,
    launch_of,
    launched,
    one_launch,
)
from lagom_overlap.errors import SpaceError

CONFIGS = (CommConfig(num_channels=4), CommConfig(num_channels=8))
CARVED = LaunchConfig(sm_carveout=8)


def test_a_plain_tuple_leaves_the_computation_untouched() -> None:
    assert launch_of(CONFIGS) == UNTOUCHED_LAUNCH
    assert launched(CONFIGS, UNTOUCHED_LAUNCH) == CONFIGS
    assert type(launched(launched(CONFIGS, CARVED), UNTOUCHED_LAUNCH)) is tuple


def test_both_sides_count_when_assignments_are_compared() -> None:
    mine, same = launched(CONFIGS, CARVED), launched(list(CONFIGS), LaunchConfig(sm_carveout=8))
    other = launched(CONFIGS, LaunchConfig(sm_carveout=4))
    assert mine == same
    assert hash(mine) == hash(same)
    for different in (CONFIGS, other):
        assert mine != different
        assert different != mine
        assert not mine == different  # noqa: SIM201  both operators are defined
    assert len({mine, same, CONFIGS, other}) == 3
    assert mine != list(CONFIGS)


def test_it_reads_like_any_assignment_and_what_is_derived_from_it_is_untouched() -> None:
    mine = launched(CONFIGS, CARVED)
    assert len(mine) == 2
    assert tuple(config.num_channels for config in mine) == (4, 8)
    assert launch_of(mine) == CARVED
    assert launch_of(mine[:1]) == UNTOUCHED_LAUNCH
    assert launch_of((*mine[:1], CommConfig())) == UNTOUCHED_LAUNCH


def test_it_survives_pickling_and_copying() -> None:
    mine = launched(CONFIGS, LaunchConfig(sm_carveout=2, order=LaunchOrder.COMPUTATION_FIRST))
    for twin in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine), copy.copy(mine)):
        assert twin == mine
        assert launch_of(twin) == launch_of(mine)


def test_an_untouched_one_is_no_value_of_its_own() -> None:
    with pytest.raises(ValueError, match="plain tuple"):
        LaunchedAssignment(CONFIGS, UNTOUCHED_LAUNCH)


def test_a_space_holds_every_combination_and_leaves_each_knob_alone_too() -> None:
    space = LaunchSpace(sm_carveouts=(0, 8), orders=(LaunchOrder.COMPUTATION_FIRST,), priorities=tuple(StreamPriority))
    launches = list(space)
    assert len(launches) == len(space) == 3 * 2 * 3
    assert len(set(launches)) == len(launches)
    assert launches[0] == UNTOUCHED_LAUNCH
    assert all(launch in space for launch in launches)
    assert LaunchConfig(sm_carveout=4) not in space
    assert not space.is_untouched
    assert LaunchSpace().is_untouched


@pytest.mark.parametrize(("channels", "found"), [(0, 0), (1, 4), (4, 4), (5, 16), (16, 16), (17, None)])
def test_the_matching_carve_out_is_the_smallest_that_holds_the_channels(channels: int, found: int | None) -> None:
    assert LaunchSpace(sm_carveouts=(0, 4, 16)).carveout_for(channels) == found


def test_impossible_values_are_refused_by_name() -> None:
    with pytest.raises(SpaceError, match="sm_carveout is -1"):
        LaunchConfig(sm_carveout=-1)
    for carved in ((4, 4), (8, 4), (-1, 2)):
        with pytest.raises(SpaceError, match="sm_carveout is"):
            LaunchSpace(sm_carveouts=carved)
    with pytest.raises(SpaceError, match="launch_order is"):
        LaunchSpace(orders=(LaunchOrder.COLLECTIVE_FIRST,) * 2)


def test_a_launch_in_words() -> None:
    every = LaunchConfig(sm_carveout=8, order=LaunchOrder.COLLECTIVE_FIRST, priority=StreamPriority.HIGH)
    assert str(every) == "8 SMs carved out, collective first, high stream priority"
    assert str(UNTOUCHED_LAUNCH) == "untouched"


def test_one_launch_for_several_has_the_largest_carve_out_and_what_all_share() -> None:
    first = LaunchOrder.COMPUTATION_FIRST
    four = LaunchConfig(sm_carveout=4, order=first, priority=StreamPriority.NORMAL)
    eight = LaunchConfig(sm_carveout=8, order=first)
    assert one_launch([four, eight]) == LaunchConfig(sm_carveout=8, order=first)
    assert one_launch([LaunchConfig(sm_carveout=0)]) == LaunchConfig(sm_carveout=0)
    assert one_launch([]) == one_launch([UNTOUCHED_LAUNCH]) == UNTOUCHED_LAUNCH
