"""Event simulation of one overlap group: a stream of computations beside a stream of collectives.

Both streams start together; collective j waits for its predecessor and for `starts_after[j]` computations. Between two
events the same pair runs, so its rates (Eq. 4, time-weighted) are constant; the next event is the nearer end, and a
tie ends both. The result is a pure function of group, assignment and model: the same call gives the same bits.

A launch says what persistent products leave free, and who gets SMs first (`cost.launch_order`). Untouched, a collective
has its SMs as soon as it is issued: it is enqueued first, on a stream of high priority. Where it comes behind a kernel,
that kernel runs alone for a share of it, which counts into the collective's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    Collective,
    CommConfig,
    LaunchConfig,
    LaunchOrder,
    StreamPriority,
)
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.contention import eq1_makespan
from lagom_overlap.cost.launch_order import share_before_collective
from lagom_overlap.errors import SpaceError
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import Kernel, OverlapGroup

_Pair = tuple[float, float]
"""Whole times (s) of a kernel and a collective that run together."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Z, Y and the x_j of a group, in seconds: end of the last operator, summed computation, each collective."""

    makespan_s: float
    comp_s: float
    comm_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A collective under one configuration: its time alone and, once needed, beside each distinct kernel."""

    cost: CollectiveCost
    alone_s: float
    beside: list[_Pair | None]


@dataclass(frozen=True, slots=True)
class _Run:
    """Start and end (s) of every computation and every collective."""

    comp_starts: list[float]
    comp_ends: list[float]
    comm_starts: list[float]
    comm_ends: list[float]


class GroupSimulator:
    """Evaluates assignments of one group; whatever depends only on (kernel, collective, configuration) is kept."""

    def __init__(self, group: OverlapGroup, model: ContentionModel, launch: LaunchConfig = UNTOUCHED_LAUNCH) -> None:
        self._group = group
        self._model = model = model.launched(launch)
        self._is_behind: Final = launch.order is LaunchOrder.COMPUTATION_FIRST
        self._priority: Final = launch.priority or StreamPriority.HIGH
        self._may_wait: Final = self._is_behind or self._priority is StreamPriority.NORMAL
        kernels = [model.kernel(op.work) for op in group.computations]
        self._kernels: Final[tuple[Kernel, ...]] = tuple(dict.fromkeys(kernels))
        place = {kernel: index for index, kernel in enumerate(self._kernels)}
        self._kinds: Final = [place[kernel] for kernel in kernels]
        alone = [model.running_times([kernel], []).kernel_s[0] for kernel in self._kernels]
        self._alone_s: Final = [alone[kind] for kind in self._kinds]
        self._collectives: Final = tuple(op.collective for op in group.comms)
        self._candidates: dict[Collective, dict[CommConfig, _Candidate]] = {c: {} for c in self._collectives}
        self._tables: Final = [self._candidates[c] for c in self._collectives]

    @property
    def comp_alone_s(self) -> float:
        """The computations with no communication beside them."""
        return sum(self._alone_s)

    def evaluate(self, assignment: Sequence[CommConfig]) -> GroupTimes:
        """The group's times under one configuration per collective; None knobs are the model's default.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if the number of configurations is not that of the collectives.
        """
        run = self._run(assignment)
        return GroupTimes(
            makespan_s=eq1_makespan(run.comp_ends[-1], run.comm_ends[-1]),
            comp_s=run.comp_ends[-1],
            comm_s=tuple([end - start for start, end in zip(run.comm_starts, run.comm_ends, strict=True)]),
        )

    def timeline(self, assignment: Sequence[CommConfig]) -> Timeline:
        """The spans behind `evaluate`, from the same events.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if the number of configurations is not that of the collectives.
        """
        run = self._run(assignment)
        comps = zip(self._group.computations, run.comp_starts, run.comp_ends, strict=True)
        comms = zip(self._group.comms, run.comm_starts, run.comm_ends, strict=True)
        return Timeline(
            tuple(
                Span(name=op.name, kind=kind, stream=op.stream, start_s=start, end_s=end)
                for kind, rows in ((SpanKind.COMP, comps), (SpanKind.COMM, comms))
                for op, start, end in rows
            )
        )

    def _candidate(self, place: int, config: CommConfig) -> _Candidate:
        found = self._tables[place].get(config)
        if found is None:
            try:
                cost = self._model.collective(self._collectives[place], config)
            except SpaceError as error:
                raise SpaceError(f"{self._group.comms[place].name}: {error}") from error
            found = _Candidate(cost, cost.seconds(), [None] * len(self._kernels))
            self._tables[place][config] = found
        return found

    def _pair(self, candidate: _Candidate, kind: int) -> _Pair:
        times = self._model.running_times([self._kernels[kind]], [candidate.cost])
        pair = times.kernel_s[0], times.comm_s[0]
        candidate.beside[kind] = pair
        return pair

    def _left_before(self, candidate: _Candidate, kind: int, comp_left: float) -> float:
        """What is left of the running kernel when a collective issued now holds its SMs; at most `comp_left`."""
        kernel, profile = self._kernels[kind], self._model.profile
        is_new = comp_left == 1.0
        comes_behind = self._is_behind if is_new else self._priority is StreamPriority.NORMAL
        if not comes_behind or kernel.blocks_per_sm >= profile.small_block_count:
            return comp_left
        num_sms = self._model.cluster.gpu.num_sms
        num_channels = min(candidate.cost.num_channels, num_sms - 1)
        share = share_before_collective(kernel, num_channels, num_sms=num_sms, priority=self._priority)
        return min(comp_left, 1.0 - share)

    def _run(self, assignment: Sequence[CommConfig]) -> _Run:
        """The event loop; one computation and one collective can run at a time."""
        if len(assignment) != len(self._tables):
            raise ValueError(f"{len(assignment)} configurations for {len(self._tables)} collectives")
        candidates = [self._candidate(place, config) for place, config in enumerate(assignment)]
        kinds, alone_s, starts_after = self._kinds, self._alone_s, self._group.starts_after
        num_comps, num_comms = len(kinds), len(candidates)
        comp_starts, comp_ends = [0.0], list[float]()
        comm_starts, comm_ends = list[float](), list[float]()
        now, comp, comm, comp_left, comm_left = 0.0, 0, 0, 1.0, 1.0
        held_comp, held_left = -1, 0.0
        while comp < num_comps or comm < num_comms:
            is_issued = comm < num_comms and starts_after[comm] <= comp
            if is_issued and len(comm_starts) == comm:
                comm_starts.append(now)
                if self._may_wait and comp < num_comps:
                    held_comp, held_left = comp, self._left_before(candidates[comm], kinds[comp], comp_left)
            waits = is_issued and held_comp == comp and comp_left > held_left
            if waits or not is_issued:
                until_left = held_left if waits else 0.0
                now += (comp_left - until_left) * alone_s[comp]
                comp_left = until_left
                comp_ends_now, comm_ends_now = comp_left == 0.0, False
            elif comp == num_comps:
                now += comm_left * candidates[comm].alone_s
                comp_ends_now, comm_ends_now = False, True
            else:
                candidate, kind = candidates[comm], kinds[comp]
                whole_comp_s, whole_comm_s = candidate.beside[kind] or self._pair(candidate, kind)
                to_comp_s, to_comm_s = comp_left * whole_comp_s, comm_left * whole_comm_s
                comp_ends_now, comm_ends_now = to_comp_s <= to_comm_s, to_comm_s <= to_comp_s
                if comp_ends_now:
                    now += to_comp_s
                    comm_left = max(0.0, comm_left - to_comp_s / whole_comm_s)
                else:
                    now += to_comm_s
                    comp_left = max(0.0, comp_left - to_comm_s / whole_comp_s)
            if comp_ends_now:
                comp_ends.append(now)
                comp, comp_left = comp + 1, 1.0
                if comp < num_comps:
                    comp_starts.append(now)
            if comm_ends_now:
                comm_ends.append(now)
                comm, comm_left = comm + 1, 1.0
        return _Run(comp_starts, comp_ends, comm_starts, comm_ends)
