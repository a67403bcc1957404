"""What a controller and its rank processes say to each other: one JSON object a line, strictly typed, never pickled.

Needs no torch. The controller speaks to rank 0, which passes each command on to the other ranks; only rank 0 answers.
"""

from typing import Final

import msgspec

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.engines.fx.commands import (
    PlanRun,
    Profiled,
    ProfileProgram,
    Refused,
    RunPlan,
    RunSettings,
    Traced,
    TraceSteps,
)
from lagom_overlap.errors import BackendError, LagomError
from lagom_overlap.timeline import Span
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Kernel, MemoryBound, OverlapGroup, Work

PEER_LOST: Final = 75
"""Exit code of a rank that ended because another one, or the controller, did (EX_TEMPFAIL): not the one to blame."""


class GemmWork(msgspec.Struct, frozen=True, tag="gemm", forbid_unknown_fields=True):
    """A matrix product on its way to the ranks."""

    work: Gemm


class AttentionWork(msgspec.Struct, frozen=True, tag="attention", forbid_unknown_fields=True):
    """An attention on its way to the ranks."""

    work: Attention


class MemoryBoundWork(msgspec.Struct, frozen=True, tag="memory_bound", forbid_unknown_fields=True):
    """An elementwise operator on its way to the ranks."""

    work: MemoryBound


class StepMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One computation of a group."""

    name: str
    work: GemmWork | AttentionWork | MemoryBoundWork


class CallMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One collective of a group; where it comes from in a model stays with the controller."""

    name: str
    collective: Collective
    communicator: str


class GroupMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An overlap group by what has to be run; how often it occurs stays with the controller."""

    name: str
    steps: tuple[StepMessage, ...]
    calls: tuple[CallMessage, ...]
    starts_after: tuple[int, ...]

    @classmethod
    def of(cls, group: OverlapGroup) -> "GroupMessage":
        """The message of a group.

        Raises:
            BackendError: if it holds a `Kernel`.
        """
        steps = tuple(StepMessage(op.name, _work_message(group.name, op.name, op.work)) for op in group.computations)
        calls = tuple(CallMessage(comm.name, comm.collective, comm.communicator) for comm in group.comms)
        return cls(group.name, steps, calls, group.starts_after)

    def to_group(self) -> OverlapGroup:
        """The group again."""
        return OverlapGroup(
            name=self.name,
            computations=tuple(CompOp(name=step.name, work=step.work.work) for step in self.steps),
            comms=tuple(CommOp(name=c.name, collective=c.collective, communicator=c.communicator) for c in self.calls),
            starts_after=self.starts_after,
        )


def _work_message(group: str, name: str, work: Work) -> GemmWork | AttentionWork | MemoryBoundWork:
    match work:
        case Gemm():
            return GemmWork(work)
        case Attention():
            return AttentionWork(work)
        case MemoryBound():
            return MemoryBoundWork(work)
        case Kernel():
            raise BackendError(
                f"group {group!r}: computation {name!r} is a kernel given by blocks and wave time, which says how long "
                "it takes and not what to compute; on gloo give gemm, attention or memory_bound"
            )


class Join(msgspec.Struct, frozen=True, tag="join", forbid_unknown_fields=True):
    """Where the ranks meet: the port of rank 0's store on this machine. Sent to each rank but 0."""

    port: int


class Measure(msgspec.Struct, frozen=True, tag="measure", forbid_unknown_fields=True):
    """Run the group `repeats` times under the assignment, after checking what has not been checked yet."""

    group: GroupMessage
    assignment: tuple[CommConfig, ...]
    repeats: int


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True):
    """End every rank."""


Command = Join | Measure | ProfileProgram | RunPlan | TraceSteps | RunSettings | Stop


class Listening(msgspec.Struct, frozen=True, tag="listening", forbid_unknown_fields=True):
    """Rank 0's store is up on this port."""

    port: int


class Ready(msgspec.Struct, frozen=True, tag="ready", forbid_unknown_fields=True):
    """All ranks have met; `torch_version` is rank 0's, `cores` the core of each rank, -1 where it is not pinned."""

    torch_version: str
    cores: tuple[int, ...]


class RunTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: each time is the maximum over ranks, in seconds."""

    makespan_s: float
    comp_s: float
    comm_s: tuple[float, ...]


class Measured(msgspec.Struct, frozen=True, tag="measured", forbid_unknown_fields=True):
    """The runs of a command, and rank 0's spans of the last one."""

    runs: tuple[RunTimes, ...]
    spans: tuple[Span, ...]


class Wrong(msgspec.Struct, frozen=True, tag="wrong", forbid_unknown_fields=True):
    """A collective gave wrong numbers on these ranks; nothing was timed."""

    comm: int
    ranks: tuple[int, ...]


Reply = Listening | Ready | Measured | Wrong | Profiled | PlanRun | Traced | Refused

_ENCODER = msgspec.json.Encoder()
_COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode(message: Command | Reply) -> bytes:
    """The message as one line."""
    return _ENCODER.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """The command on a line.

    Raises:
        ValueError: if it is none, or holds an impossible value.
    """
    try:
        return _COMMANDS.decode(line)
    except (msgspec.MsgspecError, LagomError) as error:
        raise ValueError(f"not a command: {error}") from error


def decode_reply(line: bytes) -> Reply:
    """The reply on a line.

    Raises:
        ValueError: if it is none, or holds an impossible value.
    """
    try:
        return _REPLIES.decode(line)
    except (msgspec.MsgspecError, LagomError) as error:
        raise ValueError(f"not a reply: {error}") from error
