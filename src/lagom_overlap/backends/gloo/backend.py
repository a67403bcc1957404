"""The backend of rank processes: what may be tried, and one measurement at a time on them.

The memory that groups take on all ranks of this machine is checked before any rank allocates it. A rank keeps what it
prepared for every group that it has run and shares it between groups: equal computations, and the k-th collective of a
kind, size and number of ranks in one group with the k-th such collective in another.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.gloo.launched import launched_local_num_ranks, launched_num_ranks
from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.backends.gloo.ranks import RankProcesses
from lagom_overlap.backends.gloo.terms import GLOO, EngineLimits
from lagom_overlap.backends.gloo.torch_extra import require_torch
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.engines.messages import GroupMessage, Measure, Measured, Wrong
from lagom_overlap.errors import BackendError, SpaceError, WrongResultError
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.units import GBIT_PER_S, KIB, format_bytes
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound, OverlapGroup, Work

_MEMINFO: Final = Path("/proc/meminfo")
_MAX_NAMES: Final = 4
"""Groups that a message names; the rest is counted."""


def _buffer_bytes(collective: Collective) -> int:
    """Source and target; an all-reduce has one for both."""
    match collective.kind:
        case CollectiveKind.ALL_REDUCE:
            return collective.num_bytes
        case CollectiveKind.ALL_TO_ALL:
            return 2 * collective.num_bytes
        case _:
            return collective.num_bytes + collective.num_bytes // collective.num_ranks


def _check_bytes(collective: Collective) -> int:
    """A pattern and an expected target, while the answer is checked."""
    return _buffer_bytes(collective) * (2 if collective.kind is CollectiveKind.ALL_REDUCE else 1)


def _work_bytes(work: Work) -> int:
    match work:
        case Gemm():
            return ELEMENT_BYTES * (work.m * work.k + work.k * work.n + work.m * work.n)
        case Attention():
            return ELEMENT_BYTES * 4 * work.batch * work.num_heads * work.seq_len * work.head_dim
        case MemoryBound():
            return work.num_bytes
        case Kernel():
            return 0


def kept_bytes(groups: Collection[OverlapGroup]) -> int:
    """What one rank keeps once it has run all of these groups."""
    slots: Counter[Collective] = Counter()
    for group in groups:
        slots |= Counter(comm.collective for comm in group.comms)
    works = {op.work for group in groups for op in group.computations}
    buffers = sum(count * _buffer_bytes(collective) for collective, count in slots.items())
    return buffers + sum(_work_bytes(work) for work in works)


def rank_bytes(groups: Collection[OverlapGroup]) -> int:
    """The most that one rank holds at a time: what it keeps, and the check of its largest collective."""
    checks = (_check_bytes(comm.collective) for group in groups for comm in group.comms)
    return kept_bytes(groups) + max(checks, default=0)


def check_memory(groups: Sequence[OverlapGroup], num_ranks: int, held: Collection[OverlapGroup] = ()) -> None:
    """Refuses groups that cannot fit side by side; the ranks have run the groups `held`, whose memory is taken already.

    Raises:
        BackendError: if they need more than the machine has available; it names the last group alone if that alone
            does not fit.
    """
    available = _available_bytes()
    if available is None:
        return
    free = available + num_ranks * kept_bytes(held)
    for subset in (groups[-1:], groups):
        needed = num_ranks * rank_bytes(subset)
        if needed > free:
            raise BackendError(
                f"{_named(subset)} {format_bytes(needed)} ({needed} bytes) for {num_ranks} ranks, "
                f"this machine has {format_bytes(free)} ({free} bytes) of memory free for that"
            )


def _named(groups: Sequence[OverlapGroup]) -> str:
    names = [repr(group.name) for group in groups]
    if len(names) == 1:
        return f"group {names[0]} needs"
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    return f"the ranks keep the buffers of every group: groups {shown} together need"


def _available_bytes() -> int | None:
    """The kernel's estimate; None where it does not say."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * KIB if "MemAvailable" in fields else None


_log = logging.getLogger(__name__)


class RankBackend:
    """Implements `Backend` on rank processes; `description` says in one line what the times were measured on."""

    def __init__(self, request: BackendRequest, terms: EngineLimits = GLOO) -> None:
        """Starts the ranks.

        Raises:
            BackendError: if the launcher's world or the machine does not fit the request.
            RankError: if a rank ends, or the ranks do not meet.
        """
        launched = launched_num_ranks()
        if launched is not None and launched != request.num_ranks:
            raise BackendError(
                f"the launcher started {launched} ranks (WORLD_SIZE), but the job names {request.num_ranks}; start as "
                "many as the job names, or start lagom without a launcher and it starts them itself"
            )
        if request.num_ranks < 2:
            raise BackendError(f"the job names {request.num_ranks} ranks, {terms.name} needs at least 2")
        if launched is not None and request.link_bytes_per_s is not None:
            raise BackendError(
                "job.link: a link can be emulated only between ranks that lagom starts itself, not under torchrun"
            )
        self._request = request
        self._terms = terms
        self._link: EmulatedLink | None = None
        self._group_messages: dict[OverlapGroup, GroupMessage] = {}
        self._asked_for: dict[OverlapGroup, None] = {}
        try:
            if request.link_bytes_per_s is not None:
                self._link = EmulatedLink(request.link_bytes_per_s, request.num_ranks)
            prefix = self._link.prefix if self._link else ()
            self._ranks = RankProcesses(
                request.num_ranks, engine=terms.name, prefix=prefix, joined=launched is not None
            )
        except BaseException:
            if self._link:
                self._link.close()
            raise
        self.description = self._describe(joined=launched is not None)
        _log.info("%s", self.description)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks that this process started, by rank; empty after `close`."""
        return self._ranks.pids

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`; default and baselines are the engine's (`EngineLimits`).

        Raises:
            BackendError: if the engine cannot run the group, or there is no memory for it after the groups before it.
            SpaceError: if the job's limits are not within what the engine offers.
        """
        GroupMessage.of(group)
        for comm in group.comms:
            if comm.collective.num_ranks != self._request.num_ranks:
                raise BackendError(
                    f"group {group.name!r}: {comm.name!r} runs over {comm.collective.num_ranks} ranks, "
                    f"but the job starts {self._request.num_ranks}"
                )
        terms = self._terms
        spaces = tuple(terms.space_within(comm.collective, self._request.limits) for comm in group.comms)
        self._check_memory(group)
        offered = [terms.baselines(comm.collective, space) for comm, space in zip(group.comms, spaces, strict=True)]
        return GroupProblem(
            group=group,
            spaces=spaces,
            default=(terms.default,) * len(group.comms),
            baselines=MappingProxyType({name: tuple(of_comm[name] for of_comm in offered) for name in offered[0]}),
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """See `Backend`.

        Each collective's answer is checked once per configuration before it is timed; a new assignment runs once
        untimed. The timeline is rank 0's, so its makespan may be a little below the maximum over ranks.

        Raises:
            WrongResultError: if a collective gave wrong numbers.
            RankError: if a rank ended, or the measurement took longer than the job allows.
        """
        if len(assignment) != len(group.comms):
            raise ValueError(f"{len(assignment)} configurations for {len(group.comms)} collectives")
        for comm, config in zip(group.comms, assignment, strict=True):
            self._terms.check_collective(comm.collective)
            try:
                self._terms.check_config(config)
            except SpaceError as error:
                return Failure(f"{comm.name}: {error}")
        message = self._group_messages.get(group)
        if message is None:
            self._check_memory(group)
            message = self._group_messages[group] = GroupMessage.of(group)
        what = f"measuring group {group.name!r}"
        command = Measure(message, assignment, self._request.repeats)
        reply = self._ranks.exchange(command, what, self._request.timeout_s)
        match reply:
            case Measured():
                return _measurement(reply)
            case Wrong():
                self.close()
                comm = group.comms[reply.comm]
                raise WrongResultError(
                    f"{comm.collective.kind} {comm.name!r} of {comm.collective.num_bytes} bytes gave wrong numbers on "
                    f"rank {', '.join(map(str, reply.ranks))} under {assignment[reply.comm]}; nothing was timed"
                )
            case _:
                self.close()
                raise BackendError(f"rank 0 said {reply} while {what}")

    def close(self) -> None:
        """See `Backend`."""
        self._ranks.close()
        if self._link:
            self._link.close()

    def _check_memory(self, group: OverlapGroup) -> None:
        """Counts a group as one of those that the ranks will hold, if they can hold them all."""
        groups = {**self._asked_for, group: None}
        num_ranks = launched_local_num_ranks() or self._request.num_ranks
        check_memory(tuple(groups), num_ranks, held=self._group_messages)
        self._asked_for = groups

    def _describe(self, *, joined: bool) -> str:
        ready, request = self._ranks.ready, self._request
        pinned = "not pinned (fewer cores than ranks)"
        if min(ready.cores) >= 0:
            pinned = f"pinned to cores {', '.join(map(str, ready.cores))}"
        started = "started by a launcher" if joined else "on this machine"
        link = ""
        if request.link_bytes_per_s is not None:
            link = (
                f", EMULATED link of {request.link_bytes_per_s / GBIT_PER_S:g} Gbit/s per direction (one token bucket "
                f"of {request.num_ranks} times that for all ranks; bandwidth only, no latency)"
            )
        return f"{self._terms.name} (torch {ready.torch_version}), {request.num_ranks} ranks {started}, {pinned}{link}"


def _measurement(reply: Measured) -> Measurement:
    timeline = Timeline(reply.spans)
    runs = [
        Measurement(makespan_s=run.makespan_s, comp_s=run.comp_s, comm_s=run.comm_s, timeline=timeline)
        for run in reply.runs
    ]
    return Measurement.from_runs(runs)


def open_backend(request: BackendRequest) -> RankBackend:
    """The gloo backend of a job; the entry point.

    Raises:
        MissingDependencyError: if torch is not installed.
        BackendError: if the machine or the launcher does not fit.
    """
    require_torch()
    return RankBackend(request)
