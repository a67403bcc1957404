"""The shape of a step on one rank: which collectives are issued and waited for, in which order; and its overlap groups.

A *join* is a place where the computation waits for a collective. The stretch between two joins is a window; a stretch
that issues nothing belongs to the window before it, so that the windows make up the step. A collective belongs to the
window whose computations follow it, because it overlaps those: the one that issued it or, if that one hardly computes
afterwards (`LATE_SHARE`), the next. Equal windows form one group and are tuned as one. Windows are equal if their calls
are, and if the same calls are exposed (`EXPOSED_SHARE`), because a hidden call can do without resources that an exposed
one needs. Exposure is judged on devices only; on CPU ranks a busy core makes any call wait. Waiting that is caused by
collectives of earlier windows is counted there (`owed_s`).

Whether a call is late or exposed depends on times, which differ between ranks and steps, so ranks of equal shape must
agree on one `StepProgram`: the exchange keeps the first that was published under its fingerprint.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Final

import msgspec

from lagom_overlap.collective import ConfigSpace
from lagom_overlap.collective.sites import CallType, Site, site_of
from lagom_overlap.online.routes.base import CallRecord, StepRecord
from lagom_overlap.tuners.problem import Measurement
from lagom_overlap.units import format_bytes

Interval = tuple[float, float]
"""Begin and end of a wait, seconds since the step's begin."""


def waits_of(joins: Sequence[CallRecord], since_s: float) -> list[Interval]:
    """The intervals in which the computation waited for the calls, from `since_s` on; overlapping waits count once."""
    intervals: list[Interval] = []
    until_s = since_s
    for call in sorted(joins, key=lambda call: call.joined_s or 0.0):
        begin_s, end_s = max(call.joined_s or 0.0, until_s), call.resumed_s or 0.0
        if end_s > begin_s:
            intervals.append((begin_s, end_s))
            until_s = end_s
    return intervals


def owed_s(
    waits: Sequence[Sequence[Interval]], calls: Sequence[CallRecord], windows: Sequence[int]
) -> list[dict[int, float]]:
    """For each window, in order of the step, how much of its waiting each window caused, in seconds.

    A window can end while its collectives still run, because nothing in it waits for them. Later collectives queue
    behind them, and the time shows up where one of those is waited for. A search that slows the earlier collectives
    must be charged for it, or one group gains what another pays.

    `windows[i]` is the window that call i belongs to. A moment in which none of the waiting window's own calls runs,
    but some of earlier windows', belongs to the earliest of these; every other one to the window itself.
    """
    order = sorted(range(len(calls)), key=lambda i: calls[i].begun_s)
    running: list[int] = []
    place = 0
    owed_by_window: list[dict[int, float]] = []
    for window, intervals in enumerate(waits):
        owed: dict[int, float] = {}
        for begin_s, end_s in intervals:
            while place < len(order) and calls[order[place]].begun_s < end_s:
                running.append(order[place])
                place += 1
            running = [i for i in running if calls[i].ended_s > begin_s]
            edges = {time for i in running for time in (calls[i].begun_s, calls[i].ended_s) if begin_s < time < end_s}
            moments = [begin_s, *sorted(edges), end_s]
            for since_s, until_s in pairwise(moments):
                owners = [windows[i] for i in running if calls[i].begun_s <= since_s and calls[i].ended_s >= until_s]
                owner = window if window in owners else min([*owners, window])
                owed[owner] = owed.get(owner, 0.0) + until_s - since_s
        owed_by_window.append(owed)
    return owed_by_window


LATE_SHARE: Final = 0.1
"""A call is late if less than this share of its window's computation follows it. Chosen, not measured."""
EXPOSED_SHARE: Final = 0.5
"""A call is exposed if the untouched step waits for more than this share of its time. Chosen, not measured."""


@dataclass(frozen=True, slots=True)
class ProgramEvent:
    """The computation hands call number `call` over, or (`is_join`) waits for it."""

    call: int
    is_join: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A step without its times: calls in order of issue, events in the order of the computation.

    `late[i]` says that call i belongs to the window after the one that issued it, `exposed[i]` that most of its time is
    waited for. `spaces[i]` is what may be tried for it, None where nothing may.
    """

    sites: tuple[Site, ...]
    events: tuple[ProgramEvent, ...]
    late: tuple[bool, ...]
    exposed: tuple[bool, ...]
    spaces: tuple[ConfigSpace | None, ...]

    def __post_init__(self) -> None:
        lengths = len(self.sites), len(self.late), len(self.exposed), len(self.spaces)
        if len(set(lengths)) != 1:
            raise ValueError("{} sites, {} late marks, {} exposed marks, {} spaces".format(*lengths))

    @property
    def sites_that_can_be_set(self) -> tuple[Site, ...]:
        """Those for which there is something to try."""
        return tuple(site for site, space in zip(self.sites, self.spaces, strict=True) if space is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroup:
    """Equal windows of a step: the same calls, hidden or exposed alike, ended by the same type of join.

    `calls[j]` is the type of the j-th call that can be set by itself, `occurrences[j]` where in the step it is called,
    one for each of the `count` windows; `members[w][j]` is its number in the program.
    """

    name: str
    calls: tuple[CallType, ...]
    spaces: tuple[ConfigSpace, ...]
    occurrences: tuple[tuple[int, ...], ...]
    members: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...]

    @property
    def count(self) -> int:
        """How often the group occurs in a step."""
        return len(self.windows)


@dataclass(slots=True)
class _Window:
    calls: list[int]
    joins: list[int]


def events_of(record: StepRecord) -> tuple[ProgramEvent, ...]:
    """Issues and joins in the order of the computation: the host's order if the route knows it, else by time.

    By time alone, the shape of a step would depend on how long its kernels took.
    """
    if _is_in_the_hosts_order(record):
        places = [(call.issue_place, 0, index, False) for index, call in enumerate(record.calls)]
        places += [
            (call.join_place, 1, index, True) for index, call in enumerate(record.calls) if call.join_place is not None
        ]
        return tuple(ProgramEvent(index, is_join) for _, _, index, is_join in sorted(places))
    issues = [(call.issued_s, 1, index, False) for index, call in enumerate(record.calls)]
    # At equal times: first waits for earlier calls, then issues, then waits for calls issued at that time.
    joins = [
        (call.joined_s, 0 if call.issued_s < call.joined_s else 2, index, True)
        for index, call in enumerate(record.calls)
        if call.joined_s is not None
    ]
    return tuple(ProgramEvent(index, is_join) for _, _, index, is_join in sorted(issues + joins))


def _is_in_the_hosts_order(record: StepRecord) -> bool:
    """Whether the route reads a device that runs behind the host, and knows the order in which the host gave work."""
    return all(call.issue_place is not None for call in record.calls)


def fingerprint(record: StepRecord) -> str:
    """A hash of the step's calls and joins in order; equal for equal steps on any rank."""
    shape = ([site_of(call.key) for call in record.calls], events_of(record))
    return hashlib.sha256(msgspec.json.encode(shape, order="sorted")).hexdigest()[:16]


def program_of(records: Sequence[StepRecord], spaces: Sequence[ConfigSpace | None]) -> StepProgram:
    """The program of steps of one fingerprint; `spaces` by call.

    Raises:
        ValueError: if there is no step, or their shapes differ.
    """
    if not records or len({fingerprint(record) for record in records}) != 1:
        raise ValueError(f"need steps of one shape, got {len(records)} steps")
    first = records[0]
    events = events_of(first)
    late = [False] * len(first.calls)
    for window in _windows(events):
        shares = [_shares_left(window, record) for record in records]
        for place, call in enumerate(window.calls):
            late[call] = fmean(share[place] for share in shares) < LATE_SHARE
    is_device = _is_in_the_hosts_order(first)
    return StepProgram(
        sites=tuple(site_of(call.key) for call in first.calls),
        events=events,
        late=tuple(late),
        exposed=tuple(
            is_device and fmean(_share_waited(record.calls[call]) for record in records) > EXPOSED_SHARE
            for call in range(len(first.calls))
        ),
        spaces=tuple(spaces),
    )


def _windows(events: Sequence[ProgramEvent]) -> list[_Window]:
    """Cut at every join; a stretch that issues nothing is part of the window before."""
    windows: list[_Window] = []
    issued: list[int] = []
    for event in events:
        if not event.is_join:
            issued.append(event.call)
        elif issued or not windows:
            windows.append(_Window(issued, [event.call]))
            issued = []
        else:
            windows[-1].joins.append(event.call)
    if issued:
        windows.append(_Window(issued, []))
    return windows


def _shares_left(window: _Window, record: StepRecord) -> list[float]:
    """For each call of the window the share of the window's computation, from its first issue on, that follows it."""
    issued = [record.calls[call].issued_s for call in window.calls]
    length = _computed_s(window, record, min(issued, default=0.0))
    # A single call that is waited for at once has no computation after it, and none before it: it is not late.
    return [1.0 if length <= 0 else _computed_s(window, record, since) / length for since in issued]


def _computed_s(window: _Window, record: StepRecord, since_s: float) -> float:
    """How long the window computes from a moment on: up to each of its joins, and between them."""
    computed_s, begin_s = 0.0, since_s
    for call in window.joins:
        join = record.calls[call]
        computed_s += max(0.0, (join.joined_s or 0.0) - begin_s)
        begin_s = max(begin_s, _resumed_s(join))
    return computed_s if window.joins else max(0.0, record.duration_s - begin_s)


def _share_waited(call: CallRecord) -> float:
    """The share of a call's time that the computation stood still for it; 0 where nobody waited."""
    waited_s = 0.0 if call.joined_s is None else _resumed_s(call) - call.joined_s
    length_s = call.ended_s - call.begun_s
    return waited_s / length_s if length_s > 0 else 0.0


def groups_of(program: StepProgram) -> tuple[StepGroup, ...]:
    """The groups of a program in order of first occurrence, without those in which no call can be set."""
    windows = _windows(program.events)
    calls_of_window: list[list[int]] = [[] for _ in windows]
    for call, number in sorted(_window_of_calls(program, windows).items()):
        calls_of_window[number].append(call)
    alike: dict[object, list[int]] = defaultdict(list)
    for number, window in enumerate(windows):
        calls = tuple((program.sites[call].call, program.exposed[call]) for call in sorted(calls_of_window[number]))
        ends = program.sites[window.joins[0]].call if window.joins else None
        if any(program.spaces[call] is not None for call in calls_of_window[number]):
            alike[calls, ends].append(number)
    return tuple(_group(program, calls_of_window, numbers, windows) for numbers in alike.values())


def _window_of_calls(program: StepProgram, windows: Sequence[_Window]) -> dict[int, int]:
    """The window that each call belongs to: of its issue, or the next."""
    return {
        call: number + 1 if program.late[call] and number + 1 < len(windows) else number
        for number, window in enumerate(windows)
        for call in window.calls
    }


def _group(
    program: StepProgram, calls_of_window: Sequence[Sequence[int]], numbers: Sequence[int], windows: Sequence[_Window]
) -> StepGroup:
    members = tuple(tuple(c for c in sorted(calls_of_window[n]) if program.spaces[c] is not None) for n in numbers)
    places = _own_places([[program.sites[window[place]] for window in members] for place in range(len(members[0]))])
    twins = {call for place, call in enumerate(members[0]) if place not in places}
    members = tuple(tuple(window[place] for place in places) for window in members)
    ends = windows[numbers[0]].joins
    until = _words(program.sites[ends[0]].call) if ends else "the end"
    calls = (
        _words(program.sites[call].call)
        + (" (exposed)" if program.exposed[call] else "")
        + (" (set as one before)" if call in twins else "")
        for call in sorted(calls_of_window[numbers[0]])
    )
    first = members[0]
    spaces = [program.spaces[call] for call in first]
    return StepGroup(
        name=f"{' + '.join(calls)} until {until}",
        calls=tuple(program.sites[call].call for call in first),
        spaces=tuple(space for space in spaces if space is not None),
        occurrences=tuple(
            tuple(program.sites[window[place]].occurrence for window in members) for place in range(len(first))
        ),
        members=members,
        windows=tuple(numbers),
    )


def _own_places(sites: Sequence[Sequence[Site]]) -> tuple[int, ...]:
    """The places with a site of their own; `sites` by place.

    Two communicators of one role that are called in the same window share a site, because settings go by role. The
    second call runs with the setting of the first one and is not tuned separately.
    """
    covered: set[Site] = set()
    places = []
    for place, place_sites in enumerate(sites):
        if not covered.issuperset(place_sites):
            places.append(place)
        covered.update(place_sites)
    return tuple(places)


def _words(call: CallType) -> str:
    order = f"#{call.creation_order}" if call.creation_order else ""
    return (
        f"{call.kind} {format_bytes(call.num_bytes)} ({call.num_bytes} B) on {call.description}{order}/{call.num_ranks}"
    )


def times_of(program: StepProgram, groups: Sequence[StepGroup], record: StepRecord) -> dict[str, Measurement]:
    """Each group's times in a step of the program's shape, by group name, means over its windows.

    What later windows wait for a group's calls is the group's (`waits`); all windows' makespans are the step still.
    """
    spans_s = _spans(program, record)
    by_group = {}
    for group in groups:
        spans = [spans_s[number] for number in group.windows]
        lengths = [
            [record.calls[window[place]].ended_s - record.calls[window[place]].begun_s for window in group.members]
            for place in range(len(group.calls))
        ]
        by_group[group.name] = Measurement(
            makespan_s=fmean(comp_s + waited_s for comp_s, waited_s in spans),
            comp_s=fmean(comp_s for comp_s, _ in spans),
            comm_s=tuple(fmean(times) for times in lengths),
        )
    return by_group


def median_times(steps: Sequence[dict[str, Measurement]]) -> dict[str, Measurement]:
    """Each group's times over several steps of one program."""
    return {name: Measurement.from_runs([step[name] for step in steps]) for name in steps[0]}


def _spans(program: StepProgram, record: StepRecord) -> list[tuple[float, float]]:
    """For each window: seconds of computation, and seconds that it or a later window waited because of it.

    A window lasts from the join before it, or the step's begin, to its own last join.
    """
    windows = _windows(program.events)
    ends = [0.0]
    for window in windows:
        joined = [_resumed_s(record.calls[call]) for call in window.joins]
        ends.append(max([ends[-1], *(joined or [record.duration_s])]))
    # A join may lie before the one of the window before: what both wait for is counted there.
    waits = [
        waits_of([record.calls[call] for call in window.joins], begin)
        for window, begin in zip(windows, ends, strict=False)
    ]
    places = _window_of_calls(program, windows)
    owed = owed_s(waits, record.calls, [places[call] for call in range(len(record.calls))])
    waited_s = [0.0] * len(windows)
    for each in owed:
        for owner, seconds in each.items():
            waited_s[owner] += seconds
    computed_s = [  # max: rounding may make a window that only waits slightly negative
        max(0.0, end - begin - sum(each.values())) for (begin, end), each in zip(pairwise(ends), owed, strict=True)
    ]
    return list(zip(computed_s, waited_s, strict=True))


def _resumed_s(call: CallRecord) -> float:
    assert call.resumed_s is not None, "a join without an end"
    return call.resumed_s
