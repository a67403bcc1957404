"""One overlap group: a stream of computations and one of collectives, a view on the event simulation (`core.py`).

Both streams start together; collective j waits for its predecessor and for `starts_after[j]` computations. The rates of
the pair that runs are those of Eq. 4, time-weighted. The result is a pure function of group, assignment and model: the
same call gives the same bits.

A launch says what persistent products leave free, and who gets SMs first (`share_before_collective`). Untouched, a
collective has its SMs as soon as it is issued: it is enqueued first, on a stream of high priority. Where it comes
behind a kernel, that kernel runs alone for a share of it, which counts into the collective's time.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
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
from lagom_overlap.cost.lagom_equations import eq1_makespan
from lagom_overlap.errors import SpaceError
from lagom_overlap.sim.core import EventGraph, Holds
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import Kernel, OverlapGroup


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """Z, Y and the x_j of a group, in seconds: end of the last operator, summed computation, each collective."""

    makespan_s: float
    comp_s: float
    comm_s: tuple[float, ...]


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
        place = {kernel: -1 - index for index, kernel in enumerate(self._kernels)}
        self._comp_kinds: Final = array("i", [place[kernel] for kernel in kernels])
        alone = [model.running_times([kernel], []).kernel_s[0] for kernel in self._kernels]
        self._comp_alone_s: Final = sum(alone[-1 - kind] for kind in self._comp_kinds)
        self._collectives: Final = tuple(op.collective for op in group.comms)
        self._kinds: dict[Collective, dict[CommConfig, int]] = {c: {} for c in self._collectives}
        self._tables: Final = [self._kinds[c] for c in self._collectives]
        self._costs: list[CollectiveCost] = []
        self._holds: Final = Holds(len(self._kernels)) if self._may_wait else None
        self._graph: Final = EventGraph(_waits(group), self._set_times)

    @property
    def comp_alone_s(self) -> float:
        """The computations without concurrent communication."""
        return self._comp_alone_s

    def evaluate(self, assignment: Sequence[CommConfig]) -> GroupTimes:
        """The group's times under one configuration per collective; None knobs are the model's default.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if the number of configurations is not that of the collectives.
        """
        starts, ends = self.run(assignment)
        comm_ends = ends[: len(self._tables)]
        return GroupTimes(
            makespan_s=eq1_makespan(ends[-1], comm_ends[-1]),
            comp_s=ends[-1],
            comm_s=tuple([end - start for start, end in zip(starts, comm_ends, strict=False)]),
        )

    def timeline(self, assignment: Sequence[CommConfig]) -> Timeline:
        """The spans behind `evaluate`, from the same events.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if the number of configurations is not that of the collectives.
        """
        starts, ends = self.run(assignment)
        num_comms = len(self._tables)
        comms = zip(self._group.comms, starts[:num_comms], ends[:num_comms], strict=True)
        comps = zip(self._group.computations, starts[num_comms:], ends[num_comms:], strict=True)
        return Timeline(
            tuple(
                Span(name=op.name, kind=kind, stream=op.stream, start_s=start, end_s=end)
                for kind, rows in ((SpanKind.COMP, comps), (SpanKind.COMM, comms))
                for op, start, end in rows
            )
        )

    def run(self, assignment: Sequence[CommConfig]) -> tuple["array[float]", "array[float]"]:
        """Start and end (s) of every operator: the collectives, then the computations.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if the number of configurations is not that of the collectives.
        """
        if len(assignment) != len(self._tables):
            raise ValueError(f"{len(assignment)} configurations for {len(self._tables)} collectives")
        kinds = [table.get(config, -1) for table, config in zip(self._tables, assignment, strict=True)]
        if -1 in kinds:
            kinds = [self._kind(place, config) for place, config in enumerate(assignment)]
        return self._graph.run(array("i", kinds) + self._comp_kinds, self._holds)

    def _kind(self, place: int, config: CommConfig) -> int:
        kind = self._tables[place].get(config)
        if kind is None:
            try:
                cost = self._model.collective(self._collectives[place], config)
            except SpaceError as error:
                raise SpaceError(f"{self._group.comms[place].name}: {error}") from error
            self._costs.append(cost)
            if self._holds is not None:
                self._holds.add_comm([self._left_behind(cost, kernel) for kernel in self._kernels])
            kind = self._tables[place][config] = len(self._costs) - 1
        return kind

    def _left_behind(self, cost: CollectiveCost, kernel: Kernel) -> tuple[float, float]:
        """What is left of a kernel when a collective issued with it, or while it runs, holds its SMs."""
        if kernel.blocks_per_sm >= self._model.profile.small_block_count:
            return 1.0, 1.0
        num_sms = self._model.cluster.gpu.num_sms
        num_channels = min(cost.num_channels, num_sms - 1)
        share = share_before_collective(kernel, num_channels, num_sms=num_sms, priority=self._priority)
        left = 1.0 - share
        return left if self._is_behind else 1.0, left if self._priority is StreamPriority.NORMAL else 1.0

    def _set_times(self, kinds: tuple[int, ...]) -> tuple[float, ...]:
        times = self._model.running_times(
            [self._kernels[-1 - kind] for kind in kinds if kind < 0],
            [self._costs[kind] for kind in kinds if kind >= 0],
        )
        return *times.comm_s, *times.kernel_s


def _waits(group: OverlapGroup) -> list[list[int]]:
    """Who waits for whom: the collectives (each for the one before and the computations ahead), the computations."""
    num_comms = len(group.comms)
    comms = [
        [*([number - 1] if number else []), *([num_comms + after - 1] if after else [])]
        for number, after in enumerate(group.starts_after)
    ]
    return [*comms, *([num_comms + number - 1] if number else [] for number in range(len(group.computations)))]


def share_before_collective(kernel: Kernel, num_channels: int, *, num_sms: int, priority: StreamPriority) -> float:
    """The share of a kernel that passes before a collective launched behind it holds all its SMs.

    Blocks are dispatched kernel by kernel, and a block that runs is never taken off its SM. With mu blocks on lambda
    SMs of TB each, alone, a kernel runs g = ceil(mu / (lambda TB)) waves; only the last one may leave SMs free. A
    collective of NC channels that comes behind it gets them

        at once                          if one wave leaves NC SMs free (a persistent kernel with a carve-out of NC)
        after the first wave             on a stream of high priority: freed SMs go to it before the kernel's next
                                         blocks
        when the last wave is dispatched on one of normal priority, if that wave leaves NC SMs free, else at the end

    so behind a persistent kernel without a carve-out (g = 1) it waits for the whole kernel. Source: Amert et al., "GPU
    Scheduling on the NVIDIA TX2: Hidden Details Revealed" (RTSS 2017): a kernel keeps its place in the queue until all
    its blocks are dispatched, and higher priorities go first. That is observed behaviour of one GPU, promised by
    nobody.

    Departure: waves are as long as each other, so a share of the waves is a share of the kernel.
    """
    capacity = num_sms * kernel.blocks_per_sm
    num_blocks = kernel.num_blocks if kernel.grid is None else kernel.grid
    num_full = floor(num_blocks / capacity)
    rest = num_blocks - num_full * capacity
    free_at_last = num_sms - ceil(rest / kernel.blocks_per_sm) if rest else 0
    num_waves = num_full + (rest > 0)
    if num_full == 0 and free_at_last >= num_channels:
        return 0.0
    if priority is StreamPriority.HIGH:
        return 1.0 / num_waves
    return num_full / num_waves if free_at_last >= num_channels else 1.0
