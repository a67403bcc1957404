"""The backend of rank processes: what may be tried, and one measurement at a time on them."""

import logging
from types import MappingProxyType

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.gloo.footprint import check_memory
from lagom_overlap.backends.gloo.launched import launched_local_num_ranks, launched_num_ranks
from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.backends.gloo.ranks import RankProcesses
from lagom_overlap.backends.gloo.terms import GLOO, EngineLimits
from lagom_overlap.backends.gloo.torch_extra import require_torch
from lagom_overlap.engines.messages import GroupMessage, Measure, Measured, Wrong
from lagom_overlap.errors import BackendError, SpaceError, WrongResultError
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.workload import OverlapGroup

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
                f", EMULATED link of {request.link_bytes_per_s:g} bytes/s per direction (one token bucket of "
                f"{request.num_ranks} times that for all ranks; bandwidth only, no latency)"
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
