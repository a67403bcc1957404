"""The nccl backend on rank 0: what may be tried, and one measurement at a time on all ranks.

A command can fail on one rank only (a table that its plug-in refuses); all ranks then say so before anyone runs on,
because collectives that some ranks never make hang.

What rank 0 tells the other ranks: one JSON object, strictly typed, never pickled.
"""

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.nccl.cuda_device import CudaDevice
from lagom_overlap.backends.nccl.launched import RankPlace
from lagom_overlap.backends.nccl.session import NcclSession, PluginFiles
from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.engines.messages import GroupMessage, Measured, Wrong
from lagom_overlap.errors import BackendError, LagomError, SpaceError, WrongResultError
from lagom_overlap.nccl_plugin.capability import BoxMaps
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.nccl_plugin.loaded import loaded_nccl
from lagom_overlap.nccl_plugin.record_log import Flag, RecordedDecision
from lagom_overlap.nccl_plugin.space import tuner_space
from lagom_overlap.nccl_plugin.table_layout import KINDS as TUNER_KINDS
from lagom_overlap.timeline import Timeline
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome, corners
from lagom_overlap.workload import CommOp, OverlapGroup


class MeasureNccl(msgspec.Struct, frozen=True, tag="measure", forbid_unknown_fields=True):
    """Run the group `repeats` times under the assignment."""

    group: GroupMessage
    assignment: tuple[CommConfig, ...]
    repeats: int


class StopNccl(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """End."""


Command = MeasureNccl | StopNccl
_DECODER: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode(command: Command) -> bytes:
    """The command as bytes."""
    return msgspec.json.encode(command)


def decode(data: bytes) -> Command:
    """The command in some bytes.

    Raises:
        BackendError: if it is none.
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, LagomError, ValueError) as error:
        raise BackendError(f"rank 0 sent what is no command: {error}") from None


class NcclBackend:
    """Implements `Backend`; the other ranks follow by `follow`."""

    def __init__(self, request: BackendRequest, session: NcclSession, *, num_ranks: int, description: str) -> None:
        self._request = request
        self._num_ranks = num_ranks
        self._session = session
        self._maps = BoxMaps.here(loaded_nccl())
        self._is_closed = False
        self._spaces: dict[OverlapGroup, tuple[ConfigSpace, ...]] = {}
        self.description = f"{description}, {num_ranks} ranks"

    @property
    def notes(self) -> tuple[str, ...]:
        """What belongs with the figures."""
        return (
            "Measured on one overlap at a time; the job's other kernels, its framework and its network's other users "
            "are not there.",
        )

    @property
    def arm_words(self) -> Mapping[str, str]:
        """The verdict's contenders in words."""
        return MappingProxyType({"default": "NCCL's own choice"})

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`; the group runs once untouched, to learn what NCCL offers. Baselines: the space's corners.

        Raises:
            BackendError: if the group cannot be run, or NCCL has not loaded the plug-in.
            SpaceError: if the job's limits are not within what NCCL offers.
        """
        for comm in group.comms:
            if comm.collective.num_ranks != self._num_ranks:
                raise BackendError(
                    f"group {group.name!r}: {comm.name!r} runs over {comm.collective.num_ranks} ranks, "
                    f"but the launcher started {self._num_ranks}"
                )
        if group not in self._spaces:
            untouched = (CommConfig(),) * len(group.comms)
            outcome, decisions = self._command(group, untouched, repeats=1)
            if isinstance(outcome, Failure):
                raise BackendError(f"group {group.name!r} cannot run untouched: {outcome.reason}")
            version = self._session.tuner_version
            if version is None:
                raise BackendError(
                    "NCCL did not load the tuner plug-in: is NCCL_TUNER_PLUGIN overridden, or NCCL older than 2.21?"
                )
            self._spaces[group] = tuple(self._space(op, decisions, version) for op in group.comms)
        spaces = self._spaces[group]
        return GroupProblem(
            group=group,
            spaces=spaces,
            default=(CommConfig(),) * len(group.comms),
            baselines=corners([space.subspaces[0] for space in spaces]),
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """See `Backend`; a failure also where NCCL did not offer what was asked for.

        Raises:
            WrongResultError: if a collective gave wrong numbers.
            BackendError: if a rank could not follow.
        """
        if len(assignment) != len(group.comms):
            raise ValueError(f"{len(assignment)} configurations for {len(group.comms)} collectives")
        outcome, decisions = self._command(group, assignment, repeats=self._request.repeats)
        for asked in decisions:
            if Flag.MATCHED in asked.flags and Flag.APPLIED not in asked.flags:
                return Failure(f"NCCL does not offer {asked.algorithm}/{asked.protocol} for {asked.kind}")
        return outcome

    def close(self) -> None:
        """Ends the other ranks; safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._session.control.broadcast(encode(StopNccl()))
            self._session.close()

    def _command(
        self, group: OverlapGroup, assignment: Assignment, *, repeats: int
    ) -> tuple[Outcome, list[RecordedDecision]]:
        """Runs on all ranks: the outcome, and what NCCL asked this rank's plug-in meanwhile."""
        message = GroupMessage.of(group)
        self._session.decisions()
        self._session.control.broadcast(encode(MeasureNccl(message, assignment, repeats)))
        try:
            reply = self._session.measure(message.to_group(), assignment, repeats)
        except SpaceError as error:
            return Failure(str(error)), []
        if isinstance(reply, Wrong):
            comm = group.comms[reply.comm]
            raise WrongResultError(
                f"{comm.collective.kind} {comm.name!r} of {comm.collective.num_bytes} bytes gave wrong numbers on rank "
                f"{', '.join(map(str, reply.ranks))} under {assignment[reply.comm]}; nothing was timed"
            )
        return _measurement(reply), self._session.decisions()

    def _space(self, op: CommOp, decisions: list[RecordedDecision], version: int) -> ConfigSpace:
        if op.collective.kind not in TUNER_KINDS:
            return ConfigSpace((Subspace(),))
        limits = self._request.limits
        for knob, values in (("num_threads", limits.num_threads), ("transport", limits.transports)):
            if values is not None:
                raise SpaceError(f"tune.space.{knob}: no release of NCCL lets a tuner set it; leave it out")
        site = (op.collective.kind, op.collective.num_bytes)
        offers = [frozenset(d.offered_s) for d in decisions if (d.kind, d.num_bytes) == site]
        return tuner_space(
            frozenset.intersection(*offers) if offers else frozenset(),
            version,
            kind=op.collective.kind,
            capabilities=self._maps.of(num_ranks=self._num_ranks, num_nodes=self._session.num_nodes),
            algorithms=limits.algorithms,
            protocols=limits.protocols,
            num_channels=limits.num_channels,
            chunk_bytes=limits.chunk_bytes,
        )


def follow(session: NcclSession) -> None:
    """Executes rank 0's commands on another rank until it says stop.

    Raises:
        BackendError: if rank 0 sent what is no command, or a group cannot be run.
    """
    while isinstance(command := decode(session.control.broadcast(None)), MeasureNccl):
        with contextlib.suppress(SpaceError):  # raised on every rank alike; rank 0 reports it
            session.measure(command.group.to_group(), command.assignment, command.repeats)


def _measurement(reply: Measured) -> Measurement:
    timeline = Timeline(reply.spans)
    return Measurement.from_runs(
        [
            Measurement(makespan_s=run.makespan_s, comp_s=run.comp_s, comm_s=run.comm_s, timeline=timeline)
            for run in reply.runs
        ]
    )


LEAST_TIMEOUT_S: Final = 300.0
"""How long a rank waits for the others: chosen well above the minute that NCCL's first collective may take on many
nodes; only a hang is noticed later."""


def lead(launched: RankPlace, request: BackendRequest) -> NcclBackend:
    """Rank 0's backend.

    Raises:
        BackendError: if this rank has no GPU, or the ranks do not meet.
        MissingDependencyError: if this installation lacks the plug-in.
    """
    device = CudaDevice(launched.local_rank)
    session = _session(device, launched, max(request.timeout_s, LEAST_TIMEOUT_S))
    return NcclBackend(request, session, num_ranks=launched.num_ranks, description=device.description)


def follow_rank_0(launched: RankPlace) -> None:
    """The life of another rank.

    Raises:
        BackendError: if this rank has no GPU, or the ranks do not meet.
        MissingDependencyError: if this installation lacks the plug-in.
    """
    session = _session(CudaDevice(launched.local_rank), launched, LEAST_TIMEOUT_S)
    follow(session)
    session.close()


def _session(device: CudaDevice, launched: RankPlace, timeout_s: float) -> NcclSession:
    library = installed_library()
    folder = Path(tempfile.mkdtemp(prefix=f"lagom-nccl-{launched.rank}-"))
    atexit.register(_remove, folder, os.getpid())
    files = PluginFiles(library=library, record=folder / "record.bin")
    return NcclSession(device, files, rank=launched.rank, num_ranks=launched.num_ranks, timeout_s=timeout_s)


def _remove(folder: Path, pid: int) -> None:
    """At exit, but not of a forked child: the folder is its parent's."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
