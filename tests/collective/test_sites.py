"""A call's place in the step follows from the calls alone, and is found again after calls that do not fit."""

from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import CallCycle, CollectiveKind, CommunicatorId, ConfigKey

RANKS = CommunicatorId(description="fsdp", ranks=(0, 1))
GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
MIB = 1 << 20


def step_of(*calls: tuple[CollectiveKind, int]) -> list[ConfigKey]:
    seen: dict[tuple[CollectiveKind, int], int] = {}
    keys = []
    for call in calls:
        occurrence = seen.get(call, 0)
        seen[call] = occurrence + 1
        keys.append(ConfigKey(communicator=RANKS, kind=call[0], num_bytes=call[1], occurrence=occurrence))
    return keys


FORWARD = [(GATHER, 8 * MIB), (GATHER, 2 * MIB), (GATHER, 2 * MIB)]
BACKWARD = [(GATHER, 2 * MIB), (SCATTER, 2 * MIB), (GATHER, 2 * MIB), (SCATTER, 2 * MIB), (SCATTER, 8 * MIB)]
STEP = FORWARD + BACKWARD


def followed(cycle: CallCycle, calls: list[tuple[CollectiveKind, int]]) -> list[int | None]:
    keys = [cycle.next_key(*call) for call in calls]
    return [None if key is None else key.occurrence for key in keys]


def test_regular_steps_are_counted_as_a_step_counts_them() -> None:
    cycle = CallCycle(step_of(*STEP))
    for _ in range(3):
        assert followed(cycle, STEP) == [0, 0, 1, 2, 0, 3, 1, 0]


def test_an_evaluation_is_followed_by_right_places_again() -> None:
    cycle = CallCycle(step_of(*STEP))
    for _ in range(3):
        assert followed(cycle, FORWARD) == [0, 0, 1]
    assert followed(cycle, STEP) == [0, 0, 1, 2, 0, 3, 1, 0]


def test_calls_of_no_site_take_no_place() -> None:
    cycle = CallCycle(step_of(*STEP))
    assert followed(cycle, [STEP[0], (GATHER, 3 * MIB), STEP[1]]) == [0, None, 0]
    assert CallCycle([]).next_key(GATHER, MIB) is None


def test_classes_of_sizes_stand_for_their_sizes() -> None:
    cycle = CallCycle(step_of((GATHER, 2 * MIB), (GATHER, 2 * MIB)), size_octaves=1)
    assert followed(cycle, [(GATHER, 3 * MIB), (GATHER, 2 * MIB + 4), (GATHER, 4 * MIB)]) == [0, 1, None]


CALLS = st.lists(st.tuples(st.sampled_from([GATHER, SCATTER]), st.sampled_from([MIB, 2 * MIB, 4 * MIB])), max_size=12)


@given(step=CALLS, before=CALLS)
def test_whatever_came_before_two_ranks_with_one_sequence_agree_and_regular_steps_settle(
    step: list[tuple[CollectiveKind, int]], before: list[tuple[CollectiveKind, int]]
) -> None:
    one, other = CallCycle(step_of(*step)), CallCycle(step_of(*step))
    assert followed(one, before) == followed(other, before)
    regular = followed(CallCycle(step_of(*step)), step)
    if any(step.count(call) == 1 for call in step):  # a site that is alone tells the place
        followed(one, step)
        assert followed(one, step) == regular
