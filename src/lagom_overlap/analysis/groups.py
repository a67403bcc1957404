"""Overlap groups in a measured timeline: what computes during which collectives between two joins.

A *join* is a place where the computation waited for a collective: nothing computed, a collective ended, and within
`NEAR_NS` the next kernel began, launched before that end where its launch is known (else it waited for the CPU). What
lies between two joins of a step is a window; a collective belongs to the window in which most of it runs, also where no
kernel runs during it: its setting is often that of calls which kernels hide. Equal windows are one group.

Stable across steps and ranks: steps that run the same kernels during the same collectives vote, kernel by kernel, on
where the joins are; a majority cuts all of them alike, so that one late kernel makes no new group.

A join that the computation reached after its collective had ended leaves no trace. A window may therefore hold several
of the workload's groups, and how much slower its hidden collectives may become before they are waited for is not known.

The bound of a group: communication-bound if in most of its occurrences a collective ends after the last kernel and
before the next window's first, compute-bound otherwise.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

import numpy as np

from lagom_overlap.analysis.collectives import CollectiveKey, key_of
from lagom_overlap.analysis.equal_rows import equal_rows
from lagom_overlap.analysis.findings import Findings, RankFindings
from lagom_overlap.trace.gpu_trace import NO_TIME, NS_PER_S, UNKNOWN, Bools, EventRole, Floats, Int64

NEAR_NS: Final = 20_000
"""A kernel that begins this soon after a collective's end followed it at once."""
_MAJORITY: Final = 0.5
"""Of the steps, which vote."""


class BoundBy(StrEnum):
    """Which stream ends a group."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True, order=True)
class KernelKey:
    """A kernel by its code and launch: what two runs share that do the same."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceKernel:
    """A kernel of a group as it ran there: medians over occurrences.

    `median_ns` is its length, `advance_ns` the part of it in which no earlier kernel of the group still ran,
    `overlapped_ns` the part with a concurrent collective, `gap_ns` the time until the next kernel in which none ran.
    """

    key: KernelKey
    median_ns: float
    advance_ns: float
    overlapped_ns: float
    gap_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComm:
    """A collective of a group; it began when `starts_after` of the group's kernels had ended (median).

    `moving_ns` is its time without the mean wait for late peers, where they are known, and at least its shortest run.
    `places` are its places in the step among the calls of its kind and size (`call_places.py`); empty where unknown.
    """

    key: CollectiveKey
    starts_after: int
    median_ns: float
    moving_ns: float
    places: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceGroup:
    """A group found in a timeline: `num_occurrences` windows over all steps and ranks, medians over them.

    `per_step` is how often it occurs in a step of the average rank. `makespan_ns` runs from the first kernel's or
    collective's start to the last end, `comp_ns` from the first kernel's start to the last one's end, `comm_ns` is the
    collectives' summed time, `exposed_ns` what of it no kernel hides. `agreement` is the share of occurrences with the
    group's bound. `kernel_times_ns` holds the rows of `TraceKernel`'s times, kernels in columns. `occurrences` holds
    the index of the trace, start and end (ns) of each.
    """

    name: str
    kernel_keys: tuple[KernelKey, ...]
    kernel_times_ns: Floats
    comms: tuple[TraceComm, ...]
    num_occurrences: int
    per_step: float
    makespan_ns: float
    comp_ns: float
    comm_ns: float
    exposed_ns: float
    bound: BoundBy
    agreement: float
    occurrences: tuple[tuple[int, int, int], ...] = ()

    @property
    def kernels(self) -> tuple[TraceKernel, ...]:
        """The group's kernels in order of start."""
        return tuple(
            TraceKernel(key=key, median_ns=length, advance_ns=advance, overlapped_ns=overlapped, gap_ns=gap)
            for key, (length, advance, overlapped, gap) in zip(
                self.kernel_keys, self.kernel_times_ns.T.tolist(), strict=True
            )
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of one rank: its kernels and collectives in order of start, as numbers and as rows of the events.

    `number` counts the rank's steps, `overlapped_ns` is how much of each kernel runs during a collective.
    """

    rank: int
    number: int
    kernels: Int64
    kernel_rows: Int64
    overlapped_ns: Int64
    calls: tuple[int, ...]
    call_keys: tuple[CollectiveKey, ...]


@dataclass(frozen=True, slots=True)
class _Window:
    """One occurrence: kernels [first, last) of a step, which of its calls, and each call's start in kernels."""

    step: _Step
    first: int
    last: int
    calls: tuple[int, ...]
    starts_after: tuple[int, ...]


def _steps_of(rank: RankFindings, index: int, numbers: dict[KernelKey, int]) -> list[_Step]:
    events, calls = rank.trace.events, rank.trace.calls
    rows = events.rows(EventRole.COMPUTE)
    if not len(rows):
        return []
    columns = np.column_stack((events.name[rows], events.grid[rows], events.block[rows]))
    first, inverse = equal_rows(columns)
    number_of = np.array(
        [
            numbers.setdefault(KernelKey(events.names[name], (gx, gy, gz), (bx, by, bz)), len(numbers))
            for name, gx, gy, gz, bx, by, bz in columns[first].tolist()
        ],
        dtype=np.int64,
    )
    kernel = number_of[inverse]
    overlapped = rank.occupation.comm.within(events.start_ns[rows], events.end_ns[rows])
    timed = [at for at, call in enumerate(calls) if call.event != UNKNOWN]
    timed.sort(key=lambda at: (int(events.start_ns[calls[at].event]), at))
    call_start = np.array([events.start_ns[calls[at].event] for at in timed], dtype=np.int64)
    windows = [(step.start_ns, step.end_ns) for step in rank.steps]
    steps = []
    for number, (start, end) in enumerate(windows):
        low, high = np.searchsorted(events.start_ns[rows], (start, end))
        first, last = np.searchsorted(call_start, (start, end))
        if high > low:
            mine = tuple(timed[first:last])
            keys = tuple(key_of(calls[at]) for at in mine)
            steps.append(_Step(index, number, kernel[low:high], rows[low:high], overlapped[low:high], mine, keys))
    return steps


def _joins(rank: RankFindings, step: _Step) -> Bools:
    """For each kernel of a step whether the computation waited for a collective right before it."""
    events = rank.trace.events
    rows = step.kernel_rows
    start, end = events.start_ns[rows], events.end_ns[rows]
    ends = np.sort(np.array([events.end_ns[rank.trace.calls[at].event] for at in step.calls], dtype=np.int64))
    joined = np.zeros(len(rows), dtype=np.bool_)
    if not len(ends) or len(rows) < 2:
        return joined
    busy_until = np.maximum.accumulate(end)[:-1]
    at = np.searchsorted(ends, start[1:], side="right") - 1
    ended = ends[np.maximum(at, 0)]
    near = (at >= 0) & (start[1:] - ended <= NEAR_NS) & (ended > busy_until)
    launch = events.launch_ns[rows][1:]
    # Emulated GPUs have a clock of their own, which says nothing of when the host launched.
    joined[1:] = near & (rank.trace.is_emulated | (launch == NO_TIME) | (launch <= ended))
    return joined


def _homes(rank: RankFindings, step: _Step, cuts: Sequence[int]) -> list[int]:
    """For each call of a step the window in which most of it runs."""
    events = rank.trace.events
    begins = events.start_ns[step.kernel_rows[list(cuts[1:])]]
    homes = []
    for at in step.calls:
        row = rank.trace.calls[at].event
        start, end = int(events.start_ns[row]), int(events.end_ns[row])
        first, last = np.searchsorted(begins, (start, end), side="right")
        edges = [start, *begins[first:last].tolist(), end]
        homes.append(int(first) + int(np.argmax(np.diff(edges))))
    return homes


def _mode(values: Sequence[int]) -> int:
    """The most frequent value; of equals the smallest."""
    distinct, counts = np.unique(np.asarray(values), return_counts=True)
    return int(distinct[np.argmax(counts)])


def _windows(ranks: Sequence[RankFindings], steps: Sequence[_Step]) -> list[_Window]:
    """The windows of steps that all run the same: cut where a majority joins, collectives placed as most are."""
    votes = np.mean([_joins(ranks[step.rank], step) for step in steps], axis=0)
    cuts = [0, *np.flatnonzero(votes > _MAJORITY).tolist()]
    homes = [_homes(ranks[step.rank], step, cuts) for step in steps]
    home = [_mode(held) for held in zip(*homes, strict=True)]
    edges = [*cuts, len(steps[0].kernels)]
    windows = []
    for step in steps:
        events, calls = ranks[step.rank].trace.events, ranks[step.rank].trace.calls
        for number, (first, last) in enumerate(pairwise(edges)):
            mine = tuple(at for at, held in zip(step.calls, home, strict=True) if held == number)
            if not mine:
                continue
            ends = np.sort(events.end_ns[step.kernel_rows[first:last]])
            starts = events.start_ns[[calls[at].event for at in mine]]
            after = np.searchsorted(ends, starts, side="right")
            windows.append(_Window(step, first, last, mine, tuple(after.tolist())))
    return windows


@dataclass(frozen=True, slots=True)
class _Times:
    """One occurrence's times in ns."""

    start: int
    makespan: int
    comp: int
    comms: tuple[int, ...]
    exposed: int
    comm_ends_last: bool


def _times(rank: RankFindings, window: _Window) -> _Times:
    events = rank.trace.events
    rows = window.step.kernel_rows[window.first : window.last]
    comm = np.array([rank.trace.calls[at].event for at in window.calls], dtype=np.int64)
    comp_start, comp_end = int(events.start_ns[rows[0]]), int(events.end_ns[rows].max())
    after = window.step.kernel_rows[window.last : window.last + 1]
    next_start = int(events.start_ns[after[0]]) if len(after) else np.iinfo(np.int64).max
    start, end = events.start_ns[comm], events.end_ns[comm]
    return _Times(
        start=min(comp_start, int(start.min())),
        makespan=max(comp_end, int(end.max())) - min(comp_start, int(start.min())),
        comp=comp_end - comp_start,
        comms=tuple((end - start).tolist()),
        exposed=int(rank.exposed_ns[list(window.calls)].sum()),
        comm_ends_last=bool(np.any((end > comp_end) & (end <= next_start))),
    )


def _kernel_times(rank: RankFindings, window: _Window) -> Floats:
    """Rows: length, advance, overlap, gap of every kernel of an occurrence."""
    events = rank.trace.events
    rows = window.step.kernel_rows[window.first : window.last]
    start, end = events.start_ns[rows], events.end_ns[rows]
    reach = np.maximum.accumulate(end)
    before = np.concatenate((start[:1], reach[:-1]))
    gap = np.append(np.maximum(0, start[1:] - reach[:-1]), 0)
    advance = np.maximum(0, end - np.maximum(start, before))
    overlapped = window.step.overlapped_ns[window.first : window.last]
    return np.array([end - start, advance, overlapped, gap], dtype=np.float64)


def _group(
    name: str, windows: Sequence[_Window], findings: Findings, kernels: Sequence[KernelKey], num_steps: int
) -> TraceGroup:
    ranks = findings.ranks
    times = [_times(ranks[window.step.rank], window) for window in windows]
    lengths_ns = np.median([_kernel_times(ranks[window.step.rank], window) for window in windows], axis=0)
    first = windows[0]
    share = float(np.mean([window_times.comm_ends_last for window_times in times]))
    keys = dict(zip(first.step.calls, first.step.call_keys, strict=True))
    after = np.median([window.starts_after for window in windows], axis=0)
    lengths = np.median([window_times.comms for window_times in times], axis=0)
    places = [[findings.places.of_calls[window.step.rank][at] for at in window.calls] for window in windows]
    waits = np.mean(
        [[ranks[window.step.rank].waiting_ns[at] or 0 for at in window.calls] for window in windows], axis=0
    )
    shortest = np.minimum(lengths, np.min([window_times.comms for window_times in times], axis=0))
    moving = np.maximum(shortest, lengths - waits)
    return TraceGroup(
        name=name,
        kernel_keys=tuple(kernels[number] for number in first.step.kernels[first.first : first.last].tolist()),
        kernel_times_ns=lengths_ns,
        comms=tuple(
            TraceComm(
                key=keys[at],
                starts_after=int(begun),
                median_ns=float(length),
                moving_ns=float(moved),
                places=tuple(sorted({place for place in own_places if place is not None})),
            )
            for at, begun, length, moved, own_places in zip(
                first.calls, after, lengths, moving, zip(*places, strict=True), strict=True
            )
        ),
        num_occurrences=len(windows),
        per_step=len(windows) / num_steps,
        makespan_ns=float(np.median([window_times.makespan for window_times in times])),
        comp_ns=float(np.median([window_times.comp for window_times in times])),
        comm_ns=float(np.median([sum(window_times.comms) for window_times in times])),
        exposed_ns=float(np.median([window_times.exposed for window_times in times])),
        bound=BoundBy.COMMUNICATION if share > _MAJORITY else BoundBy.COMPUTE,
        agreement=max(share, 1 - share),
        occurrences=tuple(
            (window.step.rank, window_times.start, window_times.start + window_times.makespan)
            for window, window_times in zip(windows, times, strict=True)
        ),
    )


def _halved(windows: Sequence[_Window], ranks: Sequence[RankFindings]) -> tuple[list[_Window], list[_Window]]:
    """Every second step of a rank; of a rank's only step every second occurrence, as `bases_alone` halves kernels.

    Ranks are cut alike, for they share a network. Neighbours in time come to different halves, so that a warm-up is in
    both.
    """
    halves: tuple[list[_Window], list[_Window]] = [], []
    seen = Counter[int]()
    for window in windows:
        rank = window.step.rank
        halves[(window.step.number if len(ranks[rank].steps) > 1 else seen[rank]) % 2].append(window)
        seen[rank] += 1
    return halves


def _drift_s(windows: Sequence[_Window], ranks: Sequence[RankFindings]) -> float:
    """By how much (s) the later half of the steps takes longer or less for a group than the earlier; 0 in one step."""
    numbers = sorted({window.step.number for window in windows})
    if len(numbers) < 2:
        return 0.0
    middle = numbers[len(numbers) // 2]
    lengths: tuple[list[int], list[int]] = [], []
    for window in windows:
        lengths[window.step.number >= middle].append(_times(ranks[window.step.rank], window).makespan)
    return abs(float(np.median(lengths[1])) - float(np.median(lengths[0]))) / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedTrace:
    """The overlap groups of a job's traces in order of first occurrence, as all windows show them and as halves do.

    `halves` have the groups by name that occur in both halves, with that half's windows alone; `drifts_s` is by how
    much each group takes longer or less in the later half of the steps.
    """

    groups: tuple[TraceGroup, ...]
    halves: tuple[Mapping[str, TraceGroup], Mapping[str, TraceGroup]]
    drifts_s: Mapping[str, float]


def grouped(findings: Findings) -> GroupedTrace:
    """The groups, and each half of their windows by the same medians."""
    by_name, kernels, num_steps = _windows_by_group(findings)

    def group(name: str, windows: Sequence[_Window]) -> TraceGroup:
        return _group(name, windows, findings, kernels, num_steps)

    halves: tuple[dict[str, TraceGroup], dict[str, TraceGroup]] = {}, {}
    for name, windows in by_name.items():
        parts = _halved(windows, findings.ranks)
        if all(parts):
            for half, part in zip(halves, parts, strict=True):
                half[name] = group(name, part)
    return GroupedTrace(
        groups=tuple(group(name, windows) for name, windows in by_name.items()),
        halves=halves,
        drifts_s={name: _drift_s(windows, findings.ranks) for name, windows in by_name.items()},
    )


def overlap_groups(findings: Findings) -> tuple[TraceGroup, ...]:
    """The overlap groups of a job's traces in order of first occurrence; the same traces give the same groups."""
    by_name, kernels, num_steps = _windows_by_group(findings)
    return tuple(_group(name, windows, findings, kernels, num_steps) for name, windows in by_name.items())


def _windows_by_group(findings: Findings) -> tuple[dict[str, list[_Window]], list[KernelKey], int]:
    """(the windows of each group by its name, the kernels that steps number, how many steps there are)."""
    numbers: dict[KernelKey, int] = {}
    steps = [step for index, rank in enumerate(findings.ranks) for step in _steps_of(rank, index, numbers)]
    alike: dict[tuple[bytes, tuple[CollectiveKey, ...]], list[_Step]] = defaultdict(list)
    for step in steps:
        alike[step.kernels.tobytes(), step.call_keys].append(step)
    groups: dict[object, list[_Window]] = defaultdict(list)
    for alike_steps in alike.values():
        for window in _windows(findings.ranks, alike_steps):
            keys = dict(zip(window.step.calls, window.step.call_keys, strict=True))
            ran = window.step.kernels[window.first : window.last].tobytes()
            groups[ran, tuple(keys[at] for at in window.calls)].append(window)
    named = {f"group{number}": windows for number, windows in enumerate(groups.values())}
    return named, list(numbers), len(steps)
