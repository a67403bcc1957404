"""Windows, groups and times of steps worked by hand."""

from dataclasses import replace
from random import Random

import pytest

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigSpace, Subspace
from lagom_overlap.online.problems import job_problems
from lagom_overlap.online.program import (
    ProgramEvent,
    events_of,
    fingerprint,
    groups_of,
    median_times,
    owed_s,
    program_of,
    times_of,
    waits_of,
)
from lagom_overlap.online.ranks.messages import Report, decode, encode, merged
from lagom_overlap.online.routes.base import CallRecord, StepRecord
from lagom_overlap.tuners.problem import Measurement

SPACE = ConfigSpace((Subspace(num_channels=(1, 2)),))
GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


def call(  # noqa: PLR0917 - read in columns below
    kind: CollectiveKind,
    occurrence: int,
    issued: float,
    ran: tuple[float, float],
    joined: tuple[float, float] | None,
    ranks: tuple[int, ...] = (0, 1),
) -> CallRecord:
    communicator = CommunicatorId(description="fsdp", ranks=ranks)
    return CallRecord(
        key=ConfigKey(communicator=communicator, kind=kind, num_bytes=1 << 20, occurrence=occurrence),
        issued_s=issued,
        begun_s=ran[0],
        ended_s=ran[1],
        joined_s=None if joined is None else joined[0],
        resumed_s=None if joined is None else joined[1],
    )


def backward() -> StepRecord:
    """Two layers: gather 0 is waited for at once; gather 1 runs during layer 0, scatter 0 during layer 1.

    0      1                5      6                10     12
    |g0----|g1 issued  comp |join g1
                       s0 issued at 4.9 (late)  comp |join s0
    """
    return StepRecord(
        duration_s=14.0,
        calls=(
            call(GATHER, 0, 0.0, (0.0, 1.0), (0.0, 1.0)),
            call(GATHER, 1, 1.0, (1.0, 6.0), (5.0, 6.0)),
            call(SCATTER, 0, 4.9, (6.0, 12.0), (10.0, 12.0)),
        ),
    )


def test_events_are_in_the_order_of_the_computation() -> None:
    assert events_of(backward()) == (
        ProgramEvent(0, is_join=False),
        ProgramEvent(0, is_join=True),
        ProgramEvent(1, is_join=False),
        ProgramEvent(2, is_join=False),
        ProgramEvent(1, is_join=True),
        ProgramEvent(2, is_join=True),
    )


def test_a_call_that_hardly_any_computation_follows_belongs_to_the_next_window() -> None:
    """Scatter 0 is issued 0.1 before the join of a window of 4: it runs during what follows."""
    record = backward()
    extra = call(GATHER, 2, 6.0, (12.0, 13.0), (10.5, 13.0))
    calls = (*record.calls[:2], record.calls[2], extra)
    program = program_of([StepRecord(duration_s=14.0, calls=calls)], [SPACE] * 4)
    assert program.late == (False, False, True, False)
    names = [group.name for group in groups_of(program)]
    assert len(names) == 2, "the first two windows are equal"
    assert names[1].startswith("reduce_scatter 1 MiB (1048576 B) on fsdp/2 + all_gather")


def test_a_call_that_the_rest_of_its_window_hides_belongs_to_it() -> None:
    """FSDP2's backward: the scatter is issued right before the gather's join, and waited for after a whole layer."""
    calls = (
        call(GATHER, 0, 0.0, (0.0, 2.0), (4.0, 4.0)),
        call(SCATTER, 0, 3.9, (4.0, 6.0), (9.0, 9.0)),
        call(SCATTER, 1, 9.0, (9.0, 11.0), (9.1, 11.0)),
    )
    program = program_of([StepRecord(duration_s=11.0, calls=calls)], [SPACE] * 3)
    assert program.late == (False, False, False)
    assert [group.members for group in groups_of(program)] == [((0, 1),), ((2,),)]


def passes(*, on_device: bool) -> StepRecord:
    """The first gather of a pass has nothing to hide behind; the others do, and need not be as fast."""
    calls = [
        call(GATHER, 0, 0.0, (0.0, 1.0), (0.0, 1.0)),
        *(call(GATHER, n, 3.0 * n - 2, (3.0 * n - 2, 3.0 * n - 1), (3.0 * n + 0.8, 3.0 * n + 1)) for n in (1, 2, 3)),
    ]
    if on_device:
        calls = [replace(one, issue_place=2 * n, join_place=2 * n + 1) for n, one in enumerate(calls)]
    return StepRecord(duration_s=12.0, calls=tuple(calls))


def test_exposed_calls_are_apart_from_hidden_ones() -> None:
    program = program_of([passes(on_device=True)], [SPACE] * 4)
    assert program.exposed == (True, False, False, False)
    exposed, hidden = groups_of(program)
    assert (exposed.occurrences, hidden.occurrences) == (((0,),), ((1, 2, 3),))
    assert exposed.name != hidden.name


def test_on_cpu_ranks_nothing_is_told_by_how_long_a_call_was_waited_for() -> None:
    """A busy core makes any call wait: the groups of a restarted job would be others, and its journal lost."""
    program = program_of([passes(on_device=False)], [SPACE] * 4)
    assert not any(program.exposed)
    (group,) = groups_of(program)
    assert group.occurrences == ((0, 1, 2, 3),)


def test_times_add_up_to_the_step_and_waiting_is_not_computing() -> None:
    program = program_of([backward()], [SPACE] * 3)
    groups = groups_of(program)
    times = times_of(program, groups, backward())
    first, second = (times[group.name] for group in groups)
    assert (first.makespan_s, first.comp_s, first.comm_s) == (1.0, 0.0, (1.0,))
    # From 1 to 12: joins at 5 to 6 and 10 to 12, so 8 of 11 compute; both calls are of this window (the last one).
    assert second.makespan_s == 11.0
    assert second.comp_s == 8.0
    assert second.comm_s == (5.0, 6.0)


def test_calls_that_cannot_be_set_are_no_part_of_a_problem() -> None:
    groups = groups_of(program_of([backward()], [None, SPACE, None]))
    assert [group.calls[0].kind for group in groups] == [GATHER]
    assert groups[0].occurrences == ((1,),)
    assert groups_of(program_of([backward()], [None] * 3)) == ()


def test_equal_windows_are_one_group() -> None:
    calls = [call(GATHER, n, 2.0 * n, (2.0 * n, 2.0 * n + 1), (2.0 * n + 1.5, 2.0 * n + 2)) for n in range(3)]
    record = StepRecord(duration_s=6.0, calls=tuple(calls))
    (group,) = groups_of(program_of([record], [SPACE] * 3))
    assert group.count == 3
    assert group.occurrences == ((0, 1, 2),)
    times = times_of(program_of([record], [SPACE] * 3), [group], record)[group.name]
    assert times.makespan_s == pytest.approx(2.0)
    assert times.comp_s == pytest.approx(1.5)


def test_a_fingerprint_tells_steps_by_their_calls_not_by_their_times_or_ranks() -> None:
    slower = StepRecord(
        duration_s=3.0,
        calls=(
            call(GATHER, 0, 0.0, (0.0, 2.0), (0.0, 2.0), ranks=(4, 5)),
            call(GATHER, 1, 2.1, (2.1, 2.2), (2.5, 2.6), ranks=(4, 5)),
            call(SCATTER, 0, 2.4, (2.4, 2.5), (2.9, 2.95), ranks=(4, 5)),
        ),
    )
    assert fingerprint(slower) == fingerprint(backward())
    fewer = StepRecord(duration_s=3.0, calls=slower.calls[:2])
    assert fingerprint(fewer) != fingerprint(backward())


def test_steps_of_several_shapes_make_no_program() -> None:
    fewer = StepRecord(duration_s=14.0, calls=backward().calls[:2])
    with pytest.raises(ValueError, match="steps of one shape"):
        program_of([backward(), fewer], [SPACE] * 3)


def test_a_call_is_set_once_whatever_groups_other_ranks_see_it_in() -> None:
    """The second rank waits elsewhere: its groups would claim the same calls under other names."""
    other = StepRecord(
        duration_s=14.0,
        calls=(
            call(GATHER, 0, 0.0, (0.0, 1.0), (6.0, 7.0)),
            call(GATHER, 1, 1.0, (1.0, 6.0), (8.0, 9.0)),
            call(SCATTER, 0, 4.9, (6.0, 12.0), (10.0, 12.0)),
        ),
    )
    job = job_problems(program_of([record], [SPACE] * 3) for record in (backward(), other))
    sites = [site for group in job.groups.values() for held in group.sites for site in held]
    assert len(sites) == len(set(sites)) == 3


def pair(seconds: tuple[int, ...], other: tuple[int, ...] = (0, 2)) -> StepRecord:
    """Windows of two gathers; `seconds[w]`: whether the second one is this communicator's next, or a twin's (-1)."""
    calls, at = [], 0
    for number, occurrence in enumerate(seconds):
        start, ranks = 4.0 * number, (0, 1) if occurrence >= 0 else other
        calls.append(call(GATHER, at, start, (start, start + 1), (start + 3, start + 3)))
        second = occurrence if occurrence >= 0 else at
        calls.append(call(GATHER, second, start + 0.1, (start + 1, start + 2), (start + 3, start + 4), ranks=ranks))
        at = 1 + max(at, occurrence)
    return StepRecord(duration_s=4.0 * len(seconds), calls=tuple(calls))


@pytest.mark.parametrize("seconds", [(-1,), (-1, -1), (1, -1), (-1, 2, -1)])
def test_twin_communicators_of_one_role_in_one_window_are_set_once(seconds: tuple[int, ...]) -> None:
    """Both run as their role's site is set; only one place may choose that, and is measured by what it chose."""
    record = pair(seconds)
    program = program_of([record], [SPACE] * len(record.calls))
    job = job_problems([program])
    (group,) = job.groups.values()
    places = [site for held in group.sites for site in held]
    assert len(places) == len(set(places)) == len(set(program.sites))
    two = CommConfig(num_channels=2)
    settings = job.settings({group.problem.group.name: (two,) * len(group.sites)})
    assert {setting.site for setting in settings} == set(program.sites)
    (times,) = times_of(program, groups_of(program), record).values()
    assert len(times.comm_s) == len(group.sites)
    assert times.makespan_s == pytest.approx(4.0)


def test_a_rank_with_twins_and_one_without_do_not_mix_their_groups() -> None:
    own = pair((1,))
    programs = [program_of([record], [SPACE] * 2) for record in (pair((-1,)), own)]
    job = job_problems(programs)
    sites = [site for group in job.groups.values() for held in group.sites for site in held]
    assert len(sites) == len(set(sites)) == 1
    names = [groups_of(program)[0].name for program in programs]
    assert names[0] != names[1]


def test_what_a_later_window_waits_for_an_earlier_ones_call_is_the_earlier_ones() -> None:
    """Nobody in the first window waits for scatter 0, but scatter 1 queues behind it.

    0            4   5     6             9     10
    |s0 issued       |s1   |join s1
                 s0 -------------------> s1 -->
    """
    calls = (
        call(GATHER, 0, 0.0, (0.0, 4.0), (5.0, 5.0)),
        call(SCATTER, 0, 1.0, (4.0, 9.0), None),
        call(SCATTER, 1, 5.0, (9.0, 10.0), (6.0, 10.0)),
    )
    record = StepRecord(duration_s=10.0, calls=calls)
    program = program_of([record], [SPACE] * 3)
    first, second = groups_of(program)
    assert (first.members, second.members) == (((0, 1),), ((2,),))
    times = times_of(program, (first, second), record)
    assert (times[first.name].makespan_s, times[first.name].comp_s) == (8.0, 5.0)
    assert (times[second.name].makespan_s, times[second.name].comp_s) == (2.0, 1.0)


def test_a_window_that_only_waits_computes_for_no_negative_time() -> None:
    """Its waits, one behind the other, add up with rounding: one in five was left with less than nothing."""
    random = Random(1)
    for _ in range(200):
        begin, *turns, end = sorted(random.random() for _ in range(5))
        first, second, third = turns
        calls = (
            call(GATHER, 0, 0.0, (0.0, begin / 2), (begin, begin)),
            call(SCATTER, 0, begin / 8, (begin / 2, first), None),
            call(SCATTER, 1, begin, (first, second), (begin, second)),
            call(SCATTER, 2, begin, (second, third), (second, third)),
            call(SCATTER, 3, begin, (third, end), (third, end)),
        )
        record = StepRecord(duration_s=end, calls=calls)
        program = program_of([record], [SPACE] * len(calls))
        times = times_of(program, groups_of(program), record)
        assert min(each.comp_s for each in times.values()) >= 0


def test_a_wait_is_the_windows_own_while_a_call_of_its_own_runs_or_none_does() -> None:
    far, near, own = (call(SCATTER, n, 0.0, ran, None) for n, ran in enumerate(((0.0, 3.0), (2.0, 5.0), (4.0, 6.0))))
    waits = [[], [], [(1.0, 5.5), (6.0, 8.0)]]
    assert owed_s(waits, (far, near, own), (0, 1, 2)) == [{}, {}, {0: 2.0, 1: 1.0, 2: 3.5}]
    later = call(SCATTER, 3, 0.0, (0.0, 9.0), None)
    assert owed_s([[(1.0, 2.0)], []], (later,), (1,)) == [{0: 1.0}, {}]  # one of its own, issued late


def test_a_moment_in_which_several_calls_are_waited_for_counts_once() -> None:
    joins = [
        call(GATHER, 0, 0.0, (0.0, 4.0), (1.0, 4.0)),
        call(GATHER, 1, 0.0, (0.0, 3.0), (2.0, 3.0)),
        call(GATHER, 2, 0.0, (4.0, 6.0), (3.0, 6.0)),
    ]
    assert waits_of(joins, 0.0) == [(1.0, 4.0), (4.0, 6.0)]
    assert waits_of(joins, 2.5) == [(2.5, 4.0), (4.0, 6.0)]


def test_the_spread_of_a_groups_makespan_reaches_the_search():
    """Makespans 1, 2, 3, 5 s: inclusive quartiles 1.75 and 3.5. Lagom's slack for noise rests on it."""
    steps = [{"g": Measurement(makespan_s=m, comp_s=1.0, comm_s=(0.5,))} for m in (2.0, 1.0, 5.0, 3.0)]
    found = median_times(steps)
    assert found["g"].makespan_iqr_s == 1.75
    report = merged(
        [
            Report(rank=0, num_steps=4, times=found),
            Report(rank=1, num_steps=4, times=median_times(steps[:1] * 4)),
        ]
    )
    told = decode(encode(report).encode(), Report).times["g"]
    assert (told.makespan_iqr_s, told.num_repeats) == (1.75, 4)
